"""Lowering for ONNX Runtime's CPU provider with our own operators (``engines/kernels``).

Requires: a graph of ``passes.grouped_query`` and ``passes.matmul_nbits``. Ensures: the same inputs, outputs and codes;
``MatMulNBits`` with 8-bit activations become ``specexport::QuantizedProduct``, together with the norm before them and
the gate after them, and ``GroupQueryAttention`` becomes ``specexport::TreeAttention``, together with norms of its
heads; no mask is made. A row of logits then depends on nothing but its node's ancestors, to the last bit, in trees too.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
from onnx_ir.passes import common as passes

from specexport.exporter.passes.matmul_nbits import FAST
from specexport.runtime import contract

#: Domain of our own operators.
DOMAIN = "specexport"
#: ``gate`` of QuantizedProduct.
SILU, GELU_TANH = 1, 2
#: Largest block that a product takes: its sums have 32 bits.
LARGEST_BLOCK = 65536
#: Outputs of a panel; gates and their values take turns panel by panel.
PANEL = 16


def lower(model: ir.Model, windows: Sequence[int | None] = ()) -> bool:
    """Lower ``model`` in place; False, and it stays as it is, where a product is none that the operators take.

    Args:
        windows: attention window of each layer, None for all rows; empty for a drafter's graph, whose attention stays.
    """
    graph = model.graph
    products = [node for node in graph if node.op_type == "MatMulNBits"]
    if not products or not all(_fits(node) for node in products):
        return False
    attentions = [node for node in graph if node.op_type == "GroupQueryAttention"] if windows else []
    if windows and any(node.op_type in ("MatMul", "Gemm") for node in graph):
        return False
    for node, window in zip(attentions, windows, strict=bool(windows)):
        _attend(graph, node, window)
    for node in products:
        _multiply(graph, node)
    model.opset_imports[DOMAIN] = 1
    passes.RemoveUnusedNodesPass()(model)
    passes.TopologicalSortPass()(model)
    return True


def _fits(node: ir.Node) -> bool:
    level, block, bits = (node.attributes[name].as_int() for name in ("accuracy_level", "block_size", "bits"))
    _, codes, scales, zeros, *others = *node.inputs, None
    if level != FAST or block % PANEL or block > LARGEST_BLOCK or bits not in (4, 8) or any(others):
        return False  # the others are an order of columns and a bias
    dtypes = [(codes, ir.DataType.UINT8), (scales, ir.DataType.FLOAT), (zeros, ir.DataType.UINT8)]
    return all(value is None or (value.const_value is not None and value.dtype == dtype) for value, dtype in dtypes)


def _user(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """The only reader of a value, if it is of this type."""
    if value is None or value.is_graph_output():
        return None
    users = [user for user, _ in value.uses()]
    return users[0] if len(users) == 1 and users[0].op_type == op_type else None


def _maker(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """What made a value, if it is of this type and nobody else reads it."""
    node = None if value is None else value.producer()
    alone = value is not None and len(value.uses()) == 1 and not value.is_graph_output()
    return node if node is not None and node.op_type == op_type and alone else None


def take(old: ir.Value, new: ir.Value) -> None:
    """``new`` in place of ``old``, by its name."""
    new.name, new.shape, new.type = old.name, old.shape, old.type
    old.name = None
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def _multiply(graph: ir.Graph, node: ir.Node) -> None:
    x, *stored = node.inputs
    zeros = stored[2] if len(stored) > 2 else None
    attributes: dict[str, int | float] = {
        name: node.attributes[name].as_int() for name in ("N", "K", "bits", "block_size")
    }
    gamma = skip = total = None
    epsilon = 0.0
    if (norm := _maker(x, "RMSNormalization")) is not None:
        x, gamma = norm.inputs
        epsilon = norm.attributes["epsilon"].as_float()
    elif (norm := _maker(x, "SkipSimplifiedLayerNormalization")) is not None:
        x, skip, gamma = norm.inputs[:3]
        epsilon = norm.attributes["epsilon"].as_float()
        total = norm.outputs[3]
    gate, output = _gate(node)
    fused = ir.node(
        "QuantizedProduct",
        [x, *stored[:2], zeros, gamma, skip],
        {**attributes, "gate": gate, "epsilon": epsilon},
        domain=DOMAIN,
        num_outputs=1 if total is None else 2,
    )
    graph.insert_before(node, fused)
    take(output, fused.outputs[0])
    if total is not None:
        take(total, fused.outputs[1])


def _gate(node: ir.Node) -> tuple[int, ir.Value]:
    """Which gate follows a product, and where it ends: half of the outputs, gated, times the other half."""
    output = node.outputs[0]
    split = _user(output, "Split")
    if split is None or len(split.outputs) != 2 or node.attributes["N"].as_int() % (2 * PANEL):
        return 0, output
    gates, values = split.outputs
    sizes = split.inputs[1]
    if sizes is None or sizes.const_value is None or len({*sizes.const_value.numpy().tolist()}) != 1:
        return 0, output
    kind, ends = 0, gates
    users = sorted((user for user, _ in gates.uses()), key=lambda user: user.op_type)
    if [user.op_type for user in users] == ["Mul", "Sigmoid"]:
        multiply, sigmoid = users
        if _user(sigmoid.outputs[0], "Mul") is multiply:
            kind, ends = SILU, multiply.outputs[0]
    elif (gelu := _user(gates, "Gelu")) is not None:
        approximate = gelu.attributes.get("approximate")
        if approximate is not None and approximate.as_string() == "tanh":
            kind, ends = GELU_TANH, gelu.outputs[0]
    product = _user(ends, "Mul")
    if not kind or product is None or _user(values, "Mul") is not product:
        return 0, output
    return kind, product.outputs[0]


def _attend(graph: ir.Graph, node: ir.Node, window: int | None) -> None:
    inputs = {value.name: value for value in graph.inputs}
    output = node.outputs[0]
    doubled = _user(output, "Slice")
    rows = list(node.inputs[:3])
    if doubled is not None and all(value is None or _maker(value, "Gather") is not None for value in rows):
        rows = [None if (made := _maker(value, "Gather")) is None else made.inputs[0] for value in rows]
        output = doubled.outputs[0]
    attributes: dict[str, int | float] = {
        "num_heads": node.attributes["num_heads"].as_int(),
        "kv_num_heads": node.attributes["kv_num_heads"].as_int(),
        "scale": node.attributes["scale"].as_float(),
        "window": window or 0,
        "epsilon": 0.0,
    }
    tables = list(node.inputs[7:9]) if "do_rotary" in node.attributes else [None, None]
    norms: list[ir.Value | None] = [None, None]
    makers = [_maker(value, "BranchwiseRMSNorm") for value in rows[:2]]
    query, key = makers
    if query is not None and key is not None:
        epsilons = {made.attributes["epsilon"].as_float() for made in (query, key)}
        if len(epsilons) == 1:
            attributes["epsilon"] = epsilons.pop()
            norms = [query.inputs[1], key.inputs[1]]
            rows = [query.inputs[0], key.inputs[0], rows[2]]
    splits = [_maker(value, "Split") for value in rows]
    if splits[0] is not None and all(split is splits[0] for split in splits) and splits[0].outputs == tuple(rows):
        rows = [splits[0].inputs[0], None, None]  # packed, in the order that the operator reads
    fused = ir.node(
        "TreeAttention",
        [
            *rows,
            *node.inputs[3:5],
            *tables,
            inputs[contract.POSITIONS],
            inputs[contract.PAST],
            inputs[contract.TREE],
            *norms,
        ],
        attributes,
        domain=DOMAIN,
        num_outputs=3,
    )
    graph.insert_before(node, fused)
    take(output, fused.outputs[0])
    for old, new in zip(node.outputs[1:], fused.outputs[1:], strict=True):
        take(old, new)
