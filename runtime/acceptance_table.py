"""How often drafts come true, by depth and rank: what calibration counts and what plans, trees and controllers read.

``profiles/acceptance.json`` of a bundle holds one table a drafter. It does not depend on the device, so it lies beside
the profiles of devices (:mod:`specexport.runtime.device_profile`), which may hold newer tables of their own.
"""

# ruff: noqa: RUF009 - see specexport.runtime.records

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from specexport.runtime.records import NAME, fail, integer, number, read, record, sequence, table, text

ACCEPTANCE_FILE = "profiles/acceptance.json"
ACCEPTANCE_SCHEMA = 1
#: Bounds of a table.
MAX_DEPTH, MAX_RANKS = 64, 4096
#: What a row may sum to above 1, by rounding.
_SLACK = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceTable:
    """Measured acceptance of one drafter.

    The children of a node exclude each other, so a row sums to at most 1; what is left is the chance that none is
    right. A node without children counts as decided: the drafter had nothing to propose.

    Attributes:
        acceptance: ``acceptance[d][r]``: probability that the r-th child (from 0, the drafter's best first) of an
            accepted node at depth d (0: the root) is the accepted one.
        tried: ``tried[d]``: accepted nodes at depth d that were decided, so what row d was counted from.
        proposed: ``proposed[n]``: share of steps that drafted more than n nodes (a lookup often finds none); beyond its
            end as at its end. Empty: always as many as asked for.
    """

    acceptance: tuple[tuple[float, ...], ...] = read(sequence(sequence(number(0, 1), MAX_RANKS), MAX_DEPTH))
    tried: tuple[int, ...] = read(sequence(integer(0, 1 << 53), MAX_DEPTH))
    proposed: tuple[float, ...] = read(sequence(number(0, 1), MAX_RANKS), ())

    def __post_init__(self) -> None:
        if len(self.acceptance) != len(self.tried):
            raise fail("tried", list(self.tried), f"one count for each of {len(self.acceptance)} depths")
        for depth, row in enumerate(self.acceptance):
            if sum(row) > 1 + _SLACK:
                raise fail(f"acceptance[{depth}]", sum(row), "a sum of at most 1")
        if any(more > less for less, more in pairwise(self.proposed)):
            raise fail("proposed", list(self.proposed), "shares that fall")

    @property
    def top1(self) -> tuple[float, ...]:
        """Acceptance of a chain, by depth."""
        return tuple(row[0] if row else 0.0 for row in self.acceptance)

    def as_chain(self) -> AcceptanceTable:
        """What is left where only the best child of each node is verified."""
        return replace(self, acceptance=tuple(row[:1] for row in self.acceptance))

    @staticmethod
    def from_counts(
        accepted: Sequence[Sequence[int]], tried: Sequence[int], sizes: Mapping[int, int] | None = None
    ) -> AcceptanceTable:
        """From ``accepted[d][r]`` hits among ``tried[d]`` decisions; depths that were never decided are left out.

        Args:
            sizes: steps by their number of drafted nodes.
        """
        depths = next((depth for depth, count in enumerate(tried) if not count), len(tried))
        rows = zip(accepted[:depths], tried[:depths], strict=True)
        sizes = sizes or {}
        steps = max(1, sum(sizes.values()))
        return AcceptanceTable(
            acceptance=tuple(tuple(hits / count for hits in row) for row, count in rows),
            tried=tuple(tried[:depths]),
            proposed=tuple(
                sum(count for size, count in sizes.items() if size > nodes) / steps
                for nodes in range(max(sizes, default=0))
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Tables by drafter, and in words what they were measured on (prompts, temperature)."""

    schema: int = read(integer(ACCEPTANCE_SCHEMA, ACCEPTANCE_SCHEMA), ACCEPTANCE_SCHEMA)
    measured_on: str = read(text(512))
    drafters: dict[str, AcceptanceTable] = read(table(text(64, NAME), record(AcceptanceTable), 64))


class AcceptanceCounter:
    """Counts decisions of one drafter, step by step.

    Args:
        max_depth: depths whose children the drafter was not asked for are not decided.
    """

    def __init__(self, max_depth: int) -> None:
        self._max_depth = max_depth
        self._tried = [0] * max_depth
        self._sizes: dict[int, int] = {}
        self._accepted: list[list[int]] = [[] for _ in range(max_depth)]

    def add(self, parents: Sequence[int], tokens: Sequence[int], emitted: Sequence[int], max_depth: int) -> None:
        """One verified tree.

        Args:
            parents, tokens: of its nodes; siblings in the order of their rank. emitted: what the step gave.
            max_depth: depth that the drafter could reach in this step (the end of the budget cuts it).
        """
        if max_depth >= self._max_depth:  # else the end of the budget cut it
            self._sizes[len(parents) - 1] = self._sizes.get(len(parents) - 1, 0) + 1
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        at = 0
        for depth, token in enumerate(emitted[: min(self._max_depth, max_depth)]):
            ranked = children.get(at, [])
            self._tried[depth] += 1
            row = self._accepted[depth]
            row += [0] * (len(ranked) - len(row))
            hit = next((rank for rank, child in enumerate(ranked) if tokens[child] == token), None)
            if hit is None:
                return
            row[hit] += 1
            at = ranked[hit]

    def table(self) -> AcceptanceTable:
        """What was counted so far."""
        return AcceptanceTable.from_counts(self._accepted, self._tried, self._sizes)
