"""The noise that a graph drafts with is the target's: same seed, position and token, times the temperature."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specexport.runtime import gumbel
from specexport.runtime.contract import NOISE
from specexport.runtime.drafters.noise import DraftNoise
from specexport.runtime.sampling import Sampler, SamplingParams

IDS = np.array([3, 0, 17, 90_000, 5])
DEPTH = 4
PARAMS = SamplingParams(temperature=0.7, seed=11)


def rows(first: int, params: SamplingParams = PARAMS) -> NDArray[np.float32]:
    noise = [gumbel.gumbel(params.seed, first + depth, IDS) for depth in range(DEPTH)]
    return (params.temperature * np.array(noise)).astype(np.float32)


def test_positions_that_were_known_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = DraftNoise(IDS, DEPTH)
    noise.begin(PARAMS)
    computed: list[int] = []
    key = gumbel.position_key
    monkeypatch.setattr(gumbel, "position_key", lambda seed, position: computed.append(position) or key(seed, position))
    for first, fresh in ((9, 4), (9, 0), (10, 1), (13, 3), (17, 4), (40, 4), (39, 4), (38, 4)):
        computed.clear()
        given = noise.inputs(first)[NOISE].copy()
        count = len(computed)
        assert np.array_equal(given, rows(first))
        assert count == fresh, first
    noise.begin(SamplingParams(temperature=1.3, seed=12))  # the same position, another key
    assert np.array_equal(noise.inputs(38)[NOISE], rows(38, SamplingParams(temperature=1.3, seed=12)))


@pytest.mark.parametrize("params", [None, SamplingParams(seed=11)])
def test_without_sampling_there_is_none(params: SamplingParams | None) -> None:
    noise = DraftNoise(IDS, DEPTH)
    assert not noise.inputs(3)[NOISE].any()
    noise.begin(PARAMS)
    assert noise.inputs(3)[NOISE].all()
    noise.begin(params)
    given = noise.inputs(3)[NOISE]
    assert given.dtype == np.float32 and given.shape == (DEPTH, len(IDS)) and not given.any()


def test_the_best_noisy_logit_is_what_the_target_picks() -> None:
    """Logits and noise of all tokens, added: their argmax is the sampler's token, at every position."""
    logits = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    noise, sampler = DraftNoise(np.arange(50), DEPTH), Sampler(PARAMS, 50)
    noise.begin(PARAMS)
    picked: list[Any] = [sampler.pick(logits, position) for position in range(7, 7 + DEPTH)]
    assert (logits + noise.inputs(7)[NOISE]).argmax(1).tolist() == picked and len(set(picked)) > 1
