"""Decoder layers of a head: sizes from the tensors, everything else from the config, and both must agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specexport.exporter.config import ACTIVATION_SPELLINGS, RopeConfig
from specexport.exporter.config_rope import read_ropes
from specexport.exporter.config_values import LIMITS, text
from specexport.exporter.heads.base import Keys, Tensors
from specexport.exporter.heads.record import BlockConfig
from specexport.runtime.errors import CheckpointError

#: What Transformers fills in where a config is silent, by ``model_type``; None: as many as num_attention_heads.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {"num_key_value_heads": None, "max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "max_position_embeddings": 131072},
    "qwen2": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "attention_bias": True},
    "qwen3": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "qk_norm": True},
    "mimo": {"num_key_value_heads": 32, "max_position_embeddings": 32768, "attention_bias": True},
    "qwen3_next": {"num_key_value_heads": 2, "max_position_embeddings": 32768, "qk_norm": True, "norm_offset": 1.0},
    "deepseek_v3": {"num_key_value_heads": None, "max_position_embeddings": 4096},
    "glm4_moe": {"num_key_value_heads": 8, "max_position_embeddings": 131072},
    # gpt-oss heads of SpecForge are Llama blocks under the target's model_type.
    "gpt_oss": {"num_key_value_heads": 8, "max_position_embeddings": 131072},
}
#: Whose output projection has no bias even where q, k and v have one.
_NO_OUTPUT_BIAS = ("qwen2", "mimo", "glm4_moe")
_MLP = ("gate_proj", "up_proj", "down_proj")
#: A block we do not build, by a piece of a tensor's name.
_REFUSED = {
    "q_a_proj": "multi-head latent attention",
    "kv_a_proj_with_mqa": "multi-head latent attention",
    "kv_b_proj": "multi-head latent attention",
    ".experts.": "mixture of experts",
    "shared_expert": "mixture of experts",
    "mlp.gate.": "mixture of experts",
    "linear_attn": "linear attention",
    "self_attn.sinks": "attention sinks",
}


def refuse_blocks(names: Sequence[str]) -> None:
    """Raise CheckpointError if a tensor belongs to a kind of decoder layer that is not built."""
    for name in sorted(names):
        for piece, kind in _REFUSED.items():
            if piece in name:
                raise CheckpointError(
                    f"tensor {name!r}: {kind} is not built for heads; only dense attention and MLP are"
                )


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


def model_type(keys: Keys, default: str = "llama") -> str:
    """The ``model_type``, which decides what the config's silences mean."""
    name = keys.string("model_type") or default
    if name not in DEFAULTS:
        raise CheckpointError(
            f"{keys.where}: model_type {text(name)} is not supported; expected one of {', '.join(DEFAULTS)}"
        )
    return name


