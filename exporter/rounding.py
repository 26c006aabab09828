"""Whether a token that differs from plain decoding's is within rounding: the rule for half precision.

A matrix product over one row and over several adds in another order, so in half precision the same text can get logits
a little apart, and where two tokens are that close speculative and plain decoding may take different ones. From there
on the texts differ and comparing them says nothing. So each token is judged by itself: with the text before it given
(teacher forcing), would the sampler take it if its logit were higher by what rounding allows?
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specexport.runtime.sampling import Sampler, SamplingParams


@dataclass(frozen=True, slots=True)
class Turned:
    """A token that the teacher-forced logits do not pick. ``gap``: what its logit lacks to be picked, relative to the
    largest logit of its row (or 1), searched up to twice the bound; ``excused``: at most the bound."""

    index: int
    gap: float
    excused: bool


def turned_tokens(
    logits: NDArray[np.float32],
    prompt: Sequence[int],
    output: Sequence[int],
    params: SamplingParams,
    bound: float,
    *,
    valid_vocab: int,
    stop_ids: Iterable[int] = (),
) -> list[Turned]:
    """The tokens of ``output`` that are not what plain sampling takes there.

    Args:
        logits: float32 [len(output), V], of the positions before each token, given the tokens before it.
        bound: largest excused gap. Each logit may be off by half of it: the token's down, another's up.
    """
    sampler = Sampler(params, logits.shape[1], valid_vocab, stop_ids)
    sampler.begin(prompt)
    turned = []
    for index, token in enumerate(output):
        row, position = logits[index], len(prompt) + index
        if sampler.pick(row, position) != token:
            size = max(1.0, float(np.abs(row[:valid_vocab]).max()))
            gap = _gap(sampler, row, position, token, 2 * bound * size) / size
            turned.append(Turned(index, gap, gap <= bound))
        sampler.push(token)
    return turned


def _gap(sampler: Sampler, row: NDArray[np.float32], position: int, token: int, most: float) -> float:
    """How much higher ``token``'s logit would have to be, to a thousandth of ``most``; infinite past ``most``."""
    low, high = 0.0, most

    def picked(lift: float) -> bool:
        lifted = row.copy()
        lifted[token] += lift
        return sampler.pick(lifted, position) == token

    if not picked(high):
        return float("inf")
    while high - low > most / 1000:
        middle = (low + high) / 2
        low, high = (low, middle) if picked(middle) else (middle, high)
    return high
