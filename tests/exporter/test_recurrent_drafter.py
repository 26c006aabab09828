"""Recurrent drafters: torch module and exported graph against plain loops in double precision."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray

from specexport.exporter.config import RopeConfig
from specexport.exporter.graph_file import load_state
from specexport.exporter.heads.export import export_recurrent
from specexport.exporter.heads.record import BlockConfig, HeadLineage, RecurrentRecord
from specexport.exporter.heads.recurrent import RecurrentDrafter
from specexport.runtime.contract import DRAFT_LOGPROBS, DRAFT_PARENTS, DRAFT_TOKENS, FEATURES, PAST, TOKENS

WIDTH, TARGET, VOCAB, DRAFT, SLOTS = 16, 12, 40, 23, 32
DEPTH, K, NODES = 4, 3, 9

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
    """Random tensors of the shapes a module asks for, in the checkpoint's layout."""

    def __init__(self, module: RecurrentDrafter) -> None:
        generator = torch.Generator().manual_seed(5)
        self.tensors: dict[str, torch.Tensor] = {}
        for name, parameter in module.named_parameters():
            tensor = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                tensor = 1 + 0.2 * tensor - module.record.blocks.norm_offset
            elif parameter.ndim == 2:
                # Without a final norm logits would grow until log probabilities tie at 0.
                gain = 0.4 if name == "lm_head" and not module.record.final_norm else 1.2
                tensor = tensor * parameter.shape[-1] ** -0.5 * gain
                if name.endswith(".weight"):
                    tensor = tensor.t().contiguous()
            self.tensors[name] = tensor

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


