"""The one explicit record of a target model, and the only reader of Hugging Face configs.

Every key of a ``config.json`` is one of four kinds, by :class:`Family`: *required*, *defaulted* (to what the
Transformers class of that model defaults to), *fixed* (may appear, with one value only, because any other value would
change the model into one we do not build), or *ignorable* (cannot change a logit). A key of no kind is an error, so
that nothing a checkpoint says is dropped in silence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specexport.exporter.config_rope import RopeConfig as RopeConfig
from specexport.exporter.config_rope import read_ropes
from specexport.exporter.config_values import LIMITS, boolean, integer, number, text
from specexport.exporter.keys import QUANTIZATION_KEYS
from specexport.runtime.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What differs from layer to layer: ``window`` is the sliding window in tokens (None: full attention),
    ``rope`` an index into :attr:`TargetConfig.ropes`."""

    window: int | None
    rope: int


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """Everything the torch target needs, with no default left to guess.

    Attributes:
        architecture: key of ``exporter.models.ARCHITECTURES`` (``llama``, ``mistral``, ``qwen2``, ``qwen3``,
            ``gemma3``, ``phi3``).
        vocab_size: rows of the embedding table (padding included).
        attention_bias: bias on q, k, v. ``output_bias``: on o_proj. ``mlp_bias``: on the three MLP matrices.
        qk_norm: RMS norm of each q and k head before rope.
        activation: ``silu`` or ``gelu_tanh``.
        norm_offset: added to every norm weight (1.0 for Gemma, whose checkpoints store w - 1).
        sandwich_norms: Gemma's norms after attention and around the MLP.
        embedding_scale: factor on the embeddings. HF computes it in the model's dtype; this is the exact number.
        attention_scale: factor on q k^T.
        layers: one entry a layer.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    ropes: tuple[RopeConfig, ...]
    max_position_embeddings: int
    norm_eps: float
    activation: str
    attention_scale: float
    tie_word_embeddings: bool
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0
    sandwich_norms: bool = False
    embedding_scale: float = 1.0

    @property
    def num_layers(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, slots=True)
class Family:
    """How one Transformers config class is read: ``defaults`` are that class's own."""

    architecture: str
    model_type: str
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = field(default_factory=dict)


_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")

_DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": None,  # None: as many as num_attention_heads
    "head_dim": None,  # None: hidden_size // num_attention_heads
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "original_max_position_embeddings": None,
    "partial_rotary_factor": 1.0,
    "sliding_window": None,
    "attention_bias": False,
    "mlp_bias": False,
}

_LAYERED: Mapping[str, Any] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family("llama", "llama", {"max_position_embeddings": 2048}, {"sliding_window": None}),
    "MistralForCausalLM": Family(
        "mistral",
        "mistral",
        {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
        {"attention_bias": False, "mlp_bias": False},
    ),
    # Qwen2's class has no attention_bias key: q, k and v always have a bias, o never.
    "Qwen2ForCausalLM": Family("qwen2", "qwen2", _LAYERED, {"attention_bias": True, "mlp_bias": False}),
    "Qwen3ForCausalLM": Family("qwen3", "qwen3", {**_LAYERED, "head_dim": 128}, {"mlp_bias": False}),
    "Gemma3ForCausalLM": Family(
        "gemma3",
        "gemma3_text",
        {
            "num_key_value_heads": 4,
            "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "_sliding_window_pattern": None,
            "layer_types": None,
        },
        {
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
            "mlp_bias": False,
        },
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        "phi3",
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        {
            "attention_bias": False,
            "mlp_bias": False,
            "lm_head_bias": False,
            "full_attn_mod": 1,
            "interpolate_factor": 1,
        },
    ),
}

_FIXED: Mapping[str, Any] = {
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "cross_attention_hidden_size": None,
    "tie_encoder_decoder": False,
    "chunk_size_feed_forward": 0,
    "pruned_heads": {},
    "rope_interleaved": False,
    "use_mrope": False,
}

