"""Counts of tokens, for the penalties of :mod:`specexport.runtime.sampling`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Histogram:
    """How often each token was seen, as arrays: distinct ids and their counts. Bounded by the vocabulary."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._ids = np.empty(64, np.int64)
        self._counts = np.empty(64, np.float64)

    def add(self, token: int) -> None:
        slot = self._slots.get(token)
        if slot is None:
            slot = self._slots[token] = len(self._slots)
            if slot == len(self._ids):
                self._ids, self._counts = (np.concatenate([a, np.empty_like(a)]) for a in (self._ids, self._counts))
            self._ids[slot], self._counts[slot] = token, 0
        self._counts[slot] += 1

    def remove(self, token: int) -> None:
        """Undo the latest ``add``, which was of ``token``: if it was the first of its kind, its slot is the last."""
        slot = self._slots[token]
        self._counts[slot] -= 1
        if self._counts[slot] == 0:
            del self._slots[token]

    def view(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        size = len(self._slots)
        return self._ids[:size], self._counts[:size]