class Reference:
    """The drafter written out from the record, one row at a time, no caches, double precision."""

    def __init__(self, record: RecurrentRecord, weights: Weights) -> None:
        self.r, self.w = record, {name: tensor.double().numpy() for name, tensor in weights.tensors.items()}
        self.entries: list[Entry] = []
        self.keys: dict[tuple[int, int], Any] = {}

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
            if f"{place}input_norm.weight" in self.w:
                x = self.norm(f"{place}input_norm", x)
            residual = residual + self.attend(layer, x, entry, index)
            y = self.norm(f"{place}mlp_norm", residual)
            gate = self.linear(f"{place}mlp.gate_proj", y)
            gate = gate / (1 + np.exp(-gate))
            x = residual = residual + self.linear(f"{place}mlp.down_proj", gate * self.linear(f"{place}mlp.up_proj", y))
        entry.out = residual
        return index

    def attend(self, layer: int, x: NDArray[np.float64], entry: Entry, index: int) -> NDArray[np.float64]:
        b, place = self.r.blocks, f"layers.{layer}.attention."
        q, k, v = (self.linear(f"{place}{name}_proj", x).reshape(-1, b.head_dim) for name in "qkv")
        if b.qk_norm:
            q = np.stack([self.norm(f"{place}q_norm", head) for head in q])
            k = np.stack([self.norm(f"{place}k_norm", head) for head in k])
        self.keys[layer, index] = np.stack([self.turn(head, entry.position) for head in k]), v
        mixed = []
        for number, head in enumerate(q):
            kv = number // (b.num_heads // b.num_kv_heads)
            rows = [self.keys[layer, other] for other in entry.visible]
            turned = self.turn(head, entry.position)
            scores = np.array([b.attention_scale * keys[kv] @ turned for keys, _ in rows])
            chances = np.exp(scores - scores.max())
            chances /= chances.sum()
            mixed.append(sum(chance * values[kv] for chance, (_, values) in zip(chances, rows, strict=True)))
        return self.linear(f"{place}o_proj", np.concatenate(mixed))

    def finish(self, index: int, valid: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        out = self.entries[index].out
        assert out is not None
        normed = self.norm("norm", out) if self.r.final_norm else out
        logits = self.w["lm_head"] @ normed
        logits = logits if self.r.draft_to_target is not None else logits[:valid]
        top = logits.max()
        return logits - top - np.log(np.exp(logits - top).sum()), normed if self.r.feedback == "normed" else out

    def grow(self, last: int, valid: int) -> tuple[list[int], list[int], list[float]]:
        """(tokens, parents, log probabilities) of the dynamic tree: EAGLE-2's rules, on lists of dictionaries."""
        base = list(self.entries[last].visible)
        position = self.entries[last].position
        logprobs, state = self.finish(last, valid)
        pool: list[dict[str, Any]] = []

        def candidates(logprobs: NDArray[np.float64], parent: int | None, score: float) -> list[int]:
            made = []
            for row in sorted(range(len(logprobs)), key=lambda i: (-logprobs[i], i))[:K]:
                token = row if self.r.draft_to_target is None else int(self.r.draft_to_target[row])
                pool.append({"token": token, "parent": parent, "score": score + logprobs[row], "number": len(pool)})
                made.append(pool[-1]["number"])
            return made

        level = candidates(logprobs, None, 0.0)
        above = dict.fromkeys(level, (state, base))
        for depth in range(1, DEPTH):
            offered: list[int] = []
            deeper: dict[int, tuple[NDArray[np.float64], list[int]]] = {}
            for number in level:
                hidden, visible = above[number]
                entry = self.add(pool[number]["token"], hidden, position + depth, visible)
                logprobs, state = self.finish(entry, valid)
                for child in candidates(logprobs, number, pool[number]["score"]):
                    deeper[child] = state, self.entries[entry].visible
                    offered.append(child)
            level = sorted(offered, key=lambda number: (-pool[number]["score"], number))[:K]
            above = deeper
        kept = sorted(sorted(range(len(pool)), key=lambda number: (-pool[number]["score"], number))[:NODES])
        place = {number: index + 1 for index, number in enumerate(kept)} | {None: 0}
        return (
            [pool[number]["token"] for number in kept],
            [place[pool[number]["parent"]] for number in kept],
            [pool[number]["score"] for number in kept],
        )


def run_graph(path: Path, record: RecurrentRecord) -> Any:
    session = ort.InferenceSession(str(path))
    names = [value.name for value in session.get_outputs()]
    shape = (1, record.blocks.num_kv_heads, SLOTS, record.blocks.head_dim)
    caches = {v.name: np.zeros(shape, np.float32) for v in session.get_inputs() if v.name.startswith("past_")}

    def run(features: NDArray[np.float32], tokens: list[int], past: int) -> dict[str, NDArray[Any]]:
        feeds = {FEATURES: features[None], TOKENS: np.array([tokens]), PAST: np.array([past]), **caches}
        outputs = dict(zip(names, session.run(None, feeds), strict=True))
        for name in caches:
            caches[name] = outputs[name.replace("past", "present")]
        return outputs

    return run


@pytest.mark.parametrize("case", CASES)
def test_module_and_graph_are_the_reference(case: str, tmp_path: Path) -> None:
    """Three calls in a row: a prompt, then accepted paths of two and one tokens."""
    heads = record(case)
    valid = VOCAB - 3
    module = RecurrentDrafter(heads, SLOTS, torch.float32, depth=DEPTH, k=K, nodes=NODES, valid_vocab=valid).eval()
    weights = Weights(module)
    load_state(module, module.values(weights))
    path = tmp_path / "drafter.onnx"
    export_recurrent(
        heads,
        weights,
        path,
        dtype=torch.float32,
        slots=SLOTS,
        tree=tree,
        valid_vocab=valid,
        target_graph=tmp_path / "unused",
    )
    run = run_graph(path, heads)
    rng = np.random.default_rng(1)
    stable: list[tuple[int, NDArray[np.float32]]] = []
    blocks = heads.blocks
    caches = [torch.zeros(1, blocks.num_kv_heads, SLOTS, blocks.head_dim) for _ in range(2 * blocks.num_layers)]
    for count in (6, 2, 1):
        features = rng.standard_normal((count, heads.target_hidden_size * len(heads.captures))).astype(np.float32)
        tokens = [int(token) for token in rng.integers(0, valid, count)]
        past = len(stable)
        stable += zip(tokens, features, strict=True)
        reference = Reference(heads, weights)
        for position, (token, row) in enumerate(stable):
            reference.add(token, reference.hidden(row.astype(np.float64)), position, list(range(position)))
        expected = reference.grow(len(stable) - 1, valid)
        with torch.no_grad():
            mine = module(torch.from_numpy(features)[None], torch.tensor([tokens]), torch.tensor([past]), *caches)
        caches = list(mine[3:])
        exported = run(features, tokens, past)
        for got in (
            [tensor.numpy() for tensor in mine[:3]],
            [exported[name] for name in (DRAFT_TOKENS, DRAFT_PARENTS, DRAFT_LOGPROBS)],
        ):
            assert got[0].tolist() == expected[0]
            assert got[1].tolist() == expected[1]
            assert np.abs(got[2] - np.array(expected[2])).max() < 1e-5


def test_a_tree_larger_than_its_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer than 40 nodes"):
        RecurrentDrafter(record("eagle1"), SLOTS, torch.float32, depth=2, k=3, nodes=40, valid_vocab=VOCAB)