# Training-time, generation-time (read from generation_config.json) and bookkeeping keys: none reaches a logit.
IGNORABLE = frozenset(
    """
    architectures model_type _name_or_path name_or_path transformers_version torch_dtype dtype auto_map
    use_cache initializer_range attention_dropout resid_pdrop embd_pdrop pretraining_tp gradient_checkpointing
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id tokenizer_class prefix
    output_attentions output_hidden_states return_dict return_dict_in_generate output_scores torchscript
    use_bfloat16 tf_legacy_loss is_decoder id2label label2id num_labels problem_type task_specific_params
    finetuning_task _attn_implementation _attn_implementation_autoset attn_implementation cache_implementation
    max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature top_k
    top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size
    bad_words_ids num_return_sequences forced_bos_token_id forced_eos_token_id remove_invalid_values
    exponential_decay_length_penalty suppress_tokens begin_suppress_tokens is_llama_config transformers.js_config
    unsloth_fixed unsloth_version
    """.split()  # noqa: SIM905 - eighty quoted lines would say less
)

ACTIVATION_SPELLINGS = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",  # the same formula, written out in Python by Transformers
}


def read_config(raw: Mapping[str, Any]) -> TargetConfig:
    """Read a Hugging Face ``config.json`` as Transformers would build the model.

    Args:
        raw: the parsed JSON object (from a GGUF file: what ``exporter.gguf`` makes of its metadata).

    Raises:
        CheckpointError: unknown architecture, unknown key, missing key, or a value out of range or in contradiction
            with another.
    """
    family = _family(raw)
    defaults = {**_DEFAULTS, **family.defaults}
    fixed = {**_FIXED, **family.fixed}
    known = {*_REQUIRED, *defaults, *fixed, *IGNORABLE, *QUANTIZATION_KEYS}  # read with the weights
    if unknown := sorted(set(map(str, raw)) - known):
        raise CheckpointError(
            f"config: unknown key {unknown[0]} = {text(raw.get(unknown[0]))} for {family.architecture}; it may change "
            "the model, so it is refused: remove it if it has no effect on the logits"
        )
    for key, value in fixed.items():
        if key in raw and raw[key] != value:
            raise CheckpointError(f"config: {key} is {text(raw[key])}; only {text(value)} is supported")
    for key in _REQUIRED:
        if raw.get(key) is None:
            raise CheckpointError(f"config: {key} is missing; it is required")
    c = {**defaults, **fixed, **raw}
    for key, (low, high) in LIMITS.items():
        if c.get(key) is not None:
            integer(key, c[key], low, high)
    return _build(family, c, raw)


