"""Reading the rotary embeddings of a config: six dialects, written in two ways.

``rope_scaling`` (with ``rope_theta``) is how Transformers 4 writes them, ``rope_parameters`` how Transformers 5 does.
A config that holds both must mean the same by both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specexport.exporter.config_values import LIMITS, boolean, integer, number, text
from specexport.runtime.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One rotary embedding. Layers refer to it by index in :attr:`TargetConfig.ropes`.

    Attributes:
        kind: ``default``, ``linear``, ``dynamic``, ``llama3``, ``yarn`` or ``longrope``.
        theta: base of the frequencies.
        rotary_dim: rotated width of a head, even, at most head_dim (smaller with ``partial_rotary_factor``).
        max_position_embeddings: the model's own limit, which ``dynamic``, ``yarn`` and ``longrope`` refer to.
        params: the dialect's further numbers, by their Transformers names (``factor``, ``low_freq_factor``,
            ``original_max_position_embeddings``, ``short_factor``, ``attention_factor``, ``mscale``...).
    """

    kind: str
    theta: float
    rotary_dim: int
    max_position_embeddings: int
    params: dict[str, float | int | bool | tuple[float, ...]] = field(default_factory=dict)


# Per dialect: required keys, and optional ones. They are Transformers' own (modeling_rope_utils).
_ROPE_KEYS: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    "default": (frozenset(), frozenset()),
    "linear": (frozenset({"factor"}), frozenset()),
    "dynamic": (frozenset({"factor"}), frozenset({"original_max_position_embeddings"})),
    "yarn": (
        frozenset({"factor"}),
        frozenset(
            {
                "original_max_position_embeddings",
                "attention_factor",
                "beta_fast",
                "beta_slow",
                "mscale",
                "mscale_all_dim",
                "truncate",
            }
        ),
    ),
    "longrope": (
        frozenset({"short_factor", "long_factor"}),
        frozenset({"original_max_position_embeddings", "attention_factor", "factor"}),
    ),
    "llama3": (
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
        frozenset(),
    ),
}


def read_ropes(
    architecture: str, c: Mapping[str, Any], raw: Mapping[str, Any], head_dim: int
) -> tuple[RopeConfig, ...]:
    """The rotary embeddings: one, or for Gemma 3 the global and the local one.

    Args:
        architecture: as in ``TargetConfig``.
        c: the config with defaults filled in. ``raw`` tells which keys the file really holds.
        head_dim: width of a head.
    """
    keys = ("rope_theta", "rope_local_base_freq") if architecture == "gemma3" else ("rope_theta",)
    parameters = c["rope_parameters"]
    legacy = tuple(
        _rope(architecture, c, head_dim, c["rope_scaling"] if key == "rope_theta" else None, c[key], "rope_scaling")
        for key in (keys if parameters is None or "rope_scaling" in raw else ())
    )
    if parameters is None:
        return legacy
    if not isinstance(parameters, dict):
        raise CheckpointError(f"config: rope_parameters must be an object, got {text(parameters)}")
    parts = [parameters]
    if len(keys) == 2:
        kinds = ("full_attention", "sliding_attention")
        if set(parameters) != set(kinds):
            raise CheckpointError(f"config: rope_parameters must hold {' and '.join(kinds)}, got {text(parameters)}")
        parts = [parameters[kind] for kind in kinds]
    ropes = tuple(
        _rope(architecture, c, head_dim, part, c[key], "rope_parameters") for part, key in zip(parts, keys, strict=True)
    )
    for key, rope in zip(keys, ropes, strict=True):
        if key in raw and raw[key] != rope.theta:
            raise CheckpointError(
                f"config: {key} is {text(raw[key])} but rope_parameters says {rope.theta}; remove the wrong one"
            )
    for old, new in zip(legacy, ropes, strict=False):
        if old != new:
            raise CheckpointError(
                f"config: rope_scaling says {text(_describe(old))} but rope_parameters says {text(_describe(new))}; "
                "remove the wrong one"
            )
    return ropes


def _describe(rope: RopeConfig) -> dict[str, Any]:
    return {"rope_type": rope.kind, "rope_theta": rope.theta, **rope.params}


