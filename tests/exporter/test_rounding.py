"""Fault 13: text differs by the width of a call. In half precision a token may differ only where rounding tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specexport.exporter import verify
from specexport.exporter.pipeline import BuildOptions, build
from specexport.exporter.progress import Progress
from specexport.exporter.quantize.choice import PrecisionOptions
from specexport.exporter.rounding import turned_tokens
from specexport.runtime import Bundle, SamplingParams
from specexport.runtime.engine import Step, find_engine
from tests.e2e.test_heads import CASES, WINDOW, write_words
from tests.exporter.heads.writers import TARGET_CONFIG, Random, llama_tensors
from tests.tiny import write_checkpoint

#: Enough of them that some token is nearly a tie.
PROMPTS = [[(7 * number + 3 * place * place + place) % 40 for place in range(8)] for number in range(8)]
BOUND = verify.LIMITS["fp16"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundle]:
    """A half-precision bundle that drafts with a head."""
    folder = tmp_path_factory.mktemp("half")
    target = write_checkpoint(folder / "target", TARGET_CONFIG, llama_tensors(Random(1)))
    write_words(target)
    heads = CASES["mtp_deepseek"].write(folder / "heads")
    options = BuildOptions(
        source=str(target),
        output=folder / "bundle",
        window=WINDOW,
        heads=(str(heads),),
        drafters=("none",),
        precision=PrecisionOptions(precision="fp16", activations="fp16"),
    )
    yield build(options, Progress(quiet=True)).bundle


class Rounded:
    """An engine whose logits depend on the width of the call, by at most ``size`` of the largest."""

    def __init__(self, engine: Any, size: float) -> None:
        self._engine, self._size = engine, size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def run(self, step: Step) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self._engine.run(step).copy()
        rng = np.random.default_rng(len(step.tokens))
        error = rng.uniform(-self._size, self._size, logits.shape[1]) * np.abs(logits).max(axis=1, keepdims=True)
        return (logits + error).astype(np.float32)


def checks(bundle: Bundle, size: float, monkeypatch: pytest.MonkeyPatch) -> list[verify.Check]:
    engine = Rounded(find_engine(bundle.manifest.engine)(bundle.path, threads=1), size)
    short = {name: replace(params, max_tokens=24) for name, params in verify.SETTINGS.items() if "top_p" not in name}
    monkeypatch.setattr(verify, "SETTINGS", short)
    return list(verify._tokens(bundle, engine, PROMPTS, lambda _: None))  # type: ignore[arg-type]


def test_fault_13_a_differing_token_is_a_tie_within_rounding(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bundle.manifest.target.precision.activations == "fp16" and bundle.manifest.drafter == "mtp"
    assert all(check.passed for check in checks(bundle, 0.0, monkeypatch))
    rounded = checks(bundle, BOUND / 4, monkeypatch)
    assert all(check.passed for check in rounded), rounded
    told = [check for check in rounded if check.remark]
    assert told, "no draft was turned: the rule was not put to the test"
    assert all("differs within rounding: prompt" in str(check.to_dict()["note"]) for check in told)


def test_fault_13_a_larger_difference_fails(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not all(check.passed for check in checks(bundle, 20 * BOUND, monkeypatch))
    target = bundle.manifest.target
    exact = replace(target.precision, weights="fp32", lm_head="fp32", activations="fp32")
    full = replace(bundle, manifest=replace(bundle.manifest, target=replace(target, precision=exact)))
    assert not all(check.passed for check in checks(full, BOUND / 4, monkeypatch))  # fp32 is exact or wrong


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=1.0, seed=5)])
def test_the_gap_of_a_turned_token(params: SamplingParams) -> None:
    """The second best, 0.03 below, is excused by a bound of 0.02 of the largest logit 2, and not by one of 0.01."""
    row = np.array([[0.0, 2.0, 1.97, -1.0]], np.float32)
    if params.temperature:  # the noise of this position, taken out
        from specexport.runtime.gumbel import gumbel

        row = (row - gumbel(params.seed, 1, np.arange(4))[None]).astype(np.float32)
    size = max(1.0, float(np.abs(row).max()))
    assert turned_tokens(row, [0], [1], params, 0.02, valid_vocab=4) == []
    for bound, excused in ((0.04 / size, True), (0.02 / size, False)):
        (token,) = turned_tokens(row, [0], [2], params, bound, valid_vocab=4)
        assert token.excused == excused and token.index == 0
        assert token.gap * size == pytest.approx(0.03, abs=2e-4)
