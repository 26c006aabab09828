"""Running calls of any width on a target that was compiled for a few.

A profile pins T nodes, A rows to commit, O = A + T and R rows of logits. A call of fewer nodes runs in the next wider
profile. Its padding nodes come last, so no node attends to them; each attends to itself and to committed rows, so that
what it writes is finite, and it is written behind the nodes, where later calls mask it until they overwrite it. A
prompt's chunk may be run in pieces, a branching tree may not: :meth:`StaticWidths.widest` says what fits.

Near the end of the context a block of A + T rows would reach past the last slot. It then starts earlier, at rows that
are in place already: they are committed onto themselves. That takes A - (rows to commit) of them at most, which is
enough whenever ``past + T <= S``; so nothing is wasted on spare slots, only the last few trees are narrower.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport.runtime import contract
from specexport.runtime.engine import Step
from specexport.runtime.errors import BundleError, UsageError

_NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Width:
    """A profile's sizes: ``index`` in the plan, T nodes, A committed rows, R rows of logits."""

    index: int
    nodes: int
    accepted: int
    rows: int


class StaticWidths:
    """Which profile runs what.

    Args:
        widths: of all profiles. slots: S. name: of the plan, for errors.

    Raises:
        BundleError: the profiles cannot run every call: none for one node, or too few rows to commit.
    """

    def __init__(self, widths: Sequence[Width], slots: int, name: str) -> None:
        self._slots = slots
        self._widths = sorted(widths, key=lambda width: (width.nodes, width.rows))
        self._trees = [width for width in self._widths if width.rows >= width.nodes]
        if not self._trees or self._trees[0].nodes != 1:
            raise BundleError(f"{name} has no profile for one node (T = R = 1): compile it again")
        most = self._trees[-1].nodes - 1
        for width in self._widths:
            if width.accepted < most or width.accepted + width.nodes > slots:
                raise BundleError(
                    f"{name}: profile {width.index} commits {width.accepted} rows before {width.nodes} nodes, expected "
                    f"at least {most} rows, and both in {slots} slots: compile it again"
                )

    def widest(self, past: int) -> int:
        """See :meth:`specexport.runtime.engine.StaticEngine.widest`."""
        return max((width.nodes for width in self._trees if past + width.nodes <= self._slots), default=0)

    def pieces(self, step: Step) -> Iterator[tuple[Width, Step]]:
        """The calls that run ``step``, in order: one, or several for a chain.

        Raises:
            UsageError: a branching tree that no profile takes.
        """
        count, first = len(step.tokens), 0
        while first < count:
            width, size = self._choose(step, first)
            if size == count:
                yield width, step
                return
            if not first and not np.array_equal(step.tree, np.tri(count, dtype=bool)):
                raise UsageError(
                    f"a tree of {count} nodes after {step.past} rows is wider than the plan's profiles take: at most "
                    f"{self.widest(step.past)} nodes, so lower max_nodes or compile wider profiles"
                )
            yield width, _cut(step, first, first + size)
            first += size

    def _choose(self, step: Step, first: int) -> tuple[Width, int]:
        """The profile that takes most of the nodes from ``first`` on, of several the narrowest; and how many."""
        left, past = len(step.tokens) - first, step.past + first
        if not first:  # nearly always one profile takes all of it
            for width in self._widths:
                if width.nodes >= left and width.rows >= len(step.select) and past + width.nodes <= self._slots:
                    return width, left
        best: tuple[Width, int] | None = None
        for width in self._widths:
            size = min(width.nodes, left)
            wanted = int(((step.select >= first) & (step.select < first + size)).sum())
            fits = past + width.nodes <= self._slots and wanted <= width.rows
            if fits and (best is None or size > best[1]):
                best = width, size
        if best is None:
            raise UsageError(f"{past} rows are used and the context has {self._slots}: no node fits")
        return best

    def fill(self, inputs: Mapping[str, NDArray[Any]], width: Width, step: Step) -> None:
        """Write a call's inputs, padded, into arrays of the profile's shapes."""
        count, chosen = len(step.tokens), len(step.select)
        tokens, positions, tree = inputs[contract.TOKENS][0], inputs[contract.POSITIONS][0], inputs[contract.TREE][0]
        tokens[:count], tokens[count:] = step.tokens, step.tokens[0]
        positions[:count], positions[count:] = step.positions, step.positions[0]
        tree[:] = False
        tree[:count, :count] = step.tree
        np.fill_diagonal(tree[count:, count:], True)
        select = inputs[contract.SELECT]
        select[:chosen], select[chosen:] = step.select, 0
        start = min(step.write, self._slots - width.accepted - width.nodes)
        kept = step.write - start
        moved = kept + len(step.commit)
        commit, order = inputs[contract.COMMIT], inputs[contract.ORDER]
        commit[:kept] = np.arange(start, step.write)
        commit[kept:moved], commit[moved:] = step.commit, 0
        order[:moved] = np.arange(moved)
        order[moved : moved + count] = np.arange(width.accepted, width.accepted + count)
        order[moved + count :] = width.accepted
        inputs[contract.PAST][0], inputs[contract.WRITE][0] = step.past, start


def _cut(step: Step, first: int, end: int) -> Step:
    """Nodes ``first .. end`` of a chain, after those before them were run and are committed."""
    inside = step.select[(step.select >= first) & (step.select < end)]
    piece = step._replace(
        tokens=step.tokens[first:end],
        positions=step.positions[first:end],
        tree=np.ascontiguousarray(step.tree[first:end, first:end]),
        select=inside - first,
    )
    if not first:
        return piece
    past = step.past + first
    return piece._replace(past=past, write=past, commit=_NOTHING)
