"""How a recurrent drafter grows its tree, apart from the decoder that it asks for log probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from specexport.exporter import ops
from specexport.exporter.heads.trees import DynamicTree, StaticTree

#: Runs the nodes of one depth: (depth from 1, token ids int64 [n], hidden states [n, Hd], seen bool [n, rows so far])
#: -> log probabilities float32 [n, rows of the vocabulary] and the states they feed back, [n, Hd]. Rows are the nodes
#: that were run before and these; ``seen`` marks ancestors and self.
Expand = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
#: Target ids of rows of the head's vocabulary.
Ids = Callable[[Tensor], Tensor]
#: (tokens int64 [nodes], parents int64 [nodes] (0 is the root, i + 1 the i-th node), path log probabilities float32).
Grown = tuple[Tensor, Tensor, Tensor]


class DynamicGrowth(nn.Module):
    """Expand the ``topk`` best nodes of each depth, pool every candidate, keep the best (EAGLE-2)."""

    def __init__(self, tree: DynamicTree) -> None:
        super().__init__()
        self.tree = tree

    def forward(self, logprobs: Tensor, state: Tensor, ids: Ids, expand: Expand) -> Grown:
        """The tree below the root, whose log probabilities [1, rows] and state [1, Hd] are given."""
        k, device = self.tree.topk, logprobs.device
        scores, rows = ops.best(logprobs[0], k)
        level, hidden = ids(rows), state.expand(k, -1)  # [k] nodes of this depth
        itself = torch.eye(k, dtype=torch.bool, device=device)
        seen = itself
        pool = [(level, scores, torch.full((k,), -1, dtype=torch.int64, device=device))]
        numbers = torch.arange(k, device=device)  # of this depth's nodes in the pool
        for depth in range(1, self.tree.depth):
            logprobs, state = expand(depth, level, hidden, seen)
            best, rows = ops.best(logprobs, k)  # [k, k]
            candidates, tokens = (scores.unsqueeze(1) + best).reshape(-1), ids(rows).reshape(-1)
            pool.append((tokens, candidates, numbers.repeat_interleave(k)))
            scores, chosen = ops.best(candidates, k)
            parent = torch.div(chosen, k, rounding_mode="floor")
            level, hidden = tokens[chosen], state[parent]
            numbers = chosen + (k + (depth - 1) * k * k)
            seen = torch.cat([seen[parent], itself], dim=1)
        tokens, scores, parents = (torch.cat(parts) for parts in zip(*pool, strict=True))
        return self._select(tokens, scores, parents)

    def _select(self, tokens: Tensor, scores: Tensor, parents: Tensor) -> Grown:
        """The best of the pool in creation order. A child never beats its parent, and of equal scores the earlier wins
        (the parent), so ancestors are always in."""
        kept = ops.best(scores, self.tree.nodes)[1].sort().values
        above = parents[kept].unsqueeze(1)
        place = ((kept.unsqueeze(0) < above).sum(1) + 1) * (above.squeeze(1) >= 0)
        return tokens[kept], place, scores[kept]

    def values(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """No tensors of its own."""
        return iter(())


class StaticGrowth(nn.Module):
    """Expand the nodes that have children; a child takes its rank among its parent's best (EAGLE-1).

    For each depth d of the nodes that are expanded (the root's is 0): ``picks_d`` are the places of their children in
    the flattened [expanded, k] table of candidates, and ``inner_d`` the nodes to expand among depth d's.
    """

    def __init__(self, tree: StaticTree) -> None:
        super().__init__()
        self.tree = tree
        nodes = tree.template()
        self._tables = {"parents": [parent for parent, _, _ in nodes]}
        self.ranks: list[int] = []  # k of each depth
        with_children = {parent for parent, _, _ in nodes}
        expanded = [0]
        for depth in range(tree.depth):
            children = [(number, *node[:2]) for number, node in enumerate(nodes, 1) if node[2] == depth + 1]
            k = 1 + max(rank for _, _, rank in children)
            self.ranks.append(k)
            self._tables[f"picks_{depth}"] = [expanded.index(parent) * k + rank for _, parent, rank in children]
            inner = [place for place, (number, _, _) in enumerate(children) if number in with_children]
            expanded = [children[place][0] for place in inner]
            if inner:
                self._tables[f"inner_{depth + 1}"] = inner
        for name, table in self._tables.items():
            self.register_buffer(name, torch.empty(len(table), dtype=torch.int64))

    def forward(self, logprobs: Tensor, state: Tensor, ids: Ids, expand: Expand) -> Grown:
        """The tree below the root, whose log probabilities [1, rows] and state [1, Hd] are given."""
        scores = logprobs.new_zeros(1)  # of the expanded nodes
        seen: Tensor | None = None
        grown: list[tuple[Tensor, Tensor]] = []
        for depth, k in enumerate(self.ranks):
            best, rows = ops.best(logprobs, k)
            picks = self.get_buffer(f"picks_{depth}")
            parent = torch.div(picks, k, rounding_mode="floor")  # of each child, among the expanded
            tokens, paths = ids(rows).reshape(-1)[picks], scores[parent] + best.reshape(-1)[picks]
            grown.append((tokens, paths))
            if depth + 1 < len(self.ranks):
                inner = self.get_buffer(f"inner_{depth + 1}")
                above = parent[inner]
                itself = torch.eye(inner.shape[0], dtype=torch.bool, device=logprobs.device)
                seen = itself if seen is None else torch.cat([seen[above], itself], dim=1)
                scores = paths[inner]
                logprobs, state = expand(depth + 1, tokens[inner], state[above], seen)
        tokens, paths = (torch.cat(parts) for parts in zip(*grown, strict=True))
        return tokens, self.get_buffer("parents").clone(), paths

    def values(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """(name, reader) of the tables."""
        for name, table in self._tables.items():
            yield name, partial(torch.tensor, table, dtype=torch.int64)
