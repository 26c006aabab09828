"""Recent operators in terms of old ones, for a TensorRT without them (10.3 of JetPack 6) and without our plugin.

Requires: a graph of ``exporter.onnx`` or ``exporter.heads.export``. Ensures: the same inputs, outputs and values; no
operator of the kinds that were named, and an opset that old parsers know.

=================== ==============================================================================================
operator            becomes
=================== ==============================================================================================
Attention           products with keys and values, a softmax in float32; grouped heads as rows of their key head
TensorScatter       Where(row is in the block, the block's row, the cache's row): a new tensor, not an update in place
RotaryEmbedding     rows of the tables by position, and products with both halves
RMSNormalization    mean of squares, square root, division
=================== ==============================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from specexport.exporter.passes.graph import constant
from specexport.runtime.errors import SpecExportError

#: The last opset whose operators differ in what is used here: blocks of DequantizeLinear and 4-bit types.
OPSET = 21


def lower(model: ir.Model, operators: Collection[str]) -> ir.Model:
    """Replace every node of these operators in place and return the model.

    Raises:
        SpecExportError: an operator that has no plain form.
    """
    if unknown := sorted(set(operators) - _LOWERINGS.keys()):
        raise SpecExportError(f"{unknown[0]} has no plain form: there is one of {', '.join(_LOWERINGS)}")
    graph = model.graph
    for node in list(graph):
        if node.op_type in operators and node.domain == "":
            emit = _Emitter(graph, node)
            result = _LOWERINGS[node.op_type](emit, node)
            old = node.outputs[0]
            result.shape, result.type = old.shape, old.type
            name, old.name = old.name, None
            result.name = name
            old.replace_all_uses_with(result, replace_graph_outputs=True)
    passes.RemoveUnusedNodesPass()(model)
    passes.TopologicalSortPass()(model)
    if not {node.op_type for node in graph} & _LOWERINGS.keys():
        model.opset_imports[""] = OPSET
    return model


class _Emitter:
    """Puts nodes before the one that they replace, under its name."""

    def __init__(self, graph: ir.Graph, node: ir.Node) -> None:
        self._graph, self._node = graph, node
        self._count = 0

    def __call__(self, op_type: str, *inputs: ir.Value | None, **attributes: int | list[int] | ir.DataType) -> ir.Value:
        node = ir.node(op_type, list(inputs), attributes, name=f"{self._node.name}.{self._count}")
        self._count += 1
        self._graph.insert_before(self._node, node)
        return node.outputs[0]

    def constant(self, array: object, dtype: ir.DataType | None = None) -> ir.Value:
        """A constant that nodes of the same value share."""
        values = np.array(array) if dtype is None else np.array(array, dtype.numpy())
        name = f"plain_{values.dtype}_{values.tolist()}".replace(" ", "")
        known = self._graph.initializers.get(name)
        return constant(self._graph, name, values) if known is None else known


def _dims(value: ir.Value, where: object) -> list[int | None]:
    if value.shape is None:
        raise SpecExportError(f"{where}: {value.name} has no recorded shape")
    return [size if isinstance(size, int) else None for size in value.shape.dims]


def _attention(emit: _Emitter, node: ir.Node) -> ir.Value:
    query, key, value, mask = (x for x in node.inputs if x is not None)
    heads, kv_heads = _dims(query, node.name)[1], _dims(key, node.name)[1]
    width, value_width, kind = _dims(query, node.name)[3], _dims(value, node.name)[3], query.dtype
    if None in (heads, kv_heads, width, value_width) or kind is None:
        raise SpecExportError(f"{node.name}: heads and widths must be known")
    assert heads is not None and kv_heads is not None
    scaled = emit("Mul", query, emit.constant(node.attributes["scale"].as_float(), kind))
    if heads != kv_heads:  # [1, Hkv, G, T, D] against [1, Hkv, 1, S, D]
        scaled = emit("Reshape", scaled, emit.constant([1, kv_heads, heads // kv_heads, -1, width]))
        key, value, mask = (emit("Unsqueeze", x, emit.constant([2])) for x in (key, value, mask))
    order = [0, 1, 3, 2] if heads == kv_heads else [0, 1, 2, 4, 3]
    scores = emit("Add", emit("MatMul", scaled, emit("Transpose", key, perm=order)), mask)
    weights = emit("Softmax", emit("Cast", scores, to=ir.DataType.FLOAT), axis=-1)
    mixed = emit("MatMul", emit("Cast", weights, to=kind), value)
    return mixed if heads == kv_heads else emit("Reshape", mixed, emit.constant([1, heads, -1, value_width]))


def _tensor_scatter(emit: _Emitter, node: ir.Node) -> ir.Value:
    past, block, write = (x for x in node.inputs if x is not None)
    slots = _dims(past, node.name)[2]
    if slots is None or write.shape is None or list(write.shape.dims) != [1]:
        raise SpecExportError(f"{node.name}: expected [1, heads, S, D] and one place to write to")
    offset = emit("Sub", emit.constant(np.arange(slots)), write)
    count = emit("Shape", block, start=2, end=3)
    last = emit("Squeeze", emit("Sub", count, emit.constant([1])))
    rows = emit("Gather", block, emit("Clip", offset, emit.constant(0), last), axis=2)
    inside = emit("And", emit("Not", emit("Less", offset, emit.constant(0))), emit("Less", offset, count))
    return emit("Where", emit("Reshape", inside, emit.constant([1, 1, slots, 1])), rows, past)


def _rotary(emit: _Emitter, node: ir.Node) -> ir.Value:
    x, cos, sin, positions = (value for value in node.inputs if value is not None)
    half, width = _dims(cos, node.name)[1], _dims(x, node.name)[-1]
    if "interleaved" in node.attributes and node.attributes["interleaved"].as_int():
        raise SpecExportError(f"{node.name}: expected half-split pairs, found interleaved ones")
    if half is None or width is None:
        raise SpecExportError(f"{node.name}: the width must be known")
    one = emit.constant([1])
    c, s = (emit("Unsqueeze", emit("Gather", table, positions, axis=0), one) for table in (cos, sin))

    def part(first: int, end: int) -> ir.Value:
        return emit("Slice", x, *(emit.constant([n]) for n in (first, end, -1)))

    left, right = part(0, half), part(half, 2 * half)
    turned = [
        emit("Sub", emit("Mul", left, c), emit("Mul", right, s)),
        emit("Add", emit("Mul", right, c), emit("Mul", left, s)),
    ]
    rest = [part(2 * half, width)] if width > 2 * half else []
    return emit("Concat", *turned, *rest, axis=-1)


def _rms_norm(emit: _Emitter, node: ir.Node) -> ir.Value:
    x, weight = (value for value in node.inputs if value is not None)
    epsilon = node.attributes["epsilon"].as_float()
    squares = emit("ReduceMean", emit("Mul", x, x), emit.constant([-1]), keepdims=1)
    root = emit("Sqrt", emit("Add", squares, emit.constant(epsilon, ir.DataType.FLOAT)))
    return emit("Mul", emit("Div", x, root), weight)


_LOWERINGS: dict[str, Callable[[_Emitter, ir.Node], ir.Value]] = {
    "Attention": _attention,
    "TensorScatter": _tensor_scatter,
    "RotaryEmbedding": _rotary,
    "RMSNormalization": _rms_norm,
}
