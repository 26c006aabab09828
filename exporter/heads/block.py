"""Decoder layers of a head: sizes from the tensors, everything else from the config, and both must agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specexport.exporter.config_values import LIMITS, text
from specexport.exporter.heads.base import Keys, Tensors
from specexport.exporter.heads.block_kinds import has_experts, is_latent, read_experts, read_latent
from specexport.exporter.heads.block_parts import (
    MLP_PARTS,
    Layer,
    activation,
    agree,
    biases,
    expect,
    read_rope,
    take_linear,
    take_mlp,
)
from specexport.exporter.heads.record import BlockConfig
from specexport.runtime.errors import CheckpointError

#: What Transformers fills in where a config is silent, by ``model_type``; None: as many as num_attention_heads.
#: ``gated``: queries come with a gate.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"num_key_value_heads": None, "max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "attention_bias": True},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "qk_norm": True},
    "mimo": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "attention_bias": True},
    "qwen3_next": {
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "qk_norm": True,
        "gated": True,
        "partial_rotary_factor": 0.25,
    },
    "deepseek_v3": {"num_key_value_heads": None, "max_position_embeddings": 4096},
    "glm4_moe": {"num_key_value_heads": 8, "max_position_embeddings": 131072, "partial_rotary_factor": 0.5},
    # gpt-oss heads of SpecForge are Llama blocks under the target's model_type.
    "gpt_oss": {"num_key_value_heads": 8, "max_position_embeddings": 131072},
}
#: Whose output projection has no bias even where q, k and v have one.
_NO_OUTPUT_BIAS = ("qwen2", "mimo", "glm4_moe")
#: A block we do not build, by a piece of a tensor's name.
_REFUSED = {
    "linear_attn": "linear attention",
    "self_attn.sinks": "attention sinks",
}


def refuse_blocks(names: Sequence[str]) -> None:
    """Raise CheckpointError if a tensor belongs to a kind of decoder layer that is not built."""
    for name in sorted(names):
        for piece, kind in _REFUSED.items():
            if piece in name:
                raise CheckpointError(
                    f"tensor {name!r}: {kind} is not built for heads; grouped and latent attention, MLP and experts are"
                )


def model_type(keys: Keys, default: str = "llama") -> str:
    """The ``model_type``, which decides what the config's silences mean."""
    name = keys.string("model_type") or default
    if name not in DEFAULTS:
        raise CheckpointError(
            f"{keys.where}: model_type {text(name)} is not supported; expected one of {', '.join(DEFAULTS)}"
        )
    return name


def check_layer_types(keys: Keys, count: int) -> None:
    """``layer_types``, where it is there, must list ``count`` layers of full attention."""
    kinds = keys.take("layer_types", ["full_attention"] * count)
    if kinds != ["full_attention"] * count:
        raise CheckpointError(f"{keys.where}: layer_types is {text(kinds)}; only {count} of full_attention is built")


def read_blocks(
    keys: Keys,
    tensors: Tensors,
    prefixes: Sequence[str],
    hidden: int,
    *,
    first_width: int,
    first_input_norm: bool,
    kind: str,
    norm_offset: float = 0.0,
    canonical: str = "",
) -> BlockConfig:
    """Read decoder layers and take their tensors, all but ``input_layernorm`` of a layer without an input norm.

    Args:
        prefixes: of the layers' tensors, in order (``layers.0.``).
        hidden: Hd. first_width: columns of layer 0's q, k and v.
        first_input_norm: whether ``input_layernorm`` of layer 0 is its input norm.
        kind: the ``model_type``. canonical: prefix of the canonical names.
    """
    refuse_blocks([name for name in tensors.names() if name.startswith(tuple(prefixes))])
    layers = [
        Layer(prefix, f"{canonical}layers.{index}.", first_width if index == 0 else hidden)
        for index, prefix in enumerate(prefixes)
    ]
    if any(is_latent(tensors, layer) for layer in layers):
        attention = read_latent(keys, tensors, layers, hidden, DEFAULTS[kind])
    else:
        attention = _read_grouped(keys, tensors, layers, hidden, kind)
    if any(has_experts(tensors, layer) for layer in layers):
        mlp = read_experts(keys, tensors, layers, hidden, kind)
    else:
        mlp = _read_mlp(keys, tensors, layers, hidden)
    for index, layer in enumerate(layers):
        tensors.take(f"{layer.canonical}mlp_norm.weight", f"{layer.prefix}post_attention_layernorm.weight", (hidden,))
        if index or first_input_norm:
            tensors.take(f"{layer.canonical}input_norm.weight", f"{layer.prefix}input_layernorm.weight", (hidden,))
    return BlockConfig(
        num_layers=len(prefixes),
        hidden_size=hidden,
        norm_eps=keys.number("rms_norm_eps", 1e-6, 0.0, 1.0),
        activation=activation(keys),
        first_input_norm=first_input_norm,
        norm_offset=norm_offset,
        **attention,
        **mlp,
    )


