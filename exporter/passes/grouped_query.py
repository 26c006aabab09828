"""Lowering for ONNX Runtime's CPU provider: one GroupQueryAttention a layer, reading only the used rows.

Requires: a target graph as ``exporter.onnx`` makes it. Ensures: the same tokens, masks and logits; each layer's
``Attention`` and its two ``TensorScatter`` become one ``com.microsoft::GroupQueryAttention`` that appends in place;
masks are ``past + T`` wide instead of S; inputs ``write``, ``commit`` and ``order`` are gone, because accepted rows
that have to move are moved beforehand by the graph of :func:`commit_model` (most steps need none).

A lone node is attended as two equal rows. The operator takes another code path, with another order of additions, for
one row than for several; with two, a row's result does not depend on how many rows share the call, and a chain of
drafts gives bit for bit the logits of plain decoding (matrix products are already independent of it; a test holds it).
The second row needs a place even after the last slot, so lowered caches have ``CPU_SPARE_ROWS`` more. Columns of a
branching tree still add up in another order, which costs about 1e-7.

Why: over 4096 slots ``Attention`` reads and copies all of them, whatever the used length, and a ``Slice`` before it
copies the used ones; GroupQueryAttention does neither (``scripts/bench_lowerings.py`` measures all three).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from specexport.engines.ort import CPU_SPARE_ROWS
from specexport.exporter.passes.graph import MICROSOFT, constant, is_arange
from specexport.runtime import contract
from specexport.runtime.errors import SpecExportError

#: GroupQueryAttention refuses head widths that are no multiple of this.
HEAD_DIM_MULTIPLE = 8


def lower(model: ir.Model, slots: int) -> ir.Model:
    """Lower ``model`` in place and return it. ``slots`` is S.

    Raises:
        SpecExportError: the graph is not what this pass requires; the message names the node.
    """
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    attentions = [node for node in graph if node.op_type == "Attention"]
    if not attentions:
        raise SpecExportError("the graph has no Attention nodes: it is not a target graph, or was lowered already")
    if missing := [name for name in contract.STEP_INPUTS if name not in inputs]:
        raise SpecExportError(f"the graph has no input {missing[0]}: it is not a target graph")
    rows = _Rows(graph, inputs, slots)
    for node in attentions:
        _lower_layer(graph, node, rows)
    for name in (contract.WRITE, contract.COMMIT, contract.ORDER):
        graph.inputs.remove(inputs[name])
    model.opset_imports[MICROSOFT] = 1
    passes.RemoveUnusedNodesPass()(model)
    passes.TopologicalSortPass()(model)
    caches = {name for pair in contract.cache_names(len(attentions)) for name in pair}
    for value in [*graph.inputs, *graph.outputs]:
        if value.name in caches and value.shape is not None:
            value.shape = ir.Shape([*value.shape[:2], slots + CPU_SPARE_ROWS, value.shape[3]])
    kept = set(graph.outputs)
    for node in graph:
        for value in node.outputs:
            if value not in kept:
                value.shape = None  # recorded for T rows, where there are now two for a lone node
    leftover = [name for name in (contract.WRITE, contract.COMMIT, contract.ORDER) if inputs[name].uses()]
    if leftover:
        raise SpecExportError(f"inputs {', '.join(leftover)} are still used after lowering")
    return model


class _Rows:
    """Row bookkeeping shared by the layers: a lone node doubled, and the masks' columns cut to the used rows.

    Attributes:
        last: int32 [1], index of the last row that attention sees. total: int32 scalar, their number.
        pick: int64 [max(T, 2)], the node behind each attended row. count: int64 [1], T.
    """

    def __init__(self, graph: ir.Graph, inputs: dict[str | None, ir.Value], slots: int) -> None:
        past, tokens = inputs[contract.PAST], inputs[contract.TOKENS]
        anchor = next(
            (n for n in graph if n.op_type == "Sub" and n.inputs[1] is past and is_arange(n.inputs[0], slots)), None
        )
        if anchor is None:
            raise SpecExportError("no column index (arange(S) - past) was found in the graph's mask")
        zero, one, two = (constant(graph, f"const_{n}", np.array(n)) for n in (0, 1, 2))
        self.zeros, self.axis = (
            constant(graph, "const_[0]", np.array([0])),
            constant(graph, "const_[1]", np.array([1])),
        )
        nodes: list[ir.Node] = []

        def emit(op_type: str, inputs: list[ir.Value], **attributes: int | ir.DataType) -> ir.Value:
            nodes.append(ir.node(op_type, inputs, attributes))
            return nodes[-1].outputs[0]

        self.count = emit("Shape", [tokens], start=1, end=2)
        attended = emit("Max", [self.count, two])
        used = emit("Add", [past, attended])
        self.total = emit("Cast", [emit("Squeeze", [used])], to=ir.DataType.INT32)
        self.last = emit("Cast", [emit("Sub", [used, one])], to=ir.DataType.INT32)
        self.pick = emit(
            "Min", [emit("Range", [zero, emit("Squeeze", [attended]), one]), emit("Sub", [self.count, one])]
        )
        columns = emit("Range", [zero, emit("Squeeze", [used]), one])
        rows = {name: emit("Gather", [inputs[name], self.pick], axis=1) for name in (contract.TREE, contract.POSITIONS)}
        graph.insert_before(graph[0], nodes)
        anchor.replace_input_with(0, columns)
        for name, doubled in rows.items():
            for user, index in list(inputs[name].uses()):
                if user is not doubled.producer() and user.op_type != "Shape":
                    user.replace_input_with(index, doubled)


def _producer(value: ir.Value | None, op_type: str, layer: str | None) -> ir.Node:
    node = value.producer() if value is not None else None
    if node is None or node.op_type != op_type:
        found = node.op_type if node is not None else "an input"
        raise SpecExportError(f"attention {layer!r}: expected {op_type}, found {found}")
    return node


def _lower_layer(graph: ir.Graph, node: ir.Node, rows: _Rows) -> None:
    name = node.outputs[0].name
    if len(node.inputs) != 4 or any(value is None for value in node.inputs) or "scale" not in node.attributes:
        raise SpecExportError(f"attention {name!r}: expected query, key, value, mask and a scale")
    # The fused operator has no place for the others (softcap, is_causal, ...): 0 is their default.
    if odd := [attribute for attribute in node.attributes.values() if attribute.name != "scale" and attribute.value]:
        raise SpecExportError(f"attention {name!r}: {odd[0].name} is {odd[0].value}, expected none")
    query, mask = node.inputs[0], node.inputs[3]
    scatters = [_producer(value, "TensorScatter", name) for value in node.inputs[1:3]]
    news = [_new_rows(scatter, name) for scatter in scatters]
    flat_query, heads = _flatten(graph, node, query, name)
    flat_key, kv_heads = _flatten(graph, node, news[0], name)
    flat_value, _ = _flatten(graph, node, news[1], name)
    _double(graph, node, [query, *news], rows, name)
    fused = ir.node(
        "GroupQueryAttention",
        [
            flat_query,
            flat_key,
            flat_value,
            *(scatter.inputs[0] for scatter in scatters),
            rows.last,
            rows.total,
            None,
            None,
            None,
            mask,
        ],
        {"num_heads": heads, "kv_num_heads": kv_heads, "scale": node.attributes["scale"].as_float()},
        domain=MICROSOFT,
        num_outputs=3,
    )
    cut = ir.node("Slice", [fused.outputs[0], rows.zeros, rows.count, rows.axis])
    graph.insert_before(node, [fused, cut])
    for scatter, present in zip(scatters, fused.outputs[1:], strict=True):
        old = scatter.outputs[0]
        if old not in graph.outputs or scatter.inputs[0] not in graph.inputs:
            raise SpecExportError(f"attention {name!r}: its cache {old.name!r} is not from an input to an output")
        present.name, present.shape, present.type = old.name, old.shape, old.type
        index = next(i for i, value in enumerate(graph.outputs) if value is old)
        graph.outputs[index] = present
        old.name = None
    merge = _single_user(_single_user(node, "Transpose", name), "Reshape", name)
    merge.outputs[0].replace_all_uses_with(cut.outputs[0])


def _new_rows(scatter: ir.Node, layer: str | None) -> ir.Value:
    """The rows a layer adds, [1, Hkv, T, D], behind the commit recipe."""
    picked = _producer(scatter.inputs[1], "Gather", layer)
    joined = _producer(picked.inputs[0], "Concat", layer)
    new = joined.inputs[1]
    assert new is not None
    return new


def _flatten(graph: ir.Graph, before: ir.Node, value: ir.Value | None, layer: str | None) -> tuple[ir.Value, int]:
    """[1, heads, T, D] (maybe rotated) as [1, T, heads * D], undoing the transpose instead of adding one."""
    rotary = value.producer() if value is not None else None
    rotated = rotary is not None and rotary.op_type == "RotaryEmbedding"
    transpose = _producer(rotary.inputs[0] if rotated and rotary is not None else value, "Transpose", layer)
    split = transpose.inputs[0]
    assert split is not None and split.shape is not None
    heads, width = (dim for dim in split.shape[2:])
    if not isinstance(heads, int) or not isinstance(width, int):
        raise SpecExportError(f"attention {layer!r}: head count and width must be static, got {split.shape}")
    source = split.producer()
    if source is not None and source.op_type == "Reshape":
        flat = source.inputs[0]
        assert flat is not None
    else:
        shape = constant(graph, f"{layer}_{split.name}_flat", np.array([1, -1, heads * width]))
        reshape = ir.node("Reshape", [split, shape])
        graph.insert_before(before, reshape)
        flat = reshape.outputs[0]
    if rotated and rotary is not None:
        if "interleaved" in rotary.attributes and rotary.attributes["interleaved"].as_int():
            raise SpecExportError(f"attention {layer!r}: expected half-split RotaryEmbedding, found interleaved")
        attributes = {"num_heads": heads}
        partial = rotary.attributes.get("rotary_embedding_dim")
        if partial is not None and partial.as_int():
            attributes["rotary_embedding_dim"] = partial.as_int()
        turned = ir.node("RotaryEmbedding", [flat, *rotary.inputs[1:]], attributes)
        graph.insert_before(before, turned)
        flat = turned.outputs[0]
    return flat, heads


def _double(graph: ir.Graph, before: ir.Node, values: list[ir.Value | None], rows: _Rows, layer: str | None) -> None:
    """Feed the layer's projections from the attended rows instead of the nodes."""
    projections = []
    for value in values:
        while value is not None and (node := value.producer()) is not None and node.op_type != "MatMul":
            value = node.inputs[0]
        projections.append(_producer(value, "MatMul", layer))
    readers = list(dict.fromkeys(_permuted(projection) for projection in projections))
    source = readers[0].inputs[0]
    if source is None or any(reader.inputs[0] is not source for reader in readers):
        raise SpecExportError(f"attention {layer!r}: q, k and v are not projections of one value")
    picked = ir.node("Gather", [source, rows.pick], {"axis": 1})
    graph.insert_before(readers[0], picked)
    for reader in readers:
        reader.replace_input_with(0, picked.outputs[0])


