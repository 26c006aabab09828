"""Picking from a row's best tokens: never another token than from the whole row, and the row is seldom needed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specexport.runtime.errors import SpecExportError
from specexport.runtime.sampling import Sampler, SamplingParams
from specexport.runtime.summary import LazyRow, pick

V, VALID, K = 60, 50, 12


def lazy(row: NDArray[np.float32], k: int = K) -> tuple[LazyRow, list[int]]:
    """As a device would give it: a NaN as +inf, padding left out, equal values in any order; and what was fetched."""
    seen = np.where(np.isnan(row[:VALID]), np.float32(np.inf), row[:VALID])
    best = np.lexsort((-np.arange(VALID), -seen))[:k]  # ties to the higher id, unlike anyone's
    fetched: list[int] = []

    def fetch() -> NDArray[np.float32]:
        fetched.append(1)
        return row

    return LazyRow(best.astype(np.int64), seen[best], VALID, fetch), fetched


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    levels=st.sampled_from([3, 12, 1000]),
    params=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.1, 1.0, 3.0]),
            "top_k": st.sampled_from([0, 1, 5, K - 1, K, K + 5]),
            "top_p": st.sampled_from([1.0, 0.9, 0.3]),
            "min_p": st.sampled_from([0.0, 0.2]),
            "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3]),
        }
    ),
)
def test_the_same_token_as_from_the_row(seed: int, levels: int, params: dict[str, Any]) -> None:
    rng = np.random.default_rng(seed)
    row = (rng.integers(0, levels, V) * (12 / levels)).astype(np.float32)  # few levels make ties
    row[VALID:] = 100
    sampler = Sampler(SamplingParams(seed=seed, **params), V, VALID)
    sampler.begin([1, 2, 3])
    for position in range(4):
        assert sampler.pick(lazy(row)[0], position) == sampler.pick(row, position)


@pytest.mark.parametrize(
    ("params", "k", "fetches"),
    [
        ({}, K, 0),
        ({"temperature": 1.0, "top_k": 5, "top_p": 0.9}, K, 0),
        ({"temperature": 1.0, "top_k": K}, K, 1),  # another may be as good as the last
        ({"temperature": 1.0, "min_p": 0.3}, K, 0),
        ({"temperature": 0.02}, K, 0),
        ({"temperature": 1.0}, K, 1),
        ({"temperature": 1.0}, VALID, 0),
        ({"temperature": 1.0, "top_p": 0.5}, K, 1),
        ({"frequency_penalty": 0.5}, K, 1),
        ({"logit_bias": {3: 1.0}}, K, 1),
    ],
)
def test_when_the_row_is_needed(params: dict[str, Any], k: int, fetches: int) -> None:
    row = np.linspace(0, 10, V).astype(np.float32)
    shown, fetched = lazy(row, k)
    sampler = Sampler(SamplingParams(**params), V, VALID)
    assert sampler.pick(shown, 7) == sampler.pick(row, 7)
    assert len(fetched) == fetches
    sampler.logprobs_of(shown, 3)
    sampler.probs(shown, 7)
    assert len(fetched) == 1  # kept


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_fails_as_in_a_row(bad: float) -> None:
    row = np.linspace(0, 10, V).astype(np.float32)
    row[20] = bad
    sampler = Sampler(SamplingParams(), V, VALID)
    with pytest.raises(SpecExportError, match="no token can be picked at position 3"):
        sampler.pick(lazy(row)[0], 3)


def test_ties_beyond_the_last_shown_are_left_to_the_row() -> None:
    row = np.zeros(V, np.float32)
    assert pick(lazy(row)[0], SamplingParams(), 0) is None
    assert Sampler(SamplingParams(), V, VALID).pick(lazy(row)[0], 0) == 0
    row[[40, 41]] = 1
    assert pick(lazy(row)[0], SamplingParams(), 0) == 40


def test_another_vocabulary_is_not_trusted() -> None:
    row = np.linspace(0, 10, V).astype(np.float32)
    assert Sampler(SamplingParams(), V).pick(lazy(row)[0], 0) == V - 1
