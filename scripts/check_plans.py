"""Compare the speedups that the planner predicts with measured ones: a few trees on each bundle, in one run.

    python scripts/check_plans.py BUNDLE [BUNDLE ..] --prompts question.jsonl.gz --threads 2

Each bundle's cost curve and acceptance are measured first, as ``tune`` does; the same prompts are then decoded plainly
and with every tree, alternating. ``tuned`` predicts from both measurements, ``roofline`` from the profile's rates and
the acceptance. Chains are drafted by the suffix lookup, trees by Token Recycling; bundles that verify chains only get
longer chains instead. Speedups are those of the decode phase.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from specexport.exporter.bench.suites import read_suite
from specexport.profiles.calibrate import calibrate
from specexport.profiles.cost import Roofline
from specexport.profiles.schema import load_profile
from specexport.profiles.sizes import bundle_size, drafter_size, lookup_size
from specexport.profiles.timing import measure_curve
from specexport.profiles.tree_search import best_tree, expected_tokens, mean_step
from specexport.runtime import Bundle, SamplingParams, Session
from specexport.runtime.acceptance_table import AcceptanceTable
from specexport.runtime.engine import TargetEngine, chains_only, find_engine
from specexport.runtime.session import find_drafter

#: (drafter, T): chains of 2 and 4 drafts, trees of 8 and 16 nodes; and where only chains are verified.
TREES = (("suffix", 3), ("suffix", 5), ("recycling", 8), ("recycling", 16))
CHAINS = (("suffix", 3), ("suffix", 5), ("recycling", 3), ("recycling", 5))
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16)


def predict(
    table: AcceptanceTable, nodes: int, step_s: Callable[[int], float], draft_s: float, *, copies: bool
) -> float:
    """Expected speedup of the best tree of T ``nodes`` for measured acceptance."""
    paths = best_tree(table.acceptance, nodes - 1, len(table.acceptance))
    spent = mean_step(step_s, table.proposed)(nodes) + draft_s
    return expected_tokens(paths, table.acceptance, copies=copies) * step_s(1) / spent


def decode(
    bundle: Bundle,
    engine: TargetEngine,
    prompts: Sequence[Sequence[int]],
    cases: Sequence[tuple[str, int]],
    tokens: int,
) -> dict[tuple[str, int], float]:
    """Seconds of the decode phases of all prompts by case; the order rotates."""
    sessions = {case: Session(bundle, drafter=case[0], engine=engine, max_nodes=case[1]) for case in cases}
    seconds = dict.fromkeys(cases, 0.0)
    params = SamplingParams(max_tokens=tokens)
    for turn, prompt in enumerate(prompts):
        shift = turn % len(cases)
        for case in (*cases[shift:], *cases[:shift]):
            sessions[case].forget()
            seconds[case] += sessions[case].generate(prompt, params).statistics.decode_s
    return seconds


def check(path: Path, arguments: argparse.Namespace) -> list[dict[str, object]]:
    bundle = Bundle.load(path)
    manifest = bundle.manifest
    engine = find_engine(manifest.engine)(bundle.path, threads=arguments.threads)
    encode = Session(bundle, drafter="none", engine=engine).encode
    chat = bundle.chat_template is not None
    suite = read_suite(arguments.prompts, count=arguments.count)
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
    seconds = decode(bundle, engine, prompts, (("none", 1), *cases), arguments.max_tokens)
    roofline = Roofline(load_profile(arguments.profile), bundle_size(bundle), arguments.threads or None)
    rows: list[dict[str, object]] = []
    for name, nodes in cases:
        table = found.acceptance[name].as_chain() if chains else found.acceptance[name]
        copies = lookup_size(name).copies
        draft_s = found.drafts[name].seconds
        tuned = predict(table, nodes, lambda width: curve.step_s(width, used) + found.host_s, draft_s, copies=copies)
        assumed = predict(table, nodes, lambda width: roofline.step_s(width, used), 0.0, copies=copies)
        measured = seconds["none", 1] / seconds[name, nodes]
        rows.append(
            {
                "bundle": path.name,
                "drafter": name,
                "nodes": nodes,
                "measured": measured,
                "tuned": tuned,
                "roofline": assumed,
                "noise": curve.noise,
            }
        )
        print(
            f"{path.name:>12} {name:>10} {nodes:>3}  measured {measured:.2f}  tuned {tuned:.2f} "
            f"({tuned / measured - 1:+.0%})  roofline {assumed:.2f} ({assumed / measured - 1:+.0%})  "
            f"noise {curve.noise:.0%}",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path, nargs="+")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1, help="Prompts of each task.")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--longest", type=int, default=256, help="Prompts are cut to so many tokens.")
    parser.add_argument("--profile", default="cpu-x86")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=10.0, help="Budget of a cost curve.")
    parser.add_argument("--output", "-o", type=Path, help="Append rows as JSON lines.")
    arguments = parser.parse_args()
    for path in arguments.bundles:
        rows = check(path, arguments)
        if arguments.output is not None:
            with arguments.output.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
