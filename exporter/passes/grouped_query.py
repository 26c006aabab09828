"""Lowering for ONNX Runtime's CPU provider: one GroupQueryAttention a layer, reading only the used rows.

Requires: a target graph as ``exporter.onnx`` makes it. Ensures: the same tokens, masks and logits; each layer's
``Attention``, its two ``TensorScatter`` and, where the operator can, its rotations become one
``com.microsoft::GroupQueryAttention`` that appends in place; query, key and value come from one product where they
can (``passes.joined_products``); masks are ``past + T`` wide instead of S; inputs ``write``, ``commit`` and ``order``
are gone, because accepted rows that have to move are moved beforehand by the graph of :func:`commit_model` (most
steps need none). Every node counts: a step of a small model is hundreds of operators of a few microseconds each.

Kernels take other code paths, with another order of additions, for a lone row and for the last of an odd number. So
that a row's result does not depend on how many rows share the call, and a chain of drafts gives bit for bit the logits
of plain decoding, the number of rows is made even: attention's alone by the graph itself (``pairs``) where products do
the same with any number of rows (``passes.matmul_nbits``), else all by the engine, which gives the last node twice
(:class:`specexport.engines.ort.OrtEngine`). The extra row needs a place even after the last slot, so lowered caches
have ``CPU_SPARE_ROWS`` more. Columns of a branching tree still add up in another order, which costs about 1e-7.

Why: over 4096 slots ``Attention`` reads and copies all of them, whatever the used length, and a ``Slice`` before it
copies the used ones; GroupQueryAttention does neither (``scripts/bench_lowerings.py`` measures all three).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from specexport.engines.ort import CPU_SPARE_ROWS
from specexport.exporter.passes import joined_products
from specexport.exporter.passes.graph import (
    MICROSOFT,
    Emitter,
    check_attention,
    constant,
    initializer,
    new_rows,
    producer,
    replace_cache,
)
from specexport.exporter.quantize.insert import Put, sizes
from specexport.runtime import contract
from specexport.runtime.errors import SpecExportError

#: GroupQueryAttention refuses head widths that are no multiple of this, and rotates those of multiples of the other.
HEAD_DIM_MULTIPLE, ROTATED_MULTIPLE = 8, 16


def lower(model: ir.Model, slots: int, windows: Sequence[int | None], put: Put, *, pairs: bool = False) -> ir.Model:
    """Lower ``model`` in place and return it.

    Args:
        slots: S. windows: attention window of each layer, None for all rows.
        put: stores the rotation tables anew, longer by the spare rows.
        pairs: attention computes an even number of rows, the last node's twice where a call has an odd number.

    Raises:
        SpecExportError: the graph is not what this pass requires; the message names the node.
    """
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    attentions = [node for node in graph if node.op_type == "Attention"]
    if not attentions:
        raise SpecExportError("the graph has no Attention nodes: it is not a target graph, or was lowered already")
    for node in attentions:
        check_attention(node)
    if missing := [name for name in contract.STEP_INPUTS if name not in inputs]:
        raise SpecExportError(f"the graph has no input {missing[0]}: it is not a target graph")
    caches = {name for pair in contract.cache_names(len(attentions)) for name in pair}
    if any(value.shape is None or value.shape[2] != slots for value in graph.inputs if value.name in caches):
        raise SpecExportError(f"the graph's caches have not {slots} rows")
    reach = [None if window is None or window >= slots else window for window in windows]
    call = _Call(graph, inputs, reach, attentions[0], put, slots if pairs else None)
    for node, window in zip(attentions, reach, strict=True):
        _lower_layer(graph, node, call, window)
    for name in (contract.WRITE, contract.COMMIT, contract.ORDER):
        graph.inputs.remove(inputs[name])
    model.opset_imports[MICROSOFT] = 1
    passes.RemoveUnusedNodesPass()(model)
    passes.TopologicalSortPass()(model)
    for value in [*graph.inputs, *graph.outputs]:
        if value.name in caches and value.shape is not None:
            value.shape = ir.Shape([*value.shape[:2], slots + CPU_SPARE_ROWS, value.shape[3]])
    leftover = [name for name in (contract.WRITE, contract.COMMIT, contract.ORDER) if inputs[name].uses()]
    if leftover:
        raise SpecExportError(f"inputs {', '.join(leftover)} are still used after lowering")
    return model


class _Call:
    """What the layers share: row counts, masks and rotation tables.

    The operator takes a call with as many rows as columns for a first prompt, whose positions it makes up itself. So
    that a tree may be the first call too, there is one column more then; causality hides it.

    Attributes:
        last: int32 [1], index of the last row that attention sees. total: int32 [1], columns of the masks.
        masks: additive [1, 1, T, total] by window. positions: int64 [1, T], the graph's input.
        rows: int64 [E], the nodes that attention computes, E being T or one more; None where it is T always.
        count: int64 [1], T. turned: int64 [1, E], positions of those rows.
    """

    def __init__(
        self,
        graph: ir.Graph,
        inputs: Mapping[str, ir.Value],
        windows: Sequence[int | None],
        attention: ir.Node,
        put: Put,
        pairs: int | None,
    ) -> None:
        self._graph, self._put = graph, put
        self._tables: dict[ir.Value, ir.Value] = {}
        past, tree = inputs[contract.PAST], inputs[contract.TREE]
        self.positions = self.turned = inputs[contract.POSITIONS]
        where = mask_choice(attention)
        emit = Emitter(graph)
        one, front, back = (emit.constant(np.array([number])) for number in (1, 0, -1))
        self.count = count = computed = emit("Shape", [inputs[contract.TOKENS]], start=1, end=2)
        end = used = emit("Add", [past, count])
        self.rows: ir.Value | None = None
        if pairs is not None:
            computed, self.rows = _paired(emit, count, pairs)
            used = emit("Add", [past, computed])
            tree = emit("Gather", [tree, self.rows], axis=1)
            self.turned = emit("Gather", [self.positions, self.rows], axis=1)
        total = emit("Max", [used, emit("Add", [computed, one])])
        beyond = emit("Sub", [total, end])  # a double has no column: nobody sees what it writes
        self.last = emit("Cast", [emit("Sub", [used, one])], to=ir.DataType.INT32)
        self.total = emit("Cast", [total], to=ir.DataType.INT32)
        pads = emit("Concat", [past, beyond], axis=0)
        seen = emit("Pad", [emit("Unsqueeze", [tree, front]), pads, emit.constant(np.array(True)), back])
        age = _age(emit, self.positions, self.turned, past, beyond) if any(windows) else None
        self.masks: dict[int | None, ir.Value] = {}
        for window in dict.fromkeys(windows):
            near = seen
            if window is not None:
                assert age is not None
                near = emit("And", [seen, emit("Less", [age, emit.constant(np.array(window))])])
            self.masks[window] = emit("Where", [near, *where.inputs[1:]])
        graph.insert_before(graph[0], emit.nodes)

    def paired(self, before: ir.Node, values: Sequence[ir.Value | None]) -> list[ir.Value | None]:
        """Query, key and value, [1, T, ..], of the rows that attention computes."""
        if self.rows is None:
            return list(values)
        nodes = [None if value is None else ir.node("Gather", [value, self.rows], {"axis": 1}) for value in values]
        self._graph.insert_before(before, [node for node in nodes if node is not None])
        return [None if node is None else node.outputs[0] for node in nodes]

    def unpaired(self, attention: ir.Node) -> ir.Value:
        """Attention's output of the T nodes."""
        if self.rows is None:
            return attention.outputs[0]
        emit = Emitter(self._graph)
        start, axis = (emit.constant(np.array([number])) for number in (0, 1))
        found = emit("Slice", [attention.outputs[0], start, self.count, axis])
        self._graph.insert_after(attention, emit.nodes)
        return found

    def table(self, value: ir.Value) -> ir.Value:
        """A rotation table with as many rows as there may be columns."""
        if value not in self._tables:
            assert value.const_value is not None
            rows = value.const_value.numpy()
            longer = np.concatenate([rows, np.zeros((CPU_SPARE_ROWS, rows.shape[1]), rows.dtype)])
            name = f"{value.name}.longer"
            tensor = self._put(name, longer.view(np.uint8), value.const_value.dtype, longer.shape)
            self._tables[value] = initializer(self._graph, name, tensor)
        return self._tables[value]


