"""A draft model in a bundle, from two checkpoints to decoded tokens: faster at best, and never another token."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specexport.engines.ort import DRAFT_FILE, TARGET_FILE, OrtEngine, cpu_files
from specexport.exporter import cli, pipeline
from specexport.exporter.onnx import export_target
from specexport.runtime import Bundle, SamplingParams, Session
from specexport.runtime.cache import CacheRows
from specexport.runtime.drafters.model import ModelDrafter
from specexport.runtime.engine import Step, TargetEngine, find_engine
from specexport.runtime.errors import BundleError
from specexport.runtime.tree import Tree
from tests.exporter.heads.test_draft_model import permute
from tests.tiny import LLAMA, VOCAB, write_llama

WINDOW, DEPTH, SHORT, SHIFT = 96, 4, 48, 7
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "penalised": {"temperature": 0.7, "seed": 4, "repetition_penalty": 1.2, "top_k": 12},
}
PROMPTS = ([30, 10, 40, 10, 50, 90, 20, 60, 50, 30], [30, 10, 40, 10, 50, 80, 80], [20] * (WINDOW - 9), [5])
#: Draft models by what they are to the target.
CASES = ("itself", "smaller", "mapped")


def write_draft(case: str, target: Path, draft: Path) -> None:
    if case == "itself":
        shutil.copytree(target, draft)
    elif case == "smaller":  # the target's first layer, half its context, and other padding
        write_llama(draft, num_hidden_layers=1, max_position_embeddings=SHORT)
        (draft / "config.json").write_text(
            json.dumps(LLAMA | {"num_hidden_layers": 1, "max_position_embeddings": SHORT, "vocab_size": VOCAB + 4})
        )
        edit_embedding(draft, lambda rows: rows[: VOCAB + 4].clone())
    else:  # the target with its ids in another order, and a few that it does not have
        shutil.copytree(target, draft)
        permute(draft, SHIFT, rename=5)
        edit_embedding(draft, lambda rows: torch.cat([rows[:4], rows[4:VOCAB].roll(SHIFT, 0), rows[VOCAB:]]))


def edit_embedding(checkpoint: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.embed_tokens.weight"] = change(tensors["model.embed_tokens.weight"])
    save_file(tensors, checkpoint / "model.safetensors")


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Bundle]]:
    folder = tmp_path_factory.mktemp("draft-models")
    target = write_llama(folder / "target")
    graphs: dict[str, Any] = {}

    def traced_once(*arguments: Any) -> Any:
        key = repr(arguments[:-1])  # all but the weights, with which every build fills the graph anew
        if key not in graphs:
            graphs[key] = export_target(*arguments)
        return graphs[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "export_target", traced_once)
        for case in CASES:
            write_draft(case, target, folder / case)
            words = ["build", str(target), "-o", str(folder / f"{case}.bundle"), "--window", str(WINDOW)]
            words += ["--prefill-chunk", "8", "--draft-model", str(folder / case), "--draft-depth", str(DEPTH)]
            words += ["--drafter-precision", "fp32"]  # a draft model that is the target is always right
            assert cli.main(words) == 0
    yield {case: Bundle.load(folder / f"{case}.bundle", check="full") for case in CASES}


def engine_of(bundle: Bundle) -> TargetEngine:
    return find_engine(bundle.manifest.engine)(bundle.path, threads=1)


def drafter_of(session: Session) -> ModelDrafter:
    drafter = session._decoder.drafter
    assert isinstance(drafter, ModelDrafter)
    return drafter


@pytest.mark.parametrize("case", CASES)
def test_it_changes_no_token(case: str, bundles: dict[str, Bundle]) -> None:
    """Prompts in a row that share a prefix, to the end of the context, past the draft model's own."""
    bundle = bundles[case]
    engine = engine_of(bundle)
    accepted = 0
    for settings in PARAMS.values():
        params = SamplingParams(max_tokens=WINDOW, **settings)
        plain, speculative = Session(bundle, drafter="none", engine=engine), Session(bundle, engine=engine)
        assert speculative.drafter == "model"
        for prompt in PROMPTS:
            expected, result = plain.generate(prompt, params), speculative.generate(prompt, params)
            assert result.token_ids == expected.token_ids
            assert result.finish_reason == expected.finish_reason
            accepted += sum(result.statistics.as_dict()["accepted_by_depth"])
    assert accepted > 30


