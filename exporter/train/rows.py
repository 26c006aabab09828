"""Sequences packed for a training step: what each row of the head reads, and what it is to predict.

Row i of a sequence reads the target's features at token i and token i + 1, and predicts token i + 2. It is *learnt* if
the target wrote token i + 1 (so that the drafter would start there); other rows are context.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specexport.exporter.train.corpus import Example


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence in a pack: its rows among the learnt ones and among all; ``mask`` [learnt, all], additive."""

    learnt: slice
    all: slice
    mask: Tensor


@dataclass(frozen=True, slots=True)
class Pack:
    """N rows of several sequences, R of them learnt.

    Attributes:
        features: [N, F]. tokens: int64 [N], the one after each row. positions: int64 [N], within the sequence.
        learnt: int64 [R], which rows. context: int64 [N - R]. order: int64 [N], rows among [context, learnt].
        spans: one a sequence.
        ahead: int64 [R, steps + 1], token 1 + s after each learnt row. valid: bool [R, steps]: token 2 + s is learnt.
    """

    features: Tensor
    tokens: Tensor
    positions: Tensor
    learnt: Tensor
    context: Tensor
    order: Tensor
    spans: tuple[Span, ...]
    ahead: Tensor
    valid: Tensor


def pack(examples: Iterable[Example], steps: int, device: torch.device | str = "cpu") -> Pack:
    """Pack sequences for ``steps`` unrolled steps; rows after the last learnt one are left out."""
    features, tokens, positions, learnt, ahead, valid = [], [], [], [], [], []
    spans: list[Span] = []
    rows = count = 0
    for example in examples:
        length = len(example.tokens)
        mine = (example.learn[1 : length - 1] & example.learn[2:]).nonzero().flatten()
        if not len(mine):
            continue
        size = int(mine[-1]) + 2  # the row after the last learnt one has the state that tells its aim
        features.append(example.features[:size])
        tokens.append(example.tokens[1 : size + 1])
        positions.append(torch.arange(size))
        padded = torch.cat([example.tokens, example.tokens.new_zeros(steps + 1)])
        learn = torch.cat([example.learn, example.learn.new_zeros(steps + 1)])
        reach = torch.arange(steps + 1)
        ahead.append(padded[mine[:, None] + 1 + reach])
        valid.append(learn[mine[:, None] + 2 + reach[:steps]].long().cumprod(1).bool())
        mask = torch.zeros(len(mine), size)
        mask.masked_fill_(torch.arange(size)[None] > mine[:, None], torch.finfo(torch.float32).min)
        spans.append(Span(slice(count, count + len(mine)), slice(rows, rows + size), mask))
        learnt.append(mine + rows)
        rows, count = rows + size, count + len(mine)
    chosen = torch.cat(learnt)
    is_context = torch.ones(rows, dtype=torch.bool)
    is_context[chosen] = False
    context = is_context.nonzero().flatten()
    order = torch.empty(rows, dtype=torch.int64)
    order[torch.cat([context, chosen])] = torch.arange(rows)
    moved = [replace(span, mask=span.mask.to(device)) for span in spans]
    return Pack(
        features=torch.cat(features).to(device),
        tokens=torch.cat(tokens).to(device),
        positions=torch.cat(positions).to(device),
        learnt=chosen.to(device),
        context=context.to(device),
        order=order.to(device),
        spans=tuple(moved),
        ahead=torch.cat(ahead).to(device),
        valid=torch.cat(valid).to(device),
    )


def learnt_rows(example_learn: Tensor) -> int:
    """Rows of a sequence that :func:`pack` learns."""
    return int((example_learn[1:-1] & example_learn[2:]).sum())


def batches(counts: Sequence[int], order: Sequence[int], budget: int) -> list[list[int]]:
    """Sequences in ``order``, cut into batches of at least ``budget`` learnt rows (the last may have fewer)."""
    found: list[list[int]] = [[]]
    size = 0
    for index in order:
        found[-1].append(index)
        size += counts[index]
        if size >= budget:
            found.append([])
            size = 0
    return [batch for batch in found if batch]
