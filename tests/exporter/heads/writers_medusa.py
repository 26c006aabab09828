"""Medusa in each of its layouts."""

from __future__ import annotations

import torch

from specexport.exporter.heads.record import HeadLineage
from tests.exporter.heads.writers import (
    TARGET,
    TARGET_CONFIG,
    H,
    Random,
    Tiny,
    V,
    dialect,
    llama_tensors,
    medusa_blocks,
    medusa_record,
)


@dialect
def medusa_pickle() -> Tiny:
    """As published for Vicuna: a lone pickle, and a config that counts fewer heads than there are."""
    random = Random(1)
    stored, canonical = medusa_blocks(random, 3, 2, True, "{h}.{l}.linear")
    for h in range(3):
        stored[f"{h}.2.weight"] = canonical[f"heads.{h}.lm_head"] = random(V, H)
    config = {
        "medusa_num_heads": 2,
        "medusa_num_layers": 2,
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
        "transformers_version": "4.34.0",
    }
    record = medusa_record("medusa", 3, 2, lineage=HeadLineage("lmsys/vicuna-7b-v1.3"))
    return Tiny(config, stored, record, canonical, file="medusa_lm_head.pt", warnings=1)


@dialect
def medusa_safetensors() -> Tiny:
    random = Random(2)
    stored, canonical = medusa_blocks(random, 2, 1, True, "{h}.{l}.linear")
    for h in range(2):
        stored[f"{h}.1.weight"] = canonical[f"heads.{h}.lm_head"] = random(V, H)
    return Tiny(None, stored, medusa_record("medusa", 2, 1), canonical, file="medusa_lm_head.safetensors")


@dialect
def medusa_legacy() -> Tiny:
    """V2 and TGI: no lm_head."""
    stored, canonical = medusa_blocks(Random(3), 2, 1, True, "{h}.{l}.linear")
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "version": "2", "base_model_name_or_path": "org/base"}
    record = medusa_record("medusa-legacy", 2, 1, lm_head="target", lineage=HeadLineage("org/base"))
    return Tiny(config, stored, record, canonical, file="medusa_lm_head.safetensors", target=TARGET)


@dialect
def medusa_2() -> Tiny:
    """Merged into the shards of its fine-tuned target."""
    random = Random(4)
    stored, canonical = medusa_blocks(random, 2, 1, True, "medusa_head.{h}.{l}.linear")
    for h in range(2):
        stored[f"medusa_head.{h}.1.weight"] = canonical[f"heads.{h}.lm_head"] = random(V, H)
    config = TARGET_CONFIG | {"medusa_num_heads": 2, "medusa_num_layers": 1}
    return Tiny(config, stored, medusa_record("medusa-2", 2, 1), canonical, others=llama_tensors(random))


@dialect
def medusa_tensorrt() -> Tiny:
    random = Random(5)
    stored, canonical = medusa_blocks(random, 2, 2, True, "medusa_heads.{h}.medusa_layers.{l}.linear")
    for h in range(2):
        stored[f"medusa_heads.{h}.lm_head.weight"] = canonical[f"heads.{h}.lm_head"] = random(V, H)
    config = {
        "num_medusa_heads": 2,
        "num_medusa_layers": 2,
        "max_medusa_token_len": 63,
        "medusa_hidden_act": "gelu_new",
        "hidden_size": H,
        "vocab_size": V,
    }
    record = medusa_record("tensorrt-llm", 2, 2, activation="gelu_tanh")
    return Tiny(config, stored, record, canonical)


@dialect
def medusa_vllm() -> Tiny:
    """A vocabulary truncated by a map, over lm_heads that still have all rows."""
    random = Random(6)
    stored, canonical = medusa_blocks(random, 2, 1, False, "blocks.{h}.layers.{l}")
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(6))[:12]
    stored["token_map"] = ids
    for h in range(2):
        stored[f"lm_heads.{h}.weight"] = random(V, H)
        canonical[f"heads.{h}.lm_head"] = torch.stack([stored[f"lm_heads.{h}.weight"][int(i)] for i in ids])
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": H,
        "vocab_size": V,
        "truncated_vocab_size": 12,
        "num_heads": 2,
        "num_hidden_layers": 1,
        "max_paths": 64,
        "topk": 10,
    }
    record = medusa_record("vllm", 2, 1, block_bias=False, vocab_size=12, token_map=ids.numpy())
    return Tiny(config, stored, record, canonical)


@dialect
def medusa_vllm_shared() -> Tiny:
    """One lm_head for all heads, of a truncated vocabulary, in the map's order."""
    random = Random(7)
    stored, canonical = medusa_blocks(random, 2, 2, True, "medusa_heads.blocks.{h}.layers.{l}")
    ids = torch.randperm(V, generator=torch.Generator().manual_seed(7))[:10]
    stored["medusa_heads.token_map"] = ids
    stored["medusa_heads.lm_head.weight"] = canonical["lm_head"] = random(10, H)
    config = {
        "model_type": "medusa",
        "hidden_size": H,
        "vocab_size": V,
        "truncated_vocab_size": 10,
        "num_heads": 2,
        "num_hidden_layers": 2,
        "medusa_fc_bias": True,
        "original_lm_head": True,
    }
    record = medusa_record("vllm", 2, 2, lm_head="shared", vocab_size=10, token_map=ids.numpy())
    return Tiny(config, stored, record, canonical)
