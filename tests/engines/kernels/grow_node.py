"""A node of ``GrowTree``: small random layers, calls of them, and their trees in double precision."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from tests.engines.kernels.one_node import Floats, Product, session

Doubles = NDArray[np.float64]
#: Rows of the head's vocabulary from the root down.
Path = tuple[int, ...]
EPSILON = 1e-5
MATRICES = ("fuse", "qkv", "output", "gate_up", "down", "lm_head")
NORMS = ("embedding_norm", "hidden_norm", "input_norm", "mlp_norm", "norm", "query_norm", "key_norm")
#: Inputs in the operator's order, but for the matrices behind them.
INPUTS = (
    *("logits", "state", "noise", "past", "tokens", "cache_k", "cache_v", "cos", "sin", "embedding"),
    *("embedding_codes", "embedding_scales", "vocabulary", *NORMS),
)


@dataclass(frozen=True)
class Call:
    """What a call gives, by the names of the inputs."""

    feeds: dict[str, NDArray[Any]]

    @property
    def length(self) -> int:
        return int(self.feeds["past"][0]) + int(self.feeds["tokens"].shape[1])

    def set(self, **changes: NDArray[Any]) -> Call:
        return Call(self.feeds | changes)


@dataclass(frozen=True)
class Head:
    """A random layer with tables, and its operator.

    Attributes:
        norms: those there are besides ``mlp_norm``. pairs: rotated pairs of a head, None for none.
        embedding_blocks: scales of a row of an embedding in codes, 0 for one in floats.
        mapped: rows of the lm_head are ids of their own. valid: rows that may be drafted.
        quiet: factor on the logits.
    """

    fused: bool = True
    norms: frozenset[str] = frozenset({"embedding_norm", "hidden_norm", "input_norm", "norm"})
    hidden_first: bool = False
    norm_residual: bool = False
    feed_normed: bool = False
    pairs: int | None = 4
    embedding_blocks: int = 0
    mapped: bool = False
    bits: int = 8
    block: int = 16
    zeros: bool = False
    gate: int = 1
    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    hidden: int = 32
    embedding: int = 32
    inner: int = 32
    rows: int = 60
    valid: int = 60
    ids: int = 90
    slots: int = 24
    topk: int = 3
    depth: int = 4
    nodes: int = 9
    least: float = 0.0
    quiet: float = 1.0
    threads: int = 1
    seed: int = 0

    @cached_property
    def matrices(self) -> dict[str, Product]:
        joined, mixed = self.embedding + self.hidden, self.heads * self.dim
        sizes = {
            "fuse": (self.hidden, joined),
            "qkv": (mixed + 2 * self.kv_heads * self.dim, self.hidden if self.fused else joined),
            "output": (self.hidden, mixed),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "lm_head": (self.rows, self.hidden),
        }
        return {
            name: Product(*size, self.block, self.bits, zeros=self.zeros, seed=self.seed * 10 + number)
            for number, (name, size) in enumerate(sizes.items())
            if self.fused or name != "fuse"
        }

    def gain(self, name: str) -> np.float32:
        """Factor on a matrix's scales, so that values stay near 1 from layer to layer."""
        factor = {"lm_head": 3.0 * self.quiet, "qkv": 1.5}.get(name, 1.0)
        return np.float32(factor * (2 if not self.zeros else 1) * self.matrices[name].width ** -0.5)

    @cached_property
    def constants(self) -> dict[str, NDArray[Any]]:
        rng = np.random.default_rng(self.seed + 100)
        made: dict[str, NDArray[Any]] = {}
        for name, matrix in self.matrices.items():
            stored = matrix.stored
            made |= {f"{name}_{part}": array for part, array in stored.items()}
            made[f"{name}_scales"] = stored["scales"] * self.gain(name)
        sizes = {"embedding_norm": self.embedding, "query_norm": self.dim, "key_norm": self.dim}
        for name in NORMS:
            gamma = rng.uniform(0.5, 1.5, sizes.get(name, self.hidden)).astype(np.float32)
            if name in self.norms or name == "mlp_norm":
                made[name] = gamma
        if self.pairs is not None:
            turns = np.random.default_rng(self.seed).uniform(-3, 3, (self.slots + 8, self.pairs))
            made |= {"cos": np.cos(turns).astype(np.float32), "sin": np.sin(turns).astype(np.float32)}
        if self.embedding_blocks:
            made["embedding_codes"] = rng.integers(-127, 128, (self.ids, self.embedding)).astype(np.int8)
            scales = rng.uniform(0.5, 1.5, (self.ids, self.embedding_blocks)) / 64
            made["embedding_scales"] = scales.astype(np.float32)
        else:
            made["embedding"] = rng.standard_normal((self.ids, self.embedding)).astype(np.float32)
        if self.mapped:
            made["vocabulary"] = np.sort(rng.permutation(self.ids)[: self.rows]).astype(np.int64)
        return made

    @cached_property
    def attributes(self) -> dict[str, int | float]:
        plain = ("topk", "depth", "nodes", "gate", "hidden_first", "norm_residual", "feed_normed")
        found: dict[str, int | float] = {name: int(getattr(self, name)) for name in plain}
        found |= {"num_heads": self.heads, "kv_num_heads": self.kv_heads}
        found |= {"scale": float(np.float32(self.dim**-0.5)), "epsilon": EPSILON, "least": float(self.least)}
        for name in MATRICES:
            matrix = self.matrices.get(name)
            found[f"{name}_width"] = 0 if matrix is None else matrix.width
            found |= {f"{name}_bits": self.bits, f"{name}_block": self.block}
        return found

    def call(self, past: int = 5, fresh: int = 2, seed: int = 0, noise: float = 1.0) -> Call:
        """Random inputs; rows of the caches behind the committed ones are NaN, as they must not matter."""
        rng = np.random.default_rng(seed * 1000 + past * 10 + fresh)
        caches = rng.standard_normal((2, 1, self.kv_heads, self.slots, self.dim)).astype(np.float32)
        caches[..., past + fresh :, :] = np.nan
        return Call(
            {
                "logits": (4 * self.quiet * rng.standard_normal((1, self.rows))).astype(np.float32),
                "state": rng.standard_normal((1, 1, self.hidden)).astype(np.float32),
                "noise": (noise * rng.gumbel(size=(self.depth, self.valid))).astype(np.float32),
                "past": np.array([past]),
                "tokens": np.zeros((1, fresh), np.int64),
                "cache_k": caches[0],
                "cache_v": caches[1],
            }
        )

    def session(
        self,
        attributes: Mapping[str, Any] | None = None,
        constants: Mapping[str, NDArray[Any] | None] | None = None,
        call: Call | None = None,
    ) -> ort.InferenceSession:
        """With these in place of its own; None leaves one out. ``call`` gives the inputs' ranks."""
        stored = {name: each for name, each in {**self.constants, **(constants or {})}.items() if each is not None}
        known = {name: each for name, each in {**self.attributes, **(attributes or {})}.items() if each is not None}
        given = (self.call() if call is None else call).feeds
        names = [*INPUTS, *(f"{name}_{part}" for name in MATRICES for part in ("codes", "scales", "zeros"))]
        outputs = ("draft_tokens", "draft_parents", "draft_logprobs")
        inputs = {name: given.get(name) for name in names}
        return session("GrowTree", inputs, outputs, known, stored, self.threads, integers=outputs[:2])

    @cached_property
    def _session(self) -> ort.InferenceSession:
        return self.session()

    def run(self, call: Call) -> Drafted:
        return Drafted(*self._session.run(None, call.feeds))


