"""Rejection rules with real draws: chi-square tests of many, and the rule as the decode loop calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from specexport.runtime.acceptance import match
from specexport.runtime.rejection import (
    Chance,
    Row,
    Uniforms,
    reject_chain,
    reject_siblings,
    rejection,
    verify_block,
)
from specexport.runtime.sampling import Sampler, SamplingParams
from specexport.runtime.tree import Tree
from tests.runtime.enumeration import pair

ChainRule = Callable[[Sequence[Row], Sequence[Row], Sequence[int], Chance], tuple[int, int]]


def chi_square(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Whether counts are within 5 sigma of what they should be; cells that expect little are pooled."""
    order = np.argsort(expected)
    small = order[expected[order].cumsum() < 20]
    kept = np.setdiff1d(order, small)
    observed = np.append(counts[kept], counts[small].sum())
    wanted = np.append(expected[kept], expected[small].sum())
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    degrees = len(wanted) - 1
    return bool(((observed - wanted) ** 2 / wanted).sum() < degrees + 5 * (2 * degrees) ** 0.5)


class TestDrawn:
    DRAWS = 100_000

    @pytest.mark.parametrize("rule", [reject_chain, verify_block])
    def test_a_chain_at_eight_tokens(self, rule: ChainRule) -> None:
        """The first two emitted tokens; draws of the drafter and of the completion from a generator."""
        target, drafter = pair(8, 20)
        rng = np.random.default_rng(1)
        picks = rng.random((self.DRAWS, 3))
        mass = {prefix: np.cumsum(drafter.row(prefix)) for prefix in [(), *((token,) for token in range(8))]}
        counts = np.zeros((8, 8))
        for case in range(self.DRAWS):
            first = min(7, int(mass[()].searchsorted(picks[case, 0])))
            second = min(7, int(mass[(first,)].searchsorted(picks[case, 1])))
            p = [target.row(()), target.row((first,)), target.row((first, second))]
            taken, token = rule(p, [drafter.row(()), drafter.row((first,))], [first, second], Uniforms(3, case))
            emitted = [*(first, second)[:taken], token]
            if len(emitted) == 1:
                emitted.append(min(7, int(np.cumsum(target.row((token,))).searchsorted(picks[case, 2]))))
            counts[emitted[0], emitted[1]] += 1
        assert chi_square(counts.ravel(), self.DRAWS * target.joint(2).ravel())

    def test_siblings_at_eight_tokens(self) -> None:
        target, drafter = pair(8, 21)
        p, q = target.row(()), drafter.row(())
        noise = np.random.default_rng(4).gumbel(size=(self.DRAWS, 8)) + np.log(q)
        drawn = np.argsort(-noise, axis=1)[:, :3].tolist()
        emitted = [reject_siblings(p, q, drafted, Uniforms(6, case))[1] for case, drafted in enumerate(drawn)]
        assert chi_square(np.bincount(emitted, minlength=8), self.DRAWS * p)

    def test_a_coupled_tree_through_the_sampler(self) -> None:
        """Two children drawn with the target's own noise, judged by ``rejection``, at many positions of one seed."""
        rng = np.random.default_rng(2)
        logits, other = (rng.standard_normal((2, 8)) * 1.5).astype(np.float32)
        sampler = Sampler(SamplingParams(temperature=0.9, seed=5), 8)
        draft = Sampler(SamplingParams(temperature=0.9, seed=5), 8)
        p, q = sampler.probs(logits, 0), draft.probs(other, 0)
        tree_rows = [logits] * 3
        counts, taken = np.zeros(8), 0
        for position in range(self.DRAWS // 5):
            first = draft.pick(other, position + 1)
            without = other.copy()
            without[first] = -np.inf
            second = draft.pick(without, position + 1)
            tree = Tree(np.array([0, first, second]), np.array([-1, 0, 0]), draft_probs=lambda _: q)
            accepted = rejection(tree, tree_rows.__getitem__, sampler, position, limit=1)
            counts[accepted.tokens[0]] += 1
            taken += accepted.tokens[0] in (first, second)
        assert chi_square(counts, p * counts.sum())
        assert taken / counts.sum() > np.minimum(p, q).sum()

    def test_uniforms(self) -> None:
        source = Uniforms(9, 4)
        weights = np.array([0.0, 1.0, 0.0, 3.0, 0.0])
        counts = np.bincount([source.draw(weights) for _ in range(20_000)], minlength=5)
        assert counts[[0, 2, 4]].sum() == 0 and abs(counts[1] - 5000) < 5 * 61
        hits = sum(source.happens(0.3) for _ in range(20_000))
        assert abs(hits - 6000) < 5 * 65
        assert all(source.happens(1.0) for _ in range(1000)) and not any(source.happens(0.0) for _ in range(1000))


class TestRule:
    def tree(self, q: Row) -> Tree:
        return Tree(np.array([0, 1, 2, 3]), np.array([-1, 0, 0, 1]), draft_probs=lambda _: q)

    def test_the_seed_decides(self) -> None:
        rows = np.random.default_rng(3).standard_normal((4, 6)).astype(np.float32)
        q = np.full(6, 1 / 6)

        def run(seed: int) -> list[list[int]]:
            sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), 6)
            return [rejection(self.tree(q), rows.__getitem__, sampler, place).tokens for place in range(40)]

        assert run(1) == run(1) != run(2)

    def test_limit_stop_and_logprobs(self) -> None:
        """Where p and q are one token, all is accepted, and the walk ends as that of ``match``."""
        rows = np.full((4, 6), -np.inf, np.float32)
        rows[[0, 1, 3], [1, 3, 5]] = 0
        certain = {0: np.eye(6)[1], 1: np.eye(6)[3]}
        tree = Tree(np.array([0, 1, 3]), np.array([-1, 0, 1]), draft_probs=certain.__getitem__)
        chain_rows = rows[[0, 1, 3]]
        sampler = Sampler(SamplingParams(temperature=1.0, logprobs=1), 6)
        for options, tokens, stopped in (
            ({}, [1, 3, 5], False),
            ({"limit": 2}, [1, 3], False),
            ({"stop": lambda token: token == 1}, [1], True),
        ):
            got = rejection(tree, chain_rows.__getitem__, sampler, 0, **options)  # type: ignore[arg-type]
            assert (got.tokens, got.path, got.stopped) == (tokens, list(range(len(tokens))), stopped)
            assert got.logprobs == [(0.0, [(token, 0.0)]) for token in tokens]

    def test_greedy_is_match_and_needs_no_probabilities(self) -> None:
        rows = np.random.default_rng(4).standard_normal((4, 6)).astype(np.float32)
        best = rows.argmax(1)
        tree = Tree(np.array([0, best[0], 1]), np.array([-1, 0, 0]))
        sampler = Sampler(SamplingParams(), 6)
        assert rejection(tree, rows.__getitem__, sampler, 0) == match(tree, rows.__getitem__, sampler, 0)

    def test_a_tree_without_probabilities_is_refused(self) -> None:
        rows = np.zeros((2, 6), np.float32)
        sampler = Sampler(SamplingParams(temperature=1.0), 6)
        with pytest.raises(ValueError, match="draft_probs"):
            rejection(Tree.chain([0, 1]), rows.__getitem__, sampler, 0)
        drawn = Tree(np.array([0, 1, 2]), np.array([-1, 0, 0]), np.array([0, -1, -0.5], np.float32), self.tree)
        assert drawn.pruned(2).draft_probs is not None
        assert drawn.best(2, 2).draft_probs is None  # what is left was chosen by what was drawn
        assert len(rejection(Tree.chain([0]), rows.__getitem__, sampler, 0).tokens) == 1
