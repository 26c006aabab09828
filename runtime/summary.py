"""The best tokens of a row of logits, found where the logits are, so that the row itself seldom crosses to the host.

An engine on a device (:class:`specexport.runtime.engine.SummarisingEngine`) gives :class:`LazyRow` objects: the k
highest logits with their tokens, and the whole row on request. :func:`pick` draws from the former exactly what
:class:`specexport.runtime.sampling.Sampler` would from the latter, or says that they do not decide it. Greedy decoding
needs no row at all but for ties beyond the k-th; neither does sampling with a ``top_k`` below k, or where ``min_p`` or
a low temperature leaves nothing below the k-th a chance. Else a row is fetched for each emitted token: ``top_p`` alone
is a share of the mass of all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specexport.runtime import gumbel
from specexport.runtime.ranking import highest, nucleus, winner

if TYPE_CHECKING:
    from specexport.runtime.sampling import SamplingParams

FloatRow = NDArray[np.float32]


class LazyRow:
    """A row of logits on a device; valid until the engine's next call.

    Args:
        tokens, values: int64 and float32 [k], the highest logits among the first ``valid`` of the row, in any order and
            with ties broken as the device pleases. A NaN in the row must show as one that is not finite.
        valid: ids from there on are padding. fetch: gives the row, float32 [V].
    """

    __slots__ = ("_fetch", "_row", "tokens", "valid", "values")

    def __init__(self, tokens: NDArray[np.int64], values: FloatRow, valid: int, fetch: Callable[[], FloatRow]) -> None:
        self.tokens, self.values, self.valid = tokens, values, valid
        self._fetch = fetch
        self._row: FloatRow | None = None

    def numpy(self) -> FloatRow:
        """float32 [V]: the whole row, fetched once."""
        if self._row is None:
            self._row = self._fetch()
        return self._row


#: What acceptance rules and samplers take for a row of logits.
Row = FloatRow | LazyRow


def whole(row: Row) -> FloatRow:
    """A row as an array."""
    return row.numpy() if isinstance(row, LazyRow) else row


def pick(row: LazyRow, params: SamplingParams, position: int) -> int | None:
    """What ``Sampler.pick`` returns where no processor changes the row; None: only the whole row can tell."""
    values, complete = row.values, len(row.values) >= row.valid
    top, low = float(values.max()), float(values.min())
    if not (math.isfinite(top) and math.isfinite(low)):
        return None  # the whole row fails as it should, or has too few tokens that may be picked
    if params.temperature == 0:
        return int(row.tokens[values == top].min()) if complete or low < top else None
    order = np.argsort(row.tokens)
    ids, d = row.tokens[order], values[order].astype(np.float64)
    d -= top
    d /= params.temperature
    least = -math.inf if complete else float(d.min())  # no token that is not here has more
    if 0 < params.top_k < row.valid:
        if params.top_k > len(ids):
            return None
        ids, d = highest(ids, d, params.top_k)
        if d.min() <= least:
            return None  # one that is not here may be as good as the last
        if params.top_p < 1:
            ids, d = nucleus(ids, d, params.top_p)
    elif params.top_p < 1:
        return None
    floor = math.log(params.min_p) if params.min_p > 0 else -math.inf
    ids, d = ids[d >= floor], d[d >= floor]
    key = gumbel.position_key(params.seed, position)
    score, token = winner(ids, d + gumbel.noise_of_bits(gumbel.hash_strides(key, gumbel.token_strides(ids))))
    truncated = 0 < params.top_k < row.valid
    return token if truncated or least < floor or score > least + gumbel.G_MAX else None
