"""Gradients of the operators that trained heads are made of. Import it before training; export does without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specexport.exporter import ops


def _norm_setup(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _norm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + ctx.eps)
    weighted = grad * weight
    back = weighted * scale - x * (scale.pow(3) * (weighted * x).mean(-1, keepdim=True))
    own = (grad * x * scale).flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
    return back, own, None


def _rotary_setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
    x, cos, sin, positions = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(cos, sin, positions)


def _rotary_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    cos, sin, positions = ctx.saved_tensors
    return ops.rotary(grad, cos, -sin, positions).to(ctx.dtype), None, None, None  # a rotation's transpose


def _linear_setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    x, weight = ctx.saved_tensors
    return (
        grad @ weight if ctx.needs_input_grad[0] else None,
        grad.t() @ x if ctx.needs_input_grad[1] else None,
    )


torch.library.register_autograd(ops.rms_norm, _norm_backward, setup_context=_norm_setup)
torch.library.register_autograd(ops.rotary, _rotary_backward, setup_context=_rotary_setup)
torch.library.register_autograd(ops.linear_transposed, _linear_backward, setup_context=_linear_setup)


class HeadLoss(torch.autograd.Function):
    """Cross-entropy of ``softmax(states @ weight.T)`` against distributions or ids, a chunk of rows at a time.

    Both gradients are made on the way forward, so that logits [R, Vd] never exist at once and stay in cache.

    Args:
        states: [R, H]. weight: [Vd, H]. wanted: probabilities [R, Vd], or ids int64 [R]. weights: float32 [R], of rows.
        dtype: of the products.

    Returns:
        The weighted sum, and the best row of the vocabulary for each state, int64 [R].
    """

    CHUNK = 512

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, wanted: Tensor, weights: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        with torch.autocast(states.device.type, enabled=False):
            table, rows = weight.to(dtype), states.to(dtype)
            back_states = torch.empty_like(rows)
            back_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
            loss, best = states.new_zeros((), dtype=torch.float32), []
            for begin in range(0, len(rows), HeadLoss.CHUNK):
                part = slice(begin, begin + HeadLoss.CHUNK)
                logits = (rows[part] @ table.t()).float()
                best.append(logits.argmax(-1))
                top = torch.logsumexp(logits, dim=-1, keepdim=True)
                if wanted.ndim == 1:
                    said = logits.gather(1, wanted[part, None]).squeeze(1)
                else:
                    aim = wanted[part].float()
                    said = (aim * logits).sum(-1)
                loss += ((top.squeeze(1) - said) * weights[part]).sum()
                push = logits.sub_(top).exp_()
                if wanted.ndim == 1:
                    push.scatter_add_(1, wanted[part, None], push.new_full((len(push), 1), -1.0))
                else:
                    push -= aim
                push = (push * weights[part, None]).to(dtype)
                back_states[part] = push @ table
                if back_weight is not None:
                    back_weight += push.t() @ rows[part]
        ctx.save_for_backward(back_states, *([] if back_weight is None else [back_weight]))
        chosen = torch.cat(best)
        ctx.mark_non_differentiable(chosen)
        ctx.kind = states.dtype
        return loss, chosen

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        back_states, *back_weight = ctx.saved_tensors
        return (
            back_states.to(ctx.kind) * grad,
            back_weight[0] * grad if back_weight else None,
            None,
            None,
            None,
        )


def head_loss(
    states: Tensor, weight: Tensor, wanted: Tensor, weights: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See :class:`HeadLoss`."""
    found: tuple[Tensor, Tensor] = HeadLoss.apply(states, weight, wanted, weights, dtype)  # type: ignore[no-untyped-call]
    return found
