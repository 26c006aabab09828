"""The lowering to GrowTree: which heads it takes, what is left of their graphs, and the same trees."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray

from specexport.engines.kernels.library import kernels_library
from specexport.engines.ort import cpu_files, kernels_file
from specexport.exporter.heads.export import export_recurrent
from specexport.exporter.heads.record import RecurrentRecord
from specexport.exporter.heads.trees import DynamicTree, StaticTree
from specexport.exporter.lower import lower_drafter
from specexport.exporter.passes import grow_tree, kernels
from specexport.exporter.quantize.choice import PrecisionOptions, resolve
from specexport.exporter.weights import WeightSource
from specexport.runtime.contract import DRAFT_LOGPROBS, DRAFT_PARENTS, DRAFT_TOKENS, FEATURES, NOISE, PAST, TOKENS
from tests.engines.kernels.one_node import needs_kernels
from tests.exporter.draft_reference import Weights
from tests.exporter.heads import writers
from tests.exporter.heads.writers import DIALECTS, Memory, Random, V, every

SLOTS, GRAPH = 40, "drafter.onnx"
TREE = DynamicTree(depth=4, topk=3, nodes=10)
INT8 = PrecisionOptions("int8")
HEADS = dict(every())


@pytest.fixture(autouse=True)
def panels() -> Iterator[None]:
    """Gates that are whole panels: the usual width of the inner layer, 24, is none of those that the kernels gate."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writers, "INNER", 32)
        yield


def plain_blocks(**changes: Any) -> Callable[[RecurrentRecord], RecurrentRecord]:
    return lambda record: replace(record, blocks=replace(record.blocks, **changes))


#: Dialects, and what makes records of them that no dialect writes but that a checkpoint could have.
CHANGED: dict[str, tuple[str, Callable[[RecurrentRecord], RecurrentRecord]]] = {
    "mimo without biases": ("mtp_mimo", plain_blocks(attention_bias=False)),
    "qwen without gates": ("mtp_qwen3_next", plain_blocks(gated=False)),
    "gemma's gate": ("eagle3", plain_blocks(activation="gelu_tanh")),
    "no norm, fed back normed": ("eagle1_llama3", lambda record: replace(record, feedback="normed")),
    "speculators without bias": ("eagle1_speculators", lambda record: replace(record, fuse_bias=False)),
    "mapped without bias": ("eagle1_vllm", lambda record: replace(record, fuse_bias=False)),
}
#: Those that the operator takes; the first say most of what can differ.
TAKEN = ["eagle3", "eagle1_llama3", "eagle3_speculators", "mimo without biases", "qwen without gates"]
TAKEN += ["no norm, fed back normed"]
MORE = ["eagle3_wide", "eagle3_full_vocabulary", "eagle3_specforge", "eagle3_single", "eagle3_deepspec"]
MORE += ["mtp_deepseek", "mtp_deepseek_merged", *(name for name in CHANGED if name not in TAKEN)]
#: And the others: biases, layers, chains, latents and experts, gates.
LEFT = ["eagle1", "eagle3_two_layers", "mtp_deepseek_chain", "mtp_deepseek_v3", "mtp_qwen3_next"]
LEFT_MORE = ["eagle1_vllm", "eagle1_speculators", "eagle3_gpt_oss", "mtp_mimo", "mtp_qwen3_next_moe", "mtp_glm4_moe"]
#: Enough where a graph is only looked at and run.
SMALL = DynamicTree(depth=3, topk=2, nodes=8)


