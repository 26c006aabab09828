"""Speculative heads as torch modules: what is checked against references is what is exported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from specexport.exporter import ops
from specexport.exporter.heads.record import MedusaRecord
from specexport.exporter.layers import ACTIVATIONS, Linear
from specexport.exporter.quantize.plan import narrow
from specexport.exporter.weights import WeightSource
from specexport.runtime.errors import CheckpointError


class MedusaHeads(nn.Module):
    """All heads in one call: the k most probable tokens of each (Cai et al. 2024, arXiv 2401.10774).

    Head h: residual blocks ``x + act(W x + b)`` on the target's last hidden state after its final norm, then an
    lm_head. It predicts the token h + 2 places after the one whose state it reads.

    Args:
        k: candidates a head. valid_vocab: target ids at or above it are padding and never proposed.
    """

    def __init__(self, record: MedusaRecord, dtype: torch.dtype, k: int, valid_vocab: int) -> None:
        super().__init__()
        self.record, self.k = record, k
        self._act = ACTIVATIONS[record.activation]
        self.valid_rows = record.vocab_size if record.token_map is not None else min(valid_vocab, record.vocab_size)
        width = record.hidden_size

        def lm_head() -> nn.Parameter:
            return nn.Parameter(torch.empty(record.vocab_size, width, dtype=dtype), requires_grad=False)

        self.heads = nn.ModuleList()
        for _ in range(record.num_heads):
            head = nn.Module()
            head.blocks = nn.ModuleList(
                Linear(width, width, record.block_bias, dtype) for _ in range(record.num_layers)
            )
            if record.lm_head == "own":
                head.lm_head = lm_head()
            self.heads.append(head)
        if record.lm_head != "own":
            self.lm_head = lm_head()
        self.token_map: Tensor | None
        empty = None if record.token_map is None else torch.empty(record.vocab_size, dtype=torch.int64)
        self.register_buffer("token_map", empty)

    def states(self, features: Tensor) -> list[Tensor]:
        """What each head's lm_head reads, [R, H] of features [R, H]."""
        states = []
        for head in self.heads:
            x = features
            for block in head.blocks:  # type: ignore[union-attr]
                x = x + self._act(block(x))
            states.append(x)
        return states

    def logits(self, features: Tensor) -> Tensor:
        """float32 [heads, valid rows] from features [1, H]."""
        states = self.states(features)
        if self.record.lm_head == "own":
            rows = [ops.linear_transposed(x, head.lm_head) for x, head in zip(states, self.heads, strict=True)]
            logits = torch.cat(rows)
        else:
            logits = ops.linear_transposed(torch.cat(states), self.lm_head)
        return logits.float()[:, : self.valid_rows]

    def forward(self, features: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Token ids int64 [heads, k], best first, and their log probabilities float32.

        Args:
            features: [1, H]. noise: float32 [heads, valid rows], added to the logits (``runtime.drafters.noise``).
        """
        logprobs, rows = ops.best(torch.log_softmax(self.logits(features) + noise, dim=-1), self.k)
        return rows if self.token_map is None else self.token_map[rows], logprobs

    def values(self, weights: WeightSource) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """(name, reader) of every tensor the head brings; the target's lm_head, where it is used, is left out."""
        for name, parameter in self.named_parameters():
            if name == "lm_head" and self.record.lm_head == "target":
                continue
            yield name, partial(_read, weights, name, parameter)
        if self.record.token_map is not None:
            yield "token_map", partial(torch.from_numpy, self.record.token_map)


def _read(weights: WeightSource, name: str, parameter: Tensor) -> Tensor:
    """A tensor by its canonical name; block weights are turned into operands."""
    tensor = weights.read(name)
    if ".blocks." in name and name.endswith(".weight"):
        tensor = tensor.t()
    if tensor.shape != parameter.shape:
        raise CheckpointError(f"head tensor {name} has shape {tuple(tensor.shape)}, expected {tuple(parameter.shape)}")
    return narrow(f"head tensor {name}", tensor, parameter.dtype)
