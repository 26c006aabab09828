"""Compare the speedups that the planner predicts with measured ones: a few trees on each bundle, and one table.

    python scripts/check_plans.py BUNDLE [BUNDLE ..] --prompts question.jsonl.gz --threads 2 -o plans.jsonl
    python scripts/check_plans.py -o plans.jsonl                             # the table of what was measured so far

Each bundle's cost curve and acceptance are measured first, as ``tune`` does; the same prompts are then decoded plainly
and with every tree, alternating, in several rounds, of which the quickest of each prompt counts: every round does the
same work, so what is more is the machine's. ``tuned`` predicts from both measurements, ``roofline`` from the profile's
rates and the acceptance. Chains are drafted by the suffix lookup, trees by Token Recycling; bundles that verify chains
only get longer chains instead. Speedups are those of the decode phase. A bundle that is in the file already is not
measured again, but the roofline is what the profile says today.

An error of a speedup is one of tau (tokens a step) or of the time of a step: the table has both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from specexport.exporter.bench.suites import read_suite
from specexport.exporter.plan import sizes_here
from specexport.profiles.calibrate import Calibrated, calibrate
from specexport.profiles.cost import Roofline
from specexport.profiles.schema import load_profile
from specexport.profiles.sizes import drafter_size, lookup_size
from specexport.profiles.timing import measure_curve
from specexport.profiles.tree_search import best_tree, expected_tokens, mean_step
from specexport.runtime import Bundle, SamplingParams, Session
from specexport.runtime.acceptance_table import AcceptanceTable
from specexport.runtime.cost_curve import CostCurve
from specexport.runtime.device_profile import fingerprint
from specexport.runtime.engine import TargetEngine, chains_only, find_engine
from specexport.runtime.replacing import replace_text
from specexport.runtime.session import find_drafter

#: (drafter, T): chains of 2 and 4 drafts, trees of 8 and 16 nodes; and where only chains are verified.
TREES = (("suffix", 3), ("suffix", 5), ("recycling", 8), ("recycling", 16))
CHAINS = (("suffix", 3), ("suffix", 5), ("recycling", 3), ("recycling", 5))
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)
#: The bars: largest relative error of a prediction from measured times, and from the roofline.
TUNED_BAR, ROOFLINE_BAR = 0.10, 0.25


@dataclass(frozen=True, slots=True)
class Row:
    """One tree on one bundle; times in seconds.

    Attributes:
        measured, tuned, roofline: speedups, the last by :meth:`by`. spread: half of the range of ``measured`` over the
            rounds, relative.
        tau, step_s, plain_s: tokens a step, and times of a step with the tree and plainly, as measured; ``tuned_tau``
            and so on: as predicted. noise: of the cost curve. used: cache rows in use, the mean. proposed: see
            :class:`AcceptanceTable`.
    """

    bundle: str
    fingerprint: str
    drafter: str
    nodes: int
    measured: float
    spread: float
    tuned: float
    roofline: float
    tau: float
    tuned_tau: float
    step_s: float
    tuned_step_s: float
    plain_s: float
    tuned_plain_s: float
    roofline_step_s: float
    roofline_plain_s: float
    noise: float
    used: int
    proposed: tuple[float, ...]

    def error(self, prediction: str) -> float:
        """Relative error of ``tuned`` or ``roofline``."""
        predicted: float = getattr(self, prediction)
        return predicted / self.measured - 1.0

    def by(self, roofline: Roofline) -> Row:
        """The row with the prediction of a ``roofline``; that of tau is what was counted."""
        step_s = mean_step(lambda width: roofline.step_s(width, self.used), self.proposed)(self.nodes)
        plain_s = roofline.step_s(1, self.used)
        speedup = self.tuned_tau * plain_s / step_s
        return replace(self, roofline=speedup, roofline_step_s=step_s, roofline_plain_s=plain_s)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Tokens of a step and its time, with a tree and plainly."""

    tau: float
    step_s: float
    plain_s: float

    @property
    def speedup(self) -> float:
        return self.tau * self.plain_s / self.step_s


