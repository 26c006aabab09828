"""One quantised matrix, in the layout of a checkpoint: what every method makes and every ingested format becomes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from specexport.exporter.weights import WeightSource


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix [out, in] as integer (or 8-bit float) codes with a scale for each block of inputs.

    ``value[o, i] = (codes[o, i] - zeros[o, i // block]) * (scales[o, i // block] * outer)``, in float32 from the
    scales as they are stored.

    Attributes:
        bits: 4 or 8.
        codes: [out, in], int8 (4 bits: -8..7), uint8 (4 bits: 0..15) or float8_e4m3fn (4 bits: those of its values
            that E2M1 has, NVFP4); one code an element.
        scales: [out, ceil(in / block)], float32, float16, bfloat16 or float8_e4m3fn.
        zeros: [out, ceil(in / block)] of the codes' dtype, or None: zero.
        block: inputs that share a scale; ``in`` when a row has one.
        order: int64 [in] or None. Codes are stored with their inputs permuted (GPTQ's act-order): column ``i`` belongs
            to input ``order[i]``, so ``x[..., order] @ value.T`` is the product.
        outer: scale of the scales (NVFP4's, one a matrix).
    """

    bits: int
    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    block: int
    order: Tensor | None = None
    outer: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> Quantized:
        """The same change of rows (a slice, a permutation) to codes, scales and zeros; each is [out, ...]."""
        zeros = None if self.zeros is None else change(self.zeros)
        return replace(self, codes=change(self.codes), scales=change(self.scales), zeros=zeros)

    def dequantize(self) -> Tensor:
        """float32 [out, in], inputs in their original order."""
        width = self.codes.shape[1]

        def spread(blocks: Tensor) -> Tensor:
            return blocks.float().repeat_interleave(self.block, dim=1)[:, :width]

        values = self.codes.float()
        if self.zeros is not None:
            values -= spread(self.zeros)
        values *= spread(self.scales.float() * self.outer)
        if self.order is None:
            return values
        restored = torch.empty_like(values)
        restored[:, self.order] = values
        return restored


@runtime_checkable
class QuantizedSource(WeightSource, Protocol):
    """A checkpoint that is quantised already. ``names``, ``shape`` and ``read`` show every matrix under its plain name
    (``...q_proj.weight``, [out, in]) and dequantise; :meth:`quantized` gives the codes as they are."""

    def quantized(self, name: str) -> Quantized | None:
        """The codes of a matrix, or None where it is stored in floating point.

        Raises:
            CheckpointError: truncated, contradictory or not understood.
        """
        ...
