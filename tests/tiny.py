"""Tiny checkpoints of every format, written into a temporary directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers


def write_checkpoint(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], shards: int = 1
) -> Path:
    """A Hugging Face directory: ``config.json`` and safetensors, with an index if there are several shards."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    owned = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(owned, directory / "model.safetensors")
        return directory
    weight_map: dict[str, str] = {}
    for part in range(shards):
        file = f"model-{part + 1:05}-of-{shards:05}.safetensors"
        names = list(owned)[part::shards]
        save_file({name: owned[name] for name in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in owned.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


#: A Llama with grouped heads, tied embeddings and more rows than :func:`write_tokenizer` has ids.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
#: Ids of that tokenizer; model rows from here on are padding.
VOCAB = 300
_SPECIAL = ("<|bos|>", "<|end|>", "<|user|>", "<|assistant|>")
_TEXT = ("the quick brown fox jumps over the lazy dog", "def add(a, b):\n    return a + b\n", "12, 13, 14, 15")


def llama_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights of a Llama ``config``, by Hugging Face name.

    Padding rows are the longest, so that only a mask keeps them from being sampled. Special tokens have zero rows, so
    that greedy decoding goes on. A dozen ids are longer than the others and attention says little, so that greedy
    decoding repeats itself and drafts are accepted, though not always.
    """
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.25

    hidden, inner, rows = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    narrow = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    tensors = {"model.embed_tokens.weight": random(rows, hidden), "model.norm.weight": 1 + random(hidden)}
    tensors["model.embed_tokens.weight"][VOCAB:] *= 3
    tensors["model.embed_tokens.weight"][: len(_SPECIAL)] = 0
    tensors["model.embed_tokens.weight"][len(_SPECIAL) + 12 : VOCAB] *= 0.3
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    for layer in range(config["num_hidden_layers"]):
        tensors |= {f"model.layers.{layer}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        tensors[f"model.layers.{layer}.self_attn.o_proj.weight"] *= 0.25
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = 1 + random(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = random(rows, hidden)
    return tensors


def write_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer of :data:`VOCAB` ids that adds nothing to a text, a chat template, generation defaults."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(_SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT * 4, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    tokenizer.save(str(directory / "tokenizer.json"))
    texts = {
        "tokenizer_config.json": {
            "bos_token": "<|bos|>",
            "eos_token": "<|end|>",
            "chat_template": "{% for m in messages %}<|user|>{{ m['content'] }}<|end|>{% endfor %}<|assistant|>",
        },
        "generation_config.json": {"eos_token_id": [1], "max_new_tokens": 24},
    }
    for name, value in texts.items():
        (directory / name).write_text(json.dumps(value))


def write_llama(directory: Path, shards: int = 1, **changes: Any) -> Path:
    """A whole checkpoint of a random :data:`LLAMA` with ``changes`` to its config."""
    config = LLAMA | changes
    write_checkpoint(directory, config, llama_tensors(config), shards)
    write_tokenizer(directory)
    return directory


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray[Any, Any]],
    types: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """A GGUF file by the reference writer. A ``.`` before a key stands for the architecture; ``types`` quantises."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata.items():
        key = architecture + name if name.startswith(".") else name
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case Sequence():
                writer.add_array(key, list(value))
    for name, array in tensors.items():
        kind = (types or {}).get(name)
        data = array if kind is None else gguf.quants.quantize(array, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
