"""Recurrent drafters (EAGLE-1/2/3, multi-token prediction): one call extends the stable cache and grows a whole tree.

The order of work at a draft step is that of :class:`~specexport.exporter.heads.record.RecurrentRecord`. The tree is
EAGLE-2's (Li et al. 2024, arXiv 2406.16858): expand the k best nodes of each depth, pool every candidate, keep the best
by cumulative log probability; or a static one (EAGLE-1). The cache holds only rows computed from true target features;
rows of the tree live in the call alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from specexport.exporter import ops
from specexport.exporter.heads.growth import DynamicGrowth, Expand, Grown, StaticGrowth
from specexport.exporter.heads.record import BlockConfig, RecurrentRecord
from specexport.exporter.heads.trees import DynamicTree, StaticTree
from specexport.exporter.layers import MLP, Linear, RMSNorm
from specexport.exporter.rope import rope_tables
from specexport.exporter.weights import WeightSource
from specexport.runtime.errors import CheckpointError

#: Keys, values and the mask of rows that a tree node may attend to besides the cache.
Rows = tuple[Tensor, Tensor]


class DraftAttention(nn.Module):
    """Attention over the stable cache and, in tree steps, over the rows of the tree so far."""

    def __init__(self, blocks: BlockConfig, inputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = blocks.num_heads, blocks.num_kv_heads, blocks.head_dim
        self.scale, self.dtype = blocks.attention_scale, dtype
        wide, narrow = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = Linear(inputs, wide, blocks.attention_bias, dtype)
        self.k_proj = Linear(inputs, narrow, blocks.attention_bias, dtype)
        self.v_proj = Linear(inputs, narrow, blocks.attention_bias, dtype)
        self.o_proj = Linear(wide, blocks.hidden_size, blocks.output_bias, dtype)
        self.q_norm = RMSNorm(self.head_dim, blocks.norm_eps) if blocks.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, blocks.norm_eps) if blocks.qk_norm else None

    def _heads(self, x: Tensor, heads: int, norm: RMSNorm | None) -> Tensor:
        x = x.reshape(1, -1, heads, self.head_dim)
        return (x if norm is None else norm(x).to(self.dtype)).transpose(1, 2)

    def project(self, x: Tensor, rope: tuple[Tensor, Tensor], positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [1, Hq, T, D] and keys, and values, [1, Hkv, T, D], of x [1, T, inputs]."""
        query = ops.rotary(self._heads(self.q_proj(x), self.heads, self.q_norm), *rope, positions)
        key = ops.rotary(self._heads(self.k_proj(x), self.kv_heads, self.k_norm), *rope, positions)
        return query, key, self._heads(self.v_proj(x), self.kv_heads, None)

    def merge(self, mixed: Tensor) -> Tensor:
        merged: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(1, -1, self.heads * self.head_dim))
        return merged

    def over_cache(self, query: Tensor, cache: Rows, mask: Tensor) -> Tensor:
        """Attention of new stable rows over the cache they are already in; mask [1, 1, T, S]."""
        return self.merge(ops.attention(query, cache[0], cache[1], mask, self.scale))

    def over_tree(self, query: Tensor, cache: Rows, cache_mask: Tensor, tree: Rows, tree_mask: Tensor) -> Tensor:
        """One softmax over two sources, so that the cache need not be copied to append the tree's rows.

        Args:
            cache_mask: [1, 1, 1, S], tree_mask: [1, 1, T, rows], both additive.
        """
        groups, nodes = self.heads // self.kv_heads, query.shape[2]
        grouped = (query * self.scale).reshape(1, self.kv_heads, -1, self.head_dim)
        scores = [grouped @ keys.transpose(-1, -2) for keys in (cache[0], tree[0])]
        masks = [cache_mask, tree_mask.repeat(1, 1, groups, 1)]  # group-major rows: each group sees all the nodes
        both = torch.cat([score + mask for score, mask in zip(scores, masks, strict=True)], dim=-1)
        weights = torch.softmax(both.float(), dim=-1).to(self.dtype)
        rows = tree[0].shape[2]  # counted from the end: a lowering cuts the cache's columns to the used ones
        mixed = weights[..., :-rows] @ cache[1] + weights[..., -rows:] @ tree[1]
        return self.merge(mixed.reshape(1, self.heads, nodes, self.head_dim))


