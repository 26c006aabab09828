"""Timing the calls of a target: interleaved rounds, medians, and how far to trust them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from random import Random
from statistics import median, quantiles
from time import perf_counter

import numpy as np

from specexport.runtime.cost_curve import CostCurve
from specexport.runtime.engine import Step, TargetEngine

#: Rounds that are measured at least and at most, and the noise at which more are not needed.
MIN_ROUNDS, MAX_ROUNDS, GOOD_NOISE = 7, 25, 0.03
#: Rounds that are run first and not counted: calls of a new width allocate.
WARM_UP = 1
#: Half-width of an approximate 95% interval of a median, in interquartile ranges over the root of the number of
#: measurements (McGill, Tukey and Larsen 1978).
_NOTCH = 1.57


def time_call(engine: TargetEngine, nodes: int, used: int) -> float:
    """Seconds of one call of a chain of ``nodes`` nodes behind ``used`` rows, with logits of every node."""
    step = Step.chain(np.arange(nodes) % engine.vocab_size, used)
    begun = perf_counter()
    engine.run(step)
    return perf_counter() - begun


def noise_of(samples: Sequence[float]) -> float:
    """Relative half-width of the median of some measurements."""
    low, _, high = quantiles(samples, n=4)
    return _NOTCH * (high - low) / sqrt(len(samples)) / median(samples)


def measure_curve(
    engine: TargetEngine,
    widths: Sequence[int],
    used: Sequence[int],
    *,
    budget_s: float,
    advance: Callable[[int], object] = lambda _: None,
) -> CostCurve:
    """The cost curve of an engine. Its caches are not kept.

    Every round calls every (width, used length) once, in an order of its own, so that what disturbs the machine for a
    while does not fall on one of them. Rounds go on until the noise is small or the time is spent.

    Args:
        widths, used: ascending. budget_s: seconds after which no further round is begun, past the least number.
        advance: told of every call; ``MIN_ROUNDS + WARM_UP`` rounds are certain.
    """
    cells = [(row, column) for row in range(len(used)) for column in range(len(widths))]
    samples: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
    shuffle = Random(0).shuffle
    begun = perf_counter()
    noise = float("inf")
    for done in range(WARM_UP + MAX_ROUNDS):
        if done >= WARM_UP + MIN_ROUNDS and (noise <= GOOD_NOISE or perf_counter() - begun > budget_s):
            break
        shuffle(cells)
        for row, column in cells:
            seconds = time_call(engine, widths[column], used[row])
            if done >= WARM_UP:
                samples[row, column].append(seconds)
            advance(1)
        if done > WARM_UP:
            noise = max(map(noise_of, samples.values()))
    engine.reset()
    return CostCurve(
        widths=tuple(widths),
        used=tuple(used),
        seconds=tuple(tuple(median(samples[row, column]) for column in range(len(widths))) for row in range(len(used))),
        noise=noise,
    )
