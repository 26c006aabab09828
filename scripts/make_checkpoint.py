"""Write a random checkpoint of a real model's shape: sharded safetensors, config, byte-level tokenizer.

Its text is noise; it exists to measure export and engines at sizes that are not on this machine.

    python scripts/make_checkpoint.py tinyllama-1.1b -o /tmp/tinyllama --dtype bf16
    python scripts/make_checkpoint.py llama-3.1-8b -o /tmp/llama-8b --dtype gptq      # layers in int4, 5.7 GB
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "smollm2-360m": {
        "hidden_size": 960,
        "intermediate_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 15,
        "num_key_value_heads": 5,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "tinyllama-1.1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    },
    "llama-3.1-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
}
#: ``gptq``: the layers' matrices in symmetric int4, groups of 128, everything else fp16.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "gptq": torch.float16}
GROUP = 128
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor, Hugging Face's names."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    narrow = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        for name, rows in (("q", hidden), ("k", narrow), ("v", narrow), ("o", hidden)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)
        yield prefix + "mlp.gate_proj.weight", (inner, hidden)
        yield prefix + "mlp.up_proj.weight", (inner, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def gptq(name: str, rows: int, inputs: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random codes of a matrix as GPTQ stores them; scales keep the values' spread at one over root of the inputs."""
    words = torch.randint(-(1 << 31), (1 << 31), (inputs // 8, rows), dtype=torch.int32, generator=generator)
    zeros = torch.full((inputs // GROUP, rows // 8), 0x77777777, dtype=torch.int32)  # 8, stored as one less
    scales = torch.full((inputs // GROUP, rows), inputs**-0.5 / 4.6, dtype=torch.float16)
    module = name.removesuffix("weight")
    return {f"{module}qweight": words, f"{module}qzeros": zeros, f"{module}scales": scales}


def write(shape: str, folder: Path, kind: str, shard_bytes: int, seed: int = 0) -> None:
    """Write the checkpoint; at most one shard is in memory."""
    dtype = DTYPES[kind]
    config = (
        SHAPES[shape]
        | ({"quantization_config": GPTQ} if kind == "gptq" else {})
        | {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "bos_token_id": 0,
            "eos_token_id": 0,
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={"<s>": 0, **{char: i + 1 for i, char in enumerate(alphabet)}}, merges=[]))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    generator = torch.Generator().manual_seed(seed)
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    size = 0

    def flush() -> None:
        nonlocal size
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()
        size = 0

    for name, dims in tensors(config):
        if kind == "gptq" and name.endswith("_proj.weight"):
            new = gptq(name, *dims, generator)
        else:
            tensor = torch.empty(dims, dtype=dtype)
            new = {name: tensor.fill_(1) if len(dims) == 1 else tensor.normal_(0, dims[1] ** -0.5, generator=generator)}
        shard |= new
        size += sum(tensor.nbytes for tensor in new.values())
        if size >= shard_bytes:
            flush()
    if shard:
        flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--shard-mb", type=int, default=512)
    arguments = parser.parse_args()
    write(arguments.shape, arguments.output, arguments.dtype, arguments.shard_mb << 20)


if __name__ == "__main__":
    main()
