"""Prompt lookup: what followed the last occurrence of the sequence's own ending.

Idea: A. Saxena, prompt-lookup-decoding (2023). The n-grams of prompt and output are kept in one direct-mapped table of
positions, verified against the tokens when read, so a collision costs a missed draft and never a wrong comparison.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from specexport.runtime.drafters.base import DraftRequest, Observation
from specexport.runtime.errors import UsageError
from specexport.runtime.tree import Tree

_MULTIPLIER = 0x9E3779B1  # 2**32 / golden ratio: spreads consecutive ids


class NgramDrafter:
    """A chain that copies the continuation of the most recent occurrence of the longest matching n-gram.

    Most recent rather than earliest: text that is being edited or quoted is best predicted by its latest version (on
    SmolLM2's answers to Spec-Bench, tau 1.51 against 1.50, on its RAG part 1.88 against 1.81), and the usual objection,
    that little has followed it yet, does not hold: the copy may overlap itself as in LZ77, so a loop of period p
    continues for as many tokens as asked.

    Time: O(max_ngram) a token. Memory: 4 bytes a table slot plus 8 bytes for each of at most ``capacity`` tokens, the
    defaults under 1.1 MB. Beyond ``capacity`` the older half is forgotten.

    Args:
        vocab_size: ids at or above this are never proposed.
        max_ngram, min_ngram: lengths tried, longest first.
        max_draft: most tokens proposed.
        capacity: tokens remembered.
    """

    name = "ngram"

    def __init__(
        self,
        vocab_size: int,
        *,
        max_ngram: int = 4,
        min_ngram: int = 2,
        max_draft: int = 16,
        capacity: int = 65536,
    ) -> None:
        if not 1 <= min_ngram <= max_ngram or max_draft < 1 or capacity < 2 * max_ngram:
            raise UsageError(
                f"ngram drafter: expected 1 <= min_ngram <= max_ngram, max_draft >= 1 and capacity >= 2 max_ngram, got "
                f"min_ngram={min_ngram} max_ngram={max_ngram} max_draft={max_draft} capacity={capacity}"
            )
        self._vocab_size = vocab_size
        self._max_ngram, self._min_ngram = max_ngram, min_ngram
        self._max_draft = max_draft
        self._capacity = capacity
        slots = 1 << min(17, (capacity * (max_ngram - min_ngram + 1)).bit_length())
        self._slot_mask = slots - 1
        self._table = array("i", [-1]) * slots
        self._tokens = array("q")

    def begin(self, tokens: Sequence[int], first: int) -> None:
        """Index the prompt."""
        self._rebuild([*tokens[-(self._capacity - 1) :], first])

    def propose(self, request: DraftRequest) -> Tree:
        """The root and a chain of at most ``max_draft`` copied tokens."""
        tokens = self._tokens
        wanted = min(request.max_nodes - 1, request.max_depth, self._max_draft)
        draft = [request.root]
        if wanted > 0 and tokens and tokens[-1] == request.root:
            source = self._previous_occurrence()
            while source >= 0 and wanted > 0:
                # Past the end of the history the copy reads what it has just written.
                beyond = source - len(tokens)
                token = tokens[source] if beyond < 0 else draft[beyond + 1]
                if token >= self._vocab_size:
                    break
                draft.append(token)
                source += 1
                wanted -= 1
        return Tree.chain(draft)

    def observe(self, observation: Observation) -> None:
        """Append what was emitted."""
        if len(self._tokens) + len(observation.emitted) > self._capacity:
            self._rebuild([*self._tokens[-(self._capacity // 2) :], *observation.emitted][-self._capacity :])
            return
        for token in observation.emitted:
            self._append(token)

    def _rebuild(self, tokens: Sequence[int]) -> None:
        self._table = array("i", [-1]) * len(self._table)
        self._tokens = array("q")
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        # The n-grams that end here enter only now, when something follows them: a lookup never finds itself.
        table = self._table
        for _, slot in self._endings():
            table[slot] = len(self._tokens)
        self._tokens.append(token)

    def _endings(self) -> list[tuple[int, int]]:
        """(n, table slot) of each indexed n-gram that ends the sequence, shortest first."""
        tokens, minimum, mask = self._tokens, self._min_ngram, self._slot_mask
        found = []
        key = 0
        for length in range(1, min(self._max_ngram, len(tokens)) + 1):
            key = ((key + tokens[-length] + 1) * _MULTIPLIER) & 0xFFFFFFFF
            if length >= minimum:
                found.append((length, (key ^ key >> 15) & mask))
        return found

    def _previous_occurrence(self) -> int:
        """Position after the last earlier occurrence of the longest known ending; -1 if there is none."""
        tokens = self._tokens
        for length, slot in reversed(self._endings()):
            position = self._table[slot]
            if position >= length and tokens[position - length : position] == tokens[-length:]:
                return position
        return -1
