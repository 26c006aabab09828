"""Holding an engine of the target contract against full recomputes: chunks, trees, commits, and the caches after them.

``verify`` runs it on real bundles, the tests on tiny random models of every architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport.runtime.cache import CacheRows
from specexport.runtime.engine import Step, TargetEngine, widest_of
from specexport.runtime.tree import Tree

#: Logits [len, V] of every position of a sequence, from scratch.
Recompute = Callable[[Sequence[int]], NDArray[np.float32]]


@dataclass(slots=True)
class Deviation:
    """The worst difference seen so far.

    Attributes:
        error: largest absolute difference (inf for NaN). size: largest magnitude of what was expected, at least 1.
        where: where the error was.
    """

    error: float = 0.0
    size: float = 1.0
    where: str = "nowhere"

    @property
    def relative(self) -> float:
        """``error / size``."""
        return self.error / self.size

    def note(self, found: NDArray[Any], expected: NDArray[Any], where: str) -> None:
        """Compare two arrays of one shape."""
        wanted = expected.astype(np.float64)
        error = float(np.abs(found.astype(np.float64) - wanted).max())
        error = math.inf if math.isnan(error) else error
        self.size = max(self.size, float(np.abs(wanted).max()))
        if error > self.error:
            self.error, self.where = error, where


class Follower:
    """Feeds an engine and remembers what it must have in its cache; ``logits`` is how far off it was."""

    def __init__(self, engine: TargetEngine, recompute: Recompute, rng: np.random.Generator, vocab: int) -> None:
        self.engine, self.recompute, self.rng, self.vocab = engine, recompute, rng, vocab
        self.tokens: list[int] = []
        self.rows = CacheRows()
        self.logits = Deviation()

    def draw(self, count: int) -> list[int]:
        return [int(token) for token in self.rng.integers(0, self.vocab, count)]

    def chunk(self, count: int) -> None:
        """One prefill chunk of random tokens; only the last row of logits is asked for, as in production."""
        self.step(Tree.chain(self.draw(count)), list(range(count)), select=[count - 1])

    def step(self, tree: Tree, path: Sequence[int], select: Sequence[int] | None = None) -> None:
        """Run a tree, compare every selected node with a recompute of its path, then accept ``path``."""
        wanted = list(range(len(tree))) if select is None else list(select)
        logits = self.engine.run(Step.of(tree, self.rows, wanted))
        for row, node in zip(logits, wanted, strict=True):
            drafted = [int(tree.tokens[index]) for index in tree.path(node)]
            expected = self.recompute(self.tokens + drafted)[-1]
            self.logits.note(row, expected, f"node {node} of {len(tree)} after {len(self.tokens)} tokens")
        self.tokens += [int(tree.tokens[index]) for index in path]
        self.rows = self.rows.accept(path)

    def random_tree(self, size: int) -> Tree:
        parents = np.array([-1] + [int(self.rng.integers(0, node)) for node in range(1, size)], np.int64)
        return Tree(np.array(self.draw(size), np.int64), parents)

    def fill(self) -> None:
        """Go on to one slot before the last, with trees that reach the last one where the engine takes any so near."""
        slots, widest = self.engine.slots, widest_of(self.engine)
        while slots - self.rows.past > 6:
            size = min(6, widest(self.rows.past))
            tree = self.random_tree(size)
            self.step(tree, tree.path(int(self.rng.integers(min(1, size - 1), size))))
        if slots - self.rows.past > 1:
            self.step(self.random_tree(widest(self.rows.past)), [0])
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
    to_the_end: bool = True,
) -> tuple[Deviation, Deviation]:
    """Chunked prefill, every kind of acceptance, and the last slot.

    Args:
        make_engine: called twice; the first engine is dropped before the second is made.
        vocab: tokens are drawn below it.
        to_the_end: go on until the last cache slot is filled (slow with thousands of slots).

    Returns:
        Of the logits from the recomputes, and of the cache from that of a fresh prefill in one call.
    """
    engine = make_engine()
    run = Follower(engine, recompute, np.random.default_rng(seed), vocab)
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
    fresh = make_engine()
    count = len(run.tokens)
    logits = fresh.run(Step.chain(run.tokens, select=[count - 1]))
    run.logits.note(logits[0], recompute(run.tokens)[-1], f"a prefill of {count} tokens")
    cache = Deviation()
    for index, (mine, other) in enumerate(zip(caches, fresh.read_cache(count), strict=True)):
        cache.note(mine, other, f"{'kv'[index % 2]} of layer {index // 2}")
    return run.logits, cache
