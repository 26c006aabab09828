"""Plain and speculative decoding side by side on a prompt file, in one process: speed, tau, host share, equality.

    python scripts/bench_speculation.py BUNDLE PROMPTS.jsonl[.gz] --categories summarization rag --count 30

PROMPTS has one JSON object a line with ``turns`` (the first is used) or ``prompt``, and maybe ``category``
(Spec-Bench's format). Prompts go through the chat template. For each prompt every variant answers once, in an order
that rotates; the engine is shared and every prompt is computed from scratch. ``speedup`` is end to end, with prefill
(median and quartiles over prompts), ``decode`` without; ``host`` is all time between engine calls, drafting included.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import statistics
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import onnxruntime

from specexport.engines.ort import physical_cores
from specexport.runtime import Bundle, SamplingParams, Session
from specexport.runtime.engine import find_engine

PLAIN = "none"


def read_prompts(path: Path, categories: list[str] | None, count: int) -> Iterator[tuple[str, str]]:
    """(category, text) of ``count`` prompts, spread evenly over what the file has of the categories."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        records = [json.loads(line) for line in lines if line.strip()]
    found = [
        (record.get("category", "all"), record["turns"][0] if "turns" in record else record["prompt"])
        for record in records
        if not categories or record.get("category") in categories
    ]
    step = max(1, len(found) // count)
    yield from found[::step][:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--categories", nargs="+")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--drafters", nargs="+", default=["ngram", "suffix", "recycling"])
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", type=Path, help="Write every run here.")
    arguments = parser.parse_args()
    bundle = Bundle.load(arguments.bundle)
    threads = arguments.threads or physical_cores()
    engine = find_engine(bundle.manifest.engine)(bundle.path, threads=threads)
    names = [PLAIN, *arguments.drafters]
    runs: list[dict[str, Any]] = []
    skipped = 0
    prompts = list(read_prompts(arguments.prompts, arguments.categories, arguments.count))
    for index, (category, text) in enumerate(prompts):
        outputs = {}
        for name in names[index % len(names) :] + names[: index % len(names)]:
            session = Session(bundle, drafter=name, engine=engine, max_nodes=arguments.nodes)
            tokens = session.encode(text, chat=bundle.chat_template is not None)
            if len(tokens) + arguments.max_tokens > bundle.manifest.target.slots:
                break
            params = SamplingParams(
                temperature=arguments.temperature, top_p=arguments.top_p, max_tokens=arguments.max_tokens, seed=index
            )
            if index == 0:
                session.generate(tokens, SamplingParams(max_tokens=8))  # first calls allocate
                session = Session(bundle, drafter=name, engine=engine, max_nodes=arguments.nodes)
            start = perf_counter()
            result = session.generate(tokens, params)
            seconds = perf_counter() - start
            outputs[name] = result.token_ids
            figures = result.statistics.as_dict()
            runs.append(
                {"prompt": index, "category": category, "drafter": name, "seconds": seconds}
                | {
                    key: figures[key]
                    for key in ("tokens", "tau", "time_share", "decode_s", "prefill_s", "target_calls")
                }
                | {"prompt_tokens": len(tokens)}
            )
        if not outputs:
            skipped += 1
            continue
        for run in runs[-len(outputs) :]:
            run["identical"] = outputs[run["drafter"]] == outputs[PLAIN]
    _print(runs, names, threads, skipped, arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(runs, indent=1))


def _print(runs: list[dict[str, Any]], names: list[str], threads: int, skipped: int, arguments: Any) -> None:
    print(
        f"{arguments.bundle.name}, onnxruntime {onnxruntime.__version__}, {threads} threads, {platform.machine()}, "
        f"temperature {arguments.temperature:g}, top_p {arguments.top_p:g}, {arguments.nodes} nodes, "
        f"{arguments.max_tokens} new tokens; {skipped} prompts too long"
    )
    widths = {"category": 14, "drafter": 10, "n": 3, "speedup": 16, "decode": 7, "tau": 5, "tok/s": 6, "host": 6}
    print(*(f"{title:>{width}}" for title, width in widths.items()), "same")
    for category in [*dict.fromkeys(run["category"] for run in runs), None]:
        chosen = [run for run in runs if category in (None, run["category"])]
        plain = {run["prompt"]: run for run in chosen if run["drafter"] == PLAIN}
        for name in names:
            mine = [run for run in chosen if run["drafter"] == name]
            if not mine:
                continue
            ratios = [plain[run["prompt"]]["seconds"] / run["seconds"] for run in mine]
            decode = [plain[run["prompt"]]["decode_s"] / max(run["decode_s"], 1e-9) for run in mine]
            low, high = np.quantile(ratios, [0.25, 0.75])
            tau = sum(run["tau"] * run["target_calls"] for run in mine) / sum(run["target_calls"] for run in mine)
            rate = statistics.median(run["tokens"] / run["seconds"] for run in mine)
            host = statistics.median(run["time_share"]["host"] + run["time_share"]["draft"] for run in mine)
            same = sum(run["identical"] for run in mine)
            print(
                f"{category or 'all':>14} {name:>10} {len(mine):>3} "
                f"{f'{statistics.median(ratios):.2f} ({low:.2f}-{high:.2f})':>16} "
                f"{statistics.median(decode):7.2f} {tau:5.2f} {rate:6.1f} {host:6.1%} {same}/{len(mine)}"
            )


if __name__ == "__main__":
    main()