def _build(family: Family, c: Mapping[str, Any], raw: Mapping[str, Any]) -> TargetConfig:
    gemma = family.architecture == "gemma3"
    heads, hidden = c["num_attention_heads"], c["hidden_size"]
    kv_heads = heads if c["num_key_value_heads"] is None else c["num_key_value_heads"]
    if heads % kv_heads:
        raise CheckpointError(
            f"config: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    head_dim = c["head_dim"]
    if head_dim is None:
        if hidden % heads:
            raise CheckpointError(
                f"config: hidden_size {hidden} is not a multiple of num_attention_heads {heads}; give head_dim"
            )
        head_dim = integer("hidden_size / num_attention_heads", hidden // heads, *LIMITS["head_dim"])
    eps = number("rms_norm_eps", c["rms_norm_eps"], 0.0, 1.0)
    act_key = "hidden_activation" if gemma else "hidden_act"
    if gemma and "hidden_act" in raw:
        raise CheckpointError(
            f"config: hidden_act is {text(raw['hidden_act'])}, but Gemma 3 reads {act_key}; remove it"
        )
    activation = ACTIVATION_SPELLINGS.get(c[act_key]) if isinstance(c[act_key], str) else None
    if activation is None:
        raise CheckpointError(
            f"config: {act_key} is {text(c[act_key])}; expected one of {', '.join(ACTIVATION_SPELLINGS)}"
        )
    if c["max_position_embeddings"] is None:
        raise CheckpointError("config: max_position_embeddings is null; give the model's context length")
    windows = _windows(family, c, raw)
    ropes = read_ropes(family.architecture, c, raw, head_dim)
    scale = number("query_pre_attn_scalar", c["query_pre_attn_scalar"], 0.0, 1e6) if gemma else head_dim
    bias = boolean("attention_bias", c["attention_bias"])
    return TargetConfig(
        architecture=family.architecture,
        vocab_size=c["vocab_size"],
        hidden_size=hidden,
        intermediate_size=c["intermediate_size"],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        layers=tuple(LayerConfig(w, 1 if gemma and w is not None else 0) for w in windows),
        ropes=ropes,
        max_position_embeddings=c["max_position_embeddings"],
        norm_eps=eps,
        activation=activation,
        attention_scale=scale**-0.5,
        tie_word_embeddings=boolean("tie_word_embeddings", c["tie_word_embeddings"]),
        attention_bias=bias,
        output_bias=bias and family.architecture != "qwen2",
        mlp_bias=boolean("mlp_bias", c["mlp_bias"]),
        qk_norm=family.architecture in ("qwen3", "gemma3"),
        norm_offset=1.0 if gemma else 0.0,
        sandwich_norms=gemma,
        embedding_scale=hidden**0.5 if gemma else 1.0,
    )


def _family(raw: Mapping[str, Any]) -> Family:
    names = raw.get("architectures")
    model_type = raw.get("model_type")
    if not names:  # written by hand, or by a config that was never attached to a model
        names = [name for name, family in FAMILIES.items() if family.model_type == model_type]
    known = ", ".join(FAMILIES)
    if not isinstance(names, list) or len(names) != 1 or str(names[0]) not in FAMILIES:
        hint = ""
        if names == ["Gemma3ForConditionalGeneration"]:
            hint = "; its vision tower is not exported, pass a text-only checkpoint (Gemma3ForCausalLM)"
        raise CheckpointError(
            f"config: architecture {text(names or model_type)} is not supported; expected one of {known}{hint}"
        )
    family = FAMILIES[names[0]]
    if model_type is not None and model_type != family.model_type:
        raise CheckpointError(
            f"config: model_type {text(model_type)} contradicts {names[0]}, whose type is {family.model_type}"
        )
    return family


def _windows(family: Family, c: Mapping[str, Any], raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The sliding window of each layer, None for full attention."""
    count: int = c["num_hidden_layers"]
    window: int | None = c["sliding_window"]
    if family.architecture in ("llama", "mistral", "phi3"):
        return (window,) * count
    gemma = family.architecture == "gemma3"
    if gemma:
        pattern = c["sliding_window_pattern"]
        if "sliding_window_pattern" not in raw and c["_sliding_window_pattern"] is not None:
            pattern = c["_sliding_window_pattern"]
        pattern = integer("sliding_window_pattern", pattern, *LIMITS["sliding_window_pattern"])
        derived = [bool((i + 1) % pattern) for i in range(count)]
    else:
        if not boolean("use_sliding_window", c["use_sliding_window"]):
            window = None
        if c["max_window_layers"] is None:
            raise CheckpointError("config: max_window_layers is null; expected the number of full-attention layers")
        derived = [window is not None and i >= c["max_window_layers"] for i in range(count)]
    types = c["layer_types"]
    if types is None:
        sliding = derived
    else:
        named = {"sliding_attention": True, "full_attention": False}
        if not isinstance(types, list) or len(types) != count or any(t not in named for t in map(str, types)):
            raise CheckpointError(
                f"config: layer_types must list {count} of sliding_attention or full_attention, got {text(types)}"
            )
        sliding = [named[t] for t in types]
        # The private _sliding_window_pattern is only what Transformers derives layer_types from when they are absent.
        if gemma and sliding != derived and "sliding_window_pattern" in raw:
            raise CheckpointError(
                f"config: layer_types contradicts a sliding_window_pattern of {pattern}; remove the one that is wrong"
            )
    if any(sliding) and window is None:
        raise CheckpointError("config: layer_types has sliding_attention layers but no sliding window is in force")
    return tuple(window if s else None for s in sliding)