def _paired(emit: Emitter, count: ir.Value, slots: int) -> tuple[ir.Value, ir.Value]:
    """An even number of rows for so many, int64 [1], and which they are, int64 [E]: the last one again if need be.

    A prompt that fills all slots stays as it is: it is the same call whoever makes it, and a double has no place.
    """
    zero, one, two = (emit.constant(np.array(number)) for number in (0, 1, 2))
    odd = emit("Mod", [count, two])
    computed = emit("Min", [emit("Add", [count, odd]), emit.constant(np.array([slots]))])
    index = emit("Range", [zero, emit("Squeeze", [computed]), one])
    return computed, emit("Min", [index, emit("Sub", [count, one])])


def _age(emit: Emitter, positions: ir.Value, rows: ir.Value, past: ir.Value, beyond: ir.Value) -> ir.Value:
    """How many positions a column lies before a row, int64 [1, E, total]; a committed row holds its own index.

    Args:
        positions: of the nodes, which are columns too. rows: positions of the rows.
    """
    zero, one, front, back = (emit.constant(np.array(number)) for number in (0, 1, [0], [-1]))
    committed = emit("Range", [zero, emit("Squeeze", [past]), one])
    nodes = emit("Squeeze", [positions, front])
    columns = emit("Concat", [committed, nodes, emit("Expand", [zero, beyond])], axis=0)
    return emit("Sub", [emit("Unsqueeze", [rows, back]), columns])


def mask_choice(attention: ir.Node) -> ir.Node:
    """The ``Where`` that makes an attention's mask of what is seen, zero and the lowest number."""
    name, value = attention.outputs[0].name, attention.inputs[3]
    while value is not None and (node := value.producer()) is not None and node.op_type == "Unsqueeze":
        value = node.inputs[0]
    return producer(value, "Where", name)


