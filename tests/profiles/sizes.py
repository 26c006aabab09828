"""Models and drafters that tests plan for."""

from __future__ import annotations

from collections.abc import Callable

from scripts.known_boundaries import eagle_8b as eagle_8b
from scripts.known_boundaries import llama_8b as llama_8b
from specexport.profiles.sizes import ModelSize, decoder_size


def smollm2(precision: str = "fp32") -> ModelSize:
    """SmolLM2-135M."""
    return decoder_size(
        heads=9,
        kv_heads=3,
        head_dim=64,
        hidden_size=576,
        intermediate_size=1536,
        vocab_size=49152,
        windows=[None] * 30,
        tied=True,
        precision=precision,
        cache="fp32",
        positions=8192,
    )


def smollm2_360m(precision: str = "fp32") -> ModelSize:
    """Llama's shape of 360M (``scripts/make_checkpoint.py smollm2-360m``)."""
    return decoder_size(
        heads=15,
        kv_heads=5,
        head_dim=64,
        hidden_size=960,
        intermediate_size=2560,
        vocab_size=49152,
        windows=[None] * 32,
        tied=True,
        precision=precision,
        cache="fp32",
        positions=8192,
    )


def gemma3_270m(precision: str = "fp32") -> ModelSize:
    """Gemma-3-270M, of whose layers every sixth attends to all rows."""
    return decoder_size(
        heads=4,
        kv_heads=1,
        head_dim=256,
        hidden_size=640,
        intermediate_size=2048,
        vocab_size=262144,
        windows=[None if layer % 6 == 5 else 512 for layer in range(18)],
        tied=True,
        precision=precision,
        cache="fp32",
        positions=32768,
    )


SIZES: dict[str, Callable[[str], ModelSize]] = {
    "smollm2-135m": smollm2,
    "smollm2-360m": smollm2_360m,
    "gemma-3-270m": gemma3_270m,
}
