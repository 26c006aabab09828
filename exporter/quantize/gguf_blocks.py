"""GGUF's blocks of 32 as codes and scales, where they are exactly that.

    Q4_0  float16 d, 16 bytes: element i is the low half of byte i, element i + 16 the high; value = (code - 8) d
    Q4_1  float16 d and m, 16 bytes likewise; value = code d + m, so a zero point -m / d where that is an integer
    Q8_0  float16 d, 32 int8; value = code d

Source: https://github.com/ggml-org/ggml (``ggml-common.h``, ``ggml-quants.c``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from specexport.exporter.quantize.packing import signed

BLOCK = 32
#: Types whose codes can be kept, and bytes before the codes of a block.
_HEADERS = {"Q4_0": 2, "Q4_1": 4, "Q8_0": 2}
KEPT = frozenset(_HEADERS)


def describe(types: Mapping[str, int]) -> str:
    """The quantisation of a file in words, from how many matrices have which type."""
    fate = {"Q4_0": "codes kept", "Q8_0": "codes kept", "Q4_1": "codes kept where all minima are zero points"}
    parts = (f"{count} {kind} ({fate.get(kind, 'dequantised')})" for kind, count in sorted(types.items()))
    return f"GGUF, {', '.join(parts)}"


def bits(kind: str) -> int:
    """Bits of a code of one of :data:`KEPT`."""
    return 8 if kind == "Q8_0" else 4


def decode(kind: str, data: Tensor) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """Codes, scales and zero points of rows of blocks.

    Args:
        kind: of :data:`KEPT`. data: uint8 [rows, bytes of a row].

    Returns:
        Codes [rows, in] (int8, of Q4_1 uint8), float16 scales [rows, in / 32] and, of Q4_1, zero points uint8 like the
        scales. None if a minimum of Q4_1 is not the negative of a code times its scale.
    """
    header = _HEADERS[kind]
    blocks = data.reshape(data.shape[0], -1, header + BLOCK * bits(kind) // 8)
    halves = blocks[..., :header].contiguous().view(torch.float16)
    scales, packed = halves[..., 0].contiguous(), blocks[..., header:].contiguous()
    if kind == "Q8_0":
        return packed.view(torch.int8).flatten(1), scales, None
    codes = torch.cat((packed & 15, packed >> 4), dim=-1).flatten(1)
    if kind == "Q4_0":
        return signed(codes, 4), scales, None
    zeros, exact = zero_points(scales, halves[..., 1])
    return (codes, scales, zeros) if bool(exact.all()) else None


def zero_points(scales: Tensor, minima: Tensor) -> tuple[Tensor, Tensor]:
    """Zero points (uint8) of blocks of Q4_1, and where they say exactly what the minima do."""
    d, m = scales.float(), minima.float()
    zeros = torch.where(d == 0, 0, -m / d).nan_to_num(-1, -1, -1).round()
    exact = (zeros >= 0) & (zeros <= 15) & (zeros * d == -m)  # the product of 4 and 11 bits is exact
    return zeros.clamp(0, 15).to(torch.uint8), exact
