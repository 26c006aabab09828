"""Sampling against a plain reference written from the module's docstring, and the properties that matter."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from specexport.runtime import gumbel
from specexport.runtime.errors import SpecExportError, UsageError
from specexport.runtime.ranking import winner
from specexport.runtime.sampling import _REACHES, Sampler, SamplingParams


def reference_kept(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int], valid: int, stops: set[int]
) -> tuple[list[tuple[int, float]], float]:
    """``(kept (id, d) pairs, distance of top_p's cut from the mass it depends on)``: loops, doubles, no pruning."""
    row = [float(x) for x in logits[:valid]]
    for token, bias in params.logit_bias.items():
        row[token] = float(np.float32(row[token] + bias))
    if params.repetition_penalty != 1:
        for token in set(prompt) | set(output):
            x = row[token]
            row[token] = float(np.float32(x / params.repetition_penalty if x > 0 else x * params.repetition_penalty))
    for token, count in Counter(output).items():
        row[token] = float(np.float32(row[token] - (params.presence_penalty + params.frequency_penalty * count)))
    if len(output) < params.min_tokens:
        for token in stops:
            row[token] = -math.inf
    top = max(row)
    if top == -math.inf:
        return [], 1.0
    if params.temperature == 0:
        return [(row.index(top), 0.0)], 1.0
    pairs = [(i, (x - top) / params.temperature) for i, x in enumerate(row) if x != -math.inf]
    pairs.sort(key=lambda pair: (-pair[1], pair[0]))
    if params.top_k:
        pairs = pairs[: params.top_k]
    margin = 1.0
    if params.top_p < 1:
        total = math.fsum(math.exp(d) for _, d in pairs)
        kept, mass = [], 0.0
        for pair in pairs:
            kept.append(pair)
            mass += math.exp(pair[1])
            margin = min(margin, abs(mass / total - params.top_p))
            if mass >= params.top_p * total:
                break
        pairs = kept
    if params.min_p > 0:
        pairs = [pair for pair in pairs if pair[1] >= math.log(params.min_p)]
    return pairs, margin


def reference_pick(
    logits: np.ndarray, params: SamplingParams, position: int, **history: Any
) -> tuple[int | None, float]:
    """``(token, margin)``; no token when everything is banned."""
    pairs, margin = reference_kept(logits, params, **history)
    if not pairs:
        return None, margin
    if params.temperature == 0:
        return pairs[0][0], margin
    noise = gumbel.gumbel(params.seed, position, np.array([token for token, _ in pairs]))
    scored = [(d + float(g), -token) for (token, d), g in zip(pairs, noise, strict=True)]
    return -max(scored)[1], margin


def random_params(rng: np.random.Generator, vocab: int) -> SamplingParams:
    def some(off: Any, *values: Any) -> Any:
        return off if rng.random() < 0.5 else values[rng.integers(len(values))]

    bias = {int(t): float(rng.choice([-100, -2, 1.5, 7, -math.inf])) for t in rng.integers(0, vocab - 1, 3)}
    return SamplingParams(
        temperature=some(0.8, 0.0, 0.0001, 0.3, 1.0, 1.7, 50.0),
        top_k=some(0, 1, 2, 5, 40, 10_000),
        top_p=some(1.0, 0.05, 0.5, 0.9, 0.99, 0.9999),
        min_p=some(0.0, 0.02, 0.3, 1.0, 1e-9),
        repetition_penalty=some(1.0, 1.3, 0.7),
        presence_penalty=some(0.0, 0.6, -0.4),
        frequency_penalty=some(0.0, 0.2, -1.0),
        logit_bias=some({}, bias),
        min_tokens=some(0, 3),
        seed=int(rng.integers(0, 2**63)),
    )


def random_row(rng: np.random.Generator, vocab: int) -> np.ndarray:
    kind = rng.integers(6)
    row = rng.standard_normal(vocab) * rng.choice([0.01, 1, 3, 30])
    if kind == 0:  # ties everywhere
        row = np.round(row)
    elif kind == 1:  # a peak
        row[rng.integers(vocab)] += 40
    elif kind == 2:  # most of it masked
        row[rng.random(vocab) < 0.9] = -np.inf
        row[0] = 1
    elif kind == 3:  # masked the other way
        row[rng.random(vocab) < 0.5] = np.finfo(np.float32).min
    elif kind == 4:  # flat
        row[:] = 2.5
    return row.astype(np.float32)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_agrees_with_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    compared = 0
    for _ in range(400):
        vocab = int(rng.choice([2, 9, 50, 400, 1500]))
        valid = max(2, vocab - int(rng.integers(0, 3)))
        params = random_params(rng, valid)
        stops = {int(t) for t in rng.integers(1, valid, 2)}
        sampler = Sampler(params, vocab, valid, stops)
        prompt = [int(t) for t in rng.integers(0, valid, 5)]
        output = [int(t) for t in rng.integers(0, valid, rng.integers(0, 7))]
        sampler.begin(prompt)
        for token in output:
            sampler.push(token)
        row = random_row(rng, vocab)
        before = row.copy()
        position = int(rng.integers(0, 100_000))
        history = {"prompt": prompt, "output": output, "valid": valid, "stops": stops}
        expected, margin = reference_pick(row, params, position, **history)
        if expected is None:
            for ask in (sampler.pick, sampler.probs):
                with pytest.raises(SpecExportError, match=f"position {position}"):
                    ask(row, position)
            continue
        if margin < 1e-12:  # top_p's cut hangs on the last bit of a sum
            continue
        compared += 1
        assert sampler.pick(row, position) == expected, (params, vocab, position)
        assert sampler.pick(row, position) == expected
        kept, _ = reference_kept(row, params, **history)
        chances = np.zeros(vocab)
        chances[[token for token, _ in kept]] = np.exp([d for _, d in kept])
        np.testing.assert_allclose(sampler.probs(row, position), chances / chances.sum(), rtol=1e-12, atol=1e-300)
        np.testing.assert_array_equal(row, before)
    assert compared > 250


@pytest.mark.parametrize("seed", range(20))
def test_what_is_popped_was_never_pushed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    params = SamplingParams(
        temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, min_tokens=4
    )
    vocab = int(rng.choice([6, 300]))
    row = rng.standard_normal(vocab).astype(np.float32)
    sampler = Sampler(params, vocab, stop_ids=[2])
    prompt = rng.integers(0, vocab, 5).tolist()
    sampler.begin(prompt)
    history: list[int] = []
    for _ in range(400):
        if history and rng.random() < 0.45:
            sampler.pop(history.pop())
        else:
            history.append(int(rng.integers(0, vocab)))
            sampler.push(history[-1])
        if rng.random() < 0.1:
            fresh = Sampler(params, vocab, stop_ids=[2])
            fresh.begin(prompt)
            for token in history:
                fresh.push(token)
            np.testing.assert_array_equal(sampler.probs(row, 0), fresh.probs(row, 0))


@pytest.mark.parametrize("scale", [0.5, 2.0, 6.0])
@pytest.mark.parametrize(
    "options",
    [{}, {"top_p": 0.5}, {"top_p": 0.9}, {"top_p": 0.999}, {"top_k": 50}, {"top_k": 50, "top_p": 0.9}, {"min_p": 1e-5}],
    ids=str,
)
def test_pruning_is_exact_on_wide_rows(options: dict[str, Any], scale: float) -> None:
    """At widths where tiers, tail estimates and noise thresholds are at work, nothing is lost."""
    rng = np.random.default_rng(3)
    vocab = 20_000
    row = (rng.standard_normal(vocab) * scale).astype(np.float32)
    row[rng.integers(0, vocab, 20)] = row.max()  # ties at the top, and a gap
    row[rng.integers(0, vocab, 3)] += 8
    params = SamplingParams(temperature=1.0, seed=11, **options)
    pairs, margin = reference_kept(row, params, [], [], vocab, set())
    assert margin > 1e-12
    ids, d = np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])
    sampler = Sampler(params, vocab)
    far = 0
    for position in range(150):
        expected = int(ids[np.argmax(d + gumbel.gumbel(11, position, ids))])
        assert sampler.pick(row, position) == expected
        far += row[expected] < row.max() - 8
    if not options and scale > 1:
        assert far, "no draw came from below the near tier: the far path was not tested"


