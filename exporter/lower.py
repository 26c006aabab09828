"""The graphs of a bundle lowered for ONNX Runtime's CPU provider, beside the exported ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import onnx_ir as ir

from specexport.engines.ort import CPU_ANY_ROWS, TARGET_FILE, cpu_files, kernels_file
from specexport.exporter.config import TargetConfig
from specexport.exporter.graph_file import IR_DTYPES, DataFile
from specexport.exporter.passes import grouped_query, grow_tree, joined_products, kernels, matmul_nbits, skip_norm
from specexport.exporter.passes.matmul_nbits import Packed


def lower_target(
    folder: Path,
    config: TargetConfig,
    slots: int,
    activations: str,
    graph: str = TARGET_FILE,
    *,
    accuracy_level: int = matmul_nbits.FAST,
    exact: bool = True,
) -> Packed | None:
    """Write the CPU lowering of ``folder/graph``, its commit graph and, of codes, the graph for our own kernels.

    Weights in floating point are shared with the exported graph; codes are laid out anew, in a data file of their own.

    Args:
        activations: of the caches too. accuracy_level: see :func:`matmul_nbits.lower`.
        exact: a row of logits should not depend on how many a call has. The graph sees to it where that costs attention
            alone, and says so (``CPU_ANY_ROWS``); elsewhere the engine does.

    Returns:
        Matrices that were laid out; None where the model's head width has no such lowering: the CPU then runs the
        exported graph.
    """
    if config.head_dim % grouped_query.HEAD_DIM_MULTIPLE:
        return None
    lowered_file, commit_file = cpu_files(graph)
    model, windows = ir.load(folder / graph), [layer.window for layer in config.layers]
    with _data(folder / lowered_file) as data:
        packed = Packed(data.put, {})
        pairs = exact and matmul_nbits.any_rows(model, accuracy_level)
        grouped_query.lower(model, slots, windows, data.put, pairs=pairs)
        skip_norm.lower(model)
        joined_products.lower(model)
        matmul_nbits.lower(model, packed, accuracy_level)
    if pairs:
        model.metadata_props[CPU_ANY_ROWS] = "1"
    ir.save(model, folder / lowered_file)
    _use_kernels(folder, graph, windows)
    commit = grouped_query.commit_model(
        config.num_layers, config.num_kv_heads, config.head_dim, slots, IR_DTYPES[activations]
    )
    ir.save(commit, folder / commit_file)
    return packed


def lower_drafter(graph: Path, target: Packed | None) -> bool:
    """Write the CPU lowering of a drafter's graph, which refers to what its target's laid out of shared tables.

    Returns:
        False, and nothing is written, where it has no quantised matrix.
    """
    model = ir.load(graph)
    if not any(node.op_type == "DequantizeLinear" for node in model.graph):
        return False
    path = graph.parent / cpu_files(graph.name)[0]
    with _data(path) as data:
        skip_norm.lower(model)
        joined_products.lower(model)
        matmul_nbits.lower(model, Packed(data.put, {} if target is None else dict(target.matrices)))
    ir.save(model, path)
    _use_kernels(graph.parent, graph.name, ())
    return True


def _use_kernels(folder: Path, graph: str, windows: Sequence[int | None]) -> None:
    """Write the graph for our own kernels beside the CPU lowering, whose data it shares, where they take it."""
    model = ir.load(folder / cpu_files(graph)[0])
    if kernels.lower(model, windows):
        grow_tree.lower(model)
        ir.save(model, folder / kernels_file(graph))


@contextmanager
def _data(path: Path) -> Iterator[DataFile]:
    """The data file of a graph, none where nothing is large enough for it."""
    data_path = path.with_name(path.name + ".data")
    with DataFile(data_path) as data:
        yield data
    if not data_path.stat().st_size:
        data_path.unlink()
