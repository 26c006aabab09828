"""GGUF's blocks kept as they are: codes, scales and zero points, exact to a bit or not at all."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize
from numpy.typing import NDArray

from specexport.exporter.checkpoint import open_checkpoint
from specexport.exporter.quantize.record import QuantizedSource
from specexport.runtime.errors import CheckpointError
from tests.tiny import write_gguf

HEADS, HIDDEN, ROWS = 4, 64, 16
META = {
    ".block_count": 1,
    ".context_length": 128,
    ".embedding_length": HIDDEN,
    ".feed_forward_length": 96,
    ".attention.head_count": HEADS,
    ".attention.head_count_kv": 2,
    ".attention.layer_norm_rms_epsilon": 1e-5,
}
SHAPES = {
    "token_embd": (ROWS, HIDDEN),
    "blk.0.attn_q": (HIDDEN, HIDDEN),
    "blk.0.attn_k": (32, HIDDEN),
    "blk.0.attn_v": (32, HIDDEN),
    "blk.0.attn_output": (HIDDEN, HIDDEN),
    "blk.0.ffn_gate": (96, HIDDEN),
    "blk.0.ffn_up": (96, HIDDEN),
    "blk.0.ffn_down": (HIDDEN, 96),
}
Values = NDArray[np.float32]


def grid(rows: int, width: int) -> Values:
    """Values on a grid of sixteen steps a block, both ends of it used: Q4_1 finds that grid, zero point and all."""
    rng = np.random.default_rng(0)
    values = np.zeros((rows, width), np.float32)
    for row in range(rows):
        for block in range(0, width, 32):
            codes = rng.integers(0, 16, 32)
            codes[:2] = 0, 15
            values[row, block : block + 32] = (codes - rng.integers(0, 16)) * 2.0 ** rng.integers(-8, -4)
    return values


def loops(kind: str, data: NDArray[np.uint8], rows: int, width: int) -> Values:
    """The values of stored blocks, one element at a time (ggml-quants.c)."""
    raw, size = data.tobytes(), {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    values = np.zeros((rows, width), np.float32)
    for row in range(rows):
        for block in range(width // 32):
            at = (row * (width // 32) + block) * size
            d = np.float32(struct.unpack_from("<e", raw, at)[0])
            for i in range(32):
                if kind == "Q8_0":
                    value = np.float32(struct.unpack_from("<b", raw, at + 2 + i)[0]) * d
                else:
                    header = 2 if kind == "Q4_0" else 4
                    byte = raw[at + header + i % 16]
                    code = byte & 15 if i < 16 else byte >> 4
                    if kind == "Q4_0":
                        value = np.float32(code - 8) * d
                    else:
                        value = np.float32(code) * d + np.float32(struct.unpack_from("<e", raw, at + 2)[0])
                values[row, 32 * block + i] = value
    return values


def llama(path: Path, kind: str, make: Any = grid) -> tuple[Any, dict[str, Values]]:
    """A Llama whose matrices are all of one type, and the values of what is stored of each."""
    matrices = {f"{name}.weight": make(*shape) for name, shape in SHAPES.items()}
    norms = {f"{n}.weight": np.ones(HIDDEN, np.float32) for n in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")}
    types = dict.fromkeys(matrices, GGMLQuantizationType[kind])
    write_gguf(path, "llama", META, matrices | norms, types)
    stored = {name: loops(kind, quantize(values, types[name]), *values.shape) for name, values in matrices.items()}
    return open_checkpoint(str(path)), stored


def random(rows: int, width: int) -> Values:
    return np.random.default_rng(1).standard_normal((rows, width)).astype(np.float32)


@pytest.mark.parametrize(("kind", "make"), [("Q4_0", random), ("Q8_0", random), ("Q4_1", grid)])
def test_codes_are_kept(tmp_path: Path, kind: str, make: Any) -> None:
    checkpoint, stored = llama(tmp_path / "m.gguf", kind, make)
    weights = checkpoint.weights
    assert isinstance(weights, QuantizedSource) and f"8 {kind} (codes kept" in str(checkpoint.quantization)
    for name, value in stored.items():
        if name.startswith("blk.0.attn_q") or name.startswith("blk.0.attn_k"):  # llama.cpp's order of rows, undone
            half = value.shape[0] // (HEADS if "_q" in name else 2) // 2
            value = value.reshape(-1, half, 2, HIDDEN).swapaxes(1, 2).reshape(value.shape)
        plain = next(n for n in weights.names() if weights._find(n).name == name)
        held = weights.quantized(plain)
        assert held is not None and held.block == 32 and held.bits == (8 if kind == "Q8_0" else 4)
        assert held.codes.dtype == (torch.uint8 if kind == "Q4_1" else torch.int8)
        assert held.scales.dtype == torch.float16 and (held.zeros is None) == (kind != "Q4_1")
        assert np.array_equal(held.dequantize().numpy(), value), name
        assert np.array_equal(weights.read(plain).numpy(), value), name
    assert weights.quantized("model.norm.weight") is None


def test_minima_that_are_no_zero_points(tmp_path: Path) -> None:
    """Q4_1 of any other values, and types without integer codes, only dequantise."""
    for kind in ("Q4_1", "Q5_0"):
        checkpoint = llama_read_only(tmp_path / f"{kind}.gguf", kind)
        assert all(checkpoint.weights.quantized(name) is None for name in checkpoint.weights.names())
    assert "8 Q5_0 (dequantised)" in str(checkpoint.quantization)


def llama_read_only(path: Path, kind: str) -> Any:
    matrices = {f"{name}.weight": random(*shape) for name, shape in SHAPES.items()}
    norms = {f"{n}.weight": np.ones(HIDDEN, np.float32) for n in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm")}
    write_gguf(path, "llama", META, matrices | norms, dict.fromkeys(matrices, GGMLQuantizationType[kind]))
    return open_checkpoint(str(path))


@pytest.mark.parametrize(
    ("d", "m", "kept"),
    [
        (0.5, -4.0, True),
        (0.5, -7.5, True),
        (0.5, 0.0, True),
        (-0.5, 4.0, True),
        (0.0, 0.0, True),
        (0.5, -8.0, False),
        (0.5, 0.5, False),
        (0.5, -4.25, False),
        (0.0, 1.0, False),
        (float("nan"), -4.0, False),
        (0.5, float("inf"), False),
    ],
)
def test_one_block_of_q4_1(tmp_path: Path, d: float, m: float, kept: bool) -> None:
    """A single block that does not map keeps its whole matrix from it."""
    path = tmp_path / "m.gguf"
    checkpoint, _ = llama(path, "Q4_1")
    tensor = checkpoint.gguf.tensors["blk.0.ffn_up.weight"]
    raw = bytearray(path.read_bytes())
    raw[tensor.start + 20 : tensor.start + 24] = struct.pack("<ee", d, m)
    path.write_bytes(raw)
    weights = open_checkpoint(str(path)).weights
    assert isinstance(weights, QuantizedSource)
    held = weights.quantized("model.layers.0.mlp.up_proj.weight")
    assert (held is not None) == kept
    if held is not None:
        assert torch.equal(held.dequantize(), weights.read("model.layers.0.mlp.up_proj.weight"))
    assert weights.quantized("model.layers.0.mlp.gate_proj.weight") is not None


def test_a_scale_that_is_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    checkpoint, _ = llama(path, "Q8_0", random)
    tensor = checkpoint.gguf.tensors["blk.0.ffn_up.weight"]
    raw = bytearray(path.read_bytes())
    raw[tensor.start : tensor.start + 2] = struct.pack("<e", float("inf"))
    path.write_bytes(raw)
    weights = open_checkpoint(str(path)).weights
    assert isinstance(weights, QuantizedSource)
    with pytest.raises(CheckpointError, match="not a finite number"):
        weights.quantized("model.layers.0.mlp.up_proj.weight")
