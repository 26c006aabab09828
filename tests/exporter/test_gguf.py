"""GGUF: configs, tensors undone to the Hugging Face layout, and hostile files."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize, quantize

from specexport.exporter.checkpoint import open_checkpoint
from specexport.exporter.config import read_config
from specexport.exporter.demo import GGUF_VARIABLE, fetch_smollm2
from specexport.exporter.gguf_file import read_gguf
from specexport.exporter.progress import Progress
from specexport.exporter.rope import inv_freq
from specexport.runtime.errors import CheckpointError
from tests.tiny import write_gguf

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP, VOCAB = 4, 2, 8, 32, 64, 16
RNG = np.random.default_rng(0)
META: dict[str, Any] = {
    ".block_count": 2,
    ".context_length": 128,
    ".embedding_length": HIDDEN,
    ".feed_forward_length": MLP,
    ".attention.head_count": HEADS,
    ".attention.head_count_kv": KV_HEADS,
    ".attention.layer_norm_rms_epsilon": 1e-5,
    ".rope.freq_base": 50000.0,
}


def random(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return RNG.standard_normal(shape).astype(np.float32)


def tensors(architecture: str) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    made = {"token_embd.weight": random(VOCAB, HIDDEN), "output_norm.weight": random(HIDDEN)}
    for i in range(2):
        block = {
            "attn_q.weight": random(HEADS * HEAD_DIM, HIDDEN),
            "attn_k.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_v.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
            "attn_output.weight": random(HIDDEN, HEADS * HEAD_DIM),
            "ffn_gate.weight": random(MLP, HIDDEN),
            "ffn_up.weight": random(MLP, HIDDEN),
            "ffn_down.weight": random(HIDDEN, MLP),
            "attn_norm.weight": random(HIDDEN),
            "ffn_norm.weight": random(HIDDEN),
        }
        if architecture in ("qwen3", "gemma3"):
            block |= {"attn_q_norm.weight": random(HEAD_DIM), "attn_k_norm.weight": random(HEAD_DIM)}
        if architecture == "gemma3":
            block |= {"post_attention_norm.weight": random(HIDDEN), "post_ffw_norm.weight": random(HIDDEN)}
        if architecture == "qwen2":
            block |= {
                f"attn_{x}.bias": random(n * HEAD_DIM) for x, n in zip("qkv", (HEADS, KV_HEADS, KV_HEADS), strict=True)
            }
        if architecture == "phi3":
            fused = np.concatenate([block.pop(f"attn_{x}.weight") for x in "qkv"])
            block |= {"attn_qkv.weight": fused, "ffn_up.weight": random(2 * MLP, HIDDEN)}
            del block["ffn_gate.weight"]
        made |= {f"blk.{i}.{name}": value for name, value in block.items()}
    return made


def opened(path: Path, architecture: str = "llama", extra: dict[str, Any] | None = None, **more: Any) -> Any:
    data = tensors(architecture) | more.pop("tensors", {})
    return open_checkpoint(str(write_gguf(path / "m.gguf", architecture, META | (extra or {}), data, **more)))


def permute(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """What llama.cpp's converter does to Llama's q and k: (first half, second half) of a head become (even, odd)."""
    out = np.empty_like(weight)
    dim = weight.shape[0] // heads
    for head in range(heads):
        for i in range(dim // 2):
            out[head * dim + 2 * i] = weight[head * dim + i]
            out[head * dim + 2 * i + 1] = weight[head * dim + dim // 2 + i]
    return out


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3", "phi3"])
def test_architectures(tmp_path: Path, architecture: str) -> None:
    extra = {".attention.sliding_window": 16} if architecture == "gemma3" else {}
    checkpoint = opened(tmp_path, architecture, extra)
    config = read_config(checkpoint.config)
    assert config.architecture == architecture and config.tie_word_embeddings
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 8)
    assert config.norm_eps == 1e-5 and config.ropes[0].theta == 50000.0
    assert config.layers[0].window == (16 if architecture == "gemma3" else None)
    weights = checkpoint.weights
    for name in weights.names():
        assert weights.read(name).shape == torch.Size(weights.shape(name))
    assert len(set(weights.names())) == len(checkpoint.gguf.tensors)


def transformers_reads(path: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """Config and tensors from Transformers' own GGUF loader (``from_pretrained`` would need accelerate on top)."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    # Phi-3's class has a padding id beyond our tiny vocabulary.
    config = AutoConfig.for_model(**({"pad_token_id": 0} | load_gguf_checkpoint(str(path))["config"]))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return config, load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3", "phi3"])
