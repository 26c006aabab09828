"""Draft trees: tokens with parents, parents before children; node 0 is the root.

The root is the last token that was emitted but not yet run through the target; the drafter proposes what may follow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Tree:
    """A draft tree of T nodes.

    Attributes:
        tokens: int64 [T], token id of each node; ``tokens[0]`` is the root.
        parents: int64 [T], index of each node's parent, smaller than the node's own index; -1 for the root.
        scores: float32 [T], the drafter's estimate (log probability of the path, natural log), 0 for the root.
            Only an estimate: acceptance never reads it.
        draft_probs: for trees that were drawn at random, q: float64 [V] of a node, the distribution that the node's
            first child was drawn from; the children after it were drawn, in order, from what q leaves once their
            elder siblings are struck out (sampling without replacement). None: the tree was chosen, not drawn.
    """

    tokens: IntArray
    parents: IntArray
    scores: FloatArray = field(default_factory=lambda: np.zeros(0, np.float32))
    draft_probs: Callable[[int], NDArray[np.float64]] | None = None

    def __post_init__(self) -> None:
        size = len(self.tokens)
        if size == 0 or len(self.parents) != size or (len(self.scores) not in (0, size)):
            raise ValueError(
                f"a tree needs one parent per token and at least a root: {size} tokens, {len(self.parents)} parents"
            )
        if self.parents[0] != -1:
            raise ValueError(f"the root's parent must be -1, got {int(self.parents[0])}")
        if size > 1:
            rest = self.parents[1:]
            if (rest < 0).any() or (rest >= np.arange(1, size)).any():
                raise ValueError("parents must come before their children")

    def __len__(self) -> int:
        return len(self.tokens)

    @staticmethod
    def chain(tokens: IntArray | list[int]) -> Tree:
        """A path without branches: ``tokens[0]`` is the root."""
        array = np.asarray(tokens, np.int64)
        return Tree(array, np.arange(-1, len(array) - 1, dtype=np.int64))

    def depths(self) -> IntArray:
        """int64 [T]: edges from the root to each node."""
        depths = np.zeros(len(self.tokens), np.int64)
        for node in range(1, len(depths)):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    def mask(self) -> BoolArray:
        """bool [T, T]: ``mask[i, j]`` where j is i or an ancestor of i (the ``tree`` input of the target)."""
        size = len(self.tokens)
        mask = np.zeros((size, size), bool)
        mask[0, 0] = True
        for node in range(1, size):
            mask[node] = mask[self.parents[node]]
            mask[node, node] = True
        return mask

    def path(self, node: int) -> list[int]:
        """Node indices from the root to ``node``, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = int(self.parents[node])
        return path[::-1]

    def best(self, size: int, max_depth: int) -> Tree:
        """The ``size`` nodes with the best scores, none deeper than ``max_depth``, in the order they have here.

        Scores must not rise along a path; of equal scores the earlier node wins, so ancestors are always in. What is
        left of a drawn tree was chosen by its tokens, so it has no ``draft_probs``.
        """
        if size >= len(self.tokens) and max_depth >= len(self.tokens) - 1:
            return self
        scores = np.where(self.depths() <= max_depth, self.scores, -np.inf)
        kept = np.sort(np.argsort(-scores, kind="stable")[:size])
        kept = kept[np.isfinite(scores[kept])]
        place = np.full(len(self.tokens), -1, np.int64)
        place[kept] = np.arange(len(kept))
        parents = np.where(self.parents[kept] < 0, -1, place[self.parents[kept]])
        return Tree(self.tokens[kept], parents, self.scores[kept])

    def trunk(self) -> Tree:
        """The path that goes on with the best child each time; of equal scores, or without any, with the first."""
        parents = self.parents.tolist()
        if all(parent == node - 1 for node, parent in enumerate(parents)):
            return self
        scores = self.scores.tolist() or [0.0] * len(parents)
        best: dict[int, int] = {}
        for node in range(1, len(parents)):
            known = best.get(parents[node])
            if known is None or scores[node] > scores[known]:
                best[parents[node]] = node
        path = [0]
        while path[-1] in best:
            path.append(best[path[-1]])
        kept = np.array(path)
        return Tree(
            self.tokens[kept], np.arange(-1, len(kept) - 1, dtype=np.int64), self.scores[kept[: len(self.scores)]]
        )

    def pruned(self, size: int) -> Tree:
        """The first ``size`` nodes (parents come first, so any prefix is a tree)."""
        if size >= len(self.tokens):
            return self
        return Tree(self.tokens[:size], self.parents[:size], self.scores[:size], self.draft_probs)