@pytest.mark.parametrize(
    ("options", "draws"),
    [
        ({"temperature": 1.0}, 100_000),
        ({"temperature": 0.7, "top_p": 0.8}, 20_000),
        ({"temperature": 1.5, "top_k": 4}, 20_000),
        ({"temperature": 1.0, "min_p": 0.1}, 20_000),
    ],
    ids=str,
)
def test_draws_follow_the_distribution(options: dict[str, Any], draws: int) -> None:
    row = np.array([1.0, 0.2, -0.5, 2.0, 1.9, -3.0, 0.0, 0.7], np.float32)
    params = SamplingParams(seed=2024, **options)
    sampler = Sampler(params, 8)
    counts = np.bincount([sampler.pick(row, position) for position in range(draws)], minlength=8)
    pairs, _ = reference_kept(row, params, [], [], 8, set())
    probability = np.zeros(8)
    for token, d in pairs:
        probability[token] = math.exp(d)
    probability /= probability.sum()
    kept = probability > 0
    assert counts[~kept].sum() == 0
    expected = probability[kept] * draws
    chi_square = float(((counts[kept] - expected) ** 2 / expected).sum())
    freedom = int(kept.sum()) - 1
    assert chi_square < freedom + 4.5 * math.sqrt(2 * freedom)


