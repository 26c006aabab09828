"""Heads of every dialect, from their files to decoded tokens: built, loaded, drafting, and changing nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from specexport.exporter.heads.build import DraftOptions
from specexport.exporter.heads.trees import TREES
from specexport.exporter.pipeline import BuildOptions, build
from specexport.exporter.progress import Progress
from specexport.runtime import Bundle, SamplingParams, Session
from specexport.runtime.drafters import DraftRequest
from specexport.runtime.drafters.recurrent import RecurrentDrafter
from specexport.runtime.engine import Step, TargetEngine, find_engine
from specexport.runtime.session import find_drafter
from tests.exporter.heads.writers import TARGET_CONFIG, Random, Tiny, V, every, llama_tensors
from tests.tiny import write_checkpoint

WINDOW = 64
#: What a head may have been trained for.
SHORT = 40
DRAFT = DraftOptions(depth=3, topk=4, nodes=9)
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0, "seed": 3},
    "penalised": {"temperature": 0.7, "seed": 4, "repetition_penalty": 1.2, "top_k": 12},
}
CASES = dict(every())
#: One of each kind by default; the others are the same code behind other files.
DEFAULT = ("medusa_safetensors", "eagle1", "eagle3", "mtp_mimo")


def write_words(directory: Path) -> None:
    """A tokenizer of V words, so that every id of the target means something."""
    tokenizer = Tokenizer(models.WordLevel({f"w{index}": index for index in range(V)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))


def build_bundle(tiny: Tiny, folder: Path, draft: DraftOptions = DRAFT) -> Bundle:
    heads = tiny.write(folder / "heads")
    target = heads if heads.is_dir() else heads.parent
    if tiny.others:
        write_words(target)
    else:
        target = folder / "target"
        write_checkpoint(target, TARGET_CONFIG, llama_tensors(Random(1)))
        write_words(target)
    options = BuildOptions(
        source=str(target), output=folder / "bundle", window=WINDOW, prefill_chunk=8, heads=(str(heads),), draft=draft
    )
    return build(options, Progress(quiet=True)).bundle


def check_tokens(bundle: Bundle, engine: TargetEngine) -> int:
    """Two prompts in a row, to the end of the context, for each setting; returns accepted drafts."""
    accepted = 0
    for settings in PARAMS.values():
        params = SamplingParams(max_tokens=WINDOW, **settings)
        plain, speculative = Session(bundle, drafter="none", engine=engine), Session(bundle, engine=engine)
        for prompt in ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [3, 1, 4, 1, 5, 8, 8], [2] * (WINDOW - 4)):
            expected = plain.generate(prompt, params)
            result = speculative.generate(prompt, params)
            assert result.token_ids == expected.token_ids
            assert result.finish_reason == expected.finish_reason
            accepted += sum(result.statistics.as_dict()["accepted_by_depth"])
    return accepted


def check_cache(bundle: Bundle, engine: TargetEngine) -> None:
    """Fault 3: what the drafter knows after prompts, steps and rewinds is what a fresh one learns from the tokens."""
    session = Session(bundle, engine=engine)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=14)
    session.generate([3, 1, 4, 1, 5, 9], params)
    session.generate([3, 1, 4, 1, 5, 8, 8], params)
    used = session._decoder.drafter
    tokens = session._decoder.committed
    assert isinstance(used, RecurrentDrafter)
    used.couple(None)  # as the fresh one, which was never told to sample
    fresh = find_drafter(bundle, bundle.manifest.drafter, engine)
    assert isinstance(fresh, RecurrentDrafter)
    count = len(tokens)
    engine.run(Step.chain(tokens, select=[count - 1]))
    fresh.absorb(0, tokens, engine.features())
    request = DraftRequest(root=11, max_nodes=DRAFT.nodes + 1, max_depth=DRAFT.depth)
    if used._proposal is not None:  # the newest entry was made for the last root; give both the same one
        used.absorb(count - 1, tokens[-1:], engine.features()[-1:])
    mine, expected = used.propose(request), fresh.propose(request)
    assert mine.tokens.tolist() == expected.tokens.tolist()
    assert mine.parents.tolist() == expected.parents.tolist()
    assert np.allclose(mine.scores, expected.scores, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "case", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_dialect_builds_and_changes_no_token(case: str, tmp_path: Path) -> None:
    bundle = build_bundle(CASES[case], tmp_path)
    engine = find_engine(bundle.manifest.engine)(bundle.path, threads=1)
    record = CASES[case].record
    assert bundle.manifest.drafter == record.method
    check_tokens(bundle, engine)
    if record.method != "medusa":
        check_cache(bundle, engine)


@pytest.mark.parametrize(
    ("case", "tree"),
    [
        ("eagle1", TREES["eagle"]),
        pytest.param("medusa_safetensors", ((0,), (9,), (0, 0), (9, 3)), marks=pytest.mark.slow),
    ],
)
def test_a_static_tree_changes_no_token(
    case: str, tree: tuple[tuple[int, ...], ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tree decides how many candidates there are: the options for dynamic ones do not matter.

    Fault: a head that was trained for less context than the target has. Past it, decoding is plain.
    """
    tiny = CASES[case]
    if tiny.config is not None:
        tiny = replace(tiny, config=tiny.config | {"max_position_embeddings": SHORT})
    bundle = build_bundle(tiny, tmp_path, DraftOptions(tree=tree, depth=1, topk=1, nodes=1))
    engine = find_engine(bundle.manifest.engine)(bundle.path, threads=1)
    info = next(info for info in bundle.manifest.drafters if info.name == bundle.manifest.drafter)
    assert info.tree == tree
    check_tokens(bundle, engine)
    if tiny.config is not None:
        assert info.options["max_positions"] == SHORT < WINDOW
        assert f"past its context of {SHORT} tokens, decoding plainly" in caplog.text
    session = Session(bundle, engine=engine)
    session.generate([3, 1, 4, 1, 5], SamplingParams(max_tokens=4))
    drafter = session._decoder.drafter
    assert drafter is not None
    drafted = drafter.propose(DraftRequest(root=11, max_nodes=64, max_depth=9))
    assert len(drafted) == len(tree) + 1
    assert drafted.depths().max() == max(map(len, tree))
