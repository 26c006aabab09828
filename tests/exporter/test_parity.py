"""Every architecture against Transformers: torch module, exported graph, and the graph lowered for the CPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from specexport.engines.ort import OrtEngine
from specexport.exporter.config import TargetConfig, read_config
from specexport.exporter.layers import Capture, Target
from specexport.exporter.lower import lower_target
from specexport.exporter.onnx import build_module, export_target, save_target
from specexport.exporter.parity import Deviation, Recompute, exercise
from specexport.exporter.quantize.plan import FLOATS
from specexport.runtime.cache import CacheRows
from specexport.runtime.engine import Step
from specexport.runtime.tree import Tree
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


#: Graphs by all that decides their operators: rope dialects differ in their tables alone.
_GRAPHS: dict[tuple[object, ...], ir.Model] = {}


def save_engine(
    config: TargetConfig, weights: StateDict, folder: Path, dtype: str = "fp32", captures: tuple[Capture, ...] = ()
) -> None:
    """Export and save a target; tracing is most of the time, so equal graphs are traced once."""
    rotated = tuple(rope.rotary_dim for rope in config.ropes)
    key = (replace(config, ropes=(), max_position_embeddings=0), rotated, dtype, captures)
    if key not in _GRAPHS:
        _GRAPHS[key], _ = export_target(config, SLOTS, FLOATS[dtype], captures)
    with torch.device("meta"):
        target = Target(config, SLOTS, FLOATS[dtype], captures).eval()
    save_target(_GRAPHS[key], target, weights, folder / "target.onnx")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def engines(config: TargetConfig, weights: StateDict, folder: Path, dtype: str = "fp32") -> Iterator[tuple[str, Any]]:
    """(name, what makes the engine): the torch module, its graph, and the graph lowered for the CPU."""
    module = build_module(config, SLOTS, FLOATS[dtype], weights)
    yield "torch", lambda: TorchEngine(module)
    save_engine(config, weights, folder, dtype)
    yield "exported", lambda: OrtEngine(folder, threads=1)
    lower_target(folder, config, SLOTS, dtype)
    yield "lowered", lambda: OrtEngine(folder, threads=1)


@pytest.mark.parametrize("case", CASES)
def test_engines_equal_a_full_recompute(case: str, tmp_path: Path) -> None:
    model, config, weights = reference(case)
    full = recompute(model)
    for name, engine in engines(config, weights, tmp_path):
        logits, cache = exercise(engine, full, vocab=config.vocab_size)
        assert logits.error <= 1e-4, f"{name}: {logits}"
        assert cache.error <= 1e-4, f"{name}: {cache}"


@pytest.mark.parametrize("case", ["llama-gqa", "gemma3"])
def test_half_precision_is_as_close_as_it_can_be(case: str, tmp_path: Path) -> None:
    """Against the fp32 model; Transformers' own fp16 model is the measure of what rounding costs."""
    model, config, weights = reference(case)
    full = recompute(model)
    half = reference(case)[0].half()
    floor = Deviation()
    for seed in range(8):
        tokens = np.random.default_rng(seed).integers(0, config.vocab_size, 40).tolist()
        floor.note(recompute(half)(tokens), full(tokens), "")
    for name, engine in engines(config, weights, tmp_path, "fp16"):
        logits, cache = exercise(engine, full, vocab=config.vocab_size)
        assert logits.error <= 2 * floor.error, f"{name}: {logits}, Transformers {floor}"
        assert cache.relative <= 2e-3, f"{name}: {cache}"  # two ways of ours: a few units in the last place


@pytest.mark.parametrize(
    ("case", "captures"),
    [("llama-gqa", (0, 1, 2)), ("llama-gqa", ("final", 1)), ("gemma3", (2, "final", 0, 3)), ("phi3", (2,))],
)
def test_features_are_the_hidden_states(case: str, captures: tuple[Capture, ...], tmp_path: Path) -> None:
    """Of every node of a branching step, concatenated in the order asked for."""
    model, config, weights = reference(case)
    last: list[torch.Tensor] = []
    model.model.layers[-1].register_forward_hook(
        lambda module, args, output: last.append(output[0] if isinstance(output, tuple) else output)
    )
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, config.vocab_size, 14)
    tree = Tree(rng.integers(0, config.vocab_size, 5), np.array([-1, 0, 0, 1, 2]))
    expected = []
    for node in range(len(tree)):
        with torch.no_grad():
            tokens = torch.from_numpy(np.concatenate([prompt, tree.tokens[tree.path(node)]]))[None]
            states = list(model(tokens, use_cache=False, output_hidden_states=True).hidden_states)
        named: dict[Capture, torch.Tensor] = dict(enumerate(states[:-1]))
        named |= {"final": states[-1], config.num_layers: last[-1].reshape(states[-1].shape)}
        expected.append(torch.cat([named[capture][0, -1] for capture in captures]).numpy())
    module = build_module(config, SLOTS, torch.float32, weights, captures)
    save_engine(config, weights, tmp_path, captures=captures)
    made = [TorchEngine(module), OrtEngine(tmp_path, threads=1)]
    lower_target(tmp_path, config, SLOTS, "fp32")
    made.append(OrtEngine(tmp_path, threads=1))
    for engine in made:
        engine.run(Step.chain(prompt, select=[13]))
        # Logits of one node only: features come for all of them.
        engine.run(Step.of(tree, CacheRows(14), [0]))
        found = engine.features()
        assert found.shape == (5, len(captures) * config.hidden_size)
        assert np.abs(found - np.array(expected)).max() <= 1e-4
        engine.run(Step.chain(tree.tokens[:1], 14))
        assert len(engine.features()) == 1
        assert np.abs(engine.features()[0] - expected[0]).max() <= 1e-4
