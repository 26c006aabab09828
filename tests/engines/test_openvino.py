"""OpenVINO on a small bundle: what the speculative loop relies on, against ONNX Runtime on the same exported graph."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specexport.engines.ort import TARGET_FILE, OrtEngine
from specexport.exporter.parity import Deviation
from specexport.exporter.pipeline import BuildOptions, build
from specexport.exporter.progress import Progress
from specexport.exporter.quantize.choice import PrecisionOptions
from specexport.runtime.bundle import Bundle
from specexport.runtime.cache import CacheRows
from specexport.runtime.engine import Step, TargetEngine, find_engine, width_exact
from specexport.runtime.errors import BundleError, UsageError
from specexport.runtime.sampling import SamplingParams
from specexport.runtime.session import Session
from specexport.runtime.tree import Tree
from tests.tiny import LLAMA, VOCAB

openvino = pytest.importorskip("specexport.engines.openvino", reason="the extra [openvino] is not installed")

SLOTS = 128
TOKENS = np.random.default_rng(0).integers(0, VOCAB, SLOTS)
BRANCHED = np.array([-1, 0, 0, 1, 2, 4, 4])
LIMIT = 1e-4


@pytest.fixture(scope="module")
def loaded(tiny_bundle: Bundle) -> Any:
    return openvino.load_cpu(tiny_bundle.path, threads=1)


@pytest.fixture
def engine(loaded: Any) -> Iterator[Any]:
    loaded.reset()
    yield loaded


@pytest.fixture(scope="module")
def reference(tiny_bundle: Bundle) -> OrtEngine:
    return OrtEngine(tiny_bundle.path, threads=1, lowered=False)


def step(
    engine: TargetEngine, tree: Tree, past: int, commit: Sequence[int] = (), select: Sequence[int] | None = None
) -> NDArray[np.float32]:
    """One call after ``past`` committed rows, of which the last ``len(commit)`` are moved there first; a copy."""
    return engine.run(Step.of(tree, CacheRows(past - len(commit), tuple(commit)), select)).copy()


def decode(engine: TargetEngine, widths: Sequence[int], count: int = SLOTS) -> NDArray[np.float32]:
    engine.reset()
    rows, past, sizes = [], 0, cycle(widths)
    while past < count:
        chunk = TOKENS[past : min(past + next(sizes), count)]
        rows.append(step(engine, Tree.chain(chunk), past))
        past += len(chunk)
    return np.concatenate(rows)


def assert_close(mine: NDArray[Any], other: NDArray[Any]) -> None:
    worst = Deviation()
    worst.note(mine, other, "")
    assert worst.relative < LIMIT


@pytest.mark.parametrize("widths", [[1], [8], [64, 1, 3, 8, 1, 1, 5]], ids=str)
def test_logits_and_caches_are_those_of_the_exported_graph(
    engine: Any, reference: OrtEngine, widths: list[int]
) -> None:
    """Up to the last slot, whatever the widths."""
    assert (engine.slots, engine.vocab_size, engine.features_size) == (SLOTS, LLAMA["vocab_size"], 0)
    assert_close(decode(engine, widths), decode(reference, [SLOTS]))
    for mine, other in zip(engine.read_cache(SLOTS), reference.read_cache(SLOTS), strict=True):
        assert_close(mine, other)


def test_trees_and_commits(engine: Any, reference: OrtEngine) -> None:
    """A branching tree, then calls whose accepted rows have gaps, are shifted by one, or overlap where they go."""
    for rows in ([22, 24, 26], [21, 22, 23, 24, 25], [26], []):
        found = []
        for each in (engine, reference):
            each.reset()
            step(each, Tree.chain(TOKENS[:20]), 0)
            tree = step(each, Tree(TOKENS[20:27], BRANCHED), 20)
            after = step(each, Tree(TOKENS[30:37], BRANCHED), 20 + len(rows), commit=rows)
            found.append([tree, after, *each.read_cache(20 + len(rows))])
        for mine, other in zip(*found, strict=True):
            assert_close(mine, other)


def test_what_was_rejected_does_not_matter(engine: Any) -> None:
    """Dead rows stay in the states: they are seen by no later node."""
    step(engine, Tree.chain(TOKENS[:10]), 0)
    plain = step(engine, Tree.chain(TOKENS[60:63]), 10)
    engine.reset()
    step(engine, Tree.chain(TOKENS[:30]), 0)
    assert_close(step(engine, Tree.chain(TOKENS[60:63]), 10), plain)


def test_states_are_packed_before_they_fill_with_dead_rows(engine: Any, reference: OrtEngine) -> None:
    """Forty calls of 8 nodes of which one is accepted: rows stay bounded, logits right."""
    used, packs = [], 0
    for past in range(40):
        widths = Tree.chain(TOKENS[past : past + 8])
        found = step(engine, widths, past)
        packs += engine._rows.used < (used[-1] if used else 0)
        used.append(engine._rows.used)
    assert packs >= 2 and max(used) <= 40 + openvino.DEAD_ROWS + 8
    assert_close(found, decode(reference, [47], 47)[39:47])
    assert len(engine.read_cache(40)) == 2 * LLAMA["num_hidden_layers"]


@pytest.mark.parametrize("kept", [0, 1, 20])
def test_another_prompt_after_a_long_one(engine: Any, kept: int) -> None:
    """What a session does: the cache of a common prefix stays, the rest is forgotten."""
    for first in (100, 60):
        engine.reset()
        step(engine, Tree.chain(TOKENS[:first]), 0)
        step(engine, Tree.chain(TOKENS[first:127]), first)
        for _ in range(2):
            found = step(engine, Tree.chain(TOKENS[kept:90]), kept)
        plain = step(engine, Tree.chain(TOKENS[90:91]), 90)
        engine.reset()
        whole = step(engine, Tree.chain(TOKENS[:91]), 0)
        assert_close(found, whole[kept:90])
        assert_close(plain, whole[90:])


def test_rows_that_were_never_computed_are_zero(engine: Any) -> None:
    step(engine, Tree.chain(TOKENS[:5]), 0)
    for cache in engine.read_cache(SLOTS):
        assert np.abs(cache[:, :5]).min(axis=(0, 2)).any() and not cache[:, 5:].any()
    engine.reset()
    assert not any(cache.any() for cache in engine.read_cache(SLOTS))


def test_selected_rows(engine: Any) -> None:
    chunk = Tree.chain(TOKENS[:9])
    every = step(engine, chunk, 0)
    for select in ([8], [3, 3], [8, 0, 4]):
        engine.reset()
        assert_close(step(engine, chunk, 0, select=select), every[select])


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_quantised_weights_stay_compressed(tiny_checkpoint: Path, tmp_path: Path, precision: str) -> None:
    """Embedding and lm_head too, and the logits are ONNX Runtime's; quantised activations are near them."""
    options = PrecisionOptions(precision=precision, lm_head=precision)
    source, output = str(tiny_checkpoint), tmp_path / "bundle"
    path = build(
        BuildOptions(source=source, output=output, window=SLOTS, precision=options), Progress(quiet=True)
    ).bundle.path
    reference = OrtEngine(path, threads=1, lowered=False, optimize=False)
    exact, fast = openvino.load_cpu_f32(path, threads=1), openvino.load_cpu(path, threads=1)
    wanted = decode(reference, [16], 48)
    assert_close(decode(exact, [16], 48), wanted)
    worst = Deviation()
    worst.note(decode(fast, [16], 48), wanted, "")
    assert worst.relative < 0.1
    constants = [
        node
        for node in exact._request.get_compiled_model().get_runtime_model().get_ops()
        if node.get_rt_info()["layerType"].astype(str) == "Const"
    ]
    size = LLAMA["vocab_size"] * LLAMA["hidden_size"]
    tables = [node for node in constants if int(np.prod(node.get_output_shape(0))) == size]
    assert {node.get_output_element_type(0).size for node in tables} == {1}


