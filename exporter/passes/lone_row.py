"""A lone row of a product with 8-bit codes becomes two equal ones, for TensorRT.

Its compiler multiplies with int8 codes as they are read, but for a single row: then it writes the whole matrix out in
half precision first, every call, which moves five times the bytes. Twice the same row costs nothing beside that.

In a target's graph the rows are doubled where they come in, in a head's (where one is always alone) at each product.

Requires: a graph of ``exporter.onnx`` or ``exporter.heads.export``. Ensures: the same inputs, outputs and values.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from specexport.exporter.passes.graph import constant
from specexport.runtime import contract


def lower(model: ir.Model, *, nodes: bool = True) -> bool:
    """Lower ``model`` in place; whether anything had to change.

    Args:
        nodes: a lone node too, not only a lone row of logits.
    """
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    kinds = {user.op_type for node in graph if _codes(node) for user, _ in node.outputs[0].uses()}
    if not kinds & {"MatMul", "Gemm"}:
        return False
    if contract.SELECT not in inputs:
        return sum([_double(graph, user) for node in graph if _codes(node) for user, _ in node.outputs[0].uses()]) > 0
    made: list[ir.Node] = []
    if nodes and "MatMul" in kinds:
        tokens = inputs[contract.TOKENS]
        count, again = _counts(graph, tokens, 1, made)
        for name in (contract.TOKENS, contract.POSITIONS):
            _repeat(graph, inputs[name], {1: again}, made)
        _repeat(graph, inputs[contract.TREE], {1: again, 2: again}, made, columns=count)
        _cut(graph, contract.FEATURES, count, 1)
    count, again = _counts(graph, inputs[contract.SELECT], 0, made)
    _repeat(graph, inputs[contract.SELECT], {0: again}, made)
    _cut(graph, contract.LOGITS, count, 0)
    graph.insert_before(graph[0], made)
    passes.TopologicalSortPass()(model)
    kept = {*graph.inputs, *graph.outputs}
    for node in graph:
        for value in node.outputs:
            if value not in kept and value.shape is not None and not value.shape.is_static():
                sizes = [size if isinstance(size, int) else None for size in value.shape.dims]
                value.shape = ir.Shape(sizes)  # recorded for T and R rows
    return True


def _codes(node: ir.Node) -> bool:
    codes = node.inputs[0] if node.op_type == "DequantizeLinear" else None
    return codes is not None and codes.dtype == ir.DataType.INT8


def _double(graph: ir.Graph, node: ir.Node) -> bool:
    """Multiply a row that is always alone twice; whether the product has such a row."""
    row, output = node.inputs[0], node.outputs[0]
    if node.op_type not in ("MatMul", "Gemm") or row is None or row.shape is None or output.is_graph_output():
        return False
    *before, width = row.shape.dims
    if not before or any(size != 1 for size in before):
        return False
    axis = len(before) - 1
    twice = ir.node("Concat", [row, row], {"axis": axis})
    twice.outputs[0].shape, twice.outputs[0].type = ir.Shape([*before[:-1], 2, width]), row.type
    bounds = [constant(graph, f"{node.name}.{name}", np.array([at])) for name, at in (("first", 0), ("end", 1))]
    along = constant(graph, f"{node.name}.axis", np.array([axis]))
    cut = ir.node("Slice", [output, *bounds, along])
    cut.outputs[0].shape, cut.outputs[0].type = output.shape, output.type
    output.shape = None
    output.replace_all_uses_with(cut.outputs[0])
    cut.replace_input_with(0, output)
    node.replace_input_with(0, twice.outputs[0])
    graph.insert_before(node, twice)
    graph.insert_after(node, cut)
    return True


def _counts(graph: ir.Graph, value: ir.Value, axis: int, made: list[ir.Node]) -> tuple[ir.Value, ir.Value]:
    """int64 [1] each: the number of rows, and how often to take them: twice where there is one."""
    one = constant(graph, f"{value.name}.one", np.array([1]))
    count = ir.node("Shape", [value], {"start": axis, "end": axis + 1})
    alone = ir.node("Div", [one, count.outputs[0]])
    again = ir.node("Add", [alone.outputs[0], one])
    made += [count, alone, again]
    return count.outputs[0], again.outputs[0]


def _repeat(
    graph: ir.Graph,
    value: ir.Value,
    times: dict[int, ir.Value],
    made: list[ir.Node],
    columns: ir.Value | None = None,
) -> None:
    """Feed what reads a value with its rows repeated along some axes.

    Args:
        columns: their number in a tree; columns after them are ancestors of nobody.
    """
    assert value.shape is not None
    users = [(user, place) for user, place in value.uses() if user not in made]
    one = constant(graph, f"{value.name}.once", np.array([1]))
    repeats = ir.node("Concat", [times.get(axis, one) for axis in range(len(value.shape))], {"axis": 0})
    tiled = ir.node("Tile", [value, repeats.outputs[0]])
    made += [repeats, tiled]
    result = tiled.outputs[0]
    if columns is not None:
        width = ir.node("Shape", [result], {"start": 2, "end": 3})
        limit = ir.node("Squeeze", width.outputs)
        bounds = [constant(graph, f"{value.name}.{name}", np.array(at)) for name, at in (("first", 0), ("step", 1))]
        index = ir.node("Range", [bounds[0], limit.outputs[0], bounds[1]])
        real = ir.node("Less", [index.outputs[0], columns])
        seen = ir.node("And", [result, real.outputs[0]])
        made += [width, limit, index, real, seen]
        result = seen.outputs[0]
    result.type = value.type
    for user, place in users:
        user.replace_input_with(place, result)


def _cut(graph: ir.Graph, name: str, count: ir.Value, axis: int) -> None:
    """An output, where there is one, loses the repeated rows."""
    output = next((value for value in graph.outputs if value.name == name), None)
    if output is None:
        return
    start, along = (constant(graph, f"{name}.{part}", np.array([at])) for part, at in (("start", 0), ("axis", axis)))
    cut = ir.node("Slice", [output, start, count, along])
    result = cut.outputs[0]
    result.shape, result.type = output.shape, output.type
    output.name, output.shape = f"{name}.rows", None
    result.name = name
    graph.outputs[next(i for i, value in enumerate(graph.outputs) if value is output)] = result
    if name == contract.LOGITS:  # what reads features is the next layer
        output.replace_all_uses_with(result)
        cut.replace_input_with(0, output)
    graph.append(cut)
