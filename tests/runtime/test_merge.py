"""Joining drafts: agreement, order, and the limits."""

from __future__ import annotations

import random

import numpy as np
import pytest

from specexport.runtime.merge import Draft, join
from specexport.runtime.tree import Tree


def draft(tokens: list[int], parents: list[int], chances: list[float]) -> Draft:
    return Draft(Tree(np.array(tokens), np.array(parents)), chances)


def paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = []
    for node, token in enumerate(tokens):
        found.append((token,) if node == 0 else (*found[parents[node]], token))
    return found


def test_shared_prefixes_are_one_and_the_surer_drafter_counts() -> None:
    copied = draft([7, 1, 2, 3], [-1, 0, 1, 2], [1.0, 0.5, 0.4, 0.3])
    head = draft([7, 1, 5, 2], [-1, 0, 0, 1], [1.0, 0.6, 0.3, 0.2])
    joined = join([copied, head], 7, 9)
    assert paths(joined.tokens, joined.parents) == [(7,), (7, 1), (7, 1, 2), (7, 1, 2, 3), (7, 5)]
    assert joined.chances == [1.0, 0.6, 0.4, 0.3, 0.3]
    tree = joined.tree(3)
    assert tree.tokens.tolist() == [7, 1, 2] and tree.parents.tolist() == [-1, 0, 1]
    assert np.exp(tree.scores) == pytest.approx([1.0, 0.6, 0.4])


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
    best: dict[tuple[int, ...], float] = {}
    for one in drafts:
        for path, chance in zip(paths(one.tree.tokens.tolist(), one.tree.parents.tolist()), one.chances, strict=True):
            best[path] = max(best.get(path, 0.0), chance)
    joined = join(drafts, 7, 99)
    found = dict(zip(paths(joined.tokens, joined.parents), joined.chances, strict=True))
    assert found == {path: chance for path, chance in best.items() if chance > 0}
    assert joined.chances == sorted(joined.chances, reverse=True)
    assert all(parent < node for node, parent in enumerate(joined.parents))


def test_the_trunk_is_the_surest_path() -> None:
    joined = join([draft([7, 1, 2, 3, 4], [-1, 0, 0, 2, 1], [1.0, 0.4, 0.5, 0.2, 0.3])], 7, 9).trunk()
    assert (joined.tokens, joined.parents, joined.chances) == ([7, 2, 3], [-1, 0, 1], [1.0, 0.5, 0.2])
