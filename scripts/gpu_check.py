"""Everything that needs a GPU, on any CUDA machine, in one command and at most six minutes.

    python scripts/gpu_check.py [--bundle BUNDLE] [--output gpu_check.json] [--seconds 360]

Compiles the TreeAttention kernels for the device and tests them, times them for 1 to 64 nodes against memory bandwidth
and against torch's attention with the same mask, and runs a bundle (default: the demo's) on every engine for GPUs that
is installed: its tokens against those of onnxruntime-cpu, and the time of a step by width. What is missing, or what no
time is left for, is skipped and said. Exits with 1 where something failed, or without a CUDA device.

The rule for tokens: up to the first one that differs the texts are the same, so the CPU's logits there tell how near
the two tokens were. A difference passes where that gap is at most what ``verify`` allows for the bundle's precision.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("gpu_phases.py")
#: Phases in order: (name, title, seconds that must be left for it to begin).
PHASES = (
    ("device", "device and copy rate", 5),
    ("compile_kernels", "compile kernels", 60),
    ("test_kernels", "test kernels", 15),
    ("time_kernels", "time kernels", 15),
    ("onnxruntime-cuda", "bundle on onnxruntime-cuda", 30),
    ("tensorrt", "bundle on tensorrt", 30),
    ("tensorrt-rtx", "bundle on tensorrt-rtx", 30),
)
#: Kept for ending and writing the result.
RESERVE = 5.0
_SHOWN = 160


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one phase: its figures, or why there are none. ``state``: ``done``, ``skipped`` or ``failed``."""

    state: str
    reason: str | None
    figures: dict[str, Any]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        return {"state": self.state, "reason": self.reason, "seconds": round(self.seconds, 1), **self.figures}


Run = Callable[[str, float], Mapping[str, Any]]


def run_phases(run: Run, seconds: float, clock: Callable[[], float], say: Callable[[str], None]) -> dict[str, Outcome]:
    """Run every phase that there is time for; without a device the rest is left out.

    Args:
        run: of (phase, seconds it may take) to what its worker wrote: ``figures``, ``skipped`` or ``failed``.
        clock: seconds, rising. say: shows a line at once.
    """
    start, outcomes = clock(), dict[str, Outcome]()
    for name, title, least in PHASES:
        begun = clock()
        left = start + seconds - RESERVE - begun
        if left < least:
            found: Mapping[str, Any] = {"skipped": f"{max(left, 0):.0f} s are left, it needs {least}"}
        else:
            found = run(name, left)
        state = next((key for key in ("failed", "skipped") if key in found), "done")
        reason = None if state == "done" else str(found[state])
        outcomes[name] = Outcome(state, reason, dict(found.get("figures", {})), clock() - begun)
        if name == "device" and state != "done":
            break
        say(f"{state:<8}{title} ({outcomes[name].seconds:.0f} s)" + (f": {reason}" if reason else ""))
    return outcomes


def tables(outcomes: Mapping[str, Outcome]) -> list[str]:
    """Lines of the tables: the kernels' by width and used rows, then each engine's."""
    lines: list[str] = []
    device = outcomes["device"].figures
    if device:
        lines.append(f"{device['name']}, capability {device['capability']}, copies at {device['copy_gb_s']:.0f} GB/s")
    kernels = outcomes["time_kernels"].figures.get("rows", []) if "time_kernels" in outcomes else []
    if kernels:
        head = ("nodes", "used", "us", "% of copy rate", "torch us", "times faster")
        lines += [
            "",
            "TreeAttention, fp16, 32 heads over 8, width 128",
            *_table(head, [_kernel_row(r) for r in kernels]),
        ]
    for name, outcome in outcomes.items():
        if (steps := outcome.figures.get("steps")) is not None:
            head = ("nodes", "ms a step", "of T = 1", "times the bound")
            timed = [(r["nodes"], f"{r['ms']:.3f}", f"{r['of_one']:.2f}", f"{r['of_bound']:.2f}") for r in steps]
            lines += ["", f"{name}: {outcome.figures['tokens']}", *_table(head, timed)]
    return lines


def _kernel_row(row: Mapping[str, Any]) -> tuple[Any, ...]:
    torch_us = row["torch_us"]
    other = ("-", "-") if torch_us is None else (f"{torch_us:.1f}", f"{torch_us / row['us']:.2f}")
    return row["nodes"], row["used"], f"{row['us']:.1f}", f"{100 * row['share']:.0f}", *other


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]


def worker(arguments: argparse.Namespace, folder: Path) -> Run:
    """Run phases as processes of their own, so that one that hangs or crashes ends alone."""

    def run(name: str, seconds: float) -> Mapping[str, Any]:
        result = folder / f"{name}.json"
        command = [sys.executable, str(WORKER), name, str(result), str(folder)]
        command += ["--bundle", str(arguments.bundle)] if arguments.bundle else []
        try:
            done = subprocess.run(command, timeout=seconds, capture_output=True, text=True, check=False)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after the {seconds:.0f} s that were left"}
        if result.is_file():
            found: Mapping[str, Any] = json.loads(result.read_text())
            return found
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return {"failed": f"ended with {done.returncode}: {last[:_SHOWN]}"}

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, help="Default: the demo's, which is downloaded and built if need be.")
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"))
    parser.add_argument("--seconds", type=float, default=360.0, help="Most time that all of it may take.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_phases(
            worker(arguments, Path(folder)),
            arguments.seconds,
            time.monotonic,
            lambda line: print(line, file=sys.stderr, flush=True),
        )
    if outcomes["device"].state != "done":
        print(f"no GPU check: {outcomes['device'].reason}", file=sys.stderr)
        return 1
    record = {name: outcome.to_dict() for name, outcome in outcomes.items()}
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(tables(outcomes)))
    print(f"written to {arguments.output}", file=sys.stderr)
    return 1 if any(outcome.state == "failed" for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
