"""Round to nearest: codes from the values alone, without data.

Scales of integers are searched: of a few fractions of the range each block takes the one with the least squared error,
because clipping one outlier often costs less than a coarser step for all its neighbours.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specexport.exporter.quantize.plan import NVFP4_BLOCK, Format
from specexport.exporter.quantize.record import Quantized

#: Fractions of a block's range that are tried for 4-bit codes; 8 bits gain nothing from clipping.
_FRACTIONS = tuple(1.0 - 0.05 * step for step in range(9))
#: Elements that are quantised at once: the search needs a few copies of them.
_CHUNK = 1 << 22
_FP8_MAX = 448.0
_FP4_MAX = 6.0
_FP4_VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def quantizer(name: str, matrix: Tensor, form: Format) -> Quantized:
    """A :data:`~specexport.exporter.quantize.plan.Quantizer` that rounds to nearest."""
    return round_to_nearest(matrix, form.kind, form.block, symmetric=form.symmetric)


def round_to_nearest(matrix: Tensor, kind: str, block: int = 0, *, symmetric: bool = True) -> Quantized:
    """Codes of a matrix.

    Args:
        matrix: [out, in], floating point.
        kind: ``int8``, ``int4``, ``fp8`` or ``nvfp4`` (whose block is always 16).
        block: inputs that share a scale, 0 for a whole row. symmetric: without zero points.
    """
    width = matrix.shape[1]
    block = NVFP4_BLOCK if kind == "nvfp4" else min(block or width, width)
    outer = float(matrix.abs().max()) / (_FP8_MAX * _FP4_MAX) or 1.0
    parts = []
    for part in torch.split(matrix, max(1, _CHUNK // width)):
        blocks = _blocks(part.float(), block)
        if kind == "nvfp4":
            parts.append(_float4(blocks, outer))
        elif kind == "fp8":
            parts.append(_float8(blocks))
        else:
            parts.append(_symmetric(blocks, kind) if symmetric else _asymmetric(blocks, kind))
    codes = torch.cat([codes.flatten(1)[:, :width] for codes, _, _ in parts])
    scales = torch.cat([scale for _, scale, _ in parts])
    zeros = None if parts[0][2] is None else torch.cat([zero for _, _, zero in parts if zero is not None])
    return Quantized(
        8 if kind in ("int8", "fp8") else 4, codes, scales, zeros, block, outer=outer if kind == "nvfp4" else 1.0
    )


def _blocks(matrix: Tensor, block: int) -> Tensor:
    """[out, blocks, block]; a short last block is filled with its own last value, which changes neither extreme."""
    if short := -matrix.shape[1] % block:
        matrix = torch.cat([matrix, matrix[:, -1:].expand(-1, short)], dim=1)
    return matrix.reshape(matrix.shape[0], -1, block)


_Part = tuple[Tensor, Tensor, Tensor | None]


def _symmetric(blocks: Tensor, kind: str) -> _Part:
    low, high = (-128, 127) if kind == "int8" else (-8, 7)
    full = blocks.abs().amax(-1) / high
    full = torch.where(full == 0, 1.0, full)
    best, scale = torch.full_like(full, torch.inf), full
    for fraction in _FRACTIONS if kind == "int4" else ():
        tried = full * fraction
        back = (blocks / tried.unsqueeze(-1)).round_().clamp_(low, high).mul_(tried.unsqueeze(-1))
        error = back.sub_(blocks).square_().sum(-1)
        better = error < best
        best, scale = torch.where(better, error, best), torch.where(better, tried, scale)
    return (blocks / scale.unsqueeze(-1)).round_().clamp_(low, high).to(torch.int8), scale, None


def _asymmetric(blocks: Tensor, kind: str) -> _Part:
    top = 255 if kind == "int8" else 15
    low, high = blocks.amin(-1).clamp(max=0.0), blocks.amax(-1).clamp(min=0.0)
    best: Tensor | None = None
    scale = zero = torch.empty(0)
    for fraction in _FRACTIONS if kind == "int4" else (1.0,):
        step = (high - low) * fraction / top
        step = torch.where(step == 0, 1.0, step)
        offset = (-low * fraction / step).round_().clamp_(0, top)
        back = _codes(blocks, step, offset, top).sub_(offset.unsqueeze(-1)).mul_(step.unsqueeze(-1))
        error = back.sub_(blocks).square_().sum(-1)
        if best is None:
            best, scale, zero = error, step, offset
            continue
        better = error < best
        best = torch.where(better, error, best)
        scale, zero = torch.where(better, step, scale), torch.where(better, offset, zero)
    return _codes(blocks, scale, zero, top).to(torch.uint8), scale, zero.to(torch.uint8)


def _codes(blocks: Tensor, scale: Tensor, zero: Tensor, top: int) -> Tensor:
    return (blocks / scale.unsqueeze(-1)).round_().add_(zero.unsqueeze(-1)).clamp_(0, top)


def _float8(blocks: Tensor) -> _Part:
    scale = blocks.abs().amax(-1) / _FP8_MAX
    scale = torch.where(scale == 0, 1.0, scale)
    return (blocks / scale.unsqueeze(-1)).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn), scale, None


def _float4(blocks: Tensor, outer: float) -> _Part:
    """E2M1 values (held as float8_e4m3fn, which has them all) with float8 scales under one float32 scale."""
    scale = (blocks.abs().amax(-1) / (_FP4_MAX * outer)).clamp_(max=_FP8_MAX).to(torch.float8_e4m3fn)
    step = scale.float() * outer
    ratio = blocks / torch.where(step == 0, 1.0, step).unsqueeze(-1)
    middles = (_FP4_VALUES[1:] + _FP4_VALUES[:-1]) / 2
    values = _FP4_VALUES[torch.bucketize(ratio.abs(), middles)].copysign_(ratio)
    return values.to(torch.float8_e4m3fn), scale, None
