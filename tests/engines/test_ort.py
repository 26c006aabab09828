"""ONNX Runtime on a small bundle: what the speculative loop relies on, of the lowered graph and the exported one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from numpy.typing import NDArray

from specexport.engines.ort import CPU_TARGET_FILE, MAX_PLANS, OrtEngine, load_cpu, load_cuda, physical_cores
from specexport.exporter.parity import Deviation
from specexport.runtime.bundle import Bundle
from specexport.runtime.cache import CacheRows
from specexport.runtime.engine import Step, find_engine
from specexport.runtime.errors import BundleError, SpecExportError, UsageError
from specexport.runtime.tree import Tree
from tests.tiny import LLAMA, VOCAB

SLOTS = 128
TOKENS = np.random.default_rng(0).integers(0, VOCAB, SLOTS)
BRANCHED = np.array([-1, 0, 0, 1, 2, 4, 4])

Arrays = list[NDArray[Any]]


@pytest.fixture(params=[True, False], ids=["lowered", "exported"])
def engine(tiny_bundle: Bundle, request: pytest.FixtureRequest) -> OrtEngine:
    return OrtEngine(tiny_bundle.path, threads=1, lowered=request.param)


def step(
    engine: OrtEngine, tree: Tree, past: int, commit: Sequence[int] = (), select: Sequence[int] | None = None
) -> NDArray[np.float32]:
    """One call after ``past`` committed rows, of which the last ``len(commit)`` are moved there first; a copy."""
    return engine.run(Step.of(tree, CacheRows(past - len(commit), tuple(commit)), select)).copy()


def decode(engine: OrtEngine, widths: Sequence[int], count: int = SLOTS) -> tuple[NDArray[np.float32], Arrays]:
    """Logits and caches of :data:`TOKENS`, in calls of these widths, over and over."""
    engine.reset()
    rows, past, sizes = [], 0, cycle(widths)
    while past < count:
        chunk = TOKENS[past : min(past + next(sizes), count)]
        rows.append(step(engine, Tree.chain(chunk), past))
        past += len(chunk)
    return np.concatenate(rows), engine.read_cache(count)


def differing(engine: OrtEngine, widths: Sequence[int]) -> list[int]:
    """The widths whose logits or caches are not bit for bit those of plain decoding."""
    plain, caches = decode(engine, [1])
    found = []
    for width in widths:
        logits, others = decode(engine, [width])
        same = all(np.array_equal(mine, other) for mine, other in zip(caches, others, strict=True))
        if not (same and np.array_equal(plain, logits)):
            found.append(width)
    return found


@pytest.mark.parametrize("threads", [1, 2])
def test_the_width_of_a_call_does_not_change_a_bit(tiny_bundle: Bundle, threads: int) -> None:
    """What makes drafted chains lossless in practice: each row is computed alike, however many share the call."""
    engine = OrtEngine(tiny_bundle.path, threads=threads)
    assert differing(engine, [2, 3, 4, 5, 6, 7, 8, 64]) == []
    plain, _ = decode(engine, [1])
    assert np.array_equal(plain, decode(engine, [64, 1, 3, 8, 1, 1, 5])[0])


def test_that_is_owed_to_even_numbers_of_rows(tiny_bundle: Bundle) -> None:
    """Without them the lowered graph shows the difference that the exported one has; both only round differently."""
    for engine in (
        OrtEngine(tiny_bundle.path, threads=1, exact=False),
        OrtEngine(tiny_bundle.path, threads=1, lowered=False),
    ):
        assert differing(engine, [2, 8]) == [2, 8]
        worst = Deviation()
        worst.note(decode(engine, [8])[0], decode(engine, [1])[0], "")
        assert worst.relative < 1e-5


def test_a_thread_more_does_not_change_a_bit(tiny_bundle: Bundle) -> None:
    one, two = (decode(OrtEngine(tiny_bundle.path, threads=threads), [8])[0] for threads in (1, 2))
    assert np.array_equal(one, two)


def test_rows_of_logits_do_not_depend_on_which_are_selected(engine: OrtEngine) -> None:
    chunk = Tree.chain(TOKENS[:9])
    every = step(engine, chunk, 0)
    for select in ([8], [0], [3, 3], [8, 0, 4]):
        assert np.array_equal(step(engine, chunk, 0, select=select), every[select])


def test_lowered_equals_exported(tiny_bundle: Bundle) -> None:
    """Chains, branching trees, and steps after rows have moved."""
    lowered, exported = (OrtEngine(tiny_bundle.path, threads=1, lowered=flag) for flag in (True, False))
    worst = Deviation()
    for engine in (lowered, exported):
        step(engine, Tree.chain(TOKENS[:20]), 0)
    tree = Tree(TOKENS[20:27], BRANCHED)
    worst.note(step(lowered, tree, 20), step(exported, tree, 20), "tree")
    after = [step(engine, Tree(TOKENS[30:37], BRANCHED), 24, commit=[22, 24, 26]) for engine in (lowered, exported)]
    worst.note(*after, "after a commit")
    for mine, other in zip(lowered.read_cache(24), exported.read_cache(24), strict=True):
        worst.note(mine, other, "cache")
    assert 0 < worst.relative < 1e-5, worst.where


@pytest.mark.parametrize("width", [1, 2, 8])
def test_the_last_slot_can_be_used(engine: OrtEngine, tiny_bundle: Bundle, width: int) -> None:
    assert engine.slots == SLOTS == tiny_bundle.manifest.target.slots
    decode(engine, [8], SLOTS - width)
    last = step(engine, Tree.chain(TOKENS[-width:]), SLOTS - width)
    whole = step(OrtEngine(tiny_bundle.path, threads=1, lowered=False), Tree.chain(TOKENS), 0)[-width:]
    worst = Deviation()
    worst.note(last, whole, "")
    assert worst.relative < 1e-5
    assert all(np.abs(cache[:, SLOTS - 1]).max() > 0 for cache in engine.read_cache(SLOTS))


@pytest.mark.parametrize(
    "rows", [[22, 24, 25], [21, 22, 23, 24, 25], [26], [24, 25, 26]], ids=["gaps", "by one", "last", "block"]
)
def test_commit_moves_rows_in_order(engine: OrtEngine, rows: list[int]) -> None:
    """Also when the destination overlaps the source."""
    step(engine, Tree.chain(TOKENS[:20]), 0)
    step(engine, Tree(TOKENS[20:27], BRANCHED), 20)
    before = engine.read_cache(27)
    past = 20 + len(rows)
    step(engine, Tree.chain(TOKENS[40:42]), past, commit=rows)
    for old, new in zip(before, engine.read_cache(27), strict=True):
        assert np.array_equal(new[:, :20], old[:, :20])
        assert np.array_equal(new[:, 20:past], old[:, rows])
        assert np.array_equal(new[:, past + 2 :], old[:, past + 2 :])


def test_a_commit_is_the_same_as_having_decoded_the_path(engine: OrtEngine) -> None:
    step(engine, Tree.chain(TOKENS[:20]), 0)
    tree = Tree(TOKENS[20:27], BRANCHED)
    step(engine, tree, 20)
    path = tree.path(5)
    after = step(engine, Tree.chain(TOKENS[50:54]), 20 + len(path), commit=[20 + node for node in path])
    engine.reset()
    step(engine, Tree.chain(TOKENS[:20]), 0)
    step(engine, Tree.chain(tree.tokens[path]), 20)
    worst = Deviation()
    worst.note(after, step(engine, Tree.chain(TOKENS[50:54]), 20 + len(path)), "")
    assert worst.relative < 1e-5


def test_caches_stay_where_they_are(engine: OrtEngine) -> None:
    """Steps of several shapes, moves and a reset: the same buffers, and nothing written outside a call's rows."""

    def addresses() -> list[int]:
        return [value.data_ptr() for value in engine._caches.values.values()]

    begin = addresses()
    assert len(set(begin)) == 2 * LLAMA["num_hidden_layers"]
    step(engine, Tree.chain(TOKENS[:20]), 0)
    assert all((cache[:, 20:] == 0).all() and (cache[:, 19] != 0).any() for cache in engine.read_cache(SLOTS))
    for width in (1, 4):
        before = engine.read_cache(SLOTS)
        step(engine, Tree.chain(TOKENS[20 : 20 + width]), 20)
        presents = [value.data_ptr() for value in engine._last.binding.get_outputs()]
        assert set(begin) <= set(presents)
        spare = width % 2  # the last of an odd number of rows is computed twice
        for old, new in zip(before, engine.read_cache(SLOTS), strict=True):
            assert np.array_equal(new[:, :20], old[:, :20])
            assert np.array_equal(new[:, 20 + width + spare :], old[:, 20 + width + spare :])
            assert not np.array_equal(new[:, 20 : 20 + width], old[:, 20 : 20 + width])
    step(engine, Tree.chain(TOKENS[:2]), 22, commit=[22, 23])
    engine.reset()
    assert addresses() == begin
    assert all((cache == 0).all() for cache in engine.read_cache(SLOTS))