def predict(
    table: AcceptanceTable, nodes: int, step_s: Callable[[int], float], draft_s: float, *, copies: bool
) -> Prediction:
    """The best tree of T ``nodes`` for measured acceptance."""
    paths = best_tree(table.acceptance, nodes - 1, len(table.acceptance))
    spent = mean_step(step_s, table.proposed)(nodes) + draft_s
    return Prediction(expected_tokens(paths, table.acceptance, copies=copies), spent, step_s(1))


@dataclass(slots=True)
class Decoded:
    """What decoding all prompts with one drafter took, in each round and at its quickest."""

    rounds: list[float]
    seconds: float
    calls: int
    tokens: int


def decode(
    bundle: Bundle,
    engine: TargetEngine,
    prompts: Sequence[Sequence[int]],
    cases: Sequence[tuple[str, int]],
    tokens: int,
    rounds: int,
) -> dict[tuple[str, int], Decoded]:
    """The decode phases of all prompts by case; the order rotates."""
    taken: dict[tuple[str, int], list[list[float]]] = {case: [[] for _ in prompts] for case in cases}
    counted = {case: [0, 0] for case in cases}
    params = SamplingParams(max_tokens=tokens)
    for turn in range(rounds * len(prompts)):
        number, shift = turn % len(prompts), turn % len(cases)
        if not number:  # drafters go through all prompts, as in the calibration, and through the same in every round
            sessions = {case: Session(bundle, drafter=case[0], engine=engine, max_nodes=case[1]) for case in cases}
        for case in (*cases[shift:], *cases[:shift]):
            sessions[case].forget()
            run = sessions[case].generate(prompts[number], params).statistics
            taken[case][number].append(run.decode_s)
            if turn < len(prompts):
                counted[case][0] += run.target_calls
                counted[case][1] += run.tokens - 1
    return {
        case: Decoded(
            [sum(each[place] for each in taken[case]) for place in range(rounds)],
            sum(map(min, taken[case])),
            *counted[case],
        )
        for case in cases
    }


def check(bundle: Bundle, arguments: argparse.Namespace) -> list[Row]:
    """Measure one bundle."""
    manifest = bundle.manifest
    engine = find_engine(manifest.engine)(bundle.path, threads=arguments.threads)
    encode = Session(bundle, drafter="none", engine=engine).encode
    suite = read_suite(arguments.prompts, count=arguments.count)
    chat = bundle.chat_template is not None
    prompts = [encode(prompt.text, chat=chat)[: arguments.longest] for prompt in suite]
    used = sum(map(len, prompts)) // len(prompts) + arguments.max_tokens // 2
    curve = measure_curve(engine, WIDTHS, [max(0, used - 128), used + 128], budget_s=arguments.seconds)
    names = ("suffix", "recycling")
    drafters = {name: drafter for name in names if (drafter := find_drafter(bundle, name, engine))}
    depths = {info.name: drafter_size(bundle, info).depth for info in manifest.drafters}
    params = SamplingParams(max_tokens=arguments.max_tokens)
    found = calibrate(manifest, engine, drafters, prompts, params, nodes=16, depths=depths)
    chains = chains_only(manifest.target.precision, engine)
    cases = CHAINS if chains else TREES
    decoded = decode(bundle, engine, prompts, (("none", 1), *cases), arguments.max_tokens, arguments.rounds)
    return [make_row(bundle, case, chains, decoded, found, curve, used) for case in cases]


