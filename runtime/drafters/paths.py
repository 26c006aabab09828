"""Rank paths: a tree described by "take the r-th best at each depth", before any token is known."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from specexport.runtime.errors import UsageError

#: Ranks from the root's child down to a node.
Path = tuple[int, ...]
#: (parent, rank, depth from 1) of a node; parent 0 is the root, and node i of a list is number i + 1.
Node = tuple[int, int, int]


def best_paths(nodes: int, max_depth: int, chance: Callable[[int, int], float], ranks: int) -> list[Node]:
    """The ``nodes`` most probable rank paths below a root, most probable first, so that every prefix is a best tree.

    Args:
        chance: probability that the token of (depth from 0, rank) is right, given that its parent is; falls with rank.
        ranks: ranks at a depth.
    """
    # A heap of candidates by falling probability: each taken node offers its first child and its next sibling.
    heap = [(-chance(0, 0), 0, 0, 1, 1.0)] if max_depth > 0 else []
    taken: list[Node] = []
    while heap and len(taken) < nodes:
        score, parent, rank, depth, above = heapq.heappop(heap)
        taken.append((parent, rank, depth))
        if depth < max_depth:
            heapq.heappush(heap, (score * chance(depth, 0), len(taken), 0, depth + 1, -score))
        if rank + 1 < ranks:
            heapq.heappush(heap, (-above * chance(depth - 1, rank + 1), parent, rank + 1, depth, above))
    return taken


def template(paths: Sequence[Path], depths: int, ranks: int) -> list[Node]:
    """The nodes of a static tree, sorted by depth and then by ranks.

    Raises:
        UsageError: a path that is repeated, whose parent is not there, or that is deeper or wider than the drafter.
    """
    number: dict[Path, int] = {(): 0}
    found: list[Node] = []
    for path in sorted((tuple(path) for path in paths), key=lambda path: (len(path), path)):
        shown = list(path)
        if not path or len(path) > depths or not all(0 <= rank < ranks for rank in path):
            raise UsageError(f"tree path {shown}: expected 1 to {depths} ranks, each from 0 to {ranks - 1}")
        if path in number:
            raise UsageError(f"tree path {shown} occurs twice")
        if path[:-1] not in number:
            raise UsageError(f"tree path {shown} has no parent {shown[:-1]}: a tree needs every ancestor of a node")
        number[path] = len(number)
        found.append((number[path[:-1]], path[-1], len(path)))
    return found
