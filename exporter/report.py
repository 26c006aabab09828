"""``report.json`` of a bundle: written whole or not at all, by those who measure different things."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specexport.runtime.bundle import MAX_TEXT_BYTES, REPORT

#: Entry of the quality report, which is measured apart from the checks.
QUALITY = "quality"


def read_report(bundle: Path) -> dict[str, Any]:
    """The report of a bundle; empty when there is none that can be read."""
    path = bundle / REPORT
    try:
        if path.is_symlink() or path.stat().st_size > MAX_TEXT_BYTES:
            return {}
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def write_report(bundle: Path, record: Mapping[str, Any]) -> None:
    """Replace the report of a bundle."""
    path = bundle / REPORT
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except BaseException:  # a full disk, an interrupt: leave nothing behind that no one looks for
        temporary.unlink(missing_ok=True)
        raise
