"""EAGLE-1 and EAGLE-3 in each of their dialects."""

from __future__ import annotations

from typing import Any

import torch

from specexport.exporter.config import RopeConfig
from specexport.exporter.heads.record import HeadLineage, RecurrentRecord
from tests.exporter.heads.writers import (
    DIM,
    TARGET,
    VD,
    H,
    N,
    Random,
    Tensors,
    Tiny,
    V,
    block_config,
    dialect,
    draft_map,
    layer,
    llama,
    recurrent,
)


def eagle1_core(random: Random, bias: bool) -> tuple[Tensors, Tensors]:
    stored, canonical = layer(random, "layers.0.", 0, H, H, input_norm=False)
    stored["fc.weight"] = canonical["fuse.weight"] = random(H, 2 * H)
    if bias:
        stored["fc.bias"] = canonical["fuse.bias"] = random(H)
    return stored, canonical


@dialect
def eagle1() -> Tiny:
    """As published for Vicuna: a pickle, a bias that the config does not mention, its own embedding."""
    random = Random(10)
    stored, canonical = eagle1_core(random, True)
    stored["embed_tokens.weight"] = canonical["embedding"] = random(V, H)
    blocks = block_config(first_input_norm=False)
    record = recurrent("eagle1", "eagle", fuse_bias=True, embedding="head", blocks=blocks)
    return Tiny(llama(), stored, record, canonical, file="pytorch_model.bin")


@dialect
def eagle1_llama3() -> Tiny:
    stored, canonical = eagle1_core(Random(11), False)
    record = recurrent("eagle1", "eagle", blocks=block_config(first_input_norm=False))
    return Tiny(llama(bias=False, tie_word_embeddings=False), stored, record, canonical)


@dialect
def eagle1_vllm() -> Tiny:
    """Converted for vLLM: a nested config, an own lm_head in the unsorted order of a token map."""
    random = Random(12)
    stored, canonical = eagle1_core(random, True)
    stored = {f"model.{name}": tensor for name, tensor in stored.items()}
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(12))[:VD]
    stored["token_map"] = ids
    stored["lm_head.weight"] = random(VD, H)
    order = sorted(range(VD), key=lambda row: int(ids[row]))
    canonical["lm_head"] = torch.stack([stored["lm_head.weight"][row] for row in order])
    config = {
        "model_type": "eagle",
        "architectures": ["EAGLEModel"],
        "eagle_fc_bias": True,
        "truncated_vocab_size": VD,
        "model": llama(),
    }
    record = recurrent(
        "eagle1",
        "eagle-vllm",
        fuse_bias=True,
        lm_head="head",
        draft_vocab_size=VD,
        draft_to_target=ids.sort().values.numpy(),
        blocks=block_config(first_input_norm=False),
    )
    return Tiny(config, stored, record, canonical)


def frame(kind: str) -> dict[str, Any]:
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "org/target-8b", "architectures": ["LlamaForCausalLM"]},
        },
    }


@dialect
def eagle1_speculators() -> Tiny:
    """HASS-style training: three more norms, under speculators' names."""
    random = Random(13)
    stored, canonical = layer(random, "transformer.", 0, H, H)
    stored["fusion_fc.weight"] = canonical["fuse.weight"] = random(H, 2 * H)
    stored["fusion_fc.bias"] = canonical["fuse.bias"] = random(H)
    stored["embedding_layernorm.weight"] = canonical["embedding_norm.weight"] = random(H)
    stored["pre_lm_head_layernorm.weight"] = canonical["norm.weight"] = random(H)
    config = frame("eagle") | {
        "architectures": ["EagleSpeculator"],
        "transformer_layer_architecture": "LlamaDecoderLayer",
        "layernorms": True,
        "fusion_bias": True,
        "transformer_layer_config": llama(),
    }
    record = recurrent(
        "eagle1",
        "eagle-speculators",
        fuse_bias=True,
        embedding_norm=True,
        final_norm=True,
        lineage=HeadLineage("org/target-8b", "LlamaForCausalLM"),
    )
    return Tiny(config, stored, record, canonical)