def _lower_layer(graph: ir.Graph, node: ir.Node, call: _Call, window: int | None) -> None:
    name = node.outputs[0].name
    scatters = [producer(value, "TensorScatter", name) for value in node.inputs[1:3]]
    heads = [_Heads(graph, node, value) for value in (node.inputs[0], *(new_rows(each, name) for each in scatters))]
    query, key, _ = heads
    attributes: dict[str, int | float] = {
        "num_heads": query.count,
        "kv_num_heads": key.count,
        "scale": node.attributes["scale"].as_float(),
    }
    turned: list[ir.Value | None] = [None, None, None]
    if rotation := _shared_rotation(heads, call):
        turned, attributes["do_rotary"] = [*rotation, call.turned], 1
        packed = joined_products.join(graph, [each.flat for each in heads])
        rows: list[ir.Value | None] = [each.flat for each in heads] if packed is None else [packed, None, None]
    else:
        rows = [each.rotated(graph, node) for each in heads]
    rows = call.paired(node, rows)
    fused = ir.node(
        "GroupQueryAttention",
        [*rows, *(each.inputs[0] for each in scatters), call.last, call.total, *turned, call.masks[window]],
        attributes,
        domain=MICROSOFT,
        num_outputs=3,
    )
    graph.insert_before(node, fused)
    for scatter, present in zip(scatters, fused.outputs[1:], strict=True):
        replace_cache(graph, scatter, present, name)
    merge = _single_user(_single_user(node, "Transpose", name), "Reshape", name)
    merge.outputs[0].replace_all_uses_with(call.unpaired(fused))


class _Heads:
    """Query, key or value of a layer before it is split into heads, [1, T, count * width], and its rotation if any."""

    def __init__(self, graph: ir.Graph, attention: ir.Node, value: ir.Value | None) -> None:
        layer = attention.outputs[0].name
        node = value.producer() if value is not None else None
        self.rotary = node if node is not None and node.op_type == "RotaryEmbedding" else None
        transpose = producer(value if self.rotary is None else self.rotary.inputs[0], "Transpose", layer)
        split = transpose.inputs[0]
        assert split is not None and split.shape is not None
        count, width = split.shape[2:]
        if not isinstance(count, int) or not isinstance(width, int):
            raise SpecExportError(f"attention {layer!r}: head count and width must be static, got {split.shape}")
        self.count, self.width = count, width
        attribute = None if self.rotary is None else self.rotary.attributes.get("interleaved")
        if attribute is not None and attribute.as_int():
            raise SpecExportError(f"attention {layer!r}: expected half-split RotaryEmbedding, found interleaved")
        source = split.producer()
        if source is not None and source.op_type == "Reshape":
            assert source.inputs[0] is not None
            self.flat = source.inputs[0]
            return
        node = _norm_of_heads(source, self.count)
        if node is None:
            shape = constant(graph, f"{layer}_{split.name}_flat", np.array([1, -1, self.count * self.width]))
            node = ir.node("Reshape", [split, shape])
        graph.insert_before(attention, node)
        self.flat = node.outputs[0]

    def rotated(self, graph: ir.Graph, before: ir.Node) -> ir.Value:
        """The flat rows, rotated by an operator of their own."""
        if self.rotary is None:
            return self.flat
        attributes = {"num_heads": self.count}
        partial = self.rotary.attributes.get("rotary_embedding_dim")
        if partial is not None and partial.as_int():
            attributes["rotary_embedding_dim"] = partial.as_int()
        node = ir.node("RotaryEmbedding", [self.flat, *self.rotary.inputs[1:]], attributes)
        graph.insert_before(before, node)
        return node.outputs[0]


def _norm_of_heads(norm: ir.Node | None, heads: int) -> ir.Node | None:
    """A norm of each head that needs no split into heads; None where something else is there."""
    if norm is None or norm.op_type != "RMSNormalization" or norm.attributes["axis"].as_int() != -1:
        return None
    split = norm.inputs[0].producer() if norm.inputs[0] is not None else None
    if split is None or split.op_type != "Reshape":
        return None
    attributes = {"num_branches": heads, "epsilon": norm.attributes["epsilon"].as_float()}
    return ir.node("BranchwiseRMSNorm", [split.inputs[0], norm.inputs[1]], attributes, domain=MICROSOFT)


def _shared_rotation(heads: Sequence[_Heads], call: _Call) -> list[ir.Value] | None:
    """The tables by which the operator can rotate query and key itself; None where it cannot."""
    query, key, value = heads
    if query.rotary is None or key.rotary is None or value.rotary is not None:
        return None
    if any(mine is not other for mine, other in zip(query.rotary.inputs[1:], key.rotary.inputs[1:], strict=True)):
        return None
    cosine, sine, positions = query.rotary.inputs[1:]
    if positions is not call.positions or cosine is None or sine is None or cosine.const_value is None:
        return None
    if query.width % ROTATED_MULTIPLE or sizes(cosine)[1] % (ROTATED_MULTIPLE // 2):
        return None
    return [call.table(cosine), call.table(sine)]


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