class DraftLayer(nn.Module):
    """One decoder layer; the first takes the two inputs side by side under ``concat`` fusion."""

    def __init__(self, record: RecurrentRecord, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        blocks = record.blocks
        self.dtype = dtype
        wide = record.fusion == "concat" and index == 0
        self.attention = DraftAttention(blocks, blocks.hidden_size * (2 if wide else 1), dtype)
        has_norm = blocks.first_input_norm if index == 0 else True
        self.input_norm = RMSNorm(blocks.hidden_size, blocks.norm_eps) if has_norm and not wide else None
        self.mlp_norm = RMSNorm(blocks.hidden_size, blocks.norm_eps)
        self.mlp = MLP(blocks, dtype)

    def forward(self, x: Tensor, residual: Tensor, attend: Callable[[DraftAttention, Tensor], Tensor]) -> Tensor:
        """x is what attention reads (un-normed where the layer has its own norm), residual what it adds to."""
        normed = x if self.input_norm is None else self.input_norm(x)
        hidden = residual + attend(self.attention, normed.to(self.dtype)).float()
        out: Tensor = hidden + self.mlp(self.mlp_norm(hidden).to(self.dtype)).float()
        return out


class RecurrentDrafter(nn.Module):
    """The drafter graph.

    Args:
        slots: rows of the draft cache. tree: shape of the trees.
        valid_vocab: target ids at or above it are padding and never proposed.
    """

    def __init__(
        self,
        record: RecurrentRecord,
        slots: int,
        dtype: torch.dtype,
        tree: DynamicTree | StaticTree,
        *,
        valid_vocab: int,
    ) -> None:
        super().__init__()
        self.record, self.slots, self.dtype = record, slots, dtype
        self.positions = slots + tree.depth
        self.growth = DynamicGrowth(tree) if isinstance(tree, DynamicTree) else StaticGrowth(tree)
        mapped = record.draft_to_target is not None
        self.valid_rows = record.draft_vocab_size if mapped else min(valid_vocab, record.draft_vocab_size)
        hidden, features = record.blocks.hidden_size, record.target_hidden_size * len(record.captures)
        eps = record.blocks.norm_eps
        self.reduce_norm = RMSNorm(features, eps) if record.reduce_norm == "concat" else None
        count = len(record.captures) if record.reduce_norm == "each" else 0
        self.reduce_norms = nn.ModuleList(RMSNorm(record.target_hidden_size, eps) for _ in range(count))
        self.reduce = Linear(features, hidden, record.reduce_bias, dtype) if record.reduce else None
        project = record.fusion == "project"
        self.fuse = Linear(record.embedding_size + hidden, hidden, record.fuse_bias, dtype) if project else None
        self.embedding_norm = RMSNorm(record.embedding_size, eps) if record.embedding_norm else None
        self.hidden_norm = RMSNorm(hidden, eps) if record.hidden_norm else None
        self.layers = nn.ModuleList(DraftLayer(record, index, dtype) for index in range(record.blocks.num_layers))
        self.norm = RMSNorm(hidden, eps) if record.final_norm else None
        self.embedding = self._table(record.vocab_size, record.embedding_size)
        self.lm_head = self._table(record.draft_vocab_size, hidden)
        for name in ("cos", "sin"):
            table = torch.empty(self.positions, record.blocks.rope.rotary_dim // 2, dtype=dtype)
            self.register_buffer(f"rope_{name}", table)
        self.draft_to_target: Tensor | None
        self.register_buffer(
            "draft_to_target", torch.empty(record.draft_vocab_size, dtype=torch.int64) if mapped else None
        )

    def _table(self, rows: int, width: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(rows, width, dtype=self.dtype), requires_grad=False)

    def _hidden(self, features: Tensor) -> Tensor:
        """Step 1's hidden state [1, A, Hd] from the target's features [1, A, F]."""
        x = features.float()
        if self.reduce_norm is not None:
            x = self.reduce_norm(x)
        if len(self.reduce_norms):
            width = self.record.target_hidden_size
            parts = [norm(x[..., i * width : (i + 1) * width]) for i, norm in enumerate(self.reduce_norms)]
            x = torch.cat(parts, dim=-1)
        reduced: Tensor = x if self.reduce is None else self.reduce(x.to(self.dtype)).float()
        return reduced

    def _layers(
        self, tokens: Tensor, hidden: Tensor, attend: Callable[[int, DraftAttention, Tensor], Tensor]
    ) -> Tensor:
        """One draft step over T tokens [1, T] with their hidden states [1, T, Hd]; the last layer's output."""
        embedded = nn.functional.embedding(tokens, self.embedding).float()
        if self.embedding_norm is not None:
            embedded = self.embedding_norm(embedded)
        normed = hidden if self.hidden_norm is None else self.hidden_norm(hidden)
        parts = {"embedding": embedded, "hidden": normed}
        joined = torch.cat([parts[name] for name in self.record.order], dim=-1)
        if self.fuse is not None:
            x = residual = self.fuse(joined.to(self.dtype)).float()
        else:
            x, residual = joined, normed if self.record.norm_before_residual else hidden
        for index, layer in enumerate(self.layers):
            x = residual = layer(x, residual, partial(attend, index))
        out: Tensor = residual
        return out

    def _finish(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """Log probabilities float32 [T, valid rows] and the state fed back, [T, Hd], of a step's output [1, T, Hd]."""
        normed = out if self.norm is None else self.norm(out)
        logits = ops.linear_transposed(normed[0].to(self.dtype), self.lm_head).float()[:, : self.valid_rows]
        return torch.log_softmax(logits, dim=-1), (normed if self.record.feedback == "normed" else out)[0]

    def _ids(self, rows: Tensor) -> Tensor:
        return rows if self.draft_to_target is None else self.draft_to_target[rows]

    def forward(self, features: Tensor, tokens: Tensor, past: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        """Extend the stable cache by A rows and draft from the last.

        Args:
            features: [1, A, F] of newly committed tokens. tokens: int64 [1, A], what follows each; last the root.
            past: int64 [1], stable rows before them. caches: k then v of each layer, [1, Hkv, S, D].

        Returns:
            (draft_tokens int64 [nodes], draft_parents int64 [nodes] (0 is the root, i + 1 the i-th drafted node),
            draft_logprobs float32 [nodes] (of the path), caches with the new rows)
        """
        rope = (self.get_buffer("rope_cos"), self.get_buffer("rope_sin"))
        columns = torch.arange(self.slots, device=tokens.device)
        positions = (past + torch.arange(tokens.shape[1], device=tokens.device)).unsqueeze(0)
        low = torch.finfo(self.dtype).min
        zero = torch.zeros((), dtype=self.dtype, device=tokens.device)
        floor = torch.full((), low, dtype=self.dtype, device=tokens.device)
        causal = torch.where(columns <= positions[0].unsqueeze(1), zero, floor).unsqueeze(0).unsqueeze(0)
        presents: list[Tensor] = []

        def extend(index: int, attention: DraftAttention, x: Tensor) -> Tensor:
            query, key, value = attention.project(x, rope, positions)
            new = [ops.append_rows(caches[2 * index + i], rows, past) for i, rows in enumerate((key, value))]
            presents.extend(new)
            return attention.over_cache(query, (new[0], new[1]), causal)

        out = self._layers(tokens, self._hidden(features), extend)
        length = past + tokens.shape[1]
        stable = torch.where(columns < length, zero, floor).reshape(1, 1, 1, -1)
        logprobs, state = self._finish(out[:, -1:])
        grown: Grown = self.growth(logprobs, state, self._ids, self._expander(length, rope, presents, stable))
        return (*grown, *presents)

    def _expander(self, length: Tensor, rope: tuple[Tensor, Tensor], caches: list[Tensor], stable: Tensor) -> Expand:
        """Runs the nodes of one depth after another; each sees the ``length`` stable rows and its ancestors."""
        rows_k: list[list[Tensor]] = [[] for _ in self.layers]
        rows_v: list[list[Tensor]] = [[] for _ in self.layers]

        def expand(depth: int, tokens: Tensor, hidden: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
            positions = (length + (depth - 1)).expand(tokens.shape[0]).unsqueeze(0)
            low = torch.finfo(self.dtype).min
            mask = torch.where(seen, 0.0, low).to(self.dtype).unsqueeze(0).unsqueeze(0)

            def attend(index: int, attention: DraftAttention, x: Tensor) -> Tensor:
                query, key, value = attention.project(x, rope, positions)
                rows_k[index].append(key)
                rows_v[index].append(value)
                tree = (torch.cat(rows_k[index], dim=2), torch.cat(rows_v[index], dim=2))
                return attention.over_tree(query, (caches[2 * index], caches[2 * index + 1]), stable, tree, mask)

            return self._finish(self._layers(tokens.unsqueeze(0), hidden.unsqueeze(0), attend))

        return expand

    def values(self, weights: WeightSource) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """(name, reader) of every tensor the head brings; tables of the target are left out."""
        record = self.record
        for name, parameter in self.named_parameters():
            if getattr(record, name, None) != "target":
                yield name, partial(_read, weights, name, parameter, record.blocks.norm_offset)
        for name, table in zip(("cos", "sin"), rope_tables(record.blocks.rope, self.positions), strict=True):
            yield f"rope_{name}", partial(torch.from_numpy(table).to, self.dtype)
        if record.draft_to_target is not None:
            yield "draft_to_target", partial(torch.from_numpy, record.draft_to_target)
        for name, read in self.growth.values():
            yield f"growth.{name}", read


def _read(weights: WeightSource, name: str, parameter: Tensor, norm_offset: float) -> Tensor:
    """A tensor by its canonical name: matrices become operands, norm weights get their offset."""
    tensor = weights.read(name)
    if name.endswith(".weight"):
        tensor = tensor.float() + norm_offset if tensor.ndim == 1 else tensor.t()
    if tensor.shape != parameter.shape:
        raise CheckpointError(f"head tensor {name} has shape {tuple(tensor.shape)}, expected {tuple(parameter.shape)}")
    return tensor.to(parameter.dtype)
