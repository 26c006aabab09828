"""Lossless: whatever the trees, the emitted sequence is that of plain sampling."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specexport.runtime.acceptance import match
from specexport.runtime.sampling import Sampler, SamplingParams
from specexport.runtime.tree import Tree

VOCAB = 7


class ToyLM:
    """Logits of the next token as a hash of the whole history: any confusion of paths shows."""

    def __init__(self, seed: int, scale: float) -> None:
        self.seed, self.scale = seed, scale

    def row(self, history: Sequence[int]) -> np.ndarray:
        key = zlib.crc32(bytes(history), self.seed)
        rng = np.random.default_rng(key)
        return (rng.standard_normal(VOCAB) * self.scale).astype(np.float32)


def plain(model: ToyLM, prompt: list[int], params: SamplingParams, stops: set[int], count: int) -> list[int]:
    sampler = Sampler(params, VOCAB, stop_ids=stops)
    sampler.begin(prompt)
    history = list(prompt)
    for _ in range(count):
        token = sampler.pick(model.row(history), len(history))
        sampler.push(token)
        history.append(token)
        if token in stops:
            break
    return history[len(prompt) :]


def speculative(
    model: ToyLM, prompt: list[int], params: SamplingParams, stops: set[int], count: int, draft: np.random.Generator
) -> tuple[list[int], int]:
    """``(output, target calls)`` with random trees, some of which hold the plain continuation."""
    sampler = Sampler(params, VOCAB, stop_ids=stops)
    sampler.begin(prompt)
    history = list(prompt)
    root = sampler.pick(model.row(history), len(history))
    sampler.push(root)
    history.append(root)
    steps = 1
    future = plain(model, prompt, params, stops, count)
    while len(history) - len(prompt) < count and history[-1] not in stops:
        tree = random_tree(draft, history[-1], future[len(history) - len(prompt) :])
        asked: list[int] = []

        def row_of(
            node: int, tree: Tree = tree, asked: list[int] = asked, before: tuple[int, ...] = tuple(history[:-1])
        ) -> np.ndarray:
            asked.append(node)
            return model.row([*before, *(int(tree.tokens[n]) for n in tree.path(node))])

        accepted = match(
            tree,
            row_of,
            sampler,
            len(history) - 1,
            limit=count - (len(history) - len(prompt)),
            stop=lambda token: token in stops,
        )
        assert accepted.path == asked == tree.path(accepted.path[-1])
        assert len(accepted.tokens) == len(accepted.path)
        assert accepted.tokens[:-1] == [int(tree.tokens[n]) for n in accepted.path[1:]]
        assert accepted.stopped == (accepted.tokens[-1] in stops)
        history += accepted.tokens
        steps += 1
    return history[len(prompt) :], steps


def random_tree(rng: np.random.Generator, root: int, future: list[int]) -> Tree:
    size = int(rng.integers(1, 14))
    tokens, parents = [root], [-1]
    good, depth = 0, 0  # the node on the true path, and how deep it is
    for node in range(1, size):
        if rng.random() < 0.4 and depth < len(future):
            parent, token = good, future[depth]
            good, depth = node, depth + 1
        else:
            parent, token = int(rng.integers(0, node)), int(rng.integers(0, VOCAB))
        tokens.append(token)
        parents.append(parent)
    return Tree(np.array(tokens), np.array(parents))


OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 2, 5]),
        "top_p": st.sampled_from([1.0, 0.9, 0.5]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "presence_penalty": st.sampled_from([0.0, 0.7]),
        "frequency_penalty": st.sampled_from([0.0, 0.4]),
        "logit_bias": st.sampled_from([{}, {3: 1.0}, {0: -100.0}]),
        "seed": st.integers(0, 2**64 - 1),
        "min_tokens": st.sampled_from([0, 5]),
    }
)


@settings(max_examples=300, deadline=None)
@given(
    options=OPTIONS,
    model_seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([0.3, 2.0]),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
    stops=st.sets(st.integers(0, VOCAB - 1), max_size=2),
    draft_seed=st.integers(0, 2**32 - 1),
)
def test_speculation_never_changes_the_output(
    options: dict[str, Any], model_seed: int, scale: float, prompt: list[int], stops: set[int], draft_seed: int
) -> None:
    model, params = ToyLM(model_seed, scale), SamplingParams(**options)
    expected = plain(model, prompt, params, stops, 24)
    output, _ = speculative(model, prompt, params, stops, 24, np.random.default_rng(draft_seed))
    assert output == expected


def test_good_drafts_are_accepted() -> None:
    model, params = ToyLM(1, 2.0), SamplingParams(temperature=1.0, seed=3)
    output, steps = speculative(model, [1, 2], params, set(), 200, np.random.default_rng(0))
    assert output == plain(model, [1, 2], params, set(), 200)
    assert steps < 100  # the trees of this test hold about 2 true tokens each


def test_acceptance_probability_is_the_mass_of_the_children() -> None:
    """Over seeds, the walk leaves the root with probability sum p(child), and the output follows p."""
    row = np.array([1.0, 0.3, -0.4, 0.8, 0.0, -1.0, 0.5], np.float32)
    tree = Tree(np.array([0, 3, 5, 0]), np.array([-1, 0, 0, 0]))
    p = np.exp(row.astype(np.float64))
    p /= p.sum()
    draws, went_on, counts = 20_000, 0, np.zeros(VOCAB)
    for seed in range(draws):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), VOCAB)
        accepted = match(tree, lambda node: row, sampler, 10)
        went_on += len(accepted.path) > 1
        counts[accepted.tokens[0]] += 1
    chance = p[[3, 5, 0]].sum()
    assert abs(went_on - draws * chance) < 4 * (draws * chance * (1 - chance)) ** 0.5
    assert float(((counts - draws * p) ** 2 / (draws * p)).sum()) < 6 + 4.5 * 12**0.5


def rows_that_pick(*tokens: int) -> np.ndarray:
    rows = np.zeros((len(tokens), VOCAB), np.float32)
    rows[np.arange(len(tokens)), tokens] = 1
    return rows


def test_limit_stop_and_duplicate_siblings() -> None:
    tree = Tree(np.array([0, 4, 4, 5, 6]), np.array([-1, 0, 0, 1, 3]))
    rows = rows_that_pick(4, 5, 0, 6, 2)
    greedy = SamplingParams()
    full = match(tree, rows.__getitem__, Sampler(greedy, VOCAB), 0)
    assert (full.path, full.tokens, full.logprobs, full.stopped) == ([0, 1, 3, 4], [4, 5, 6, 2], None, False)
    cut = match(tree, rows.__getitem__, Sampler(greedy, VOCAB), 0, limit=2)
    assert (cut.path, cut.tokens, cut.stopped) == ([0, 1], [4, 5], False)
    seen: list[int] = []

    def stop(token: int) -> bool:
        seen.append(token)
        return token == 5

    stopped = match(tree, rows.__getitem__, Sampler(greedy, VOCAB), 0, limit=4, stop=stop)
    assert (stopped.path, stopped.tokens, stopped.stopped) == ([0, 1], [4, 5], True)
    assert seen == [4, 5]
    with pytest.raises(ValueError, match="limit"):
        match(tree, rows.__getitem__, Sampler(greedy, VOCAB), 0, limit=0)


def test_logprobs_come_with_every_token() -> None:
    rows = rows_that_pick(4, 5)
    sampler = Sampler(SamplingParams(logprobs=2), VOCAB)
    accepted = match(Tree.chain([0, 4]), rows.__getitem__, sampler, 0)
    assert accepted.tokens == [4, 5]
    assert accepted.logprobs == [sampler.logprobs_of(rows[0], 4), sampler.logprobs_of(rows[1], 5)]
    assert accepted.logprobs is not None and len(accepted.logprobs[0][1]) == 2
