"""Token Recycling: the runners-up of earlier steps are the drafts of later ones.

Idea: Luo et al. 2024 (arXiv 2408.08696). A table holds, for each token, the k most probable successors that the target
last gave it; a static tree of rank paths is filled from it. The tree is not the paper's: it is grown for small widths
by :func:`specexport.runtime.drafters.paths.best_paths`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log

import numpy as np
from numpy.typing import NDArray

from specexport.runtime.drafters.base import DraftRequest, Observation
from specexport.runtime.drafters.paths import best_paths
from specexport.runtime.errors import UsageError
from specexport.runtime.tree import Tree

#: Chance that the successor of this rank is the next token, given that its parent is right: what was seen on SmolLM2's
#: answers to Spec-Bench prompts (rank 0: 0.37 below the root and 0.52 below a right draft; the tree has one value).
RANK_PROBABILITY = (0.45, 0.09, 0.045, 0.025, 0.02, 0.015, 0.012, 0.008)


def top_k(row: NDArray[np.float32], k: int, block: int = 64) -> NDArray[np.int64]:
    """Indices of the k largest values, largest first; equal values in order of index, as far as they are candidates.

    Exact: the k largest lie in the k strided blocks with the largest maxima, so one vectorised pass over the row finds
    the blocks and only k * ``block`` values are sorted. About ten times faster than a partition of a 50k row.
    """
    size = len(row)
    columns = size // block
    if columns <= k:
        return np.argsort(-row, kind="stable")[:k]
    main = row[: columns * block].reshape(block, columns)
    best = np.argpartition(main.max(axis=0), columns - k)[columns - k :]
    candidates = (best[None, :] + np.arange(0, columns * block, columns)[:, None]).ravel()
    if columns * block < size:
        candidates = np.concatenate([candidates, np.arange(columns * block, size)])
    values = row[candidates]
    few = np.argpartition(values, len(values) - k)[len(values) - k :]
    few = candidates[few]
    chosen: NDArray[np.int64] = few[np.lexsort((few, -row[few]))]
    return chosen


class RecyclingDrafter:
    """A static tree filled from each token's last seen successors.

    The table survives ``begin``: what one answer taught helps the next. A prompt adds its own bigrams for tokens whose
    successors the target has not given yet. Memory: 4 * k bytes for each id of the vocabulary,
    touched only where tokens were seen.

    Args:
        vocab_size: ids at or above this are neither learnt nor proposed.
        k: successors kept a token.
        nodes: most drafted nodes of the tree.
        max_depth: most edges below the root.
        learn: nodes a step whose logits are read; those of the accepted path come first.
    """

    name = "recycling"

    def __init__(self, vocab_size: int, *, k: int = 8, nodes: int = 20, max_depth: int = 6, learn: int = 4) -> None:
        if not 1 <= k <= min(len(RANK_PROBABILITY), vocab_size) or nodes < 1 or max_depth < 1 or learn < 1:
            raise UsageError(
                f"recycling drafter: expected 1 <= k <= {len(RANK_PROBABILITY)}, nodes >= 1, max_depth >= 1 and "
                f"learn >= 1, got k={k} nodes={nodes} max_depth={max_depth} learn={learn}"
            )
        self._vocab_size = vocab_size
        self._k = k
        self._learn = learn
        self._template = best_paths(nodes, max_depth, lambda _, rank: RANK_PROBABILITY[rank], k)
        self._scores = [0.0]
        for parent, rank, _ in self._template:
            self._scores.append(self._scores[parent] + log(RANK_PROBABILITY[rank]))
        self._table: NDArray[np.int32] | None = None  # id + 1; 0 is unknown, so untouched pages stay unmapped

    def begin(self, tokens: Sequence[int], first: int) -> None:
        """Learn the prompt's bigrams where nothing better is known."""
        table = self._successors()
        sequence = np.array([*tokens, first], np.int64)
        sequence = sequence[sequence < self._vocab_size]
        # A row that the target filled has all its ranks; one from an earlier prompt has only the first and gives way.
        unknown = np.flatnonzero(table[sequence[:-1], -1] == 0)
        table[sequence[unknown], 0] = sequence[unknown + 1] + 1

    def propose(self, request: DraftRequest) -> Tree:
        """The part of the static tree whose successors are known, most probable nodes first."""
        table = self._successors()
        known: dict[int, list[int]] = {}
        tokens, parents, scores = [request.root], [-1], [0.0]
        place = {0: 0}  # template node -> tree node
        for number, (parent, rank, depth) in enumerate(self._template, 1):
            if len(tokens) >= request.max_nodes:
                break
            above = place.get(parent)
            if above is None or depth > request.max_depth:
                continue
            token = tokens[above]
            if token not in known:
                known[token] = table[token].tolist() if token < self._vocab_size else [0] * self._k
            successor = known[token][rank]
            if successor:
                place[number] = len(tokens)
                tokens.append(successor - 1)
                parents.append(above)
                scores.append(self._scores[number])
        return Tree(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(scores, np.float32))

    def observe(self, observation: Observation) -> None:
        """Store the successors of the accepted nodes, then of others while the budget of ``learn`` rows lasts."""
        table = self._successors()
        tokens = observation.tree.tokens
        accepted = list(observation.path[-self._learn :])
        others = [node for node in range(1, len(tokens)) if node not in observation.path]
        learnt: set[int] = set()
        # The path is read from its end: of two nodes with one token the latest context wins.
        for node in [*reversed(accepted), *others][: self._learn]:
            token = int(tokens[node])
            if token in learnt or token >= self._vocab_size:
                continue
            try:
                row = observation.logits(node)
            except IndexError:
                continue
            learnt.add(token)
            table[token] = top_k(row[: self._vocab_size], self._k) + 1

    def _successors(self) -> NDArray[np.int32]:
        if self._table is None:
            self._table = np.zeros((self._vocab_size, self._k), np.int32)
        return self._table
