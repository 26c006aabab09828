"""What drafting with the target's noise is worth: on synthetic pairs of target and drafter, and in a bundle.

    python scripts/measure_coupling.py [--vocab 256] [--pairs 60] [--draws 300]
    python scripts/measure_coupling.py --trees
    python scripts/measure_coupling.py --bundle BUNDLE --prompts FILE [--drafter NAME ..] [--count 20]

**One node** (the first form): how often a drafted token is accepted, by how it was drafted and by which rule. The
target's logits are the logarithm of a Dirichlet draw, the drafter's the same with Gaussian noise added; both go through
the same temperature. The columns give the chance that one node's children hold the token that is emitted there,
in percent, averaged over pairs (p, q):

    best      match; the k tokens with the highest q, what a drafter proposes without the noise
    free      match; k tokens drawn from q with noise of their own, without replacement
    coupled   match; the k tokens with the highest log q + G, where the target takes the highest log p + G
    reject    rejection; k tokens drawn from q without replacement
    ideal     sum min(p, q): no coupling of one draft drawn from q with a token drawn from p agrees more often

``best`` and ``ideal`` are exact, the others are counted over ``--draws`` common draws. "+-" is the standard error of
the mean difference coupled - best over pairs. Of 256 tokens at concentration 0.003 the best has about 0.65, as sharp
as a language model on ordinary text; the other concentrations are flatter.

**Trees** (``--trees``): tokens a step emits under ``match`` with EAGLE-2's tree of 15 nodes, depth 5, by what ranks and
scores its nodes: ``log q`` alone; the noise for the rank and log q for the score (``mixed``); the log-softmax of
(log q + T G) / s for both, by s. ``cut``: s = 1, and q cut to the target's top_p first.

**A bundle**: tau and drafting time of its heads at each temperature with and without the target's noise, one seed a
prompt; the tokens must be those of plain decoding. FILE has a prompt a line, or Spec-Bench's JSON lines (may be .gz).
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from time import perf_counter

import numpy as np

from specexport.profiles.tuner import read_prompts
from specexport.runtime import Bundle, SamplingParams, Session, gumbel
from specexport.runtime.drafters.base import CoupledDrafter
from specexport.runtime.engine import find_engine
from specexport.runtime.rejection import Row, Uniforms, reject_siblings
from specexport.runtime.session import find_drafter

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


def synthetic_logits(rng: np.random.Generator, concentration: float, rows: int, vocab: int) -> Row:
    """float64 [rows, vocab]: logarithms of gamma draws, which scaled to 1 are a Dirichlet draw.

    At a small shape the draws themselves underflow: gamma(a) = gamma(a + 1) * u**(1 / a) (Marsaglia and Tsang 2000).
    """
    shape = rng.standard_gamma(concentration + 1, (rows, vocab))
    return np.asarray(np.log(shape) + np.log(rng.random((rows, vocab))) / concentration)


DEPTH, TOPK, NODES, TREE_VOCAB = 5, 8, 15, 400
SCORES = ("log q", "mixed", "0.5", "1", "2", "cut")


def log_softmax(logits: Row) -> Row:
    logits = logits - logits.max()
    return np.asarray(logits - math.log(np.exp(logits).sum()))


def cut(logits: Row, temperature: float, top_p: float) -> Row:
    """``logits`` without what ``top_p`` leaves out."""
    chances = softmax(logits / temperature)
    order = np.argsort(-chances)
    kept = order[: int(np.searchsorted(np.cumsum(chances[order]), top_p)) + 1]
    left = np.full_like(logits, -1e9)
    left[kept] = logits[kept]
    return left


def ranked(how: str, q: Row, noise: Row, temperature: float, top_p: float) -> tuple[Row, Row]:
    """(what ranks, what scores) every token, from the drafter's logits."""
    noisy = q + temperature * noise
    if how == "log q":
        return q, log_softmax(q)
    if how == "mixed":
        return noisy, log_softmax(q)
    if how == "cut":
        noisy = cut(q, temperature, top_p) + temperature * noise
    scores = log_softmax(noisy / (1.0 if how == "cut" else float(how)))
    return scores, scores


def emitted(how: str, seed: int, concentration: float, error: float, temperature: float, top_p: float) -> int:
    """Tokens of one step. Off the right path the drafter's rows are those of other texts."""
    rng = np.random.default_rng(seed)
    p = synthetic_logits(rng, concentration, DEPTH + DEPTH * TOPK, TREE_VOCAB)
    p = np.maximum(p - p.max(1, keepdims=True), -30)
    q = p + error * rng.standard_normal(p.shape)
    noise = rng.gumbel(size=(DEPTH, TREE_VOCAB))
    right = [int((cut(p[d], temperature, top_p) / temperature + noise[d]).argmax()) for d in range(DEPTH)]
    pool: list[tuple[float, int]] = []  # score, and depth if on the right path, else 0
    level, others = [(0.0, True)], iter(q[DEPTH:])
    for depth in range(DEPTH):
        made = []
        for above, on_path in level:
            row = q[depth] if on_path else next(others)
            ranks, scores = ranked(how, row, noise[depth], temperature, top_p)
            best = np.argsort(-ranks, kind="stable")[:TOPK]
            made += [(above + float(scores[token]), on_path and int(token) == right[depth]) for token in best]
        pool += [(score, (depth + 1) * on_path) for score, on_path in made]
        level = sorted(made, key=lambda node: -node[0])[:TOPK]
    return 1 + max(depth for _, depth in sorted(pool, key=lambda node: -node[0])[:NODES])


