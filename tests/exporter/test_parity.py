"""Every architecture against Transformers: torch module, exported graph, and the graph lowered for the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specexport.engines.ort import OrtEngine
from specexport.exporter.config import TargetConfig, read_config
from specexport.exporter.onnx import DTYPES, build_module, export_target, save_target
from specexport.exporter.parity import Recompute, exercise
from specexport.exporter.pipeline import write_lowered
from specexport.runtime.engine import TargetEngine
from tests.exporter.torch_engine import TorchEngine

SLOTS = 48

_BASE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}

_LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.0]}
_GEMMA: dict[str, Any] = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9, "num_hidden_layers": 3}

#: name -> (Transformers model class, config class, what differs from the base)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-mha-bias": ("Llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
    "llama-mqa-head-dim": ("Llama", {"num_key_value_heads": 1, "head_dim": 16}),
    "llama-linear": ("Llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama-dynamic": ("Llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    "llama-llama3": (
        "Llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "llama-yarn": (
        "Llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
    "mistral-window": ("Mistral", {"sliding_window": 10}),
    "mistral-full": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1, "tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma3": ("Gemma3Text", {**_GEMMA, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    "gemma3-linear": (
        "Gemma3Text",
        {**_GEMMA, "sliding_window_pattern": 2, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "phi3": ("Phi3", {"sliding_window": 12}),
    "phi3-long": (
        "Phi3",
        # Below this length Transformers would use the short factors; every sequence of the test is longer.
        {"original_max_position_embeddings": 4, "rope_scaling": _LONGROPE},
    ),
    "phi3-short": (
        "Phi3",
        {"original_max_position_embeddings": 64, "rope_scaling": _LONGROPE},
    ),
    "phi3-partial": ("Phi3", {"partial_rotary_factor": 0.5, "hidden_size": 64}),
}


class StateDict:
    """A :class:`WeightSource` over a model in memory."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def reference(case: str) -> tuple[Any, TargetConfig, StateDict]:
    """A random Transformers model, its config as we read it, and its tensors."""
    import transformers

    kind, changes = CASES[case]
    config = getattr(transformers, f"{kind}Config")(**{**_BASE, **changes})
    torch.manual_seed(hash_of(case))
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    raw = model.config.to_dict()
    raw["architectures"] = [type(model).__name__]
    return model, read_config(raw), StateDict(dict(model.state_dict()))


def hash_of(text: str) -> int:
    return sum(ord(char) * 31**index for index, char in enumerate(text)) % 2**31


def recompute(model: Any) -> Recompute:
    """Logits by a full forward of the Transformers model, remembered: the engines are led over the same sequences."""
    known: dict[tuple[int, ...], np.ndarray] = {}

    def run(tokens: Sequence[int]) -> np.ndarray:
        key = tuple(tokens)
        if key not in known:
            with torch.no_grad():
                known[key] = model(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()
        return known[key]

    return run


def save_engine(config: TargetConfig, weights: StateDict, folder: Path, dtype: str = "fp32") -> None:
    model, target = export_target(config, SLOTS, DTYPES[dtype])
    save_target(model, target, weights, folder / "target.onnx")


@pytest.mark.parametrize("case", CASES)
def test_engines_equal_a_full_recompute(case: str, tmp_path: Path) -> None:
    model, config, weights = reference(case)
    full = recompute(model)
    module = build_module(config, SLOTS, torch.float32, weights)
    vocab = config.vocab_size
    exercise(lambda: TorchEngine(module), full, vocab=vocab)
    save_engine(config, weights, tmp_path)

    def engine() -> TargetEngine:
        return OrtEngine(tmp_path, threads=1)

    exercise(engine, full, vocab=vocab)
    write_lowered(tmp_path, config, SLOTS, "fp32")
    exercise(engine, full, vocab=vocab)