def eagle3_core(
    random: Random, prefix: str, captures: int, *, hidden: int = H, maps: bool = True, **options: Any
) -> tuple[Tensors, Tensors]:
    """The tensors all EAGLE-3 heads have; without ``maps`` the lm_head is over the whole vocabulary."""
    stored, canonical = layer(random, prefix, 0, hidden, 2 * hidden, input_norm=False, **options)
    stored[prefix + "input_layernorm.weight"] = canonical["embedding_norm.weight"] = random(hidden)
    stored[prefix + "hidden_norm.weight"] = canonical["hidden_norm.weight"] = random(hidden)
    if captures:
        stored["fc.weight"] = canonical["reduce.weight"] = random(hidden, captures * H)
    stored["norm.weight"] = canonical["norm.weight"] = random(hidden)
    stored["lm_head.weight"] = canonical["lm_head"] = random(VD if maps else V, hidden)
    if maps:
        stored["d2t"], stored["t2d"], _ = draft_map()
    return stored, canonical


def eagle3_record(dialect: str, captures: tuple[int | str, ...], **changes: Any) -> RecurrentRecord:
    base: dict[str, Any] = {
        "captures": captures,
        "reduce": True,
        "fusion": "concat",
        "embedding_norm": True,
        "hidden_norm": True,
        "blocks": block_config(first_input_norm=False),
        "final_norm": True,
        "lm_head": "head",
        "draft_vocab_size": VD,
        "draft_to_target": draft_map()[2],
    }
    return recurrent("eagle3", dialect, **(base | changes))


@dialect
def eagle3() -> Tiny:
    """The original: default captures (which need the target), and rope of theta 10000 by silence."""
    stored, canonical = eagle3_core(Random(20), "midlayer.", 3)
    config = llama(draft_vocab_size=VD, rope_theta=None, architectures=["LlamaForCausalLMEagle3"], use_cache=True)
    blocks = block_config(theta=10000.0, first_input_norm=False)
    record = eagle3_record("eagle3", (2, 4, 5), blocks=blocks)
    return Tiny(config, stored, record, canonical, file="pytorch_model.bin", target=TARGET)


@dialect
def eagle3_wide() -> Tiny:
    """As for 70B: a width of its own, so an embedding of its own."""
    random = Random(21)
    stored, canonical = eagle3_core(random, "midlayer.", 3, hidden=24)
    stored["embed_tokens.weight"] = canonical["embedding"] = random(V, 24)
    blocks = block_config(24, first_input_norm=False)
    record = eagle3_record("eagle3", (2, 4, 5), blocks=blocks, embedding="head", embedding_size=24)
    config = llama(24, draft_vocab_size=VD, target_hidden_size=H)
    return Tiny(config, stored, record, canonical, target=TARGET)


@dialect
def eagle3_full_vocabulary() -> Tiny:
    """As for Vicuna: both vocabularies are one, the maps are zero."""
    stored, canonical = eagle3_core(Random(22), "midlayer.", 3, maps=False)
    stored["d2t"], stored["t2d"] = torch.zeros(V, dtype=torch.int64), torch.zeros(V, dtype=torch.bool)
    record = eagle3_record("eagle3", (2, 4, 5), draft_vocab_size=V, draft_to_target=None)
    return Tiny(llama(draft_vocab_size=V), stored, record, canonical, target=TARGET)


@dialect
def eagle3_specforge() -> Tiny:
    """Layer-output ids (the first is 1), rope written in both ways, ``norm_output`` as SpecForge means it."""
    stored, canonical = eagle3_core(Random(23), "midlayer.", 3)
    smooth = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    config = llama(
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=VD,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 6], "use_aux_hidden_state": True},
        norm_output=True,
        rope_scaling={"rope_type": "llama3", **smooth},
        rope_parameters={"rope_type": "llama3", "rope_theta": 500000.0, **smooth},
    )
    blocks = block_config(first_input_norm=False, rope=RopeConfig("llama3", 500000.0, DIM, 64, dict(smooth)))
    return Tiny(config, stored, eagle3_record("eagle3-specforge", (2, 4, 7), blocks=blocks), canonical)


