"""Layers that are not Llama's, and chains of prediction layers, as plain loops in double precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specexport.exporter.heads.record import RecurrentRecord
from specexport.exporter.heads.trees import DynamicTree
from specexport.exporter.rope import inv_freq
from tests.exporter.draft_reference import Entry, Reference, Weights, best

Row = NDArray[np.float64]


def sigmoid(x: Row) -> Row:
    return 1 / (1 + np.exp(-x))


def softmax(x: Row) -> Row:
    chances = np.exp(x - x.max())
    return chances / chances.sum()


class BlockReference(Reference):
    """:class:`Reference` with gated and latent attention and with experts."""

    def __init__(self, record: RecurrentRecord, weights: Weights) -> None:
        super().__init__(record, weights)
        self.rows: list[tuple[Row, Row]] = []  # keys and values [heads, width] of each entry
        self.frequencies, self.attention_factor = inv_freq(record.blocks.rope, 64)

    def turn(self, x: Row, position: int) -> Row:
        """The first 2 n channels turn, channel i with i + n, or with its neighbour."""
        count, latent = len(self.frequencies), self.r.blocks.latent
        out = x.copy()
        for i, frequency in enumerate(self.frequencies.astype(np.float64)):
            a, b = (2 * i, 2 * i + 1) if latent is not None and latent.interleaved else (i, i + count)
            cos, sin = np.cos(position * frequency), np.sin(position * frequency)
            out[a] = self.attention_factor * (x[a] * cos - x[b] * sin)
            out[b] = self.attention_factor * (x[b] * cos + x[a] * sin)
        return out

    def attend(self, layer: int, x: Row, entry: Entry, index: int) -> Row:
        assert layer == 0
        place, b = "layers.0.attention.", self.r.blocks
        queries, gate, keys, values = self.latent(place, x, entry) if b.latent else self.gated(place, x, entry)
        self.rows.append((keys, values))
        mixed = []
        for number, query in enumerate(queries):
            mine = number // (len(queries) // len(keys))
            scores = np.array([b.attention_scale * self.rows[i][0][mine] @ query for i in entry.visible])
            mixed.append(softmax(scores) @ np.stack([self.rows[i][1][mine] for i in entry.visible]))
        return self.linear(f"{place}o_proj", np.concatenate(mixed) * gate)

    def gated(self, place: str, x: Row, entry: Entry) -> tuple[Row, Row, Row, Row]:
        b = self.r.blocks
        both = self.linear(f"{place}q_proj", x).reshape(b.num_heads, -1)
        q, gate = (both[:, : b.head_dim], sigmoid(both[:, b.head_dim :])) if b.gated else (both, np.ones(both.shape))
        k, v = (self.linear(f"{place}{name}_proj", x).reshape(-1, b.head_dim) for name in "kv")
        if b.qk_norm:
            q, k = ([self.norm(f"{place}{n}_norm", head) for head in heads] for n, heads in (("q", q), ("k", k)))
        turned = [np.stack([self.turn(head, entry.position) for head in heads]) for heads in (q, k)]
        return turned[0], gate.reshape(-1), turned[1], v

    def latent(self, place: str, x: Row, entry: Entry) -> tuple[Row, float, Row, Row]:
        """As in the paper: keys and values are made of the latent and kept whole."""
        b, c = self.r.blocks, self.r.blocks.latent
        assert c is not None
        compressed = self.linear(f"{place}kv_a_proj", x)
        latent = self.latent_norm(f"{place}kv_a_norm", compressed[: c.rank])
        shared = self.turn(compressed[c.rank :], entry.position)
        if c.query_rank is None:
            q = self.linear(f"{place}q_proj", x)
        else:
            q = self.linear(
                f"{place}q_b_proj", self.latent_norm(f"{place}q_a_norm", self.linear(f"{place}q_a_proj", x))
            )
        queries = [
            np.concatenate([head[: c.nope_dim], self.turn(head[c.nope_dim :], entry.position)])
            for head in q.reshape(b.num_heads, -1)
        ]
        both = self.linear(f"{place}kv_b_proj", latent).reshape(b.num_heads, -1)
        keys = np.stack([np.concatenate([head[: c.nope_dim], shared]) for head in both])
        return np.stack(queries), 1.0, keys, both[:, c.nope_dim :]

    def latent_norm(self, name: str, x: Row) -> Row:
        return x / np.sqrt((x * x).mean() + 1e-6) * self.w[f"{name}.weight"]

    def mlp(self, place: str, y: Row) -> Row:
        c = self.r.blocks.experts
        if c is None:
            return super().mlp(place, y)
        logits = self.w[f"{place}router"] @ y
        scores = sigmoid(logits) if c.scores == "sigmoid" else softmax(logits)
        ranked = scores + self.w.get(f"{place}correction", 0.0)
        size = c.count // c.groups
        group_scores = [sum(sorted(ranked[g * size : (g + 1) * size])[-2:]) for g in range(c.groups)]
        kept = sorted(range(c.groups), key=lambda g: -group_scores[g])[: c.top_groups]
        allowed = [e for e in range(c.count) if e // size in kept]
        chosen = sorted(allowed, key=lambda e: -ranked[e])[: c.top]
        total = sum(scores[e] for e in chosen) if c.normalise else 1.0
        out = np.zeros(len(y))
        for expert in chosen:
            out += c.scale * scores[expert] / total * super().mlp(f"{place}experts.{expert}.", y)
        if c.shared_size:
            gate = sigmoid(self.linear(f"{place}shared_gate", y)) if c.shared_gate else 1.0
            out += gate * super().mlp(f"{place}shared.", y)
        return out


class Chain:
    """Prediction layers by the paper's indices (DeepSeek-V3, arXiv 2412.19437, section 2.2), everything from scratch.

    Layer k (from 1) joins its input's state at index i with token i + k; what it gives at the last index that has a
    target's state predicts the token after. Past the last layer, that layer goes on with its own states.
    """

    def __init__(self, record: RecurrentRecord, weights: Mapping[str, torch.Tensor]) -> None:
        self.record, tables = record, {name: weights[name] for name in ("embedding", "lm_head")}
        self.weights = [Weights({**weights})]
        for index in range(record.prediction_layers - 1):
            prefix = f"chain.{index}."
            own = {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}
            self.weights.append(Weights(own | tables))

    def logprobs(self, features: NDArray[np.float32], tokens: Sequence[int], valid: int, path: Sequence[int]) -> Row:
        """Of what follows ``path``, drafted after ``tokens`` (token i follows the one whose state is features[i])."""
        everything, count = [*tokens, *path], len(features)
        states: list[Row] = []
        for number, weights in enumerate(self.weights[: len(path) + 1]):
            layer = BlockReference(self.record, weights)
            inputs = states if number else [layer.hidden(row.astype(np.float64)) for row in features]
            states = []
            for index in range(count):
                layer.add(everything[index + number], inputs[index], index, list(range(index)))
                states.append(layer.finish(index, valid)[1])
        for index in range(count, count + len(path) + 1 - len(self.weights)):
            layer.add(everything[index + len(self.weights) - 1], states[-1], index, list(range(index)))
            states.append(layer.finish(index, valid)[1])
        return layer.finish(len(states) - 1, valid)[0]


def grow(
    logprobs: Callable[[Sequence[int]], Row], tree: DynamicTree
) -> tuple[list[int], list[int], NDArray[np.float64]]:
    """EAGLE-2's tree, each node from its path alone: (tokens, parents, log probabilities)."""
    pool: list[tuple[tuple[int, ...], float]] = []
    level: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(tree.depth):
        offered = []
        for path, score in level:
            found = logprobs(path)
            offered += [((*path, row), score + found[row]) for row in best(found)[: tree.topk]]
        pool += offered
        level = [offered[i] for i in sorted(range(len(offered)), key=lambda i: (-offered[i][1], i))[: tree.topk]]
    kept = sorted(sorted(range(len(pool)), key=lambda i: (-pool[i][1], i))[: tree.nodes])
    place = {pool[number][0]: index + 1 for index, number in enumerate(kept)} | {(): 0}
    paths = [pool[number][0] for number in kept]
    return [p[-1] for p in paths], [place[p[:-1]] for p in paths], np.array([pool[number][1] for number in kept])
