"""Rotary tables, computed with the operations of Transformers in its order, so that they agree to the last bit.

Sources: RoPE (Su et al. 2021), YaRN (Peng et al. 2023), LongRoPE (Ding et al. 2024), Llama 3.1's frequency smoothing.

The tables of an exported graph are constants, so a dialect whose frequencies depend on the length of the sequence is
settled once, by the window (the cache slots) the graph is built for:

* ``dynamic`` equals ``default`` up to ``max_position_embeddings``. A larger window is refused: Transformers changes
  the base as the sequence grows, and keys already in the cache would stay rotated by the old one.
* ``longrope`` takes ``short_factor`` if the window fits ``original_max_position_embeddings`` and ``long_factor``
  otherwise. Transformers chooses by the length reached so far, also leaving the cache as it was; a graph whose window
  is larger than the original context therefore differs from it on short texts, but never from itself.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specexport.exporter.config import RopeConfig
from specexport.runtime.errors import CheckpointError

FloatArray = npt.NDArray[np.float32]


def inv_freq(rope: RopeConfig, slots: int) -> tuple[FloatArray, float]:
    """Inverse frequencies for a window of ``slots`` positions.

    Returns:
        float32 [rotary_dim / 2], and the attention scaling: the factor on both cos and sin.

    Raises:
        CheckpointError: a ``dynamic`` rope and a window beyond ``max_position_embeddings``.
    """
    frequencies, scaling = _inv_freq(rope, slots)
    return frequencies.numpy(), scaling


def rope_tables(rope: RopeConfig, slots: int) -> tuple[FloatArray, FloatArray]:
    """(cos, sin) for positions 0 .. slots - 1, each float32 [slots, rotary_dim / 2], attention scaling included.

    Raises:
        CheckpointError: see :func:`inv_freq`.
    """
    frequencies, scaling = _inv_freq(rope, slots)
    angles = torch.arange(slots, dtype=torch.float32)[:, None] * frequencies[None, :]
    return (angles.cos() * scaling).numpy(), (angles.sin() * scaling).numpy()


def _inv_freq(rope: RopeConfig, slots: int) -> tuple[torch.Tensor, float]:
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rope.rotary_dim
    periods = rope.theta**exponents
    p: dict[str, Any] = rope.params
    match rope.kind:
        case "default":
            return 1.0 / periods, 1.0
        case "linear":
            return 1.0 / periods / p["factor"], 1.0
        case "dynamic":
            if slots > rope.max_position_embeddings:
                raise CheckpointError(
                    f"a window of {slots} exceeds max_position_embeddings {rope.max_position_embeddings} of a dynamic "
                    "rope, whose base would change under the cached keys; build with a window of at most that"
                )
            return 1.0 / periods, 1.0
        case "llama3":
            return _llama3(1.0 / periods, p), 1.0
        case "yarn":
            return _yarn(periods, rope), _yarn_scaling(p)
        case "longrope":
            long = slots > p["original_max_position_embeddings"]
            factors = torch.tensor(p["long_factor" if long else "short_factor"], dtype=torch.float32)
            return 1.0 / (factors * periods), _longrope_scaling(p)
    raise CheckpointError(f"rope type {rope.kind!r} is not one of default, linear, dynamic, llama3, yarn, longrope")


def _llama3(frequencies: torch.Tensor, p: dict[str, Any]) -> torch.Tensor:
    """Divide the slow frequencies by ``factor``, keep the fast ones, and blend in between."""
    factor, low, high = p["factor"], p["low_freq_factor"], p["high_freq_factor"]
    original = p["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / frequencies
    slow, fast = wavelengths > original / low, wavelengths < original / high
    scaled = torch.where(slow, frequencies / factor, frequencies)
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    return torch.where(~fast & ~slow, blended, scaled)


def _yarn(periods: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Blend extrapolated (fast) and interpolated (slow) frequencies along a linear ramp over the dimensions."""
    p: dict[str, Any] = rope.params
    factor: float = p["factor"]
    dim, original = rope.rotary_dim, p["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        """The dimension that turns ``rotations`` times within the original context."""
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(rope.theta))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    return 1.0 / (factor * periods) * (1 - keep) + 1.0 / periods * keep


def _yarn_scaling(p: dict[str, Any]) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if p["factor"] <= 1 else 0.1 * weight * math.log(p["factor"]) + 1.0

    if "attention_factor" in p:
        return float(p["attention_factor"])
    if p.get("mscale") and p.get("mscale_all_dim"):
        return mscale(p["mscale"]) / mscale(p["mscale_all_dim"])
    return mscale(1.0)


def _longrope_scaling(p: dict[str, Any]) -> float:
    if "attention_factor" in p:
        return float(p["attention_factor"])
    if p["factor"] <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(p["factor"]) / math.log(p["original_max_position_embeddings"]))
