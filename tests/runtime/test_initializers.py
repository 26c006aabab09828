"""Which weights of a graph a call reads."""

from __future__ import annotations

from specexport.runtime.initializers import Initializer, draft_matrices, is_lm_head

FP32, INT8 = 1, 3
HEAD = [
    Initializer("embedding.codes", INT8, (1000, 64), "target.onnx.data"),
    Initializer("embedding.scales", FP32, (1000, 2), "target.onnx.data"),
    Initializer("layers.0.mlp.gate_proj.weight.codes", INT8, (64, 128), "drafter.onnx.data"),
    Initializer("rope_cos", FP32, (512, 16), "drafter.onnx.data"),
    Initializer("norm.weight", FP32, (64,), None),
]


def test_a_draft_reads_its_lm_head_and_a_few_rows_of_its_embedding() -> None:
    lm_head = Initializer("lm_head.codes", INT8, (500, 64), "drafter.onnx.data")
    assert [tensor.name for tensor in draft_matrices([*HEAD, lm_head])] == [HEAD[2].name, lm_head.name]
    assert is_lm_head(lm_head) and not is_lm_head(HEAD[2])
    assert sum(tensor.bytes for tensor in draft_matrices([*HEAD, lm_head])) == 64 * 128 + 500 * 64


def test_a_table_that_is_embedding_and_lm_head_in_one_is_read_whole() -> None:
    assert [tensor.name for tensor in draft_matrices(HEAD)] == [HEAD[0].name, HEAD[2].name]
