"""The CPU engine on our kernels: trees of quantised targets give plain decoding's rows, so plain decoding's tokens."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specexport.engines import ort
from specexport.engines.kernels.library import kernels_library
from specexport.engines.ort import OrtEngine, kernels_file
from specexport.exporter import cli
from specexport.exporter.quantize.choice import PrecisionOptions
from specexport.runtime import Bundle
from specexport.runtime.cache import CacheRows
from specexport.runtime.engine import Step, chains_only, tree_exact
from specexport.runtime.errors import SpecExportError
from specexport.runtime.manifest import PrecisionInfo
from specexport.runtime.tree import Tree
from tests.e2e.test_heads import CASES as HEADS
from tests.e2e.test_heads import write_words
from tests.engines.kernels.one_node import needs_kernels
from tests.engines.kernels.tokens import check_tokens
from tests.exporter.heads.writers import TARGET_CONFIG, Random, llama_tensors
from tests.exporter.test_kernels_pass import SLOTS, save
from tests.exporter.test_kernels_pass import wide as wide  # the cases' sizes, for this file too
from tests.tiny import write_checkpoint, write_llama

pytestmark = needs_kernels

RunPython = Callable[..., subprocess.CompletedProcess[str]]
#: Two heads of 8 values: the same tensors, and the least width that is lowered.
NARROW = {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(
    scope="module",
    params=["llama-gqa int8", "llama-mha-bias int4", "gemma3 int4", "qwen3 int8", "phi3-partial int8"],
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[OrtEngine, OrtEngine]:
    """An engine that is given trees, on two threads, and one that decodes node by node, on one."""
    folder = tmp_path_factory.mktemp("target")
    case, precision = request.param.split()
    save(case, folder, PrecisionOptions(precision))
    return OrtEngine(folder, threads=2), OrtEngine(folder, threads=1)


def random_tree(rng: np.random.Generator, nodes: int, first: int) -> Tree:
    parents = [-1, *(node - 1 if node < first else int(rng.integers(0, node)) for node in range(1, nodes))]
    return Tree(rng.integers(0, 96, nodes), np.array(parents))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    prompt=st.integers(1, 30),
    rounds=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20), st.floats(0, 1)), min_size=1, max_size=4),
    seed=st.integers(0, 1000),
)
def test_trees_are_plain_steps_bit_for_bit(
    pair: tuple[OrtEngine, OrtEngine], prompt: int, rounds: list[tuple[int, int, float]], seed: int
) -> None:
    """Every node of every tree, after commits that moved rows; and the caches at the end."""
    engine, plain = pair
    assert tree_exact(engine) and tree_exact(plain)
    engine.reset()
    plain.reset()
    rng, rows = np.random.default_rng(seed), CacheRows()
    tree = Tree.chain(rng.integers(0, 96, prompt))
    accepted = prompt - 1
    for nodes, first, place in [*rounds, (1, 1, 0.0)]:
        logits = engine.run(Step.of(tree, rows)).copy()
        for leaf in [*(node for node in range(len(tree)) if node not in tree.parents), accepted]:
            path = tree.path(leaf)  # the accepted one comes last and stays
            for depth, node in enumerate(path):
                row = plain.run(Step.chain(tree.tokens[[node]], rows.past + depth))
                assert np.array_equal(row[0], logits[node])
        rows = rows.accept(tree.path(accepted))
        if rows.past + nodes > SLOTS:
            break
        tree = random_tree(rng, nodes, first)
        accepted = int(place * (nodes - 1))
    engine.run(Step.of(Tree.chain([1]), rows))
    for mine, other in zip(engine.read_cache(rows.past), plain.read_cache(rows.past), strict=True):
        assert np.array_equal(mine, other)


def test_a_step_that_does_not_fit_is_one_line(pair: tuple[OrtEngine, OrtEngine]) -> None:
    engine, _ = pair
    engine.reset()
    for step, words in (
        (Step.chain([1, 2], SLOTS)._replace(positions=np.array([3, 4])), "the call does not fit the cache"),
        (Step.chain([1], -1)._replace(positions=np.array([0])), "the call does not fit the cache"),
        (Step.chain([1], 2)._replace(positions=np.array([-1])), ""),
        (Step.chain([1], 2)._replace(positions=np.array([1 << 20])), ""),
        (Step.chain([1, 2], 2)._replace(tree=np.zeros((2, 2), bool)), "a node does not see itself"),
    ):
        with pytest.raises(SpecExportError, match=f"failed in a call of a graph: .*{words}") as caught:
            engine.run(step)
        assert "\n" not in str(caught.value)
    assert np.isfinite(engine.run(Step.chain([1, 2, 3]))).all()


def test_only_such_an_engine_takes_branching_trees(
    pair: tuple[OrtEngine, OrtEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = pair
    quantised = PrecisionInfo(weights="int8", lm_head="int8", embedding="int8", block=0, activations="fp32", exact=True)
    assert not chains_only(quantised, engine)
    assert chains_only(quantised)  # whoever plans before an engine is there
    monkeypatch.setattr(ort, "kernels_library", lambda: None)
    theirs = OrtEngine(engine._bundle_path, threads=1)
    assert chains_only(quantised, theirs) and not tree_exact(theirs)
    for other in (replace(quantised, exact=False), replace(quantised, weights="fp32", lm_head="fp32")):
        for each in (engine, theirs, None):
            assert chains_only(other, each) == (other.quantized and other.exact and each is not engine)


def build(source: Path, output: Path, *options: str) -> Bundle:
    words = ["build", str(source), "-o", str(output), "--window", "64", "--prefill-chunk", "8"]
    assert cli.main([*words, "--precision", "int8", "--no-check", *options]) == 0
    return Bundle.load(output, check="full")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Bundle]]:
    """int8 bundles with a head of every kind, each drafting trees."""
    folder = tmp_path_factory.mktemp("heads")
    target = write_checkpoint(folder / "target", TARGET_CONFIG | NARROW, llama_tensors(Random(1)))
    write_words(target)
    words = ["--draft-depth", "3", "--draft-topk", "4", "--draft-nodes", "9"]
    for case in ("eagle3", "eagle1", "medusa_safetensors"):
        words += ["--heads", f"{case.split('_')[0]}={HEADS[case].write(folder / case)}"]
    mtp = HEADS["mtp_mimo"]
    assert mtp.config is not None
    whole = replace(mtp, config=mtp.config | NARROW).write(folder / "mtp")
    write_words(whole)
    yield {
        "heads": build(target, folder / "heads.bundle", *words),
        "mtp": build(whole, folder / "mtp.bundle", "--heads", str(whole), *words[:6]),
    }


@pytest.mark.parametrize("drafter", ["eagle3", "eagle1", "medusa", "suffix", "mtp"])
def test_drafters_of_trees_change_no_token(drafter: str, heads: dict[str, Bundle]) -> None:
    """Codes in the target and the heads; greedy, sampled, penalised, to the end of the context."""
    bundle = heads["mtp" if drafter == "mtp" else "heads"]
    engine = OrtEngine(bundle.path, threads=2)
    assert tree_exact(engine) and not chains_only(bundle.manifest.target.precision, engine)
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [3, 1, 4, 1, 5, 8, 8], [2] * 50]
    branching, _ = check_tokens(bundle, engine, drafter, prompts, 64)
    assert branching > 10 or drafter == "suffix"


def test_heads_have_graphs_of_their_own(heads: dict[str, Bundle]) -> None:
    for bundle in heads.values():
        graphs = ["target.onnx", *(str(info.graph) for info in bundle.manifest.drafters if info.graph)]
        for graph in graphs:
            assert (bundle.path / kernels_file(graph)).is_file(), graph
            assert kernels_file(graph) in bundle.manifest.files


def test_verify_excuses_no_token(heads: dict[str, Bundle], capsys: pytest.CaptureFixture[str]) -> None:
    """Trees or not: none is another within rounding. (Eight random layers make anything of what rounding does to
    logits, on onnxruntime's kernels as on ours.)"""
    for bundle in heads.values():
        cli.main(["verify", str(bundle.path), "--json", "--threads", "1"])
        checks = json.loads(capsys.readouterr().out)["checks"]
        assert {check["name"] for check in checks if not check["passed"]} <= {"logits_teacher_forced"}
        tokens = [check for check in checks if "_tokens_" in check["name"]]
        assert len(tokens) > 5 and all(check["figure"] == 0 and not check["note"] for check in tokens)


def test_a_draft_model_changes_no_token(tmp_path: Path) -> None:
    target, draft = write_llama(tmp_path / "target"), write_llama(tmp_path / "draft", num_hidden_layers=1)
    bundle = build(target, tmp_path / "bundle", "--draft-model", str(draft), "--draft-depth", "4")
    assert (bundle.path / "draft.kernels.onnx").is_file()
    engine = OrtEngine(bundle.path, threads=1)
    check_tokens(bundle, engine, "model", [[30, 10, 40, 10], [5]], 40)


PROGRAM = """
import sys
from pathlib import Path
from specexport.engines.ort import OrtEngine
from specexport.exporter.cli import main
if sys.argv[2:]:
    print(OrtEngine(Path(sys.argv[1]), threads=1).tree_exact)
else:
    sys.exit(main(["run", sys.argv[1], "w3 w1", "--max-tokens", "8", "--threads", "1"]))
"""


def test_without_the_library_the_other_graph_runs(heads: dict[str, Bundle], run_python: RunPython) -> None:
    """In a process of its own: where the library is, is asked once."""
    path = str(heads["heads"].path)
    for value, expected in (("off", "False"), (str(kernels_library()), "True")):
        done = run_python("-c", PROGRAM, path, "open", SPECEXPORT_KERNELS=value)
        assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr
    done = run_python("-c", PROGRAM, path, SPECEXPORT_KERNELS="off")
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_a_library_that_does_not_load_is_one_line(
    heads: dict[str, Bundle], tmp_path: Path, run_python: RunPython
) -> None:
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"\x7fELF no library")
    strange = Path(json.__file__)  # a file, but none that can be loaded
    for path in (broken, strange):
        done = run_python("-c", PROGRAM, str(heads["heads"].path), SPECEXPORT_KERNELS=str(path))
        lines = done.stderr.strip().splitlines()
        assert done.returncode in (1, 2) and done.stdout == "" and len(lines) == 1, done.stderr
        assert f"{path} does not load: " in lines[0] and lines[0].endswith("SPECEXPORT_KERNELS=off runs without it")
