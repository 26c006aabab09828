"""A draft model: a second, smaller target of the bundle that writes ahead greedily (Leviathan et al. 2023, arXiv
2211.17192; Chen et al. 2023, arXiv 2302.01318).

Its cache holds the committed sequence and, behind it, what it drafted last. Accepted drafts are rows that are valid
already; rejected ones are forgotten by counting fewer rows. So a step costs one call a draft, and none of a prompt's
tokens is ever computed twice.

The two vocabularies may differ: a table gives the target's id of each of the draft model's. The draft model does not
see tokens for which it has no id, and ends a draft where the target has none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specexport.runtime.bundle import Bundle
from specexport.runtime.cache import common_prefix
from specexport.runtime.drafters.base import DraftRequest, Observation
from specexport.runtime.engine import TargetEngine
from specexport.runtime.errors import BundleError
from specexport.runtime.manifest import DrafterInfo
from specexport.runtime.tree import Tree

_LOG = logging.getLogger(__name__)
_NOTHING = np.zeros(0, np.int64)
#: Longest draft that a manifest may ask for.
MAX_DEPTH = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of a :class:`~specexport.runtime.manifest.DrafterInfo` of kind ``model``.

    Attributes:
        depth: most tokens of a draft. slots: cache rows, its context. vocab_size: width of a row of its logits.
        valid_vocab: ids below it are drafted; without ``vocabulary`` they are the target's own ids.
        vocabulary: file of the table of ids: little-endian int32 [valid_vocab], the target's id or -1 for none.
        architecture, source, revision, fingerprint: where it came from. cache_bytes: size of its caches.
    """

    depth: int
    slots: int
    vocab_size: int
    valid_vocab: int
    vocabulary: str | None
    architecture: str
    source: str
    revision: str | None
    fingerprint: str
    cache_bytes: int

    def __post_init__(self) -> None:
        bounds = {"depth": MAX_DEPTH, "slots": 1 << 24, "vocab_size": 1 << 24, "valid_vocab": self.vocab_size}
        for name, high in bounds.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= high:
                raise BundleError(f"draft model: {name} is {value!r}, expected an integer from 1 to {high}")


