"""Lookup drafters against brute force over the same text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from specexport.runtime.drafters import (
    DRAFTERS,
    NO_DRAFTER,
    Drafter,
    DraftRequest,
    Observation,
    make_drafter,
)
from specexport.runtime.drafters.ngram import NgramDrafter
from specexport.runtime.drafters.paths import best_paths
from specexport.runtime.drafters.recycling import RANK_PROBABILITY, RecyclingDrafter, top_k
from specexport.runtime.drafters.suffix import SuffixAutomaton, SuffixDrafter
from specexport.runtime.errors import UsageError
from specexport.runtime.tree import Tree

VOCAB = 40


def no_logits(node: int) -> NDArray[np.float32]:
    raise IndexError(node)


def feed(drafter: Drafter, tokens: Sequence[int], root: int) -> None:
    """Show emitted tokens as a plain step does."""
    drafter.observe(Observation(list(tokens), Tree.chain([root]), [0], no_logits))


def text(seed: int, length: int, vocab: int = VOCAB) -> list[int]:
    """Random tokens with copied stretches."""
    random_ = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < length:
        if len(tokens) > 10 and random_.random() < 0.4:
            start = random_.randrange(len(tokens) - 5)
            tokens += tokens[start : start + random_.randrange(2, 12)]
        else:
            tokens.append(random_.randrange(vocab))
    return tokens[:length]


def longest_repeat(tokens: Sequence[int]) -> int:
    """Length of the longest ending that also occurs earlier (overlap allowed)."""
    best = 0
    for end in range(1, len(tokens)):
        length = 0
        while length < end and tokens[end - 1 - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        best = max(best, length)
    return best


def is_continuation(tokens: Sequence[int], match: int, draft: Sequence[int]) -> bool:
    """Whether ``draft`` follows an earlier occurrence of the last ``match`` tokens, reading on into itself."""
    whole = [*tokens, *draft]
    ending = list(tokens[-match:])
    return any(
        list(tokens[end - match : end]) == ending and whole[end : end + len(draft)] == list(draft)
        for end in range(match, len(tokens))
    )


class TestSuffixAutomaton:
    @pytest.mark.parametrize("vocab", [1, 2, 3, 10, 200])
    def test_match_is_the_longest_earlier_occurrence(self, vocab: int) -> None:
        tokens = text(vocab, 160, vocab)
        automaton = SuffixAutomaton(len(tokens))
        for count, token in enumerate(tokens, 1):
            automaton.append(token)
            seen = tokens[:count]
            length, after = automaton.match()
            assert length == longest_repeat(seen)
            if length:
                assert length <= after < count
                assert seen[after - length : after] == seen[-length:]

    def test_linear_number_of_edge_visits(self) -> None:
        """Doubling a worst-case text doubles the work, counted in hash look-ups."""

        class Counting(SuffixAutomaton):
            finds = 0

            def _find(self, state: int, token: int) -> int:
                self.finds += 1
                return super()._find(state, token)

        def work(count: int) -> int:
            automaton = Counting(count)
            for index in range(count):
                automaton.append(1 if index < count // 2 else 2)
            return automaton.finds

        assert work(2000) < 2.2 * work(1000)
        assert work(2000) < 8 * 2000

    def test_full_capacity_of_any_text_fits(self) -> None:
        for vocab in (1, 2, 5, 1000):
            tokens = text(vocab, 500, vocab)
            automaton = SuffixAutomaton(500)
            for token in tokens:
                automaton.append(token)
        worst = SuffixAutomaton(500)  # a b b b ... b c: the most states and edges
        for token in [1, *[2] * 498, 3]:
            worst.append(token)
        assert len(worst.tokens) == 500


@pytest.mark.parametrize("name", sorted(DRAFTERS))
class TestEveryDrafter:
    def make(self, name: str, **options: object) -> Drafter:
        drafter = make_drafter(name, VOCAB, **options)
        assert drafter is not None and drafter.name == name
        return drafter

    def warm(self, name: str, tokens: list[int]) -> Drafter:
        drafter = self.make(name)
        drafter.begin(tokens[:-1], tokens[-1])
        return drafter

    def test_limits_hold(self, name: str) -> None:
        tokens = text(1, 300)
        drafter = self.warm(name, tokens)
        for nodes in (1, 2, 3, 8, 64):
            for depth in (0, 1, 2, 5, 100):
                tree = drafter.propose(DraftRequest(tokens[-1], nodes, depth))
                assert 1 <= len(tree) <= nodes and tree.depths().max() <= depth
                assert tree.tokens[0] == tokens[-1] and tree.parents[0] == -1

    def test_propose_changes_nothing(self, name: str) -> None:
        tokens = text(2, 300)
        drafter = self.warm(name, tokens)
        request = DraftRequest(tokens[-1], 16, 16)
        first = drafter.propose(request)
        drafter.propose(DraftRequest(tokens[-1], 3, 1))
        again = drafter.propose(request)
        assert first.tokens.tolist() == again.tokens.tolist() and first.parents.tolist() == again.parents.tolist()

    def test_nothing_known_is_the_root_alone(self, name: str) -> None:
        drafter = self.make(name)
        drafter.begin([1, 2, 3], 4)
        assert len(drafter.propose(DraftRequest(4, 8, 8))) == 1

    def test_ids_past_the_valid_vocabulary_are_never_proposed(self, name: str) -> None:
        tokens = [VOCAB + 1 if token % 5 == 0 else token for token in text(4, 400)]
        drafter = self.make(name)
        for length in range(300, 400):
            drafter.begin(tokens[:length], tokens[length])
            tree = drafter.propose(DraftRequest(tokens[length], 16, 16))
            assert (tree.tokens[1:] < VOCAB).all()

    def test_a_new_prompt_after_another_still_proposes(self, name: str) -> None:
        drafter = self.warm(name, text(5, 300))
        prompt = [30, 31, 32, 33, 34] * 3
        drafter.begin(prompt, 30)
        assert drafter.propose(DraftRequest(30, 4, 4)).tokens.tolist()[:2] == [30, 31]


def test_prompt_text_is_forgotten_by_the_next_prompt() -> None:
    for name in ("ngram", "suffix"):
        drafter = make_drafter(name, VOCAB)
        assert drafter is not None
        drafter.begin([1, 2, 3, 4, 5, 6], 7)
        drafter.begin([9, 8, 1, 2], 3)
        assert len(drafter.propose(DraftRequest(3, 8, 8))) == 1


class TestChains:
    """ngram and suffix: what is proposed really followed the ending, at every point of a text."""

    @pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])
    @pytest.mark.parametrize("seed", range(3))
    def test_draft_is_a_true_continuation(self, make: Callable[[int], Drafter], seed: int) -> None:
        tokens = text(seed, 250)
        drafter = make(VOCAB)
        drafter.begin(tokens[:20], tokens[20])
        proposed = 0
        for count in range(21, 250):
            draft = drafter.propose(DraftRequest(tokens[count - 1], 8, 8)).tokens.tolist()[1:]
            repeat = longest_repeat(tokens[:count])
            assert bool(draft) == (repeat >= (2 if make is NgramDrafter else 1))
            if draft:
                matched = min(repeat, 4) if make is NgramDrafter else repeat
                assert is_continuation(tokens[:count], matched, draft)
                proposed += 1
            feed(drafter, [tokens[count]], tokens[count - 1])
        assert proposed > 50

    @pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])
    def test_incremental_equals_from_scratch(self, make: Callable[[int], Drafter]) -> None:
        tokens = text(3, 400)
        one, other = make(VOCAB), make(VOCAB)
        other.begin(tokens[:99], tokens[99])
        for end in range(103, 401, 3):
            feed(other, tokens[end - 3 : end], tokens[end - 4])
            one.begin(tokens[: end - 1], tokens[end - 1])
            request = DraftRequest(tokens[end - 1], 16, 16)
            drafts = [drafter.propose(request).tokens.tolist() for drafter in (one, other)]
            # The suffix drafter's lengths depend on what it has learnt, its copy does not.
            shorter = min(map(len, drafts)) if make is SuffixDrafter else None
            assert drafts[0][:shorter] == drafts[1][:shorter]
            assert (len(drafts[0]) > 1) == (len(drafts[1]) > 1)

    @pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])
    def test_a_loop_goes_on_for_as_long_as_asked(self, make: Callable[[int], Drafter]) -> None:
        drafter = make(VOCAB)
        drafter.begin([1, 2, 3] * 9, 1)
        draft = drafter.propose(DraftRequest(1, 9, 9)).tokens.tolist()
        assert draft == [1, 2, 3, 1, 2, 3, 1, 2, 3]

    @pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])
    def test_the_latest_version_is_copied(self, make: Callable[[int], Drafter]) -> None:
        drafter = make(VOCAB)
        drafter.begin([1, 2, 3, 10, 9, 1, 2, 3, 20, 8, 1, 2], 3)
        assert drafter.propose(DraftRequest(3, 2, 2)).tokens.tolist() == [3, 20]

    def test_longer_match_longer_draft(self) -> None:
        drafter = SuffixDrafter(VOCAB)
        body = list(range(30))
        sizes = []
        for match in (1, 3, 12):
            drafter.begin([*body, 35, *body[:match][:-1]], body[match - 1])
            tree = drafter.propose(DraftRequest(body[match - 1], 64, 64))
            sizes.append(len(tree) - 1)
            assert tree.scores[0] == 0 and (np.diff(tree.scores) < 0).all()
            assert tree.scores[-1] >= np.log(0.12)
        assert 0 < sizes[0] < sizes[1] < sizes[2]

    def test_the_draft_grows_where_copies_are_right_and_shrinks_where_they_are_wrong(self) -> None:
        def size(drafter: SuffixDrafter) -> int:
            drafter.begin([*range(30), 35, 0], 1)
            return len(drafter.propose(DraftRequest(1, 64, 64))) - 1

        fresh, trusting, burnt = (SuffixDrafter(VOCAB) for _ in range(3))
        for _ in range(20):
            trusting.begin([*range(30), 35, 0], 1)
            feed(trusting, [2, 3, 4, 5], 1)
            burnt.begin([*range(30), 35, 0], 1)
            feed(burnt, [20], 1)
        assert size(burnt) < size(fresh) < size(trusting)

    def test_chances_stay_bounded(self) -> None:
        drafter = SuffixDrafter(VOCAB)
        drafter.begin([1], 1)
        for _ in range(3000):
            feed(drafter, [1], 1)
        assert max(drafter._tried) <= 128
        assert all(0 < right <= tried for right, tried in zip(drafter._right, drafter._tried, strict=True))

    @pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])
    def test_memory_is_bounded_and_the_newest_half_survives(self, make: Callable[..., Drafter]) -> None:
        drafter = make(VOCAB, capacity=64)
        drafter.begin(text(7, 50), 3)
        root = 3
        for block in range(200):
            emitted = [token % VOCAB for token in range(block * 3, block * 3 + 3)]
            feed(drafter, emitted, root)
            root = emitted[-1]
            held = drafter._tokens if isinstance(drafter, NgramDrafter) else drafter._automaton.tokens  # type: ignore[attr-defined]
            assert len(held) <= 64
            assert held[-3:].tolist() == emitted
        # A period of 40 with a memory of 32 to 64: found once the last rebuild is a period ago.
        assert any(
            self._step(drafter, (200 * 3 + offset) % VOCAB, (200 * 3 + offset - 1) % VOCAB) for offset in range(64)
        )

    @staticmethod
    def _step(drafter: Drafter, token: int, root: int) -> bool:
        draft = drafter.propose(DraftRequest(root, 4, 4)).tokens.tolist()
        feed(drafter, [token], root)
        return bool(draft[1:2] == [token])

    @pytest.mark.parametrize("make", [NgramDrafter, SuffixDrafter])
    def test_a_prompt_longer_than_the_memory(self, make: Callable[..., Drafter]) -> None:
        drafter = make(VOCAB, capacity=32)
        drafter.begin([*text(8, 500), 1, 2, 3, 4, 1], 2)
        assert drafter.propose(DraftRequest(2, 3, 3)).tokens.tolist() == [2, 3, 4]
        feed(drafter, text(9, 100), 2)
        assert len(drafter.propose(DraftRequest(text(9, 100)[-1], 4, 4))) <= 4


class TestRecycling:
    @pytest.mark.parametrize("size", [8, 63, 512, 513, 1000, 5000, 8191])
    @pytest.mark.parametrize("k", [1, 3, 8])
    def test_top_k_is_exact(self, size: int, k: int) -> None:
        row = np.random.default_rng(size).standard_normal(size).astype(np.float32)
        assert top_k(row, k).tolist() == np.argsort(-row, kind="stable")[:k].tolist()

    @pytest.mark.parametrize("place", [0, 4991, 4992, 4999])
    def test_top_k_sees_the_tail(self, place: int) -> None:
        row = np.zeros(5000, np.float32)
        row[place] = 1
        assert top_k(row, 1).tolist() == [place]

    def test_static_tree_is_closed_ordered_and_optimal(self) -> None:
        nodes = best_paths(24, 6, lambda _, rank: RANK_PROBABILITY[rank], len(RANK_PROBABILITY))
        assert len(nodes) == len(set(nodes)) == 24
        paths: list[tuple[int, ...]] = [()]
        chance = [1.0]
        for number, (parent, rank, depth) in enumerate(nodes, 1):
            assert parent < number and depth == len(paths[parent]) + 1 <= 6
            paths.append((*paths[parent], rank))
            chance.append(chance[parent] * RANK_PROBABILITY[rank])
        assert chance == sorted(chance, reverse=True)
        # No path outside is more likely than the last one inside.
        inside = set(paths)
        for path, likely in zip(paths, chance, strict=True):
            for rank, share in enumerate(RANK_PROBABILITY):
                if len(path) < 6 and (*path, rank) not in inside:
                    assert likely * share <= chance[-1]

    def test_learns_from_the_accepted_path_and_fills_ranks(self) -> None:
        drafter = RecyclingDrafter(VOCAB, k=3, nodes=6, max_depth=2)
        drafter.begin([1], 2)
        logits = np.zeros((2, VOCAB), np.float32)
        logits[0, [11, 12, 13]] = 3, 2, 1
        logits[1, [21, 22, 23]] = 3, 2, 1
        drafter.observe(Observation([11, 21], Tree.chain([2, 11]), [0, 1], logits.__getitem__))
        tree = drafter.propose(DraftRequest(2, 32, 8))
        children = {tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))}
        assert {(2,), (2, 11), (2, 12), (2, 11, 21), (2, 11, 22)} <= children
        best = tree.scores[tree.tokens.tolist().index(11)]
        assert tree.scores[0] == 0 and best == tree.scores[1:].max() == np.float32(np.log(RANK_PROBABILITY[0]))
        assert not any(path[:2] == (2, 12) and len(path) > 2 for path in children)  # 12 has no known successor

    def test_budget_is_spent_on_the_end_of_the_path_first(self) -> None:
        read: list[int] = []

        def logits(node: int) -> NDArray[np.float32]:
            read.append(node)
            return np.arange(VOCAB, dtype=np.float32)

        drafter = RecyclingDrafter(VOCAB, learn=3)
        drafter.begin([1], 2)
        tree = Tree(np.array([2, 3, 4, 5, 6, 7]), np.array([-1, 0, 0, 2, 3, 3]))
        drafter.observe(Observation([4, 5, 9], tree, [0, 2, 3], logits))
        assert read == [3, 2, 0]
        read.clear()
        drafter.observe(Observation([9], tree, [0], logits))
        assert read == [0, 1, 2]

    def test_missing_logits_are_skipped(self) -> None:
        drafter = RecyclingDrafter(VOCAB)
        drafter.begin([1], 2)
        feed(drafter, [3], 2)
        assert drafter.propose(DraftRequest(2, 8, 8)).tokens.tolist() == [2]

    def test_padded_vocabulary_is_not_learnt(self) -> None:
        drafter = RecyclingDrafter(VOCAB, k=2)
        drafter.begin([1], 2)
        row = np.arange(VOCAB + 24, dtype=np.float32)
        drafter.observe(Observation([3], Tree.chain([2]), [0], lambda node: row))
        assert drafter.propose(DraftRequest(2, 3, 1)).tokens.tolist() == [2, VOCAB - 1, VOCAB - 2]

    def test_a_learnt_row_outlives_the_prompt(self) -> None:
        drafter = RecyclingDrafter(VOCAB)
        drafter.begin([1], 2)
        row = np.arange(VOCAB, dtype=np.float32)
        drafter.observe(Observation([3], Tree.chain([2]), [0], lambda node: row))
        drafter.begin([2, 5], 2)  # the bigram 2 5 does not replace what the target said
        assert drafter.propose(DraftRequest(2, 2, 1)).tokens.tolist() == [2, VOCAB - 1]


class TestRegistry:
    def test_none_is_plain(self) -> None:
        assert make_drafter(NO_DRAFTER, VOCAB) is None

    def test_unknown_name_lists_the_known(self) -> None:
        with pytest.raises(UsageError, match=r"'eagle9'.*none, ngram, suffix, recycling"):
            make_drafter("eagle9", VOCAB)

    def test_unknown_option_is_named(self) -> None:
        with pytest.raises(UsageError, match="depth"):
            make_drafter("ngram", VOCAB, depth=3)

    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("ngram", {"min_ngram": 5}),
            ("ngram", {"max_draft": 0}),
            ("suffix", {"min_probability": 1}),
            ("suffix", {"capacity": 1}),
            ("recycling", {"k": 9}),
            ("recycling", {"nodes": 0}),
        ],
    )
    def test_impossible_options(self, name: str, options: dict[str, int]) -> None:
        with pytest.raises(UsageError, match=f"{name} drafter: expected"):
            make_drafter(name, VOCAB, **options)
