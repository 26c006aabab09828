"""The static checks, as tests: whoever runs the tests has run them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(sys.executable).parent
CHECKS = {
    "ruff check": [str(SCRIPTS / "ruff"), "check", "."],
    "ruff format": [str(SCRIPTS / "ruff"), "format", "--check", "."],
    "mypy": [sys.executable, "-m", "mypy"],
    "lint-imports": [str(SCRIPTS / "lint-imports")],
}


@pytest.mark.parametrize("check", CHECKS)
def test_static_check(check: str, repository: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(repository / ".dev"), "NO_COLOR": "1"}
    done = subprocess.run(CHECKS[check], cwd=repository, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{check}\n{done.stdout}{done.stderr}"
