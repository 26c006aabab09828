"""Writers of tiny checkpoints in 8-bit floats, beside :mod:`tests.exporter.quantize.stored_writers`."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.exporter.quantize.stored_writers import Case, Leaves, Matrix, compressed_case, draw_scale


def e4m3(byte: int) -> float:
    """The value of an 8-bit float: a sign, four bits of exponent (bias 7), three of mantissa; no infinities."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    assert byte & 127 != 127, "not a number"
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if sign else magnitude


def _fp8(
    rng: random.Random, out: int, width: int, scale_of: Callable[[int, int], float]
) -> tuple[torch.Tensor, Matrix]:
    value = np.zeros((out, width), np.float32)
    data = torch.zeros(out, width, dtype=torch.uint8)
    for o in range(out):
        for i in range(width):
            byte = rng.choice([0, 128]) | rng.randint(0, 80)  # up to 8: weights are small beside the largest
            data[o, i] = byte
            value[o, i] = np.float32(e4m3(byte)) * np.float32(scale_of(o, i))
    return data.view(torch.float8_e4m3fn), value


def fp8(*, tile: tuple[int, int] | None = None, static: bool = False, scale: str = "weight_scale", **more: Any) -> Case:
    """``quant_method: fp8``: DeepSeek-V3's tiles (``weight_scale_inv`` multiplies, whatever its name says) or one scale
    of the matrix, with one of the inputs when activations are static."""

    def pack(rng: random.Random, out: int, width: int) -> tuple[Leaves, Matrix]:
        if tile is None:
            one = rng.uniform(0.01, 0.05)
            data, value = _fp8(rng, out, width, lambda o, i: one)
            leaves: Leaves = {"weight": data, scale: torch.tensor(one, dtype=torch.float32)}
        else:
            tiles = torch.tensor(
                [[rng.uniform(0.01, 0.05) for _ in range(-(-width // tile[1]))] for _ in range(-(-out // tile[0]))]
            )
            data, value = _fp8(rng, out, width, lambda o, i: tiles[o // tile[0], i // tile[1]].item())
            leaves = {"weight": data, "weight_scale_inv": tiles}
        if static:
            leaves["input_scale"] = torch.tensor(0.02)
        return leaves, value

    config = {
        "quant_method": "fp8",
        "activation_scheme": "static" if static else "dynamic",
        **({} if tile is None else {"weight_block_size": list(tile), "fmt": "e4m3"}),
        **more,
    }
    return Case(config, pack)


def compressed_fp8(strategy: str, *, tile: tuple[int, int] | None = None, inputs: str | None = None) -> Case:
    """compressed-tensors' ``float-quantized``: a scale a matrix, a row or a tile."""

    def pack(rng: random.Random, out: int, width: int) -> tuple[Leaves, Matrix]:
        rows, columns = tile or (1 if strategy == "channel" else out, width)
        scales = torch.tensor(
            [[draw_scale(rng, 4, torch.bfloat16) for _ in range(-(-width // columns))] for _ in range(-(-out // rows))],
            dtype=torch.bfloat16,
        )
        data, value = _fp8(rng, out, width, lambda o, i: scales[o // rows, i // columns].item())
        leaves = {"weight": data, "weight_scale": scales.reshape(1) if strategy == "tensor" else scales}
        if inputs == "static":
            leaves["input_scale"] = torch.tensor([0.02], dtype=torch.bfloat16)
        return leaves, value

    weights = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "group_size": None,
        "block_structure": None if tile is None else list(tile),
        "dynamic": False,
    }
    return compressed_case(weights, "float-quantized", inputs, pack)
