"""``report.json`` of a bundle: written whole or not at all, by those who measure different things."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specexport.runtime.bundle import MAX_TEXT_BYTES, REPORT
from specexport.runtime.replacing import replace_text

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
    replace_text(bundle / REPORT, json.dumps(record, indent=2, allow_nan=False) + "\n")
