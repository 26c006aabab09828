"""A drafter that reads some of the target's features: picked inside its graph, so that every drafter is fed the same.

Requires: a graph of ``exporter.heads.export`` whose ``features`` are its own captures, side by side. Ensures: the
same outputs from the captures that the target offers, side by side in another order and with others between.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from specexport.exporter.passes.graph import constant
from specexport.runtime import contract


def lower(model: ir.Model, picks: Sequence[int], offered: int) -> bool:
    """Rewrite ``model`` in place.

    Args:
        picks: which of the ``offered`` captures the graph reads, in its order. All have the same width.

    Returns:
        Whether anything had to change.
    """
    if list(picks) == list(range(offered)):
        return False
    graph = model.graph
    features = next(value for value in graph.inputs if value.name == contract.FEATURES)
    assert features.shape is not None
    *others, size = features.shape.dims
    assert isinstance(size, int)
    users, width = list(features.uses()), size // len(picks)
    features.shape = ir.Shape([*others, width * offered])
    runs = _runs(picks)
    places = {place * width for run in runs for place in run}
    at = {place: constant(graph, f"features_{place}", np.array([place])) for place in sorted(places)}
    axis = constant(graph, "features_axis", np.array([-1]))
    parts = [ir.node("Slice", [features, at[first * width], at[last * width], axis]) for first, last in runs]
    nodes = parts
    if len(parts) > 1:
        nodes = [*parts, ir.node("Concat", [part.outputs[0] for part in parts], {"axis": -1})]
    graph.insert_before(graph[0], nodes)
    for user, place in users:
        user.replace_input_with(place, nodes[-1].outputs[0])
    return True


def _runs(picks: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours in ``picks`` that are neighbours in the features too, as (first, after the last)."""
    runs: list[tuple[int, int]] = []
    for pick in picks:
        if runs and runs[-1][1] == pick:
            runs[-1] = runs[-1][0], pick + 1
        else:
            runs.append((pick, pick + 1))
    return runs
