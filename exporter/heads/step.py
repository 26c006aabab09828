"""One prediction layer of a recurrent head, and how its parameters come from the canonical tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from specexport.exporter.heads.attention import DraftAttention, make_attention
from specexport.exporter.heads.experts import make_mlp
from specexport.exporter.heads.record import BlockConfig, Latent, RecurrentRecord
from specexport.exporter.layers import Linear, RMSNorm
from specexport.exporter.quantize.plan import narrow
from specexport.exporter.weights import WeightSource
from specexport.runtime.errors import CheckpointError

#: Attends in a decoder layer: (index of the layer, its attention, what it reads [1, T, inputs]) -> [1, T, Hd].
Attend = Callable[[int, DraftAttention, Tensor], Tensor]


class DraftLayer(nn.Module):
    """One decoder layer; the first takes the two inputs side by side under ``concat`` fusion."""

    def __init__(self, record: RecurrentRecord, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        blocks = record.blocks
        self.dtype = dtype
        wide = record.fusion == "concat" and index == 0
        self.attention = make_attention(blocks, blocks.hidden_size * (2 if wide else 1), dtype)
        has_norm = blocks.first_input_norm if index == 0 else True
        self.input_norm = RMSNorm(blocks.hidden_size, blocks.norm_eps) if has_norm and not wide else None
        self.mlp_norm = RMSNorm(blocks.hidden_size, blocks.norm_eps)
        self.mlp = make_mlp(blocks, dtype)

    def forward(self, x: Tensor, residual: Tensor, attend: Callable[[DraftAttention, Tensor], Tensor]) -> Tensor:
        """x is what attention reads (un-normed where the layer has its own norm), residual what it adds to."""
        normed = x if self.input_norm is None else self.input_norm(x)
        hidden = residual + attend(self.attention, normed.to(self.dtype)).float()
        out: Tensor = hidden + self.mlp(self.mlp_norm(hidden).to(self.dtype)).float()
        return out


class DraftStep(nn.Module):
    """Joins embedding and hidden state and runs the decoder layers: a prediction layer without its tables."""

    def __init__(self, record: RecurrentRecord, dtype: torch.dtype) -> None:
        super().__init__()
        self.record, self.dtype = record, dtype
        hidden, eps = record.blocks.hidden_size, record.blocks.norm_eps
        project = record.fusion == "project"
        self.fuse = Linear(record.embedding_size + hidden, hidden, record.fuse_bias, dtype) if project else None
        self.embedding_norm = RMSNorm(record.embedding_size, eps) if record.embedding_norm else None
        self.hidden_norm = RMSNorm(hidden, eps) if record.hidden_norm else None
        self.layers = nn.ModuleList(DraftLayer(record, index, dtype) for index in range(record.blocks.num_layers))
        self.norm = RMSNorm(hidden, eps) if record.final_norm else None

    def join(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What layer 0 reads and what it adds to, of embeddings [1, T, He] and hidden states [1, T, Hd], float32."""
        if self.embedding_norm is not None:
            embedded = self.embedding_norm(embedded)
        normed = hidden if self.hidden_norm is None else self.hidden_norm(hidden)
        parts = {"embedding": embedded, "hidden": normed}
        joined = torch.cat([parts[name] for name in self.record.order], dim=-1)
        if self.fuse is not None:
            fused: Tensor = self.fuse(joined.to(self.dtype)).float()
            return fused, fused
        return joined, normed if self.record.norm_before_residual else hidden

    def run(self, embedded: Tensor, hidden: Tensor, attend: Attend, *, newest: bool = False) -> Tensor:
        """The last layer's output [1, T, Hd] for embeddings [1, T, He] and hidden states [1, T, Hd], both float32.

        Args:
            newest: of the last row alone, to which ``attend`` then keeps in the last layer; the others are there for
                their keys and values.
        """
        x, residual = self.join(embedded, hidden)
        for index, layer in enumerate(self.layers):
            if newest and index == len(self.layers) - 1:
                residual = residual[:, -1:]
            x = residual = layer(x, residual, partial(attend, index))
        out: Tensor = residual
        return out

    def ends(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """What the lm_head reads and what is fed back, of an output."""
        normed = out if self.norm is None else self.norm(out)
        return normed, normed if self.record.feedback == "normed" else out


def read_parameter(weights: WeightSource, name: str, parameter: Tensor, blocks: BlockConfig) -> Tensor:
    """A parameter by its canonical name: matrices become operands, norm weights get their offset, the matrices of
    experts are stacked, the up-projection of a latent is cut, and rotated pairs are put half a head apart.

    Raises:
        CheckpointError: the head's tensor has another shape.
    """
    stem, _, last = name.rpartition(".")
    latent = blocks.latent
    if parameter.ndim == 3 and latent is not None and last in ("key_up", "value_up"):
        both = weights.read(f"{stem}.kv_b_proj.weight").reshape(blocks.num_heads, -1, latent.rank)
        tensor = both[:, : latent.nope_dim] if last == "key_up" else both[:, latent.nope_dim :].transpose(1, 2)
    elif parameter.ndim == 3:
        tensor = torch.empty(parameter.shape, dtype=parameter.dtype)
        for index in range(len(parameter)):
            own = name.replace(".experts.", f".experts.{index}.")
            tensor[index] = narrow(f"head tensor {own}", weights.read(own), parameter.dtype).t()
    else:
        tensor = weights.read(name)
        if last == "weight" and latent is not None and latent.interleaved:
            tensor = _half_split(tensor, name, latent)
        if last == "weight" and tensor.ndim == 1:
            tensor = tensor.float() + blocks.norm_offset
        elif last in ("weight", "router"):
            tensor = tensor.t()
    if tensor.shape != parameter.shape:
        raise CheckpointError(f"head tensor {name} has shape {tuple(tensor.shape)}, expected {tuple(parameter.shape)}")
    return narrow(f"head tensor {name}", tensor, parameter.dtype)


def _half_split(tensor: Tensor, name: str, latent: Latent) -> Tensor:
    """Rows of a projection whose last ``rope_dim`` outputs (of each head) are rotated in neighbouring pairs, reordered
    for rotation in pairs half of ``rope_dim`` apart. Scores do not change: queries and keys are reordered alike."""
    if name.endswith((".q_proj.weight", ".q_b_proj.weight")):
        width = latent.nope_dim + latent.rope_dim
    elif name.endswith(".kv_a_proj.weight"):
        width = latent.rank + latent.rope_dim
    else:
        return tensor
    plain = width - latent.rope_dim
    order = torch.cat([torch.arange(plain), torch.arange(plain, width, 2), torch.arange(plain + 1, width, 2)])
    return tensor.reshape(-1, width, tensor.shape[1])[:, order].reshape(tensor.shape)
