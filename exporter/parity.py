"""Holding an engine of the target contract against full recomputes: chunks, trees, commits, and the caches after them.

``verify`` runs it on real bundles, the tests on tiny random models of every architecture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from specexport.runtime.cache import CacheRows
from specexport.runtime.engine import TargetEngine
from specexport.runtime.tree import Tree

#: Logits [len, V] of every position of a sequence, from scratch.
Recompute = Callable[[Sequence[int]], NDArray[np.float32]]


class ParityError(AssertionError):
    """An engine does not compute what a full recompute does."""


class Follower:
    """Feeds an engine and remembers what it must have in its cache."""

    def __init__(
        self, engine: TargetEngine, recompute: Recompute, rng: np.random.Generator, vocab: int, limit: float
    ) -> None:
        self.engine, self.recompute, self.rng, self.vocab, self.limit = engine, recompute, rng, vocab, limit
        self.tokens: list[int] = []
        self.rows = CacheRows()
        self.worst = 0.0

    def draw(self, count: int) -> list[int]:
        return [int(token) for token in self.rng.integers(0, self.vocab, count)]

    def _check(self, logits: NDArray[np.float32], expected: NDArray[np.float32], what: str) -> None:
        error = float(np.abs(logits.astype(np.float64) - expected).max())
        self.worst = max(self.worst, error)
        if not error <= self.limit:
            raise ParityError(f"{what} at {len(self.tokens)} tokens: logits differ by {error:.2e}")

    def chunk(self, count: int) -> None:
        """One prefill chunk of random tokens; only the last row of logits is asked for, as in production."""
        self.step(Tree.chain(self.draw(count)), list(range(count)), select=[count - 1])

    def step(self, tree: Tree, path: Sequence[int], select: Sequence[int] | None = None) -> None:
        """Run a tree, compare every selected node with a recompute of its path, then accept ``path``."""
        wanted = list(range(len(tree))) if select is None else list(select)
        past = self.rows.past
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

    def fill(self) -> None:
        """Go on to one slot before the last, with a tree that reaches the last one on the way."""
        slots = self.engine.slots
        while slots - self.rows.past > 6:
            tree = self.random_tree(6)
            self.step(tree, tree.path(int(self.rng.integers(1, 6))))
        if slots - self.rows.past > 1:
            self.step(self.random_tree(slots - self.rows.past), [0])
        while slots - self.rows.past > 1:
            self.settle()

    def settle(self) -> None:
        """Apply an outstanding commit by one more token, so that the cache is in order."""
        self.step(Tree.chain(self.draw(1)), [0])


def exercise(
    make_engine: Callable[[], TargetEngine],
    recompute: Recompute,
    *,
    vocab: int,
    seed: int = 0,
    limit: float = 1e-4,
    to_the_end: bool = True,
) -> tuple[float, float]:
    """Chunked prefill, every kind of acceptance, and the last slot.

    Args:
        vocab: tokens are drawn below it.
        limit: largest difference of a logit, and of a cache entry, that is not an error.
        to_the_end: go on until the last cache slot is filled (slow with thousands of slots).

    Returns:
        Worst difference of a logit, and of a cache entry to a fresh prefill's.

    Raises:
        ParityError: a difference is above ``limit``.
    """
    engine = make_engine()
    run = Follower(engine, recompute, np.random.default_rng(seed), vocab, limit)
    for count in (7, 1, 4):
        run.chunk(count)
    fork = Tree(np.array(run.draw(6), np.int64), np.array([-1, 0, 0, 1, 2, 4]))
    run.step(fork, [0, 2, 4, 5])  # the second branch wins, from a row that is not its destination
    run.step(run.random_tree(5), [0])  # nothing accepted, with an outstanding commit
    run.step(Tree.chain(run.draw(5)), [0, 1, 2, 3, 4])  # everything accepted
    for _ in range(3):
        tree = run.random_tree(7)
        run.step(tree, tree.path(int(run.rng.integers(0, 7))))
    if to_the_end:
        run.fill()
    run.settle()
    caches = engine.read_cache(run.rows.past)
    del engine, run.engine  # two engines at once would need twice the memory
    fresh = Follower(make_engine(), recompute, run.rng, vocab, limit)
    fresh.step(Tree.chain(run.tokens), list(range(len(run.tokens))), select=[len(run.tokens) - 1])
    again = fresh.engine.read_cache(len(run.tokens))
    worst = max(float(np.abs(mine - other).max()) for mine, other in zip(caches, again, strict=True))
    if not worst <= limit:
        raise ParityError(f"the cache differs from a fresh prefill by {worst:.2e}")
    return run.worst, worst
