"""Padding to the sizes of profiles, as bookkeeping: which row of a cache holds what after a call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from specexport.engines.static_width import StaticWidths, Step, Width
from specexport.runtime.cache import CacheRows
from specexport.runtime.errors import BundleError, UsageError
from specexport.runtime.tree import Tree

SLOTS, ACCEPTED = 64, 7
WIDTHS = [Width(index, nodes, ACCEPTED, rows) for index, (nodes, rows) in enumerate([(8, 8), (1, 1), (3, 3), (24, 1)])]


def widths() -> StaticWidths:
    return StaticWidths(WIDTHS, SLOTS, "target.plan")


def blank(width: Width) -> dict[str, NDArray[Any]]:
    """Inputs of a profile, full of what no call may leave there."""
    nodes = width.nodes
    shapes = {
        "tokens": (1, nodes),
        "positions": (1, nodes),
        "past": (1,),
        "write": (1,),
        "commit": (width.accepted,),
        "order": (width.accepted + nodes,),
        "select": (width.rows,),
    }
    filled = {name: np.full(shape, -99, np.int64) for name, shape in shapes.items()}
    return {**filled, "tree": np.ones((1, nodes, nodes), np.bool_)}


def step_of(tree: Tree, rows: CacheRows, select: list[int]) -> Step:
    return Step.of(tree, rows, select)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_rows_hold_the_sequence_to_the_last_slot(seed: int) -> None:
    """The graph's recipe in numpy: commit, append, padding; caches hold tokens, so they can be looked at."""
    rng, plan = np.random.default_rng(seed), widths()
    cache, rows, tokens = np.full(SLOTS, -1), CacheRows(), list[int]()
    while room := plan.widest(rows.past):
        prompt = bool(rng.integers(0, 3) == 0)
        size = int(rng.integers(1, min(SLOTS - rows.past, 40) + 1)) if prompt else int(rng.integers(1, room + 1))
        parents = [-1] + [node if prompt else int(rng.integers(0, node + 1)) for node in range(size - 1)]
        tree = Tree(rng.integers(0, 1000, size), np.array(parents))
        for width, step in plan.pieces(step_of(tree, rows, [size - 1])):
            inputs = blank(width)
            plan.fill(inputs, width, step)
            count, start = len(step.tokens), int(inputs["write"][0])
            assert all(array.min() >= 0 for array in inputs.values() if array.dtype == np.int64)
            assert start + width.accepted + width.nodes <= SLOTS
            assert inputs["commit"].max() < SLOTS and inputs["order"].max() < len(inputs["order"])
            joined = np.concatenate([cache[inputs["commit"]], inputs["tokens"][0]])
            cache[start : start + len(inputs["order"])] = joined[inputs["order"]]
            mask = inputs["tree"][0]
            assert np.array_equal(mask[:count, :count], step.tree)
            assert not mask[:count, count:].any() and not mask[count:, :count].any()
            assert np.array_equal(mask[count:, count:], np.eye(width.nodes - count, dtype=bool))
            assert int(inputs["past"][0]) == step.past
            assert np.array_equal(cache[step.past : step.past + count], step.tokens)
            assert np.array_equal(cache[: len(tokens)], tokens)
            tokens += [int(token) for token in step.tokens] if prompt else []
        path = list(range(size)) if prompt else tree.path(int(rng.integers(0, size)))
        tokens += [] if prompt else [int(tree.tokens[node]) for node in path]
        rows = rows.accept(path)
        tokens = tokens[: rows.past]
        committed = cache[[*range(rows.write), *rows.commit]]
        assert np.array_equal(committed, tokens)
    assert rows.past == SLOTS


def test_which_profile() -> None:
    plan = widths()
    assert [plan.widest(past) for past in (0, 56, 57, 61, 62, 63, 64)] == [8, 8, 3, 3, 1, 1, 0]

    def pieces(count: int, past: int, select: list[int]) -> list[tuple[int, int]]:
        step = step_of(Tree.chain(list(range(count))), CacheRows(past), select)
        return [(width.nodes, len(piece.tokens)) for width, piece in plan.pieces(step)]

    assert pieces(5, 0, [4]) == [(8, 5)]
    assert pieces(20, 0, [19]) == [(24, 20)]
    assert pieces(30, 0, [29]) == [(24, 24), (8, 6)]
    assert pieces(20, 50 - 6, [19]) == [(8, 8), (8, 8), (3, 3), (1, 1)]  # 24 do not fit any more
    assert pieces(10, 0, list(range(10))) == [(8, 8), (3, 2)]  # a prompt's profile gives one row
    with pytest.raises(UsageError, match="64 rows are used and the context has 64"):
        pieces(1, 64, [0])


def test_plans_that_cannot_run_every_call() -> None:
    with pytest.raises(BundleError, match="no profile for one node"):
        StaticWidths(WIDTHS[:1], SLOTS, "x")
    with pytest.raises(BundleError, match="profile 1 commits 6 rows before 1 nodes, expected at least 7"):
        StaticWidths([WIDTHS[0], Width(1, 1, 6, 1)], SLOTS, "x")
    with pytest.raises(BundleError, match="both in 30 slots"):
        StaticWidths(WIDTHS, 30, "x")
