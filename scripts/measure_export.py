"""Peak memory and stage times of an export, beside the size of the weights and the cost of importing torch.

    python scripts/measure_export.py CHECKPOINT [--precision fp16] [--window 2048]

The build runs in a process of its own, as ``specexport build`` does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def run(*command: str) -> str:
    return subprocess.run([sys.executable, *command], check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--window", default="2048")
    arguments = parser.parse_args()
    peak = "import resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    torch_bytes = int(run("-c", f"import torch; {peak}"))
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "bundle"
        report = json.loads(
            run(
                "-m", "specexport.exporter.cli", "build", arguments.checkpoint, "-o", str(bundle), "--json",
                "--precision", arguments.precision, "--window", arguments.window,
            )
        )  # fmt: skip
        weights = (bundle / "target.onnx.data").stat().st_size
    rss = report["peak_rss_bytes"]
    print(f"weights {weights / 1e6:.0f} MB ({arguments.precision}), torch import {torch_bytes / 1e6:.0f} MB")
    print(f"peak {rss / 1e6:.0f} MB = {rss / weights:.2f} x weights = {(rss - torch_bytes) / weights:.2f} x + torch")
    for name, seconds in report["stages"].items():
        print(f"{name:>20} {seconds:7.1f} s")


if __name__ == "__main__":
    main()