def test_transformers_loads_the_same(tmp_path: Path, architecture: str) -> None:
    extra: dict[str, Any] = {"tokenizer.ggml.tokens": [str(i) for i in range(VOCAB)]}
    if architecture == "gemma3":
        extra |= {".attention.sliding_window": 16, ".attention.key_length": HEAD_DIM}
    if architecture == "qwen3":
        extra |= {".attention.key_length": HEAD_DIM, ".attention.value_length": HEAD_DIM}
    checkpoint = opened(tmp_path, architecture, extra)
    _, expected = transformers_reads(tmp_path / "m.gguf")
    assert set(checkpoint.weights.names()) == set(expected)
    for name, value in expected.items():
        assert torch.equal(checkpoint.weights.read(name).float(), value), name


def test_permutation_is_undone(tmp_path: Path) -> None:
    q, k, bias = random(HEADS * HEAD_DIM, HIDDEN), random(KV_HEADS * HEAD_DIM, HIDDEN), random(HEADS * HEAD_DIM)
    stored = {
        "blk.0.attn_q.weight": permute(q, HEADS),
        "blk.0.attn_k.weight": permute(k, KV_HEADS),
        "blk.0.attn_q.bias": permute(bias, HEADS),
    }
    checkpoint = opened(tmp_path, tensors=stored)
    for name, value in (("q_proj.weight", q), ("k_proj.weight", k), ("q_proj.bias", bias)):
        np.testing.assert_array_equal(checkpoint.weights.read(f"model.layers.0.self_attn.{name}").numpy(), value)
    assert checkpoint.config["attention_bias"] is True


def test_gemma_norms_are_undone(tmp_path: Path) -> None:
    weight = random(HIDDEN)
    checkpoint = opened(
        tmp_path, "gemma3", {".attention.sliding_window": 16}, tensors={"output_norm.weight": weight + 1}
    )
    np.testing.assert_allclose(checkpoint.weights.read("model.norm.weight").numpy(), weight, atol=1e-6)


def test_gemma_config(tmp_path: Path) -> None:
    extra = {".attention.sliding_window": 16, ".rope.scaling.type": "linear", ".rope.scaling.factor": 8.0}
    config = read_config(opened(tmp_path, "gemma3", extra).config)
    assert [rope.kind for rope in config.ropes] == ["linear", "default"]
    assert config.attention_scale == HEAD_DIM**-0.5
    untied = opened(tmp_path, "gemma3", extra, tensors={"output.weight": random(VOCAB, HIDDEN)})
    assert not read_config(untied.config).tie_word_embeddings and "lm_head.weight" in untied.weights.names()


def test_mistral_is_a_llama_with_a_window(tmp_path: Path) -> None:
    config = read_config(opened(tmp_path, extra={".attention.sliding_window": 32}).config)
    assert config.architecture == "mistral" and config.layers[0].window == 32