def make_row(
    bundle: Bundle,
    case: tuple[str, int],
    chains: bool,
    decoded: dict[tuple[str, int], Decoded],
    found: Calibrated,
    curve: CostCurve,
    used: int,
) -> Row:
    """A prediction beside what was measured; the roofline's comes later, see :meth:`Row.by`."""
    name, nodes = case
    table = found.acceptance[name].as_chain() if chains else found.acceptance[name]
    copies = lookup_size(name).copies
    draft_s = found.drafts[name].seconds
    tuned = predict(table, nodes, lambda width: curve.step_s(width, used) + found.host_s, draft_s, copies=copies)
    plain, mine = decoded["none", 1], decoded[case]
    speedups = [before / after for before, after in zip(plain.rounds, mine.rounds, strict=True)]
    measured = plain.seconds / mine.seconds
    return Row(
        bundle=bundle.path.name,
        fingerprint=fingerprint(bundle),
        drafter=name,
        nodes=nodes,
        measured=measured,
        spread=(max(speedups) - min(speedups)) / 2 / measured,
        tuned=tuned.speedup,
        roofline=0.0,
        tau=mine.tokens / mine.calls,
        tuned_tau=tuned.tau,
        step_s=mine.seconds / mine.calls,
        tuned_step_s=tuned.step_s,
        plain_s=plain.seconds / plain.calls,
        tuned_plain_s=tuned.plain_s,
        roofline_step_s=0.0,
        roofline_plain_s=0.0,
        noise=curve.noise,
        used=used,
        proposed=tuple(table.proposed),
    )


def show(rows: Sequence[Row]) -> None:
    """The table, and how many predictions are within the bars."""
    print(
        f"{'bundle':>20} {'drafter':>9} {'T':>2}  measured spread   tuned  error  roofline  error     tau  error "
        f"  step ms  error  curve's noise"
    )
    for row in rows:
        # Times are compared as the planner uses them: in plain steps.
        cost, predicted = row.step_s / row.plain_s, row.tuned_step_s / row.tuned_plain_s
        print(
            f"{row.bundle:>20} {row.drafter:>9} {row.nodes:>2} {row.measured:>8.2f}x {row.spread:>6.0%} "
            f"{row.tuned:>6.2f}x {row.error('tuned'):>+6.1%} {row.roofline:>8.2f}x {row.error('roofline'):>+6.1%} "
            f"{row.tau:>7.2f} {row.tuned_tau / row.tau - 1:>+6.1%} "
            f"{1e3 * row.step_s:>9.1f} {predicted / cost - 1:>+6.1%} {row.noise:>7.0%}"
        )
    for prediction, bar in (("tuned", TUNED_BAR), ("roofline", ROOFLINE_BAR)):
        errors = [row.error(prediction) for row in rows]
        within = sum(abs(error) <= bar for error in errors)
        print(
            f"{prediction}: {within} of {len(rows)} within {bar:.0%}, median error {median(errors):+.1%}, "
            f"median size {median(map(abs, errors)):.1%}, largest {max(errors, key=abs):+.1%}"
        )


def read(path: Path | None) -> list[Row]:
    """What was measured before."""
    if path is None or not path.exists():
        return []
    values = [json.loads(line) for line in path.read_text().splitlines()]
    return [Row(**each | {"proposed": tuple(each["proposed"])}) for each in values]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="*")
    parser.add_argument("--prompts", type=Path, help="A suite; not needed for the table alone.")
    parser.add_argument("--count", type=int, default=1, help="Prompts of each task.")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--longest", type=int, default=256, help="Prompts are cut to so many tokens.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", default="cpu-x86")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=15.0, help="Budget of a cost curve.")
    parser.add_argument("--output", "-o", type=Path, help="Keep rows here, as JSON lines.")
    arguments = parser.parse_args()
    if arguments.bundles and arguments.prompts is None:
        parser.error("--prompts is missing: name a suite, such as Spec-Bench's question.jsonl")
    rows = read(arguments.output)
    for path in arguments.bundles:
        bundle = Bundle.load(path)
        key = (bundle.path.name, fingerprint(bundle))
        mine = [row for row in rows if (row.bundle, row.fingerprint) == key] or check(bundle, arguments)
        roofline = Roofline(load_profile(arguments.profile), sizes_here(bundle)[0], arguments.threads or None)
        rows = [row for row in rows if row not in mine] + [row.by(roofline) for row in mine]
        if arguments.output is not None:
            replace_text(arguments.output, "".join(json.dumps(asdict(row)) + "\n" for row in rows))
    if rows:
        show(rows)


if __name__ == "__main__":
    main()