def slow(names: list[str]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


def read(name: str) -> tuple[RecurrentRecord, WeightSource]:
    """A head with tables of its own, and random weights that keep its numbers near 1."""
    dialect, change = CHANGED.get(name, (name, lambda record: record))
    tiny = DIALECTS[dialect]()
    assert isinstance(tiny.record, RecurrentRecord)
    record = change(replace(tiny.record, embedding="head", lm_head="head"))
    if record.blocks.latent is None and record.blocks.experts is None:
        return record, Weights.random(record)
    random = Random(1)
    tables = {"embedding": random(V, record.embedding_size), "lm_head": random(V, record.blocks.hidden_size)}
    return record, Memory({**tables, **tiny.canonical})


def export(
    name: str, folder: Path, precision: PrecisionOptions = INT8, tree: DynamicTree | StaticTree = TREE
) -> RecurrentRecord:
    record, weights = read(name)
    plan, _ = resolve(precision, tied=False)
    export_recurrent(
        record,
        weights,
        folder / GRAPH,
        dtype=torch.float32,
        slots=SLOTS,
        tree=tree,
        valid_vocab=V - 3,
        target_graph=Path("unused"),
        plan=plan,
    )
    assert lower_drafter(folder / GRAPH, None)
    return record


def unrolled(folder: Path) -> ir.Model:
    """The graph for our kernels without the operator."""
    model = ir.load(folder / cpu_files(GRAPH)[0])
    assert kernels.lower(model, ())
    return model


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph)


def serialised(model: ir.Model) -> bytes:
    return bytes(ir.to_proto(model).SerializeToString(deterministic=True))


@dataclass
class Drafter:
    """A graph with caches of its own."""

    path: Path
    record: RecurrentRecord

    def __post_init__(self) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.register_custom_ops_library(str(kernels_library()))
        self.session = ort.InferenceSession(self.path, options, providers=["CPUExecutionProvider"])
        self.names = [value.name for value in self.session.get_outputs()]
        self.caches = {n: np.zeros(shape, np.float32) for n, shape in self.record.cache_shapes(SLOTS).items()}
        self.noise = tuple(next(value.shape for value in self.session.get_inputs() if value.name == NOISE))

    def run(self, features: NDArray[Any], tokens: NDArray[Any], past: int, noise: NDArray[Any]) -> dict[str, Any]:
        feeds = {FEATURES: features, TOKENS: tokens, PAST: np.array([past]), NOISE: noise}
        outputs = dict(zip(self.names, self.session.run(None, {**feeds, **self.caches}), strict=True))
        self.caches = {name: outputs[name.replace("past", "present", 1)] for name in self.caches}
        return outputs


Path_ = tuple[int, ...]


def paths(outputs: dict[str, Any]) -> dict[Path_, float]:
    found: list[Path_] = [()]
    for token, parent in zip(outputs[DRAFT_TOKENS].tolist(), outputs[DRAFT_PARENTS].tolist(), strict=True):
        found.append((*found[parent], token))
    return dict(zip(found[1:], outputs[DRAFT_LOGPROBS].tolist(), strict=True))


def calls(record: RecurrentRecord, noise: tuple[int, ...]) -> Iterator[tuple[Any, Any, int, Any]]:
    """A decoding run to the end of the cache: one to five rows a call."""
    rng, past = np.random.default_rng(4), 0
    width = record.target_hidden_size * len(record.captures)
    for number, count in enumerate((5, 1, 3, 2, 1, 4, 5, 1, 2, 3, 5, 4, 2, 1, 1)):
        assert past + count <= SLOTS
        features = rng.standard_normal((1, count, width)).astype(np.float32)
        tokens = rng.integers(0, V - 3, (1, count))
        yield features, tokens, past, ((number % 3 > 0) * rng.gumbel(size=noise)).astype(np.float32)
        past += count
    assert past == SLOTS


def same_trees(folder: Path, record: RecurrentRecord) -> None:
    """Over a decoding run, the operator's trees are those of the unrolled graph and so are its caches: the same codes
    and roundings, of values that differ in the last bits. Where one of those is rounded to another code (one of 254) a
    log probability moves by some hundredths, and a near tie may be another tree: rarely."""
    model = unrolled(folder)
    ir.save(model, folder / "unrolled.onnx")
    assert grow_tree.lower(model, 0.0)
    ir.save(model, folder / "grown.onnx")
    one, other = Drafter(folder / "unrolled.onnx", record), Drafter(folder / "grown.onnx", record)
    equal, count, errors, used = 0, 0, list[float](), 0
    for features, tokens, past, noise in calls(record, one.noise):
        wanted, found = (each.run(features, tokens, past, noise) for each in (one, other))
        mine, theirs = paths(found), paths(wanted)
        assert len(mine) == TREE.nodes and max(map(len, mine)) > 1
        errors += [abs(mine[path] - theirs[path]) for path in mine.keys() & theirs.keys()]
        equal += all(np.array_equal(found[name], wanted[name]) for name in (DRAFT_TOKENS, DRAFT_PARENTS))
        count, used = count + 1, past + tokens.shape[1]
        for name, cache in one.caches.items():
            assert np.abs(cache - other.caches[name]).max() < 0.05
            assert np.abs(cache[:, :, :used]).min(axis=-1).max() > 0 and not other.caches[name][:, :, used:].any()
    assert equal >= 0.8 * count and used == SLOTS
    assert np.median(errors) < 1e-4 and max(errors) < 0.1


