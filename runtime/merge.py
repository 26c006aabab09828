"""Several drafters' trees as one: what each proposes, joined where they agree, cut to what is worth verifying.

A pure function of the drafts. A long copied match and a head's tree share a prefix where they agree and stand side by
side where they do not, which a verification call judges at once (EAGLE-style trees, Li et al. 2024, with retrieved
continuations grafted beside them as in SAM-Decoding, Hu et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specexport.runtime.tree import Tree

#: How much of what another drafter says speaks against a draft: two err together about half of the time (a suffix
#: lookup and an EAGLE-3 head on SmolLM2: where they agree 0.87 are right, the lookup's 0.51 drop to 0.44 where not).
AGAINST = 0.5


@dataclass(frozen=True, slots=True)
class Draft:
    """One drafter's tree with the chance, from 0 to 1, that the path down to each node is right.

    ``chances[0]`` is 1; a node's chance is at most its parent's.
    """

    tree: Tree
    chances: Sequence[float]


@dataclass(frozen=True, slots=True)
class Joined:
    """The joined nodes, surest first, so that every prefix is the best tree of its size.

    Attributes:
        tokens, parents, chances: of each node; node 0 is the root.
    """

    tokens: list[int]
    parents: list[int]
    chances: list[float]

    def first(self, size: int) -> Joined:
        """The first nodes alone."""
        return Joined(self.tokens[:size], self.parents[:size], self.chances[:size])

    def tokens_of(self, emitted: Sequence[int]) -> int:
        """How many of these tokens a step that verifies it would have emitted."""
        at, right = 0, 0
        for token in emitted:
            right += 1
            nodes = range(at + 1, len(self.tokens))
            found = next((node for node in nodes if self.parents[node] == at and self.tokens[node] == token), None)
            if found is None:
                break
            at = found
        return right

    def trunk(self) -> Joined:
        """The path of the surest nodes alone."""
        path = [0]
        for node in range(1, len(self.tokens)):  # surest first: the first child that comes is the best
            if self.parents[node] == path[-1]:
                path.append(node)
        return Joined(
            [self.tokens[node] for node in path],
            list(range(-1, len(path) - 1)),
            [self.chances[node] for node in path],
        )

    def tree(self, size: int) -> Tree:
        """The best tree of at most ``size`` nodes; its scores are log chances."""
        chances = np.array(self.chances[:size], np.float32)
        return Tree(np.array(self.tokens[:size], np.int64), np.array(self.parents[:size], np.int64), np.log(chances))


def _weigh(siblings: Sequence[int], known: int, mine: dict[int, float], given: list[float]) -> None:
    """Let one draft's chances of some siblings meet those that are given to the siblings below ``known``."""
    before = sum(given[node] for node in siblings if node < known)
    total = sum(mine.values())
    for node in siblings:
        own = mine.get(node)
        if own is None:
            given[node] = _against(given[node], total)
        elif node < known:
            given[node] = 1.0 - (1.0 - given[node]) * (1.0 - own)
        else:
            given[node] = _against(own, before)


def _against(chance: float, others: float) -> float:
    """A chance that another drafter speaks against, with these chances of what it has instead."""
    others = AGAINST * min(others, 1.0)
    return chance * (1.0 - others) / (1.0 - chance * others)


def join(drafts: Sequence[Draft], root: int, max_depth: int) -> Joined:
    """Join trees that share their root; nodes deeper than ``max_depth`` and nodes without a chance are left out.

    Drafters that agree on what follows a node are right more often than either, and of those that do not each is right
    less often. Given that the parent is right, a node that two propose with chances c and d gets 1 - (1 - c)(1 - d);
    one that another drafter passes over for siblings of chance m together gets c (1 - m') / (1 - c m') with m' a share
    of m: all of it if they erred independently of each other, see :data:`AGAINST`. Of equal chances the node that came
    first wins, in the order of the drafts, so a parent always stands before its children.
    """
    number: dict[tuple[int, int], int] = {}
    tokens, parents, given, depths = [root], [-1], [1.0], [0]
    children: list[list[int]] = [[]]
    for draft in drafts:
        known, place = len(tokens), [0]
        said: dict[int, dict[int, float]] = {}  # by node: chances of its children
        nodes = zip(draft.tree.tokens.tolist(), draft.tree.parents.tolist(), draft.chances, strict=True)
        next(nodes)
        for token, parent, chance in nodes:
            above = place[parent]
            if above < 0 or chance <= 0.0 or depths[above] == max_depth:
                place.append(-1)
                continue
            found = number.setdefault((above, token), len(tokens))
            place.append(found)
            if found == len(tokens):
                tokens.append(token)
                parents.append(above)
                given.append(0.0)
                depths.append(depths[above] + 1)
                children.append([])
                children[above].append(found)
            mine = said.setdefault(above, {})
            mine[found] = max(chance / draft.chances[parent], mine.get(found, 0.0))
        for above, mine in said.items():
            _weigh(children[above], known, mine, given)
    chances = [1.0]
    for node in range(1, len(tokens)):
        chances.append(chances[parents[node]] * given[node])
    order = sorted(range(len(tokens)), key=lambda node: -chances[node])
    moved = [0] * len(tokens)
    for new, old in enumerate(order):
        moved[old] = new
    return Joined(
        [tokens[node] for node in order],
        [-1 if node == 0 else moved[parents[node]] for node in order],
        [chances[node] for node in order],
    )
