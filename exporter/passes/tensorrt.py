"""Lowering for TensorRT: the same graph, spelled so that its compiler fuses it and keeps one copy of the weights.

Requires: a graph of ``exporter.onnx`` or ``exporter.heads.export``. Ensures: the same inputs, outputs and values.

- Attention with G query heads to a key head attends with G * T rows a key head instead. The heads of a group lie next
  to each other, so this is a reshape. The compiler would otherwise copy keys and values to every query head, in each
  layer and each call of more than one node: over 4096 slots that moves as much memory as the weights.
- Floating-point matrices are stored [out, in], read through a transpose. For one node the compiler wants them so, for
  more it takes them as they come; stored [in, out], plans of both kinds of profiles hold every matrix twice.
- Rows of 8-bit codes are gathered behind a ``DequantizeLinear`` by 1: the compiler takes codes nowhere else, and makes
  one kernel of both that reads the rows alone.
- A quantised matrix of several products (a head's, used again at each depth) is dequantised for each of them: TensorRT
  1.7 fails over int4 codes that are read through one node by several.
- What ``passes.used_rows`` cut is whole again: a cache of static size is updated in place, a cut one is not.
- What the fused kernel does not take (float32, heads wider than 256) is marked as free to be decomposed.
- Nodes whose compiled layers are looked up in the build log get names: ``attention.<n>``, ``update.<output>``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common as passes

from specexport.exporter.passes.graph import constant
from specexport.runtime.errors import SpecExportError

#: Stores an array under a name and returns the reference to it (``graph_file.DataFile.put``).
Put = Callable[[str, NDArray[Any], ir.DataType, tuple[int, ...]], ir.TensorProtocol]
#: Widest heads of the fused kernel.
WIDEST_HEAD = 256
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def lower(model: ir.Model, put: Put) -> ir.Model:
    """Lower ``model`` in place and return it; matrices that change their layout go to ``put``.

    Raises:
        SpecExportError: an attention or a cache update is not what the exporter writes; the message names it.
    """
    graph = model.graph
    if _widen(graph):
        passes.ShapeInferencePass()(model)  # the cut graph has no recorded shapes
    masks: dict[tuple[ir.Value, int], ir.Value] = {}
    for number, node in enumerate(node for node in graph if node.op_type == "Attention"):
        node.name = f"attention.{number}"
        if fault(node) is not None:
            node.attributes["TRT_decomposable"] = ir.AttrInt64("TRT_decomposable", 1)
        _group(graph, node, masks)
    for node in graph:
        if node.op_type == "TensorScatter":
            node.name = f"update.{node.outputs[0].name}"
    _dequantize_rows(graph)
    _separate(graph)
    _transpose(graph, put)
    passes.RemoveUnusedNodesPass()(model)
    passes.TopologicalSortPass()(model)
    return model


def fault(node: ir.Node) -> str | None:
    """Why an ``Attention`` cannot be fused; None if it can."""
    query, value = node.inputs[0], node.inputs[2]
    if query is None or query.dtype not in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16):
        kind = "unknown" if query is None or query.dtype is None else query.dtype.name.lower()
        return f"its activations are {kind}, the fused kernel takes float16 and bfloat16: build with --activations fp16"
    widest = max(_static(query, node.name or "", wanted=3), _static(value, node.name or "", wanted=3))
    if widest > WIDEST_HEAD:
        return f"its heads are {widest} wide, the fused kernel takes {WIDEST_HEAD} at most"
    return None


def _widen(graph: ir.Graph) -> bool:
    """Undo ``passes.used_rows``: whole caches, and masks with a column for each of their rows; whether it was done."""
    cuts = [
        (node, scatter)
        for node in graph
        if node.op_type == "Slice" and (scatter := _producer(node.inputs[0])) is not None
        if scatter.op_type == "TensorScatter"
    ]
    if not cuts:
        return False
    slots = {_static(scatter.inputs[0], "a cache", wanted=2) for _, scatter in cuts}
    used = {cut.inputs[2] for cut, _ in cuts}
    ranges = [
        node
        for node in graph
        if node.op_type == "Range" and (limit := _producer(node.inputs[1])) is not None and limit.inputs[0] in used
    ]
    if len(slots) != 1 or not ranges:
        raise SpecExportError("the graph cuts its caches, but has no column index of one length to widen")
    columns = constant(graph, "columns", np.arange(slots.pop(), dtype=np.int64))
    for node in ranges:
        node.outputs[0].replace_all_uses_with(columns)
    for node, _ in cuts:
        whole = node.inputs[0]
        assert whole is not None
        node.outputs[0].replace_all_uses_with(whole)
    return True


def _group(graph: ir.Graph, node: ir.Node, masks: dict[tuple[ir.Value, int], ir.Value]) -> None:
    """Attend with the rows of a group of query heads as rows of their key head."""
    if len(node.inputs) != 4 or any(value is None for value in node.inputs):
        raise SpecExportError(f"{node.name}: expected query, key, value and mask")
    query, key, value, mask = (value for value in node.inputs if value is not None)
    heads, width = (_static(query, node.name or "", wanted=axis) for axis in (1, 3))
    kv_heads, value_width = _static(key, node.name or "", wanted=1), _static(value, node.name or "", wanted=3)
    group = heads // kv_heads
    if group == 1:
        return
    wide = constant(graph, f"{node.name}.rows", np.array([1, kv_heads, -1, width]))
    back = constant(graph, f"{node.name}.heads", np.array([1, heads, -1, value_width]))
    rows = ir.node("Reshape", [query, wide])
    if (mask, group) not in masks:
        masks[mask, group] = _repeated(graph, node, mask, group)
    output = node.outputs[0]
    users = list(output.uses())
    result = ir.node("Reshape", [output, back])
    result.outputs[0].shape, result.outputs[0].type = output.shape, output.type
    output.shape = ir.Shape([1, kv_heads, None, value_width])
    rows.outputs[0].shape, rows.outputs[0].type = ir.Shape([1, kv_heads, None, width]), query.type
    graph.insert_before(node, rows)
    graph.insert_after(node, result)
    node.replace_input_with(0, rows.outputs[0])
    node.replace_input_with(3, masks[mask, group])
    for user, place in users:
        user.replace_input_with(place, result.outputs[0])


def _repeated(graph: ir.Graph, before: ir.Node, mask: ir.Value, group: int) -> ir.Value:
    """[1, 1, T, S] as [1, 1, G * T, S]: the rows of one head after those of another."""
    name = f"mask.{mask.name}"
    columns = None if mask.shape is None else mask.shape[3]
    repeats = constant(graph, f"{name}.repeats", np.array([1, 1, group, 1]))
    tiled = ir.node("Tile", [mask, repeats], name=f"{name}.tile")
    tiled.outputs[0].shape, tiled.outputs[0].type = ir.Shape([1, 1, None, columns]), mask.type
    graph.insert_before(before, tiled)
    return tiled.outputs[0]


def _dequantize_rows(graph: ir.Graph) -> None:
    """Codes that rows are gathered from become the float values of the codes."""
    for value in list(graph.initializers.values()):
        lookups = [user for user, place in value.uses() if (user.op_type, place) == ("Gather", 0)]
        if value.dtype != ir.DataType.INT8 or not lookups:
            continue
        kind = _cast_to(lookups[0].outputs[0])
        one = constant(graph, f"{value.name}.one", np.array(1, kind.numpy()))
        node = ir.node("DequantizeLinear", [value, one], name=f"{value.name}.value")
        node.outputs[0].shape, node.outputs[0].type = value.shape, ir.TensorType(kind)
        graph.insert_before(graph[0], node)
        for lookup in lookups:
            lookup.outputs[0].type = ir.TensorType(kind)
            lookup.replace_input_with(0, node.outputs[0])


def _separate(graph: ir.Graph) -> None:
    """A ``DequantizeLinear`` of its own for each product of a matrix."""
    for node in [node for node in graph if node.op_type == "DequantizeLinear"]:
        output = node.outputs[0]
        for number, (user, place) in enumerate(list(output.uses())[1:], 1):
            inputs = [_copied(graph, value, number) for value in node.inputs if value is not None]
            copy = ir.node("DequantizeLinear", inputs, dict(node.attributes), name=f"{node.name}.{number}")
            copy.outputs[0].shape, copy.outputs[0].type = output.shape, output.type
            graph.insert_before(node, copy)
            user.replace_input_with(place, copy.outputs[0])


def _copied(graph: ir.Graph, value: ir.Value, number: int) -> ir.Value:
    """Another initializer that refers to the same data."""
    if value.const_value is None:
        return value
    copy = ir.Value(name=f"{value.name}.{number}", const_value=value.const_value, shape=value.shape, type=value.type)
    graph.initializers[str(copy.name)] = copy
    return copy


def _cast_to(value: ir.Value) -> ir.DataType:
    """What gathered codes are cast to, maybe after a reshape."""
    for user, _ in value.uses():
        if user.op_type == "Cast":
            return ir.DataType(user.attributes["to"].as_int())
        if user.op_type == "Reshape":
            user.outputs[0].type = None
            return _cast_to(user.outputs[0])
    raise SpecExportError(f"{value.name}: gathered codes are not cast to floating point")


def _transpose(graph: ir.Graph, put: Put) -> None:
    """Store the matrices of products [out, in]."""
    for value in list(graph.initializers.values()):
        uses = list(value.uses())
        if value.dtype not in _FLOATS or value.shape is None or len(value.shape) != 2 or not uses:
            continue
        if any((user.op_type, place) != ("MatMul", 1) for user, place in uses) or value.const_value is None:
            continue
        assert value.dtype is not None
        array = value.const_value.numpy().T
        name = f"{value.name}.T"
        stored = ir.Value(
            name=name,
            const_value=put(name, np.ascontiguousarray(array), value.dtype, array.shape),
            shape=ir.Shape(array.shape),
            type=ir.TensorType(value.dtype),
        )
        del graph.initializers[str(value.name)]
        graph.initializers[name] = stored
        turned = ir.node("Transpose", [stored], {"perm": [1, 0]}, name=f"{value.name}.transpose")
        turned.outputs[0].shape, turned.outputs[0].type = value.shape, value.type
        graph.insert_before(graph[0], turned)
        for user, place in uses:
            user.replace_input_with(place, turned.outputs[0])


def _producer(value: ir.Value | None) -> ir.Node | None:
    return None if value is None else value.producer()


def _static(value: ir.Value | None, where: str, wanted: int) -> int:
    """A dimension of a value of four."""
    sizes = () if value is None or value.shape is None else tuple(value.shape.dims)
    size = sizes[wanted] if len(sizes) == 4 else None
    if not isinstance(size, int):
        raise SpecExportError(f"{where}: expected four dimensions of known heads and width, found {list(sizes)}")
    return size
