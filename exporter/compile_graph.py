"""What ``compile`` has to know of a graph: its tensors, caches, attention and formats, and the sizes to pin it to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from specexport.engines.plan import TensorInfo
from specexport.engines.plugins.tree_attention import HEAD_DIMS, OPERATOR
from specexport.exporter.graph_file import IR_DTYPES
from specexport.runtime import contract
from specexport.runtime.bundle import Bundle
from specexport.runtime.errors import SpecExportError, UsageError
from specexport.runtime.manifest import FileInfo, TargetInfo

_KINDS = {
    **{dtype: name for name, dtype in IR_DTYPES.items()},
    ir.DataType.INT64: "int64",
    ir.DataType.INT32: "int32",
    ir.DataType.BOOL: "bool",
    ir.DataType.INT8: "int8",
    ir.DataType.FLOAT8E4M3FN: "fp8",
}
#: Element type of codes -> format of weights.
_FORMATS = {
    ir.DataType.INT8: "int8",
    ir.DataType.INT4: "int4",
    ir.DataType.FLOAT8E4M3FN: "fp8",
    ir.DataType.FLOAT4E2M1: "nvfp4",
}
#: Whether a format has to have blocks, seen in tensorrt-rtx 1.7.
_BLOCKED = {"int4": True, "int8": False}


def target_sizes(widths: Sequence[int], most: int, chunk: int, slots: int) -> list[dict[str, int]]:
    """Sizes of the profiles of a target: one for each width up to ``most``, then one for prompts, with one logit row.

    Every profile takes as many rows to commit as the widest call can leave behind, whatever call comes next.
    """
    chosen = [width for width in widths if width <= max(most, 1)]
    rows = max(chosen[-1] - 1, 1)
    sizes = [(width, width) for width in chosen]
    chunk = min(chunk, slots - rows)
    if chunk > chosen[-1]:
        sizes.append((chunk, 1))
    names = (contract.NODES_DIM, contract.COMMIT_DIM, contract.ORDER_DIM, contract.SELECT_DIM)
    return [dict(zip(names, (nodes, rows, rows + nodes, logits), strict=True)) for nodes, logits in sizes]


def weight_formats(model: ir.Model, name: str) -> set[str]:
    """Formats of a graph's quantised weights.

    Raises:
        UsageError: codes that TensorRT does not multiply with.
    """
    found = set()
    for kind, node in _codes(model):
        matrix = node.outputs[0].name
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            raise UsageError(
                f"{name}: {matrix} has zero points, which TensorRT does not take: build without --asymmetric"
            )
        if kind not in _FORMATS:
            raise UsageError(f"{name}: {matrix} is {kind.name}, TensorRT takes {', '.join(_FORMATS.values())}")
        found.add(_FORMATS[kind])
    return found


def slow_codes(model: ir.Model) -> list[str]:
    """Matrices whose scales are laid out as no kernel multiplies: each call writes them out in half precision first."""
    return [
        f"{node.outputs[0].name} ({_FORMATS[kind]} {'in blocks' if blocked else 'with one scale a row'})"
        for kind, node in _codes(model)
        if kind in _FORMATS and (blocked := "block_size" in node.attributes) != _BLOCKED.get(_FORMATS[kind], blocked)
    ]


def _codes(model: ir.Model) -> Iterator[tuple[ir.DataType, ir.Node]]:
    for node in model.graph:
        source = node.inputs[0] if node.op_type == "DequantizeLinear" else None
        if source is not None and source.const_value is not None:
            yield source.const_value.dtype, node


def check_plugin(target: TargetInfo) -> None:
    """Refuse what the attention plugin has no kernel for; of some of it TensorRT says nothing, and ends.

    Raises:
        UsageError: the type of its activations, or the width of its heads.
    """
    if (kind := target.precision.activations) not in ("fp16", "bf16"):
        raise UsageError(
            f"the attention plugin takes fp16 and bf16, the bundle's activations are {kind}: build with --activations "
            "fp16"
        )
    if target.head_dim not in HEAD_DIMS:
        raise UsageError(
            f"the attention plugin takes heads of width {', '.join(map(str, HEAD_DIMS))}, the bundle's are "
            f"{target.head_dim} wide: compile without --plugin"
        )


def tensor_infos(values: Sequence[ir.Value], graph: str) -> tuple[TensorInfo, ...]:
    """Names, types and shapes of a graph's inputs or outputs."""
    found = []
    for value in values:
        dims = () if value.shape is None else value.shape.dims
        sizes = tuple(size for dim in dims if (size := dim if isinstance(dim, int) else dim.value) is not None)
        if value.dtype not in _KINDS or value.shape is None or len(sizes) != len(dims):
            raise SpecExportError(f"{graph}: {value.name} has no known type and shape: build the bundle again")
        found.append(TensorInfo(name=str(value.name), dtype=_KINDS[value.dtype], shape=sizes))
    return tuple(found)


def cache_aliases(graph: ir.Graph) -> dict[str, str]:
    """Outputs that are an updated input, in its memory."""
    inputs, outputs = set(graph.inputs), set(graph.outputs)
    pairs: list[tuple[ir.Value, ir.Value | None]] = []
    for node in graph:
        if node.op_type == "TensorScatter":
            pairs.append((node.outputs[0], node.inputs[0]))
        elif node.op_type == OPERATOR:
            pairs += zip(node.outputs[1:], node.inputs[3:5], strict=True)
    return {str(new.name): str(old.name) for new, old in pairs if new in outputs and old in inputs and old is not None}


def attention_nodes(graph: ir.Graph) -> list[str]:
    """Names of the nodes that attend."""
    return [str(node.name) for node in graph if node.op_type in ("Attention", OPERATOR)]


def weight_bytes(model: ir.Model) -> int:
    """Bytes of a graph's tensors."""
    return sum(v.const_value.nbytes for v in model.graph.initializers.values() if v.const_value is not None)


def source_files(bundle: Bundle, graph: str, model: ir.Model, missing: bool = False) -> dict[str, FileInfo]:
    """The graph's file and the files of its tensors, as the manifest lists them."""
    values = (value.const_value for value in model.graph.initializers.values())
    names = {graph, *(str(x.location) for x in values if isinstance(x, ir.ExternalTensor))}
    files = bundle.manifest.files
    return {name: files[name] for name in sorted(names) if name in files or not missing}