def _bias(tensors: Tensors, prefixes: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether these projections have biases: all of them or none."""
    names = [f"{prefix}{part}.bias" for prefix in prefixes for part in parts]
    held = [name for name in names if name in tensors]
    if held and len(held) != len(names):
        raise CheckpointError(f"tensor {held[0]!r} is there but {sorted(set(names) - set(held))[0]!r} is missing")
    return bool(held)


def _expect(keys: Keys, key: str, said: bool, found: bool, what: str) -> None:
    if said != found:
        there = "are in the file" if found else "are missing from the file"
        origin = f"{key} is {str(said).lower()}" if key in keys else f"{key} is absent, which means {str(said).lower()}"
        raise CheckpointError(f"{keys.where}: {origin}, but {what} {there}; one of them is wrong")


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
) -> BlockConfig:
    """Read decoder layers and take their tensors, all but ``input_layernorm`` of a layer without an input norm.

    Args:
        prefixes: of the layers' tensors, in order (``layers.0.``).
        hidden: Hd. first_width: columns of layer 0's q, k and v.
        first_input_norm: whether ``input_layernorm`` of layer 0 is its input norm.
        kind: the ``model_type``.
    """
    attention = [prefix + "self_attn." for prefix in prefixes]
    refuse_blocks([name for name in tensors.names() if name.startswith(tuple(prefixes))])
    defaults = DEFAULTS[kind]
    q, k = attention[0] + "q_proj.weight", attention[0] + "k_proj.weight"
    gate = prefixes[0] + "mlp.gate_proj.weight"
    inner = tensors.matrix(gate)[0]
    agree(keys, "intermediate_size", inner, gate)
    qk_norm = f"{attention[0]}q_norm.weight" in tensors
    heads, kv_heads, head_dim = _heads(
        keys, tensors, q, k, defaults, attention[0] + "q_norm.weight" if qk_norm else None
    )

    qkv_bias = _bias(tensors, attention, ("q_proj", "k_proj", "v_proj"))
    output_bias = _bias(tensors, attention, ("o_proj",))
    mlp_bias = _bias(tensors, [prefix + "mlp." for prefix in prefixes], _MLP)
    said = keys.boolean("attention_bias", defaults.get("attention_bias", False))
    qkv = keys.flag("qkv_bias")  # EAGLE's own key for heads of Qwen2
    if qkv is None:
        _expect(keys, "attention_bias", said, qkv_bias, "biases of q, k and v")
    else:
        _expect(keys, "qkv_bias", qkv, qkv_bias, "biases of q, k and v")
    _expect(keys, "attention_bias", said and kind not in _NO_OUTPUT_BIAS, output_bias, "biases of o_proj")
    _expect(keys, "mlp_bias", keys.boolean("mlp_bias", False), mlp_bias, "biases of the MLP")
    if "use_qk_norm" in keys or "model_type" in keys:
        _expect(
            keys, "use_qk_norm", keys.boolean("use_qk_norm", defaults.get("qk_norm", False)), qk_norm, "q and k norms"
        )
    keys.fixed("rope_interleaved", False)
    keys.fixed("use_sliding_window", False, None)
    keys.ignore("max_window_layers")
    if keys.take("sliding_window") is not None and "use_sliding_window" not in keys:
        raise CheckpointError(f"{keys.where}: sliding_window is set; heads attend to everything: set it to null")
    for index, prefix in enumerate(prefixes):
        _layer(
            tensors,
            prefix,
            f"layers.{index}.",
            hidden,
            inner,
            (heads * head_dim, kv_heads * head_dim),
            first_width if index == 0 else hidden,
            (qkv_bias, output_bias, mlp_bias),
            head_dim if qk_norm else None,
        )
        if index or first_input_norm:
            tensors.take(f"layers.{index}.input_norm.weight", f"{prefix}input_layernorm.weight", (hidden,))
    return BlockConfig(
        num_layers=len(prefixes),
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=keys.number("rms_norm_eps", 1e-6, 0.0, 1.0),
        activation=activation(keys),
        rope=read_rope(keys, head_dim, defaults["max_position_embeddings"]),
        attention_scale=head_dim**-0.5,
        attention_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        first_input_norm=first_input_norm,
        norm_offset=norm_offset,
    )


def _heads(
    keys: Keys, tensors: Tensors, q: str, k: str, defaults: Mapping[str, Any], norm: str | None
) -> tuple[int, int, int]:
    """Heads, kv heads and head_dim, with the rows of the projections as the judge."""
    rows, narrow = tensors.matrix(q)[0], tensors.matrix(k)[0]
    heads = keys.integer("num_attention_heads", *LIMITS["num_attention_heads"], default=32) or 0
    said = keys.integer("head_dim", *LIMITS["head_dim"])
    head_dim = said if said is not None else tensors.vector(norm) if norm is not None else rows // heads
    if norm is not None and tensors.vector(norm) != head_dim:
        raise CheckpointError(f"{keys.where}: head_dim is {head_dim} but tensor {norm!r} has {tensors.vector(norm)}")
    if rows == 2 * heads * head_dim:
        raise CheckpointError(
            f"tensor {q!r} has {rows} rows, twice {heads} heads of {head_dim}: either queries with a gate "
            "(Qwen3-Next), which is not built, or a wrong num_attention_heads or head_dim"
        )
    if rows != heads * head_dim:
        raise CheckpointError(
            f"tensor {q!r} has {rows} rows; the config calls for {heads} heads of {head_dim} = {heads * head_dim}: "
            "num_attention_heads or head_dim is wrong or missing"
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


def _layer(
    tensors: Tensors,
    prefix: str,
    canonical: str,
    hidden: int,
    inner: int,
    rows: tuple[int, int],
    width: int,
    biases: tuple[bool, bool, bool],
    qk_norm: int | None,
) -> None:
    wide, narrow = rows
    for name, size, bias in (("q", wide, biases[0]), ("k", narrow, biases[0]), ("v", narrow, biases[0])):
        _linear(tensors, f"{canonical}attention.{name}_proj", f"{prefix}self_attn.{name}_proj", (size, width), bias)
    _linear(tensors, f"{canonical}attention.o_proj", f"{prefix}self_attn.o_proj", (hidden, wide), biases[1])
    for name in _MLP:
        shape = (hidden, inner) if name == "down_proj" else (inner, hidden)
        _linear(tensors, f"{canonical}mlp.{name}", f"{prefix}mlp.{name}", shape, biases[2])
    if qk_norm is not None:
        for name in "qk":
            tensors.take(
                f"{canonical}attention.{name}_norm.weight", f"{prefix}self_attn.{name}_norm.weight", (qk_norm,)
            )
    tensors.take(f"{canonical}mlp_norm.weight", f"{prefix}post_attention_layernorm.weight", (hidden,))


def _linear(tensors: Tensors, canonical: str, name: str, shape: tuple[int, int], bias: bool) -> None:
    tensors.take(f"{canonical}.weight", f"{name}.weight", shape)
    if bias:
        tensors.take(f"{canonical}.bias", f"{name}.bias", shape[:1])


def read_rope(keys: Keys, head_dim: int, positions: int) -> RopeConfig:
    """The rotary embedding of the head's own config; theta is 10000 where it is absent."""
    limit = keys.integer("max_position_embeddings", *LIMITS["max_position_embeddings"], default=positions)
    names = {"rope_theta": 10000.0, "rope_scaling": None, "rope_parameters": None, "partial_rotary_factor": 1.0}
    filled: dict[str, Any] = {name: keys.take(name, default) for name, default in names.items()}
    filled["original_max_position_embeddings"] = keys.integer(
        "original_max_position_embeddings", *LIMITS["original_max_position_embeddings"]
    )
    filled["max_position_embeddings"] = limit
    raw = {name: value for name, value in keys.raw.items() if value is not None}
    # Only default frequencies have one meaning at a partial width for every family; Phi-3's reader allows them.
    partial = filled["partial_rotary_factor"] != 1.0 and filled["rope_scaling"] is None
    return read_ropes("phi3" if partial else "llama", filled, raw, head_dim)[0]