@pytest.mark.parametrize(
    ("case", "settings"), [("mapped", "greedy"), *(("itself", name) for name in PARAMS)], ids="-".join
)
@pytest.mark.parametrize("rule", ["match", "rejection"])
def test_a_draft_model_that_is_the_target_is_always_right(
    case: str, settings: str, rule: str, bundles: dict[str, Bundle]
) -> None:
    session = Session(bundles[case], threads=1, acceptance=rule)
    params = SamplingParams(max_tokens=1 + 6 * (DEPTH + 1), **PARAMS[settings])
    assert session.generate(PROMPTS[0], params).statistics.tau == DEPTH + 1


def test_drafts_from_another_order_of_ids_are_drawn_with_the_same_noise(bundles: dict[str, Bundle]) -> None:
    """At temperature 1 most drafts come true: noise belongs to the target's ids."""
    params = SamplingParams(max_tokens=60, **PARAMS["sampled"])
    assert Session(bundles["mapped"], threads=1).generate(PROMPTS[0], params).statistics.tau > DEPTH


def test_a_stop_token_in_the_middle_of_a_block(bundles: dict[str, Bundle]) -> None:
    bundle = bundles["itself"]
    engine = engine_of(bundle)
    tokens = Session(bundle, drafter="none", engine=engine).generate(PROMPTS[0], SamplingParams(max_tokens=20))
    places = [place for place, token in enumerate(tokens.token_ids) if tokens.token_ids.index(token) == place]
    place = next(place for place in places if place > 1 and place % (DEPTH + 1) == 3)
    ended = replace(bundle, manifest=replace(bundle.manifest, stop_ids=(tokens.token_ids[place],)))
    session = Session(ended, engine=engine)
    for _ in range(2):
        result = session.generate(PROMPTS[0], SamplingParams(max_tokens=20))
        assert result.finish_reason == "stop" and result.token_ids == tokens.token_ids[:place]


@pytest.mark.parametrize("case", CASES)
def test_its_cache_is_that_of_a_fresh_prefill(case: str, bundles: dict[str, Bundle]) -> None:
    """After prompts, steps and rewinds: rows of accepted drafts stayed, those of rejected ones left nothing."""
    bundle = bundles[case]
    session = Session(bundle, threads=1)
    for prompt in PROMPTS[:2]:
        session.generate(prompt, SamplingParams(temperature=1.0, seed=1, max_tokens=20))
        drafter = drafter_of(session)
        known = drafter._known + drafter._chain
        count = drafter._rows
        assert 20 < count <= len(known)
        fresh = OrtEngine(bundle.path, threads=1, graph=DRAFT_FILE)
        fresh.run(Step.chain(known[:count], select=[count - 1]))
        for mine, expected in zip(drafter._engine.read_cache(count), fresh.read_cache(count), strict=True):
            assert np.allclose(mine, expected, rtol=1e-5, atol=1e-5)


def test_past_its_context_it_says_so_once(bundles: dict[str, Bundle], caplog: pytest.LogCaptureFixture) -> None:
    session = Session(bundles["smaller"], threads=1)
    with caplog.at_level(logging.WARNING):
        result = session.generate(PROMPTS[0], SamplingParams(max_tokens=70))
    assert [record.getMessage() for record in caplog.records] == [
        f"model: past its context of {SHORT} tokens, decoding plainly"
    ]
    assert result.statistics.target_calls > 79 - SHORT