def test_what_lies_beyond_the_committed_rows_does_not_matter(engine: OrtEngine) -> None:
    """Rejected drafts stay in the cache until they are overwritten."""
    step(engine, Tree.chain(TOKENS[:30]), 0)
    stale = step(engine, Tree.chain(TOKENS[60:63]), 10)
    engine.reset()
    step(engine, Tree.chain(TOKENS[:10]), 0)
    assert np.array_equal(stale, step(engine, Tree.chain(TOKENS[60:63]), 10))


def test_logits_are_a_view_of_the_last_call(engine: OrtEngine) -> None:
    chain = Tree.chain(TOKENS[:4])
    first = engine.run(Step.chain(chain.tokens))
    assert first.shape == (4, LLAMA["vocab_size"]) == (4, engine.vocab_size) and first.dtype == np.float32
    kept = first.copy()
    step(engine, Tree.chain(TOKENS[4:6]), 4)
    # A wider call than any before needs another buffer; the numbers of a narrow one are right after it too.
    step(engine, Tree.chain(TOKENS[:64]), 0)
    assert np.array_equal(step(engine, chain, 0), kept)


def test_call_shapes_that_are_kept_are_bounded(engine: OrtEngine) -> None:
    """A long session meets many shapes (rest of a prompt, tree widths, moved rows): only some stay bound."""
    plain, _ = decode(engine, [1], 40)
    for width in range(1, 100):
        for moved in (0, 1, 2):
            step(engine, Tree.chain(TOKENS[:width]), moved + 4, commit=range(8, 8 + moved), select=[0])
    assert len(engine._plans) <= MAX_PLANS
    assert np.array_equal(decode(engine, [1], 40)[0], plain)