@needs_kernels
@pytest.mark.parametrize("name", [*TAKEN, *slow(MORE)])
def test_a_head_is_one_node(name: str, tmp_path: Path) -> None:
    record = export(name, tmp_path)
    model = ir.load(tmp_path / kernels_file(GRAPH))
    left, before = operators(model), operators(unrolled(tmp_path))
    assert (left["GrowTree"], left["TreeAttention"]) == (1, 1)
    assert left["QuantizedProduct"] == 5 + record.reduce + (record.fusion == "project")
    assert left.total() < 30 < before.total() / 4
    assert left["TopK"] == 0 < before["TopK"]
    assert not {"Softmax", "LogSoftmax", "RotaryEmbedding", "TensorScatter", "MatMul", "Split"} & left.keys()
    assert [value.name for value in model.graph.outputs] == [value.name for value in unrolled(tmp_path).graph.outputs]
    (grown,) = [node for node in model.graph if node.op_type == "GrowTree"]
    assert grown.attributes["least"].as_float() == pytest.approx(grow_tree.LEAST)
    same_trees(tmp_path, record)


@needs_kernels
@pytest.mark.parametrize(
    "precision",
    [
        PrecisionOptions("int4", block_size=16),
        PrecisionOptions("int8", symmetric=False, embedding="fp32"),
        PrecisionOptions("int4", block_size=16, symmetric=False, lm_head="int4", embedding="fp32"),
    ],
    ids=["int4", "zero points", "int4 zero points"],
)
def test_formats_of_codes(precision: PrecisionOptions, tmp_path: Path) -> None:
    """Zero points are the operator's inputs, and an embedding of floats is another input than one of codes."""
    record = export("eagle3", tmp_path, precision)
    (grown,) = [node for node in ir.load(tmp_path / kernels_file(GRAPH)).graph if node.op_type == "GrowTree"]
    assert (grown.inputs[9] is not None) == (precision.embedding == "fp32") != (grown.inputs[10] is not None)
    assert any(value is not None for value in grown.inputs[22::3]) == (not precision.symmetric)
    same_trees(tmp_path, record)


def still_runs(folder: Path, record: RecurrentRecord) -> None:
    """The graph is the one that it was before, and drafts."""
    path = folder / kernels_file(GRAPH)
    assert serialised(ir.load(path)) == serialised(unrolled(folder))
    assert operators(ir.load(path))["GrowTree"] == 0
    drafter = Drafter(path, record)
    for features, tokens, past, noise in [*calls(record, drafter.noise)][:3]:
        assert len(paths(drafter.run(features, tokens, past, noise))) > 5


@needs_kernels
@pytest.mark.parametrize("name", [*LEFT, *slow(LEFT_MORE)])
def test_other_heads_stay_as_they_are(name: str, tmp_path: Path) -> None:
    record = export(name, tmp_path, tree=SMALL)
    assert grow_tree.LAYER not in ir.load(tmp_path / GRAPH).metadata_props
    still_runs(tmp_path, record)


def test_every_recurrent_dialect_is_here() -> None:
    dialects = {name for name, tiny in HEADS.items() if isinstance(tiny.record, RecurrentRecord)}
    assert dialects == {*TAKEN, *MORE, *LEFT, *LEFT_MORE} - {*CHANGED}


