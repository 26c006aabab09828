"""A mixture of experts in place of a head's MLP (DeepSeek-V3 and GLM-4.5, Qwen3-Next).

Only chosen experts are computed, each over the rows that chose it, one after another: memory is one expert's weights
whatever the number of rows. On ONNX Runtime that is one ``Loop``, which copies each chosen expert's weights once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specexport.exporter import ops
from specexport.exporter.heads.record import BlockConfig, Experts
from specexport.exporter.layers import MLP, Linear


@dataclass(frozen=True, slots=True)
class _Shared:
    """Sizes of the expert that every token takes."""

    hidden_size: int
    intermediate_size: int
    mlp_bias: bool
    activation: str


class _Stack(nn.Module):
    """Matrices [E, in, out] of all experts."""

    def __init__(self, count: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, inputs, outputs, dtype=dtype), requires_grad=False)


class ExpertsMLP(nn.Module):
    """The mixture."""

    def __init__(self, blocks: BlockConfig, experts: Experts, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = experts, dtype
        hidden, inner = blocks.hidden_size, experts.intermediate_size
        # Not a Linear: which experts are chosen must not depend on the format of weights.
        self.router = nn.Parameter(torch.empty(hidden, experts.count), requires_grad=False)
        sigmoid = experts.scores == "sigmoid"
        self.correction = nn.Parameter(torch.empty(experts.count), requires_grad=False) if sigmoid else None
        self.experts = nn.ModuleDict(
            {
                "gate_proj": _Stack(experts.count, hidden, inner, dtype),
                "up_proj": _Stack(experts.count, hidden, inner, dtype),
                "down_proj": _Stack(experts.count, inner, hidden, dtype),
            }
        )
        shared = experts.shared_size
        self.shared = MLP(_Shared(hidden, shared, False, blocks.activation), dtype) if shared else None
        self.shared_gate = Linear(hidden, 1, False, dtype) if experts.shared_gate else None

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Of float32 rows [n, Hd]: the experts chosen, int64 [n, top], and their weights, float32 [n, top]."""
        c = self.config
        logits = x @ self.router
        scores = torch.sigmoid(logits) if self.correction is not None else torch.softmax(logits, dim=-1)
        ranked = scores if self.correction is None else scores + self.correction
        if c.groups > 1:
            grouped = ranked.reshape(-1, c.groups, c.count // c.groups)
            kept = ops.best(ops.best(grouped, 2)[0].sum(dim=-1), c.top_groups)[1]
            allowed = (kept.unsqueeze(-1) == torch.arange(c.groups, device=x.device)).any(dim=1)
            grouped = torch.where(allowed.unsqueeze(-1), grouped, torch.finfo(torch.float32).min)
            ranked = grouped.reshape(-1, c.count)
        chosen = ops.best(ranked, c.top)[1]
        weights = scores.gather(1, chosen)
        if c.normalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen, weights * c.scale

    def forward(self, x: Tensor) -> Tensor:
        """[1, T, Hd] of the same."""
        rows = x[0]
        chosen, weights = self.route(rows.float())
        stacks = [self.experts[name].weight for name in ("gate_proj", "up_proj", "down_proj")]
        out = ops.experts(rows, chosen, weights, *stacks)
        if self.shared is not None:
            shared = self.shared(rows).float()
            out = out + (shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(rows)).float() * shared)
        mixed: Tensor = out.to(self.dtype).unsqueeze(0)
        return mixed


def make_mlp(blocks: BlockConfig, dtype: torch.dtype) -> nn.Module:
    """The MLP that ``blocks`` asks for."""
    return MLP(blocks, dtype) if blocks.experts is None else ExpertsMLP(blocks, blocks.experts, dtype)
