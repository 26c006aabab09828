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
from specexport.exporter.heads.attention import DraftAttention, Rows
from specexport.exporter.heads.growth import DynamicGrowth, Expand, Grown, StaticGrowth
from specexport.exporter.heads.record import RecurrentRecord
from specexport.exporter.heads.step import DraftStep, read_parameter
from specexport.exporter.heads.trees import DynamicTree, StaticTree
from specexport.exporter.layers import Linear, RMSNorm
from specexport.exporter.rope import rope_tables
from specexport.exporter.weights import WeightSource


class RecurrentDrafter(DraftStep):
    """The drafter graph.

    With K > 1 prediction layers, row p of every layer's cache is that of token p + 1; layer k (from 1) joins it with
    the output of layer k - 1 at row p - 1, so its rows start at k - 1. A node of the tree at depth d goes through the
    layers after the d-th: the next one drafts from it, the others only keep its row for the nodes below it.

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
        super().__init__(record, dtype)
        self.chain = nn.ModuleList(DraftStep(record, dtype) for _ in range(record.prediction_layers - 1))
        self.slots = slots
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

    def _embedded(self, tokens: Tensor) -> Tensor:
        """float32 [1, T, He] of tokens [1, T]."""
        rows = nn.functional.embedding(tokens, self.embedding).float()
        return rows if self.record.embedding_scale == 1.0 else rows * self.record.embedding_scale

    def _logprobs(self, rows: Tensor, noise: Tensor) -> Tensor:
        """Log probabilities float32 [T, valid rows] of what the lm_head reads, [1, T, Hd].

        Args:
            noise: [valid rows], added to the logits.
        """
        logits = ops.linear_transposed(rows[0].to(self.dtype), self.lm_head).float()[:, : self.valid_rows]
        return torch.log_softmax(logits + noise, dim=-1)

    def _ids(self, rows: Tensor) -> Tensor:
        return rows if self.draft_to_target is None else self.draft_to_target[rows]

    def forward(
        self, features: Tensor, tokens: Tensor, past: Tensor, noise: Tensor, *caches: Tensor
    ) -> tuple[Tensor, ...]:
        """Extend the stable cache by A rows and draft from the last.

        Args:
            features: [1, A, F] of newly committed tokens. tokens: int64 [1, A], what follows each; last the root.
            past: int64 [1], stable rows before them. noise: float32 [depth, valid rows], what is added to the logits of
                each depth (``runtime.drafters.noise``). caches: those of
                :meth:`RecurrentRecord.cache_shapes`.

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
        presents: list[Tensor] = []
        steps: list[DraftStep] = [self, *self.chain]
        count = self.record.blocks.num_layers

        def extend(step: int, mask: Tensor, index: int, attention: DraftAttention, x: Tensor) -> Tensor:
            query, key, value = attention.project(x, rope, positions)
            first = 2 * (step * count + index)
            new = [ops.append_rows(caches[first + i], rows, past) for i, rows in enumerate((key, value))]
            presents.extend(new)
            if step == len(steps) - 1 and index == count - 1:  # what the tree grows from; no row before it is read
                query, mask = query.newest(), mask[..., -1:, :]
            return attention.over_cache(query, (new[0], new[1]), mask)

        embedded, hidden = self._embedded(tokens), self._hidden(features)
        states: list[Tensor] = []
        ends: list[tuple[Tensor, Tensor]] = []
        for number, step in enumerate(steps):
            if number:
                before = caches[-1][:, number - 1].index_select(1, (past - 1).clamp(min=0)).float()
                hidden = torch.cat([before, states[-1][:, :-1].to(self.dtype).float()], dim=1)
            seen = columns <= positions[0].unsqueeze(1)
            if number:  # its own row is there for rows before the first, which nothing reads
                seen = seen & (((columns - past) >= (number - past)) | (columns == positions[0].unsqueeze(1)))
            mask = torch.where(seen, zero, floor).unsqueeze(0).unsqueeze(0)
            out = step.run(embedded, hidden, partial(extend, number, mask), newest=number == len(steps) - 1)
            states.append(step.ends(out)[1])
            ends.append(step.ends(out[:, -1:]))
        if self.chain:
            presents.append(ops.append_rows(caches[-1], torch.stack(states[:-1], dim=1).to(self.dtype), past))
        length = past + tokens.shape[1]
        stable = []
        for number in range(len(steps)):
            seen = columns < length
            if number:  # not columns >= number, a constant of S entries that no lowering would cut
                seen = seen & ((columns - past) >= (number - past))
            stable.append(torch.where(seen, zero, floor).reshape(1, 1, 1, -1))
        expand = self._expander(steps, length, rope, presents, stable, noise)
        state = torch.cat([fed[0] for _, fed in ends], dim=-1)
        grown: Grown = self.growth(self._logprobs(ends[0][0], noise[0]), state, self._ids, expand)
        return (*grown, *presents)

    def _expander(
        self,
        steps: list[DraftStep],
        length: Tensor,
        rope: tuple[Tensor, Tensor],
        caches: list[Tensor],
        stable: list[Tensor],
        noise: Tensor,
    ) -> Expand:
        """Runs the nodes of one depth after another; each sees the ``length`` stable rows and its ancestors.

        The state of a node is what its prediction layers feed on, side by side, from the one that drafts from it.
        """
        count, width, last = self.record.blocks.num_layers, self.record.blocks.hidden_size, len(steps) - 1
        rows: list[list[Rows]] = [[] for _ in range(count * len(steps))]
        sizes: list[int] = []  # of each depth so far

        def expand(depth: int, tokens: Tensor, state: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
            positions = (length + (depth - 1)).expand(tokens.shape[0]).unsqueeze(0)
            embedded = self._embedded(tokens.unsqueeze(0))
            sizes.append(tokens.shape[0])
            masks = [self._tree_mask(seen, length, sizes, step) for step in range(len(steps))]

            def attend(step: int, index: int, attention: DraftAttention, x: Tensor) -> Tensor:
                query, key, value = attention.project(x, rope, positions)
                place = step * count + index
                rows[place].append((key, value))
                keys, values = zip(*rows[place], strict=True)
                tree = (torch.cat(keys, dim=2), torch.cat(values, dim=2))
                cache = (caches[2 * place], caches[2 * place + 1])
                return attention.over_tree(query, cache, stable[step], tree, masks[step])

            drafting, held = min(depth, last), min(depth - 1, last)
            ends = []
            for number in range(drafting, last + 1):
                source = number if depth > number else number - 1  # past the last layer, its own output
                hidden = state[:, (source - held) * width : (source - held + 1) * width].unsqueeze(0)
                ends.append(steps[number].ends(steps[number].run(embedded, hidden, partial(attend, number))))
            fed = torch.cat([end[0] for _, end in ends], dim=-1)
            return self._logprobs(ends[0][0], noise[depth]), fed

        return expand

    def _tree_mask(self, seen: Tensor, length: Tensor, sizes: list[int], step: int) -> Tensor:
        """Additive mask [1, 1, n, rows so far] of the deepest nodes so far in one prediction layer.

        After a prompt shorter than the chain, nodes near the root stand before that layer's first row.
        """
        if step > 1:
            there = [(length + depth >= step).expand(size) for depth, size in enumerate(sizes[:-1])]
            itself = torch.ones(sizes[-1], dtype=torch.bool, device=seen.device)
            seen = seen & torch.cat([*there, itself])
        return torch.where(seen, 0.0, torch.finfo(self.dtype).min).to(self.dtype).unsqueeze(0).unsqueeze(0)

    def values(self, weights: WeightSource) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """(name, reader) of every tensor the head brings; tables of the target are left out."""
        record = self.record
        for name, parameter in self.named_parameters():
            if getattr(record, name, None) != "target":
                yield name, partial(read_parameter, weights, name, parameter, record.blocks)
        for name, table in zip(("cos", "sin"), rope_tables(record.blocks.rope, self.positions), strict=True):
            yield f"rope_{name}", partial(torch.from_numpy(table).to, self.dtype)
        if record.draft_to_target is not None:
            yield "draft_to_target", partial(torch.from_numpy, record.draft_to_target)
        for name, read in self.growth.values():
            yield f"growth.{name}", read