def _read_grouped(keys: Keys, tensors: Tensors, layers: Sequence[Layer], hidden: int, kind: str) -> dict[str, Any]:
    """Ordinary attention: its fields of :class:`BlockConfig`."""
    defaults = DEFAULTS[kind]
    prefixes = [f"{layer.prefix}self_attn." for layer in layers]
    norm = prefixes[0] + "q_norm.weight"
    qk_norm = norm in tensors
    gated = keys.boolean("attn_output_gate", defaults.get("gated", False))
    heads, kv_heads, head_dim = _heads(keys, tensors, prefixes[0], defaults, norm if qk_norm else None, gated)
    qkv_bias = biases(tensors, prefixes, ("q_proj", "k_proj", "v_proj"))
    output_bias = biases(tensors, prefixes, ("o_proj",))
    said = keys.boolean("attention_bias", defaults.get("attention_bias", False))
    qkv = keys.flag("qkv_bias")  # EAGLE's own key for heads of Qwen2
    if qkv is None:
        expect(keys, "attention_bias", said, qkv_bias, "biases of q, k and v")
    else:
        expect(keys, "qkv_bias", qkv, qkv_bias, "biases of q, k and v")
    expect(keys, "attention_bias", said and kind not in _NO_OUTPUT_BIAS, output_bias, "biases of o_proj")
    if "use_qk_norm" in keys or "model_type" in keys:
        expect(
            keys, "use_qk_norm", keys.boolean("use_qk_norm", defaults.get("qk_norm", False)), qk_norm, "q and k norms"
        )
    keys.fixed("rope_interleaved", False)
    keys.fixed("use_sliding_window", False, None)
    keys.ignore("max_window_layers")
    if keys.take("sliding_window") is not None and "use_sliding_window" not in keys:
        raise CheckpointError(f"{keys.where}: sliding_window is set; heads attend to everything: set it to null")
    wide, narrow = heads * head_dim, kv_heads * head_dim
    for layer, prefix in zip(layers, prefixes, strict=True):
        mine = f"{layer.canonical}attention."
        for name, rows in (("q", wide * (2 if gated else 1)), ("k", narrow), ("v", narrow)):
            take_linear(tensors, f"{mine}{name}_proj", f"{prefix}{name}_proj", (rows, layer.width), qkv_bias)
        take_linear(tensors, f"{mine}o_proj", f"{prefix}o_proj", (hidden, wide), output_bias)
        for name in "qk" if qk_norm else "":
            tensors.take(f"{mine}{name}_norm.weight", f"{prefix}{name}_norm.weight", (head_dim,))
    return {
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rope": read_rope(keys, head_dim, defaults),
        "attention_scale": head_dim**-0.5,
        "attention_bias": qkv_bias,
        "output_bias": output_bias,
        "qk_norm": qk_norm,
        "gated": gated,
    }


def _read_mlp(keys: Keys, tensors: Tensors, layers: Sequence[Layer], hidden: int) -> dict[str, Any]:
    """The ordinary MLP: its fields of :class:`BlockConfig`."""
    prefixes = [f"{layer.prefix}mlp." for layer in layers]
    gate = prefixes[0] + "gate_proj.weight"
    inner = tensors.matrix(gate)[0]
    agree(keys, "intermediate_size", inner, gate)
    bias = biases(tensors, prefixes, MLP_PARTS)
    expect(keys, "mlp_bias", keys.boolean("mlp_bias", False), bias, "biases of the MLP")
    for layer, prefix in zip(layers, prefixes, strict=True):
        take_mlp(tensors, f"{layer.canonical}mlp.", prefix, hidden, inner, bias)
    return {"intermediate_size": inner, "mlp_bias": bias}


def _heads(
    keys: Keys, tensors: Tensors, prefix: str, defaults: Mapping[str, Any], norm: str | None, gated: bool
) -> tuple[int, int, int]:
    """Heads, kv heads and head_dim, with the rows of the projections as the judge."""
    q, k = f"{prefix}q_proj.weight", f"{prefix}k_proj.weight"
    rows, narrow = tensors.matrix(q)[0], tensors.matrix(k)[0]
    heads = keys.integer("num_attention_heads", *LIMITS["num_attention_heads"], default=32) or 0
    said = keys.integer("head_dim", *LIMITS["head_dim"])
    queries = heads * (2 if gated else 1)
    head_dim = said if said is not None else tensors.vector(norm) if norm is not None else rows // queries
    if norm is not None and tensors.vector(norm) != head_dim:
        raise CheckpointError(f"{keys.where}: head_dim is {head_dim} but tensor {norm!r} has {tensors.vector(norm)}")
    if rows == 2 * heads * head_dim and not gated:
        raise CheckpointError(
            f"tensor {q!r} has {rows} rows, twice {heads} heads of {head_dim}: either queries with a gate (a "
            "model_type of qwen3_next, or attn_output_gate), or a wrong num_attention_heads or head_dim"
        )
    if rows != queries * head_dim:
        raise CheckpointError(
            f"tensor {q!r} has {rows} rows; the config calls for {heads} heads of {head_dim}"
            f"{', each with its gate,' if gated else ''} = {queries * head_dim}: num_attention_heads or head_dim is "
            "wrong or missing"
        )
    kv_heads = keys.integer(
        "num_key_value_heads", *LIMITS["num_key_value_heads"], default=defaults["num_key_value_heads"]
    )
    kv_heads = heads if kv_heads is None else kv_heads
    if narrow != kv_heads * head_dim or heads % kv_heads:
        raise CheckpointError(
            f"tensor {k!r} has {narrow} rows; the config calls for {kv_heads} kv heads of {head_dim} (of {heads}): "
            "num_key_value_heads is wrong or missing"
        )
    return heads, kv_heads, head_dim
