"""Torch target -> ``target.onnx`` with its weights in one external file.

Inputs and outputs are those of :mod:`specexport.runtime.contract`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import onnx_ir as ir
import torch
from torch import Tensor

from specexport.exporter.config import TargetConfig
from specexport.exporter.graph_file import Advance, load_state, save_graph, trace
from specexport.exporter.layers import Capture, Target
from specexport.exporter.models import ARCHITECTURES
from specexport.exporter.models.rules import Binding, bind
from specexport.exporter.quantize.plan import Plan
from specexport.exporter.quantize.record import Quantized
from specexport.exporter.rope import rope_tables
from specexport.exporter.weights import WeightSource
from specexport.runtime import contract

_Read = Callable[[], Tensor | Quantized]


def _inputs(config: TargetConfig, slots: int, dtype: torch.dtype) -> dict[str, tuple[Tensor, dict[int, object]]]:
    """Meta inputs with their dynamic dimensions, in contract order."""
    nodes, accepted, wanted = 5, 3, 4  # distinct, so that no two symbols are taken for one

    def ints(*shape: int) -> Tensor:
        return torch.zeros(*shape, dtype=torch.int64, device="meta")

    dims = (contract.NODES_DIM, contract.COMMIT_DIM, contract.ORDER_DIM, contract.SELECT_DIM)
    t, a, o, r = (torch.export.Dim(name) for name in dims)
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
    shape = (1, config.num_kv_heads, slots, config.head_dim)
    caches: dict[str, tuple[Tensor, dict[int, object]]] = {
        past: (torch.zeros(shape, dtype=dtype, device="meta"), {})
        for past, _ in contract.cache_names(config.num_layers)
    }
    return {name: inputs[name] for name in contract.STEP_INPUTS} | caches


def export_target(
    config: TargetConfig,
    slots: int,
    dtype: torch.dtype,
    captures: tuple[Capture, ...] = (),
    weights: WeightSource | None = None,
) -> tuple[ir.Model, Target]:
    """The target graph, weights still missing, and the meta module whose state names them.

    Args:
        slots: S, rows of every cache.
        captures: see :data:`specexport.exporter.layers.Capture`.
        weights: what :func:`save_target` will be given, to check it before the work begins.

    Raises:
        CheckpointError: the checkpoint's tensors do not fit the config.
    """
    with torch.device("meta"):
        target = Target(config, slots, dtype, captures).eval()
    if weights is not None:
        bind(dict(target.named_parameters()), weights, config, ARCHITECTURES[config.architecture])
    presents = [present for _, present in contract.cache_names(config.num_layers)]
    outputs = [contract.LOGITS, *([contract.FEATURES] if captures else []), *presents]
    return trace(target, _inputs(config, slots, dtype), outputs, "target"), target


def _values(target: Target, weights: WeightSource, plan: Plan | None = None) -> Iterator[tuple[str, _Read]]:
    """(name, reader) of every parameter and rope table; all are checked before the first is read."""
    config = target.config
    for binding in bind(dict(target.named_parameters()), weights, config, ARCHITECTURES[config.architecture]):
        yield binding.parameter, partial(_read, binding, weights, config, plan)
    for index, rope in enumerate(config.ropes):
        for name, table in zip(("cos", "sin"), rope_tables(rope, target.slots), strict=True):
            yield f"rope_{name}_{index}", partial(torch.from_numpy(table).to, target.dtype)


def _read(binding: Binding, weights: WeightSource, config: TargetConfig, plan: Plan | None) -> Tensor | Quantized:
    """A parameter; a matrix as the checkpoint has it quantised, where the plan keeps that."""
    stored = None if plan is None else binding.quantized(weights, config)
    if plan is None or stored is None or not plan.keeps(binding.parameter, stored, config.tie_word_embeddings):
        return binding.read(weights, config)
    return stored


def save_target(
    model: ir.Model,
    target: Target,
    weights: WeightSource,
    path: Path,
    advance: Advance = lambda _: None,
    plan: Plan | None = None,
) -> None:
    """Write ``path`` and its data file (see :func:`specexport.exporter.graph_file.save_graph`).

    Raises:
        CheckpointError: the checkpoint's tensors do not fit the config.
    """
    save_graph(model, _values(target, weights, plan), path, advance, plan=plan)


def build_module(
    config: TargetConfig, slots: int, dtype: torch.dtype, weights: WeightSource, captures: tuple[Capture, ...] = ()
) -> Target:
    """The torch target with its weights, for reference runs."""
    target = Target(config, slots, dtype, captures).eval()
    load_state(target, _values(target, weights))
    return target
