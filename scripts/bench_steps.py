"""Milliseconds a step of bundles on their engines, by width.

    python scripts/bench_steps.py BUNDLE BUNDLE .. [--threads 2] [--past 256]

All logits of a chain of T nodes behind ``past`` rows. Bundles alternate in one process; given is the fastest of all
rounds, which on a shared machine says more than the median.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from specexport.runtime import Bundle
from specexport.runtime.engine import Step, TargetEngine, find_engine

WIDTHS = (1, 2, 4, 8, 16, 32)


def step(engine: TargetEngine, width: int, past: int) -> float:
    """Seconds of one call."""
    call = Step.chain(range(width), past)
    start = time.perf_counter()
    engine.run(call)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--past", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--engine", help="Instead of the bundles' own.")
    arguments = parser.parse_args()
    engines = {}
    for path in arguments.bundles:
        bundle = Bundle.load(path)
        name = arguments.engine or bundle.manifest.engine
        engines[path.name] = find_engine(name)(bundle.path, threads=arguments.threads)
    best: dict[tuple[str, int], float] = {}
    for _ in range(arguments.rounds):
        for width in WIDTHS:
            for name, engine in engines.items():
                step(engine, width, arguments.past)  # another bundle's weights are in the caches of the CPU
                best[name, width] = min(best.get((name, width), 1e9), step(engine, width, arguments.past))
    print(f"{'':>24} " + " ".join(f"{f'T={width}':>8}" for width in WIDTHS))
    for name in engines:
        print(f"{name:>24} " + " ".join(f"{1e3 * best[name, width]:8.1f}" for width in WIDTHS))


if __name__ == "__main__":
    main()
