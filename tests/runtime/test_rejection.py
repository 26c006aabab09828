"""Rejection rules: the output distribution, enumerated and drawn, and the faults that would bias it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from specexport.runtime import rejection as rules
from specexport.runtime.acceptance import match
from specexport.runtime.rejection import (
    Chance,
    Row,
    Uniforms,
    reject_chain,
    reject_siblings,
    reject_tree,
    rejection,
    residual,
    verify_block,
)
from specexport.runtime.sampling import Sampler, SamplingParams
from specexport.runtime.tree import Tree
from tests.runtime.enumeration import Fork, RandomLM, drawn_tree, outcomes, output, pair, path_tokens, shapes

ChainRule = Callable[[Sequence[Row], Sequence[Row], Sequence[int], Chance], tuple[int, int]]
EXACT = 1e-12


def chain_step(
    rule: ChainRule,
    target: RandomLM,
    drafter: RandomLM,
    length: int,
    p_of: Callable[[tuple[int, ...]], Row] | None = None,
    q_of: Callable[[tuple[int, ...]], Row] | None = None,
) -> Callable[[Fork], list[int]]:
    """Draft a chain, judge it: the emitted tokens. ``p_of``, ``q_of``: what the rule is told, right unless given."""

    def step(fork: Fork) -> list[int]:
        drafted: list[int] = []
        for _ in range(length):
            drafted.append(fork.draw(drafter.row(drafted)))
        prefixes = [tuple(drafted[:place]) for place in range(length + 1)]
        p = [(p_of or target.row)(prefix) for prefix in prefixes]
        q = [(q_of or drafter.row)(prefix) for prefix in prefixes[:-1]]
        taken, token = rule(p, q, drafted, fork)
        return [*drafted[:taken], token]

    return step


def bias(target: RandomLM, step: Callable[[Fork], list[int]], length: int) -> float:
    """Greatest error of any sequence's probability."""
    found = output(target, length, outcomes(step))
    assert found.sum() == pytest.approx(1, abs=EXACT)
    return float(np.abs(found - target.joint(length)).max())


