"""How often a drafted token is accepted, by how it was drafted and by which rule: synthetic targets and drafters.

    python scripts/measure_coupling.py [--vocab 256] [--pairs 60] [--draws 300]

The target's logits are the logarithm of a Dirichlet draw, the drafter's the same with Gaussian noise added; both go
through the same temperature. The columns give the chance that one node's children hold the token that is emitted there,
in percent, averaged over pairs (p, q):

    best      match; the k tokens with the highest q, the tree that every head proposes now
    free      match; k tokens drawn from q with noise of their own, without replacement
    coupled   match; the k tokens with the highest log q + G, where the target takes the highest log p + G
    reject    rejection; k tokens drawn from q without replacement
    ideal     sum min(p, q): no coupling of one draft drawn from q with a token drawn from p agrees more often

``best`` and ``ideal`` are exact, the others are counted over ``--draws`` common draws. "+-" is the standard error of
the mean difference coupled - best over pairs. Of 256 tokens at concentration 0.003 the best has about 0.65, as sharp
as a language model on ordinary text; the other concentrations are flatter.
"""

from __future__ import annotations

import argparse

import numpy as np

from specexport.runtime import gumbel
from specexport.runtime.rejection import Row, Uniforms, reject_siblings

COLUMNS = ("best", "free", "coupled", "reject")


def softmax(logits: Row) -> Row:
    weights = np.exp(logits - logits.max())
    return np.asarray(weights / weights.sum())


def shares(p: Row, q: Row, widths: list[int], draws: int, seed: int) -> dict[int, tuple[float, ...]]:
    """For each width the chances of :data:`COLUMNS`."""
    ids = np.arange(len(p))
    with np.errstate(divide="ignore"):
        log_p, log_q = np.log(p), np.log(q)
    noise = np.stack([gumbel.gumbel(seed, position, ids) for position in range(2 * draws)])
    target, other = noise[:draws], noise[draws:]
    picks = (log_p + target).argmax(1)
    coupled = np.argsort(-(log_q + target), axis=1)
    free = np.argsort(-(log_q + other), axis=1)
    ranked = np.argsort(-q)
    found = {}
    for width in widths:
        rejected = sum(
            reject_siblings(p, q, free[draw, :width].tolist(), Uniforms(seed, draw))[0] is not None
            for draw in range(draws)
        )
        found[width] = (
            float(p[ranked[:width]].sum()),
            float((free[:, :width] == picks[:, None]).any(1).mean()),
            float((coupled[:, :width] == picks[:, None]).any(1).mean()),
            rejected / draws,
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--concentrations", type=float, nargs="+", default=[0.003, 0.02, 0.1])
    parser.add_argument("--noises", type=float, nargs="+", default=[0.5, 2.0])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.5, 1.0, 1.5])
    arguments = parser.parse_args()
    print(
        "dirichlet  noise  temp  width  "
        + "  ".join(f"{name:>8}" for name in (*COLUMNS, "ideal"))
        + "   coupled - best"
    )
    for concentration in arguments.concentrations:
        for error in arguments.noises:
            for temperature in arguments.temperatures:
                tables: dict[int, list[tuple[float, ...]]] = {width: [] for width in arguments.widths}
                overlap = []
                for pair in range(arguments.pairs):
                    rng = np.random.default_rng([pair, round(concentration * 1000)])
                    # Logarithms of gamma draws, which scaled to 1 are a Dirichlet draw. At a small shape the draws
                    # themselves underflow: gamma(a) = gamma(a + 1) * u**(1 / a) (Marsaglia and Tsang 2000).
                    shape = rng.standard_gamma(concentration + 1, arguments.vocab)
                    logits = np.log(shape) + np.log(rng.random(arguments.vocab)) / concentration
                    draft = logits + error * rng.standard_normal(arguments.vocab)
                    p, q = softmax(logits / temperature), softmax(draft / temperature)
                    overlap.append(float(np.minimum(p, q).sum()))
                    for width, row in shares(p, q, arguments.widths, arguments.draws, pair).items():
                        tables[width].append(row)
                for width, rows in tables.items():
                    table = np.array(rows)
                    gain = table[:, 2] - table[:, 0]
                    error_of_mean = gain.std(ddof=1) / len(gain) ** 0.5
                    ideal = f"{100 * np.mean(overlap):8.1f}" if width == 1 else " " * 8
                    print(
                        f"{concentration:9g}  {error:5g}  {temperature:4g}  {width:5d}  "
                        + "  ".join(f"{100 * value:8.1f}" for value in table.mean(0))
                        + f"  {ideal}   {100 * gain.mean():+6.1f} +- {100 * error_of_mean:.1f}"
                    )


if __name__ == "__main__":
    main()
