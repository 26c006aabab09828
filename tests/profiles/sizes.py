"""Models and drafters that tests plan for."""

from __future__ import annotations

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
