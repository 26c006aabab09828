"""The lowering to our own kernels: what is left of a graph, its numbers beside the other lowering, what it refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from specexport.engines import ort, ort_session
from specexport.engines.ort import OrtEngine, cpu_files, kernels_file
from specexport.engines.ort_providers import CPU
from specexport.exporter import cli
from specexport.exporter.config import TargetConfig
from specexport.exporter.layers import Target
from specexport.exporter.lower import lower_target
from specexport.exporter.onnx import export_target, save_target
from specexport.exporter.parity import Deviation
from specexport.exporter.passes import kernels, matmul_nbits
from specexport.exporter.passes.graph import MICROSOFT
from specexport.exporter.quantize.choice import PrecisionOptions, resolve
from specexport.exporter.quantize.plan import FLOATS
from specexport.runtime.errors import BundleError
from tests.engines.kernels.one_node import needs_kernels
from tests.exporter.quantize.stored_cases import CASES as STORED
from tests.exporter.quantize.stored_writers import write_quantized
from tests.exporter.test_parity import CASES, reference
from tests.exporter.test_tree_attention_pass import steps

SLOTS = 96
TARGET = "target.onnx"
#: What a lowered target has: products and attention, the embedding, the last residual, the choice of rows.
USUAL = {"QuantizedProduct", "TreeAttention", "Gather", "Cast", "Unsqueeze", "Mul", "Add", "Reshape"}
#: What layers have left besides, by case: a bias comes before the gate, the second norm before its residual, and tables
#: for half of 32 values are what onnxruntime's attention did not take.
OTHERS: dict[str, set[str]] = {
    "llama-gqa": set(),
    "llama-mha-bias": {"Split", "Sigmoid"},
    "mistral-window": set(),
    "qwen3": set(),
    "gemma3": {"RMSNormalization"},
    "phi3": set(),
    "phi3-partial": {"Split", "RotaryEmbedding"},
}


@pytest.fixture(scope="module", autouse=True)
def wide() -> Iterator[None]:
    """Cases whose rows are several blocks, and whose gates are panels."""
    with pytest.MonkeyPatch.context() as patch:
        for name in OTHERS:
            kind, changes = CASES[name]
            patch.setitem(CASES, name, (kind, {"hidden_size": 64, "intermediate_size": 96, **changes}))
        yield


#: Tracing is most of the time: exported graphs by what they depend on.
_GRAPHS: dict[tuple[str, str], tuple[ir.Model, Target]] = {}


def save(case: str, folder: Path, precision: PrecisionOptions, activations: str = "fp32") -> TargetConfig:
    """A random model's graph, exported and lowered."""
    _, config, weights = reference(case)
    plan, info = resolve(precision, tied=config.tie_word_embeddings)
    key = (repr(config), activations)
    if key not in _GRAPHS:
        _GRAPHS[key] = export_target(config, SLOTS, FLOATS[activations])
    model, target = _GRAPHS[key]
    save_target(model.clone(), target, weights, folder / TARGET, plan=plan)
    lower_target(folder, config, SLOTS, activations)
    assert info.activations == activations
    return config


def engines(folder: Path) -> dict[str, OrtEngine]:
    """By what runs them: our kernels, ONNX Runtime's own, and the exported graph."""
    found = {"ours": OrtEngine(folder, threads=1), "exported": OrtEngine(folder, threads=1, lowered=False)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ort, "kernels_library", lambda: None)
        found["theirs"] = OrtEngine(folder, threads=1)
    assert [found[name].tree_exact for name in ("ours", "theirs", "exported")] == [True, False, False]
    return found


def operators(folder: Path, graph: str = TARGET) -> Counter[str]:
    return Counter(node.op_type for node in ir.load(folder / kernels_file(graph)).graph)


@needs_kernels
@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("case", OTHERS)
def test_numbers_and_what_is_left(case: str, precision: str, tmp_path: Path) -> None:
    """Norms of heads, windows, norms behind attention, partial rotation, biases: as near to the exported graph as
    onnxruntime's kernels are, and nearer to those."""
    config = save(case, tmp_path, PrecisionOptions(precision))
    made = engines(tmp_path)
    worst = {pair: Deviation() for pair in (("ours", "theirs"), ("ours", "exported"), ("theirs", "exported"))}
    calls = steps(3, config.vocab_size, SLOTS - 1)
    assert len(calls) > 3 and any(len(call.commit) for call in calls)
    for call in calls:
        rows = {name: engine.run(call).copy() for name, engine in made.items()}
        for (one, other), note in worst.items():
            note.note(rows[one], rows[other], f"{one} {other}")
    assert 0 < worst["ours", "exported"].relative < max(0.02, 1.5 * worst["theirs", "exported"].relative)
    assert worst["ours", "theirs"].relative < 0.02
    left = operators(tmp_path)
    assert left.keys() == USUAL | OTHERS[case]
    # Query, key and value are one product; so are gate and value.
    assert (left["TreeAttention"], left["QuantizedProduct"]) == (config.num_layers, 4 * config.num_layers + 1)


def stored(graph: Path) -> set[tuple[str, int | None]]:
    """Where a graph's constants are: file and offset."""
    tensors = [value.const_value for value in ir.load(graph).graph.initializers.values()]
    return {(str(each.location), each.offset) for each in tensors if isinstance(each, ir.ExternalTensor)}


def test_it_shares_the_data_of_the_other_lowering(tmp_path: Path) -> None:
    save("llama-gqa", tmp_path, PrecisionOptions("int8"))
    other, commit = cpu_files(TARGET)
    names = {TARGET, other, commit, kernels_file(TARGET), f"{TARGET}.data", f"{other}.data"}
    assert {path.name for path in tmp_path.iterdir()} == names
    mine, theirs = (stored(tmp_path / name) for name in (kernels_file(TARGET), other))
    assert mine and mine <= theirs
    assert {location for location, _ in mine} <= {f"{TARGET}.data", f"{other}.data"}
    assert (tmp_path / kernels_file(TARGET)).stat().st_size < (tmp_path / other).stat().st_size


