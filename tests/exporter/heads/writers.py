"""Tiny random heads in every dialect, each with the record and the canonical tensors that reading it must give.

Written from the description of the dialects, with no help from the readers: names, order and flags stand here twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from specexport.exporter.config import RopeConfig, TargetConfig, read_config
from specexport.exporter.heads.record import BlockConfig, HeadLineage, HeadRecord, MedusaRecord, RecurrentRecord

#: Target width, layers and vocabulary; draft vocabulary; heads, kv heads and head_dim (not width / heads) of a head.
H, N, V, VD = 16, 8, 48, 20
HEADS, KV, DIM, INNER = 4, 2, 6, 24
TARGET_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 24,
    "num_hidden_layers": N,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
TARGET: TargetConfig = read_config(TARGET_CONFIG)
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Tiny:
    """One checkpoint: what is on disk, and what it means. ``file``: the name of its weights."""

    config: dict[str, Any] | None
    tensors: Tensors
    record: HeadRecord
    canonical: Tensors
    file: str = "model.safetensors"
    target: TargetConfig | None = None
    warnings: int = 0
    others: Tensors = field(default_factory=dict)  # the target's own tensors, in a merged checkpoint

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True, exist_ok=True)
        if self.config is not None:
            (directory / "config.json").write_text(json.dumps(self.config))
        everything = {name: tensor.contiguous() for name, tensor in (self.tensors | self.others).items()}
        if self.file.endswith(".safetensors"):
            save_file(everything, directory / self.file)
        else:
            torch.save(everything, directory / self.file)
        return directory


class Random:
    """Random tensors, each different."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator)


def draft_map(seed: int = 0) -> tuple[Tensor, Tensor, np.ndarray[Any, Any]]:
    """(d2t, t2d, absolute ids) of VD of V tokens."""
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(seed))[:VD].sort().values
    marks = torch.zeros(V, dtype=torch.bool)
    marks[ids] = True
    return ids - torch.arange(VD), marks, ids.numpy()


def layer(
    random: Random,
    stored: str,
    index: int,
    hidden: int,
    width: int,
    *,
    heads: int = HEADS,
    kv: int = KV,
    dim: int = DIM,
    input_norm: bool = True,
    bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    gated: bool = False,
) -> tuple[Tensors, Tensors]:
    """One decoder layer: (stored, canonical) tensors."""
    names: list[tuple[str, str, tuple[int, ...]]] = [
        ("self_attn.q_proj.weight", "attention.q_proj.weight", (heads * dim * (2 if gated else 1), width)),
        ("self_attn.k_proj.weight", "attention.k_proj.weight", (kv * dim, width)),
        ("self_attn.v_proj.weight", "attention.v_proj.weight", (kv * dim, width)),
        ("self_attn.o_proj.weight", "attention.o_proj.weight", (hidden, heads * dim)),
        ("mlp.gate_proj.weight", "mlp.gate_proj.weight", (INNER, hidden)),
        ("mlp.up_proj.weight", "mlp.up_proj.weight", (INNER, hidden)),
        ("mlp.down_proj.weight", "mlp.down_proj.weight", (hidden, INNER)),
        ("post_attention_layernorm.weight", "mlp_norm.weight", (hidden,)),
    ]
    if input_norm:
        names.append(("input_layernorm.weight", "input_norm.weight", (hidden,)))
    if bias:
        names += [
            (f"self_attn.{n}_proj.bias", f"attention.{n}_proj.bias", ((heads if n == "q" else kv) * dim,))
            for n in "qkv"
        ]
    if output_bias:
        names.append(("self_attn.o_proj.bias", "attention.o_proj.bias", (hidden,)))
    if qk_norm:
        names += [(f"self_attn.{n}_norm.weight", f"attention.{n}_norm.weight", (dim,)) for n in "qk"]
    made = {theirs: random(*shape) for theirs, _, shape in names}
    return (
        {stored + theirs: made[theirs] for theirs in made},
        {f"layers.{index}.{mine}": made[theirs] for theirs, mine, _ in names},
    )


