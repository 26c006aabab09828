"""Torch modules -> ONNX files: tracing with meta parameters, then weights streamed into one external data file.

Shared by targets (``exporter.onnx``) and drafters (``exporter.heads.export``). Tracing costs no memory because
parameters have shapes but no data; saving holds one tensor at a time.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from onnx_ir.passes import common as passes
from torch import Tensor, nn

from specexport.exporter.ops import TRANSLATIONS
from specexport.exporter.quantize import insert
from specexport.exporter.quantize.plan import FLOATS, Plan, narrow
from specexport.exporter.quantize.record import Quantized
from specexport.runtime import contract
from specexport.runtime.errors import SpecExportError

IR_DTYPES = {"fp32": ir.DataType.FLOAT, "fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
_OF_TORCH = {torch.int64: ir.DataType.INT64, **{dtype: IR_DTYPES[name] for name, dtype in FLOATS.items()}}

#: Tensors below this stay inside the graph file: a page of padding each would cost more than it saves.
INLINE_BYTES = 4096
#: Offsets in the data file are multiples of a page so that runtimes can map tensors instead of copying them.
ALIGNMENT = 4096
#: Bytes up to which constants are folded: the column index of the masks has one entry a cache slot.
_FOLD_LIMIT = 1 << 26

#: Called with the number of bytes written since the last call.
Advance = Callable[[int], object]
#: A tensor of the graph by name, read when it is written: as the graph lays it out, or quantised already.
Values = Iterable[tuple[str, Callable[[], Tensor | Quantized]]]


def trace(
    module: nn.Module,
    inputs: Mapping[str, tuple[Tensor, Mapping[int, object]]],
    outputs: Sequence[str],
    name: str,
) -> ir.Model:
    """Export a module of meta tensors; the initializers named as in its state stay without data.

    Args:
        inputs: by name in order, an example (sizes of dynamic dimensions must differ) and its dynamic dimensions.
        outputs: names in order. name: of the graph.
    """
    with _quiet():
        program = torch.onnx.export(
            module,
            tuple(example for example, _ in inputs.values()),
            dynamo=True,
            opset_version=contract.OPSET,
            optimize=False,
            verbose=False,
            # Variadic caches are one argument: their shapes go into one tuple behind the named inputs.
            dynamic_shapes=_shapes(module, [dict(dims) for _, dims in inputs.values()]),
            input_names=list(inputs),
            output_names=list(outputs),
            custom_translation_table=TRANSLATIONS,
        )
        if program is None:
            raise SpecExportError("torch.onnx.export returned no program")
        model: ir.Model = program.model
        _clean(model, set(module.state_dict()), name)
    return model


def _shapes(module: nn.Module, dims: list[dict[int, object]]) -> tuple[object, ...]:
    code = module.forward.__code__
    named = code.co_argcount - 1  # without self
    return tuple(dims) if len(dims) == named else (*dims[:named], tuple(dims[named:]))


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


def _clean(model: ir.Model, weights: set[str], name: str) -> None:
    """Fold and tidy the graph without touching weights; drop traces of the machine that exported it.

    The passes are those of ``onnxscript.optimizer.optimize_ir`` without its rewrite rules, which match nothing here
    that runtimes do not fuse themselves and take longer than the export.
    """
    from onnxscript import optimizer

    for weight in weights & set(model.graph.initializers):
        model.graph.initializers[weight].const_value = None  # meta data: nothing to fold
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
    model.graph.name = name
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

    def put(self, name: str, data: NDArray[Any], kind: ir.DataType, shape: tuple[int, ...]) -> ir.TensorProtocol:
        """Write the bytes of one tensor and return the reference to it; small ones stay in the graph file."""
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        if data.nbytes < INLINE_BYTES and kind.bitwidth >= 8:
            return ir.Tensor(data.view(kind.numpy()).reshape(shape), dtype=kind, shape=ir.Shape(shape), name=name)
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        self._file.seek(offset)
        self._file.write(data.data)
        self._end = offset + data.nbytes
        return ir.ExternalTensor(
            self.path.name,
            offset,
            data.nbytes,
            kind,
            shape=ir.Shape(shape),
            name=name,
            base_dir=os.fspath(self.path.parent),
        )

    def append(self, name: str, tensor: Tensor) -> ir.TensorProtocol:
        """:meth:`put` of a torch tensor."""
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return self.put(name, data, _OF_TORCH[tensor.dtype], tuple(tensor.shape))

    def keep(self, stored: ir.TensorProtocol | insert.Parts) -> ir.TensorProtocol | insert.Parts:
        """What is in memory, written here; references stay."""
        if isinstance(stored, insert.Parts):
            tensors = {role: self._settle(tensor) for role, tensor in stored.tensors.items()}
            return insert.Parts(tensors, stored.block)
        return self._settle(stored)

    def _settle(self, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        if isinstance(tensor, ir.ExternalTensor):
            return tensor
        data = np.frombuffer(tensor.tobytes(), np.uint8)
        return self.put(str(tensor.name), data, tensor.dtype, insert.sizes(tensor))


def save_graph(
    model: ir.Model,
    values: Values,
    path: Path,
    advance: Advance = lambda _: None,
    shared: Mapping[str, ir.TensorProtocol | insert.Parts] | None = None,
    plan: Plan | None = None,
) -> None:
    """Write ``path`` and its data file ``path`` + ``.data`` (none when nothing is large enough).

    Peak memory is a few copies of one tensor, whatever the size of the model.

    Args:
        shared: initializers that are another graph's: references into its data file beside this one stay that, what is
            in memory becomes this graph's own.
        plan: formats of the matrices; None: as they come.

    Raises:
        CheckpointError: from ``values``, the checkpoint's tensors do not fit.
    """
    data_path = path.with_name(path.name + ".data")
    initializers = model.graph.initializers
    with DataFile(data_path) as data:
        for name, stored in (shared or {}).items():
            _place(model.graph, initializers[name], data.keep(stored))
        for name, read in values:
            value = initializers.get(name)
            if value is None:
                raise SpecExportError(f"the exported graph does not use {name!r}: this is a fault of the exporter")
            size = value_bytes(value)
            matrix = _planned(value, read(), plan)
            if isinstance(matrix, Quantized):
                kind = value.dtype
                assert kind is not None
                _place(model.graph, value, insert.store(name, matrix, insert.is_operand(value), kind, data.put))
            else:
                _place(model.graph, value, data.append(name, matrix))
            advance(size)
            del matrix
    missing = [value.name for value in initializers.values() if value.const_value is None]
    if missing:
        raise SpecExportError(
            f"initializers without data: {', '.join(map(str, missing))}: this is a fault of the exporter"
        )
    if not data_path.stat().st_size:
        data_path.unlink()
    passes.RemoveUnusedNodesPass()(model)
    ir.save(model, path)


def _place(graph: ir.Graph, value: ir.Value, stored: ir.TensorProtocol | insert.Parts) -> None:
    """Give an initializer its data, with what turns that into the graph's own dtype."""
    if isinstance(stored, insert.Parts):
        assert value.dtype is not None
        insert.insert(graph, value, stored, value.dtype)
    elif value.dtype is not None and stored.dtype != value.dtype:
        insert.insert_cast(graph, value, stored)
    else:
        value.const_value = stored


