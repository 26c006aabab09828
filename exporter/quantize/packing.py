"""Codes out of 32-bit words, and what all stored formats check before a matrix is believed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specexport.exporter.quantize.record import Quantized
from specexport.runtime.errors import CheckpointError


def unpack(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """The codes in the last dimension of int32 words, the lowest bits first.

    Args:
        bits: 4 or 8, of a code.
        order: place ``i`` of a word holds its code ``order[i]``; None: ``i``.

    Returns:
        uint8 [..., 32 / bits times as many].
    """
    codes = words.contiguous().view(torch.uint8)  # torch is little-endian wherever it runs
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    if order is not None:
        inverse = [order.index(place) for place in range(len(order))]
        codes = codes.reshape(*codes.shape[:-1], -1, len(order))[..., inverse].flatten(-2)
    return codes


def quantized(
    name: str, bits: int, codes: Tensor, zeros: Tensor | None, scales: Tensor, block: int, order: Tensor | None = None
) -> Quantized:
    """The record of unsigned integer codes.

    Where every zero point is the middle of the range the codes are made signed, without one: what kernels do best.

    Args:
        name: of the matrix, for errors. codes, zeros: uint8 [out, in] and [out, groups]; zeros None: the middle.
        scales: [out, groups]. order: see :class:`Quantized`; the codes are still in the original order of inputs.

    Raises:
        CheckpointError: a scale is not finite.
    """
    check_finite(name, scales)
    if order is not None:
        codes = codes[:, order]
    middle = 1 << (bits - 1)
    if zeros is None or bool((zeros == middle).all()):
        return Quantized(bits, signed(codes, bits), scales.contiguous(), None, block, order)
    return Quantized(bits, codes.contiguous(), scales.contiguous(), zeros.contiguous(), block, order)


def signed(codes: Tensor, bits: int) -> Tensor:
    """int8 codes minus the middle of their range, from uint8."""
    return (codes - (1 << (bits - 1))).view(torch.int8).contiguous()  # uint8 wraps, as two's complement does


def check_finite(name: str, values: Tensor) -> None:
    """Raise CheckpointError if a scale is infinite or not a number."""
    if not bool(values.float().isfinite().all()):
        raise CheckpointError(f"{name}: a scale is not a finite number; the checkpoint is damaged, download it again")


def group_order(name: str, groups_of_inputs: Tensor, block: int) -> Tensor | None:
    """GPTQ's act-order: inputs sorted by group, so that each group is a block.

    Args:
        groups_of_inputs: [in], the group of each input (``g_idx``).

    Returns:
        int64 [in] for ``Quantized.order``; None where the inputs are in order.

    Raises:
        CheckpointError: groups that do not exist, or are not all of ``block`` inputs (the last one of the rest).
    """
    index = groups_of_inputs.long()
    natural = torch.arange(index.numel()) // block
    if torch.equal(index, natural):
        return None
    groups = int(natural[-1]) + 1
    if int(index.min()) < 0 or int(index.max()) >= groups:
        raise CheckpointError(
            f"{name}: g_idx names groups {int(index.min())} to {int(index.max())}, expected 0 to {groups - 1}"
        )
    sizes, wanted = index.bincount(minlength=groups), natural.bincount(minlength=groups)
    if not torch.equal(sizes, wanted):
        wrong = int((sizes != wanted).nonzero()[0])
        raise CheckpointError(
            f"{name}: g_idx gives group {wrong} {int(sizes[wrong])} inputs, expected {int(wanted[wrong])}; groups of "
            "unequal size are not read"
        )
    return index.argsort(stable=True)


def per_row(scales: Tensor, out: int) -> Tensor:
    """One scale of a matrix, one of each row, or one of each group, as [out, groups]."""
    return scales.reshape(1, 1).expand(out, 1) if scales.numel() == 1 else scales.reshape(out, -1)


def tiled(scales: Tensor, rows: int, out: int) -> Tensor:
    """Scales of tiles [ceil(out / rows), groups] as those of each row, [out, groups]."""
    return scales.repeat_interleave(rows, dim=0)[:out]
