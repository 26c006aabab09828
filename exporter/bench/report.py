"""What ``bench`` shows: the record as JSON, a table, plots."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specexport.exporter.bench.measure import PLAIN, Sample, Settings, summarise
from specexport.exporter.doctor import examine
from specexport.runtime.bundle import Bundle


def report(bundle: Bundle, settings: Settings, samples: Sequence[Sample], context: dict[str, Any]) -> dict[str, Any]:
    """Everything about a run: where, what, each sample, and the figures by policy and task.

    Args:
        context: more settings to record (suite, engine, threads, peak memory).
    """
    machine = examine(bundle.path)
    tasks = list(dict.fromkeys(sample.task for sample in samples))
    return {
        "bundle": str(bundle.path),
        "fingerprint": bundle.manifest.lineage.fingerprint,
        "files": {name: record.sha256 for name, record in bundle.manifest.files.items()},
        "commit": _commit(),
        "hardware": {key: machine[key] for key in ("platform", "cpu", "memory")},
        "packages": machine["packages"] | {"specexport": machine["specexport"], "python": platform.python_version()},
        "settings": asdict(settings) | context,
        "policies": {
            policy: {
                "overall": summarise(samples, policy),
                "tasks": {
                    task: summarise([sample for sample in samples if sample.task == task], policy) for task in tasks
                },
            }
            for policy in (PLAIN, *settings.policies)
        },
        "samples": [asdict(sample) for sample in samples],
    }


def _commit() -> str | None:
    """Of the checkout that this package runs from, if it is one."""
    folder = Path(__file__).resolve().parent
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    """The table, a title first: by task and overall, a line a policy."""
    table: list[tuple[str, ...]] = [
        ("task", "policy", "n", "tokens/s", "speedup (quartiles)", "decode", "tau", "first", "p50", "p99", "same")
    ]
    policies = record["policies"]
    tasks = list(policies[PLAIN]["tasks"])
    for task in [*(tasks if len(tasks) > 1 else []), None]:
        for policy, found in policies.items():
            figures = found["overall"] if task is None else found["tasks"][task]
            low, high = figures["speedup_quartiles"]
            table.append(
                (
                    task or "all",
                    policy,
                    str(figures["answers"]),
                    f"{figures['speculative_tokens_per_second']:.1f}",
                    f"{figures['speedup']:.2f} ({low:.2f}-{high:.2f})",
                    _number(figures["decode_speedup"], "{:.2f}"),
                    f"{figures['tau']:.2f}",
                    f"{1e3 * figures['time_to_first_token_s']:.0f} ms",
                    _number(figures["token_p50_s"], "{:.1f} ms", 1e3),
                    _number(figures["token_p99_s"], "{:.1f} ms", 1e3),
                    f"{figures['identical_answers']}/{figures['answers']}",
                )
            )
    return table


def _number(value: float | None, form: str, scale: float = 1.0) -> str:
    return "-" if value is None else form.format(scale * value)


def plot(record: dict[str, Any], path: Path) -> None:
    """Two panels, PNG or SVG by the file's ending: speedup by task, and acceptance by depth.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    policies = {name: found for name, found in record["policies"].items() if name != PLAIN}
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), constrained_layout=True)
    tasks = [*record["policies"][PLAIN]["tasks"], "all"]
    width = 0.8 / max(1, len(policies))
    for place, (name, found) in enumerate(policies.items()):
        figures = [found["overall"] if task == "all" else found["tasks"][task] for task in tasks]
        middle = [index + width * (place - (len(policies) - 1) / 2) for index in range(len(tasks))]
        speedups = [figure["speedup"] for figure in figures]
        spread = [
            [speedup - figure["speedup_quartiles"][0] for speedup, figure in zip(speedups, figures, strict=True)],
            [figure["speedup_quartiles"][1] - speedup for speedup, figure in zip(speedups, figures, strict=True)],
        ]
        left.bar(middle, speedups, width, label=name, yerr=spread, capsize=2)
        depths = found["overall"]["acceptance_by_depth"]
        right.plot(range(1, len(depths) + 1), depths, marker="o", label=name)
    left.axhline(1.0, color="black", linewidth=0.8)
    left.set_xticks(range(len(tasks)), tasks, rotation=20, ha="right")
    left.set_ylabel("speedup over plain, end to end (median, quartiles)")
    right.set_xlabel("depth")
    right.set_ylabel("share of decided drafts accepted")
    right.set_ylim(0, 1)
    left.legend(frameon=False)
    figure.savefig(path)
    pyplot.close(figure)
