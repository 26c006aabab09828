"""GPTQ against round-to-nearest and against the problem it solves, on random matrices with correlated inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specexport.exporter.quantize.gptq import GptqOptions, gptq, objective
from specexport.exporter.quantize.plan import Format
from specexport.exporter.quantize.record import Quantized
from specexport.exporter.quantize.rtn import quantizer
from specexport.runtime.errors import SpecExportError

ORDERS = (GptqOptions(act_order=True), GptqOptions(act_order=False))


def problem(seed: int, rows: int = 24, width: int = 160, tokens: int = 512) -> tuple[Tensor, Tensor]:
    """A matrix, and the Hessian of inputs that are correlated and of very different sizes, as those of models are."""
    random = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=random) / width**0.5 + torch.eye(width)
    sizes = torch.rand(width, generator=random) ** 4 * 4 + 0.05
    inputs = torch.randn(tokens, width, generator=random) @ mixing * sizes
    return torch.randn(rows, width, generator=random), inputs.t() @ inputs / tokens


def loss(matrix: Tensor, hessian: Tensor, codes: Quantized) -> float:
    return objective(codes.dequantize() - matrix, hessian)


@pytest.mark.parametrize("options", ORDERS)
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("block", [0, 32, 128])
@pytest.mark.parametrize("seed", range(4))
def test_it_beats_rounding_to_nearest(seed: int, block: int, symmetric: bool, options: GptqOptions) -> None:
    matrix, hessian = problem(seed)
    form = Format("int4", block, symmetric)
    nearest = loss(matrix, hessian, quantizer("w", matrix, form))
    assert loss(matrix, hessian, gptq(matrix, hessian, form, options)) < 0.8 * nearest


@pytest.mark.parametrize("options", ORDERS)
def test_codes_are_better_than_the_nearest_ones_at_the_same_scales(options: GptqOptions) -> None:
    """So it is not only the choice of scales."""
    matrix, hessian = problem(2)
    found = gptq(matrix, hessian, Format("int4", 32, True), options)
    scales = found.scales.repeat_interleave(32, 1)
    nearest = replace(found, codes=(matrix / scales).round().clamp(-8, 7).to(torch.int8))
    assert loss(matrix, hessian, found) < 0.8 * loss(matrix, hessian, nearest)


@pytest.mark.parametrize("options", ORDERS)
@pytest.mark.parametrize("width", [96, 80, 33])
@pytest.mark.parametrize(
    ("form", "low", "high", "dtype"),
    [
        (Format("int4", 32, True), -8, 7, torch.int8),
        (Format("int4", 32, False), 0, 15, torch.uint8),
        (Format("int8", 0, True), -128, 127, torch.int8),
    ],
)
def test_codes_stay_in_range_and_blocks_in_place(
    form: Format, low: int, high: int, dtype: torch.dtype, width: int, options: GptqOptions
) -> None:
    matrix, hessian = problem(1, width=width)
    matrix[:, 5] *= 50  # clipped, and what it owes goes to the others
    found = gptq(matrix, hessian, form, options)
    block = form.block or width
    assert found.codes.dtype == dtype and found.codes.shape == matrix.shape and found.order is None
    assert low <= int(found.codes.min()) and int(found.codes.max()) <= high
    assert found.scales.shape == (len(matrix), -(-width // block)) and bool((found.scales > 0).all())
    assert (found.zeros is None) == form.symmetric
    if found.zeros is not None:
        assert found.zeros.dtype == dtype and int(found.zeros.max()) <= high


@pytest.mark.parametrize("options", ORDERS)
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_matrix_on_the_grid_is_kept(symmetric: bool, options: GptqOptions) -> None:
    random = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (16, 96), generator=random).float()
    codes[:, ::32], codes[:, 1::32] = 15, 0  # each block spans its range
    zero = torch.randint(4, 12, (16, 3), generator=random).float() if not symmetric else torch.full((16, 3), 8.0)
    scale = (0.01 + torch.rand(16, 3, generator=random)).repeat_interleave(32, 1)
    matrix = (codes - zero.repeat_interleave(32, 1)) * scale
    hessian = problem(3, width=96)[1]
    found = gptq(matrix, hessian, Format("int4", 32, symmetric), options)
    torch.testing.assert_close(found.dequantize(), matrix, rtol=1e-5, atol=1e-6)


def test_the_same_input_gives_the_same_bytes_and_stacked_rows_are_independent() -> None:
    matrix, hessian = problem(4)
    form = Format("int4", 32, True)
    first, again = gptq(matrix, hessian, form), gptq(matrix.clone(), hessian.clone(), form)
    assert torch.equal(first.codes, again.codes) and torch.equal(first.scales, again.scales)
    part = gptq(matrix[:8], hessian, form)
    torch.testing.assert_close(part.scales, first.scales[:8])
    assert float((part.codes != first.codes[:8]).float().mean()) < 0.01  # sums may be made in another order


def test_inputs_that_never_fire_and_inputs_that_are_copies_are_no_trouble() -> None:
    matrix, hessian = problem(5, width=64)
    hessian[:, 7] = hessian[7] = 0
    hessian[:, 9], hessian[9] = hessian[:, 8].clone(), hessian[8].clone()
    form = Format("int4", 32, True)
    found = gptq(matrix, hessian, form)
    assert loss(matrix, hessian, found) < loss(matrix, hessian, quantizer("w", matrix, form))
    assert bool(torch.isfinite(found.dequantize()).all())
    silent = gptq(matrix, torch.zeros(64, 64), form)  # nothing is known: as good as rounding to nearest
    assert float((silent.dequantize() - matrix).abs().max()) < 1.0


def test_a_hessian_that_is_no_number_is_refused() -> None:
    matrix, hessian = problem(6, width=32)
    hessian[0, 0] = torch.nan
    with pytest.raises(SpecExportError, match="not finite"):
        gptq(matrix, hessian, Format("int4", 32, True))
