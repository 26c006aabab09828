"""Pieces of reading a head's decoder layers: what config and tensors must agree on, and taking matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from specexport.exporter.config import ACTIVATION_SPELLINGS, RopeConfig
from specexport.exporter.config_rope import read_ropes
from specexport.exporter.config_values import LIMITS, text
from specexport.exporter.heads.base import Keys, Tensors
from specexport.runtime.errors import CheckpointError

MLP_PARTS = ("gate_proj", "up_proj", "down_proj")


class Layer(NamedTuple):
    """A decoder layer: prefixes of its stored and of its canonical names, and the columns of its q, k and v."""

    prefix: str
    canonical: str
    width: int


def activation(keys: Keys, key: str = "hidden_act") -> str:
    """The canonical activation. Raises CheckpointError for one that is not built."""
    name = keys.take(key, "silu")
    found = ACTIVATION_SPELLINGS.get(name) if isinstance(name, str) else None
    if found is None:
        raise CheckpointError(f"{keys.where}: {key} is {text(name)}; expected one of {', '.join(ACTIVATION_SPELLINGS)}")
    return found


def agree(keys: Keys, key: str, found: int, tensor: str) -> None:
    """The config's ``key``, where it is there, must be what ``tensor`` has."""
    low, high = LIMITS.get(key, (1, 1 << 21))
    said = keys.integer(key, low, high)
    if said is not None and said != found:
        raise CheckpointError(f"{keys.where}: {key} is {said} but tensor {tensor!r} has {found}; one of them is wrong")
    if not low <= found <= high:
        raise CheckpointError(f"tensor {tensor!r} gives {key} {found}; expected {low} to {high}")


def biases(tensors: Tensors, prefixes: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether these projections have biases: all of them or none."""
    names = [f"{prefix}{part}.bias" for prefix in prefixes for part in parts]
    held = [name for name in names if name in tensors]
    if held and len(held) != len(names):
        raise CheckpointError(f"tensor {held[0]!r} is there but {sorted(set(names) - set(held))[0]!r} is missing")
    return bool(held)


def expect(keys: Keys, key: str, said: bool, found: bool, what: str) -> None:
    """What the config says or implies by ``key`` must be what was found in the file."""
    if said != found:
        there = "are in the file" if found else "are missing from the file"
        origin = f"{key} is {str(said).lower()}" if key in keys else f"{key} is absent, which means {str(said).lower()}"
        raise CheckpointError(f"{keys.where}: {origin}, but {what} {there}; one of them is wrong")


def take_linear(tensors: Tensors, canonical: str, name: str, shape: tuple[int, int], bias: bool) -> None:
    """Take ``name``'s weight of ``shape`` and its bias."""
    tensors.take(f"{canonical}.weight", f"{name}.weight", shape)
    if bias:
        tensors.take(f"{canonical}.bias", f"{name}.bias", shape[:1])


def take_mlp(tensors: Tensors, canonical: str, prefix: str, hidden: int, inner: int, bias: bool = False) -> None:
    """Take the three matrices of an MLP."""
    for name in MLP_PARTS:
        shape = (hidden, inner) if name == "down_proj" else (inner, hidden)
        take_linear(tensors, canonical + name, prefix + name, shape, bias)


def read_rope(keys: Keys, head_dim: int, defaults: Mapping[str, Any]) -> RopeConfig:
    """The rotary embedding of the head's own config; theta is 10000 where it is absent."""
    limit = keys.integer(
        "max_position_embeddings", *LIMITS["max_position_embeddings"], default=defaults["max_position_embeddings"]
    )
    names = {
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": None,
        "partial_rotary_factor": defaults.get("partial_rotary_factor", 1.0),
    }
    filled: dict[str, Any] = {name: keys.take(name, default) for name, default in names.items()}
    filled["original_max_position_embeddings"] = keys.integer(
        "original_max_position_embeddings", *LIMITS["original_max_position_embeddings"]
    )
    filled["max_position_embeddings"] = limit
    raw = {name: value for name, value in keys.raw.items() if value is not None}
    # Only default frequencies have one meaning at a partial width for every family; Phi-3's reader allows them.
    partial = filled["partial_rotary_factor"] != 1.0 and filled["rope_scaling"] is None
    return read_ropes("phi3" if partial else "llama", filled, raw, head_dim)[0]
