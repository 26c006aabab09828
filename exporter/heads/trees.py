"""Shapes of draft trees: dynamic ones by their sizes, static ones by their rank paths; the usual static ones by name.

A rank path says which of a node's best continuations to take at each depth from the root: (0, 2) is the third best
continuation of the root's best. Paths are facts of the methods they come from, found there by measuring acceptance.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path as FilePath

from specexport.runtime.drafters.paths import Node, Path, template
from specexport.runtime.errors import UsageError


def _paths(text: str) -> tuple[Path, ...]:
    """Paths from words of digits: ``02`` is (0, 2). All ranks of the usual trees are below 10."""
    return tuple(tuple(int(rank) for rank in word) for word in text.split())


#: Usual static trees by name, each sorted by depth and then by ranks, as their nodes are numbered.
TREES: dict[str, tuple[Path, ...]] = {
    # Medusa's 63 nodes (Cai et al. 2024, arXiv 2401.10774): ``mc_sim_7b_63`` of github.com/FasterDecoding/Medusa.
    "medusa": _paths(
        """
        0 1 2 3 4 5 6 7 8 9
        00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 15 16 20 21 22 30 31 40 50 60 70 80 90
        000 001 002 003 004 005 006 007 008 009 010 011 012 020 021 030 040 050 060 070 100 101 200
        0000 0001
        """
    ),
    # EAGLE-1's 25 nodes (Li et al. 2024, arXiv 2401.15077): ``mc_sim_7b_63`` of github.com/SafeAILab/EAGLE.
    "eagle": _paths(
        """
        0 1 2 3
        00 01 02 10 11 20 21 30
        000 001 002 010 011 020 021 100
        0000 0001 0002
        00000 00001
        """
    ),
}


@dataclass(frozen=True, slots=True)
class DynamicTree:
    """EAGLE-2's tree, grown anew each step.

    Attributes:
        depth: edges below the root of the deepest node. EAGLE's own setting counts draft steps after the first, so
            that its depth 7 is 8 here.
        topk: nodes expanded at a depth, and candidates of each.
        nodes: drafted nodes, the root not counted (EAGLE's ``total_token`` counts it).
    """

    depth: int
    topk: int
    nodes: int

    def __post_init__(self) -> None:
        if self.depth < 1 or self.topk < 1 or not 1 <= self.nodes <= self.pool:
            raise ValueError(
                f"depth {self.depth} and k {self.topk} give {self.pool} candidates, fewer than {self.nodes} nodes"
            )

    @property
    def pool(self) -> int:
        """Candidates that the nodes are taken from."""
        return self.topk + (self.depth - 1) * self.topk**2


@dataclass(frozen=True, slots=True)
class StaticTree:
    """The same rank paths every step, in any order; nodes are numbered by depth and then by ranks.

    Raises:
        UsageError: a path that is repeated or whose parent is not there.
    """

    paths: tuple[Path, ...]

    def __post_init__(self) -> None:
        if not self.paths:
            raise UsageError("a static tree needs at least one path, such as [0]")
        self.template()

    def template(self) -> list[Node]:
        """Its nodes, numbered from 1 in order."""
        return template(self.paths, self.depth, self.topk)

    @property
    def depth(self) -> int:
        """Edges below the root of the deepest node."""
        return max(map(len, self.paths))

    @property
    def topk(self) -> int:
        """Candidates that a node needs."""
        return 1 + max((rank for path in self.paths for rank in path), default=0)

    @property
    def nodes(self) -> int:
        """Drafted nodes, the root not counted."""
        return len(self.paths)


def read_tree(name: str) -> tuple[Path, ...]:
    """A static tree: one of :data:`TREES` by name, or a JSON file with a list of rank paths such as [[0], [1], [0, 0]].

    Raises:
        UsageError: neither, or paths that are no tree.
    """
    if name in TREES:
        return TREES[name]
    try:
        value = json.loads(FilePath(name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        known = ", ".join(TREES)
        raise UsageError(f"tree {name!r} is neither one of {known} nor a readable JSON file: {error}") from None
    if not isinstance(value, list) or not all(_is_path(ranks) for ranks in value):
        raise UsageError(f"{name!r} holds no list of rank paths such as [[0], [1], [0, 0]]")
    return StaticTree(tuple(tuple(ranks) for ranks in value)).paths


def _is_path(ranks: object) -> bool:
    return isinstance(ranks, list) and all(type(rank) is int for rank in ranks)
