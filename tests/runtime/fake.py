"""A target engine without weights that honours the whole contract.

A cache row stores the token and the position that were written to it, as a real cache stores their keys and values.
The logits of a node are a hash of everything it attends to, so a row that is stale, missing, doubled or moved to the
wrong place changes what is generated soon after.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specexport.runtime.engine import Step

_ODD = np.uint64(0x9E3779B97F4A7C15)


def _mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


class ToyModel:
    """A random language model with repetitive output.

    The last two tokens decide which token is likely; the whole history adds noise and, once in ``surprise`` steps,
    makes another token win. Order of the history does not matter beyond positions, as in attention.
    """

    def __init__(self, vocab_size: int, seed: int, surprise: int = 6) -> None:
        self.vocab_size = vocab_size
        self.surprise = surprise
        self._seed = np.uint64(seed * 2654435761 + 1)

    def pairs(self, tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.uint64]:
        """A hash of each (token, position)."""
        return _mix(tokens.astype(np.uint64) * _ODD + positions.astype(np.uint64) + self._seed)

    def logits(self, last: tuple[int, int], history: int) -> NDArray[np.float32]:
        """Logits after the tokens ``last`` (older, newer), where ``history`` is the sum of all pairs."""
        ids = np.arange(self.vocab_size, dtype=np.uint64)
        noise = _mix(ids * _ODD + np.uint64(history))
        row = (noise >> np.uint64(40)).astype(np.float32) / np.float32(2**24) * 2
        structure = _mix(np.array([(last[0] + 1) * 1000003 + last[1]], np.uint64) + self._seed)[0]
        likely = int(structure) % self.vocab_size
        row[likely] += 4
        row[(likely * 7 + 1) % self.vocab_size] += 2
        if history % self.surprise == 0:
            row[(history >> 8) % self.vocab_size] += 8
        return row

    def after(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Logits after a sequence, without any cache: what the engine must agree with."""
        array = np.array(tokens, np.int64)
        history = int(self.pairs(array, np.arange(len(array))).sum())
        return self.logits((array[-2] if len(array) > 1 else -1, array[-1]), history)


class FakeEngine:
    """The toy model behind the contract of the target graph, every argument checked."""

    features_size = 0

    def __init__(self, model: ToyModel, slots: int) -> None:
        self.model = model
        self.slots = slots
        self.vocab_size = model.vocab_size
        self.calls: list[tuple[int, int]] = []  # (T, R) of each call
        self.reset()

    def reset(self) -> None:
        self.tokens = np.zeros(self.slots, np.int64)
        self.positions = np.zeros(self.slots, np.int64)

    def read_cache(self, rows: int) -> list[NDArray[np.int64]]:
        return [np.stack([self.tokens[:rows], self.positions[:rows]], -1)[None]]

    def run(self, step: Step) -> NDArray[np.float32]:
        tokens, positions, tree, past, write, commit, select = step
        size = len(tokens)
        assert tokens.dtype == positions.dtype == commit.dtype == select.dtype == np.int64 and tree.dtype == bool
        assert positions.shape == (size,) and tree.shape == (size, size) and size > 0
        assert len(commit) == past - write and write >= 0 and past + size <= self.slots
        assert tree.diagonal().all() and not np.triu(tree, 1).any()
        assert commit.min(initial=0) >= 0 and commit.max(initial=0) < self.slots
        assert tokens.min() >= 0 and tokens.max() < self.vocab_size
        self.calls.append((size, len(select)))
        block_tokens = np.concatenate([self.tokens[commit], tokens])
        block_positions = np.concatenate([self.positions[commit], positions])
        self.tokens[write : write + len(block_tokens)] = block_tokens
        self.positions[write : write + len(block_tokens)] = block_positions

        committed = self.model.pairs(self.tokens[:past], self.positions[:past])
        new = self.model.pairs(tokens, positions)
        rows = []
        for node in select:
            history = int(np.concatenate([committed, new[tree[node]]]).sum())
            before = self._token_before(past, tokens, positions, tree[node], int(positions[node]))
            rows.append(self.model.logits((before, int(tokens[node])), history))
        return np.stack(rows)

    def _token_before(
        self,
        past: int,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        visible: NDArray[np.bool_],
        position: int,
    ) -> int:
        """The visible token one position earlier, -1 if there is none."""
        near = tokens[visible & (positions == position - 1)]
        if not len(near):
            near = self.tokens[:past][self.positions[:past] == position - 1]
        return int(near[0]) if len(near) else -1