def test_top_p_cuts_where_doubles_say() -> None:
    """top_p a hair above or below the mass of the first j tokens, closer than any float32 sum can tell."""
    rng = np.random.default_rng(8)
    for _ in range(12):
        row = (rng.standard_normal(5000) * 3).astype(np.float32)
        d = np.sort(row.astype(np.float64) - float(row.max()))[::-1]
        mass = np.cumsum(np.exp(d))
        edges = [int((d >= -reach).sum()) for reach in _REACHES[:-1]]
        for kept in (*edges, 2, 17, 400):
            if kept == len(d) or d[kept] < -17:
                continue  # so deep that a hair is more than a token
            for side, expected in ((-1e-9, kept), (1e-9, kept + 1)):
                top_p = float(mass[kept - 1] / mass[-1]) * (1 + side)
                sampler = Sampler(SamplingParams(temperature=1.0, top_p=top_p), 5000)
                ids, found = sampler._nucleus(row, float(row.max()))
                assert len(ids) == expected
                assert found.min() == d[expected - 1]


def test_top_p_stops_as_soon_as_the_mass_is_reached() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=0.5, seed=6), 4)
    assert {sampler.pick(np.zeros(4, np.float32), position) for position in range(200)} == {0, 1}


def test_equal_scores_go_to_the_lowest_id() -> None:
    assert winner(np.array([5, 2, 9]), np.array([1.5, 1.5, 0.0])) == (1.5, 2)


def test_history_decides_and_nothing_else() -> None:
    rng = np.random.default_rng(5)
    rows = (rng.standard_normal((20, 100)) * 2).astype(np.float32)
    params = SamplingParams(temperature=0.9, top_p=0.95, repetition_penalty=1.2, frequency_penalty=0.5, seed=4)
    busy, quiet = Sampler(params, 100), Sampler(params, 100)
    for sampler in (busy, quiet):
        sampler.begin([1, 2, 3])
    for position in range(20):
        for other in rng.integers(0, 20, 3):  # picks that are thrown away leave no trace
            busy.pick(rows[other], int(other) + 1000)
        token = busy.pick(rows[position], position)
        assert token == quiet.pick(rows[position], position)
        busy.push(token)
        quiet.push(token)
    busy.begin([1, 2, 3])
    fresh = Sampler(params, 100)
    fresh.begin([1, 2, 3])
    assert [busy.pick(row, 7) for row in rows] == [fresh.pick(row, 7) for row in rows]


def test_greedy_ties_take_the_lowest_id_and_padding_is_never_picked() -> None:
    row = np.array([0, 5, 5, 5, 99, 100], np.float32)
    assert Sampler(SamplingParams(), 6, 4).pick(row, 0) == 1
    sampled = Sampler(SamplingParams(temperature=50.0, seed=1), 6, 4)
    assert {sampled.pick(row, position) for position in range(300)} == {0, 1, 2, 3}
    nucleus = Sampler(SamplingParams(temperature=50.0, top_p=0.99, seed=1), 6, 4)
    assert {nucleus.pick(row, position) for position in range(300)} == {0, 1, 2, 3}


def test_penalties_follow_the_path() -> None:
    row = np.array([3.0, 2.9, -1.0, 0.5], np.float32)
    sampler = Sampler(SamplingParams(repetition_penalty=1.5), 4)
    sampler.begin([0])
    assert sampler.pick(row, 0) == 1  # the prompt counts
    sampler = Sampler(SamplingParams(frequency_penalty=0.15), 4)
    sampler.begin([0, 0, 0])
    picks = []
    for position in range(5):
        picks.append(sampler.pick(row, position))
        sampler.push(picks[-1])
    assert picks == [0, 1, 0, 1, 0]  # the prompt does not; each output token does


