"""The best logits of each row as outputs, so that an engine on a device need not hand over whole rows.

Requires: a target graph with ``logits`` [R, V]. Ensures: the same outputs, and ``top_values`` float32 [R, k],
``top_tokens`` int64 [R, k], the k best among the ids below ``valid_vocab``, best first. A NaN counts as +inf there,
so that whoever reads the summary sees it (what TopK does with one is nobody's promise). Ties are broken as the backend
does: ``runtime.summary`` relies on none.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from specexport.exporter.passes.graph import constant
from specexport.runtime import contract
from specexport.runtime.errors import SpecExportError

#: Best tokens of a row: above what generation defaults ask for as ``top_k`` (20 to 50), and little to sort.
COUNT = 64


def lower(model: ir.Model, valid_vocab: int, count: int = COUNT) -> ir.Model:
    """Add the outputs in place and return the model.

    Args:
        valid_vocab: ids from there on are padding. count: k, at most ``valid_vocab``.

    Raises:
        SpecExportError: the graph has no logits of a static width that holds ``valid_vocab``.
    """
    graph = model.graph
    logits = next((value for value in graph.outputs if value.name == contract.LOGITS), None)
    width = None if logits is None or logits.shape is None else logits.shape[-1]
    if logits is None or not isinstance(width, int) or not 1 <= valid_vocab <= width:
        raise SpecExportError(f"the graph has no logits [R, V] with V >= {valid_vocab}: it is not a target graph")
    assert logits.shape is not None
    k = min(count, valid_vocab)
    valid, nodes = logits, []
    if valid_vocab < width:
        bounds = [
            constant(graph, f"summary_{name}", np.array([at])) for name, at in (("first", 0), ("end", valid_vocab))
        ]
        nodes.append(ir.node("Slice", [logits, *bounds, constant(graph, "summary_axis", np.array([1]))]))
        valid = nodes[-1].outputs[0]
    nodes.append(ir.node("IsNaN", [valid]))
    most = constant(graph, "summary_inf", np.array(np.inf, np.float32))
    nodes.append(ir.node("Where", [nodes[-1].outputs[0], most, valid]))
    ranked = ir.node("TopK", [nodes[-1].outputs[0], constant(graph, "summary_k", np.array([k]))], num_outputs=2)
    for output, name, kind in zip(
        ranked.outputs, (contract.TOP_VALUES, contract.TOP_TOKENS), (ir.DataType.FLOAT, ir.DataType.INT64), strict=True
    ):
        output.name, output.shape, output.type = name, ir.Shape([logits.shape[0], k]), ir.TensorType(kind)
        graph.outputs.append(output)
    graph.extend([*nodes, ranked])
    return model
