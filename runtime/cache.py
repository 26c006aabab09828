"""Which cache rows hold the sequence: pure bookkeeping between two calls of the target.

A call with T nodes leaves node i in row ``past + i``. Acceptance then keeps a path of nodes. The part of the path that
lies where the sequence continues (``path[i] == i``) is in place at once; the others become ``commit`` of the next call,
which moves them to ``write`` and on before it appends its own nodes (:mod:`specexport.runtime.contract`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class CacheRows:
    """Rows of the committed tokens, in order: ``0 .. write - 1``, then ``commit``.

    Attributes:
        write: rows in place; where the next call's block starts.
        commit: rows of the tokens after those, each at or past its own destination, ascending.
    """

    write: int = 0
    commit: tuple[int, ...] = ()

    @property
    def past(self) -> int:
        """Committed tokens: where the next call's first node lands."""
        return self.write + len(self.commit)

    @property
    def commit_array(self) -> NDArray[np.int64]:
        """``commit`` as the int64 [A] input of the target."""
        return np.array(self.commit, np.int64) if self.commit else _NOTHING

    def accept(self, path: Sequence[int]) -> CacheRows:
        """The rows after a call made from this state whose nodes ``path`` (root first, ascending) were accepted."""
        past = self.past
        in_place = 0
        for node in path:
            if node != in_place:
                break
            in_place += 1
        return CacheRows(past + in_place, tuple(past + int(node) for node in path[in_place:]))

    def keep(self, tokens: int) -> CacheRows:
        """The rows of the first ``tokens`` committed tokens; the others are forgotten (a prompt shares a prefix)."""
        if tokens <= self.write:
            return CacheRows(tokens)
        return CacheRows(self.write, self.commit[: tokens - self.write])


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix of two token sequences."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))


_NOTHING = np.zeros(0, np.int64)
_NOTHING.flags.writeable = False
