"""Torch operators that export to standard ONNX operators of our choice, with their eager reference.

``torch.onnx.export`` would otherwise spell attention, cache updates and rotary embedding as dozens of small nodes that
no backend fuses again. :data:`TRANSLATIONS` goes to ``custom_translation_table``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript.values import Opset
from torch import Tensor

from specexport.exporter.experts_loop import experts_loop
from specexport.runtime.contract import OPSET

onnx_op = Opset("", OPSET)


@torch.library.custom_op("specexport::commit_and_append", mutates_args=())
def commit_and_append(past: Tensor, new: Tensor, commit: Tensor, order: Tensor, write: Tensor) -> Tensor:
    """The commit recipe: Gather(commit) -> Concat(new) -> Gather(order) -> TensorScatter-24 at ``write``.

    Args:
        past: [1, Hkv, S, D]. new: [1, Hkv, T, D]. commit: int64 [A]. order: int64 [A + T], from [committed, new].
        write: int64 [1] with write + A + T <= S.

    Returns:
        [1, Hkv, S, D], ``past`` with rows ``write ..`` replaced.
    """
    block = torch.cat([past.index_select(2, commit), new], dim=2).index_select(2, order)
    return _write_rows(past, block, int(write[0]))


@commit_and_append.register_fake
def _(past: Tensor, new: Tensor, commit: Tensor, order: Tensor, write: Tensor) -> Tensor:
    return torch.empty_like(past)


@torch.library.custom_op("specexport::append_rows", mutates_args=())
def append_rows(past: Tensor, new: Tensor, write: Tensor) -> Tensor:
    """ONNX TensorScatter-24 on axis -2: ``past`` [1, Hkv, S, D] with rows ``write ..`` replaced by ``new``."""
    return _write_rows(past, new, int(write[0]))


@append_rows.register_fake
def _(past: Tensor, new: Tensor, write: Tensor) -> Tensor:
    return torch.empty_like(past)


def _write_rows(past: Tensor, rows: Tensor, start: int) -> Tensor:
    if start + rows.shape[2] > past.shape[2]:
        raise ValueError(f"rows {start}..{start + rows.shape[2]} do not fit a cache of {past.shape[2]}")
    present = past.clone()
    present[:, :, start : start + rows.shape[2]] = rows
    return present


@torch.library.custom_op("specexport::attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """ONNX Attention-24 with grouped heads and an additive mask; softmax in float32.

    Args:
        query: [1, Hq, T, D]. key: [1, Hkv, S, D]. value: [1, Hkv, S, Dv]. mask: [1, 1, T, S], added to the scaled
            scores.

    Returns:
        [1, Hq, T, Dv]
    """
    groups = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(groups, dim=1)
    value = value.repeat_interleave(groups, dim=1)
    scores = (query * scale) @ key.transpose(-1, -2) + mask
    weights = torch.softmax(scores.float(), dim=-1).to(query.dtype)
    return weights @ value


@attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


@torch.library.custom_op("specexport::rotary", mutates_args=())
def rotary(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    """ONNX RotaryEmbedding-23, half-split ("NeoX") pairs; only the first 2 * cos.shape[-1] channels rotate.

    Args:
        x: [1, heads, T, D]. cos, sin: [S, rotary_dim / 2]. positions: int64 [1, T].
    """
    half = cos.shape[-1]
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * c - second * s, second * c + first * s, rest], dim=-1)


@rotary.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("specexport::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """ONNX RMSNormalization-23 over the last axis. x: float32 [..., D], weight: float32 [D]."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("specexport::linear_transposed", mutates_args=())
def linear_transposed(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T as one Gemm, so that a tied embedding table needs no second, transposed copy.

    Args:
        x: [R, H]. weight: [V, H].
    """
    return x @ weight.t()


@linear_transposed.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("specexport::best", mutates_args=())
def best(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """ONNX TopK over the last axis: values and int64 indices of the ``count`` largest, the largest first.

    Of equal values the one with the lower index comes first. ``torch.topk`` leaves that open, and trees need it.
    """
    values, indices = x.sort(dim=-1, descending=True, stable=True)
    return values[..., :count].clone(), indices[..., :count].clone()


@best.register_fake
def _(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    shape = (*x.shape[:-1], count)
    return x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op("specexport::experts", mutates_args=())
def experts(rows: Tensor, chosen: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The weighted sum of the chosen experts' outputs down(silu(gate(x)) * up(x)), each over the rows that chose it.

    Args:
        rows: [n, H]. chosen: int64 [n, k]. weights: float32 [n, k]. gate, up: [E, H, I]. down: [E, I, H].

    Returns:
        float32 [n, H]
    """
    out = torch.zeros(rows.shape, dtype=torch.float32)
    for expert in sorted(set(chosen.flatten().tolist())):
        mine = chosen == expert
        x = rows[mine.any(dim=1)]
        fed = (torch.nn.functional.silu(x @ gate[expert]) * (x @ up[expert])) @ down[expert]
        out[mine.any(dim=1)] += fed.float() * weights[mine].unsqueeze(1)
    return out


@experts.register_fake
def _(rows: Tensor, chosen: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return rows.new_empty(rows.shape, dtype=torch.float32)


def _commit_and_append(past: Any, new: Any, commit: Any, order: Any, write: Any) -> Any:
    joined = onnx_op.Concat(onnx_op.Gather(past, commit, axis=2), new, axis=2)
    return onnx_op.TensorScatter(past, onnx_op.Gather(joined, order, axis=2), write, axis=-2)


def _append_rows(past: Any, new: Any, write: Any) -> Any:
    return onnx_op.TensorScatter(past, new, write, axis=-2)


def _attention(query: Any, key: Any, value: Any, mask: Any, scale: float) -> Any:
    # The exporter gives the node all four outputs of its schema; clean-up drops the unused ones.
    return onnx_op.Attention(query, key, value, mask, scale=scale)[0]


def _rotary(x: Any, cos: Any, sin: Any, positions: Any) -> Any:
    head_dim, rotary_dim = x.shape[-1], 2 * cos.shape[-1]
    if rotary_dim == head_dim:
        return onnx_op.RotaryEmbedding(x, cos, sin, positions)
    return onnx_op.RotaryEmbedding(x, cos, sin, positions, rotary_embedding_dim=rotary_dim)


def _rms_norm(x: Any, weight: Any, eps: float) -> Any:
    return onnx_op.RMSNormalization(x, weight, epsilon=eps)


def _linear_transposed(x: Any, weight: Any) -> Any:
    return onnx_op.Gemm(x, weight, transB=1)


def _best(x: Any, count: int) -> Any:
    return onnx_op.TopK(x, onnx_op.Constant(value_ints=[count]), axis=-1)


#: ATen-style overload -> function that emits its ONNX node.
TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.specexport.commit_and_append.default: _commit_and_append,
    torch.ops.specexport.append_rows.default: _append_rows,
    torch.ops.specexport.attention.default: _attention,
    torch.ops.specexport.rotary.default: _rotary,
    torch.ops.specexport.rms_norm.default: _rms_norm,
    torch.ops.specexport.linear_transposed.default: _linear_transposed,
    torch.ops.specexport.best.default: _best,
    torch.ops.specexport.experts.default: experts_loop,
}
