"""The target's own noise for a drafter's graph, so that both draw alike (Gumbel coupling).

The target's token at position p is the argmax of log p(x) / T + G(seed, p, x) (:mod:`specexport.runtime.gumbel`), or of
log p(x) + T G. A drafter whose logits get the same T G before their softmax ranks a token by how likely it is to be
that argmax, and the softmax of the sum says how likely: the two sums differ by the drafter's error alone, and where
such errors are Gumbel distributed with scale 1 the softmax is exact. It is good from errors of half that scale to twice
(``scripts/measure_coupling.py``), and at temperature 0 it is the plain softmax. Noise is not kept from tokens outside
the target's top_k or top_p: the drafter's guess of these sets is wrong often enough to cost more than it saves.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specexport.runtime import contract, gumbel
from specexport.runtime.sampling import SamplingParams


class DraftNoise:
    """T G of every token that may be drafted, at the positions of one draft.

    It depends on seed and position alone, so a step computes only the positions that the last one had not reached.

    Args:
        ids: int64 [n], target ids of the rows of the drafter's vocabulary. depth: positions of a draft.
    """

    def __init__(self, ids: NDArray[np.int64], depth: int) -> None:
        self._strides = gumbel.token_strides(ids)
        self._bits, self._scratch = np.empty_like(self._strides), np.empty_like(self._strides)
        self._rows = np.zeros((depth, len(ids)), np.float32)
        self._params: SamplingParams | None = None
        self._first: int | None = None

    def begin(self, params: SamplingParams | None) -> None:
        """Noise of these parameters from now on; None or temperature 0: none."""
        self._params = params if params is not None and params.temperature > 0 else None
        self._first = None
        self._rows[:] = 0

    def inputs(self, first: int) -> dict[str, NDArray[np.float32]]:
        """The graph's ``noise``, float32 [depth, n], for positions from ``first`` on; valid until the next call."""
        params, rows = self._params, self._rows
        if params is not None and first != self._first:
            depth = len(rows)
            ahead = depth if self._first is None else first - self._first
            known = depth - ahead if 0 < ahead < depth else 0
            rows[:known] = rows[depth - known :]
            for row in range(known, depth):
                key = gumbel.position_key(params.seed, first + row)
                noise = gumbel.noise_of_bits(gumbel.hash_strides(key, self._strides, self._bits, self._scratch))
                np.multiply(noise, params.temperature, out=rows[row], casting="same_kind")
            self._first = first
        return {contract.NOISE: rows}
