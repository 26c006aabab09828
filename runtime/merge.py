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


def join(drafts: Sequence[Draft], root: int, max_depth: int) -> Joined:
    """Join trees that share their root; nodes deeper than ``max_depth`` and nodes without a chance are left out.

    A node that several drafts propose has the best of their chances. Of equal chances the node that came first wins,
    in the order of the drafts, so a parent always stands before its children.
    """
    number: dict[tuple[int, int], int] = {}
    tokens, parents, chances, depths = [root], [-1], [1.0], [0]
    for draft in drafts:
        place = [0]
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
                chances.append(chance)
                depths.append(depths[above] + 1)
            elif chance > chances[found]:
                chances[found] = chance
    order = sorted(range(len(tokens)), key=lambda node: -chances[node])
    moved = [0] * len(tokens)
    for new, old in enumerate(order):
        moved[old] = new
    return Joined(
        [tokens[node] for node in order],
        [-1 if node == 0 else moved[parents[node]] for node in order],
        [chances[node] for node in order],
    )
