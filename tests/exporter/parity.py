"""One runner that holds any engine of the target contract against full recomputes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specexport.exporter.layers import Target
from specexport.runtime.cache import CacheRows
from specexport.runtime.engine import TargetEngine
from specexport.runtime.tree import Tree

#: Logits [len, V] of every position of a sequence, from scratch.
Recompute = Callable[[Sequence[int]], NDArray[np.float32]]


class TorchEngine:
    """The torch module behind the engine protocol. Commits are padded and blocks reordered, as on engines with fixed
    shapes (``pads`` extra commit rows)."""

    features_size = 0

    def __init__(self, target: Target, pads: int = 2) -> None:
        config = target.config
        self.target, self.pads = target, pads
        self.slots, self.vocab_size = target.slots, config.vocab_size
        self._shape = (1, config.num_kv_heads, target.slots, config.head_dim)
        self.features: NDArray[np.float32] | None = None
        self.reset()

    def reset(self) -> None:
        self.caches = [torch.zeros(self._shape, dtype=self.target.dtype) for _ in range(2 * len(self.target.layers))]

    def run(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        tree: NDArray[np.bool_],
        past: int,
        write: int,
        commit: NDArray[np.int64],
        select: NDArray[np.int64],
    ) -> NDArray[np.float32]:
        moved, nodes = len(commit), len(tokens)
        pads = min(self.pads, self.slots - write - moved - nodes)
        padded = np.concatenate([commit, np.zeros(pads, np.int64)])
        order = np.concatenate(
            [np.arange(moved), np.arange(nodes) + len(padded), np.arange(moved, len(padded))]
        ).astype(np.int64)
        arrays = [tokens[None], positions[None], tree[None], np.array([past]), np.array([write]), padded, order, select]
        with torch.no_grad():
            outputs = self.target(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays), *self.caches)
        layers = 2 * len(self.target.layers)
        self.caches = list(outputs[-layers:])
        if self.target.captures:
            self.features = outputs[1].numpy()
        logits: NDArray[np.float32] = outputs[0].numpy()
        return logits

    def read_cache(self, rows: int) -> list[NDArray[np.float32]]:
        return [cache[0, :, :rows].float().numpy() for cache in self.caches]


class Follower:
    """Feeds an engine and remembers what it must have in its cache."""

    def __init__(self, engine: TargetEngine, recompute: Recompute, rng: np.random.Generator, limit: float) -> None:
        self.engine, self.recompute, self.rng, self.limit = engine, recompute, rng, limit
        self.tokens: list[int] = []
        self.rows = CacheRows()
        self.worst = 0.0

    def draw(self, count: int) -> list[int]:
        return [int(token) for token in self.rng.integers(0, self.engine.vocab_size, count)]

    def _check(self, logits: NDArray[np.float32], expected: NDArray[np.float32], what: str) -> None:
        error = float(np.abs(logits.astype(np.float64) - expected).max())
        self.worst = max(self.worst, error)
        assert error <= self.limit, f"{what} at {len(self.tokens)} tokens: logits differ by {error:.2e}"

    def chunk(self, count: int) -> None:
        """One prefill chunk of random tokens; only the last row of logits is asked for, as in production."""
        self.step(Tree.chain(self.draw(count)), list(range(count)), select=[count - 1])

    def step(self, tree: Tree, path: Sequence[int], select: Sequence[int] | None = None) -> None:
        """Run a tree, compare every selected node with a recompute of its path, then accept ``path``."""
        wanted = list(range(len(tree))) if select is None else list(select)
        past = self.rows.past
        assert past == len(self.tokens)
        logits = self.engine.run(
            tree.tokens,
            past + tree.depths(),
            tree.mask(),
            past,
            self.rows.write,
            self.rows.commit_array,
            np.array(wanted, np.int64),
        )
        for row, node in zip(logits, wanted, strict=True):
            drafted = [int(tree.tokens[index]) for index in tree.path(node)]
            self._check(row, self.recompute(self.tokens + drafted)[-1], f"node {node} of {len(tree)}")
        self.tokens += [int(tree.tokens[index]) for index in path]
        self.rows = self.rows.accept(path)

    def random_tree(self, size: int) -> Tree:
        parents = np.array([-1] + [int(self.rng.integers(0, node)) for node in range(1, size)], np.int64)
        return Tree(np.array(self.draw(size), np.int64), parents)

    def settle(self) -> None:
        """Apply an outstanding commit by one more token, so that the cache is in order."""
        self.step(Tree.chain(self.draw(1)), [0])


def exercise(
    make_engine: Callable[[], TargetEngine], recompute: Recompute, seed: int = 0, limit: float = 1e-4
) -> float:
    """Chunked prefill, every kind of acceptance, and the last slot; returns the worst logit error.

    Raises:
        AssertionError: a logit differs from a recompute by more than ``limit``, or a cache from a fresh prefill.
    """
    engine = make_engine()
    run = Follower(engine, recompute, np.random.default_rng(seed), limit)
    for count in (7, 1, 4):
        run.chunk(count)
    fork = Tree(np.array(run.draw(6), np.int64), np.array([-1, 0, 0, 1, 2, 4]))
    run.step(fork, [0, 2, 4, 5])  # the second branch wins, from a row that is not its destination
    run.step(run.random_tree(5), [0])  # nothing accepted, with an outstanding commit
    run.step(Tree.chain(run.draw(5)), [0, 1, 2, 3, 4])  # everything accepted
    for _ in range(3):
        tree = run.random_tree(7)
        run.step(tree, tree.path(int(run.rng.integers(0, 7))))
    while engine.slots - run.rows.past > 6:
        tree = run.random_tree(6)
        run.step(tree, tree.path(int(run.rng.integers(1, 6))))
    left = engine.slots - run.rows.past
    if left > 1:
        run.step(run.random_tree(left), [0])  # the tree reaches the last slot
    while run.rows.past < engine.slots:
        run.settle()
    caches = engine.read_cache(engine.slots)
    fresh = make_engine()
    fresh.reset()
    again = Follower(fresh, recompute, run.rng, limit)
    tree = Tree.chain(run.tokens)
    again.step(tree, list(range(len(tree))), select=[len(tree) - 1])
    for index, (cache, expected) in enumerate(zip(caches, fresh.read_cache(engine.slots), strict=True)):
        error = float(np.abs(cache - expected).max())
        assert error <= limit, f"cache tensor {index} differs from a fresh prefill by {error:.2e}"
    return run.worst
