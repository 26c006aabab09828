"""Joining drafts: agreement, order, and the limits."""

from __future__ import annotations

import random

import numpy as np
import pytest

from specexport.runtime.merge import AGAINST, Draft, join
from specexport.runtime.tree import Tree


def draft(tokens: list[int], parents: list[int], chances: list[float]) -> Draft:
    return Draft(Tree(np.array(tokens), np.array(parents)), chances)


def paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for node, token in enumerate(tokens):
        found.append((token,) if node == 0 else (*found[parents[node]], token))
    return found


def test_shared_prefixes_are_one_and_agreement_makes_them_surer() -> None:
    copied = draft([7, 1, 2, 3], [-1, 0, 1, 2], [1.0, 0.5, 0.4, 0.3])
    head = draft([7, 1, 5, 2], [-1, 0, 0, 1], [1.0, 0.6, 0.3, 0.2])
    joined = join([copied, head], 7, 9)
    assert paths(joined.tokens, joined.parents) == [(7,), (7, 1), (7, 1, 2), (7, 1, 2, 3), (7, 5)]
    first = 1 - 0.5 * 0.4
    second = first * (1 - 0.2 * (1 - 0.2 / 0.6))
    doubted = 0.3 * (1 - AGAINST * 0.5) / (1 - AGAINST * 0.5 * 0.3)
    assert joined.chances == pytest.approx([1.0, first, second, 0.75 * second, doubted])
    tree = joined.tree(3)
    assert tree.tokens.tolist() == [7, 1, 2] and tree.parents.tolist() == [-1, 0, 1]
    assert np.exp(tree.scores) == pytest.approx([1.0, first, second])


def test_drafters_that_disagree_are_both_believed_less() -> None:
    one, other = draft([7, 1], [-1, 0], [1.0, 0.9]), draft([7, 2], [-1, 0], [1.0, 0.9])
    joined = join([one, other], 7, 9)
    assert joined.tokens == [7, 1, 2] and joined.chances[1] == joined.chances[2] < 0.85
    assert join([one, draft([7, 2, 3], [-1, 0, 1], [1.0, 1.0, 1.0])], 7, 9).chances[1:3] == [1.0, 1.0]
    assert join([one, draft([7], [-1], [1.0])], 7, 9).chances == [1.0, 0.9]  # who says nothing speaks against nothing


def test_depth_and_chances_limit_it() -> None:
    copied = draft([7, 1, 2, 3], [-1, 0, 1, 2], [1.0, 0.5, 0.4, 0.3])
    assert join([copied], 7, 2).tokens == [7, 1, 2]
    assert join([draft([7, 1, 2], [-1, 0, 1], [1.0, 0.0, 0.0])], 7, 9).tokens == [7]
    assert join([], 7, 9).tree(4).tokens.tolist() == [7]


@pytest.mark.parametrize("seed", range(50))
def test_every_prefix_is_the_best_tree_of_its_size(seed: int) -> None:
    rng = random.Random(seed)
    drafts = []
    for _ in range(rng.randint(1, 4)):
        tokens, parents, chances = [7], [-1], [1.0]
        for node in range(1, rng.randint(2, 12)):
            above = rng.randrange(node)
            tokens.append(rng.randrange(3))
            parents.append(above)
            chances.append(chances[above] * rng.choice([1.0, 0.5, 0.25, rng.random()]))
        drafts.append(draft(tokens, parents, chances))
    possible = {
        path
        for one in drafts
        for path, chance in zip(paths(one.tree.tokens.tolist(), one.tree.parents.tolist()), one.chances, strict=True)
        if chance > 0
    }
    joined = join(drafts, 7, 99)
    found = paths(joined.tokens, joined.parents)
    assert set(found) == possible and len(found) == len(possible)
    assert min(joined.chances) >= 0.0 and max(joined.chances) == 1.0
    assert joined.chances == sorted(joined.chances, reverse=True)
    assert all(parent < node for node, parent in enumerate(joined.parents))


def test_the_trunk_is_the_surest_path() -> None:
    joined = join([draft([7, 1, 2, 3, 4], [-1, 0, 0, 2, 1], [1.0, 0.4, 0.5, 0.2, 0.3])], 7, 9).trunk()
    assert (joined.tokens, joined.parents, joined.chances) == ([7, 2, 3], [-1, 0, 1], [1.0, 0.5, 0.2])
