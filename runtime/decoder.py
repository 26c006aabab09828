"""The speculative loop on token ids: prefill, then draft -> verify -> accept -> commit.

What is authoritative: ``_tokens`` are the committed tokens and ``_rows`` say where the cache holds them. Both change
together, after a target call has returned. Sampler and acceptance rule decide tokens, the drafter only what is tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from weakref import ReferenceType, WeakKeyDictionary, ref

import numpy as np
from numpy.typing import NDArray

from specexport.runtime.acceptance import Logprobs, match
from specexport.runtime.cache import CacheRows, common_prefix
from specexport.runtime.drafters.base import (
    CoupledDrafter,
    DecidingDrafter,
    Drafter,
    DraftRequest,
    FeatureDrafter,
    Observation,
)
from specexport.runtime.engine import Step, SummarisingEngine, TargetEngine, widest_of
from specexport.runtime.errors import UsageError
from specexport.runtime.rules import DEFAULT_RULE, SampledDrafter, find_rule
from specexport.runtime.sampling import Sampler
from specexport.runtime.statistics import RunStatistics
from specexport.runtime.stopping import FinishReason
from specexport.runtime.summary import Row, whole
from specexport.runtime.tree import Tree

_LAYOUTS_KEPT = 64
#: Which decoder's tokens an engine's cache holds; several may take turns on one engine.
_HOLDERS: WeakKeyDictionary[TargetEngine, ReferenceType[Decoder]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Block:
    """What one target call emitted.

    Attributes:
        tokens: the emitted token ids. logprobs: one entry a token if the sampling parameters ask for them, else None.
    """

    tokens: list[int]
    logprobs: list[Logprobs] | None


class Decoder:
    """One sequence on one engine; prompts follow each other and reuse the cache of a shared prefix.

    Args:
        engine: the target. It is reset here.
        drafter: what proposes; None for plain decoding.
        valid_vocab: token ids a prompt may hold are below it; None: the engine's vocabulary.
        max_nodes: widest tree, the root included.
        prefill_chunk: most prompt tokens in one call.
        acceptance: the rule that judges drafts, see :data:`specexport.runtime.rules.RULES`.
        chains: verify no branching trees, only their best paths (:meth:`~specexport.runtime.tree.Tree.trunk`).

    Raises:
        UsageError: an impossible setting, or a drafter that the target or the rule cannot serve.
    """

    def __init__(
        self,
        engine: TargetEngine,
        drafter: Drafter | None = None,
        *,
        valid_vocab: int | None = None,
        max_nodes: int = 8,
        prefill_chunk: int = 256,
        acceptance: str = DEFAULT_RULE,
        chains: bool = False,
    ) -> None:
        if max_nodes < 1 or prefill_chunk < 1:
            raise UsageError(f"expected max_nodes >= 1 and prefill_chunk >= 1, got {max_nodes} and {prefill_chunk}")
        self._engine = engine
        self._run_rows = engine.run_rows if isinstance(engine, SummarisingEngine) else engine.run
        self._widest = widest_of(engine)
        self.drafter = drafter
        self.acceptance = acceptance
        self._chains = chains
        self._rule = find_rule(acceptance, drafter)
        self._absorb = drafter.absorb if isinstance(drafter, FeatureDrafter) else None
        self._deciding = drafter if isinstance(drafter, DecidingDrafter) else None
        if drafter and self._absorb and not engine.features_size:
            raise UsageError(
                f"drafter {drafter.name} needs features, which the target graph does not give: build again"
            )
        self._valid_vocab = engine.vocab_size if valid_vocab is None else valid_vocab
        self._max_nodes = max_nodes
        self._prefill_chunk = min(prefill_chunk, engine.slots)
        self._chunk_mask = np.tri(self._prefill_chunk, dtype=bool)
        self._count = np.arange(max(engine.slots, max_nodes), dtype=np.int64)
        self._run = 0
        self._exhausted: FinishReason = "length"
        self._layouts: dict[bytes, tuple[NDArray[np.bool_], NDArray[np.int64]]] = {}
        self.forget()

    @property
    def committed(self) -> list[int]:
        """The committed tokens, oldest first (a copy)."""
        return list(self._tokens)

    @property
    def rows(self) -> CacheRows:
        """Where the cache holds them."""
        return self._rows

    def forget(self) -> None:
        """Empty the cache."""
        _HOLDERS[self._engine] = ref(self)
        self._engine.reset()
        self._rows = CacheRows()
        self._tokens: list[int] = []

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Refuse a prompt that cannot be decoded.

        Raises:
            UsageError: it is empty, longer than the context, or holds an id outside the vocabulary.
        """
        if not len(prompt):
            raise UsageError("the prompt is empty: at least one token is needed (most models have a BOS token)")
        if len(prompt) > self._engine.slots:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens and the context {self._engine.slots}: shorten it or build the "
                "bundle with a larger context"
            )
        if min(prompt) < 0 or max(prompt) >= self._valid_vocab:
            wrong = next(token for token in prompt if not 0 <= token < self._valid_vocab)
            raise UsageError(f"prompt token {wrong} is outside the vocabulary: expected 0 to {self._valid_vocab - 1}")

    def decode(
        self,
        prompt: Sequence[int],
        sampler: Sampler,
        *,
        max_tokens: int | None,
        stop: Callable[[int], bool],
        cancelled: Callable[[], bool],
        statistics: RunStatistics,
    ) -> Iterator[Block]:
        """Generate after ``prompt``, one block a target call, until something ends it.

        Whenever the iterator is suspended, closed or exhausted the committed tokens and the cache agree, so another
        ``decode`` may follow; it ends this one. An exception out of the engine or a drafter empties the cache.

        Args:
            max_tokens: most tokens; None: as many as the context holds.
            stop: asked once for each emitted token, in order; true makes it the last.
            cancelled: asked before each target call.
            statistics: filled in, ``finish_reason`` included (``"stop"`` for whatever made ``stop`` say so).

        Raises:
            UsageError: see :meth:`check_prompt`; or ``max_tokens`` below 1; or another ``decode`` has begun since.
        """
        self.check_prompt(prompt)
        prompt = [int(token) for token in prompt]
        # Every token but the last must have a row of its own to be followed by another.
        budget, self._exhausted = self._engine.slots + 1 - len(prompt), "context"
        if max_tokens is not None:
            if max_tokens < 1:
                raise UsageError(f"max_tokens is {max_tokens}, expected at least 1")
            if max_tokens <= budget:
                budget, self._exhausted = max_tokens, "length"
        statistics.drafter = self.drafter.name if self.drafter else "none"
        statistics.acceptance, statistics.lossy = self.acceptance, self._rule.lossy
        statistics.prompt_tokens = len(prompt)
        self._take_engine()
        self._run = run = self._run + 1
        try:
            start = perf_counter()
            row = self._prefill(prompt, cancelled, statistics)
            if row is None:
                statistics.finish_reason = "cancelled"
                return
            sampler.begin(prompt)
            root_only = Tree.chain([prompt[-1]])
            accepted = match(root_only, lambda _: row, sampler, len(prompt) - 1, limit=1, stop=stop)
            root = accepted.tokens[0]
            statistics.tokens = 1
            statistics.prefill_s = perf_counter() - start
            statistics.first_token_s += statistics.prefill_s
            statistics.finish_reason = self._finish(accepted.stopped, budget - 1)
            yield Block(accepted.tokens, accepted.logprobs)
            if statistics.finish_reason:
                return
            self._check_newest(run)
            begun = perf_counter()
            if isinstance(self.drafter, SampledDrafter):
                self.drafter.begin_sampling(sampler.params)
            if isinstance(self.drafter, CoupledDrafter):
                self.drafter.couple(sampler.params if self._rule.couples else None)
            if self.drafter:
                self.drafter.begin(prompt, root)
            statistics.draft_s = statistics.decode_s = perf_counter() - begun
            while not statistics.finish_reason:
                self._check_newest(run)
                if cancelled():
                    statistics.finish_reason = "cancelled"
                    return
                block = self._step(root, sampler, budget - statistics.tokens, stop, statistics)
                root = block.tokens[-1]
                yield block
        except GeneratorExit:
            raise
        except BaseException:
            if self._is_newest(run):
                self.forget()
            raise

    def _prefill(self, prompt: Sequence[int], cancelled: Callable[[], bool], statistics: RunStatistics) -> Row | None:
        """Commit the prompt in chunks; the logits of its last token, or None if cancelled in between."""
        # The last token is computed in any case: its logits are needed.
        shared = common_prefix(self._tokens, prompt[:-1])
        if self._absorb:
            # A drafter joins the features of a token with the token after it, and that one may be new.
            shared = max(0, shared - 1)
        self._rows = self._rows.keep(shared)
        del self._tokens[shared:]
        statistics.reused_tokens = shared
        row: Row | None = None
        for first in range(shared, len(prompt), self._prefill_chunk):
            if cancelled():
                return None
            chunk = prompt[first : first + self._prefill_chunk]
            size = len(chunk)
            full = size == self._prefill_chunk
            mask = self._chunk_mask if full else np.ascontiguousarray(self._chunk_mask[:size, :size])
            positions = self._count[first : first + size]
            row = self._call(np.array(chunk, np.int64), positions, mask, self._count[size - 1 : size])[0]
            self._accept(range(size), chunk)
            statistics.prefill_calls += 1
        return row

    def _step(
        self, root: int, sampler: Sampler, budget: int, stop: Callable[[int], bool], statistics: RunStatistics
    ) -> Block:
        """Draft, verify, accept, commit; ``budget`` tokens may still be emitted."""
        start = perf_counter()
        past = self._rows.past
        nodes = min(self._max_nodes, self._widest(past))
        if self.drafter and nodes > 1 and budget > 1:
            tree = self.drafter.propose(DraftRequest(root, nodes, budget - 1)).pruned(nodes)
            if self._chains:
                tree = tree.trunk()
            if tree.tokens[0] != root:
                raise ValueError(f"drafter {self.drafter.name} changed the root {root} to {int(tree.tokens[0])}")
        else:
            tree = Tree.chain([root])
        drafted = perf_counter()
        asked = self._deciding.asked if self._deciding else None
        mask, depths = self._layout(tree)
        size = len(tree)
        ready = perf_counter()
        logits = self._call(tree.tokens, depths + past, mask, self._count[:size])
        verified = perf_counter()
        accepted = self._rule.accept(tree, logits.__getitem__, sampler, past, limit=budget, stop=stop)
        emitted, path = accepted.tokens, accepted.path
        self._accept(path, tree.tokens[path].tolist())
        matched = perf_counter()
        if self.drafter:
            self.drafter.observe(Observation(emitted, tree, path, lambda node: whole(logits[node]), verified - ready))
        observed = perf_counter()
        statistics.add_call(tree, path, emitted, asked)
        statistics.finish_reason = self._finish(accepted.stopped, budget - len(emitted))
        statistics.draft_s += drafted - start + observed - matched
        statistics.verify_s += verified - ready
        statistics.decode_s += perf_counter() - start
        return Block(emitted, accepted.logprobs)

    def _call(
        self,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        mask: NDArray[np.bool_],
        select: NDArray[np.int64],
    ) -> Sequence[Row] | NDArray[np.float32]:
        rows = self._rows
        return self._run_rows(Step(tokens, positions, mask, rows.past, rows.write, rows.commit_array, select))

    def _accept(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        if self._absorb:
            features = self._engine.features()
            # A path without branches is a slice; only others need a copy.
            chosen = features[: len(path)] if path[-1] == len(path) - 1 else features[list(path)]
            self._absorb(len(self._tokens), tokens, chosen)
        self._rows = self._rows.accept(path)
        self._tokens.extend(tokens)

    def _layout(self, tree: Tree) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
        """Mask and depths of a tree. Shapes repeat (chains, static trees), so a bounded number is kept."""
        key = tree.parents.tobytes()
        layout = self._layouts.get(key)
        if layout is None:
            if len(self._layouts) >= _LAYOUTS_KEPT:
                self._layouts.clear()
            layout = self._layouts[key] = tree.mask(), tree.depths()
        return layout

    def _take_engine(self) -> None:
        """Make the engine's cache ours; what another decoder left in it is not what we remember."""
        holder = _HOLDERS.get(self._engine)
        if holder is None or holder() is not self:
            self._rows, self._tokens = CacheRows(), []
            _HOLDERS[self._engine] = ref(self)

    def _is_newest(self, run: int) -> bool:
        holder = _HOLDERS.get(self._engine)
        return run == self._run and holder is not None and holder() is self

    def _check_newest(self, run: int) -> None:
        if not self._is_newest(run):
            raise UsageError("this generation was ended by a newer one: an engine decodes one sequence at a time")

    def _finish(self, stopped: bool, budget: int) -> FinishReason | None:
        if stopped:
            return "stop"
        return self._exhausted if budget < 1 else None
