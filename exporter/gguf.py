"""GGUF checkpoints as Hugging Face ones: metadata to a ``config.json`` dictionary, tensors to names and layouts.

What llama.cpp's converter changed is undone here: the rows of Llama's q and k, permuted for its interleaved rope; the
1 it adds to Gemma's norm weights. Its tensors ``rope_freqs`` (Llama 3.1) and ``rope_factors_long/short`` (Phi-3)
divide the frequencies, which is what the longrope dialect does, so both become one.

Blocks are dequantised by the ``gguf`` package (llama.cpp's own), a few rows at a time; the codes of those that
``exporter.quantize.gguf_blocks`` knows are there as they are, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from specexport.exporter.gguf_file import GgufFile, GgufTensor
from specexport.exporter.quantize.gguf_blocks import BLOCK, KEPT, bits, decode
from specexport.exporter.quantize.packing import check_finite
from specexport.exporter.quantize.record import Quantized
from specexport.exporter.shards import DTYPES, read_bytes, read_pieces
from specexport.runtime.errors import CheckpointError

_DEQUANTISE_ELEMENTS = 1 << 20
_PLAIN = {name: name for name in ("F64", "F32", "F16", "BF16")}

_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_OUTPUT = "output.weight"
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_LLAMA = {**_ATTENTION, **_MLP, **_NORMS}
_BLOCKS: Mapping[str, Mapping[str, str]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": {**_LLAMA, **_HEAD_NORMS},
    "gemma3": {
        **_ATTENTION,
        **_MLP,
        **_HEAD_NORMS,
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
    "phi3": {
        **_NORMS,
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_up": "mlp.gate_up_proj",
        "ffn_down": "mlp.down_proj",
    },
}
_CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "phi3": ("Phi3ForCausalLM", "phi3"),
}
# Keys under "<architecture>." that say nothing about the logits.
_IGNORED = frozenset({"rope.scaling.finetuned"})
# Keys that may appear with this value only.
_FIXED = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True, "rope.scaling.yarn_ext_factor": 1.0}


class _Metadata:
    """The keys of one architecture, each to be taken once; what is left at the end is an error."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        prefix = architecture + "."
        self.file, self.architecture = file, architecture
        self.left = {k[len(prefix) :]: v for k, v in file.metadata.items() if k.startswith(prefix)}

    def take(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of ``key``; a float in its shortest decimal form (1e-05, not 9.99999974e-06)."""
        value = self.left.pop(key, None)
        if isinstance(value, np.ndarray) and value.size and (value == value[0]).all():
            value = value[0].item()  # a value per layer, the same for all
        if value is None:
            return default
        if kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(str(np.float32(value)))
        if type(value) is not kind:
            raise self.error(f"{self.architecture}.{key} is {str(value)[:60]}, expected one {kind.__name__}")
        return value

    def need(self, key: str, kind: type) -> Any:
        if key not in self.left:
            raise self.error(f"{self.architecture}.{key} is missing")
        return self.take(key, kind)

    def error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {reason}")


def hf_config(file: GgufFile) -> dict[str, Any]:
    """The ``config.json`` that this file's model would have; ``read_config`` checks its values.

    Raises:
        CheckpointError: unknown architecture or metadata key, or metadata that contradicts the tensors.
    """
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in _BLOCKS:
        known = ", ".join(_BLOCKS)
        raise CheckpointError(f"{file.path}: architecture {str(architecture)[:60]!r} is not one of {known}")
    m = _Metadata(file, architecture)
    if file.metadata.get("general.type", "model") != "model":
        raise m.error(f"general.type is {str(file.metadata['general.type'])[:60]!r}, expected a model")
    if file.metadata.get("split.count", 1) not in (0, 1):
        raise m.error("is one part of several; join them with: llama-gguf-split --merge")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise m.error("has no token_embd.weight matrix")
    heads = m.need("attention.head_count", int)
    head_dim = m.take("attention.key_length", int)
    config: dict[str, Any] = {
        "vocab_size": m.take("vocab_size", int, embedding.shape[0]),
        "hidden_size": m.need("embedding_length", int),
        "intermediate_size": m.need("feed_forward_length", int),
        "num_hidden_layers": m.need("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": m.take("attention.head_count_kv", int, heads),
        "max_position_embeddings": m.need("context_length", int),
        "rms_norm_eps": m.need("attention.layer_norm_rms_epsilon", float),
        "rope_theta": m.take("rope.freq_base", float, 10000.0),
        "tie_word_embeddings": _OUTPUT not in file.tensors,
    }
    if embedding.shape != (config["vocab_size"], config["hidden_size"]):
        raise m.error(f"token_embd.weight is {embedding.shape}, metadata says {config['vocab_size']} tokens")
    if head_dim is None and heads > 0:
        head_dim = config["hidden_size"] // heads
    if m.take("attention.value_length", int, head_dim) != head_dim:
        raise m.error("heads of k and v differ in width")
    config["head_dim"] = head_dim
    name = architecture
    window = m.take("attention.sliding_window", int) if architecture in ("llama", "phi3", "gemma3") else None
    if architecture == "llama" and window:
        name = "mistral"  # llama.cpp has no architecture of that name
    if window is not None and (window or architecture == "phi3"):
        config["sliding_window"] = window or None
    _rope(m, config, head_dim)
    _biases(m, config)
    if architecture == "gemma3":
        _gemma3(m, config)
    for key, value in _FIXED.items():
        if m.left.pop(key, value) != value:
            raise m.error(f"{architecture}.{key} is not {value}, which is not supported")
    if unknown := sorted(m.left.keys() - _IGNORED):
        raise m.error(f"unknown key {architecture}.{unknown[0]}; it may change the model, so it is refused")
    config["architectures"], config["model_type"] = [_CLASSES[name][0]], _CLASSES[name][1]
    for key, field in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        if isinstance(token := file.metadata.get(f"tokenizer.ggml.{key}_token_id"), int):
            config[field] = token
    return config


def _gemma3(m: _Metadata, config: dict[str, Any]) -> None:
    """What llama.cpp hard-codes for Gemma 3: the local rope base, the layer pattern, and the score scale."""
    config["rope_local_base_freq"] = m.take("rope.freq_base_swa", float, 10000.0)
    pattern = m.left.pop("attention.sliding_window_pattern", 6)
    if isinstance(pattern, np.ndarray):
        config["layer_types"] = ["sliding_attention" if sliding else "full_attention" for sliding in pattern.tolist()]
    else:
        config["sliding_window_pattern"] = pattern
    # Only the 27B model, known by its depth, scales by the width of a head's share of the hidden state.
    large = config["num_hidden_layers"] == 62 and config["num_attention_heads"] > 0
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if large else config["head_dim"]
    )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        config[key] = m.take(key, float)


def _rope(m: _Metadata, config: dict[str, Any], head_dim: int) -> None:
    rotary = m.take("rope.dimension_count", int, head_dim)
    if rotary != head_dim and head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    kind = m.take("rope.scaling.type", str, "none")
    factor = m.take("rope.scaling.factor", float) or m.take("rope.scale_linear", float)
    original = m.take("rope.scaling.original_context_length", int)
    attention = m.take("rope.scaling.attn_factor", float)
    factors = {name: _factors(m, name) for name in _FACTORS if name in m.file.tensors}
    if m.architecture == "phi3" and original is not None:
        config["original_max_position_embeddings"] = original
    if len(factors) == 2 and "rope_freqs.weight" not in factors and m.architecture == "phi3":
        config["rope_scaling"] = {
            "type": "longrope",
            "short_factor": factors["rope_factors_short.weight"],
            "long_factor": factors["rope_factors_long.weight"],
        }
        if attention is not None:
            config["rope_scaling"]["attention_factor"] = attention
    elif factors.keys() == {"rope_freqs.weight"} and kind == "none" and attention is None:
        both = factors["rope_freqs.weight"]
        # One list for both lengths, and no attention factor: exactly "divide the frequencies by these".
        config["rope_scaling"] = {
            "rope_type": "longrope",
            "attention_factor": 1.0,
            "factor": 1.0,
            "short_factor": both,
            "long_factor": both,
        }
    elif factors or kind not in ("none", "linear", "yarn"):
        raise m.error(f"rope scaling {kind!r} with {', '.join(factors) or 'no factor tensors'} is not understood")
    elif kind == "yarn" and factor is not None:
        config["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": m.take("rope.scaling.yarn_beta_fast", float),
            "beta_slow": m.take("rope.scaling.yarn_beta_slow", float),
        }
        # llama.cpp multiplies what YaRN recommends by this.
        extra = m.take("rope.scaling.yarn_attn_factor", float, attention)
        if extra is not None and extra != 1.0:
            config["rope_scaling"]["attention_factor"] = extra * (1.0 + 0.1 * math.log(factor))
    elif factor is not None and factor != 1.0:
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}


def _factors(m: _Metadata, name: str) -> list[float]:
    tensor = m.file.tensors[name]
    if len(tensor.shape) != 1 or tensor.type_name != "F32" or tensor.size > 1 << 20:
        raise m.error(f"{name} must be a float32 vector")
    factors: list[float] = read_bytes(m.file.path, tensor.start, tensor.size).view(torch.float32).tolist()
    return factors


def _biases(m: _Metadata, config: dict[str, Any]) -> None:
    """Biases are told by the tensors; strict loading finds one that only some layers have."""
    present = {key for key in _BLOCKS[m.architecture] if f"blk.0.{key}.bias" in m.file.tensors}
    if m.architecture in ("llama", "qwen3", "gemma3"):
        if present & _ATTENTION.keys():
            config["attention_bias"] = True
        if m.architecture == "llama" and present & _MLP.keys():
            config["mlp_bias"] = True


class GgufSource:
    """The tensors of a GGUF file under their Hugging Face names; a ``StoredWeights`` and a ``QuantizedSource``.

    Raises:
        CheckpointError: a tensor that the architecture does not have.
    """

    def __init__(self, file: GgufFile, config: Mapping[str, Any]) -> None:
        self._file = file
        self._architecture: str = file.metadata["general.architecture"]
        self._heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        self._tensors: dict[str, GgufTensor] = {}
        for name, tensor in file.tensors.items():
            if name not in _FACTORS:
                self._tensors[self._rename(name)] = tensor

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def read(self, name: str) -> torch.Tensor:
        tensor = self._find(name)
        values = self._reorder(name, tensor, self._values(tensor))
        if self._architecture == "gemma3" and name.split(".")[-2].endswith("norm"):
            return values - 1
        return values

    def quantized(self, name: str) -> Quantized | None:
        """The codes of a matrix of Q4_0 or Q8_0, and of Q4_1 where its minima are zero points; None of any other."""
        tensor = self._find(name)
        kind = tensor.type_name
        if kind not in KEPT or len(tensor.shape) != 2:
            return None
        parts = []
        for _, data in self._rows(tensor):
            if (decoded := decode(kind, data)) is None:
                return None
            check_finite(name, decoded[1])
            parts.append(decoded)
        codes, scales, zeros = zip(*parts, strict=True)
        held = torch.cat(zeros) if kind == "Q4_1" else None
        whole = Quantized(bits(kind), torch.cat(codes), torch.cat(scales), held, BLOCK)
        return whole.map_rows(lambda rows: self._reorder(name, tensor, rows).contiguous())

    def _reorder(self, name: str, tensor: GgufTensor, values: torch.Tensor) -> torch.Tensor:
        """The rows of Llama's q and k in the order of Hugging Face."""
        heads = self._heads.get(name.split(".")[-2]) if self._architecture == "llama" else None
        if heads is None:
            return values
        if heads <= 0 or values.shape[0] % (2 * heads):
            raise CheckpointError(f"{self._file.path}: {tensor.name} does not divide into {heads} heads")
        halves = values.reshape(heads, -1, 2, *values.shape[1:])
        return halves.transpose(1, 2).reshape(values.shape)

    def stored(self, name: str) -> tuple[str, Iterator[memoryview]]:
        tensor = self._find(name)
        return tensor.type_name, read_pieces(self._file.path, tensor.start, tensor.size)

    def headers(self) -> Iterator[bytes]:
        for piece in read_pieces(self._file.path, 0, self._file.header_size):
            yield bytes(piece)
        yield str(self._file.path.stat().st_size).encode()

    def _values(self, tensor: GgufTensor) -> torch.Tensor:
        if tensor.type_name in _PLAIN:
            data = read_bytes(self._file.path, tensor.start, tensor.size)
            return data.view(DTYPES[tensor.type_name]).reshape(tensor.shape)
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        kind = GGMLQuantizationType[tensor.type_name]
        out = torch.empty((math.prod(tensor.shape[:-1]), tensor.shape[-1]), dtype=torch.float32)
        for row, data in self._rows(tensor):
            try:
                values = dequantize(data.numpy(), kind)
            except NotImplementedError:
                raise CheckpointError(f"{self._file.path}: {tensor.name} is {kind.name}, which is not read") from None
            out[row : row + len(data)] = torch.from_numpy(values)
        return out.reshape(tensor.shape)

    def _rows(self, tensor: GgufTensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The stored rows a few at a time: the index of the first, and uint8 [count, bytes of a row]."""
        rows = math.prod(tensor.shape[:-1])
        row_size = tensor.size // rows
        step = max(1, _DEQUANTISE_ELEMENTS // tensor.shape[-1])
        for row in range(0, rows, step):
            count = min(step, rows - row)
            data = read_bytes(self._file.path, tensor.start + row * row_size, count * row_size)
            yield row, data.reshape(count, row_size)

    def _rename(self, name: str) -> str:
        if name in _TOP:
            return _TOP[name]
        if name == _OUTPUT:
            return "lm_head.weight"
        match = re.fullmatch(r"blk\.(0|[1-9]\d{0,3})\.(\w+)\.(weight|bias)", name)
        module = _BLOCKS[self._architecture].get(match[2]) if match else None
        if match is None or module is None:
            raise CheckpointError(f"{self._file.path}: {self._architecture} has no tensor {name[:80]!r}")
        return f"model.layers.{match[1]}.{module}.{match[3]}"

    def _find(self, name: str) -> GgufTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"the checkpoint has no tensor {name}") from None
