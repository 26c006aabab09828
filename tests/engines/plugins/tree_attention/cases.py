"""Random calls of TreeAttention and what they should give, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from specexport.engines.plugins.tree_attention import HEAD_DIMS
from specexport.runtime.cache import CacheRows

TYPES: dict[str, np.dtype[Any]] = {"fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
CODES: dict[str, np.dtype[Any]] = {"int8": np.dtype(np.int8), "e4m3": np.dtype(ml_dtypes.float8_e4m3fn)}
LARGEST = {"int8": 127.0, "e4m3": 448.0}
#: Significant bits: half a unit in the last place of 1 is 2^-bits.
BITS = {"fp16": 11, "bf16": 8}


@dataclass(frozen=True)
class Case:
    """Sizes and types of a call, and the seed of its values."""

    seed: int
    nodes: int
    past: int
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    slots: int = 512
    element: str = "fp16"
    cache: str = "element"
    window: int = 0
    #: Any rows to any place, instead of what the runtime would commit.
    wild: bool = False

    @property
    def scale(self) -> float:
        return float(np.float32(self.head_dim**-0.5))


def random_case(seed: int, most_nodes: int = 128, most_past: int = 4096) -> Case:
    """Sizes over the whole range, small ones as often as large ones."""
    rng = np.random.default_rng([7, seed])
    nodes = int(np.exp(rng.uniform(0, np.log(most_nodes + 1))))
    past = 0 if rng.random() < 0.1 else int(np.exp(rng.uniform(0, np.log(most_past + 1))))
    group, kv_heads = int(rng.choice([1, 3, 4, 8])), int(rng.integers(1, 4))
    window = int(rng.choice([0, 0, 1, 7, 100, 1000]))
    return Case(
        seed=seed,
        nodes=nodes,
        past=past,
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=HEAD_DIMS[seed % len(HEAD_DIMS)],
        slots=past + 2 * nodes + int(rng.integers(16, 80)),
        element=("fp16", "bf16")[seed // 5 % 2],
        cache=("element", "int8", "e4m3", "element")[seed // 10 % 4],
        window=window,
        wild=bool(rng.random() < 0.25),
    )


@dataclass
class Values:
    """Tensors of a call, on the host. Caches hold NaN wherever no row was ever written."""

    query: NDArray[Any]
    key: NDArray[Any]
    value: NDArray[Any]
    caches: list[NDArray[Any]]
    scales: list[NDArray[np.float32]]
    tree: NDArray[np.bool_]
    positions: NDArray[np.int32]
    past: int
    write: int
    commit: NDArray[np.int32]
    order: NDArray[np.int32]

    def words(self) -> NDArray[np.uint32]:
        """``tree`` as packed bits, [T, ceil(T / 32)]."""
        nodes = len(self.tree)
        padded = np.zeros((nodes, -(-nodes // 32) * 32), np.bool_)
        padded[:, :nodes] = self.tree
        return np.packbits(padded, axis=1, bitorder="little").view(np.uint32)


def random_tree(rng: np.random.Generator, nodes: int) -> tuple[NDArray[np.bool_], NDArray[np.int32]]:
    """Ancestors-or-self of each node, and depths. Some trees are chains."""
    chain = rng.random() < 0.3
    tree, depth = np.eye(nodes, dtype=np.bool_), np.zeros(nodes, np.int32)
    for node in range(1, nodes):
        parent = node - 1 if chain else int(rng.integers(0, node))
        tree[node] |= tree[parent]
        depth[node] = depth[parent] + 1
    return tree, depth


def make_values(case: Case) -> Values:
    """Random values of a case. Padding rows of the commit copy rows that may hold NaN, to places nobody reads."""
    rng = np.random.default_rng([11, case.seed])
    kind, size = TYPES[case.element], case.head_dim
    rows = _committed_rows(rng, case)
    moved = len(rows.commit)
    pads = int(rng.integers(0, 4)) if case.slots - rows.past - case.nodes >= 4 else 0
    commit = np.array([*rows.commit, *rng.integers(0, case.slots, pads)], np.int32)
    order = np.array([*range(moved), *(moved + pads + i for i in range(case.nodes)), *range(moved, moved + pads)])
    write = rows.write
    if case.wild:
        commit = rng.integers(0, rows.past or 1, len(commit)).astype(np.int32)
        order = rng.integers(0, len(order), len(order))
        write = int(rng.integers(0, case.slots))  # rows past the last slot are dropped
    tree, depth = random_tree(rng, case.nodes)

    def normal(*shape: int) -> NDArray[Any]:
        return rng.standard_normal(shape).astype(kind)

    shape = (case.kv_heads, case.slots, size)
    filled = rows.past if case.wild else max([rows.past, *(row + 1 for row in rows.commit)])
    caches, scales = [], []
    for _ in range(2):
        cache = np.full(shape, np.nan, kind)
        cache[:, :filled] = normal(case.kv_heads, filled, size)
        if case.wild:  # any row may end up among those that attention reads
            cache[:, filled:] = normal(case.kv_heads, case.slots - filled, size)
        scale = np.ones(shape[:2], np.float32)
        if case.cache != "element":
            codes = quantize(np.nan_to_num(cache.astype(np.float64)), case.cache)
            cache, scale = codes[0], codes[1].astype(np.float32)
            if not case.wild:
                scale[:, filled:] = np.nan
        caches.append(cache)
        scales.append(scale)
    return Values(
        query=normal(case.heads, case.nodes, size) * kind.type(2),
        key=normal(case.kv_heads, case.nodes, size),
        value=normal(case.kv_heads, case.nodes, size),
        caches=caches,
        scales=scales,
        tree=tree,
        positions=(rows.past + depth).astype(np.int32),
        past=rows.past,
        write=write,
        commit=commit,
        order=order.astype(np.int32),
    )


def _committed_rows(rng: np.random.Generator, case: Case) -> CacheRows:
    """A state of the cache with ``case.past`` committed rows, some of them still where the last call left them."""
    last = int(rng.integers(1, 2 * case.nodes + 2))
    path = np.flatnonzero(rng.random(last) < 0.3)
    path = path[: case.past]
    before = case.past - len(path)
    return CacheRows(before).accept([int(node) for node in path])


def quantize(x: NDArray[np.float64], cache: str) -> tuple[NDArray[Any], NDArray[np.float64]]:
    """Codes and scale [..] of rows [.., D]."""
    scale = np.abs(x).max(axis=-1) / LARGEST[cache]
    scaled = x / np.where(scale == 0, 1, scale)[..., None]
    return (np.rint(scaled) if cache == "int8" else scaled).astype(CODES[cache]), scale


def expected_rows(case: Case, values: Values) -> tuple[list[NDArray[Any]], list[NDArray[Any]], NDArray[np.int64]]:
    """Caches and scales after the call, and where each row [S] comes from: an old row's index, or ``S`` + node."""
    source = np.arange(case.slots)
    for offset, item in enumerate(values.order):
        row = values.write + offset
        if row < case.slots:
            moved = item < len(values.commit)
            source[row] = values.commit[item] if moved else case.slots + item - len(values.commit)
    caches, scales = [], []
    for cache, scale, new in zip(values.caches, values.scales, (values.key, values.value), strict=True):
        if case.cache == "element":
            caches.append(np.concatenate([cache, new], axis=1)[:, source])
            scales.append(scale)
        else:
            codes, new_scale = quantize(new.astype(np.float64), case.cache)
            caches.append(np.concatenate([cache, codes], axis=1)[:, source])
            scales.append(np.concatenate([scale, new_scale.astype(np.float32)], axis=1)[:, source])
    return caches, scales, source