@pytest.mark.parametrize("drafter", ["suffix", "recycling"])
def test_speculative_equals_plain(tiny_bundle: Bundle, engine: Any, drafter: str) -> None:
    prompt = [*TOKENS[:12], *TOKENS[:8]]
    answers = []
    for name in ("none", drafter):
        engine.reset()
        session = Session(tiny_bundle, drafter=name, engine=engine)
        answers.append(session.generate([int(token) for token in prompt], SamplingParams(max_tokens=60)).token_ids)
    assert answers[0] == answers[1] and len(answers[0]) == 60


def test_engines_are_found_by_their_entry_points() -> None:
    assert find_engine("openvino-cpu") is openvino.load_cpu
    assert find_engine("openvino-cpu-f32") is openvino.load_cpu_f32


def test_a_missing_package_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("specexport.engines.openvino")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(UsageError, match=r"needs openvino: install it with .*pip install 'specexport\[openvino\]'"):
        find_engine("openvino-cpu")


def test_negative_threads_are_refused(tiny_bundle: Bundle) -> None:
    with pytest.raises(UsageError, match=r"threads must be 0 \(automatic\) or more, got -1"):
        openvino.OpenVinoEngine(tiny_bundle.path, threads=-1)


@pytest.mark.parametrize("content", [b"", b"not a graph", None])
def test_a_damaged_graph_is_one_line(tiny_bundle: Bundle, tmp_path: Path, content: bytes | None) -> None:
    graph = Path(shutil.copy(tiny_bundle.path / TARGET_FILE, tmp_path))
    graph.write_bytes(graph.read_bytes()[:-200] if content is None else content)
    with pytest.raises(BundleError, match=r"target\.onnx: openvino .* cannot load it: ") as caught:
        openvino.OpenVinoEngine(tmp_path, threads=1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [b"logits", b"past_v.1", b"positions"])
def test_another_interface_is_refused(name: bytes, tiny_bundle: Bundle, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    graph = copy / TARGET_FILE
    graph.write_bytes(graph.read_bytes().replace(name, name[:-1] + b"x"))
    with pytest.raises(BundleError, match=rf"not a target graph: {name.decode()[:-1]}. is missing or unknown"):
        openvino.OpenVinoEngine(copy, threads=1)


def test_a_missing_graph_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"target\.onnx: openvino"):
        openvino.OpenVinoEngine(tmp_path)


def test_it_says_that_a_row_depends_on_the_width_of_its_call(engine: Any, reference: OrtEngine) -> None:
    assert width_exact(reference) and not width_exact(engine)
