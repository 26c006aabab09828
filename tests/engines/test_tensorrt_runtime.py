"""The runtime of compiled plans, over :mod:`tests.engines.fake_gpu`: bookkeeping, and tokens end to end.

The fake computes with ONNX Runtime, so equality with the CPU engine shows that inputs, padding, commits, caches and
summaries are right; it shows nothing about TensorRT's numbers.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from specexport.engines.ort import OrtEngine
from specexport.engines.plan_runner import PlanRunner
from specexport.engines.tensorrt_runtime import PlanEngine, load_tensorrt
from specexport.exporter.parity import exercise
from specexport.runtime import Bundle, SamplingParams, Session
from specexport.runtime.cache import CacheRows
from specexport.runtime.engine import Step, TargetEngine
from specexport.runtime.errors import UsageError
from specexport.runtime.summary import LazyRow
from specexport.runtime.tree import Tree
from tests.engines.fake_gpu import Gpu, compile_fake, target_profiles
from tests.tiny import VOCAB

PROMPTS = ([30, 10, 40, 10, 50, 90, 20, 60, 50, 30], [7], list(range(4, 45)), [30, 10, 40, 10, 50, 90, 20])
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": 24},
    "top_k": {"max_tokens": 24, "temperature": 0.8, "top_k": 5, "top_p": 0.9, "seed": 3},
    "top_p": {"max_tokens": 24, "temperature": 0.8, "top_p": 0.9, "seed": 4},
    "penalised": {"max_tokens": 24, "temperature": 0.7, "repetition_penalty": 1.2, "min_tokens": 3, "logprobs": 2},
    "to_the_end": {"max_tokens": 200},
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


@pytest.fixture(scope="module")
def compiled(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    """A copy of the tiny bundle with a fake plan, made once for each kind."""
    made: dict[str, Bundle] = {}

    def make(profiles: Sequence[Mapping[str, int]] | None = None, **options: Any) -> Bundle:
        key = repr((profiles, options))
        if key not in made:
            copy = tmp_path_factory.mktemp("plan") / "bundle"
            shutil.copytree(tiny_bundle.path, copy)
            compile_fake(Bundle.load(copy), profiles or target_profiles(), **options)
            made[key] = Bundle.load(copy)
        return made[key]

    return make


def answers(bundle: Bundle, engine: TargetEngine, drafter: str, settings: Mapping[str, Any]) -> list[Any]:
    session = Session(bundle, engine=engine, drafter=drafter)
    results = [session.generate(prompt, SamplingParams(**settings)) for prompt in PROMPTS]
    return [(result.token_ids, result.finish_reason, result.stop_match) for result in results]


#: Kinds of plans beside the usual one, each run with one setting.
KINDS: dict[str, dict[str, Any]] = {
    "two_buffers": {"in_place": False},
    "falls_back": {"falls_back": True},
    "no_summary": {"summarise": False},
}
CASES = [(name, "in_place") for name in SETTINGS] + [("top_p", name) for name in KINDS]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_tokens_are_those_of_the_cpu(
    gpu: Gpu, compiled: Callable[..., Bundle], tiny_bundle: Bundle, name: str, kind: str
) -> None:
    """Prompts that share prefixes, one longer than a chunk; trees of every width up to 8; the end of the context."""
    settings, bundle = SETTINGS[name], compiled(**KINDS.get(kind, {}))
    engine = load_tensorrt(bundle.path)
    reference = OrtEngine(tiny_bundle.path, threads=1)
    for drafter in ("none", "recycling"):
        expected = answers(tiny_bundle, reference, drafter, settings)
        assert answers(bundle, engine, drafter, settings) == expected
        if settings["max_tokens"] > 100:
            assert {reason for _, reason, _ in expected} <= {"context", "stop"}


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("widths", [(1, 2, 4, 8), (1, 8), tuple(range(1, 9))])
def test_chunks_trees_and_commits_to_the_last_slot(
    gpu: Gpu, compiled: Callable[..., Bundle], widths: tuple[int, ...], graphs: bool
) -> None:
    bundle = compiled(target_profiles(widths))
    reference = OrtEngine(bundle.path, threads=1, lowered=False)

    def recompute(tokens: Sequence[int]) -> Any:
        return reference.run(Step.chain(tokens, select=[len(tokens) - 1])).copy()

    logits, cache = exercise(lambda: load_tensorrt(bundle.path, graphs=graphs), recompute, vocab=VOCAB)
    assert logits.relative < 1e-5, logits.where
    assert cache.relative < 1e-5, cache.where


def engine_of(bundle: Bundle, **options: Any) -> PlanEngine:
    return load_tensorrt(bundle.path, **options)


def tree_step(engine: TargetEngine, tree: Tree, past: int, commit: Sequence[int] = ()) -> Any:
    return engine.run(Step.of(tree, CacheRows(past - len(commit), tuple(commit))))


def test_padding_is_never_read(gpu: Gpu, compiled: Callable[..., Bundle]) -> None:
    """A tree of 5 in the profile of 8: what lies behind its nodes may be anything, and changes nothing."""
    bundle = compiled()
    clean, spoilt = engine_of(bundle), engine_of(bundle)
    fork = Tree(np.array([20, 21, 22, 23, 24]), np.array([-1, 0, 0, 1, 2]))
    for engine in (clean, spoilt):
        tree_step(engine, Tree.chain(list(range(30, 41))), 0)
        tree_step(engine, fork, 11)
        if engine is spoilt:
            for cache in caches(gpu, engine._runner):
                assert np.isfinite(cache).all()
                cache[:, :, 16:] = 1e4
    after = [tree_step(engine, Tree.chain([50, 51, 52]), 14, commit=[13, 15]) for engine in (clean, spoilt)]
    assert np.array_equal(*after)
    for mine, other in zip(clean.read_cache(17), spoilt.read_cache(17), strict=True):
        assert np.array_equal(mine, other)


def caches(gpu: Gpu, runner: PlanRunner) -> list[Any]:
    shape = runner.read_caches()[0].shape
    return [gpu.read(runner._past[past], np.float32, shape) for past, _ in runner._pairs]


def test_a_call_runs_in_the_next_wider_profile(gpu: Gpu, compiled: Callable[..., Bundle]) -> None:
    engine = engine_of(compiled())
    for nodes, past, profile in ((1, 0, 0), (5, 1, 3), (3, 6, 2), (8, 9, 3)):
        tree_step(engine, Tree.chain(list(range(20, 20 + nodes))), past)
        assert engine._runner._last is not None and engine._runner._last.context.profile == profile
    assert [engine.widest(past) for past in (0, 120, 121, 124, 125, 127, 128)] == [8, 8, 4, 4, 2, 1, 0]
    wide = Tree(np.arange(20, 29), np.array([-1, *[0] * 8]))
    with pytest.raises(UsageError, match=r"a tree of 9 nodes after 17 rows is wider .* at most 8 nodes"):
        tree_step(engine, wide, 17)


def test_contexts_share_memory_and_are_made_once(gpu: Gpu, compiled: Callable[..., Bundle]) -> None:
    engine = engine_of(compiled())
    held: set[int] = set()
    for round_ in range(3):
        for nodes, past in ((1, 0), (2, 1), (8, 3)):
            tree_step(engine, Tree.chain(list(range(20, 20 + nodes))), past)
        if round_ == 0:
            held = set(gpu.driver.memory)
    (loaded,) = gpu.engines
    assert len(loaded.contexts) == 3
    assert len({context.scratch for context in loaded.contexts}) == 1
    assert set(gpu.driver.memory) == held  # caches and buffers were allocated once
    for context in loaded.contexts:
        assert context.addresses["past_k.0"] == context.addresses["present_k.0"]


def test_graphs_are_captured_once_and_again_when_memory_moves(gpu: Gpu, compiled: Callable[..., Bundle]) -> None:
    engine = engine_of(compiled())
    root = Tree.chain([20])
    gpu.engines[0].capturable = False
    for _ in range(3):
        tree_step(engine, Tree.chain([20, 21, 22]), 0)
    assert gpu.driver.captures == 0
    gpu.engines[0].capturable = True
    before = gpu.driver.eager
    first = tree_step(engine, root, 0)
    assert (gpu.driver.captures, gpu.driver.launches) == (0, 0)  # the first call of a profile may allocate
    for _ in range(3):
        assert np.array_equal(tree_step(engine, root, 0), first)
    assert (gpu.driver.captures, gpu.driver.launches) == (1, 3)
    assert gpu.driver.eager - before == 3 + 4  # upload, plan, summary of the first; of each, the rows asked for
    tree_step(engine, Tree.chain([20, 21]), 1)
    tree_step(engine, Tree.chain([20, 21]), 1)
    assert gpu.driver.captures == 2
    engine._trt.device.scratch.need(1 << 16)  # as a drafter's plan would that needs more
    for _ in range(2):
        assert np.array_equal(tree_step(engine, root, 0), first)
    assert gpu.driver.captures == 3


def test_two_buffers_have_a_graph_for_each_order(gpu: Gpu, compiled: Callable[..., Bundle]) -> None:
    engine = engine_of(compiled(in_place=False))
    for _ in range(8):
        tree_step(engine, Tree.chain([20]), 0)
    assert (gpu.driver.captures, gpu.driver.launches) == (2, 6)


def test_graphs_can_be_off_and_a_capture_that_fails_is_no_end(
    gpu: Gpu, compiled: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    off, failing = engine_of(compiled(), graphs=False), engine_of(compiled())
    root = Tree.chain([20])
    expected = [tree_step(off, root, 0) for _ in range(3)][-1]
    assert gpu.driver.captures == 0
    monkeypatch.setattr(gpu.driver, "cuGraphInstantiate", lambda graph, flags: (900, None))
    for _ in range(3):
        assert np.array_equal(tree_step(failing, root, 0), expected)
    assert caplog.text.count("no CUDA graphs") == 1


def test_greedy_decoding_fetches_no_row(gpu: Gpu, compiled: Callable[..., Bundle]) -> None:
    """And sampling one for each emitted token, unless a top_k leaves the summary to decide."""
    bundle = compiled()
    engine = engine_of(bundle)
    fetched: list[str] = []
    fetch = engine._runner.fetch
    engine._runner.fetch = lambda *arguments: (fetched.append(arguments[0]), fetch(*arguments))[1]  # type: ignore
    session = Session(bundle, engine=engine, drafter="suffix")
    for settings, most in (({}, 0), ({"temperature": 1.0, "top_k": 4}, 0), ({"temperature": 1.0, "top_p": 0.5}, 20)):
        fetched.clear()
        result = session.generate(PROMPTS[0], SamplingParams(max_tokens=20, **settings))
        assert len(fetched) == (most and len(result.token_ids))


def test_rows_on_request(gpu: Gpu, compiled: Callable[..., Bundle]) -> None:
    engine = engine_of(compiled())
    every = engine.run(Step.chain(range(20, 60)))
    rows = engine.run_rows(Step.chain(range(20, 60), select=[3, 38, 39]))
    assert [isinstance(row, LazyRow) for row in rows] == [False, True, True]  # the first was in an earlier piece
    for row, expected in zip(rows, every[[3, 38, 39]], strict=True):
        array = row.numpy() if isinstance(row, LazyRow) else row
        assert np.abs(array - expected).max() < 1e-5
        if isinstance(row, LazyRow):
            assert row.tokens[0] == expected[:VOCAB].argmax()
            assert list(row.values) == sorted(array[row.tokens], reverse=True)
    assert engine.features_size == 0


def test_an_engine_may_be_used_in_another_thread(gpu: Gpu, compiled: Callable[..., Bundle]) -> None:
    """As a server does: CUDA's current context belongs to a thread."""
    engine, root = engine_of(compiled()), Tree.chain([20])
    expected = tree_step(engine, root, 0)
    with ThreadPoolExecutor(1) as pool:
        assert np.array_equal(pool.submit(tree_step, engine, root, 0).result(), expected)
    assert np.array_equal(tree_step(engine, root, 0), expected)