@needs_kernels
def test_a_static_tree_stays(tmp_path: Path) -> None:
    record = export("eagle3", tmp_path, tree=StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (0, 1, 0))))
    still_runs(tmp_path, record)


@needs_kernels
def test_gates_that_fill_no_panels_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writers, "INNER", 24)
    record = export("eagle3", tmp_path, tree=SMALL)
    assert grow_tree.LAYER in ir.load(tmp_path / GRAPH).metadata_props
    still_runs(tmp_path, record)


@needs_kernels
@pytest.mark.parametrize(
    "precision",
    [
        PrecisionOptions("int8", lm_head="fp32"),
        PrecisionOptions("int8", symmetric=False),
        PrecisionOptions("int8", embedding="fp16"),
        PrecisionOptions("int8", embedding="int4"),
    ],
    ids=["floats in the lm_head", "zero points in the embedding", "half embedding", "int4 embedding"],
)
def test_tables_in_other_formats_stay(precision: PrecisionOptions, tmp_path: Path) -> None:
    still_runs(tmp_path, export("eagle3", tmp_path, precision, SMALL))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, RecurrentRecord]:
    folder = tmp_path_factory.mktemp("exported")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writers, "INNER", 32)
        return folder, export("eagle3", folder)


def no_description(model: ir.Model) -> None:
    del model.metadata_props[grow_tree.LAYER]


def apart(model: ir.Model) -> None:
    """Queries, keys and values of several products."""
    for value in [*model.graph.initializers.values()]:
        if str(value.name).startswith("layers.0.attention.q_proj.weight.joined."):
            value.name = str(value.name).replace("joined.", "")


def other_heads(model: ir.Model) -> None:
    model.metadata_props[grow_tree.LAYER] = model.metadata_props[grow_tree.LAYER].replace(
        '"head_dim": 6', '"head_dim": 8'
    )


def other_gate(model: ir.Model) -> None:
    model.metadata_props[grow_tree.LAYER] = model.metadata_props[grow_tree.LAYER].replace("silu", "gelu_tanh")


def unknown_gate(model: ir.Model) -> None:
    model.metadata_props[grow_tree.LAYER] = model.metadata_props[grow_tree.LAYER].replace("silu", "relu")


def reordered(model: ir.Model) -> None:
    """Codes whose inputs are permuted (GPTQ's act-order)."""
    value = ir.Value(name="lm_head.order", const_value=ir.tensor(np.arange(16)))
    model.graph.initializers["lm_head.order"] = value


@pytest.mark.parametrize("change", [no_description, apart, other_heads, other_gate, unknown_gate, reordered])
def test_what_the_operator_does_not_take_is_untouched(
    change: Callable[[ir.Model], None], exported: tuple[Path, RecurrentRecord]
) -> None:
    model = unrolled(exported[0])
    assert grow_tree.lower(model)  # as it is, it is taken
    model = unrolled(exported[0])
    change(model)
    before = serialised(model)
    assert not grow_tree.lower(model)
    assert serialised(model) == before


@needs_kernels
def test_fewer_nodes_than_declared_do_not_warn(
    exported: tuple[Path, RecurrentRecord], capfd: pytest.CaptureFixture[str]
) -> None:
    """onnxruntime warns where a graph says another shape than a call gives; trees are as large as they happen to be."""
    folder, record = exported
    model = unrolled(folder)
    assert grow_tree.lower(model, 0.999)
    ir.save(model, folder / "short.onnx")
    drafter = Drafter(folder / "short.onnx", record)
    features, tokens, past, noise = next(calls(record, drafter.noise))
    capfd.readouterr()
    outputs = drafter.run(features, tokens, past, noise)
    assert 0 < len(outputs[DRAFT_TOKENS]) < TREE.nodes
    nothing = drafter.run(np.full_like(features, np.nan), tokens, 5, noise)
    assert all(nothing[name].shape == (0,) for name in (DRAFT_TOKENS, DRAFT_PARENTS, DRAFT_LOGPROBS))
    assert capfd.readouterr() == ("", "")
    assert {str(value.shape) for value in model.graph.outputs if str(value.name).startswith("draft")} == {"[drafted]"}
