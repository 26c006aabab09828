"""Measure what calls of a bundle cost and compare the roofline of a profile with it.

python scripts/check_costs.py BUNDLE --profile cpu-x86 --threads 2
"""

from __future__ import annotations

import argparse
from pathlib import Path

from specexport.exporter.plan import sizes_here
from specexport.profiles.cost import Roofline
from specexport.profiles.schema import load_profile
from specexport.profiles.timing import measure_curve
from specexport.profiles.tuner import WIDTHS, used_lengths
from specexport.runtime import Bundle
from specexport.runtime.engine import find_engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--profile", default="cpu-x86")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS))
    parser.add_argument("--seconds", type=float, default=60.0, help="Budget of the measurement.")
    arguments = parser.parse_args()
    bundle = Bundle.load(arguments.bundle)
    engine = find_engine(bundle.manifest.engine)(bundle.path, threads=arguments.threads)
    used = used_lengths(engine.slots, max(arguments.widths))
    curve = measure_curve(engine, arguments.widths, used, budget_s=arguments.seconds)
    roofline = Roofline(load_profile(arguments.profile), sizes_here(bundle)[0], arguments.threads or None)
    print(f"milliseconds measured (error of the roofline); medians, noise {curve.noise:.1%}")
    print(f"{'used':>6} " + " ".join(f"{f'T={width}':>13}" for width in curve.widths))
    worst = 0.0
    for rows, line in zip(curve.used, curve.seconds, strict=True):
        errors = [roofline.step_s(width, rows) / value - 1 for width, value in zip(curve.widths, line, strict=True)]
        worst = max(worst, *map(abs, errors))
        cells = (f"{1e3 * value:.1f} ({error:+.0%})" for value, error in zip(line, errors, strict=True))
        print(f"{rows:>6} " + " ".join(f"{cell:>13}" for cell in cells))
    print(f"largest error {worst:.0%}")


if __name__ == "__main__":
    main()
