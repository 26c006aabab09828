"""Lowering for engines with our plugin: one ``specexport::TreeAttention`` a layer, commit and mask included.

Requires: a target graph as ``exporter.onnx`` makes it. Ensures: the same inputs, outputs and logits; each layer's
commit recipes, cache updates and ``Attention`` are one node; the masks over S columns are gone, and the tree is packed
into bits once a call.

With its reference body, a local function of standard operators, the file runs on any engine. TensorRT's parser prefers
a function to a plugin: what is compiled with the plugin carries none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes import common as passes

from specexport.engines.plugins.tree_attention import DOMAIN, HEAD_DIMS, OPERATOR
from specexport.exporter.passes.graph import (
    Emitter,
    check_attention,
    constant,
    new_rows,
    producer,
    replace_cache,
)
from specexport.runtime import contract
from specexport.runtime.errors import SpecExportError

#: What a call of the operator means, in standard operators. ``window`` is 0 for full attention.
BODY = """
<opset_import: ["" : 24], domain: "specexport">
TreeAttention <scale, window> (query, key, value, past_k, past_v, tree, positions, past, write, commit, order)
    => (output, present_k, present_v)
{
    start = Cast <to: int = 7> (write)
    kept_k = Gather <axis: int = 2> (past_k, commit)
    joined_k = Concat <axis: int = 2> (kept_k, key)
    block_k = Gather <axis: int = 2> (joined_k, order)
    present_k = TensorScatter <axis: int = -2> (past_k, block_k, start)
    kept_v = Gather <axis: int = 2> (past_v, commit)
    joined_v = Concat <axis: int = 2> (kept_v, value)
    block_v = Gather <axis: int = 2> (joined_v, order)
    present_v = TensorScatter <axis: int = -2> (past_v, block_v, start)

    zero = Constant <value_int: int = 0> ()
    one = Constant <value_int: int = 1> ()
    two = Constant <value_int: int = 2> ()
    word_bits = Constant <value_int: int = 32> ()
    slots = Shape <start: int = 2, end: int = 3> (past_k)
    limit = Squeeze (slots)
    column = Range (zero, limit, one)
    committed_rows = Cast <to: int = 7> (past)
    offset = Sub (column, committed_rows)
    nodes = Shape <start: int = 2, end: int = 3> (query)
    last = Sub (nodes, one)
    last_node = Squeeze (last)
    node = Clip (offset, zero, last_node)

    words = Cast <to: int = 7> (tree)
    word_index = Div (node, word_bits)
    word = Gather <axis: int = 1> (words, word_index)
    bit = Mod (node, word_bits)
    power = Pow (two, bit)
    masked_word = BitwiseAnd (word, power)
    is_clear = Equal (masked_word, zero)
    is_ancestor = Not (is_clear)
    is_node = Less (offset, nodes)
    seen_node = And (is_ancestor, is_node)
    is_committed = Less (offset, zero)
    in_tree = Or (seen_node, is_committed)

    position = Cast <to: int = 7> (positions)
    node_position = Gather <axis: int = 1> (position, node)
    column_position = Where (is_committed, column, node_position)
    row_position = Transpose <perm: ints = [1, 0]> (position)
    distance = Sub (row_position, column_position)
    reach = Constant <value_int: int = @window> ()
    is_near = Less (distance, reach)
    is_full = Equal (reach, zero)
    in_reach = Or (is_near, is_full)
    seen = And (in_tree, in_reach)

    lowest = Constant <value_float: float = -65504.0> ()
    nothing = Constant <value_float: float = 0.0> ()
    hidden_bias = CastLike (lowest, query)
    seen_bias = CastLike (nothing, query)
    bias = Where (seen, seen_bias, hidden_bias)
    front = Constant <value_ints: ints = [0, 1]> ()
    mask = Unsqueeze (bias, front)
    output = Attention <scale: float = @scale> (query, present_k, present_v, mask)
}
"""


def lower(model: ir.Model, windows: Sequence[int | None], *, body: bool = False) -> ir.Model:
    """Lower ``model`` in place and return it.

    Args:
        windows: of each layer's attention, in tokens; None: full.
        body: carry :data:`BODY`, for engines without the plugin; any head width will do then.

    Raises:
        SpecExportError: the graph is not what this pass requires, or its head width has no kernel.
    """
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    attentions = [node for node in graph if node.op_type == "Attention"]
    if missing := [name for name in contract.STEP_INPUTS if name not in inputs]:
        raise SpecExportError(f"the graph has no input {missing[0]}: it is not a target graph")
    if len(attentions) != len(windows):
        raise SpecExportError(f"the graph has {len(attentions)} Attention nodes, expected {len(windows)}: one a layer")
    _check_masks(attentions, windows)
    shared = _shared_inputs(graph, inputs)
    for node, window in zip(attentions, windows, strict=True):
        _lower_layer(graph, node, window, shared, any_width=body)
    model.opset_imports[DOMAIN] = 1
    passes.RemoveUnusedNodesPass()(model)
    passes.TopologicalSortPass()(model)
    if body:
        function = ir.from_proto(onnx.parser.parse_function(BODY))
        assert isinstance(function, ir.Function)
        model.functions[function.identifier()] = function
    return model


def _check_masks(attentions: Sequence[ir.Node], windows: Sequence[int | None]) -> None:
    """A window stands for the mask it replaces: the same for the same mask, another for another."""
    pairs = {(node.inputs[3], window) for node, window in zip(attentions, windows, strict=True) if len(node.inputs) > 3}
    if not len(pairs) == len({mask for mask, _ in pairs}) == len({window for _, window in pairs}):
        raise SpecExportError(f"the windows {list(windows)} do not fit the masks of the graph's layers")


def _shared_inputs(graph: ir.Graph, inputs: dict[str | None, ir.Value]) -> list[ir.Value]:
    """The packed tree and the step's other inputs as 32-bit integers, made once a call."""
    emit = Emitter(graph)

    def number(values: int | list[int]) -> ir.Value:
        return emit.constant(np.array(values))

    powers = (1 << np.arange(32, dtype=np.uint32)).view(np.int32)
    bits = emit("Cast", [emit("Squeeze", [inputs[contract.TREE], number([0])])], to=ir.DataType.INT32)
    count = emit("Shape", [inputs[contract.TREE]], start=1, end=2)
    missing = emit("Mod", [emit("Neg", [count]), number(32)])
    padded = emit("Pad", [bits, emit("Concat", [number([0, 0, 0]), missing], axis=0)])
    words = emit("Reshape", [padded, number([0, -1, 32])])
    valued = emit("Mul", [words, constant(graph, "tree_attention_powers", powers)])
    tree = emit("ReduceSum", [valued, number([2])], keepdims=0)
    names = (contract.POSITIONS, contract.PAST, contract.WRITE, contract.COMMIT, contract.ORDER)
    others = [emit("Cast", [inputs[name]], to=ir.DataType.INT32) for name in names]
    graph.insert_before(graph[0], emit.nodes)
    return [tree, *others]


