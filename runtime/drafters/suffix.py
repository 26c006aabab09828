"""Suffix automaton over prompt and output (idea: SAM-Decoding, Hu et al. 2024, arXiv 2411.10666).

The automaton of a text recognises all its substrings in at most 2n states and 3n edges, and grows one token at a time
in amortised constant time (Blumer et al. 1985). The state that the newest state links to is the longest ending of the
text that occurred before: the current match, with no search.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import log

import numpy as np

from specexport.runtime.drafters.base import DraftRequest, Observation
from specexport.runtime.errors import UsageError
from specexport.runtime.tree import Tree

_MULTIPLIER = 0x9E3779B1  # 2**32 / golden ratio: spreads consecutive keys
_LINKS_REFRESHED = 8

#: Chance that the next copied token is right after 1, 2, ... agreeing tokens, before anything was seen.
PRIOR = (0.3, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9)
_PRIOR_WEIGHT = 8.0  # in observations
_MOST_WEIGHT = 128.0  # then both counts are halved, so that the chances follow the text


class SuffixAutomaton:
    """The automaton in flat arrays: per state length, link, edge list and an end position; edges in one hash table.

    Memory: 16 bytes a state, 16 an edge, 4 a hash slot and 8 a token, allocated here for the worst text of ``capacity``
    tokens: 104 to 120 bytes each.

    Args:
        capacity: most tokens it can hold.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        states, edges = 2 * capacity + 1, 3 * capacity + 1
        self._length = array("i", [0]) * states
        self._link = array("i", [-1]) * states
        self._end = array("i", [-1]) * states  # position after one earlier occurrence, a recent one
        self._edges = array("i", [-1]) * states  # head of the state's edge list: clones copy it
        self._edge_source = array("i", [0]) * edges
        self._edge_token = array("i", [0]) * edges
        self._edge_target = array("i", [0]) * edges
        self._edge_next = array("i", [-1]) * edges
        self._slots = array("i", [-1]) * (1 << (edges + edges // 3).bit_length())
        self.tokens = array("q")
        self.clear()

    def clear(self) -> None:
        """Forget everything; nothing is reallocated but the hash slots and the token list."""
        self._slots = array("i", [-1]) * len(self._slots)
        self.tokens = array("q")
        self._state_count, self._edge_count = 1, 0
        self._edges[0] = -1
        self._last = 0

    def match(self) -> tuple[int, int]:
        """The longest ending that occurred before: its length and the position after that; (0, -1) if there is none."""
        state = self._link[self._last]
        if state <= 0:
            return 0, -1
        return self._length[state], self._end[state]

    def append(self, token: int) -> None:
        """Add one token: amortised constant time."""
        length, link, end = self._length, self._link, self._end
        position = len(self.tokens)
        # The endings of the text so far have a continuation from now on, so they become the most recent occurrence.
        # The walk is cut: a periodic text has links as long as itself, and any earlier end is also a true occurrence.
        state = link[self._last]
        for _ in range(_LINKS_REFRESHED):
            if state <= 0:
                break
            end[state] = position
            state = link[state]
        self.tokens.append(token)
        new = self._new_state(position + 1, position + 1)
        state = self._last
        slot = 0
        while state >= 0 and (slot := self._find(state, token)) < 0:
            self._add_edge(~slot, state, token, new)
            state = link[state]
        if state < 0:
            link[new] = 0
        else:
            edge = self._slots[slot]
            target = self._edge_target[edge]
            if length[state] + 1 == length[target]:
                link[new] = target
            else:
                link[new] = self._split(state, token, target)
                link[target] = link[new]
        self._last = new

    def _split(self, state: int, token: int, target: int) -> int:
        """A clone of ``target`` for its occurrences after ``state``; returns the clone."""
        clone = self._new_state(self._length[state] + 1, self._end[target])
        self._link[clone] = self._link[target]
        edge = self._edges[target]
        while edge >= 0:
            label = self._edge_token[edge]
            self._add_edge(~self._find(clone, label), clone, label, self._edge_target[edge])
            edge = self._edge_next[edge]
        while state >= 0 and (slot := self._find(state, token)) >= 0:
            edge = self._slots[slot]
            if self._edge_target[edge] != target:
                break
            self._edge_target[edge] = clone
            state = self._link[state]
        return clone

    def _new_state(self, length: int, end: int) -> int:
        state = self._state_count
        self._state_count += 1
        self._length[state] = length
        self._end[state] = end
        self._edges[state] = -1
        return state

    def _find(self, state: int, token: int) -> int:
        """Hash slot of the edge, or ``~slot`` of the free slot where it belongs."""
        slots, source, labels = self._slots, self._edge_source, self._edge_token
        mask = len(slots) - 1
        key = ((state * _MULTIPLIER ^ token) * _MULTIPLIER) & 0xFFFFFFFF
        slot = (key ^ key >> 15) & mask
        while (edge := slots[slot]) >= 0:
            if source[edge] == state and labels[edge] == token:
                return slot
            slot = (slot + 1) & mask
        return ~slot

    def _add_edge(self, slot: int, state: int, token: int, target: int) -> None:
        edge = self._edge_count
        self._edge_count += 1
        self._slots[slot] = edge
        self._edge_source[edge] = state
        self._edge_token[edge] = token
        self._edge_target[edge] = target
        self._edge_next[edge] = self._edges[state]
        self._edges[state] = edge


class SuffixDrafter:
    """A chain that copies what followed the longest ending of the sequence that occurred before.

    The longer the match, the surer the copy, so the draft's length follows from the match: how often the next token of
    a copy was right is counted by the length that agreed so far (a drafted token counts as agreed), and the chain
    ends where the product of these chances falls below ``min_probability``. The counts start from a prior and go on
    through all prompts; every emitted token adds to them, drafted or not. Of the occurrences the most recent known
    one is copied, and the copy may overlap itself (a loop continues for as long as asked).

    Time: amortised constant a token. Memory: under 2 MB at the default ``capacity``, allocated once; beyond it the
    automaton is rebuilt from the last half.

    Args:
        vocab_size: ids at or above this are never proposed.
        min_match: shortest match that is worth a draft.
        min_probability: a token is drafted while the chance that the chain up to it is right is at least this. A node
            pays where its chance exceeds its share of a step's cost times the tokens a step yields.
        max_draft: most tokens proposed.
        capacity: tokens remembered.
    """

    name = "suffix"

    def __init__(
        self,
        vocab_size: int,
        *,
        min_match: int = 1,
        min_probability: float = 0.12,
        max_draft: int = 24,
        capacity: int = 16384,
    ) -> None:
        if min_match < 1 or not 0 <= min_probability < 1 or max_draft < 1 or capacity < 2:
            raise UsageError(
                f"suffix drafter: expected min_match >= 1, 0 <= min_probability < 1, max_draft >= 1 and capacity >= 2, "
                f"got min_match={min_match} min_probability={min_probability} max_draft={max_draft} capacity={capacity}"
            )
        self._vocab_size = vocab_size
        self._min_match = min_match
        self._min_probability = min_probability
        self._max_draft = max_draft
        self._automaton = SuffixAutomaton(capacity)
        self._right = [chance * _PRIOR_WEIGHT for chance in PRIOR]
        self._tried = [_PRIOR_WEIGHT] * len(PRIOR)

    def begin(self, tokens: Sequence[int], first: int) -> None:
        """Read the prompt."""
        self._rebuild([*tokens[-(self._automaton.capacity - 1) :], first])

    def propose(self, request: DraftRequest) -> Tree:
        """The root and a chain that is as long as its match deserves, scored."""
        draft, scores = [request.root], [0.0]
        length, source = self._automaton.match()
        if length >= self._min_match and self._automaton.tokens[-1] == request.root:
            chance = 1.0
            for depth in range(min(request.max_nodes - 1, request.max_depth, self._max_draft)):
                agreed = min(length + depth, len(PRIOR)) - 1
                chance *= self._right[agreed] / self._tried[agreed]
                token = self._copied(source + depth, draft)
                if chance < self._min_probability or token >= self._vocab_size:
                    break
                draft.append(token)
                scores.append(log(chance))
        size = len(draft)
        return Tree(np.array(draft, np.int64), np.arange(-1, size - 1, dtype=np.int64), np.array(scores, np.float32))

    def observe(self, observation: Observation) -> None:
        """Learn how far the copy was right, then append what was emitted."""
        automaton, emitted = self._automaton, observation.emitted
        length, source = automaton.match()
        if length:
            self._learn(length, source, emitted)
        if len(automaton.tokens) + len(emitted) > automaton.capacity:
            kept = [*automaton.tokens[-(automaton.capacity // 2) :], *emitted]
            self._rebuild(kept[-automaton.capacity :])
            return
        for token in emitted:
            automaton.append(token)

    def _learn(self, length: int, source: int, emitted: Sequence[int]) -> None:
        copied = [self._automaton.tokens[-1]]
        for depth, token in enumerate(emitted):
            agreed = min(length + depth, len(PRIOR)) - 1
            copied.append(self._copied(source + depth, copied))
            if self._tried[agreed] >= _MOST_WEIGHT:
                self._right[agreed] /= 2
                self._tried[agreed] /= 2
            self._tried[agreed] += 1
            if copied[-1] != token:
                break
            self._right[agreed] += 1

    def _copied(self, position: int, draft: Sequence[int]) -> int:
        """Token at a position of the text with ``draft`` written on from its last token."""
        tokens = self._automaton.tokens
        beyond = position - len(tokens)
        return tokens[position] if beyond < 0 else draft[beyond + 1]

    def _rebuild(self, tokens: Sequence[int]) -> None:
        self._automaton.clear()
        for token in tokens:
            self._automaton.append(token)
