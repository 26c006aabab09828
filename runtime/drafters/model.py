"""A draft model: a second, smaller target of the bundle that writes ahead (Leviathan et al. 2023, arXiv 2211.17192).

It picks as the target does, with the same penalties, temperature and truncation and with the same noise (Gumbel
coupling, :mod:`specexport.runtime.rules`): a draft model that were the target would always be right, whatever the
temperature. Only drafts depend on that.

Its cache holds the committed sequence and, behind it, what it drafted last. Accepted drafts are rows that are valid
already; rejected ones are forgotten by counting fewer rows. So a step costs one call a draft, and none of a prompt's
tokens is ever computed twice.

The two vocabularies may differ: a table gives the target's id of each of the draft model's. The draft model does not
see tokens for which it has no id, and ends a draft where the target has none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from specexport.runtime.cache import common_prefix
from specexport.runtime.drafters.base import DraftRequest, Observation
from specexport.runtime.engine import Step, TargetEngine
from specexport.runtime.errors import SpecExportError
from specexport.runtime.sampling import Sampler, SamplingParams
from specexport.runtime.tree import Tree

_LOG = logging.getLogger(__name__)
_NOTHING = np.zeros(0, np.int64)


class ModelDrafter:
    """Proposes a chain of tokens; a :class:`~specexport.runtime.rules.SampledDrafter`.

    Args:
        engine: the draft model, whose caches are this drafter's alone.
        to_target: int64 [n], the target's id of each id that may be drafted, -1 for none.
        vocab_size: width of the target's logits.
        depth: most tokens of a draft. prefill_chunk: most tokens in one call.
    """

    kind = "model"
    cost_per_token = True

    def __init__(
        self,
        engine: TargetEngine,
        to_target: NDArray[np.int64],
        vocab_size: int,
        *,
        depth: int,
        prefill_chunk: int = 256,
        name: str = kind,
    ) -> None:
        self.name, self._engine, self._depth = name, engine, depth
        #: Widest useful tree, the root included.
        self.max_nodes = depth + 1
        self._to_target = to_target
        shared = np.flatnonzero(to_target >= 0)
        self._to_draft = np.full(vocab_size, -1, np.int64)
        self._to_draft[to_target[shared]] = shared
        # Columns of the target's rows, and those of the draft model's with the same tokens.
        self._columns: tuple[slice, slice] | tuple[NDArray[np.int64], NDArray[np.int64]] = to_target[shared], shared
        if np.array_equal(to_target, np.arange(len(to_target))):
            self._columns = slice(len(to_target)), slice(len(to_target))
        self._sampler = Sampler(SamplingParams(), vocab_size)
        self._position = 0  # of the token after the sequence
        self._causal = np.tri(min(prefill_chunk, engine.slots), dtype=bool)
        self._logits: list[NDArray[np.float32]] = []  # what each token of the chain was picked from, as a target's row
        # Ids of the draft model. The first _rows of _known + _chain are in its cache.
        self._rows = 0
        self._known: list[int] = []  # the sequence, the root included
        self._chain: list[int] = []  # what follows it, as far as drafted since it last grew
        self._scores: list[float] = []  # log probability of the chain up to each
        self._ended = False  # by a token that the target does not have
        self._warned = False

    def begin_sampling(self, params: SamplingParams) -> None:
        """See :meth:`specexport.runtime.rules.SampledDrafter.begin_sampling`."""
        self._sampler = Sampler(params, len(self._to_draft))

    def begin(self, tokens: Sequence[int], first: int) -> None:
        """Prefill the prompt, except what it shares with the cache."""
        known = self._translated([*tokens, first])
        shared = common_prefix((self._known + self._chain)[: self._rows], known[:-1])
        self._restart(known, shared)
        self._sampler.begin(tokens)
        self._sampler.push(first)
        self._position = len(tokens) + 1
        self._warned = False
        if self._room > 0 and len(known) > shared + 1:
            self._append(known[shared:-1])

    def observe(self, observation: Observation) -> None:
        """Keep the rows of the drafts that came true."""
        emitted = self._translated(observation.emitted)
        kept, known = len(self._known) + common_prefix(self._chain, emitted), self._known + emitted
        self._unpick(0)
        for token in observation.emitted:
            self._sampler.push(token)
        self._position += len(observation.emitted)
        # The root's row is computed again in any case: its logits are needed.
        self._restart(known, max(0, min(self._rows, kept, len(known) - 1)))

    def propose(self, request: DraftRequest) -> Tree:
        """The root and what the draft model writes after it; the root alone past its context."""
        wanted = min(request.max_nodes - 1, request.max_depth, self._depth)
        if self._room < 1 and wanted > 0:
            self._warn(f"past its context of {self._engine.slots} tokens, decoding plainly")
        if self._to_draft[request.root] < 0:
            return Tree.chain([request.root])
        wanted = min(wanted, self._room)
        while len(self._chain) < wanted and not self._ended:
            beyond = self._rows - len(self._known)
            self._extend(self._append(self._known[self._rows :] if beyond < 0 else self._chain[beyond:]))
        length = max(0, min(wanted, len(self._chain)))
        tokens = np.array([request.root, *self._to_target[self._chain[:length]]], np.int64)
        scores = np.array([0.0, *self._scores[:length]], np.float32)
        probs = self._draft_probs if self._sampler.params.temperature > 0 else None
        return Tree(tokens, np.arange(-1, length, dtype=np.int64), scores, probs)

    @property
    def _room(self) -> int:
        """Drafts that fit behind the sequence; the last one needs no row."""
        return self._engine.slots + 1 - len(self._known)

    def _translated(self, tokens: Iterable[int]) -> list[int]:
        """Ids of the draft model, without the tokens that it does not have."""
        ids: list[int] = self._to_draft[np.fromiter(tokens, np.int64)].tolist()
        return [draft for draft in ids if draft >= 0]

    def _draft_probs(self, node: int) -> NDArray[np.float64]:
        """See :attr:`specexport.runtime.tree.Tree.draft_probs`; the sampler's history is set back to the node's."""
        self._unpick(node)
        probs = self._sampler.probs(self._logits[node], self._position + node)
        for draft in self._chain[node:]:
            self._sampler.push(int(self._to_target[draft]))
        return probs

    def _unpick(self, kept: int) -> None:
        """Take all but ``kept`` tokens of the chain out of the sampler's history."""
        for draft in reversed(self._chain[kept:]):
            self._sampler.pop(int(self._to_target[draft]))

    def _restart(self, known: list[int], rows: int) -> None:
        self._known, self._rows = known, rows
        self._chain, self._scores, self._ended = [], [], False

    def _append(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Run tokens behind the cached rows; the logits [1, V] after the last, a view that the next call overwrites."""
        for first in range(0, len(tokens), len(self._causal)):
            part = np.array(tokens[first : first + len(self._causal)], np.int64)
            size, past = len(part), self._rows
            mask, last = np.ascontiguousarray(self._causal[:size, :size]), np.array([size - 1])
            logits = self._engine.run(Step(part, np.arange(past, past + size), mask, past, past, _NOTHING, last))
            self._rows += size
        return logits

    def _extend(self, logits: NDArray[np.float32]) -> None:
        """Pick a token from logits [1, V] and put it behind the chain; end it if the likeliest is not the target's."""
        place = len(self._chain)
        if self._to_target[logits[0, : len(self._to_target)].argmax()] < 0:
            self._ended = True
            return
        if place == len(self._logits):
            self._logits.append(np.full(len(self._to_draft), -np.inf, np.float32))
        theirs, ours = self._columns
        row, values = self._logits[place], logits[0, ours]
        row[theirs] = values
        try:
            token = self._sampler.pick(row, self._position + place)
        except SpecExportError as error:  # logits that are no numbers; the target may fare better
            self._warn(f"no draft, {error}")
            self._ended = True
            return
        self._sampler.push(token)
        self._chain.append(int(self._to_draft[token]))
        above, top = self._scores[-1] if place else 0.0, values.max()
        self._scores.append(above + float(row[token] - top - np.log(np.exp(values - top).sum())))

    def _warn(self, message: str) -> None:
        """Say something once a prompt."""
        if not self._warned:
            _LOG.warning("%s: %s", self.name, message)
        self._warned = True
