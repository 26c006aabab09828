"""The operator's body of standard operators, as ONNX Runtime runs it, is the reference of the kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from specexport.engines.plugins.tree_attention import DOMAIN, INPUTS, OPERATOR, OUTPUTS
from specexport.exporter.passes.tree_attention import BODY
from tests.engines.plugins.tree_attention.cases import Case, Values, attention, expected_rows, make_values, random_case

#: Of every kind: windows, many words, wild commits.
CASES = [
    replace(random_case(seed, most_nodes=70, most_past=200), element="fp16", cache="element") for seed in range(12)
]


def run_body(case: Case, values: Values) -> list[np.ndarray]:
    """Output and caches of one call in float32. The body masks, so caches must hold numbers everywhere."""
    arrays = {
        "query": values.query[None].astype(np.float32),
        "key": values.key[None].astype(np.float32),
        "value": values.value[None].astype(np.float32),
        "past_k": values.caches[0][None].astype(np.float32),
        "past_v": values.caches[1][None].astype(np.float32),
        "tree": values.words().view(np.int32),
        "positions": values.positions[None],
        "past": np.array([values.past], np.int32),
        "write": np.array([values.write], np.int32),
        "commit": values.commit,
        "order": values.order,
    }
    assert tuple(arrays) == INPUTS
    kinds = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.int32): TensorProto.INT32}
    node = helper.make_node(OPERATOR, INPUTS, OUTPUTS, domain=DOMAIN, scale=case.scale, window=case.window)
    inputs = [helper.make_tensor_value_info(name, kinds[array.dtype], array.shape) for name, array in arrays.items()]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in OUTPUTS]
    model = helper.make_model(
        helper.make_graph([node], "call", inputs, outputs),
        functions=[onnx.parser.parse_function(BODY)],
        opset_imports=[helper.make_opsetid("", 24), helper.make_opsetid(DOMAIN, 1)],
        ir_version=10,
    )
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return [array[0] for array in session.run(None, arrays)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.seed))
def test_the_body_is_the_reference(case: Case) -> None:
    """The float64 reference that the kernels are held against, and the body, are one function."""
    values = make_values(case)
    values.caches = [np.nan_to_num(cache.astype(np.float32)).astype(cache.dtype) for cache in values.caches]
    if values.write + len(values.order) > case.slots:
        values.write = case.slots - len(values.order)  # TensorScatter drops no rows
    output, *caches = run_body(case, values)
    rows, scales, _ = expected_rows(case, values)
    for cache, expected in zip(caches, rows, strict=True):
        assert np.array_equal(cache, expected.astype(np.float32))
    expected, _ = attention(case, values, rows, scales)
    assert np.abs(output - expected).max() < 1e-4