class TestEnumerated:
    @pytest.mark.parametrize("rule", [reject_chain, verify_block])
    @pytest.mark.parametrize(("vocab", "length"), [(2, 1), (2, 2), (2, 3), (3, 3), (4, 3), (5, 1), (5, 2), (5, 3)])
    @pytest.mark.parametrize("sharp", [0.2, 1.0])
    def test_chains(self, rule: ChainRule, vocab: int, length: int, sharp: float) -> None:
        for seed in range(1 if vocab**length > 60 else 8):
            target, drafter = pair(vocab, seed, sharp)
            assert bias(target, chain_step(rule, target, drafter, length), length + 1) < EXACT

    @pytest.mark.parametrize("nodes", [1, 2, 3, 4])
    def test_every_small_tree(self, nodes: int) -> None:
        """All shapes of depth 3 at most, at the vocabularies whose nodes have enough tokens to draw."""
        for parents in shapes(nodes, 3):
            widest = max(Counter(parents).values())
            for vocab in range(max(2, widest), 6 if nodes < 4 else 5):
                target, drafter = pair(vocab, nodes + vocab)
                assert bias(target, tree_step(parents, target, drafter), 4) < EXACT, (parents, vocab)

    @pytest.mark.parametrize("parents", [[-1, 0, 1, 0, 0, 3], [-1, 0, 0, 0, 1, 4]])
    def test_wide_trees_at_five_tokens(self, parents: list[int]) -> None:
        target, drafter = pair(5, 3, 0.5)
        assert bias(target, tree_step(parents, target, drafter), 4) < EXACT

    def test_all_tokens_drafted_accepts_surely(self) -> None:
        target, drafter = pair(4, 5)
        step = tree_step([-1, 0, 0, 0, 0], target, drafter)
        assert bias(target, step, 2) < EXACT
        assert all(len(tokens) == 2 for tokens, _ in outcomes(step))

    def test_a_chain_is_a_tree(self) -> None:
        """Same decisions in the same order, so the same result from the same uniforms."""
        rng = np.random.default_rng(0)
        for case in range(300):
            p, q = rng.dirichlet(np.ones(6), 4), rng.dirichlet(np.ones(6), 3)
            drafted = [int(rng.choice(6, p=row)) for row in q]
            taken, token = reject_chain(p, q, drafted, Uniforms(1, case))
            tree = Tree.chain([0, *drafted])
            path, other = reject_tree(tree, p.__getitem__, q.__getitem__, Uniforms(1, case))
            assert (path, other) == (list(range(taken + 1)), token)

    def test_acceptance_of_a_chain_is_the_overlap(self) -> None:
        target, drafter = pair(5, 6)
        alpha = np.minimum(target.row(()), drafter.row(())).sum()
        taken = sum(chance for tokens, chance in outcomes(chain_step(reject_chain, target, drafter, 1)) if tokens[1:])
        assert taken == pytest.approx(alpha, abs=EXACT)

    def test_a_block_takes_at_least_as_much_as_a_chain(self) -> None:
        gains = []
        for vocab, length, seeds in ((2, 2, 12), (2, 3, 12), (3, 2, 12), (3, 3, 6), (5, 2, 3)):
            for seed in range(seeds):
                target, drafter = pair(vocab, seed, 0.6)
                expected = [
                    sum(chance * len(tokens) for tokens, chance in outcomes(chain_step(rule, target, drafter, length)))
                    for rule in (reject_chain, verify_block)
                ]
                gains.append(expected[1] - expected[0])
        assert min(gains) > -EXACT and np.mean(np.array(gains) > 1e-3) > 0.5

    def test_equal_distributions_take_all(self) -> None:
        target = RandomLM(4, 1)
        for rule in (reject_chain, verify_block):
            assert all(len(tokens) == 4 for tokens, _ in outcomes(chain_step(rule, target, target, 3)))

    def test_match_emits_the_targets_own_draws(self) -> None:
        """The same proof for the default rule, with a sampler that enumerates its picks."""

        class Enumerating(Sampler):
            def __init__(self, fork: Fork, vocab: int) -> None:
                super().__init__(SamplingParams(temperature=1.0), vocab)
                self.fork = fork

            def pick(self, logits: np.ndarray, position: int) -> int:
                return self.fork.draw(logits)

        for nodes in (1, 2, 3, 4):
            for parents in shapes(nodes, 3):
                target, drafter = pair(4, nodes)

                def step(
                    fork: Fork,
                    parents: list[int] = parents,
                    target: RandomLM = target,
                    drafter: RandomLM = drafter,
                ) -> list[int]:
                    tree = drawn_tree(parents, drafter, Fork([]))
                    rows = [target.row(path_tokens(tree, node)) for node in range(len(tree))]
                    return match(tree, rows.__getitem__, Enumerating(fork, 4), 0).tokens  # type: ignore[arg-type]

                assert bias(target, step, 4) < EXACT


def tree_step(parents: list[int], target: RandomLM, drafter: RandomLM) -> Callable[[Fork], list[int]]:
    def step(fork: Fork) -> list[int]:
        tree = drawn_tree(parents, drafter, fork)
        assert tree.draft_probs is not None
        path, token = reject_tree(tree, lambda node: target.row(path_tokens(tree, node)), tree.draft_probs, fork)
        return [*path_tokens(tree, path[-1]), token]

    return step


