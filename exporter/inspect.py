"""What a bundle says about itself, and what follows from it."""

from __future__ import annotations

import json
import shlex
from typing import Any

from specexport.runtime.bundle import CHAT_TEMPLATE, MAX_TEXT_BYTES, REPORT, Bundle
from specexport.runtime.manifest import DTYPES

_ITEM_BYTES = dict(zip(DTYPES, (4, 2, 2), strict=True))


def describe(bundle: Bundle) -> dict[str, Any]:
    """``inspect --json``.

    Returns:
        ``bundle``: the path; ``manifest``: as it stands; ``derived``: ``cache_bytes`` of all layers at S slots,
        ``total_bytes`` of the listed files, ``chat_template`` (is there one), ``verified`` (the verdict of
        report.json, null without one), ``command`` (for a shell), ``devices`` (that have a profile or an engine).
    """
    manifest = bundle.manifest
    target = manifest.target
    return {
        "bundle": str(bundle.path),
        "manifest": manifest.to_dict(),
        "derived": {
            "cache_bytes": 2
            * target.layers
            * target.kv_heads
            * target.slots
            * target.head_dim
            * _ITEM_BYTES[target.dtype],
            "total_bytes": sum(file.bytes for file in manifest.files.values()),
            "chat_template": CHAT_TEMPLATE in manifest.files,
            "verified": _verdict(bundle),
            "command": shlex.join(manifest.command),
            "devices": {
                kind: sorted(path.stem if path.is_file() else path.name for path in (bundle.path / kind).glob("*"))
                for kind in ("profiles", "engines")
            },
        },
    }


def _verdict(bundle: Bundle) -> bool | None:
    """``passed`` of the report, None when there is no readable report."""
    path = bundle.path / REPORT
    try:
        if path.is_symlink() or path.stat().st_size > MAX_TEXT_BYTES:
            return None
        passed = json.loads(path.read_text())["passed"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return passed if isinstance(passed, bool) else None