def test_min_tokens_holds_the_stops_back() -> None:
    row = np.array([0.0, 9.0, 8.0, 1.0], np.float32)
    sampler = Sampler(SamplingParams(min_tokens=2), 4, stop_ids=[1, 2])
    sampler.begin([])
    picks = []
    for position in range(4):
        picks.append(sampler.pick(row, position))
        sampler.push(picks[-1])
    assert picks == [3, 3, 1, 1]


def test_logit_bias_forces_and_bans() -> None:
    row = np.zeros(5, np.float32)
    assert Sampler(SamplingParams(logit_bias={3: 100.0}), 5).pick(row, 0) == 3
    banned = Sampler(SamplingParams(temperature=1.0, logit_bias={0: -math.inf, 1: -math.inf}), 5)
    assert {banned.pick(row, position) for position in range(200)} == {2, 3, 4}


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_rows_are_refused(value: float, temperature: float) -> None:
    row = np.zeros(10, np.float32)
    row[4] = value
    with pytest.raises(SpecExportError, match="position 3"):
        Sampler(SamplingParams(temperature=temperature), 10).pick(row, 3)
    with pytest.raises(SpecExportError, match="-inf"):
        Sampler(SamplingParams(temperature=temperature), 10).pick(np.full(10, -np.inf, np.float32), 3)
    with pytest.raises(ValueError, match="float32"):
        Sampler(SamplingParams(), 10).pick(np.zeros(10), 0)  # type: ignore[arg-type]


def test_logprobs_are_the_models_own() -> None:
    row = np.array([1.0, 3.0, 3.0, -2.0, 50.0], np.float32)
    sampler = Sampler(SamplingParams(temperature=0.2, logit_bias={0: 9.0}, logprobs=3), 5, 4)
    total = math.log(math.exp(1) + 2 * math.exp(3) + math.exp(-2))
    chosen, top = sampler.logprobs_of(row, 3)
    assert chosen == pytest.approx(-2 - total)
    assert [token for token, _ in top] == [1, 2, 0]
    assert [value for _, value in top] == pytest.approx([3 - total, 3 - total, 1 - total])
    assert Sampler(SamplingParams(logprobs=0), 5, 4).logprobs_of(row, 1) == (pytest.approx(3 - total), [])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1}, ["temperature", "-1"]),
        ({"temperature": 1e-9}, ["temperature", "0.0001"]),
        ({"temperature": math.nan}, ["temperature", "nan"]),
        ({"temperature": True}, ["temperature", "True"]),
        ({"top_k": -1}, ["top_k", "-1"]),
        ({"top_k": 1.5}, ["top_k", "1.5"]),
        ({"top_p": 0.0}, ["top_p", "0.0"]),
        ({"top_p": 1.1}, ["top_p", "1.1"]),
        ({"min_p": 2}, ["min_p", "2"]),
        ({"repetition_penalty": 0}, ["repetition_penalty", "0"]),
        ({"presence_penalty": 3}, ["presence_penalty", "-2 to 2"]),
        ({"frequency_penalty": -3}, ["frequency_penalty", "-3"]),
        ({"seed": 2**64}, ["seed", "2**64 - 1"]),
        ({"seed": -1}, ["seed"]),
        ({"logprobs": -1}, ["logprobs", "-1"]),
        ({"max_tokens": 0}, ["max_tokens", "0"]),
        ({"min_tokens": 9, "max_tokens": 8}, ["min_tokens", "9", "8"]),
        ({"logit_bias": {-1: 0.0}}, ["logit_bias", "-1"]),
        ({"logit_bias": {1: math.nan}}, ["logit_bias", "nan"]),
        ({"logit_bias": [1]}, ["logit_bias", "mapping"]),
    ],
    ids=str,
)
def test_bad_parameters_name_value_and_range(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        SamplingParams(**options)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_ids_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(UsageError, match=r"logit_bias.*7.*6 tokens"):
        Sampler(SamplingParams(logit_bias={7: 1.0}), 8, 6)
    with pytest.raises(UsageError, match=r"stop_ids.*6"):
        Sampler(SamplingParams(), 8, 6, [6])
    with pytest.raises(UsageError, match="valid_vocab"):
        Sampler(SamplingParams(), 8, 9)


def test_params_cannot_change_under_the_sampler() -> None:
    bias = {1: 2.0}
    params = SamplingParams(logit_bias=bias)
    bias[1] = -5.0
    assert params.logit_bias == {1: 2.0}
    assert hash(params) == hash(SamplingParams(logit_bias={1: 2.0}))
