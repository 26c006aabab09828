"""The target over a rectangle of sequences, for making training data: the modules of :class:`Target`, other attention.

Sequences are padded on the left, so that all rows share the column they write. Everything but attention is the target's
own; the batch of one that its graph runs would leave most of a CPU idle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specexport.exporter import ops
from specexport.exporter.layers import Attention, Block, Target


@dataclass(slots=True)
class Batch:
    """Sequences in flight: caches [B, Hkv, S, D] by layer, and columns of padding [B] before each first token."""

    keys: list[Tensor]
    values: list[Tensor]
    pads: Tensor
    used: int = 0

    def select(self, rows: Tensor) -> None:
        """Keep some rows only."""
        self.pads = self.pads[rows]
        for caches in (self.keys, self.values):
            for index, cache in enumerate(caches):
                kept = cache.new_empty(len(rows), *cache.shape[1:])
                kept[:, :, : self.used] = cache[rows, :, : self.used]
                caches[index] = kept


class BatchedTarget:
    """Runs a target over many sequences at once.

    Args:
        target: its weights; captures decide what :meth:`forward` returns as features.
    """

    def __init__(self, target: Target) -> None:
        self.target, self.config = target, target.config
        self.head = target.embedding if self.config.tie_word_embeddings else target.lm_head

    def start(self, pads: Sequence[int], columns: int) -> Batch:
        """An empty batch for sequences of up to ``columns`` tokens, padding included."""
        config, target = self.config, self.target
        shape = (len(pads), config.num_kv_heads, columns, config.head_dim)
        device = target.embedding.device

        def caches() -> list[Tensor]:
            return [torch.zeros(shape, dtype=target.dtype, device=device) for _ in config.layers]

        return Batch(caches(), caches(), torch.tensor(pads, device=device))

    def forward(self, tokens: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Append T tokens [B, T] to every row.

        Returns:
            The state after the final norm, float32 [B, T, H], and the captures side by side, [B, T, F], in the
            target's dtype.
        """
        target, config = self.target, self.config
        begin, width = batch.used, tokens.shape[1]
        columns = torch.arange(begin, begin + width, device=tokens.device)
        positions = (columns[None] - batch.pads[:, None]).clamp(min=0)
        masks = {window: self._mask(batch, columns, window) for window in target.masks.windows}
        x = nn.functional.embedding(tokens, target.embedding).float() * config.embedding_scale
        boundary = {0: x}
        for index, (block, layer) in enumerate(zip(target.layers, config.layers, strict=True)):
            assert isinstance(block, Block)
            rope = (target.get_buffer(f"rope_cos_{layer.rope}"), target.get_buffer(f"rope_sin_{layer.rope}"))
            cache = (batch.keys[index], batch.values[index])
            mixed = self._attend(block, x, rope, positions, masks[layer.window], cache, begin)
            x = x + (mixed if block.attention_out_norm is None else block.attention_out_norm(mixed))
            fed = block.mlp(block.mlp_norm(x).to(target.dtype)).float()
            x = x + (fed if block.mlp_out_norm is None else block.mlp_out_norm(fed))
            boundary[index + 1] = x
        batch.used += width
        final = target.norm(x)
        parts = [final if c == "final" else boundary[int(c)] for c in target.captures]
        return final, torch.cat(parts, dim=-1).to(target.dtype)

    def logits(self, final: Tensor) -> Tensor:
        """float32 [R, V] of final states [R, H]."""
        logits: Tensor = ops.linear_transposed(final.to(self.target.dtype), self.head)
        return logits.float()

    def _mask(self, batch: Batch, columns: Tensor, window: int | None) -> Tensor:
        """Additive [B, 1, G * T, S used], group-major rows."""
        seen = torch.arange(int(columns[-1]) + 1, device=columns.device)
        visible = (seen[None] <= columns[:, None])[None] & (seen[None, None] >= batch.pads[:, None, None])
        if window is not None:
            visible = visible & (columns[:, None] - seen[None] < window)[None]
        visible = visible | (seen[None] == columns[:, None])[None]  # a row of padding sees itself: no NaN
        mask = torch.zeros(visible.shape, dtype=self.target.dtype, device=columns.device)
        mask.masked_fill_(~visible, torch.finfo(self.target.dtype).min)
        return mask.repeat(1, self.config.num_heads // self.config.num_kv_heads, 1).unsqueeze(1)

    def _attend(
        self,
        block: Block,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        positions: Tensor,
        mask: Tensor,
        cache: tuple[Tensor, Tensor],
        begin: int,
    ) -> Tensor:
        attention: Attention = block.attention
        rows, width = positions.shape
        end, dim, kv_heads = begin + width, attention.head_dim, attention.kv_heads
        normed = block.input_norm(x).to(self.target.dtype)

        def heads(y: Tensor, norm: nn.Module | None) -> Tensor:
            y = y.reshape(rows, width, -1, dim)
            return (y if norm is None else norm(y).to(self.target.dtype)).transpose(1, 2)

        query = ops.rotary(heads(attention.q_proj(normed), attention.q_norm), *rope, positions)
        cache[0][:, :, begin:end] = ops.rotary(heads(attention.k_proj(normed), attention.k_norm), *rope, positions)
        cache[1][:, :, begin:end] = heads(attention.v_proj(normed), None)
        # Queries of a group share keys: as rows of one head they need no copies of them.
        grouped = query.reshape(rows, kv_heads, -1, dim)
        keys, values = cache[0][:, :, :end], cache[1][:, :, :end]
        mixed = nn.functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=attention.scale)
        merged = mixed.reshape(rows, -1, width, dim).transpose(1, 2).reshape(rows, width, -1)
        out: Tensor = attention.o_proj(merged).float()
        return out
