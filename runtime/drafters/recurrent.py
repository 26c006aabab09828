"""Recurrent heads (EAGLE-1/2/3, multi-token prediction): a small decoder over the target's hidden states.

Entry p of the draft cache joins the target's features of token p with token p + 1. It is stable: it is computed from
true features only, once both are known, so the cache never holds what the drafter itself made up. One call of the graph
appends what became known since the last call and grows a whole tree from the newest entry. Calls are made for proposals
alone: who is not asked costs nothing but the memory of features, which is bounded. Where the target samples, it
ranks with the target's noise (:mod:`specexport.runtime.drafters.noise`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport.runtime import contract
from specexport.runtime.drafters.base import DraftRequest, Observation
from specexport.runtime.drafters.noise import DraftNoise
from specexport.runtime.drafters.paths import Path, template
from specexport.runtime.engine import Graph
from specexport.runtime.errors import BundleError, UsageError
from specexport.runtime.sampling import SamplingParams
from specexport.runtime.tree import Tree

_LOG = logging.getLogger(__name__)
#: Most entries appended in one call, and bytes of features that wait for one.
CHUNK, BACKLOG = 256, 64 << 20


class RecurrentDrafter:
    """Proposes a tree from the features of everything committed so far.

    Args:
        graph: see ``exporter.heads.export``. ids: int64 [n], target ids of the rows of the head's vocabulary.
        nodes: drafted nodes of its tree. depth: of its deepest node.
        slots: rows of its cache. max_positions: context the head was trained for; past either, nothing is proposed.
        tree: rank paths of the static tree that the graph grows; None where it grows a dynamic one.
        coupled: draft with the target's noise where that helps; False only to measure without.

    Raises:
        UsageError: a static tree of another size.
    """

    def __init__(
        self,
        graph: Graph,
        ids: NDArray[np.int64],
        *,
        nodes: int,
        depth: int,
        slots: int,
        max_positions: int,
        tree: Sequence[Path] | None = None,
        coupled: bool = True,
        name: str = "eagle3",
    ) -> None:
        self.name, self.coupled = name, coupled
        self._parents = None if tree is None else self._fixed(tree, nodes, depth)
        #: Widest useful tree, the root included.
        self.max_nodes = nodes + 1
        self._graph, self._limit = graph, min(slots, max_positions)
        self._depth = depth
        self._noise = DraftNoise(ids, depth)
        self._rows = 0  # entries in the cache
        self._tokens: list[int] = []  # committed tokens from position _rows on, ...
        self._features: list[NDArray[Any]] = []  # ... and their features, in pieces
        self._proposal: Tree | None = None
        self._past_limit = False  # since then nothing was absorbed

    @property
    def _next(self) -> int:
        return self._rows + len(self._tokens)

    def absorb(self, first: int, tokens: Sequence[int], features: NDArray[Any]) -> None:
        """See :meth:`specexport.runtime.drafters.base.FeatureDrafter.absorb`."""
        if self._past_limit and first > self._rows:
            return
        if first < self._next or self._past_limit:
            self._rewind(first)
        if first != self._next:
            raise BundleError(f"drafter {self.name} was given position {first}, expected at most {self._next}")
        self._proposal = None
        if self._next + len(tokens) + self._depth > self._limit:
            self._past_limit, self._tokens, self._features = True, [], []
            _LOG.warning("%s: past its context of %d tokens, decoding plainly", self.name, self._limit)
            return
        self._tokens += tokens
        self._features.append(features.copy())
        if len(self._tokens) * features[0].nbytes > BACKLOG:
            self._catch_up()

    @property
    def behind(self) -> int:
        """See :class:`specexport.runtime.drafters.base.LaggingDrafter`."""
        return len(self._tokens)

    def _catch_up(self) -> None:
        """Append all but the newest entries."""
        while len(self._tokens) > CHUNK:
            self._call(CHUNK, self._tokens[1 : CHUNK + 1])

    def _rewind(self, first: int) -> None:
        """Forget positions from ``first`` on."""
        if first <= self._rows:
            self._rows, self._tokens, self._features = first, [], []
        else:
            kept = first - self._rows
            self._tokens, self._features = self._tokens[:kept], [np.concatenate(self._features)[:kept]]
        self._past_limit = False

    def couple(self, params: SamplingParams | None) -> None:
        """See :meth:`specexport.runtime.drafters.base.CoupledDrafter.couple`."""
        self._noise.begin(params if self.coupled else None)

    def begin(self, tokens: Sequence[int], first: int) -> None:
        """Nothing to learn: the prompt was absorbed."""

    def observe(self, observation: Observation) -> None:
        """Nothing to learn: the accepted path was absorbed."""

    def propose(self, request: DraftRequest) -> Tree:
        """The best part of the tree that fits the request; the root alone past the head's context."""
        if self._proposal is None:
            if not self._tokens:
                return Tree.chain([request.root])
            self._catch_up()
            self._proposal = self._tree(self._call(len(self._tokens), [*self._tokens[1:], request.root]), request.root)
        return self._proposal.best(request.max_nodes, request.max_depth)

    def _call(self, count: int, following: list[int]) -> dict[str, NDArray[Any]]:
        """Append ``count`` entries, whose next tokens are ``following``, and grow a tree from the last."""
        features = self._features[0] if len(self._features) == 1 else np.concatenate(self._features)
        outputs = self._graph.run(
            {
                contract.FEATURES: features[None, :count],
                contract.TOKENS: np.array([following], np.int64),
                contract.PAST: np.array([self._rows], np.int64),
                **self._noise.inputs(self._rows + count + 1),
            }
        )
        self._rows += count
        self._tokens = self._tokens[count:]
        self._features = [features[count:]] if self._tokens else []
        return outputs

    def _fixed(self, tree: Sequence[Path], nodes: int, depth: int) -> NDArray[np.int64]:
        """Parents of a static tree's nodes."""
        fixed = template(tree, depth, 1 + max((rank for path in tree for rank in path), default=0))
        if len(fixed) != nodes:
            raise UsageError(f"drafter {self.name} drafts {nodes} nodes, its static tree has {len(fixed)}")
        return np.array([parent for parent, _, _ in fixed])

    def _tree(self, outputs: dict[str, NDArray[Any]], root: int) -> Tree:
        if self._parents is not None and not np.array_equal(outputs[contract.DRAFT_PARENTS], self._parents):
            raise BundleError(f"drafter {self.name}: its graph grows another tree than the manifest says")
        return Tree(
            np.concatenate([[root], outputs[contract.DRAFT_TOKENS]]),
            np.concatenate([[-1], outputs[contract.DRAFT_PARENTS]]),
            np.concatenate([np.zeros(1, np.float32), outputs[contract.DRAFT_LOGPROBS]]),
        )
