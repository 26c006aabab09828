"""Bounded checks of single config values; every failure is one line that names the key."""

from __future__ import annotations

from typing import Any

from specexport.runtime.errors import CheckpointError

# Bounds far above any published model: a hostile config must not make us allocate.
LIMITS = {
    "vocab_size": (1, 1 << 21),
    "hidden_size": (1, 1 << 16),
    "intermediate_size": (1, 1 << 19),
    "num_hidden_layers": (1, 512),
    "num_attention_heads": (1, 512),
    "num_key_value_heads": (1, 512),
    "head_dim": (2, 1 << 12),
    "max_position_embeddings": (2, 1 << 27),
    "original_max_position_embeddings": (2, 1 << 27),
    "sliding_window": (1, 1 << 27),
    "max_window_layers": (0, 1 << 16),
    "sliding_window_pattern": (1, 512),
}


def integer(key: str, value: Any, low: int, high: int) -> int:
    """``value`` if it is an integer within both bounds. Raises CheckpointError otherwise, as all here do."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise CheckpointError(f"config: {key} must be an integer from {low} to {high}, got {text(value)}")
    return value


def number(key: str, value: Any, low: float, high: float, *, inclusive: bool = False) -> float:
    """``value`` if it is a number above ``low`` (or, if ``inclusive``, at ``low``) and at most ``high``."""
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    # The comparison is exact for huge integers, and false for a NaN.
    if not good or not (low <= value <= high) or (value == low and not inclusive):
        bound = "at least" if inclusive else "above"
        raise CheckpointError(f"config: {key} must be a number {bound} {low:g}, at most {high:g}, not {text(value)}")
    return float(value)


def boolean(key: str, value: Any) -> bool:
    """``value`` if it is true or false."""
    if not isinstance(value, bool):
        raise CheckpointError(f"config: {key} must be true or false, got {text(value)}")
    return value


def text(value: Any) -> str:
    """``value`` on one bounded line, for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