class TestFaults:
    """What must not go unnoticed: the enumeration sees each by far more than its tolerance."""

    @pytest.mark.parametrize("rule", [reject_chain, verify_block])
    def test_low_precision_q(self, rule: ChainRule) -> None:
        target, drafter = pair(4, 7)

        def rough(prefix: tuple[int, ...]) -> Row:
            row = drafter.row(prefix).astype(np.float16).astype(np.float64)
            return np.asarray(row / row.sum())

        assert bias(target, chain_step(rule, target, drafter, 2, q_of=rough), 3) > 1e-6
        for dtype in (np.float16, np.float32):
            with pytest.raises(ValueError, match=r"q must be float64 \[4\] chances that sum to 1.*got float"):
                rule([target.row(())] * 2, [drafter.row(()).astype(dtype)], [0], Fork([]))
        half = drafter.row(()).astype(np.float16).astype(np.float64)
        with pytest.raises(ValueError, match=r"with sum (1\.000|0\.999)"):
            rule([target.row(())] * 2, [half], [0], Fork([]))

    @pytest.mark.parametrize("rule", [reject_chain, verify_block])
    def test_wrong_rows(self, rule: ChainRule) -> None:
        """p or q of a neighbouring place."""
        target, drafter = pair(4, 8)
        late = chain_step(rule, target, drafter, 2, p_of=lambda prefix: target.row(prefix[:-1]))
        early = chain_step(rule, target, drafter, 2, q_of=lambda prefix: drafter.row((*prefix, 0)))
        assert bias(target, late, 3) > 1e-2 and bias(target, early, 3) > 1e-2

    def test_wrong_residual(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A refused draft must be replaced from max(0, p - q), neither from p nor from the wrong side."""
        target, drafter = pair(4, 9)
        for wrong in (lambda p, q: p, lambda p, q: residual(q, p)):
            monkeypatch.setattr(rules, "residual", wrong)
            assert bias(target, chain_step(reject_chain, target, drafter, 2), 3) > 1e-2
            assert bias(target, tree_step([-1, 0, 0, 1], target, drafter), 3) > 1e-2

    def test_siblings_drawn_with_replacement_or_q_not_renormalised(self) -> None:
        target, drafter = pair(4, 10)
        p, q = target.row(()), drafter.row(())

        def replaced(fork: Fork) -> list[int]:
            return [reject_siblings(p, q, [fork.draw(q), fork.draw(q)], fork)[1]]

        def unscaled(fork: Fork) -> list[int]:
            first = fork.draw(q)
            rest = np.where(np.arange(4) == first, 0, q)
            second, left = fork.draw(rest), p
            for token, weights in ((first, q), (second, rest)):
                if fork.happens(left[token] / weights[token]):
                    return [token]
                left = residual(left, weights)
            return [fork.draw(left)]

        with pytest.raises(ValueError, match="was not drawn from q"):
            bias(target, replaced, 1)
        assert bias(target, unscaled, 1) > 1e-3

    def test_ranking_is_not_sampling(self) -> None:
        """The best token of q, judged as if it had been drawn."""
        target, drafter = pair(4, 11)
        p, q = target.row(()), drafter.row(())
        assert bias(target, lambda fork: [reject_siblings(p, q, [int(q.argmax())], fork)[1]], 1) > 1e-2

    def test_noise_by_position_serves_a_chain_and_not_a_block(self) -> None:
        """Drafts that are drawn again after a refusal: a block's refusal has looked at them, a chain's has not."""
        target = RandomLM(3, 13, 0.5)
        q = np.random.default_rng(13).dirichlet(np.ones(3), 5)

        def steps(rule: ChainRule) -> Callable[[Fork], list[int]]:
            def step(fork: Fork) -> list[int]:
                drafts = [fork.draw(row) for row in q]  # one draw per position, whatever comes before it
                tokens: list[int] = []
                while len(tokens) < 3:
                    first = len(tokens)
                    drafted = drafts[first : first + 2]
                    p = [target.row((*tokens, *drafted[:place])) for place in range(3)]
                    taken, token = rule(p, q[first : first + 2], drafted, fork)
                    tokens += [*drafted[:taken], token]
                return tokens[:3]

            return step

        assert bias(target, steps(reject_chain), 3) < EXACT
        assert bias(target, steps(verify_block), 3) > 1e-4

    def test_processors_skipped(self) -> None:
        """Penalties must see the path of each node: a sampler that forgets what it emits gives other chances."""
        params = SamplingParams(temperature=1.0, repetition_penalty=1.7, presence_penalty=0.5, top_k=3)
        rows = np.log(np.random.default_rng(0).dirichlet(np.ones(4), 3)).astype(np.float32)
        q = np.full(4, 0.25)

        class Forgetful(Sampler):
            def push(self, token: int) -> None:
                pass

        def emitted(kind: type[Sampler]) -> Row:
            """[V, V]: what two steps of a chain of one draft emit."""
            found = np.zeros((4, 4))
            with pytest.MonkeyPatch.context() as patch:

                def step(fork: Fork) -> tuple[int, int]:
                    patch.setattr(rules, "Uniforms", lambda *_: fork)
                    sampler = kind(params, 4)
                    sampler.begin([2])
                    tree = Tree(np.array([2, fork.draw(q)]), np.array([-1, 0]), draft_probs=lambda _: q)
                    tokens = rejection(tree, rows.__getitem__, sampler, 5).tokens
                    if len(tokens) == 1:
                        tokens.append(fork.draw(sampler.probs(rows[1], 7)))
                    return tokens[0], tokens[1]

                for place, chance in outcomes(step):
                    found[place] += chance
            return found

        expected = np.zeros((4, 4))
        for first in range(4):
            sampler = Sampler(params, 4)
            sampler.begin([2])
            chance = sampler.probs(rows[0], 6)[first]
            sampler.push(first)
            expected[first] = chance * sampler.probs(rows[1], 7)
        assert np.abs(emitted(Sampler) - expected).max() < EXACT
        assert np.abs(emitted(Forgetful) - expected).max() > 1e-2
