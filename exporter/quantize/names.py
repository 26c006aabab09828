"""Regular expressions from configs, which name modules."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from specexport.exporter.config_values import text
from specexport.runtime.errors import CheckpointError

# What makes matching take time beyond reason: repeated groups, and many repetitions in a row.
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPETITIONS = 8


def pattern(value: str, where: str) -> Callable[[str], Any]:
    """The ``match`` of a regular expression in a config.

    Raises:
        CheckpointError: not one, or one that could take forever.
    """
    if len(value) <= 1024 and not _REPEATED_GROUP.search(value) and len(re.findall(r"[*+{]", value)) <= _REPETITIONS:
        try:
            return re.compile(value).match
        except (re.error, OverflowError, RecursionError):
            pass
    raise CheckpointError(
        f"config: {where} has {text(value)}; expected a regular expression without repeated groups and with at most "
        f"{_REPETITIONS} repetitions"
    )
