"""The lowerings for TensorRT, run on ONNX Runtime: the values stay what they were."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from specexport.engines.ort import TARGET_FILE
from specexport.engines.tensorrt_module import RECENT_OPERATORS
from specexport.exporter.graph_file import DataFile
from specexport.exporter.passes import lone_row, plain, tensorrt
from specexport.exporter.pipeline import BuildOptions, build
from specexport.exporter.progress import Progress
from specexport.exporter.quantize.choice import PrecisionOptions
from specexport.runtime import contract
from specexport.runtime.bundle import Bundle
from specexport.runtime.errors import SpecExportError
from tests.tiny import LLAMA

LAYERS, SLOTS = LLAMA["num_hidden_layers"], 128


def kinds(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def step(seed: int, nodes: int = 5, accepted: int = 3, padding: int = 1) -> dict[str, NDArray[Any]]:
    """A call with a random tree, rows to move and a padded row, over random caches."""
    rng = np.random.default_rng(seed)
    parents = [int(rng.integers(0, node)) for node in range(1, nodes)]
    tree = np.eye(nodes, dtype=bool)
    for node, parent in enumerate(parents, 1):
        tree[node] |= tree[parent]
    write = 40
    shape = (1, LLAMA["num_key_value_heads"], SLOTS, LLAMA["hidden_size"] // LLAMA["num_attention_heads"])
    caches = {past: rng.standard_normal(shape).astype(np.float32) for past, _ in contract.cache_names(LAYERS)}
    commit = np.array([*(write + 1 + 2 * np.arange(accepted)), *[0] * padding])
    return {
        contract.TOKENS: rng.integers(0, 300, (1, nodes)),
        contract.POSITIONS: (write + accepted + tree.sum(1) - 1)[None],
        contract.TREE: tree[None],
        contract.PAST: np.array([write + accepted]),
        contract.WRITE: np.array([write]),
        contract.COMMIT: commit,
        contract.ORDER: np.array([*range(accepted), *(accepted + padding + np.arange(nodes)), *[0] * padding]),
        contract.SELECT: np.array([nodes - 1, 0]),
        **caches,
    }


def run(path: Path, inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def save(model: ir.Model, path: Path) -> Path:
    """A lowered graph by itself, with the tensors it shares with the bundle, without what is for TensorRT alone."""
    for node in model.graph:
        node.attributes.pop("TRT_decomposable", None)
    for value in model.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = ir.Tensor(value.const_value.numpy(), dtype=value.const_value.dtype, name=value.name)
    ir.save(model, path)
    return path


def lowered(bundle: Bundle, folder: Path) -> ir.Model:
    model = ir.load(bundle.path / TARGET_FILE)
    with DataFile(folder / "more.data") as data:
        return tensorrt.lower(model, data.put)


def same(found: dict[str, NDArray[Any]], expected: dict[str, NDArray[Any]]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=2e-5, err_msg=name)


def test_the_lowered_target(tiny_bundle: Bundle, tmp_path: Path) -> None:
    before = kinds(ir.load(tiny_bundle.path / TARGET_FILE))
    model = lowered(tiny_bundle, tmp_path)
    after = kinds(model)
    assert all(after[kind] == before[kind] for kind in RECENT_OPERATORS)
    assert after["Tile"] == 1, "the layers share one mask"
    assert after["Transpose"] - before["Transpose"] == 7 * LAYERS
    named = {str(node.name) for node in model.graph}
    assert {f"attention.{layer}" for layer in range(LAYERS)} <= named
    assert {f"update.{present}" for _, present in contract.cache_names(LAYERS)} <= named
    for node in model.graph:
        if node.op_type == "Attention":
            assert "TRT_decomposable" in node.attributes, "float32 has no fused kernel"
    path = save(model, tmp_path / "lowered.onnx")
    for seed in range(3):
        same(run(path, step(seed)), run(tiny_bundle.path / TARGET_FILE, step(seed)))


def test_the_plain_target(tiny_bundle: Bundle, tmp_path: Path) -> None:
    model = plain.lower(lowered(tiny_bundle, tmp_path), RECENT_OPERATORS)
    assert not kinds(model).keys() & set(RECENT_OPERATORS) and model.opset_imports[""] == plain.OPSET
    path = save(model, tmp_path / "plain.onnx")
    for seed in range(3):
        same(run(path, step(seed)), run(tiny_bundle.path / TARGET_FILE, step(seed)))
    same(run(path, step(3, nodes=1)), run(tiny_bundle.path / TARGET_FILE, step(3, nodes=1)))


@pytest.mark.parametrize("operator", RECENT_OPERATORS)
def test_one_operator_alone(tiny_bundle: Bundle, tmp_path: Path, operator: str) -> None:
    model = plain.lower(ir.load(tiny_bundle.path / TARGET_FILE), [operator])
    assert operator not in kinds(model) and model.opset_imports[""] == contract.OPSET
    same(run(save(model, tmp_path / "one.onnx"), step(7)), run(tiny_bundle.path / TARGET_FILE, step(7)))


@pytest.mark.parametrize("nodes", [1, 5])
def test_lone_rows(tiny_checkpoint: Path, tmp_path: Path, nodes: int) -> None:
    """Doubled, where the matrices are int8: one node, and one row of logits."""
    options = BuildOptions(
        source=str(tiny_checkpoint),
        output=tmp_path / "bundle",
        window=SLOTS,
        precision=PrecisionOptions("int8"),
        features=(1,),
        check=False,
    )
    path = build(options, Progress(quiet=True)).bundle.path / TARGET_FILE
    inputs = step(nodes, nodes=nodes) | {contract.SELECT: np.array([nodes - 1])}
    expected = run(path, inputs)
    model = ir.load(path)
    assert lone_row.lower(model) and kinds(model)["Tile"] == 4
    found = run(save(model, tmp_path / "lone.onnx"), inputs)
    assert found[contract.LOGITS].shape == (1, 320) and found[contract.FEATURES].shape == (1, nodes, 64)
    same(found, expected)
    with DataFile(tmp_path / "more.data") as data:
        model = tensorrt.lower(model, data.put)
    same(run(save(model, tmp_path / "lowered.onnx"), inputs), expected)


def test_no_lone_rows_without_codes(tiny_bundle: Bundle) -> None:
    assert not lone_row.lower(ir.load(tiny_bundle.path / TARGET_FILE))


def test_an_operator_without_a_plain_form(tiny_bundle: Bundle) -> None:
    with pytest.raises(SpecExportError, match="MatMul has no plain form"):
        plain.lower(ir.load(tiny_bundle.path / TARGET_FILE), ["MatMul"])


def test_attention_without_a_mask_is_refused(tiny_bundle: Bundle, tmp_path: Path) -> None:
    model = ir.load(tiny_bundle.path / TARGET_FILE)
    node = next(node for node in model.graph if node.op_type == "Attention")
    node.replace_input_with(3, None)
    with (
        DataFile(tmp_path / "more.data") as data,
        pytest.raises(SpecExportError, match=r"attention\.0: expected query"),
    ):
        tensorrt.lower(model, data.put)
