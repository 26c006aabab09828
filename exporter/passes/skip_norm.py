"""Lowering for ONNX Runtime's CPU provider: a residual's addition and the norm after it as one operator.

Requires: nothing. Ensures: the same values; ``Add`` followed by ``RMSNormalization`` over the last axis is
``com.microsoft::SkipSimplifiedLayerNormalization``, whose fourth output is the sum for all its other readers.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common as passes

from specexport.exporter.passes.graph import MICROSOFT


def lower(model: ir.Model) -> ir.Model:
    """Lower ``model`` in place and return it."""
    graph = model.graph
    for node in [node for node in graph if node.op_type == "Add"]:
        norms = [user for user, index in node.outputs[0].uses() if index == 0 and _is_norm(user)]
        if norms and node.outputs[0] not in graph.outputs and _is_residual(node):
            _fuse(graph, node, norms[0])
    if any(node.op_type == "SkipSimplifiedLayerNormalization" for node in graph):
        model.opset_imports[MICROSOFT] = 1
        passes.TopologicalSortPass()(model)
    return model


def _is_norm(node: ir.Node) -> bool:
    axis = node.attributes.get("axis")
    return node.op_type == "RMSNormalization" and (axis is None or axis.as_int() == -1)


def _is_residual(node: ir.Node) -> bool:
    """Whether both sides are rows of states: a bias is added otherwise."""
    return all(value is not None and value.const_value is None for value in node.inputs)


def _fuse(graph: ir.Graph, add: ir.Node, norm: ir.Node) -> None:
    fused = ir.node(
        "SkipSimplifiedLayerNormalization",
        [*add.inputs, norm.inputs[1]],
        {"epsilon": norm.attributes["epsilon"].as_float()},
        domain=MICROSOFT,
        num_outputs=4,
    )
    graph.insert_before(norm, fused)
    normed, _, _, total = fused.outputs
    for old, new in ((norm.outputs[0], normed), (add.outputs[0], total)):
        new.name, new.shape, new.type = old.name, old.shape, old.type
        old.name = None
        old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove([norm, add], safe=True)