@pytest.mark.parametrize(
    ("precision", "activations"),
    [
        (PrecisionOptions("fp32"), "fp32"),
        (PrecisionOptions("int8", lm_head="fp32", embedding="fp32"), "fp32"),
        (PrecisionOptions("int8", activations="fp16"), "fp16"),
    ],
    ids=["fp32", "float lm_head", "half activations"],
)
def test_what_is_not_all_codes_stays(precision: PrecisionOptions, activations: str, tmp_path: Path) -> None:
    """A product in floating point is not the same for a lone row, and half activations are not what is rounded."""
    config = save("llama-gqa", tmp_path, precision, activations)
    assert not (tmp_path / kernels_file(TARGET)).exists()
    model = ir.load(tmp_path / cpu_files(TARGET)[0])
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    assert not kernels.lower(model, [None] * config.num_layers)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def products(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == "MatMulNBits"]


@pytest.mark.parametrize(
    "change",
    [
        ("accuracy_level", matmul_nbits.PRECISE),
        ("block_size", 24),
        ("block_size", 1 << 17),
        ("bits", 2),
    ],
    ids=str,
)
def test_a_product_that_the_kernels_do_not_take_keeps_all(change: tuple[str, int], tmp_path: Path) -> None:
    config = save("llama-gqa", tmp_path, PrecisionOptions("int8"))
    model = ir.load(tmp_path / cpu_files(TARGET)[0])
    products(model)[-1].attributes[change[0]] = ir.AttrInt64(*change)
    assert not kernels.lower(model, [None] * config.num_layers)
    assert len(products(model)) == 4 * config.num_layers + 1


def test_a_product_with_a_bias_of_its_own_or_reordered_columns_keeps_all(tmp_path: Path) -> None:
    """Inputs that onnxruntime's operator has and ours has not."""
    config = save("llama-gqa", tmp_path, PrecisionOptions("int8"))
    for index in (4, 5):
        model = ir.load(tmp_path / cpu_files(TARGET)[0])
        node = products(model)[0]
        extra = next(iter(model.graph.initializers.values()))
        node.resize_inputs(index + 1)
        node.replace_input_with(index, extra)
        assert len(products(model)) == 4 * config.num_layers + 1
        assert not kernels.lower(model, [None] * config.num_layers)


@needs_kernels
@pytest.mark.parametrize("inner", [80, 72])
def test_gates_that_fill_no_panels_stay_operators(inner: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, changes = CASES["llama-gqa"]
    monkeypatch.setitem(CASES, "llama-gqa", (kind, {**changes, "intermediate_size": inner}))
    config = save("llama-gqa", tmp_path, PrecisionOptions("int8"))
    left = operators(tmp_path)
    assert left["Sigmoid"] == (0 if inner % 16 == 0 else config.num_layers)
    made = engines(tmp_path)
    worst = Deviation()
    for call in steps(3, config.vocab_size, SLOTS - 1):
        worst.note(made["ours"].run(call), made["theirs"].run(call), "")
    assert worst.relative < 0.02


def test_a_bundle_with_our_graph_runs_without_our_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save("llama-gqa", tmp_path, PrecisionOptions("int8"))
    monkeypatch.setattr(ort, "kernels_library", lambda: None)
    engine = OrtEngine(tmp_path, threads=1)
    assert not engine.tree_exact
    assert np.isfinite(engine.run(steps(0, 96, SLOTS)[0])).all()
    with pytest.raises(BundleError, match="needs specexport's kernels, which are not installed") as caught:
        monkeypatch.setattr(ort_session, "kernels_library", lambda: None)
        ort_session.load(tmp_path / kernels_file(TARGET), ort_session.session_options(1), CPU)
    assert "\n" not in str(caught.value)


@needs_kernels
@pytest.mark.parametrize("case", ["gptq4_asymmetric", "gptq4_act_order", "awq", "int8_groups"])
def test_stored_codes_with_zero_points(case: str, tmp_path: Path) -> None:
    """Checkpoints that are quantised already, whose codes are kept."""
    write_quantized(tmp_path / "checkpoint", STORED[case], max_position_embeddings=256)
    precision = "int8" if "8" in case else "int4"
    words = ["build", str(tmp_path / "checkpoint"), "-o", str(tmp_path / "bundle"), "--window", str(SLOTS)]
    assert cli.main([*words, "--precision", precision, "--no-check"]) == 0
    nodes = [node for node in ir.load(tmp_path / "bundle" / kernels_file(TARGET)).graph if node.domain == "specexport"]
    zeros = [node.inputs[3] for node in nodes if node.op_type == "QuantizedProduct"]
    assert sum(value is not None for value in zeros) > 2
    made, worst = engines(tmp_path / "bundle"), Deviation()
    for call in steps(3, made["ours"].vocab_size, SLOTS):
        worst.note(made["ours"].run(call), made["theirs"].run(call), "")
    assert 0 < worst.relative < 0.02


def test_the_domain_is_not_microsofts(tmp_path: Path) -> None:
    save("llama-gqa", tmp_path, PrecisionOptions("int8"))
    model = ir.load(tmp_path / kernels_file(TARGET))
    ours = {node.op_type for node in model.graph if node.domain == kernels.DOMAIN}
    assert ours == {"QuantizedProduct", "TreeAttention"}
    assert {node.domain for node in model.graph} <= {"", MICROSOFT, kernels.DOMAIN}
    assert model.opset_imports[kernels.DOMAIN] == 1
