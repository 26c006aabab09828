"""Recurrent drafters as plain loops in double precision: what the torch module and the graph must give."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray

from specexport.exporter.config import RopeConfig
from specexport.exporter.graph_file import load_state
from specexport.exporter.heads.record import BlockConfig, HeadLineage, RecurrentRecord
from specexport.exporter.heads.recurrent import RecurrentDrafter
from specexport.exporter.heads.trees import DynamicTree, StaticTree
from specexport.runtime.contract import FEATURES, NOISE, PAST, TOKENS

WIDTH, TARGET, VOCAB, DRAFT, SLOTS = 16, 12, 40, 23, 32
#: Most rows of a reference.
ROWS = 4096

_EAGLE3: dict[str, Any] = {
    "method": "eagle3",
    "captures": (0, 1, 2),
    "draft_vocab_size": DRAFT,
    "reduce": True,
    "fusion": "concat",
    "embedding_norm": True,
    "hidden_norm": True,
    "final_norm": True,
    "draft_to_target": np.sort(np.random.default_rng(8).permutation(VOCAB)[:DRAFT]),
}
_EAGLE1: dict[str, Any] = {"method": "eagle1", "target_hidden_size": WIDTH, "fuse_bias": True}
_MTP: dict[str, Any] = {
    "method": "mtp",
    "target_hidden_size": WIDTH,
    "order": ("hidden", "embedding"),
    "embedding_norm": True,
    "hidden_norm": True,
    "final_norm": True,
    "feedback": "normed",
}
#: name -> (record, blocks)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eagle3": (_EAGLE3, {}),
    "eagle3-speculators": (
        {**_EAGLE3, "norm_before_residual": True, "reduce_norm": "concat", "feedback": "normed"},
        {},
    ),
    "eagle3-each-bias": ({**_EAGLE3, "reduce_norm": "each", "reduce_bias": True}, {"num_layers": 2, "qk_norm": True}),
    "eagle3-full-vocabulary": ({**_EAGLE3, "draft_vocab_size": VOCAB, "draft_to_target": None}, {"head_dim": 6}),
    "eagle1": (_EAGLE1, {"first_input_norm": False}),
    "mtp": (_MTP, {"attention_bias": True}),
    "mtp-offset": ({**_MTP, "order": ("embedding", "hidden")}, {"norm_offset": 1.0, "mlp_bias": True}),
}


def record(case: str) -> RecurrentRecord:
    changes, blocks = CASES[case]
    block: dict[str, Any] = {
        "num_layers": 1,
        "hidden_size": WIDTH,
        "intermediate_size": 20,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 4,
        "norm_eps": 1e-5,
        "activation": "silu",
        "attention_scale": 0.4,
        **blocks,
    }
    block["rope"] = RopeConfig("default", 100.0, block["head_dim"], 64)
    base: dict[str, Any] = {
        "dialect": "test",
        "captures": ("final",),
        "target_hidden_size": TARGET,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "reduce": False,
        "reduce_bias": False,
        "reduce_norm": "none",
        "fusion": "project",
        "fuse_bias": False,
        "order": ("embedding", "hidden"),
        "embedding_norm": False,
        "hidden_norm": False,
        "norm_before_residual": False,
        "final_norm": False,
        "feedback": "raw",
        "embedding": "head",
        "embedding_size": WIDTH,
        "lm_head": "head",
        "draft_to_target": None,
        "max_positions": 64,
        "lineage": HeadLineage(),
    }
    return RecurrentRecord(**{**base, **changes, "blocks": BlockConfig(**block)})


class Weights:
    """Tensors in the checkpoint's layout."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    @staticmethod
    def random(record: RecurrentRecord) -> Weights:
        """Of the shapes that the record asks for."""
        generator = torch.Generator().manual_seed(5)
        tensors: dict[str, torch.Tensor] = {}
        with torch.device("meta"):
            module = RecurrentDrafter(record, 1, torch.float32, DynamicTree(1, 1, 1), valid_vocab=VOCAB)
        for name, parameter in module.named_parameters():
            tensor = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                tensor = 1 + 0.2 * tensor - record.blocks.norm_offset
            elif parameter.ndim == 2:
                # Without a final norm logits would grow until log probabilities tie at 0.
                gain = 0.4 if name == "lm_head" and not record.final_norm else 1.2
                tensor = tensor * parameter.shape[-1] ** -0.5 * gain
                if name.endswith(".weight"):
                    tensor = tensor.t().contiguous()
            tensors[name] = tensor
        return Weights(tensors)

    def names(self) -> Iterable[str]:
        return self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]


