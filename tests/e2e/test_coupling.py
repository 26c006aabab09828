"""Drafting with the target's noise: a head that knows the target's distribution is always right, at any temperature.

The target forgets what it read (all embeddings are alike), so its logits are the same everywhere, and heads can be
made that know them exactly. A position or an id that is off by one would leave acceptance to luck.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specexport.exporter.heads.build import DraftOptions
from specexport.exporter.pipeline import BuildOptions, build
from specexport.exporter.progress import Progress
from specexport.runtime import Bundle, SamplingParams, Session
from specexport.runtime.drafters.base import CoupledDrafter
from specexport.runtime.engine import TargetEngine, find_engine
from specexport.runtime.errors import BundleError
from specexport.runtime.session import find_drafter
from tests.e2e.test_heads import CASES, write_words
from tests.exporter.heads.writers import TARGET_CONFIG, H, Random, Tensors, V, llama_tensors
from tests.tiny import write_checkpoint

TOKENS, DEPTH = 30, 3
CHAIN = tuple((0,) * depth for depth in range(1, DEPTH + 1))
HEADS = ("medusa", "eagle1", "mapped")


def forgetful() -> Tensors:
    """A target whose logits do not depend on its input."""
    tensors = llama_tensors(Random(1))
    tensors["model.embed_tokens.weight"][:] = tensors["model.embed_tokens.weight"][0].clone()
    tensors["lm_head.weight"] *= 0.08  # far from certain
    return tensors


def knowing(tensors: Tensors, name: str, folder: Path) -> Path:
    """A head whose every state is the target's last one, and whose rows are those of the target's lm_head."""
    tiny = CASES[{"medusa": "medusa_safetensors", "eagle1": "eagle1_llama3", "mapped": "eagle1_vllm"}[name]]
    stored = {key: tensor.clone() for key, tensor in tiny.tensors.items()}
    rows = tensors["lm_head.weight"]
    for key, tensor in stored.items():
        if "fc.weight" in key:
            tensor[:] = torch.cat([torch.zeros(H, H), torch.eye(H)], dim=1)
        elif key == "lm_head.weight":
            tensor[:] = rows[stored["token_map"]]
        elif tensor.shape == rows.shape and name == "medusa":
            tensor[:] = rows
        elif "o_proj" in key or "down_proj" in key or "fc.bias" in key or "linear" in key:
            tensor[:] = 0
    return replace(tiny, tensors=stored).write(folder / name)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("coupling")
    tensors = forgetful()
    target = write_checkpoint(folder / "target", TARGET_CONFIG, tensors)
    write_words(target)
    (target / "generation_config.json").unlink()
    heads = tuple(f"{name}={knowing(tensors, name, folder)}" for name in HEADS)
    draft = DraftOptions(tree=CHAIN[:2])
    options = BuildOptions(
        source=str(target),
        output=folder / "bundle",
        window=64,
        heads=heads,
        draft=draft,
        named_drafts={name: DraftOptions(tree=CHAIN) for name in HEADS[1:]},
    )
    return build(options, Progress(quiet=True)).bundle


@pytest.fixture(scope="module")
def engine(bundle: Bundle) -> TargetEngine:
    return find_engine(bundle.manifest.engine)(bundle.path, threads=1)


def run(bundle: Bundle, engine: TargetEngine, name: str, coupled: bool, **settings: Any) -> tuple[list[int], list[int]]:
    """(tokens, tokens of each step after the first) of one answer; they are those of plain decoding."""
    drafter = find_drafter(bundle, name, engine)
    assert isinstance(drafter, CoupledDrafter)
    drafter.coupled = coupled  # type: ignore[attr-defined]
    params = SamplingParams(max_tokens=TOKENS, **settings)
    plain = Session(bundle, drafter="none", engine=engine).generate([3, 1, 4], params)
    *chunks, _ = Session(bundle, drafter=drafter, engine=engine).stream([3, 1, 4], params)
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    assert tokens == plain.token_ids[: len(tokens)]
    return plain.token_ids, [len(chunk.token_ids) for chunk in chunks][1:]


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_knows_the_target_is_always_right(
    name: str, temperature: float, bundle: Bundle, engine: TargetEngine
) -> None:
    """With a map of ids: wherever it has the token."""
    info = next(info for info in bundle.manifest.drafters if info.name == name)
    depth = len(info.tree or ())
    known = set(range(V))
    if name == "mapped":
        known = set(CASES["eagle1_vllm"].tensors["token_map"].tolist())
    totals = {True: 0, False: 0}
    for seed in range(3):
        for coupled in totals:
            tokens, steps = run(bundle, engine, name, coupled, temperature=temperature, seed=seed)
            totals[coupled] += len(steps)
            if not coupled:
                continue
            place = 1
            for emitted in steps:
                right = 0
                while right < min(depth, len(tokens) - place - 1) and tokens[place + right] in known:
                    right += 1
                assert emitted == right + 1
                place += emitted
    assert totals[True] < totals[False]


@pytest.mark.parametrize("name", HEADS)
def test_greedy_drafts_are_not_touched(name: str, bundle: Bundle, engine: TargetEngine) -> None:
    """All logits are known, so all greedy drafts are right; noise would make them wrong."""
    _, steps = run(bundle, engine, name, True)
    token = Session(bundle, drafter="none", engine=engine).generate([3], SamplingParams(max_tokens=1)).token_ids[0]
    known = name != "mapped" or token in CASES["eagle1_vllm"].tensors["token_map"].tolist()
    info = next(info for info in bundle.manifest.drafters if info.name == name)
    assert max(steps) == (1 + len(info.tree or ()) if known else 1)


@pytest.mark.parametrize(
    ("name", "option", "value", "words"),
    [
        ("eagle1", "depth", 65, "depth is 65, expected 1 to 64"),
        ("medusa", "heads", 0, "heads is 0, expected 1 to 64"),
        ("eagle1", "rows", 0, "has 0 rows of vocabulary"),
        ("mapped", "rows", V, f"expected 4 for each of {V} ids"),
        ("mapped", "vocabulary", "other", "no other"),
    ],
)
def test_options_that_disagree_are_refused(
    name: str, option: str, value: Any, words: str, bundle: Bundle, engine: TargetEngine
) -> None:
    infos = tuple(replace(info, options=info.options | {option: value}) for info in bundle.manifest.drafters)
    changed = replace(bundle, manifest=replace(bundle.manifest, drafters=infos))
    with pytest.raises(BundleError, match=words):
        find_drafter(changed, name, engine)


def test_only_a_rule_that_compares_tokens_couples(bundle: Bundle, engine: TargetEngine) -> None:
    """``typical`` wants what is likely, not what the noise favours: its drafts are the greedy ones."""
    noisy = []
    for acceptance, temperature in (("match", 0.0), ("typical", 2.0), ("match", 2.0)):
        session = Session(bundle, drafter="medusa", engine=engine, acceptance=acceptance)
        session.generate([3, 1, 4], SamplingParams(max_tokens=4, temperature=temperature, seed=5))
        drafter = session._decoder.drafter
        assert drafter is not None
        noisy.append(drafter._noise.inputs(9)["noise"].any())  # type: ignore[attr-defined]
    assert noisy == [False, False, True]
