"""A head's products with 8-bit codes: a row that is always alone becomes two."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from specexport.exporter.passes import lone_row

WIDTH = 8
HEAD = """
<ir_version: 10, opset_import: ["" : 24]>
head (float[{rows},8] features, int8[8,8] codes, float[8] scales) => (float[{rows},8] result)
{{
    weight = DequantizeLinear <axis = 1> (codes, scales)
    product = MatMul (features, weight)
    active = Sigmoid (product)
    result = Add (active, features)
}}
"""


def head(rows: int) -> ir.Model:
    model = onnx.parser.parse_model(HEAD.format(rows=rows))
    rng = np.random.default_rng(0)
    arrays = {
        "codes": rng.integers(-127, 128, (WIDTH, WIDTH)).astype(np.int8),
        "scales": rng.random(WIDTH).astype(np.float32) / 100,
    }
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    del model.graph.input[1:]
    return ir.from_proto(onnx.shape_inference.infer_shapes(model))


def run(model: ir.Model, features: np.ndarray, folder: Path) -> np.ndarray:
    ir.save(model, folder / "head.onnx")
    session = ort.InferenceSession(folder / "head.onnx", providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"features": features})
    return np.asarray(result)


def test_a_lone_row_is_multiplied_twice(tmp_path: Path) -> None:
    features = np.random.default_rng(1).random((1, WIDTH)).astype(np.float32)
    expected, model = run(head(1), features, tmp_path), head(1)
    assert lone_row.lower(model)
    (product,) = [node for node in model.graph if node.op_type == "MatMul"]
    assert product.inputs[0] is not None and product.inputs[0].shape == (2, WIDTH)
    result = run(model, features, tmp_path)
    assert result.shape == expected.shape == (1, WIDTH) and np.abs(result - expected).max() < 1e-6


@pytest.mark.parametrize("rows", [2, 5])
def test_other_products_stay(rows: int) -> None:
    model = head(rows)
    before = [node.op_type for node in model.graph]
    assert not lone_row.lower(model)
    assert [node.op_type for node in model.graph] == before