def test_llama3_frequencies(tmp_path: Path) -> None:
    """``rope_freqs`` as the converter computes it from a Llama 3.1 config gives that config's frequencies."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    plain = opened(tmp_path).config
    expected, _ = inv_freq(read_config({**plain, "rope_scaling": scaling}).ropes[0], 128)
    default, _ = inv_freq(read_config(plain).ropes[0], 128)
    rope = read_config(opened(tmp_path, tensors={"rope_freqs.weight": default / expected}).config).ropes[0]
    for slots in (16, 128):
        frequencies, factor = inv_freq(rope, slots)
        assert factor == 1.0
        np.testing.assert_allclose(frequencies, expected, rtol=5e-7)


def test_phi3_longrope(tmp_path: Path) -> None:
    factors = {"rope_factors_short.weight": np.full(3, 1.5, np.float32), "rope_factors_long.weight": random(3) ** 2 + 1}
    extra = {
        ".rope.dimension_count": 6,
        ".rope.scaling.original_context_length": 64,
        ".rope.scaling.attn_factor": 1.25,
        ".attention.sliding_window": 0,
    }
    config = read_config(opened(tmp_path, "phi3", extra, tensors=factors).config)
    rope = config.ropes[0]
    assert (rope.kind, rope.rotary_dim, rope.params["original_max_position_embeddings"]) == ("longrope", 6, 64)
    assert rope.params["short_factor"] == (1.5, 1.5, 1.5) and inv_freq(rope, 64)[1] == 1.25
    assert config.layers[0].window is None


def test_yarn(tmp_path: Path) -> None:
    extra = {
        ".rope.scaling.type": "yarn",
        ".rope.scaling.factor": 4.0,
        ".rope.scaling.original_context_length": 32,
    }
    rope = read_config(opened(tmp_path, "qwen2", extra).config).ropes[0]
    assert rope.kind == "yarn" and rope.params["original_max_position_embeddings"] == 32


QUANTISED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]


@pytest.mark.parametrize("kind", QUANTISED)
def test_dequantises(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bounded pieces, over more rows than one piece holds, with the values of the reference."""
    data, type_ = random(VOCAB, HIDDEN), GGMLQuantizationType[kind]
    types = {"token_embd.weight": type_}
    checkpoint = opened(tmp_path, tensors={"token_embd.weight": data}, types=types)
    monkeypatch.setattr("specexport.exporter.gguf._DEQUANTISE_ELEMENTS", 5 * HIDDEN)
    read = checkpoint.weights.read("model.embed_tokens.weight")
    np.testing.assert_array_equal(read.numpy(), dequantize(quantize(data, type_), type_))


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "IQ2_XXS"])
def test_reads_every_block_type(tmp_path: Path, kind: str) -> None:
    """Types the reference cannot write: a file of zero blocks whose type is patched in."""
    from gguf.constants import GGML_QUANT_SIZES

    type_ = GGMLQuantizationType[kind]
    block, size = GGML_QUANT_SIZES[type_]
    path = tmp_path / "x.gguf"
    name = b"token_embd.weight"
    architecture = string(b"general.architecture") + struct.pack("<I", 8) + string(b"llama")
    info = string(name) + struct.pack("<IQQIQ", 2, block, 3, int(type_), 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + architecture + info
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(3 * size))
    from specexport.exporter.gguf import GgufSource

    source = GgufSource(read_gguf(path), {"num_attention_heads": 1, "num_key_value_heads": 1})
    read = source.read("model.embed_tokens.weight")
    assert read.shape == (3, block) and read.dtype == torch.float32 and torch.isfinite(read).all()


def test_plain_floats_keep_their_dtype(tmp_path: Path) -> None:
    data = random(VOCAB, HIDDEN)
    half = opened(tmp_path, tensors={"token_embd.weight": data.astype(np.float16)})
    assert torch.equal(half.weights.read("model.embed_tokens.weight"), torch.from_numpy(data).half())
    types = {"token_embd.weight": GGMLQuantizationType.BF16}
    brain = opened(tmp_path, tensors={"token_embd.weight": data}, types=types)
    assert torch.equal(brain.weights.read("model.embed_tokens.weight"), torch.from_numpy(data).bfloat16())


@pytest.mark.parametrize(
    ("architecture", "extra", "more", "message"),
    [
        ("mamba", {}, {}, "architecture 'mamba' is not one of llama"),
        ("llama", {".expert_count": 8}, {}, "expert_count is not 0"),
        ("llama", {".residual_scale": 2.0}, {}, "unknown key llama.residual_scale"),
        ("llama", {".attention.head_count": "four"}, {}, "head_count is four, expected one int"),
        ("llama", {".attention.head_count": [4, 2]}, {}, "expected one int"),
        ("llama", {".vocab_size": 99}, {}, "metadata says 99 tokens"),
        ("llama", {".attention.value_length": 4}, {}, "k and v differ in width"),
        ("llama", {".rope.scaling.type": "longrope"}, {}, "'longrope' with no factor tensors"),
        ("llama", {"general.type": "adapter"}, {}, "general.type is 'adapter'"),
        ("llama", {"split.count": 2}, {}, "llama-gguf-split --merge"),
        ("llama", {}, {"blk.0.ssm_a.weight": random(2)}, "llama has no tensor 'blk.0.ssm_a.weight'"),
        ("llama", {}, {"blk.00.attn_v.weight": random(2)}, "has no tensor"),
        ("llama", {}, {"rope_factors_long.weight": random(4)}, "not understood"),
    ],
)
def test_refuses(tmp_path: Path, architecture: str, extra: Any, more: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path, architecture, extra, tensors=more)


