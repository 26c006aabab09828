"""A drafter's graph reads its own captures out of those that the target offers, in its own order."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from specexport.exporter.passes import pick_features
from specexport.runtime.contract import FEATURES

WIDTH = 3


def graph_of(captures: int) -> ir.Model:
    """Twice the features, for any number of rows."""
    floats = ir.TensorType(ir.DataType.FLOAT)
    features = ir.Value(name=FEATURES, shape=ir.Shape([1, "A", captures * WIDTH]), type=floats)
    double = ir.node("Add", [features, features])
    double.outputs[0].name, double.outputs[0].type = "doubled", floats
    graph = ir.Graph([features], double.outputs, nodes=[double], name="drafter", opset_imports={"": 24})
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize(
    ("picks", "offered", "slices"),
    [
        ([0, 1], 2, 0),
        ([0, 1], 4, 1),
        ([3], 4, 1),
        ([1, 2, 4], 5, 2),
        ([2, 0, 1], 3, 2),
        ([1, 0], 2, 2),
    ],
)
def test_columns(picks: list[int], offered: int, slices: int) -> None:
    model = graph_of(len(picks))
    assert pick_features.lower(model, picks, offered) == (slices > 0)
    assert sum(node.op_type == "Slice" for node in model.graph) == slices
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    assert session.get_inputs()[0].shape == [1, "A", offered * WIDTH]
    given = np.random.default_rng(0).standard_normal((1, 4, offered, WIDTH)).astype(np.float32)
    (doubled,) = session.run(None, {FEATURES: given.reshape(1, 4, -1)})
    assert np.array_equal(doubled, 2 * given[:, :, picks].reshape(1, 4, -1))
