"""Medusa heads: every depth is predicted from one hidden state of the target (Cai et al. 2024, arXiv 2401.10774).

The graph gives the k best tokens of each head. A static tree takes fixed ranks; without one the tree is grown each step
from the heads' own probabilities, which multiply along a path because the heads do not see each other. Where the target
samples, both are those of the logits with its noise (:mod:`specexport.runtime.drafters.noise`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport.runtime import contract
from specexport.runtime.drafters.base import DraftRequest, Observation
from specexport.runtime.drafters.noise import DraftNoise
from specexport.runtime.drafters.paths import Path, best_paths, template
from specexport.runtime.engine import Graph
from specexport.runtime.sampling import SamplingParams
from specexport.runtime.tree import Tree


class MedusaDrafter:
    """Proposes from the features of the last committed token.

    Args:
        graph: ``features`` [1, F], ``noise`` [heads, n] -> ``draft_tokens``, ``draft_logprobs`` [heads, k].
        ids: int64 [n], target ids of the rows of the heads' vocabulary.
        heads, k: sizes of its outputs. tree: rank paths of a static tree, None for a dynamic one.
        coupled: draft with the target's noise where that helps; False only to measure without.

    Raises:
        UsageError: a static tree that the heads cannot fill.
    """

    def __init__(
        self,
        graph: Graph,
        ids: NDArray[np.int64],
        *,
        heads: int,
        k: int,
        tree: Sequence[Path] | None = None,
        coupled: bool = True,
        name: str = "medusa",
    ) -> None:
        self.name, self.coupled = name, coupled
        self._graph = graph
        self._heads, self._k = heads, k
        self._template = None if tree is None else template(tree, heads, k)
        self._noise = DraftNoise(ids, heads)
        self._state: NDArray[Any] | None = None
        self._next = 0  # position of the root
        self._proposal: tuple[list[list[int]], NDArray[np.float32]] | None = None

    def absorb(self, first: int, tokens: Sequence[int], features: NDArray[Any]) -> None:
        """Keep the newest state; the graph runs when a proposal is wanted."""
        self._state, self._next = features[-1:].copy(), first + len(tokens)
        self._proposal = None

    def couple(self, params: SamplingParams | None) -> None:
        """See :meth:`specexport.runtime.drafters.base.CoupledDrafter.couple`."""
        self._noise.begin(params if self.coupled else None)

    def begin(self, tokens: Sequence[int], first: int) -> None:
        """Nothing to learn."""

    def observe(self, observation: Observation) -> None:
        """Nothing to learn."""

    def propose(self, request: DraftRequest) -> Tree:
        """Head 0 predicts what follows the root, head 1 what follows that, and so on."""
        if self._state is None:
            return Tree.chain([request.root])
        if self._proposal is None:
            outputs = self._graph.run({contract.FEATURES: self._state, **self._noise.inputs(self._next + 1)})
            self._proposal = outputs[contract.DRAFT_TOKENS].tolist(), outputs[contract.DRAFT_LOGPROBS]
        ids, logprobs = self._proposal
        depth, count = min(request.max_depth, self._heads), request.max_nodes - 1
        if self._template is None:
            chances = np.exp(logprobs.astype(np.float64)).tolist()
            nodes = best_paths(count, depth, lambda level, rank: float(chances[level][rank]), self._k)
        else:
            nodes = [node for node in self._template if node[2] <= depth][:count]
        tokens, parents, scores = [request.root], [-1], [0.0]
        for parent, rank, level in nodes:
            tokens.append(ids[level - 1][rank])
            parents.append(parent)
            scores.append(scores[parent] + float(logprobs[level - 1, rank]))
        return Tree(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(scores, np.float32))
