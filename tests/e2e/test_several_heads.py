"""Several heads in one bundle: each reads its own columns of what the target outputs for all, and changes no token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specexport.exporter import cli
from specexport.exporter.heads.build import DraftOptions
from specexport.exporter.heads.detect import open_head
from specexport.runtime import Bundle, SamplingParams, Session
from specexport.runtime.drafters.base import DraftRequest, FeatureDrafter
from specexport.runtime.engine import Step, TargetEngine, find_engine
from specexport.runtime.session import find_drafter
from specexport.runtime.tree import Tree
from tests.e2e.test_heads import CASES, PARAMS, WINDOW, build_bundle, write_words
from tests.exporter.heads.writers import TARGET, TARGET_CONFIG, H, Random, llama_tensors
from tests.tiny import write_checkpoint

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
#: Name in the bundle, dialect: captures (2, 4, 7), (2, 4, 5) and final, so the union is (2, 4, 7, 5, final).
HEADS = {"eagle3": "eagle3_specforge", "eagle3-2": "eagle3", "wide": "medusa_safetensors"}
WORDS = "--draft-depth 3 --draft-topk 4 --draft-nodes 9 --draft-topk wide:3 --draft-depth eagle3-2:2"
DRAFTS = {
    "eagle3": DraftOptions(depth=3, topk=4, nodes=9),
    "eagle3-2": DraftOptions(depth=2, topk=4, nodes=9),
    "wide": DraftOptions(depth=3, topk=3, nodes=9),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("several")
    path = write_checkpoint(folder / "target", TARGET_CONFIG, llama_tensors(Random(1)))
    write_words(path)
    return path


@pytest.fixture(scope="module")
def bundle(target: Path) -> Bundle:
    words = ["build", str(target), "-o", str(target.parent / "bundle"), "--window", str(WINDOW), *WORDS.split()]
    for name, case in HEADS.items():
        heads = CASES[case].write(target.parent / case)
        words += ["--heads", f"{name}={heads}" if name == "wide" else str(heads)]
    assert cli.main([*words, "--prefill-chunk", "8", "--drafter", "suffix"]) == 0
    return Bundle.load(target.parent / "bundle", check="full")


def engine_of(bundle: Bundle) -> TargetEngine:
    return find_engine(bundle.manifest.engine)(bundle.path, threads=1)


def test_what_the_bundle_says(bundle: Bundle, target: Path) -> None:
    manifest = bundle.manifest
    assert [info.name for info in manifest.drafters] == [*HEADS, "suffix"] and manifest.drafter == "eagle3"
    assert [info.kind for info in manifest.drafters] == ["eagle3", "eagle3", "medusa", "suffix"]
    assert [info.graph for info in manifest.drafters] == [*(f"drafter.{name}.onnx" for name in HEADS), None]
    assert [info.options.get("depth", info.options.get("k")) for info in manifest.drafters[:3]] == [3, 2, 3]
    assert manifest.target.features_size == 5 * H
    heads = {name: open_head(str(target.parent / case), target=TARGET) for name, case in HEADS.items()}
    assert manifest.lineage.heads == {name: head.fingerprint() for name, head in heads.items()}


def proposed(bundle: Bundle, name: str) -> Tree:
    """What a drafter proposes after a prompt."""
    engine = engine_of(bundle)
    drafter = find_drafter(bundle, name, engine)
    assert isinstance(drafter, FeatureDrafter)
    engine.run(Step.chain(PROMPT, select=[len(PROMPT) - 1]))
    drafter.absorb(0, PROMPT, engine.features())
    return drafter.propose(DraftRequest(root=11, max_nodes=10, max_depth=3))


@pytest.mark.parametrize("name", HEADS)
def test_a_head_drafts_as_it_does_alone(name: str, bundle: Bundle, tmp_path: Path) -> None:
    """And plain decoding's tokens come out, greedy or sampled."""
    engine = engine_of(bundle)
    for settings in PARAMS.values():
        params = SamplingParams(max_tokens=WINDOW, **settings)
        plain, speculative = (Session(bundle, drafter=which, engine=engine) for which in ("none", name))
        assert speculative.generate(PROMPT, params).token_ids == plain.generate(PROMPT, params).token_ids
    alone = build_bundle(CASES[HEADS[name]], tmp_path, DRAFTS[name])
    assert alone.manifest.drafter is not None and alone.manifest.target.features_size < 5 * H
    mine, expected = proposed(bundle, name), proposed(alone, alone.manifest.drafter)
    assert mine.tokens.tolist() == expected.tokens.tolist() and len(mine) > 3
    assert mine.parents.tolist() == expected.parents.tolist()
    assert np.allclose(mine.scores, expected.scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--heads suffix=HEADS", "the name 'suffix' is taken"),
        ("--heads a=HEADS --heads a=HEADS", "the name 'a' is taken"),
        ("--heads HEADS --draft-depth eagle:3", "for 'eagle': no such heads or draft model, there are eagle3"),
        ("--draft-depth model:3", "for 'model': no such heads or draft model, there are none"),
        ("--heads HEADS --draft-depth eagle3:99", "99 is not in the range"),
    ],
)
def test_what_cannot_be(words: str, message: str, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heads = CASES["eagle3"].write(target.parent / "heads")
    output = ["-o", str(target.parent / "refused")]
    assert cli.main(["build", str(target), *output, *words.replace("HEADS", str(heads)).split()]) == 2
    assert message in capsys.readouterr().err
