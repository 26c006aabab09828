"""GPTQ: integer codes that keep a matrix's products with real inputs, rather than its values.

For a matrix W [out, in] and inputs X [tokens, in] it lessens ``|X W^T - X Q^T|^2 = tr((W - Q) H (W - Q)^T)``, with
``H = X^T X``: inputs are rounded one after another, and what each rounding did to the products is made good in the
inputs that are still to come, along the inverse of H (Frantar et al. 2023, "GPTQ: Accurate Post-Training Quantization
for Generative Pre-trained Transformers", after Hassibi and Stork's optimal brain surgeon of 1993).

Blocks of inputs keep their places whatever the order in which they are rounded, so the result needs no permutation at
run time. Rows do not depend on each other: matrices with the same inputs can be stacked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specexport.exporter.quantize.plan import Format
from specexport.exporter.quantize.record import Quantized
from specexport.runtime.errors import SpecExportError

#: Fractions of a block's range that are tried for its scale.
_FRACTIONS = tuple(1.0 - 0.025 * step for step in range(21))
#: Columns that are rounded before the rest of the matrix hears of it.
_PANEL = 128
#: Damping is raised tenfold so many times before a Hessian is given up.
_TRIES = 5


@dataclass(frozen=True, slots=True)
class GptqOptions:
    """How a matrix is rounded.

    Attributes:
        damping: added to the diagonal of H, as a fraction of its mean.
        act_order: round the inputs with the most energy first, while most others can still make good for them. Scales
            are then those of the matrix as it came; otherwise a block's scale is chosen when its turn comes.
    """

    damping: float = 0.01
    act_order: bool = True


DEFAULTS = GptqOptions()


def objective(difference: Tensor, hessian: Tensor) -> float:
    """``tr(D H D^T)``: squared error of the products; D is [out, in]."""
    return float(((difference @ hessian) * difference).sum(dtype=torch.float64))


def gptq(matrix: Tensor, hessian: Tensor, form: Format, options: GptqOptions = DEFAULTS) -> Quantized:
    """Codes of a matrix.

    Args:
        matrix: float32 [out, in]. hessian: float32 [in, in], ``X^T X`` of its inputs up to a factor.
        form: ``int4`` or ``int8``.

    Raises:
        SpecExportError: the Hessian is not finite, or no damping makes it positive definite.
    """
    rows, width = matrix.shape
    block = min(form.block or width, width)
    levels = _Levels.of(form)
    hessian = hessian.clone()
    energy = hessian.diagonal()
    energy[energy == 0] = energy.mean().clamp(min=1e-8)  # an input that never fired: nothing to make good
    columns = energy.argsort(descending=True, stable=True) if options.act_order else torch.arange(width)
    inverse = _inverse_factor(hessian[columns][:, columns], options.damping)
    working = matrix.t()[columns].contiguous()  # [in, out]: what one step reads and writes lies together
    scales, zeros = (matrix.new_zeros(-(-width // block), rows) for _ in range(2))

    def choose(index: int, values: Tensor) -> None:
        part = energy[index * block : index * block + values.shape[0]]
        scales[index], zeros[index] = levels.grid(values.t(), part)

    if options.act_order:
        for index in range(scales.shape[0]):
            choose(index, matrix.t()[index * block : (index + 1) * block])
    codes = torch.empty_like(working)
    panel = _PANEL if options.act_order else math.gcd(block, _PANEL)  # a block begins where a panel does
    for start in range(0, width, panel):
        stop = min(start + panel, width)
        if not options.act_order and start % block == 0:
            choose(start // block, working[start : start + block])
        errors = matrix.new_empty(stop - start, rows)
        for at in range(start, stop):
            column = int(columns[at])
            scale, zero = scales[column // block], zeros[column // block]
            code = levels.round(working[at], scale, zero)
            codes[column] = code
            error = (working[at] - (code - zero) * scale) / inverse[at, at]
            errors[at - start] = error
            working[at + 1 : stop].addr_(inverse[at, at + 1 : stop], error, alpha=-1)
        working[stop:].addmm_(inverse[start:stop, stop:].t(), errors, alpha=-1)
    return Quantized(
        levels.bits,
        codes.t().to(levels.dtype).contiguous(),
        scales.t().contiguous(),
        zeros.t().to(levels.dtype).contiguous() if levels.zero_points else None,
        block,
    )


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """Upper Cholesky factor of the inverse of a damped Hessian: row ``i`` says how the error of input ``i`` spreads."""
    mean = hessian.diagonal().mean()
    if not bool(torch.isfinite(hessian).all()):
        raise SpecExportError("the activations of the calibration text are not finite: the checkpoint overflows")
    for _ in range(_TRIES):
        damped = hessian.clone()
        damped.diagonal().add_(damping * mean)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(factor), upper=True)
        if not failed and bool(torch.isfinite(factor).all()):
            found: Tensor = factor
            return found
        damping *= 10
    raise SpecExportError(
        f"the activations of the calibration text are too alike (damping of {damping:g} does not help): use more text"
    )


@dataclass(frozen=True, slots=True)
class _Levels:
    """The codes of a format: ``low .. high``, with zero points or without."""

    bits: int
    low: int
    high: int
    dtype: torch.dtype
    zero_points: bool

    @classmethod
    def of(cls, form: Format) -> _Levels:
        bits = {"int4": 4, "int8": 8}[form.kind]
        if form.symmetric:
            return cls(bits, -(1 << bits - 1), (1 << bits - 1) - 1, torch.int8, False)
        return cls(bits, 0, (1 << bits) - 1, torch.uint8, True)

    def round(self, values: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        return (values / scale).round_().add_(zero).clamp_(self.low, self.high)

    def grid(self, values: Tensor, energy: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero point [out] of a block [out, n], with the least error weighted by ``energy`` [n]."""
        low, high = values.amin(1).clamp(max=0.0), values.amax(1).clamp(min=0.0)
        full = (high - low) / (self.high - self.low) if self.zero_points else values.abs().amax(1) / self.high
        full = torch.where(full == 0, 1.0, full)
        best = torch.full_like(full, torch.inf)
        scale, zero = full, torch.zeros_like(full)
        for fraction in _FRACTIONS:
            step = full * fraction
            offset = (-low / full).round_().clamp_(self.low, self.high) if self.zero_points else torch.zeros_like(full)
            back = self.round(values, step.unsqueeze(1), offset.unsqueeze(1))
            back = back.sub_(offset.unsqueeze(1)).mul_(step.unsqueeze(1)).sub_(values)
            error = back.square_() @ energy
            better = error < best
            best, scale = torch.where(better, error, best), torch.where(better, step, scale)
            zero = torch.where(better, offset, zero)
        return scale, zero
