"""Cache-row bookkeeping against a naive simulation of the cache."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport.runtime.cache import CacheRows, common_prefix


class Memory:
    """A cache of labels that follows the contract's block layout literally."""

    def __init__(self, slots: int) -> None:
        self.rows: list[object] = [None] * slots

    def call(self, state: CacheRows, labels: list[object]) -> None:
        block = [self.rows[row] for row in state.commit] + labels
        self.rows[state.write : state.write + len(block)] = block

    def sequence(self, state: CacheRows) -> list[object]:
        return self.rows[: state.write] + [self.rows[row] for row in state.commit]


def paths(nodes: int) -> list[list[int]]:
    """Every ascending choice of nodes that starts at the root."""
    rest = range(1, nodes)
    choices = chain.from_iterable(combinations(rest, count) for count in range(nodes))
    return [[0, *choice] for choice in choices]


def test_every_pair_of_paths_keeps_the_sequence() -> None:
    """Two steps and a third call, so that rows that still wait to move are moved by the next one."""
    for first in paths(5):
        for second in paths(5):
            memory, state, expected = Memory(24), CacheRows(), []
            for step, path in enumerate(([0, 1, 2], first, second, [0])):
                size = 3 if step == 0 else 5
                labels: list[object] = [(step, node) for node in range(size)]
                memory.call(state, labels)
                state = state.accept(path)
                expected += [labels[node] for node in path]
                assert memory.sequence(state) == expected
                assert state.past == len(expected)


def test_only_rows_out_of_place_move() -> None:
    state = CacheRows(10).accept([0, 1, 3, 6])
    assert (state.write, state.commit, state.past) == (12, (13, 16), 14)
    assert CacheRows(10).accept([0, 1, 2]) == CacheRows(13)
    # The moved rows came first in the block, so a path that starts at its root is in place again.
    assert state.accept([0]) == CacheRows(15)


@given(st.data())
def test_random_walks_with_truncation(data: st.DataObject) -> None:
    memory, state = Memory(400), CacheRows()
    expected: list[object] = []
    for step in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()) and expected:
            kept = data.draw(st.integers(0, len(expected)))
            state, expected = state.keep(kept), expected[:kept]
            assert state.past == kept
        size = data.draw(st.integers(1, 9))
        path = [0, *(node for node in range(1, size) if data.draw(st.booleans()))]
        labels: list[object] = [(step, node) for node in range(size)]
        memory.call(state, labels)
        state = state.accept(path)
        expected += [labels[node] for node in path]
        assert memory.sequence(state) == expected
        assert all(row >= state.write + index for index, row in enumerate(state.commit))


def test_commit_array_is_what_the_target_takes() -> None:
    assert CacheRows(3, (5, 7)).commit_array.tolist() == [5, 7]
    empty = CacheRows(3).commit_array
    assert empty.shape == (0,) and empty.dtype == "int64"


@pytest.mark.parametrize("length", [0, 1, 5, 600])
@pytest.mark.parametrize("differs", [0, 1, 4, 599, 700])
def test_common_prefix(length: int, differs: int) -> None:
    left = list(range(length))
    right = tuple(-1 if token == differs else token for token in range(650))
    assert common_prefix(left, right) == min(length, differs) == common_prefix(right, left)