def _rope(architecture: str, c: Mapping[str, Any], head_dim: int, part: Any, theta: Any, source: str) -> RopeConfig:
    if part is not None and not isinstance(part, dict):
        raise CheckpointError(f"config: {source} must be an object, got {text(part)}")
    params: dict[str, Any] = {k: v for k, v in (part or {}).items() if v is not None}
    kinds = {str(params.pop(k)) for k in ("rope_type", "type") if k in params}
    # Phi-3's first configs say "su" or "yarn" for what is longrope today; Transformers renames them.
    aliases = {"su": "longrope", "yarn": "longrope"} if architecture == "phi3" else {}
    kinds = {aliases.get(kind, kind) for kind in kinds}
    bare = not kinds and not params.keys() - {"rope_theta", "partial_rotary_factor"}
    kind = "default" if bare else kinds.pop() if kinds else ""
    if kinds or kind not in _ROPE_KEYS:
        raise CheckpointError(f"config: {source} {text(part)} has no single rope_type of {', '.join(_ROPE_KEYS)}")
    partial = c["partial_rotary_factor"]
    if source == "rope_parameters":
        theta = params.pop("rope_theta", theta)
        inner = params.pop("partial_rotary_factor", partial)
        if inner != partial and partial != 1.0:
            raise CheckpointError(f"config: partial_rotary_factor is {text(partial)}, but {text(inner)} in {source}")
        partial = inner
    partial = number("partial_rotary_factor", partial, 0.0, 1.0)
    if partial != 1.0 and architecture != "phi3":
        raise CheckpointError(f"config: partial_rotary_factor {partial} is not what Transformers builds for this model")
    rotary = int(head_dim * partial)
    if rotary % 2 or rotary < 2:
        raise CheckpointError(f"config: the rotated width {rotary} of head_dim {head_dim} must be even and positive")
    required, optional = _ROPE_KEYS[kind]
    if missing := sorted(required - params.keys()):
        raise CheckpointError(f"config: {source} of type {kind} lacks {missing[0]}")
    if unknown := sorted(params.keys() - required - optional):
        raise CheckpointError(f"config: {source} of type {kind} has an unknown key {unknown[0]}")
    limit = c["max_position_embeddings"]
    checked: dict[str, Any] = {key: _rope_value(key, value, rotary) for key, value in params.items()}
    if kind == "longrope":
        _longrope(checked, c["original_max_position_embeddings"], limit, source)
    elif kind == "dynamic":
        checked.pop("original_max_position_embeddings", None)  # Transformers reads max_position_embeddings instead
    elif kind == "yarn":
        checked.setdefault("original_max_position_embeddings", limit)
    elif kind == "llama3" and checked["low_freq_factor"] >= checked["high_freq_factor"]:
        raise CheckpointError(f"config: {source} needs low_freq_factor < high_freq_factor, got {text(part)}")
    # Only longrope reads the top-level key; Phi-3 writes it always.
    if kind != "longrope" and architecture != "phi3" and c["original_max_position_embeddings"] is not None:
        raise CheckpointError(f"config: original_max_position_embeddings has no meaning with rope_type {kind}")
    return RopeConfig(kind, number("rope_theta", theta, 1.0, 1e15), rotary, limit, checked)


def _longrope(params: dict[str, Any], original: int | None, limit: int, source: str) -> None:
    """Fill in ``original_max_position_embeddings`` and ``factor``, which Transformers takes from several places."""
    inner = params.pop("original_max_position_embeddings", None)
    if source == "rope_parameters":
        original = inner if inner is not None else original
    elif inner is not None and inner != (limit if original is None else original):
        raise CheckpointError(
            f"config: original_max_position_embeddings is {inner} in rope_scaling but Transformers uses "
            f"{limit if original is None else original}; write it beside rope_scaling, not in it"
        )
    if original is not None:
        ratio = limit / original
        params["factor"] = params.get("factor", ratio) if source == "rope_parameters" else ratio
    if "factor" not in params:
        if "attention_factor" not in params:
            raise CheckpointError(f"config: {source} of type longrope needs factor or original_max_position_embeddings")
        params["factor"] = 1.0
    params["original_max_position_embeddings"] = limit if original is None else original


def _rope_value(key: str, value: Any, rotary: int) -> float | int | bool | tuple[float, ...]:
    if key in ("short_factor", "long_factor"):
        if not isinstance(value, list) or len(value) != rotary // 2:
            raise CheckpointError(f"config: {key} must be a list of {rotary // 2} numbers, got {text(value)}")
        return tuple(number(key, v, 0.0, 1e9) for v in value)
    if key == "truncate":
        return boolean(key, value)
    if key == "original_max_position_embeddings":
        return integer(key, value, *LIMITS[key])
    zero = key not in ("factor", "low_freq_factor", "high_freq_factor", "attention_factor")
    return number(key, value, 0.0, 1e9, inclusive=zero)  # a zero beta or mscale means "not given" to Transformers
