"""The graphs of a bundle lowered for ONNX Runtime's CPU provider, beside the exported ones."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from specexport.engines.ort import TARGET_FILE, cpu_files
from specexport.exporter.config import TargetConfig
from specexport.exporter.graph_file import IR_DTYPES, DataFile
from specexport.exporter.passes import grouped_query, matmul_nbits
from specexport.exporter.passes.matmul_nbits import Packed


def lower_target(
    folder: Path,
    config: TargetConfig,
    slots: int,
    activations: str,
    graph: str = TARGET_FILE,
    *,
    exact: bool = True,
    accuracy_level: int = matmul_nbits.FAST,
) -> Packed | None:
    """Write the CPU lowering of ``folder/graph`` and its commit graph.

    Weights in floating point are shared with the exported graph; codes are laid out anew, in a data file of their own.

    Args:
        activations: of the caches too. exact, accuracy_level: see :func:`matmul_nbits.lower`.

    Returns:
        Matrices that were laid out; None where the model's head width has no such lowering: the CPU then runs the
        exported graph.
    """
    if config.head_dim % grouped_query.HEAD_DIM_MULTIPLE:
        return None
    lowered_file, commit_file = cpu_files(graph)
    model = grouped_query.lower(ir.load(folder / graph), slots)
    packed = _pack(model, folder / lowered_file, {}, exact, accuracy_level)
    commit = grouped_query.commit_model(
        config.num_layers, config.num_kv_heads, config.head_dim, slots, IR_DTYPES[activations]
    )
    ir.save(commit, folder / commit_file)
    return packed


def lower_drafter(graph: Path, target: Packed | None, *, exact: bool = True) -> bool:
    """Write the CPU lowering of a drafter's graph, which refers to what its target's laid out of shared tables.

    Returns:
        False, and nothing is written, where it has no quantised matrix.
    """
    model = ir.load(graph)
    if not any(node.op_type == "DequantizeLinear" for node in model.graph):
        return False
    shared = {} if target is None else target.matrices
    _pack(model, graph.parent / cpu_files(graph.name)[0], shared, exact, matmul_nbits.FAST)
    return True


def _pack(
    model: ir.Model,
    path: Path,
    known: dict[object, dict[str, ir.TensorProtocol]],
    exact: bool,
    accuracy_level: int,
) -> Packed:
    data_path = path.with_name(path.name + ".data")
    with DataFile(data_path) as data:
        packed = Packed(data.put, dict(known))
        matmul_nbits.lower(model, packed, accuracy_level, exact)
    if not data_path.stat().st_size:
        data_path.unlink()
    ir.save(model, path)
    return packed
