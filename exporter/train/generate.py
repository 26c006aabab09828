"""Answers of the target to many prompts at once, with the states it was in while it wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specexport.exporter.train.batch import BatchedTarget
from specexport.exporter.train.corpus import Example

#: Tokens are sampled from this many best ones at most.
_POOL = 256
#: Columns of a prompt in one forward.
_CHUNK = 128
#: Finished rows are dropped when they are one in this many.
_WASTE = 8


@dataclass(frozen=True, slots=True)
class Prompt:
    """``tokens`` ready for the model; ``temperature`` and ``top_p`` of the answer (0: greedy)."""

    tokens: tuple[int, ...]
    temperature: float = 0.0
    top_p: float = 1.0


def write_answers(
    model: BatchedTarget,
    prompts: Sequence[Prompt],
    *,
    max_tokens: int,
    stop_ids: Sequence[int],
    valid_vocab: int,
    seed: int,
    keep_features: bool = True,
) -> list[Example]:
    """Answer every prompt; the stop token, where one was written, is the last token.

    Args:
        max_tokens: of each answer. seed: of the whole batch; the same batch gives the same answers.
        keep_features: without it ``features`` has no columns.
    """
    longest = max(len(prompt.tokens) for prompt in prompts)
    columns = longest + max_tokens
    device = model.head.device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.zeros(len(prompts), columns, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, longest - len(prompt.tokens) : longest] = torch.tensor(prompt.tokens)
    pads = [longest - len(prompt.tokens) for prompt in prompts]
    batch = model.start(pads, columns)
    features: Tensor | None = None
    ends = torch.full((len(prompts),), columns)
    live = torch.arange(len(prompts), device=device)
    finished = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    stops = torch.tensor(list(stop_ids), device=device)
    column, step = 0, min(_CHUNK, longest)
    with torch.no_grad():
        while True:
            final, captured = model.forward(tokens[live, column : column + step], batch)
            if keep_features:
                if features is None:
                    features = torch.zeros(len(prompts), columns, captured.shape[-1], dtype=captured.dtype)
                features[live, column : column + step] = captured.cpu()
            column += step
            if column < longest:
                step = min(_CHUNK, longest - column)
                continue
            step = 1
            logits = model.logits(final[:, -1])[:, :valid_vocab]
            chosen = _choose(logits, [prompts[row] for row in live.tolist()], generator)
            tokens[live, column] = chosen
            done = torch.isin(chosen, stops) & ~finished
            ends[live[done].cpu()] = column + 1
            finished |= done
            if column + 1 == columns or bool(finished.all()):
                break
            if int(finished.sum()) * _WASTE >= len(live):  # moving the caches costs about a step
                kept = (~finished).nonzero().flatten()
                live, finished = live[kept], finished[kept]
                batch.select(kept)
    return [
        _example(tokens[row].cpu(), pads[row], longest, int(ends[row]), None if features is None else features[row])
        for row in range(len(prompts))
    ]


def _choose(logits: Tensor, prompts: Sequence[Prompt], generator: torch.Generator) -> Tensor:
    """The next token of each row [B]."""
    chosen = logits.argmax(dim=-1)
    sampled = [row for row, prompt in enumerate(prompts) if prompt.temperature > 0]
    if sampled:
        temperature = torch.tensor([prompts[row].temperature for row in sampled], device=logits.device)
        top_p = torch.tensor([prompts[row].top_p for row in sampled], device=logits.device)
        values, ids = logits[sampled].topk(min(_POOL, logits.shape[-1]), dim=-1)
        p = torch.softmax(values / temperature[:, None], dim=-1)
        p = p * (p.cumsum(-1) - p < top_p[:, None])
        picked = torch.multinomial(p.cpu(), 1, generator=generator).to(logits.device)
        chosen[sampled] = ids.gather(1, picked).flatten()
    return chosen


def _example(tokens: Tensor, pad: int, answer: int, end: int, features: Tensor | None) -> Example:
    learn = torch.zeros(end - pad, dtype=torch.bool)
    learn[answer - pad :] = True
    states = torch.zeros(end - pad, 0) if features is None else features[pad:end].clone()
    if len(states):
        states[-1] = 0
    return Example(tokens[pad:end].clone(), learn, states)


def read_states(model: BatchedTarget, tokens: Tensor, learn: Tensor) -> Example:
    """A given text with the target's states: one pass, nothing is generated."""
    batch = model.start([0], len(tokens))
    with torch.no_grad():
        parts = [model.forward(chunk[None], batch)[1][0].cpu() for chunk in torch.split(tokens, _CHUNK)]
    states = torch.cat(parts)
    states[-1] = 0
    return Example(tokens, learn, states)
