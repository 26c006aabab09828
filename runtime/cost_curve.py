"""The cost curve: measured time of a target call by its width and the used length of the cache."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from specexport.runtime.records import fail, integer, number, read, sequence


@dataclass(frozen=True, kw_only=True)
class CostCurve:
    """Medians of measured calls; between them straight lines, beyond them the last line goes on.

    More nodes or more rows never cost less, so noise that says so is smoothed: every value becomes the mean of the
    smallest rising surface above the data and the largest below.

    Attributes:
        widths: T, ascending, from 1. used: cache rows in use before the call, ascending.
        seconds: ``seconds[u][w]``: median time of a call of ``widths[w]`` nodes behind ``used[u]`` rows.
        noise: relative half-width of those medians (see ``specexport.profiles.timing``), the largest of them.
    """

    widths: tuple[int, ...] = read(sequence(integer(1, 1 << 16), 256))
    used: tuple[int, ...] = read(sequence(integer(0, 1 << 24), 256))
    seconds: tuple[tuple[float, ...], ...] = read(sequence(sequence(number(1e-9, 3600), 256), 256))
    noise: float = read(number(0, 1e3))

    def __post_init__(self) -> None:
        for name in ("widths", "used"):
            axis: tuple[int, ...] = getattr(self, name)
            if not axis or any(low >= high for low, high in pairwise(axis)):
                raise fail(name, list(axis), "at least one number, each larger than the one before")
        if self.widths[0] != 1:
            raise fail("widths", list(self.widths), "widths from 1 on")
        if len(self.seconds) != len(self.used) or any(len(row) != len(self.widths) for row in self.seconds):
            raise fail("seconds", len(self.seconds), f"{len(self.used)} rows of {len(self.widths)} times")

    @cached_property
    def _rising(self) -> list[list[float]]:
        data = np.array(self.seconds)
        above = np.maximum.accumulate(np.maximum.accumulate(data, 0), 1)
        below = np.minimum.accumulate(np.minimum.accumulate(data[::-1, ::-1], 0), 1)[::-1, ::-1]
        surface: list[list[float]] = ((above + below) / 2).tolist()
        return surface

    def step_s(self, nodes: int, used: int) -> float:
        """Seconds of a call of ``nodes`` nodes behind ``used`` rows."""
        column, share = _place(self.widths, nodes)
        row, rise = _place(self.used, used)
        low = _between(self._rising[row], column, share)
        if rise == 0.0:
            return low
        return max(low + rise * (_between(self._rising[row + 1], column, share) - low), 1e-9)


def _place(axis: Sequence[int], value: int) -> tuple[int, float]:
    """Index of the segment that ``value`` lies in or is nearest to, and how far along it (0 to 1; beyond the end more,
    before the start less)."""
    if len(axis) == 1:
        return 0, 0.0
    index = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 2)
    return index, (value - axis[index]) / (axis[index + 1] - axis[index])


def _between(values: Sequence[float], index: int, share: float) -> float:
    if share == 0.0:
        return values[index]
    return values[index] + share * (values[index + 1] - values[index])
