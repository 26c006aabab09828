"""Running ``build`` as a user does."""

from __future__ import annotations

from pathlib import Path

import pytest

from specexport.exporter import cli


def build(source: Path, output: Path, *options: str) -> int:
    return cli.main(["build", str(source), "-o", str(output), "--window", "128", *options])


def failure(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that says what went wrong."""
    shown = capsys.readouterr()
    lines = [line for line in shown.err.splitlines() if line.startswith("specexport: error: ")]
    assert shown.out == "" and len(lines) == 1 and "Traceback" not in shown.err
    return lines[0].removeprefix("specexport: error: ")