def test_the_bundle_says_what_it_holds(bundles: dict[str, Bundle], capsys: pytest.CaptureFixture[str]) -> None:
    for case, bundle in bundles.items():
        info = bundle.manifest.drafters[0]
        assert (info.name, info.kind, info.graph, bundle.manifest.drafter) == ("model", "model", DRAFT_FILE, "model")
        assert {DRAFT_FILE, f"{DRAFT_FILE}.data", *cpu_files(DRAFT_FILE)} <= bundle.manifest.files.keys()
        table = bundle.path / "draft.vocabulary"
        assert table.exists() == (info.options["vocabulary"] == table.name) == (case == "mapped")
        slots, layers = (SHORT, 1) if case == "smaller" else (WINDOW, 2)
        assert info.options["slots"] == slots and info.options["depth"] == DEPTH
        assert info.options["cache_bytes"] == 2 * layers * 2 * 16 * slots * 4
        assert str(info.options["fingerprint"]).startswith("sha256:")
        assert cli.main(["inspect", str(bundle.path)]) == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("model ")]
        assert f"drafts of {DEPTH}, {slots} slots" in line and ("matched by text" in line) == (case == "mapped")
    same = bundles["itself"]
    assert same.manifest.drafters[0].options["fingerprint"] == same.manifest.lineage.fingerprint


def test_the_second_target_honours_the_whole_contract(bundles: dict[str, Bundle]) -> None:
    """It has its own caches, and moves accepted rows, lowered or as exported."""
    path = bundles["itself"].path
    for lowered in (True, False):
        target = OrtEngine(path, threads=1, lowered=lowered)
        draft = target.open_target(DRAFT_FILE)
        chain = Step.chain(range(40, 52))
        expected = target.run(chain).copy()
        assert not any(cache.any() for cache in draft.read_cache(WINDOW))
        assert np.array_equal(draft.run(chain), expected)
        before = draft.read_cache(12)
        draft.run(Step.of(Tree.chain([9]), CacheRows(1, (3, 5, 6))))  # as if they were nodes of a tree
        for mine, old in zip(draft.read_cache(4), before, strict=True):
            assert np.array_equal(mine, old[:, [0, 3, 5, 6]])


def test_files_that_disagree_are_refused(bundles: dict[str, Bundle], tmp_path: Path) -> None:
    source = bundles["mapped"]

    def opened(name: str, value: Any) -> Session:
        info = source.manifest.drafters[0]
        info = replace(info, options=info.options | {name: value})
        return Session(replace(source, manifest=replace(source.manifest, drafters=(info,))), threads=1)

    for name, value, words in (
        ("slots", WINDOW - 1, f"expected 320 and {WINDOW - 1} by the manifest"),
        ("vocab_size", 321, "expected 321"),
        ("valid_vocab", VOCAB - 1, f"expected 4 for each of {VOCAB - 1} ids"),
        ("vocabulary", "other", "no other"),
        ("vocabulary", "tokenizer.json", "expected 4 for each"),
        ("depth", 0, "depth is 0"),
        ("twist", 1, "twist"),
    ):
        with pytest.raises(BundleError, match=words):
            opened(name, value)
    copy = Path(shutil.copytree(source.path, tmp_path / "copy"))
    table = np.fromfile(copy / "draft.vocabulary", "<i4")
    table[5] = VOCAB
    table.tofile(copy / "draft.vocabulary")
    with pytest.raises(BundleError, match=f"expected \\d+ ids from -1 to {VOCAB - 1}"):
        Session(Bundle.load(copy), threads=1)
    manifest = json.loads((copy / "manifest.json").read_text())
    del manifest["files"][DRAFT_FILE]
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=rf"drafters.model.graph is '{DRAFT_FILE}', expected a file"):
        Bundle.load(copy)


def test_names_of_the_lowered_files_do_not_collide() -> None:
    names = [TARGET_FILE, DRAFT_FILE, *cpu_files(TARGET_FILE), *cpu_files(DRAFT_FILE)]
    assert len(set(names)) == len(names) == 6
