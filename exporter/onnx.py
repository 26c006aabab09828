"""Torch target -> ``target.onnx`` with its weights in one external file.

Inputs and outputs are those of :mod:`specexport.runtime.contract`. The module is exported with meta parameters (shapes
without data), so tracing costs no memory; weights then stream from the checkpoint into the data file one tensor at a
time.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes
from torch import Tensor

from specexport.exporter.config import TargetConfig
from specexport.exporter.layers import Capture, Target
from specexport.exporter.models import ARCHITECTURES
from specexport.exporter.models.rules import bind
from specexport.exporter.ops import TRANSLATIONS
from specexport.exporter.rope import rope_tables
from specexport.exporter.weights import WeightSource
from specexport.runtime import contract
from specexport.runtime.errors import SpecExportError

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
IR_DTYPES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
_OF_TORCH = {dtype: IR_DTYPES[name] for name, dtype in DTYPES.items()}

#: Tensors below this stay inside the graph file: a page of padding each would cost more than it saves.
INLINE_BYTES = 4096
#: Offsets in the data file are multiples of a page so that runtimes can map tensors instead of copying them.
ALIGNMENT = 4096
#: Bytes up to which constants are folded: the column index of the masks has one entry a cache slot.
_FOLD_LIMIT = 1 << 26

#: Called with the number of bytes written since the last call.
Advance = Callable[[int], None]


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's notes on missing torchvision and deprecated pytree internals; errors still raise."""
    names = ("torch.onnx._internal.exporter._registration", "torch.onnx._internal.exporter._core", "onnx_ir")
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _example(config: TargetConfig, slots: int, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], tuple[object, ...]]:
    """Meta inputs and their dynamic dimensions, in contract order."""
    nodes, accepted, wanted = 5, 3, 4  # distinct, so that no two symbols are taken for one

    def ints(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int64, device="meta")

    dims = {
        name: torch.export.Dim(name)
        for name in (contract.NODES_DIM, contract.COMMIT_DIM, contract.ORDER_DIM, contract.SELECT_DIM)
    }
    t, a, o, r = dims.values()
    inputs: dict[str, tuple[Tensor, dict[int, object]]] = {
        contract.TOKENS: (ints(1, nodes), {1: t}),
        contract.POSITIONS: (ints(1, nodes), {1: t}),
        contract.TREE: (torch.zeros(1, nodes, nodes, dtype=torch.bool, device="meta"), {1: t, 2: t}),
        contract.PAST: (ints(1), {}),
        contract.WRITE: (ints(1), {}),
        contract.COMMIT: (ints(accepted), {0: a}),
        contract.ORDER: (ints(accepted + nodes), {0: o}),
        contract.SELECT: (ints(wanted), {0: r}),
    }
    # One tensor object each: torch.export would merge inputs that are the same object.
    caches = [
        torch.zeros(1, config.num_kv_heads, slots, config.head_dim, dtype=dtype, device="meta")
        for _ in range(2 * config.num_layers)
    ]
    values = [inputs[name] for name in contract.STEP_INPUTS]
    return (*(tensor for tensor, _ in values), *caches), (*(dim for _, dim in values), tuple({} for _ in caches))


def export_target(
    config: TargetConfig, slots: int, dtype: torch.dtype, captures: tuple[Capture, ...] = ()
) -> tuple[ir.Model, Target]:
    """The target graph, weights still missing, and the meta module whose state names them.

    Args:
        slots: S, rows of every cache.
        captures: see :data:`specexport.exporter.layers.Capture`.
    """
    with torch.device("meta"):
        target = Target(config, slots, dtype, captures).eval()
    args, shapes = _example(config, slots, dtype)
    caches = contract.cache_names(config.num_layers)
    outputs = [contract.LOGITS, *([contract.FEATURES] if captures else []), *(present for _, present in caches)]
    with _quiet():
        program = torch.onnx.export(
            target,
            args,
            dynamo=True,
            opset_version=contract.OPSET,
            optimize=False,
            verbose=False,
            dynamic_shapes=shapes,
            input_names=[*contract.STEP_INPUTS, *(past for past, _ in caches)],
            output_names=outputs,
            custom_translation_table=TRANSLATIONS,
        )
        if program is None:
            raise SpecExportError("torch.onnx.export returned no program")
        model: ir.Model = program.model
        _clean(model, set(target.state_dict()))
    return model, target