def block_config(hidden: int = H, theta: float = 500000.0, positions: int = 64, **changes: Any) -> BlockConfig:
    """The layers that :func:`llama` describes."""
    dim = changes.get("head_dim", DIM)
    rope = changes.pop("rope", RopeConfig("default", theta, dim, positions))
    base = BlockConfig(1, hidden, INNER, HEADS, KV, dim, 1e-5, "silu", rope, dim**-0.5)
    return replace(base, **changes)


def llama(hidden: int = H, **changes: Any) -> dict[str, Any]:
    """The config of :func:`block_config`; None takes a key out."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float16",
        "vocab_size": V,
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        **changes,
    }
    return {key: value for key, value in config.items() if value is not None}


def recurrent(method: str, dialect: str, **changes: Any) -> RecurrentRecord:
    """An EAGLE-1 record; the changes make it another."""
    base: dict[str, Any] = {
        "captures": ("final",),
        "target_hidden_size": H,
        "vocab_size": V,
        "draft_vocab_size": V,
        "reduce": False,
        "reduce_bias": False,
        "reduce_norm": "none",
        "fusion": "project",
        "fuse_bias": False,
        "order": ("embedding", "hidden"),
        "embedding_norm": False,
        "hidden_norm": False,
        "norm_before_residual": False,
        "blocks": block_config(),
        "final_norm": False,
        "feedback": "raw",
        "embedding": "target",
        "embedding_size": H,
        "lm_head": "target",
        "draft_to_target": None,
        "max_positions": 64,
        "lineage": HeadLineage(),
    }
    return RecurrentRecord(method, dialect, **(base | changes))  # type: ignore[arg-type]


def llama_tensors(random: Random, bias: bool = False, layers: int = N) -> Tensors:
    """A whole small target of :data:`TARGET_CONFIG`."""
    tensors = {
        "model.embed_tokens.weight": random(V, H),
        "model.norm.weight": random(H),
        "lm_head.weight": random(V, H),
    }
    for index in range(layers):
        tensors |= layer(random, f"model.layers.{index}.", index, H, H, dim=4, bias=bias)[0]
    return tensors


def medusa_blocks(random: Random, heads: int, layers: int, bias: bool, template: str) -> tuple[Tensors, Tensors]:
    """Residual blocks: (stored, canonical)."""
    stored: Tensors = {}
    canonical: Tensors = {}
    for h in range(heads):
        for index in range(layers):
            for kind, shape in (("weight", (H, H)), ("bias", (H,))):
                if kind == "weight" or bias:
                    tensor = random(*shape)
                    stored[f"{template.format(h=h, l=index)}.{kind}"] = tensor
                    canonical[f"heads.{h}.blocks.{index}.{kind}"] = tensor
    return stored, canonical


DIALECTS: dict[str, Callable[[], Tiny]] = {}


def dialect(make: Callable[[], Tiny]) -> Callable[[], Tiny]:
    """Register a writer under its function's name."""
    DIALECTS[make.__name__] = make
    return make


def every() -> Iterator[tuple[str, Tiny]]:
    """All dialects by name."""
    # The modules register themselves; imported here because they need this one.
    from tests.exporter.heads import writers_eagle, writers_medusa, writers_mtp

    assert writers_eagle and writers_medusa and writers_mtp
    for name, make in DIALECTS.items():
        yield name, make()


def medusa_record(dialect: str, heads: int, layers: int, **changes: Any) -> MedusaRecord:
    """A record with biases and own lm_heads over the whole vocabulary; the changes make it another."""
    base = MedusaRecord(dialect, heads, layers, H, V, True, "silu", "own", None, HeadLineage())
    return replace(base, **changes)


def same(mine: HeadRecord, other: HeadRecord) -> bool:
    """Equality of records, vocabulary maps included."""
    if type(mine) is not type(other):
        return False
    for name in mine.__slots__:
        a, b = getattr(mine, name), getattr(other, name)
        if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
            if a is None or b is None or not np.array_equal(a, b) or a.dtype != b.dtype:
                return False
        elif a != b:
            return False
    return True


class Memory:
    """Stored tensors that never touch a disk."""

    _NAMES: Mapping[torch.dtype, str] = {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = dict(tensors)

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def stored(self, name: str) -> tuple[str, Iterator[memoryview]]:
        return self._NAMES[self._tensors[name].dtype], iter(())

    def headers(self) -> Iterator[bytes]:
        return iter(())