def visible(case: Case, values: Values) -> NDArray[np.bool_]:
    """[T, S]: which cache rows each node sees."""
    seen = np.zeros((case.nodes, case.slots), np.bool_)
    seen[:, : values.past] = True
    nodes = min(case.nodes, case.slots - values.past)
    seen[:, values.past : values.past + nodes] = values.tree[:, :nodes]
    if case.window:
        column = np.arange(case.slots)
        column[values.past : values.past + nodes] = values.positions[:nodes]
        seen &= values.positions[:, None] - column[None] < case.window
    return seen


def attention(
    case: Case, values: Values, caches: list[NDArray[Any]], scales: list[NDArray[Any]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Outputs [Hq, T, D] from the caches as they are after the commit, and the bound of their rounding errors."""
    seen, group = visible(case, values), case.heads // case.kv_heads
    used = seen.any(axis=0)
    keys, contents = (
        cache[:, used].astype(np.float64) * scale[:, used, None].astype(np.float64)
        for cache, scale in zip(caches, scales, strict=True)
    )
    query = values.query.astype(np.float64).reshape(case.kv_heads, group * case.nodes, case.head_dim)
    scores = query @ keys.transpose(0, 2, 1) * case.scale
    scores = np.where(np.tile(seen[:, used], (group, 1))[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    shape = (case.heads, case.nodes, case.head_dim)
    output = (weights @ contents).reshape(shape)
    # Weights are rounded once, to the element type, and so is the output; float32 sums add a little.
    unit = 2.0 ** -BITS[case.element]
    bound = (unit * 1.1 + 2e-6) * (weights @ np.abs(contents)).reshape(shape) + unit * 1.1 * np.abs(output) + 1e-6
    return output, bound