def _lower_layer(
    graph: ir.Graph, node: ir.Node, window: int | None, shared: Sequence[ir.Value], any_width: bool
) -> None:
    name = node.outputs[0].name
    check_attention(node)
    scatters = [producer(value, "TensorScatter", name) for value in node.inputs[1:3]]
    news = [new_rows(scatter, name) for scatter in scatters]
    pasts = [scatter.inputs[0] for scatter in scatters]
    shape = pasts[0].shape if pasts[0] is not None else None
    if shape is None or (shape[3] not in HEAD_DIMS and not any_width):
        raise SpecExportError(f"attention {name!r}: heads of width {shape and shape[3]}, expected one of {HEAD_DIMS}")
    fused = ir.node(
        OPERATOR,
        [node.inputs[0], *news, *pasts, *shared],
        {"scale": node.attributes["scale"].as_float(), "window": window or 0},
        domain=DOMAIN,
        num_outputs=3,
    )
    graph.insert_before(node, fused)
    for scatter, present in zip(scatters, fused.outputs[1:], strict=True):
        replace_cache(graph, scatter, present, name)
    output = fused.outputs[0]
    output.shape, output.type, output.name = node.outputs[0].shape, node.outputs[0].type, name
    node.outputs[0].name = None
    node.outputs[0].replace_all_uses_with(output)