@dataclass(frozen=True)
class Drafted:
    """What the operator gives."""

    tokens: NDArray[np.int64]
    parents: NDArray[np.int64]
    logprobs: Floats

    def paths(self, head: Head) -> dict[Path, float]:
        """Nodes as rows of the vocabulary from the root, with the log probabilities of their paths."""
        rows = {int(token): row for row, token in enumerate(head.constants.get("vocabulary", np.arange(head.rows)))}
        found: list[Path] = [()]
        for token, parent in zip(self.tokens.tolist(), self.parents.tolist(), strict=True):
            found.append((*found[parent], rows[token]))
        return dict(zip(found[1:], self.logprobs.tolist(), strict=True))

    def same(self, other: Drafted) -> bool:
        """To the last bit."""
        names = ("tokens", "parents", "logprobs")
        return all(getattr(self, name).tobytes() == getattr(other, name).tobytes() for name in names)


@dataclass(frozen=True)
class _Node:
    """A node that was run: chances of what follows, what that feeds on, keys and values of it and its ancestors."""

    logprobs: Doubles
    state: Doubles
    rows: tuple[tuple[Doubles, Doubles], ...]


class Reference:
    """EAGLE-2 in double precision with the codes' matrices; rows are rounded to 8 bits before products, as they are."""

    def __init__(self, head: Head, call: Call) -> None:
        self.head, self.call, self.w = head, call, head.constants
        self._run: dict[Path, _Node] = {}

    def norm(self, name: str, x: Doubles) -> Doubles:
        if name not in self.w:
            return x
        return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + EPSILON) * self.w[name])

    def product(self, name: str, x: Doubles) -> Doubles:
        matrix = self.head.matrices[name]
        codes, scales = matrix.weights
        short = matrix.blocks * matrix.block - matrix.width
        blocks = np.pad(x, (0, short)).reshape(matrix.blocks, matrix.block)
        tops = np.abs(blocks).max(axis=1, keepdims=True)
        rounded = np.rint(blocks * (127 / tops)) * (tops / 127)
        weights = np.pad(codes, ((0, 0), (0, short))).reshape(matrix.outputs, *blocks.shape)
        return np.asarray(np.einsum("nbk,bk,nb->n", weights, rounded, scales * self.head.gain(name)))

    def logprobs(self, logits: Doubles, depth: int) -> Doubles:
        x = logits[: self.head.valid] + self.call.feeds["noise"][depth]
        return np.asarray(x - x.max() - np.log(np.exp(x - x.max()).sum()))

    def turned(self, x: Doubles, position: int) -> Doubles:
        """Heads [.., D] at a position."""
        if "cos" not in self.w:
            return x
        cos, sin = self.w["cos"][position].astype(float), self.w["sin"][position].astype(float)
        count = len(cos)
        a, b, rest = x[..., :count], x[..., count : 2 * count], x[..., 2 * count :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)

    def embedded(self, row: int) -> Doubles:
        token = int(self.w["vocabulary"][row]) if "vocabulary" in self.w else row
        if "embedding" in self.w:
            return np.asarray(self.w["embedding"][token].astype(float))
        scales = self.w["embedding_scales"][token].astype(float)
        return np.asarray(self.w["embedding_codes"][token] * np.repeat(scales, self.head.embedding // len(scales)))

    def at(self, path: Path) -> _Node:
        """The node behind a path; the root has been run already."""
        if path not in self._run:
            self._run[path] = self._make(path)
        return self._run[path]

    def _make(self, path: Path) -> _Node:
        head, feeds = self.head, self.call.feeds
        if not path:
            root = self.logprobs(feeds["logits"].reshape(-1).astype(float), 0)
            return _Node(root, feeds["state"].reshape(-1).astype(float), ())
        above = self.at(path[:-1])
        embedded, hidden = self.norm("embedding_norm", self.embedded(path[-1])), self.norm("hidden_norm", above.state)
        x = np.concatenate([hidden, embedded] if head.hidden_first else [embedded, hidden])
        residual = hidden if head.norm_residual else above.state
        if head.fused:
            x = residual = self.product("fuse", x)
            x = self.norm("input_norm", x)
        mixed, rows = self.attend(self.product("qkv", x), above.rows)
        residual = residual + self.product("output", mixed)
        gate, up = np.split(self.product("gate_up", self.norm("mlp_norm", residual)), 2)
        inner = gate + 0.044715 * gate**3 if head.gate == 2 else gate
        active = gate / (1 + np.exp(-inner * (1.59576912 if head.gate == 2 else 1)))
        out = residual + self.product("down", active * up)
        normed = self.norm("norm", out)
        logprobs = self.logprobs(self.product("lm_head", normed), len(path))
        return _Node(logprobs, normed if head.feed_normed else out, rows)

    def attend(self, projected: Doubles, above: tuple[Any, ...]) -> tuple[Doubles, tuple[Any, ...]]:
        head, length = self.head, self.call.length
        query, key, value = np.split(projected.reshape(-1, head.dim), [head.heads, head.heads + head.kv_heads])
        position = length + len(above)
        query = self.turned(self.norm("query_norm", query), position)
        rows = (*above, (self.turned(self.norm("key_norm", key), position), value))
        mixed = []
        for number, one in enumerate(query):
            kv = number // (head.heads // head.kv_heads)
            keys, values = (
                np.concatenate([self.call.feeds[name][0, kv, :length], *([row[place][kv]] for row in rows)])
                for place, name in enumerate(("cache_k", "cache_v"))
            )
            scores = keys @ one * head.dim**-0.5
            chances = np.exp(scores - scores.max())
            mixed.append(chances / chances.sum() @ values)
        return np.concatenate(mixed), rows

    def score(self, path: Path) -> float:
        return sum(float(self.at(path[:depth]).logprobs[row]) for depth, row in enumerate(path))

    def grow(self) -> tuple[dict[Path, float], float, list[float]]:
        """(nodes with their log probabilities, how far the nearest decision was from another one, how often the nodes
        that each depth expands are right)."""
        head, pool, level = self.head, dict[Path, float](), [Path()]
        closest: list[tuple[float, float, float]] = []  # (difference, score, the least score that matters)
        chances: list[float] = []
        for depth in range(head.depth):
            scores: dict[Path, float] = {}
            cuts = []
            for path in level:
                logprobs = self.at(path).logprobs
                order = np.argsort(-logprobs, kind="stable").tolist()
                scores |= {(*path, row): self.score((*path, row)) for row in order[: head.topk]}
                if len(order) > head.topk:
                    last, next_ = (self.score((*path, row)) for row in order[head.topk - 1 : head.topk + 1])
                    cuts.append((last - next_, last))
            pool |= scores
            ranked = sorted(scores, key=lambda path: -scores[path])
            level = ranked[: head.topk]
            least = np.inf if depth + 1 == head.depth else scores[level[-1]]
            closest += [(difference, last, least) for difference, last in cuts]
            if len(ranked) > head.topk and depth + 1 < head.depth:
                closest.append((scores[level[-1]] - scores[ranked[head.topk]], 0.0, 0.0))
            chances.append(float(sum(np.exp(scores[path]) for path in level)))
        ranked = sorted(pool, key=lambda path: -pool[path])
        kept = ranked[: head.nodes]
        if len(ranked) > head.nodes:
            closest.append((pool[kept[-1]] - pool[ranked[head.nodes]], 0.0, 0.0))
        lowest = pool[kept[-1]]
        margin = min((each for each, last, least in closest if last > min(least, lowest) - 0.2), default=np.inf)
        return {path: pool[path] for path in kept}, margin, chances


#: Layers that differ in what the operator tells apart.
HEADS: dict[str, Head] = {
    "projected": Head(),
    "side by side": Head(fused=False, norms=frozenset({"embedding_norm", "hidden_norm", "norm"})),
    "normed residual": Head(fused=False, norms=frozenset({"hidden_norm", "norm"}), norm_residual=True, mapped=True),
    "normed feed": Head(feed_normed=True, hidden_first=True, embedding_blocks=1, mapped=True),
    "normed feed side by side": Head(
        fused=False, norms=frozenset({"embedding_norm", "hidden_norm", "norm"}), feed_normed=True, hidden_first=True
    ),
    "no norms": Head(norms=frozenset(), quiet=0.3),
    "norms of heads": Head(norms=frozenset({"query_norm", "key_norm", "input_norm", "norm"}), pairs=3, gate=2),
    "no rotation": Head(pairs=None, bits=4, zeros=True, embedding_blocks=2),
    "int4 blocks": Head(bits=4, block=32, embedding=24, mapped=True, valid=60),
    "zero points": Head(zeros=True, block=32, embedding=24, embedding_blocks=3, fused=False, norms=frozenset({"norm"})),
    "fewer rows": Head(valid=47, kv_heads=1, ids=60),
    "as many heads": Head(kv_heads=4, topk=4, depth=3, nodes=12, hidden_first=True),
    "a chain": Head(topk=1, depth=5, nodes=5),
    "one depth": Head(depth=1, topk=5, nodes=4),
    "all candidates": Head(topk=2, depth=3, nodes=50),
    "many rows": Head(rows=700, valid=650, ids=800, topk=8, depth=3, nodes=20),
}


def digest() -> str:
    """Of the very bits of trees of every such layer."""
    seen = hashlib.sha256()
    for head in HEADS.values():
        for past, fresh in ((0, 1), (13, 3)):
            call = head.call(past, fresh)
            # No NaN behind the committed rows: their payload is the processor's own.
            call = call.set(**{name: np.nan_to_num(call.feeds[name]) for name in ("cache_k", "cache_v")})
            drafted = replace(head, nodes=200).run(call)
            for array in (drafted.tokens, drafted.parents, drafted.logprobs):
                seen.update(array.tobytes())
    return seen.hexdigest()