class ModelDrafter:
    """Proposes a chain of greedy tokens.

    Args:
        engine: the draft model, whose caches are this drafter's alone.
        to_target: int64 [n], the target's id of each id that may be drafted, -1 for none.
        target_vocab: ids of the target are below it.
        depth: most tokens of a draft. prefill_chunk: most tokens in one call.
    """

    kind = "model"

    def __init__(
        self,
        engine: TargetEngine,
        to_target: NDArray[np.int64],
        target_vocab: int,
        *,
        depth: int,
        prefill_chunk: int = 256,
        name: str = kind,
    ) -> None:
        self.name = name
        #: Widest useful tree, the root included.
        self.max_nodes = depth + 1
        self._engine, self._depth = engine, depth
        self._to_target = to_target
        shared = np.flatnonzero(to_target >= 0)
        self._to_draft = np.full(target_vocab, -1, np.int64)
        self._to_draft[to_target[shared]] = shared
        self._causal = np.tri(min(prefill_chunk, engine.slots), dtype=bool)
        # All ids below are the draft model's. The first _rows of _known + _chain are in its cache.
        self._rows = 0
        self._known: list[int] = []  # the sequence, the root included
        self._chain: list[int] = []  # what follows it, as far as drafted since it last grew
        self._scores: list[float] = []  # log probability of the chain up to each
        self._ended = False  # by a token that the target does not have
        self._warned = False

    def begin(self, tokens: Sequence[int], first: int) -> None:
        """Prefill the prompt, except what it shares with the cache."""
        known = self._translated([*tokens, first])
        shared = common_prefix((self._known + self._chain)[: self._rows], known[:-1])
        self._restart(known, shared)
        self._warned = False
        if self._room > 0 and len(known) > shared + 1:
            self._append(known[shared:-1])

    def observe(self, observation: Observation) -> None:
        """Keep the rows of the drafts that came true."""
        emitted = self._translated(observation.emitted)
        kept = len(self._known) + common_prefix(self._chain, emitted)
        known = self._known + emitted
        # The root's row is computed again in any case: its logits are needed.
        self._restart(known, max(0, min(self._rows, kept, len(known) - 1)))

    def propose(self, request: DraftRequest) -> Tree:
        """The root and what the draft model writes after it; the root alone past its context."""
        wanted = min(request.max_nodes - 1, request.max_depth, self._depth)
        if self._room < 1 and wanted > 0 and not self._warned:
            self._warned = True
            _LOG.warning("%s: past its context of %d tokens, decoding plainly", self.name, self._engine.slots)
        if not self._known or self._to_draft[request.root] < 0:
            return Tree.chain([request.root])
        wanted = min(wanted, self._room)
        while len(self._chain) < wanted and not self._ended:
            beyond = self._rows - len(self._known)
            self._extend(self._append(self._known[self._rows :] if beyond < 0 else self._chain[beyond:]))
        length = max(0, min(wanted, len(self._chain)))
        return Tree(
            np.array([request.root, *self._to_target[self._chain[:length]]], np.int64),
            np.arange(-1, length, dtype=np.int64),
            np.array([0.0, *self._scores[:length]], np.float32),
        )

    @property
    def _room(self) -> int:
        """Drafts that fit behind the sequence; the last one needs no row."""
        return self._engine.slots + 1 - len(self._known)

    def _translated(self, tokens: Iterable[int]) -> list[int]:
        """Ids of the draft model, without the tokens that it does not have."""
        ids = self._to_draft[np.fromiter(tokens, np.int64)]
        found: list[int] = ids[ids >= 0].tolist()
        return found

    def _restart(self, known: list[int], rows: int) -> None:
        self._known, self._rows = known, rows
        self._chain, self._scores, self._ended = [], [], False

    def _append(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Run tokens behind the cached rows; the logits [1, V] after the last, a view that the next call overwrites."""
        for first in range(0, len(tokens), len(self._causal)):
            part = np.array(tokens[first : first + len(self._causal)], np.int64)
            size, past = len(part), self._rows
            mask = np.ascontiguousarray(self._causal[:size, :size])
            last = np.array([size - 1], np.int64)
            logits = self._engine.run(part, np.arange(past, past + size), mask, past, past, _NOTHING, last)
            self._rows += size
        return logits

    def _extend(self, logits: NDArray[np.float32]) -> None:
        """Put the best token behind the chain, if the target has it."""
        row = logits[0, : len(self._to_target)]
        best = int(row.argmax())
        if self._to_target[best] < 0:
            self._ended = True
            return
        above = self._scores[-1] if self._scores else 0.0
        self._chain.append(best)
        self._scores.append(above - float(np.log(np.exp(row - row[best]).sum())))


def open_model(info: DrafterInfo, bundle: Bundle, engine: TargetEngine) -> ModelDrafter:
    """The draft model of a bundle, on the target's device.

    Raises:
        BundleError: options that are missing or out of bounds, or files that disagree with them.
        TypeError: options that are missing or unknown.
    """
    options = ModelOptions(**info.options)  # type: ignore[arg-type]
    target = bundle.manifest.target
    model = engine.open_target(str(info.graph))
    if (model.vocab_size, model.slots) != (options.vocab_size, options.slots):
        raise BundleError(
            f"{info.graph} has vocabulary {model.vocab_size} and {model.slots} cache rows, expected "
            f"{options.vocab_size} and {options.slots} by the manifest: build the bundle again"
        )
    return ModelDrafter(
        model,
        _vocabulary(bundle, options),
        target.valid_vocab,
        depth=options.depth,
        prefill_chunk=target.prefill_chunk,
        name=info.name,
    )


def _vocabulary(bundle: Bundle, options: ModelOptions) -> NDArray[np.int64]:
    count, ids = options.valid_vocab, bundle.manifest.target.valid_vocab
    if options.vocabulary is None:
        return np.arange(min(count, ids), dtype=np.int64)
    path = bundle.file(str(options.vocabulary))
    if (size := bundle.manifest.files[str(options.vocabulary)].bytes) != 4 * count:
        raise BundleError(f"{options.vocabulary} has {size} bytes, expected 4 for each of {count} ids")
    table = np.frombuffer(path.read_bytes(), "<i4").astype(np.int64)
    if len(table) != count or table.min() < -1 or table.max() >= ids:
        raise BundleError(f"{options.vocabulary} is damaged: expected ids from -1 to {ids - 1}")
    return table
