"""The best of some tokens, with ties to the lower id: shared by what samples from whole rows and from summaries."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]
IntArray = NDArray[np.int64]


def winner(ids: IntArray, scores: Float64Array) -> tuple[float, int]:
    """``(score, id)`` of the highest score, on a tie the lowest id."""
    best = float(scores.max())
    return best, int(ids[scores == best].min())


def highest(ids: IntArray, d: Float64Array, count: int) -> tuple[IntArray, Float64Array]:
    """The ``count`` highest of ``d``, of equal ones the lower ids; ids, ascending, stay so."""
    if len(ids) <= count:
        return ids, d
    least = np.partition(d, len(d) - count)[len(d) - count]
    kept = d > least
    kept[np.flatnonzero(d == least)[: count - int(kept.sum())]] = True
    return ids[kept], d[kept]


def nucleus(ids: IntArray, d: Float64Array, top_p: float) -> tuple[IntArray, Float64Array]:
    """Best first, the shortest prefix whose mass reaches ``top_p`` of the total ``sum exp(d)``; ids come ascending."""
    order = np.argsort(-d, kind="stable")
    ids, d = ids[order], d[order]
    mass = np.cumsum(np.exp(d))
    keep = int(np.searchsorted(mass, top_p * mass[-1])) + 1
    return ids[:keep], d[:keep]
