"""Lowering of recurrent drafters for engines with dynamic shapes: read only the used rows of the draft cache.

Requires: a graph of ``exporter.heads.export`` with static caches of S rows. Ensures: the same outputs; whatever reads
an updated cache reads its first ``past + A`` rows, and masks have as many columns. One layer over a few hundred used
rows costs far less than over thousands of slots, once a depth of the tree.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from specexport.exporter.passes.graph import constant, is_arange
from specexport.runtime import contract
from specexport.runtime.errors import SpecExportError


def lower(model: ir.Model, slots: int) -> ir.Model:
    """Lower ``model`` in place and return it. ``slots`` is S.

    Raises:
        SpecExportError: the graph has no column index of S entries or no cache update.
    """
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    index = next((v for v in graph.initializers.values() if is_arange(v, slots)), None)
    scatters = [node for node in graph if node.op_type == "TensorScatter"]
    if index is None or not scatters:
        raise SpecExportError("not a drafter graph with a cache: no column index (arange(S)) or no TensorScatter")
    zero, one = constant(graph, "const_0", np.array(0)), constant(graph, "const_1", np.array(1))
    first, axis = constant(graph, "const_[0]", np.array([0])), constant(graph, "const_[2]", np.array([2]))
    count = ir.node("Shape", [inputs[contract.TOKENS]], {"start": 1, "end": 2})
    used = ir.node("Add", [inputs[contract.PAST], count.outputs[0]])
    scalar = ir.node("Squeeze", [used.outputs[0]])
    columns = ir.node("Range", [zero, scalar.outputs[0], one])
    graph.insert_before(graph[0], [count, used, scalar, columns])
    for user, place in list(index.uses()):
        user.replace_input_with(place, columns.outputs[0])
    for node in scatters:
        present = node.outputs[0]
        readers = list(present.uses())
        cut = ir.node("Slice", [present, first, used.outputs[0], axis])
        for user, place in readers:
            user.replace_input_with(place, cut.outputs[0])
        graph.insert_after(node, cut)
    passes.RemoveUnusedNodesPass()(model)
    passes.TopologicalSortPass()(model)
    kept = set(graph.outputs)
    for node in graph:
        for value in node.outputs:
            if value not in kept:
                value.shape = None  # recorded for S columns
    return model