def _permuted(projection: ir.Node) -> ir.Node:
    """What reads a projection's input: itself, or what puts the channels into the order of its codes (act-order)."""
    value = projection.inputs[0]
    node = value.producer() if value is not None else None
    if (
        node is None
        or node.op_type != "Gather"
        or "axis" not in node.attributes
        or node.attributes["axis"].as_int() != -1
    ):
        return projection
    return node


def _single_user(node: ir.Node, op_type: str, layer: str | None) -> ir.Node:
    users = [user for user, _ in node.outputs[0].uses()]
    if len(users) != 1 or users[0].op_type != op_type:
        raise SpecExportError(f"attention {layer!r}: expected one {op_type} after {node.op_type}")
    return users[0]


def commit_model(layers: int, kv_heads: int, head_dim: int, slots: int, dtype: ir.DataType) -> ir.Model:
    """The commit of a lowered target as its own graph: moves accepted rows in every cache, in place.

    Inputs ``commit`` [A], ``write`` [1] and the caches; outputs the caches, bound to the same memory.
    """
    int64 = ir.TensorType(ir.DataType.INT64)
    write = ir.Value(name=contract.WRITE, shape=ir.Shape([1]), type=int64)
    commit = ir.Value(name=contract.COMMIT, shape=ir.Shape([contract.COMMIT_DIM]), type=int64)
    shape, kind = ir.Shape([1, kv_heads, slots + CPU_SPARE_ROWS, head_dim]), ir.TensorType(dtype)
    nodes, pasts, presents = [], [], []
    for past_name, present_name in contract.cache_names(layers):
        past = ir.Value(name=past_name, shape=shape, type=kind)
        rows = ir.node("Gather", [past, commit], {"axis": 2})
        moved = ir.node("TensorScatter", [past, rows.outputs[0], write], {"axis": -2})
        moved.outputs[0].name, moved.outputs[0].shape, moved.outputs[0].type = present_name, shape, kind
        nodes += [rows, moved]
        pasts.append(past)
        presents.append(moved.outputs[0])
    graph = ir.Graph([write, commit, *pasts], presents, nodes=nodes, name="commit", opset_imports={"": contract.OPSET})
    return ir.Model(graph, ir_version=10, producer_name="specexport")