def string(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def header(keys: int = 0, tensor_count: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensor_count, keys)


HUGE = 1 << 60
ARRAY = header(1) + string(b"a") + struct.pack("<I", 9)
INFO = header(0, 1) + string(b"t")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "4 bytes announced"),
        (b"GGML" + bytes(20), "not a GGUF file"),
        (header(version=1), "version 1 is not 2 or 3"),
        (header(version=0x03000000), "big-endian"),
        (header(HUGE), "truncated or damaged"),
        (header(0, HUGE), "truncated or damaged"),
        (header(1) + string(b"a", HUGE) + bytes(20), "a string of"),
        (header(1) + string(b"a", 1 << 20) + bytes(20), "truncated or damaged"),
        (header(1) + string(b"\xff") + bytes(20), "not UTF-8"),
        (header(1) + string(b"a") + struct.pack("<I", 99) + bytes(8), "unknown value type 99"),
        (ARRAY + struct.pack("<IQ", 8, HUGE), "strings announced"),
        (ARRAY + struct.pack("<IQ", 4, HUGE), "truncated or damaged"),
        (ARRAY + struct.pack("<IQ", 9, 1), "unknown value type 9"),
        (header(2) + 2 * (string(b"a") + struct.pack("<IB", 0, 1)), "'a' appears twice"),
        (INFO + struct.pack("<I", 9) + bytes(100), "9 dimensions"),
        (INFO + struct.pack("<IQIQ", 1, 0, 0, 0), "has the shape"),
        (INFO + struct.pack("<IQIQ", 1, 32, 999, 0), "unknown type 999"),
        (INFO + struct.pack("<IQIQ", 1, 31, 2, 0), "multiple of 32"),
        (INFO + struct.pack("<IQIQ", 1, 32, 0, 1), "misaligned"),
        (INFO + struct.pack("<IQIQ", 1, 32, 0, 1 << 62), "ends at byte"),
        (INFO + struct.pack("<IQQQIQ", 3, 1 << 40, 1 << 40, 1 << 40, 0, 0), "ends at byte"),
    ],
)
def test_hostile_files(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        read_gguf(path)


def test_overlapping_tensors(tmp_path: Path) -> None:
    head = header(0, 2)
    for name in (b"a", b"b"):
        head += string(name) + struct.pack("<IQIQ", 1, 16, 0, 0)
    (tmp_path / "x.gguf").write_bytes(head + bytes(-len(head) % 32) + bytes(64))
    with pytest.raises(CheckpointError, match="b overlaps"):
        read_gguf(tmp_path / "x.gguf")


def test_any_truncation_is_noticed(tmp_path: Path) -> None:
    """Cut anywhere in its header, a good file is refused and never crashes."""
    opened(tmp_path)
    whole = (tmp_path / "m.gguf").read_bytes()
    size = read_gguf(tmp_path / "m.gguf").header_size
    for cut in range(0, size, 7):
        (tmp_path / "cut.gguf").write_bytes(whole[:cut])
        with pytest.raises(CheckpointError):
            read_gguf(tmp_path / "cut.gguf")


def real(variable: str) -> Path:
    """A real file: SmolLM2 is fetched as the demo does, others are only used where the variable names them."""
    if variable == GGUF_VARIABLE:
        return fetch_smollm2(Progress(quiet=True))
    path = os.environ.get(variable)
    if path is None:
        pytest.skip(f"{variable} does not name a GGUF file")
    return Path(path)


@pytest.mark.e2e
@pytest.mark.parametrize("variable", [GGUF_VARIABLE, "SPECEXPORT_GEMMA3_GGUF"])
def test_real_files_equal_transformers(variable: str) -> None:
    path = real(variable)
    checkpoint = open_checkpoint(str(path))
    config = read_config(checkpoint.config)
    other, expected = transformers_reads(path)
    assert config.tie_word_embeddings and set(checkpoint.weights.names()) == set(expected)
    assert checkpoint.gguf is not None and len(expected) == len(checkpoint.gguf.tensors)
    for name, value in expected.items():
        assert torch.equal(checkpoint.weights.read(name).float(), value), name
    assert config.ropes[0].theta == pytest.approx(other.rope_theta) and config.head_dim == other.head_dim
    assert [layer.window is not None for layer in config.layers] == [
        kind == "sliding_attention" for kind in getattr(other, "layer_types", ["full"] * config.num_layers)
    ]
