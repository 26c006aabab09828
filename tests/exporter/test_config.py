"""Reading configs: against the Transformers classes, and everything that must be refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers

from specexport.exporter.config import TargetConfig, read_config
from specexport.runtime.errors import CheckpointError

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
}
CLASSES = {
    "LlamaForCausalLM": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "Phi3ForCausalLM": "Phi3Config",
}


def raw(architecture: str = "LlamaForCausalLM", **changes: Any) -> dict[str, Any]:
    heads = {} if architecture in ("LlamaForCausalLM", "Phi3ForCausalLM") else {"num_key_value_heads": 4}
    return {"architectures": [architecture], **BASE, **heads, **changes}


def windows(config: TargetConfig) -> list[int | None]:
    return [layer.window for layer in config.layers]


def theirs(architecture: str, **values: Any) -> Any:
    return getattr(transformers, CLASSES[architecture])(**{**raw(architecture, **values), "pad_token_id": 0})


def assert_same(mine: TargetConfig, other: Any) -> None:
    """Every field that the Transformers config has an opinion on."""
    head_dim = getattr(other, "head_dim", None) or other.hidden_size // other.num_attention_heads
    assert mine.vocab_size == other.vocab_size and mine.hidden_size == other.hidden_size
    assert mine.intermediate_size == other.intermediate_size
    assert mine.num_layers == other.num_hidden_layers
    assert mine.num_heads == other.num_attention_heads
    assert mine.num_kv_heads == other.num_key_value_heads
    assert mine.head_dim == head_dim
    assert mine.norm_eps == other.rms_norm_eps
    assert mine.tie_word_embeddings == other.tie_word_embeddings
    assert mine.max_position_embeddings == other.max_position_embeddings
    assert mine.ropes[0].theta == other.rope_theta
    kinds = getattr(other, "layer_types", None)
    window = getattr(other, "sliding_window", None)
    expected = [window] * mine.num_layers if kinds is None else [window if "sliding" in k else None for k in kinds]
    assert windows(mine) == expected


@pytest.mark.parametrize("architecture", CLASSES)
def test_defaults_are_those_of_transformers(architecture: str) -> None:
    """Only the required keys are given: every default comes into play."""
    given = {key: BASE[key] for key in BASE if key != "max_position_embeddings"}
    given["num_attention_heads"] = 32  # Qwen's default of 32 key-value heads must divide it
    other = getattr(transformers, CLASSES[architecture])(**given, pad_token_id=0)
    assert_same(read_config({"architectures": [architecture], **given}), other)


@pytest.mark.parametrize("architecture", CLASSES)
def test_reads_what_transformers_saves(architecture: str) -> None:
    """``config.json`` as ``save_pretrained`` writes it, and with every attribute written out: no key is unknown."""
    other = theirs(architecture)
    other.architectures = [architecture]
    for text in (other.to_json_string(), json.dumps(other.to_dict())):
        assert_same(read_config(json.loads(text)), other)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("MistralForCausalLM", {"sliding_window": 16}),
        ("MistralForCausalLM", {"sliding_window": None}),
        ("MistralForCausalLM", {"head_dim": 24, "num_key_value_heads": None}),
        ("Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}),
        ("Qwen2ForCausalLM", {"use_sliding_window": False, "sliding_window": 16, "max_window_layers": 3}),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 3}),
        (
            "Qwen3ForCausalLM",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["full_attention", "sliding_attention"] * 3 + ["full_attention"],
            },
        ),
        ("Gemma3ForCausalLM", {"sliding_window": 32, "sliding_window_pattern": 3}),
        ("Gemma3ForCausalLM", {"sliding_window": 32, "layer_types": ["sliding_attention"] * 6 + ["full_attention"]}),
        ("Phi3ForCausalLM", {"sliding_window": 11}),
        ("LlamaForCausalLM", {"num_key_value_heads": 1, "tie_word_embeddings": True, "rope_theta": 5e5}),
    ],
)
def test_variants_match_transformers(architecture: str, changes: dict[str, Any]) -> None:
    assert_same(read_config(raw(architecture, **changes)), theirs(architecture, **changes))


def test_biases() -> None:
    def biases(config: TargetConfig) -> tuple[bool, bool, bool]:
        return config.attention_bias, config.output_bias, config.mlp_bias

    assert biases(read_config(raw())) == (False, False, False)
    assert biases(read_config(raw(attention_bias=True, mlp_bias=True))) == (True, True, True)
    assert biases(read_config(raw("Qwen2ForCausalLM"))) == (True, False, False)
    assert biases(read_config(raw("Qwen3ForCausalLM", attention_bias=True))) == (True, True, False)


def test_gemma() -> None:
    config = read_config(raw("Gemma3ForCausalLM", query_pre_attn_scalar=16, rope_local_base_freq=5e3))
    assert config.attention_scale == 0.25 and config.embedding_scale == 8.0 and config.norm_offset == 1.0
    assert config.sandwich_norms and config.qk_norm and config.activation == "gelu_tanh" and config.head_dim == 256
    assert [rope.theta for rope in config.ropes] == [1e6, 5e3]
    assert [layer.rope for layer in config.layers] == [1, 1, 1, 1, 1, 0, 1]


def test_activation_spellings() -> None:
    assert read_config(raw(hidden_act="swish")).activation == "silu"
    assert read_config(raw(hidden_act="gelu_new")).activation == "gelu_tanh"


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_rope_parameters_mean_the_same() -> None:
    old = read_config(raw(rope_theta=5e5, rope_scaling=LLAMA3))
    assert read_config(raw(rope_parameters={"rope_theta": 5e5, **LLAMA3})) == old
    assert read_config(raw(rope_parameters={"rope_theta": 5e5, **LLAMA3}, rope_theta=5e5, rope_scaling=LLAMA3)) == old


def test_rope_parameters_of_gemma() -> None:
    linear = {"rope_type": "linear", "factor": 8.0}
    old = read_config(raw("Gemma3ForCausalLM", rope_scaling=linear))
    new = {
        "full_attention": {**linear, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    assert read_config(raw("Gemma3ForCausalLM", rope_parameters=new)) == old
    with pytest.raises(CheckpointError, match="full_attention and sliding_attention"):
        read_config(raw("Gemma3ForCausalLM", rope_parameters=linear))


def test_phi3_longrope_both_ways() -> None:
    factors = {"short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    old = raw("Phi3ForCausalLM", partial_rotary_factor=0.75, original_max_position_embeddings=32)
    old["rope_scaling"] = {"type": "su", **factors}
    new = raw("Phi3ForCausalLM")
    new["rope_parameters"] = {
        "rope_type": "longrope",
        **factors,
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 32,
    }
    assert read_config(old) == read_config(new)
    assert read_config(old).ropes[0].rotary_dim == 6


CONTRADICTION: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default"},
    "rope_scaling": {"type": "linear", "factor": 2.0},
}
PHI = "Phi3ForCausalLM"
REFUSED: list[tuple[dict[str, Any], str]] = [
    (raw("GPT2LMHeadModel"), "GPT2LMHeadModel.*expected one of LlamaForCausalLM"),
    (raw("Gemma3ForConditionalGeneration"), "vision tower"),
    (raw(architectures=[["LlamaForCausalLM"]]), "not supported"),
    (raw(architectures=None), "not supported"),
    (raw(model_type="mistral"), "model_type 'mistral' contradicts"),
    (raw(surprise=1), "unknown key surprise = 1"),
    (raw(num_local_experts=8), "unknown key num_local_experts"),
    (raw(vocab_size=None), "vocab_size is missing"),
    (raw(vocab_size=1 << 40), "vocab_size must be an integer from 1 to"),
    (raw(hidden_size=64.0), "hidden_size must be an integer"),
    (raw(num_hidden_layers=True), "num_hidden_layers must be an integer"),
    (raw(num_hidden_layers=10**9), "num_hidden_layers must be"),
    (raw(num_key_value_heads=3), "must be a multiple|not a multiple"),
    (raw(num_attention_heads=7), "not a multiple of num_attention_heads"),
    (raw(hidden_size=72), "rotated width 9"),
    (raw(hidden_act="gelu"), "hidden_act is 'gelu'; expected one of silu"),
    (raw(hidden_act=["silu"]), "hidden_act"),
    (raw(rms_norm_eps=float("nan")), "rms_norm_eps must be a number"),
    (raw(rms_norm_eps=10**400), "rms_norm_eps must be a number"),
    (raw(tie_word_embeddings="yes"), "tie_word_embeddings must be true or false"),
    (raw(partial_rotary_factor=0.5), "not what Transformers builds"),
    (raw(sliding_window=8), "sliding_window is 8; only None"),
    (raw(is_encoder_decoder=True), "is_encoder_decoder is True"),
    (raw(max_position_embeddings=None), "max_position_embeddings is null"),
    (raw("Qwen2ForCausalLM", layer_types=["sliding_attention"] * 7), "no sliding window is in force"),
    (raw("Qwen2ForCausalLM", layer_types=["full_attention"]), "layer_types must list 7"),
    (raw("Qwen3ForCausalLM", layer_types=["chunked_attention"] * 7), "layer_types must list 7"),
    (raw("Gemma3ForCausalLM", final_logit_softcapping=30.0), "final_logit_softcapping is 30.0; only None"),
    (raw("Gemma3ForCausalLM", use_bidirectional_attention=True), "use_bidirectional_attention"),
    (raw("Gemma3ForCausalLM", sliding_window_pattern=None), "sliding_window_pattern must be an integer"),
    (raw("Gemma3ForCausalLM", hidden_act="silu"), "reads hidden_activation"),
    (
        raw("Gemma3ForCausalLM", sliding_window_pattern=2, layer_types=["full_attention"] * 7),
        "layer_types contradicts a sliding_window_pattern of 2",
    ),
    (raw(**CONTRADICTION), r"rope_scaling says .*linear.* but rope_parameters says .*default"),
    (raw(rope_parameters={"rope_type": "default", "rope_theta": 2.0}, rope_theta=3.0), "rope_theta is 3.0 but .* 2.0"),
    (raw(rope_scaling={"type": "linear", "rope_type": "yarn", "factor": 2.0}), "no single rope_type"),
    (raw(rope_scaling={"factor": 2.0}), "no single rope_type"),
    (raw(rope_scaling={"rope_type": "mrope"}), "no single rope_type"),
    (raw(rope_scaling={"rope_type": "linear"}), "type linear lacks factor"),
    (raw(rope_scaling={"rope_type": "linear", "factor": 0}), "factor must be a number above 0"),
    (raw(rope_scaling={"rope_type": "linear", "factor": 2.0, "finetuned": True}), "unknown key finetuned"),
    (raw(rope_scaling=[1]), "rope_scaling must be an object"),
    (raw(rope_scaling={**LLAMA3, "high_freq_factor": 0.5}), "low_freq_factor < high_freq_factor"),
    (raw(rope_theta=-1.0), "rope_theta must be a number"),
    (raw(original_max_position_embeddings=64), "no meaning with rope_type default"),
    (
        raw(PHI, rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 4}),
        "short_factor must be a list of 4",
    ),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_refuses(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        read_config(config)
    assert "\n" not in str(caught.value)
