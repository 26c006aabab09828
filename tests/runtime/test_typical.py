"""Typical acceptance: Medusa's threshold and longest path, and that it is not lossless."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from specexport.runtime.acceptance import match
from specexport.runtime.rules import RULES
from specexport.runtime.sampling import Sampler, SamplingParams
from specexport.runtime.tree import Tree
from specexport.runtime.typical import ALPHA, EPS, threshold, typical
from tests.runtime.test_acceptance import random_tree

VOCAB = 7
PENALTIES = {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.5}


def test_the_threshold_is_medusas() -> None:
    assert (EPS, ALPHA) == (0.09, 0.3)
    assert threshold(np.array([1.0, 0, 0])) == 0.09  # sure: eps
    assert threshold(np.full(100, 0.01)) == pytest.approx(0.3 / 100)  # flat: alpha / V
    p = np.array([0.5, 0.25, 0.125, 0.125])
    assert threshold(p, 1, 0.5) == pytest.approx(0.5 * 2**-1.75)


def best_path(tree: Tree, rows: np.ndarray, params: SamplingParams, prompt: list[int]) -> list[int]:
    """Every path of the tree by itself, each with a sampler of its own."""

    def score(path: list[int]) -> tuple[int, float]:
        sampler = Sampler(params, VOCAB)
        sampler.begin(prompt)
        total = 0.0
        for node, child in pairwise(path):
            p, token = sampler.probs(rows[node], 0), int(tree.tokens[child])
            entropy = -sum(x * math.log(x) for x in p if x > 0)
            if not p[token] > min(0.09, 0.3 * math.exp(-entropy)):
                return 0, 0.0
            total += math.log(p[token])
            sampler.push(token)
        return len(path), total

    return max((tree.path(node) for node in range(len(tree))), key=score)


@pytest.mark.parametrize("options", [{}, PENALTIES, {"top_p": 0.8}, {"logit_bias": {2: -math.inf}}], ids=str)
def test_the_longest_plausible_path_wins(options: dict[str, Any]) -> None:
    longer = 0
    for seed in range(150):
        rng = np.random.default_rng(seed)
        tree = random_tree(rng, 1, rng.integers(0, VOCAB, 4).tolist())
        rows = (rng.standard_normal((len(tree), VOCAB)) * 1.5).astype(np.float32)
        params = SamplingParams(temperature=0.8, seed=seed, **options)
        sampler, twin = Sampler(params, VOCAB), Sampler(params, VOCAB)
        for each in (sampler, twin):
            each.begin([3, 1, 1])
        accepted = typical(tree, rows.__getitem__, sampler, 10)
        assert accepted.path == best_path(tree, rows, params, [3, 1, 1])
        drafted = [int(tree.tokens[node]) for node in accepted.path[1:]]
        assert accepted.tokens[:-1] == drafted
        # The bonus is the target's own draw after them, and the sampler remembers those tokens and no others.
        for token in drafted:
            twin.push(token)
        assert accepted.tokens[-1] == twin.pick(rows[accepted.path[-1]], 10 + len(accepted.path))
        twin.push(accepted.tokens[-1])
        assert (sampler.probs(rows[0], 0) == twin.probs(rows[0], 0)).all()
        longer += len(accepted.path) > 2
    assert longer > 30


def test_equal_paths_go_to_the_likelier_then_to_the_earlier() -> None:
    rows = np.log(np.array([[0.3, 0.4, 0.3]] * 5)).astype(np.float32)
    sampler = Sampler(SamplingParams(temperature=1.0), 3)
    fork = Tree(np.array([0, 0, 1]), np.array([-1, 0, 0]))
    assert typical(fork, rows.__getitem__, sampler, 0).path == [0, 2]
    tie = Tree(np.array([0, 2, 0]), np.array([-1, 0, 0]))
    assert typical(tie, rows.__getitem__, sampler, 0).path == [0, 1]
    deeper = Tree(np.array([0, 1, 2, 2]), np.array([-1, 0, 0, 2]))
    assert typical(deeper, rows.__getitem__, sampler, 0).path == [0, 2, 3]


def test_a_draft_at_the_threshold_is_refused() -> None:
    p = np.array([0.5, 0.25, 0.25])
    rows = np.log(p).astype(np.float32)[None]
    sampler = Sampler(SamplingParams(temperature=1.0), 3)
    exact = sampler.probs(rows[0], 0)[1]
    tree = Tree.chain([0, 1])
    both = [rows[0], rows[0]]
    assert typical(tree, both.__getitem__, sampler, 0, eps=float(exact), alpha=9).path == [0]
    assert typical(tree, both.__getitem__, sampler, 0, eps=float(exact) - 1e-9, alpha=9).path == [0, 1]


def test_it_is_lossy() -> None:
    """A plausible draft is emitted always, whatever its probability: the drafter shapes the output."""
    rows = np.log(np.array([[0.6, 0.25, 0.15]] * 2)).astype(np.float32)
    tree = Tree.chain([0, 1])
    counts: dict[str, np.ndarray] = {}
    for name in ("typical", "match"):
        counts[name] = np.zeros(3)
        for seed in range(400):
            sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), 3)
            counts[name][RULES[name].accept(tree, rows.__getitem__, sampler, 0, limit=2).tokens[0]] += 1
    assert counts["typical"].tolist() == [0, 400, 0]
    assert abs(counts["match"] / 400 - [0.6, 0.25, 0.15]).max() < 0.1
    assert [name for name, rule in RULES.items() if rule.lossy] == ["typical"]


def test_greedy_is_match() -> None:
    for seed in range(100):
        rng = np.random.default_rng(seed)
        rows = rng.standard_normal((14, VOCAB)).astype(np.float32)
        tree = random_tree(rng, 1, [int(row.argmax()) for row in rows[:3]])
        samplers = [Sampler(SamplingParams(**PENALTIES), VOCAB) for _ in range(2)]
        # A double of the right token makes two right paths: the same tokens, and the earlier one.
        results = [
            rule(tree, rows.__getitem__, sampler, 0).tokens
            for rule, sampler in zip((match, typical), samplers, strict=True)
        ]
        distinct = len(set(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True))) == len(tree)
        assert results[0] == results[1] or not distinct


def test_limit_stop_and_logprobs() -> None:
    rows = np.log(np.full((4, 5), 0.2)).astype(np.float32)
    tree = Tree.chain([0, 4, 3, 2])
    sampler = Sampler(SamplingParams(temperature=1.0, logprobs=0), 5)
    whole = typical(tree, rows.__getitem__, sampler, 0)
    assert whole.tokens[:3] == [4, 3, 2] and whole.path == [0, 1, 2, 3]
    assert whole.logprobs == [(pytest.approx(math.log(0.2)), [])] * 4
    for limit in (1, 2, 3, 4):
        cut = typical(tree, rows.__getitem__, sampler, 0, limit=limit)
        assert len(cut.tokens) == len(cut.path) == limit and cut.tokens[:3] == [4, 3, 2][:limit]
    stopped = typical(tree, rows.__getitem__, sampler, 0, stop=lambda token: token == 3)
    assert (stopped.tokens, stopped.path, stopped.stopped) == ([4, 3], [0, 1], True)
    with pytest.raises(ValueError, match="limit"):
        typical(tree, rows.__getitem__, sampler, 0, limit=0)
