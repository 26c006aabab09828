"""Drafters whose graphs are plans: heads that append what no profile fits in pieces, and a draft model.

Over :mod:`tests.engines.fake_gpu`. Drafts, not only tokens, must be those of the CPU engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specexport.engines.ort import DRAFT_FILE, load_cpu
from specexport.engines.ort_session import OrtGraph
from specexport.engines.tensorrt_runtime import PlanEngine, PlanGraph, load_tensorrt
from specexport.exporter.pipeline import BuildOptions, build
from specexport.exporter.progress import Progress
from specexport.runtime import Bundle, SamplingParams, Session
from specexport.runtime.bundle import ENGINES
from specexport.runtime.engine import Step, TargetEngine
from specexport.runtime.errors import BundleError, UsageError
from tests.e2e.test_heads import CASES, DRAFT, write_words
from tests.engines.fake_gpu import Gpu, compile_fake, target_profiles
from tests.exporter.heads.writers import TARGET_CONFIG, Random, llama_tensors
from tests.tiny import write_checkpoint

WINDOW = 64
#: As of a compiler that pins few sizes: 3 entries are 2 + 1, a chunk of 8 is 4 + 4.
ENTRIES = (1, 2, 4)
PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [3, 1, 4, 1, 5, 8, 8], [2] * (WINDOW - 12))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("plans")
    target = write_checkpoint(folder / "target", TARGET_CONFIG, llama_tensors(Random(1)))
    write_words(target)
    heads = tuple(
        f"{name}={CASES[case].write(folder / name)}" for name, case in (("m", "medusa_safetensors"), ("e", "eagle3"))
    )
    options = BuildOptions(
        source=str(target),
        output=folder / "bundle",
        window=WINDOW,
        prefill_chunk=8,
        heads=heads,
        draft_model=str(target),
        drafter_precision="fp32",  # kernels for codes round activations, each engine's in its own way
        draft=DRAFT,
    )
    made = build(options, Progress(quiet=True)).bundle
    compile_fake(made, target_profiles((1, 2, 4, 8, 10), 8))
    compile_fake(made, target_profiles((1, 2), 8), DRAFT_FILE)
    graphs = {info.name: str(info.graph) for info in made.manifest.drafters}
    compile_fake(made, [{}], graphs["m"])
    compile_fake(made, [{"A": entries} for entries in ENTRIES], graphs["e"])
    return Bundle.load(made.path)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, bundle: Bundle) -> PlanEngine:
    Gpu(monkeypatch)
    return load_tensorrt(bundle.path)


def run(bundle: Bundle, engine: TargetEngine, drafter: str, settings: dict[str, Any]) -> list[Any]:
    session = Session(bundle, engine=engine, drafter=drafter)
    results = [session.generate(prompt, SamplingParams(max_tokens=30, **settings)) for prompt in PROMPTS]
    return [(result.token_ids, result.statistics.as_dict()["accepted_by_depth"]) for result in results]


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafter", ["m", "e", "model"])
def test_drafts_and_tokens_are_those_of_the_cpu(
    bundle: Bundle, engine: PlanEngine, drafter: str, settings: dict[str, Any]
) -> None:
    expected = run(bundle, load_cpu(bundle.path, threads=1), drafter, settings)
    assert run(bundle, engine, drafter, settings) == expected
    assert drafter != "model" or any(sum(accepted) for _, accepted in expected)


def test_features_of_a_chunk_in_pieces_are_those_of_one_call(bundle: Bundle, engine: PlanEngine) -> None:
    reference = load_cpu(bundle.path, threads=1)
    for one in (engine, reference):
        one.run(Step.chain(range(20), select=[19]))
    assert engine.features().shape == (20, engine.features_size)
    assert np.abs(engine.features() - reference.features()).max() < 1e-4


@pytest.mark.parametrize("threads", [1, 3])
def test_graphs_on_the_device_and_those_that_were_not_compiled(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    Gpu(monkeypatch)
    engine = load_tensorrt(bundle.path, threads=threads)
    graphs = {info.name: str(info.graph) for info in bundle.manifest.drafters}
    assert isinstance(engine.open_graph(graphs["m"]), PlanGraph)
    record = bundle.path / ENGINES / "fake" / Path(graphs["m"]).with_suffix(".plan.json").name
    hidden = record.rename(record.with_suffix(".hidden"))
    try:
        for opened in (engine, engine.open_target(DRAFT_FILE)):
            graph = opened.open_graph(graphs["m"])
            assert isinstance(graph, OrtGraph)
            assert graph._session.get_session_options().intra_op_num_threads == threads
        with pytest.raises(BundleError, match=r"other.plan.json is missing"):
            engine.open_target("other.onnx")
    finally:
        hidden.rename(record)


def test_inputs_that_a_plan_does_not_take(bundle: Bundle, engine: PlanEngine) -> None:
    graphs = {info.name: str(info.graph) for info in bundle.manifest.drafters}
    graph = engine.open_graph(graphs["m"])
    assert isinstance(graph, PlanGraph)
    right = {name: np.zeros_like(array) for name, array in graph._runner.inputs(0).items()}
    assert graph.run(right)["draft_tokens"].shape[1:] == (DRAFT.topk,)
    with pytest.raises(UsageError, match=r"features is float32 \[2, .*\], expected float32 \[1, "):
        graph.run(right | {"features": np.zeros((2, right["features"].shape[1]), np.float32)})
    with pytest.raises(UsageError, match=r"features is uint16 .*, expected float32"):
        graph.run(right | {"features": right["features"].astype(np.uint16)})
    with pytest.raises(BundleError, match="input noise is missing or unknown"):
        graph.run({"features": right["features"]})