def test_engines_are_found_by_their_entry_points(tiny_bundle: Bundle) -> None:
    assert find_engine("onnxruntime-cpu") is load_cpu and find_engine("onnxruntime-cuda") is load_cuda
    assert load_cpu(tiny_bundle.path, threads=1).features_size == 0
    assert 1 <= physical_cores() <= (os.cpu_count() or 1)


def test_negative_threads_are_refused(tiny_bundle: Bundle) -> None:
    with pytest.raises(UsageError, match=r"threads must be 0 \(automatic\) or more, got -1"):
        OrtEngine(tiny_bundle.path, threads=-1)


@pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this build has the provider"
)
def test_a_missing_provider_is_named_with_the_cure(tiny_bundle: Bundle) -> None:
    with pytest.raises(UsageError, match=r"has no CUDAExecutionProvider: install .*pip install onnxruntime-gpu"):
        load_cuda(tiny_bundle.path)


@pytest.mark.parametrize("content", [b"", b"\x08", b"not a graph", None])
def test_a_damaged_graph_is_one_line(tiny_bundle: Bundle, tmp_path: Path, content: bytes | None) -> None:
    copy = Path(shutil.copytree(tiny_bundle.path, tmp_path / "copy"))
    graph = copy / CPU_TARGET_FILE
    graph.write_bytes(graph.read_bytes()[:-200] if content is None else content)
    with pytest.raises(BundleError, match=f"{CPU_TARGET_FILE}: onnxruntime .* cannot load it: ") as caught:
        OrtEngine(copy, threads=1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"logits", b"logitz", "not a target graph: logits is missing or unknown"),
        (b"past_v.1", b"past_w.1", r"not a target graph: past_v\.1 is missing or unknown"),
        (b"positions", b"positionz", "not a target graph: positions is missing or unknown"),
    ],
)
def test_another_interface_is_refused(
    old: bytes, new: bytes, message: str, tiny_bundle: Bundle, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    for name in (CPU_TARGET_FILE, "target.onnx"):
        (copy / name).write_bytes((copy / name).read_bytes().replace(old, new))
    for lowered in (True, False):
        with pytest.raises(BundleError, match=message):
            OrtEngine(copy, lowered=lowered)


def test_a_call_that_fails_is_one_line(engine: OrtEngine, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SpecExportError, match=r"failed in a call of a graph: .*out of data bounds") as caught:
        step(engine, Tree.chain([1 << 20]), 0)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""


def test_a_missing_graph_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"target\.onnx: onnxruntime"):
        OrtEngine(tmp_path)
