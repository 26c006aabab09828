"""Attention of a recurrent head: over its stable cache and, in tree steps, over the rows of the tree so far."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from specexport.exporter import ops
from specexport.exporter.heads.record import BlockConfig, Latent
from specexport.exporter.layers import Linear, RMSNorm

#: Keys and values, [1, Hkv, rows, D] each.
Rows = tuple[Tensor, Tensor]
#: cos and sin, [positions, rotary_dim / 2] each.
Rope = tuple[Tensor, Tensor]


class Query(NamedTuple):
    """Rotated queries [1, Hq, T, D], and what the heads' outputs [1, T, Hq * Dv] are multiplied by, if anything."""

    rows: Tensor
    gate: Tensor | None

    def newest(self) -> Query:
        """Those of the last row."""
        return Query(self.rows[:, :, -1:], None if self.gate is None else self.gate[:, -1:])


class DraftAttention(nn.Module):
    """What all kinds share: Hq query heads over Hkv cached ones, keys and values of a width each."""

    def __init__(self, blocks: BlockConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.kv_heads = blocks.num_heads, blocks.num_kv_heads
        self.key_dim, self.value_dim = blocks.head_dim, blocks.value_dim
        self.scale, self.dtype = blocks.attention_scale, dtype

    def project(self, x: Tensor, rope: Rope, positions: Tensor) -> tuple[Query, Tensor, Tensor]:
        """Queries, and the keys and values to cache, of x [1, T, inputs]."""
        raise NotImplementedError

    def output(self, mixed: Tensor, gate: Tensor | None) -> Tensor:
        """[1, T, Hd] of the mixed values [1, Hq, T, D]."""
        raise NotImplementedError

    def over_cache(self, query: Query, cache: Rows, mask: Tensor) -> Tensor:
        """Attention of new stable rows over the cache they are already in; mask [1, 1, T, S]."""
        return self.output(ops.attention(query.rows, cache[0], cache[1], mask, self.scale), query.gate)

    def over_tree(self, query: Query, cache: Rows, cache_mask: Tensor, tree: Rows, tree_mask: Tensor) -> Tensor:
        """One softmax over two sources, so that the cache need not be copied to append the tree's rows.

        Args:
            cache_mask: [1, 1, 1, S], tree_mask: [1, 1, T, rows], both additive.
        """
        groups, nodes = self.heads // self.kv_heads, query.rows.shape[2]
        grouped = (query.rows * self.scale).reshape(1, self.kv_heads, -1, self.key_dim)
        scores = [grouped @ keys.transpose(-1, -2) for keys in (cache[0], tree[0])]
        masks = [cache_mask, tree_mask.repeat(1, 1, groups, 1)]  # group-major rows: each group sees all the nodes
        both = torch.cat([score + mask for score, mask in zip(scores, masks, strict=True)], dim=-1)
        weights = torch.softmax(both.float(), dim=-1).to(self.dtype)
        rows = tree[0].shape[2]  # counted from the end: a lowering cuts the cache's columns to the used ones
        mixed = weights[..., :-rows] @ cache[1] + weights[..., -rows:] @ tree[1]
        return self.output(mixed.reshape(1, self.heads, nodes, self.value_dim), query.gate)


class GroupedAttention(DraftAttention):
    """The ordinary kind; ``gated``: each head's output is multiplied by a sigmoid that comes with its query."""

    def __init__(self, blocks: BlockConfig, inputs: int, dtype: torch.dtype) -> None:
        super().__init__(blocks, dtype)
        self.gated = blocks.gated
        wide, narrow = self.heads * self.key_dim, self.kv_heads * self.key_dim
        self.q_proj = Linear(inputs, wide * (2 if self.gated else 1), blocks.attention_bias, dtype)
        self.k_proj = Linear(inputs, narrow, blocks.attention_bias, dtype)
        self.v_proj = Linear(inputs, narrow, blocks.attention_bias, dtype)
        self.o_proj = Linear(wide, blocks.hidden_size, blocks.output_bias, dtype)
        self.q_norm = RMSNorm(self.key_dim, blocks.norm_eps) if blocks.qk_norm else None
        self.k_norm = RMSNorm(self.key_dim, blocks.norm_eps) if blocks.qk_norm else None

    def _heads(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        return (x if norm is None else norm(x).to(self.dtype)).transpose(1, 2)

    def project(self, x: Tensor, rope: Rope, positions: Tensor) -> tuple[Query, Tensor, Tensor]:
        query, gate = self.q_proj(x).reshape(1, -1, self.heads, self.key_dim * (2 if self.gated else 1)), None
        if self.gated:
            query, gate = query[..., : self.key_dim], torch.sigmoid(query[..., self.key_dim :]).flatten(-2)
        key, value = (proj(x).reshape(1, -1, self.kv_heads, self.key_dim) for proj in (self.k_proj, self.v_proj))
        rotated = ops.rotary(self._heads(query, self.q_norm), *rope, positions)
        return (
            Query(rotated, gate),
            ops.rotary(self._heads(key, self.k_norm), *rope, positions),
            self._heads(value, None),
        )

    def output(self, mixed: Tensor, gate: Tensor | None) -> Tensor:
        merged = mixed.transpose(1, 2).reshape(1, -1, self.heads * self.value_dim)
        projected: Tensor = self.o_proj(merged if gate is None else merged * gate)
        return projected


class LatentAttention(DraftAttention):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) with the up-projections absorbed: the cache holds one
    latent a token and its rotated key, and all heads attend to those.

    Of a token, 2 * rank + rope_dim numbers are cached (1088 in DeepSeek-V3) instead of heads * (nope_dim + rope_dim +
    value_dim) (40960); a score takes rank + rope_dim products instead of nope_dim + rope_dim (576 instead of 192).
    """

    def __init__(self, blocks: BlockConfig, latent: Latent, dtype: torch.dtype) -> None:
        super().__init__(blocks, dtype)
        self.latent, hidden = latent, blocks.hidden_size
        wide = self.heads * (latent.nope_dim + latent.rope_dim)
        if latent.query_rank is None:
            self.q_proj = Linear(hidden, wide, False, dtype)
        else:
            self.q_a_proj = Linear(hidden, latent.query_rank, False, dtype)
            self.q_a_norm = RMSNorm(latent.query_rank, latent.norm_eps)
            self.q_b_proj = Linear(latent.query_rank, wide, False, dtype)
        self.kv_a_proj = Linear(hidden, latent.rank + latent.rope_dim, False, dtype)
        self.kv_a_norm = RMSNorm(latent.rank, latent.norm_eps)
        # The two halves of kv_b_proj: [heads, nope, rank] takes queries to the latent, [heads, rank, value] back.
        self.key_up = nn.Parameter(torch.empty(self.heads, latent.nope_dim, latent.rank, dtype=dtype), False)
        self.value_up = nn.Parameter(torch.empty(self.heads, latent.rank, latent.value_dim, dtype=dtype), False)
        self.o_proj = Linear(self.heads * latent.value_dim, hidden, False, dtype)

    def project(self, x: Tensor, rope: Rope, positions: Tensor) -> tuple[Query, Tensor, Tensor]:
        latent = self.latent
        if latent.query_rank is None:
            query = self.q_proj(x)
        else:
            query = self.q_b_proj(self.q_a_norm(self.q_a_proj(x)).to(self.dtype))
        query = query.reshape(1, -1, self.heads, latent.nope_dim + latent.rope_dim).transpose(1, 2)
        plain, turned = query[..., : latent.nope_dim], ops.rotary(query[..., latent.nope_dim :], *rope, positions)
        compressed = self.kv_a_proj(x).unsqueeze(1)  # one head
        value = self.kv_a_norm(compressed[..., : latent.rank]).to(self.dtype)
        key = ops.rotary(compressed[..., latent.rank :], *rope, positions)
        rows = torch.cat([plain @ self.key_up, turned], dim=-1)
        return Query(rows, None), torch.cat([value, key], dim=-1), value

    def output(self, mixed: Tensor, gate: Tensor | None) -> Tensor:
        values = (mixed @ self.value_up).transpose(1, 2)
        projected: Tensor = self.o_proj(values.reshape(1, -1, self.heads * self.latent.value_dim))
        return projected


def make_attention(blocks: BlockConfig, inputs: int, dtype: torch.dtype) -> DraftAttention:
    """The kind that ``blocks`` asks for; ``inputs``: width of what it reads."""
    if blocks.latent is not None:
        return LatentAttention(blocks, blocks.latent, dtype)
    return GroupedAttention(blocks, inputs, dtype)