def measure_trees(arguments: argparse.Namespace) -> None:
    print("dirichlet  noise  temp  top_p  " + "  ".join(f"{name:>6}" for name in SCORES))
    for concentration in (0.01, 0.05):
        for error in (0.5, 1.0, 2.0):
            for temperature, top_p in ((0.7, 1.0), (1.0, 1.0), (1.0, 0.9)):
                setting = concentration, error, temperature, top_p
                means = [np.mean([emitted(how, seed, *setting) for seed in range(arguments.draws)]) for how in SCORES]
                shown = "  ".join(f"{mean:6.2f}" for mean in means)
                print(f"{concentration:9g}  {error:5g}  {temperature:4g}  {top_p:5g}  {shown}", flush=True)


def measure_bundle(arguments: argparse.Namespace) -> None:
    bundle = Bundle.load(arguments.bundle)
    engine = find_engine(bundle.manifest.engine)(bundle.path, threads=arguments.threads)
    drafters = {}
    for name in arguments.drafter or [info.name for info in bundle.manifest.drafters]:
        drafter = find_drafter(bundle, name, engine)
        if isinstance(drafter, CoupledDrafter) and hasattr(drafter, "coupled"):
            drafters[name] = drafter
    plain = Session(bundle, drafter="none", engine=engine)
    prompts = [
        plain.encode(text, chat=bundle.chat_template is not None)
        for text in read_prompts(arguments.prompts, arguments.count)
    ]
    room = bundle.manifest.target.slots - arguments.max_tokens
    prompts = [prompt for prompt in prompts if len(prompt) <= room]
    print(f"{len(prompts)} prompts, {arguments.max_tokens} tokens, top_p {arguments.top_p:g}")
    print("drafter          temp  coupled    tau  draft ms  tokens/s  identical")
    for temperature in arguments.temperatures or [0.5, 0.8, 1.0]:
        settings = [
            SamplingParams(temperature=temperature, top_p=arguments.top_p, max_tokens=arguments.max_tokens, seed=seed)
            for seed in range(len(prompts))
        ]
        expected = [plain.generate(*pair).token_ids for pair in zip(prompts, settings, strict=True)]
        for name, drafter in drafters.items():
            for coupled in (False, True):
                drafter.coupled = coupled
                session = Session(bundle, drafter=drafter, engine=engine, max_nodes=arguments.nodes)
                calls, tokens, draft_s, same, begun = 0, 0, 0.0, 0, perf_counter()
                for prompt, params, answer in zip(prompts, settings, expected, strict=True):
                    result = session.generate(prompt, params)
                    statistics = result.statistics
                    calls, tokens = calls + statistics.target_calls, tokens + statistics.tokens - 1
                    draft_s, same = draft_s + statistics.draft_s, same + (result.token_ids == answer)
                print(
                    f"{name:16} {temperature:4g}  {coupled!s:>7}  {tokens / max(1, calls):5.2f}  "
                    f"{1000 * draft_s / max(1, calls):8.2f}  {tokens / (perf_counter() - begun):8.1f}  "
                    f"{same}/{len(prompts)}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trees", action="store_true")
    parser.add_argument("--bundle", type=Path)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--drafter", nargs="+")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--nodes", type=int, help="widest tree, the root included")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--vocab", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--concentrations", type=float, nargs="+", default=[0.003, 0.02, 0.1])
    parser.add_argument("--noises", type=float, nargs="+", default=[0.5, 2.0])
    parser.add_argument("--temperatures", type=float, nargs="+")
    arguments = parser.parse_args()
    if (arguments.bundle is None) != (arguments.prompts is None):
        parser.error("--bundle and --prompts go together")
    if arguments.bundle is not None:
        measure_bundle(arguments)
    elif arguments.trees:
        measure_trees(arguments)
    else:
        measure_nodes(arguments)


def measure_nodes(arguments: argparse.Namespace) -> None:
    print(
        "dirichlet  noise  temp  width  "
        + "  ".join(f"{name:>8}" for name in (*COLUMNS, "ideal"))
        + "   coupled - best"
    )
    for concentration in arguments.concentrations:
        for error in arguments.noises:
            for temperature in arguments.temperatures or [0.5, 1.0, 1.5]:
                tables: dict[int, list[tuple[float, ...]]] = {width: [] for width in arguments.widths}
                overlap = []
                for pair in range(arguments.pairs):
                    rng = np.random.default_rng([pair, round(concentration * 1000)])
                    logits = synthetic_logits(rng, concentration, 1, arguments.vocab)[0]
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
