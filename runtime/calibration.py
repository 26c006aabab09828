"""How often a drafter's tokens are right, given how sure it said it was: what turns scores into chances.

A drafter scores each node with the log probability of the path down to it. Taken at its word it is wrong in both
directions: heads drift from their target, sampling at a temperature accepts less than greedy decoding, prompts differ.
Counting what came true corrects all of these at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp

from specexport.runtime.tree import Tree

#: Upper ends of the bins of a conditional probability; the last bin goes to 1.
EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.985)
#: Depths from here on share their counts.
DEPTHS = 4
_BINS = len(EDGES) + 1
_PRIOR = 16.0  # observations that the coarser estimate is worth, ...
_SETTLED = 6.0  # ... and those that all of the past is worth beside the last ones
_UNKNOWN = 0.7  # chance of a draft before any was seen
_MOST = 96.0  # beyond it both counts are halved: about the last 100 decisions count
_MOST_SETTLED = 2048.0  # the same of the past
_CARRIED = 0.25  # of the weight of the last decisions, into another text
# When what comes true departs from what was expected by more than chance explains, the last decisions are forgotten.
_MEMORY = 0.9  # of the departure, a decision
_LEAST, _SIGMAS = 2.0, 3.0


class Calibration:
    """Acceptance counts of one drafter by depth and stated confidence.

    Four estimates stand behind each other, each the prior of the next: the drafter's own word, the share of all
    decisions in the same bin of confidence, that share at the same depth, and the same of the last decisions alone.
    Only those are forgotten when the drafter or the text changes: what is left then is what it was worth all along,
    not its word, which errs on the side of the drafter.
    """

    def __init__(self) -> None:
        self._right = [0.0] * (_BINS * (DEPTHS + 1))
        self._tried = [0.0] * (_BINS * (DEPTHS + 1))
        self._lately_right = [0.0] * (_BINS * (DEPTHS + 1))
        self._lately_tried = [0.0] * (_BINS * (DEPTHS + 1))
        self._departure = self._variance = 0.0

    def begin(self) -> None:
        """Another text: the last decisions say less about it."""
        self._lately_right = [_CARRIED * each for each in self._lately_right]
        self._lately_tried = [_CARRIED * each for each in self._lately_tried]
        self._departure = self._variance = 0.0

    def chances(self, tree: Tree) -> list[float]:
        """Chance of each node that the path down to it is right; 1 for the root."""
        found = [1.0]
        depths = [0]
        scores = tree.scores.tolist()
        for node, parent in enumerate(tree.parents.tolist()[1:], 1):
            said = exp(min(0.0, scores[node] - scores[parent])) if scores else 0.5
            depth = depths[parent]
            depths.append(depth + 1)
            found.append(found[parent] * self._chance(said, depth))
        return found

    def learn(self, tree: Tree, emitted: Sequence[int], weight: float = 1.0) -> None:
        """Count what the emitted tokens say about a proposed tree, whether or not its nodes were verified.

        A node is decided once its parent is right: it is right itself if it carries the token that followed.

        Args:
            weight: steps that this one stands for, more than one if the drafter is seldom asked.
        """
        scores = tree.scores.tolist()
        on_path = [0] + [-1] * (len(tree) - 1)  # depth of nodes that are right, -1 for the others
        tokens = tree.tokens.tolist()
        for node, parent in enumerate(tree.parents.tolist()[1:], 1):
            depth = on_path[parent]
            if depth < 0 or depth >= len(emitted):
                continue
            right = tokens[node] == emitted[depth]
            if right:
                on_path[node] = depth + 1
            said = exp(min(0.0, scores[node] - scores[parent])) if scores else 0.5
            self._watch(self._chance(said, depth), right)
            place = _bin(said)
            below = place + _BINS * (1 + min(depth, DEPTHS - 1))
            _count(self._right, self._tried, place, right, 1.0, _MOST_SETTLED)
            _count(self._right, self._tried, below, right, 1.0, _MOST_SETTLED)
            _count(self._lately_right, self._lately_tried, below, right, weight, _MOST)

    def by_depth(self) -> list[float]:
        """Chance that some node of each depth is right, given its parent; the last holds for all deeper ones.

        Counts of nodes, so exact for chains, of which each depth has one.
        """
        shares = []
        for depth in range(1, DEPTHS + 1):
            cells = slice(_BINS * depth, _BINS * (depth + 1))
            right, tried = sum(self._right[cells]), sum(self._tried[cells])
            settled = (right + _PRIOR * _UNKNOWN) / (tried + _PRIOR)
            right, tried = sum(self._lately_right[cells]), sum(self._lately_tried[cells])
            shares.append((right + _SETTLED * settled) / (tried + _SETTLED))
        return shares

    def _chance(self, said: float, depth: int) -> float:
        place = _bin(said)
        pooled = (self._right[place] + _PRIOR * said) / (self._tried[place] + _PRIOR)
        place += _BINS * (1 + min(depth, DEPTHS - 1))
        settled = (self._right[place] + _PRIOR * pooled) / (self._tried[place] + _PRIOR)
        return (self._lately_right[place] + _SETTLED * settled) / (self._lately_tried[place] + _SETTLED)

    def _watch(self, chance: float, right: bool) -> None:
        """Forget faster when the drafter is no longer what the counts say (another prompt, temperature or target)."""
        self._departure = _MEMORY * self._departure + right - chance
        self._variance = _MEMORY * self._variance + chance * (1.0 - chance)
        if abs(self._departure) > max(_LEAST, _SIGMAS * self._variance**0.5):
            self._lately_right = [0.0] * len(self._right)
            self._lately_tried = [0.0] * len(self._tried)
            self._departure = self._variance = 0.0


def _count(rights: list[float], tries: list[float], place: int, right: bool, weight: float, most: float) -> None:
    if tries[place] >= most:
        rights[place] /= 2
        tries[place] /= 2
    tries[place] += weight
    rights[place] += weight * right


def _bin(said: float) -> int:
    for place, edge in enumerate(EDGES):
        if said < edge:
            return place
    return _BINS - 1