def _clean(model: ir.Model, weights: set[str]) -> None:
    """Fold and tidy the graph without touching weights; drop traces of the machine that exported it.

    The passes are those of ``onnxscript.optimizer.optimize_ir`` without its rewrite rules, which match nothing here
    that runtimes do not fuse themselves and take longer than the export.
    """
    from onnxscript import optimizer

    for name in weights & set(model.graph.initializers):
        model.graph.initializers[name].const_value = None  # meta data: nothing to fold
    passes.InlinePass()(model)
    optimizer.fold_constants_ir(
        model, onnx_shape_inference=True, input_size_limit=_FOLD_LIMIT, output_size_limit=_FOLD_LIMIT
    )
    ir.passes.Sequential(
        passes.RemoveUnusedNodesPass(),
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.IdentityEliminationPass(),
        passes.RemoveUnusedNodesPass(),
        passes.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        passes.RemoveUnusedOpsetsPass(),
        passes.OutputFixPass(),
        passes.NameFixPass(),
    )(model)
    model.producer_name, model.producer_version = "specexport", None
    model.graph.name = "target"
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
    for value in [*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()


class DataFile:
    """The external data file: tensors appended at aligned offsets as they come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb")
        self._end = 0

    def __enter__(self) -> DataFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def append(self, name: str, tensor: Tensor) -> ir.ExternalTensor:
        """Write one tensor and return the reference to it."""
        data = _bytes(tensor)
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        self._file.seek(offset)
        self._file.write(data)
        self._end = offset + data.nbytes
        return ir.ExternalTensor(
            self.path.name,
            offset,
            data.nbytes,
            _OF_TORCH[tensor.dtype],
            shape=ir.Shape(tuple(tensor.shape)),
            name=name,
            base_dir=os.fspath(self.path.parent),
        )


def _bytes(tensor: Tensor) -> memoryview:
    flat: np.ndarray[Any, Any] = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat.data


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The tensor as numpy sees it; bfloat16 through ml_dtypes, which numpy itself lacks."""
    if tensor.dtype != torch.bfloat16:
        return tensor.contiguous().numpy()
    import ml_dtypes

    return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def _values(target: Target, weights: WeightSource) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    """(name, reader) of every parameter and rope table; names and shapes are checked before the first is read."""
    config = target.config
    for binding in bind(dict(target.named_parameters()), weights, config, ARCHITECTURES[config.architecture]):
        yield binding.parameter, partial(binding.read, weights, config)
    for index, rope in enumerate(config.ropes):
        for name, table in zip(("cos", "sin"), rope_tables(rope, target.slots), strict=True):
            yield f"rope_{name}_{index}", partial(torch.from_numpy(table).to, target.dtype)


def target_bytes(target: Target) -> int:
    """Bytes of all weights and tables, for progress bars and size estimates."""
    return sum(t.numel() * t.element_size() for t in target.state_dict().values())


def save_target(
    model: ir.Model, target: Target, weights: WeightSource, path: Path, advance: Advance = lambda _: None
) -> list[Path]:
    """Write ``path`` and its data file ``path`` + ``.data``; returns both.

    Peak memory is one tensor (twice, while it is transposed), whatever the size of the model.

    Raises:
        CheckpointError: the checkpoint's tensors do not fit the config.
    """
    data_path = path.with_name(path.name + ".data")
    with DataFile(data_path) as data:
        for name, read in _values(target, weights):
            tensor = read()
            value = model.graph.initializers.get(name)
            if value is None:
                raise SpecExportError(f"the exported graph does not use {name!r}: this is a fault of the exporter")
            if tensor.numel() * tensor.element_size() < INLINE_BYTES:
                value.const_value = ir.Tensor(
                    _numpy(tensor), dtype=_OF_TORCH[tensor.dtype], shape=ir.Shape(tuple(tensor.shape)), name=name
                )
            else:
                value.const_value = data.append(name, tensor)
            advance(tensor.numel() * tensor.element_size())
            del tensor
    missing = [value.name for value in model.graph.initializers.values() if value.const_value is None]
    if missing:
        raise SpecExportError(
            f"initializers without data: {', '.join(map(str, missing))}: this is a fault of the exporter"
        )
    ir.save(model, path)
    return [path, data_path]


def load_state(target_state: Mapping[str, Tensor], pairs: Iterable[tuple[str, Callable[[], Tensor]]]) -> None:
    """Fill a materialised module in place (parity tests and training run the torch module itself)."""
    for name, read in pairs:
        target_state[name].copy_(read())


def build_module(
    config: TargetConfig, slots: int, dtype: torch.dtype, weights: WeightSource, captures: tuple[Capture, ...] = ()
) -> Target:
    """The torch target with its weights, for reference runs."""
    target = Target(config, slots, dtype, captures).eval()
    load_state(target.state_dict(), _values(target, weights))
    return target
