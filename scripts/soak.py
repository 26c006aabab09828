"""Growth of resident memory over a long session.

    python scripts/soak.py BUNDLE --tokens 10000

Prompts of changing length follow each other in one session with each drafter; the first fifth is warm-up.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from specexport.runtime import Bundle, SamplingParams, Session
from specexport.runtime.drafters import DRAFTERS


def resident() -> float:
    """Resident memory of this process in MB (Linux)."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096 / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--drafter", choices=["none", *DRAFTERS], default="suffix")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--limit-mb", type=float, default=5.0)
    arguments = parser.parse_args()
    bundle = Bundle.load(arguments.bundle)
    session = Session(bundle, drafter=arguments.drafter, threads=arguments.threads)
    random.seed(0)
    target = bundle.manifest.target
    generated, base, peak = 0, 0.0, 0.0
    while generated < arguments.tokens:
        prompt = [random.randrange(target.valid_vocab) for _ in range(random.randrange(4, min(400, target.slots // 2)))]
        params = SamplingParams(temperature=1.0, seed=generated, max_tokens=256)
        generated += session.generate(prompt, params).statistics.tokens
        if generated < arguments.tokens // 5:
            base = resident()
        peak = max(peak, resident())
        print(f"{generated:>7} tokens {resident():8.1f} MB", flush=True)
    growth = peak - base
    print(f"growth after warm-up: {growth:.1f} MB (limit {arguments.limit_mb:g})")
    raise SystemExit(growth > arguments.limit_mb)


if __name__ == "__main__":
    main()
