"""Frequencies and tables against Transformers' own, dialect by dialect."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from specexport.exporter.config import RopeConfig, read_config
from specexport.exporter.rope import inv_freq, rope_tables
from specexport.runtime.errors import CheckpointError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "rope_theta": 500000.0,
}
LONG = [1.0 + 0.5 * i for i in range(32)]
SHORT = [1.0 + 0.01 * i for i in range(32)]
YARN = {"rope_type": "yarn", "factor": 4.0}
DIALECTS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"type": "linear", "factor": 8.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": YARN,
    "yarn-original": {**YARN, "original_max_position_embeddings": 1024},
    "yarn-mscale": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    "yarn-attention": {**YARN, "attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 2.0},
    "yarn-untruncated": {**YARN, "truncate": False},
    "yarn-point": {**YARN, "beta_fast": 1e-6, "beta_slow": 1e-7},
    "longrope": {"rope_type": "longrope", "factor": 4.0, "short_factor": SHORT, "long_factor": LONG},
    "longrope-attention": {
        "rope_type": "longrope",
        "attention_factor": 1.1,
        "factor": 0.5,
        "short_factor": SHORT,
        "long_factor": LONG,
    },
}


def ours(raw: dict[str, Any], index: int = 0) -> RopeConfig:
    return read_config(raw).ropes[index]


def assert_tables(rope: RopeConfig, module: torch.nn.Module, slots: int) -> None:
    cos, sin = module(torch.zeros(1, dtype=torch.float32), torch.arange(slots)[None])
    half = rope.rotary_dim // 2
    for mine, theirs in zip(rope_tables(rope, slots), (cos, sin), strict=True):
        assert mine.dtype == np.float32 and mine.shape == (slots, half)
        assert np.abs(mine - theirs[0, :, :half].numpy()).max() <= 1e-7


@pytest.mark.parametrize("name", DIALECTS)
def test_matches_transformers(name: str) -> None:
    raw = {**LLAMA, "rope_scaling": DIALECTS[name]}
    theirs = LlamaConfig(**{**LLAMA, "rope_scaling": dict(DIALECTS[name]) if DIALECTS[name] else None})
    rope = ours(raw)
    frequencies, scaling = inv_freq(rope, 4096)
    expected, expected_scaling = ROPE_INIT_FUNCTIONS[rope.kind](theirs, torch.device("cpu"))
    assert scaling == expected_scaling
    np.testing.assert_array_equal(frequencies, expected.numpy())
    assert_tables(rope, LlamaRotaryEmbedding(theirs), 4096)


def test_dynamic_refuses_a_longer_window() -> None:
    rope = ours({**LLAMA, "rope_scaling": DIALECTS["dynamic"]})
    with pytest.raises(CheckpointError, match=r"window of 4097 exceeds max_position_embeddings 4096"):
        inv_freq(rope, 4097)


@pytest.mark.parametrize(("slots", "factors"), [(64, SHORT), (65, LONG)])
def test_longrope_chooses_by_window(slots: int, factors: list[float]) -> None:
    raw = {
        **LLAMA,
        "architectures": ["Phi3ForCausalLM"],
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "su", "short_factor": SHORT, "long_factor": LONG},
    }
    rope = ours(raw)
    frequencies, _ = inv_freq(rope, slots)
    plain, _ = inv_freq(RopeConfig("default", 10000.0, 64, 4096), slots)
    np.testing.assert_allclose(plain / frequencies, factors, rtol=1e-6)
    theirs = Phi3Config(**{k: v for k, v in raw.items() if k != "architectures"}, pad_token_id=0)
    assert_tables(rope, Phi3RotaryEmbedding(theirs), slots)


def test_phi3_partial_rotary() -> None:
    raw = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.75}
    rope = ours(raw)
    assert rope.rotary_dim == 48
    theirs = Phi3Config(**{k: v for k, v in raw.items() if k != "architectures"}, pad_token_id=0)
    assert_tables(rope, Phi3RotaryEmbedding(theirs), 128)


def test_gemma_global_and_local() -> None:
    raw = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "head_dim": 64, "rope_theta": 1e6}
    raw["rope_scaling"] = {"rope_type": "linear", "factor": 8.0}
    theirs = Gemma3TextConfig(**{k: v for k, v in raw.items() if k != "architectures"})
    assert_tables(ours(raw, 0), Gemma3RotaryEmbedding(theirs), 512)
    theirs.rope_theta, theirs.rope_scaling = theirs.rope_local_base_freq, {"rope_type": "default"}
    assert_tables(ours(raw, 1), Gemma3RotaryEmbedding(theirs), 512)