@dataclass
class Entry:
    """One row of the draft: its token, incoming hidden state, position and what it may attend to (itself last)."""

    token: int
    hidden: NDArray[np.float64]
    position: int
    visible: list[int]
    out: NDArray[np.float64] | None = None


def best(logprobs: NDArray[np.float64]) -> list[int]:
    """Rows from the most probable; of equal ones the first."""
    return sorted(range(len(logprobs)), key=lambda row: (-logprobs[row], row))


class Reference:
    """The drafter written out from the record, one row at a time, no caches, double precision."""

    def __init__(self, record: RecurrentRecord, weights: Weights) -> None:
        self.r, self.w = record, {name: tensor.double().numpy() for name, tensor in weights.tensors.items()}
        self.entries: list[Entry] = []
        self.first = 0  # position that the root's children are at, and what is added to the logits from there on
        self.noise: NDArray[np.float32] | None = None
        shape = (record.blocks.num_layers, ROWS, record.blocks.num_kv_heads, record.blocks.head_dim)
        self.keys, self.values = np.zeros(shape), np.zeros(shape)

    def norm(self, name: str, x: NDArray[np.float64]) -> NDArray[np.float64]:
        scale = self.w[f"{name}.weight"] + self.r.blocks.norm_offset
        return x / np.sqrt((x * x).mean() + self.r.blocks.norm_eps) * scale

    def linear(self, name: str, x: NDArray[np.float64]) -> NDArray[np.float64]:
        return self.w[f"{name}.weight"] @ x + self.w.get(f"{name}.bias", 0.0)

    def hidden(self, features: NDArray[np.float64]) -> NDArray[np.float64]:
        r = self.r
        if r.reduce_norm == "concat":
            features = self.norm("reduce_norm", features)
        if r.reduce_norm == "each":
            parts = np.split(features, len(r.captures))
            features = np.concatenate([self.norm(f"reduce_norms.{i}", part) for i, part in enumerate(parts)])
        return self.linear("reduce", features) if r.reduce else features

    def turn(self, x: NDArray[np.float64], position: int) -> NDArray[np.float64]:
        half = len(x) // 2
        out = x.copy()
        for i in range(half):
            angle = position * self.r.blocks.rope.theta ** (-2 * i / len(x))
            out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
            out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
        return out

    def add(self, token: int, hidden: NDArray[np.float64], position: int, visible: list[int]) -> int:
        index = len(self.entries)
        entry = Entry(token, hidden, position, [*visible, index])
        self.entries.append(entry)
        r, b = self.r, self.r.blocks
        embedded = self.w["embedding"][token]
        embedded = self.norm("embedding_norm", embedded) if r.embedding_norm else embedded
        normed = self.norm("hidden_norm", hidden) if r.hidden_norm else hidden
        joined = np.concatenate([{"embedding": embedded, "hidden": normed}[name] for name in r.order])
        if r.fusion == "project":
            x = residual = self.linear("fuse", joined)
        else:
            x, residual = joined, normed if r.norm_before_residual else hidden
        for layer in range(b.num_layers):
            place = f"layers.{layer}."
            if f"{place}input_norm.weight" in self.w and (b.first_input_norm or layer > 0):
                x = self.norm(f"{place}input_norm", x)
            residual = residual + self.attend(layer, x, entry, index)
            y = self.norm(f"{place}mlp_norm", residual)
            x = residual = residual + self.mlp(f"{place}mlp.", y)
        entry.out = residual
        return index

    def mlp(self, place: str, y: NDArray[np.float64]) -> NDArray[np.float64]:
        gate = self.linear(f"{place}gate_proj", y)
        gate = gate / (1 + np.exp(-gate))
        return self.linear(f"{place}down_proj", gate * self.linear(f"{place}up_proj", y))

    def attend(self, layer: int, x: NDArray[np.float64], entry: Entry, index: int) -> NDArray[np.float64]:
        b, place = self.r.blocks, f"layers.{layer}.attention."
        q, k, v = (self.linear(f"{place}{name}_proj", x).reshape(-1, b.head_dim) for name in "qkv")
        if b.qk_norm:
            q = np.stack([self.norm(f"{place}q_norm", head) for head in q])
            k = np.stack([self.norm(f"{place}k_norm", head) for head in k])
        self.keys[layer, index], self.values[layer, index] = [self.turn(head, entry.position) for head in k], v
        mixed = []
        for number, head in enumerate(q):
            kv = number // (b.num_heads // b.num_kv_heads)
            keys, values = (rows[layer, entry.visible, kv] for rows in (self.keys, self.values))
            scores = b.attention_scale * keys @ self.turn(head, entry.position)
            chances = np.exp(scores - scores.max())
            mixed.append(chances / chances.sum() @ values)
        return self.linear(f"{place}o_proj", np.concatenate(mixed))

    def finish(self, index: int, valid: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        out = self.entries[index].out
        assert out is not None
        normed = self.norm("norm", out) if self.r.final_norm else out
        logits = self.w["lm_head"] @ normed
        logits = logits if self.r.draft_to_target is not None else logits[:valid]
        if self.noise is not None:
            logits = logits + self.noise[self.entries[index].position + 1 - self.first]
        top = logits.max()
        return logits - top - np.log(np.exp(logits - top).sum()), normed if self.r.feedback == "normed" else out

    def token(self, row: int) -> int:
        return row if self.r.draft_to_target is None else int(self.r.draft_to_target[row])

    def grow(self, tree: DynamicTree | StaticTree, last: int, valid: int) -> tuple[list[int], list[int], list[float]]:
        """(tokens, parents, log probabilities) of the tree below the root that follows entry ``last``."""
        if isinstance(tree, DynamicTree):
            return self.grow_dynamic(last, valid, tree.depth, tree.topk, tree.nodes)
        return self.grow_static(last, valid, sorted(tree.paths, key=lambda path: (len(path), path)))

    def grow_static(
        self, last: int, valid: int, paths: list[tuple[int, ...]]
    ) -> tuple[list[int], list[int], list[float]]:
        """Each path walked on its own: run every node above it, take its rank of what the last of them predicts."""
        entries = {(): last}
        tokens: dict[tuple[int, ...], int] = {}
        scores: dict[tuple[int, ...], float] = {(): 0.0}
        for path in paths:
            above = path[:-1]
            if above not in entries:
                grandparent = entries[above[:-1]]
                _, state = self.finish(grandparent, valid)
                position = self.entries[last].position + len(above)
                entries[above] = self.add(tokens[above], state, position, self.entries[grandparent].visible)
            logprobs, _ = self.finish(entries[above], valid)
            row = best(logprobs)[path[-1]]
            tokens[path], scores[path] = self.token(row), scores[above] + logprobs[row]
        place = {path: number for number, path in enumerate([(), *paths])}
        return [tokens[path] for path in paths], [place[path[:-1]] for path in paths], [scores[path] for path in paths]

    def grow_dynamic(
        self, last: int, valid: int, depth: int, topk: int, nodes: int
    ) -> tuple[list[int], list[int], list[float]]:
        """EAGLE-2's rules, on lists of dictionaries."""
        base = list(self.entries[last].visible)
        position = self.entries[last].position
        logprobs, state = self.finish(last, valid)
        pool: list[dict[str, Any]] = []

        def candidates(logprobs: NDArray[np.float64], parent: int | None, score: float) -> list[int]:
            made = []
            for row in best(logprobs)[:topk]:
                pool.append(
                    {"token": self.token(row), "parent": parent, "score": score + logprobs[row], "number": len(pool)}
                )
                made.append(pool[-1]["number"])
            return made

        level = candidates(logprobs, None, 0.0)
        above = dict.fromkeys(level, (state, base))
        for step in range(1, depth):
            offered: list[int] = []
            deeper: dict[int, tuple[NDArray[np.float64], list[int]]] = {}
            for number in level:
                hidden, visible = above[number]
                entry = self.add(pool[number]["token"], hidden, position + step, visible)
                logprobs, state = self.finish(entry, valid)
                for child in candidates(logprobs, number, pool[number]["score"]):
                    deeper[child] = state, self.entries[entry].visible
                    offered.append(child)
            level = sorted(offered, key=lambda number: (-pool[number]["score"], number))[:topk]
            above = deeper
        kept = sorted(sorted(range(len(pool)), key=lambda number: (-pool[number]["score"], number))[:nodes])
        place = {number: index + 1 for index, number in enumerate(kept)} | {None: 0}
        return (
            [pool[number]["token"] for number in kept],
            [place[pool[number]["parent"]] for number in kept],
            [pool[number]["score"] for number in kept],
        )


#: Tokens, parents and log probabilities of a tree.
Drafted = tuple[list[int], list[int], NDArray[np.float64]]


def expected(
    heads: RecurrentRecord,
    weights: Weights,
    tree: DynamicTree | StaticTree,
    features: NDArray[np.float32],
    tokens: Sequence[int],
    valid: int = VOCAB,
    noise: NDArray[np.float32] | None = None,
) -> Drafted:
    """The reference's tree after the last of ``tokens``, whose stable rows come from ``features``.

    Args:
        noise: [depth, rows], added to the logits of each depth; None: nothing.
    """
    reference = Reference(heads, weights)
    for position, (token, row) in enumerate(zip(tokens, features, strict=True)):
        reference.add(token, reference.hidden(row.astype(np.float64)), position, list(range(position)))
    reference.first, reference.noise = len(tokens), noise
    found, parents, scores = reference.grow(tree, len(tokens) - 1, valid)
    return found, parents, np.array(scores)


def module_of(
    heads: RecurrentRecord, weights: Weights, tree: DynamicTree | StaticTree, *, slots: int = SLOTS, valid: int = VOCAB
) -> RecurrentDrafter:
    """The torch module with all its tables, whosever they are."""
    own = replace(heads, embedding="head", lm_head="head")
    module = RecurrentDrafter(own, slots, torch.float32, tree, valid_vocab=valid).eval()
    load_state(module, module.values(weights))
    return module


def drafted(module: RecurrentDrafter, features: NDArray[np.float32], tokens: Sequence[int]) -> Drafted:
    """The module's tree from an empty cache."""
    caches = [torch.zeros(shape) for shape in module.record.cache_shapes(module.slots).values()]
    silence = torch.zeros(module.growth.tree.depth, module.valid_rows)
    with torch.no_grad():
        found, parents, scores, *_ = module(
            torch.from_numpy(features)[None], torch.tensor([list(tokens)]), torch.tensor([0]), silence, *caches
        )
    return found.tolist(), parents.tolist(), scores.double().numpy()


def distance(mine: Drafted, other: Drafted) -> float:
    """Largest relative error of a log probability; infinite where the trees differ."""
    if mine[:2] != other[:2]:
        return math.inf
    return float((np.abs(mine[2] - other[2]) / np.maximum(1, np.abs(other[2]))).max())


def random_input(heads: RecurrentRecord, count: int, seed: int = 1) -> tuple[NDArray[np.float32], list[int]]:
    """Features [count, F] of the target and the tokens that follow."""
    rng = np.random.default_rng(seed)
    width = heads.target_hidden_size * len(heads.captures)
    return rng.standard_normal((count, width)).astype(np.float32), rng.integers(0, VOCAB - 3, count).tolist()


def run_graph(path: Path, record: RecurrentRecord) -> Any:
    session = ort.InferenceSession(str(path))
    names = [value.name for value in session.get_outputs()]
    caches = {name: np.zeros(shape, np.float32) for name, shape in record.cache_shapes(SLOTS).items()}
    assert [value.name for value in session.get_inputs() if value.name.startswith("past_")] == list(caches)

    silence = np.zeros(next(value.shape for value in session.get_inputs() if value.name == NOISE), np.float32)

    def run(
        features: NDArray[np.float32], tokens: list[int], past: int, noise: NDArray[np.float32] = silence
    ) -> dict[str, NDArray[Any]]:
        feeds = {FEATURES: features[None], TOKENS: np.array([tokens]), PAST: np.array([past]), NOISE: noise, **caches}
        outputs = dict(zip(names, session.run(None, feeds), strict=True))
        for name in caches:
            caches[name] = outputs[name.replace("past", "present")]
        return outputs

    return run