#: Last parts of the names of matrices; other tensors of two dimensions are tables of the rotation.
_MATRICES = ("weight", "embedding", "lm_head")


def _planned(value: ir.Value, tensor: Tensor | Quantized, plan: Plan | None) -> Tensor | Quantized:
    """The tensor in the format that the plan has for it."""
    name = str(value.name)
    if plan is None or isinstance(tensor, Quantized) or tensor.ndim != 2 or name.rsplit(".", 1)[-1] not in _MATRICES:
        return tensor
    uses = {node.op_type for node, _ in value.uses()}
    form = plan.format_of(name, tied={"Gather", "Gemm"} <= uses)
    if not form.quantized:
        return narrow(name, tensor, FLOATS[form.kind])
    matrix = tensor.t() if insert.is_operand(value) else tensor
    return plan.quantizer(name, matrix, form.fitted(matrix.shape[1]))


def value_bytes(value: ir.Value) -> int:
    """Bytes of a tensor as the graph computes with it."""
    assert value.dtype is not None
    return math.prod(insert.sizes(value)) * value.dtype.bitwidth // 8


def state_bytes(module: nn.Module) -> int:
    """Bytes of all weights and tables, for progress bars and size estimates."""
    return sum(t.numel() * t.element_size() for t in module.state_dict().values())


def load_state(module: nn.Module, values: Values) -> None:
    """Fill a materialised module in place (parity tests and training run the torch module itself)."""
    state = module.state_dict()
    for name, read in values:
        value = read()
        assert isinstance(value, Tensor)
        state[name].copy_(value)