@dialect
def eagle3_speculators() -> Tiny:
    """Boundary ids, one norm over all features, a normed residual and feedback, an embedding that was trained."""
    random = Random(24)
    stored, canonical = eagle3_core(random, "layers.0.", 3)
    stored["input_norm.weight"] = canonical["reduce_norm.weight"] = random(3 * H)
    stored["embed_tokens.weight"] = canonical["embedding"] = random(V, H)
    stored["verifier_norm.weight"] = random(H)
    config = frame("eagle3") | {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": VD,
        "target_hidden_size": H,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "norm_before_residual": True,
        "norm_before_fc": True,
        "norm_output": True,
        "embed_requires_grad": True,
        "transformer_layer_config": llama(),
    }
    record = eagle3_record(
        "eagle3-speculators",
        (2, 4, 5),
        reduce_norm="concat",
        norm_before_residual=True,
        feedback="normed",
        embedding="head",
        lineage=HeadLineage("org/target-8b", "LlamaForCausalLM"),
    )
    return Tiny(config, stored, record, canonical)


@dialect
def eagle3_two_layers() -> Tiny:
    """speculators with Qwen3 layers: a norm for each capture, q and k norms, a second layer of ordinary width."""
    random = Random(25)
    stored, canonical = eagle3_core(random, "layers.0.", 2, qk_norm=True)
    for mine, theirs in zip(layer(random, "layers.1.", 1, H, H, qk_norm=True), (stored, canonical), strict=True):
        theirs |= mine
    for index in range(2):
        stored[f"fc_norm.{index}.weight"] = canonical[f"reduce_norms.{index}.weight"] = random(H)
    config = frame("eagle3") | {
        "draft_vocab_size": VD,
        "eagle_aux_hidden_state_layer_ids": [3, 6],
        "norm_before_residual": False,
        "fc_norm": True,
        "transformer_layer_config": llama(model_type="qwen3", num_hidden_layers=2, use_sliding_window=False),
    }
    record = eagle3_record(
        "eagle3-speculators",
        (3, 6),
        reduce_norm="each",
        blocks=block_config(num_layers=2, qk_norm=True, first_input_norm=False),
        lineage=HeadLineage("org/target-8b", "LlamaForCausalLM"),
    )
    return Tiny(config, stored, record, canonical)


@dialect
def eagle3_deepspec() -> Tiny:
    """Five captures by layer-output ids, Qwen3 layers, the whole vocabulary."""
    stored, canonical = eagle3_core(Random(26), "layers.0.", 5, maps=False, qk_norm=True)
    config = llama(
        architectures=["Qwen3Eagle3Model"],
        model_type="qwen3",
        target_layer_ids=[-1, 1, 3, 5, 7],
        num_target_layers=N,
        ttt_length=7,
        layer_types=["full_attention"],
    )
    record = eagle3_record(
        "eagle3-deepspec",
        (0, 2, 4, 6, 8),
        draft_vocab_size=V,
        draft_to_target=None,
        blocks=block_config(qk_norm=True, first_input_norm=False),
    )
    return Tiny(config, stored, record, canonical)


@dialect
def eagle3_gpt_oss() -> Tiny:
    """Ids of ``eagle_config`` that are boundaries: the last is the number of layers. Biases everywhere."""
    stored, canonical = eagle3_core(Random(27), "midlayer.", 3, bias=True, output_bias=True)
    config = llama(
        attention_bias=True,
        draft_vocab_size=VD,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [5, 6, N]},
    )
    blocks = block_config(attention_bias=True, output_bias=True, first_input_norm=False)
    record = eagle3_record("eagle3-specforge", (5, 6, N), blocks=blocks)
    return Tiny(config, stored, record, canonical, target=TARGET)


@dialect
def eagle3_single() -> Tiny:
    """``use_aux_hidden_state`` false: one state after the final norm, no fc."""
    stored, canonical = eagle3_core(Random(28), "midlayer.", 0)
    config = llama(draft_vocab_size=VD, eagle_config={"use_aux_hidden_state": False})
    record = eagle3_record("eagle3-specforge", ("final",), reduce=False)
    return Tiny(config, stored, record, canonical)
