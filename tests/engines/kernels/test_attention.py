"""``specexport::TreeAttention`` beside attention in float64, and the promise that a node's row is plain decoding's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.engines.kernels.one_node import Attention, Floats, needs_kernels, random_tree

pytestmark = needs_kernels

Doubles = NDArray[np.float64]
Mask = NDArray[np.bool_]


def chain(nodes: int) -> Mask:
    return np.tri(nodes, dtype=bool)


def placed(attention: Attention, states: Floats, positions: NDArray[np.int64]) -> list[Doubles]:
    """Queries, keys and values [T, heads, D] after norms of heads and rotation."""
    parts = [part.astype(np.float64) for part in attention.parts(states)]
    for index, name in enumerate(("query_norm", "key_norm")):
        x = parts[index]
        if attention.norms:
            factor = 1 / np.sqrt((x**2).mean(axis=-1, keepdims=True) + attention.epsilon)
            x = x * factor * attention.constants[name]
        if attention.pairs is not None:
            cosine, sine = (attention.constants[each][positions][:, None].astype(float) for each in ("cos", "sin"))
            a, b, rest = np.split(x, [attention.pairs, 2 * attention.pairs], axis=-1)
            x = np.concatenate([a * cosine - b * sine, b * cosine + a * sine, rest], axis=-1)
        parts[index] = x
    return parts


def expected(
    attention: Attention, states: Floats, tree: Mask, past: int, caches: tuple[Floats, Floats]
) -> tuple[Doubles, list[Doubles]]:
    """Output [T, Hq D] by the definition, and the rows [Hkv, T, D] that the caches gain."""
    depths = tree.sum(axis=1) - 1
    query, key, value = placed(attention, states, past + depths)
    new = [np.moveaxis(part, 1, 0) for part in (key, value)]
    keys, values = (np.concatenate([old[0, :, :past], rows], axis=1) for old, rows in zip(caches, new, strict=True))
    at = np.concatenate([np.arange(past), past + depths])
    seen = np.concatenate([np.ones((len(tree), past), bool), tree], axis=1)
    if attention.window:
        seen &= (past + depths)[:, None] - at[None] < attention.window
    group = attention.heads // attention.kv_heads
    scores = np.einsum("thd,hsd->hts", query, np.repeat(keys, group, axis=0)) * attention.scale
    scores = np.where(seen[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    found = np.einsum("hts,hsd->thd", weights, np.repeat(values, group, axis=0))
    return found.reshape(len(tree), -1), new


def check(attention: Attention, tree: Mask, past: int, seed: int = 5) -> None:
    caches, states = attention.caches(past), attention.states(len(tree), seed)
    y, *presents = attention.run(states, tree, past, caches)
    wanted, new = expected(attention, states, tree, past, caches)
    assert np.abs(y - wanted).max() < 1e-5
    for old, present, rows in zip(caches, presents, new, strict=True):
        assert np.array_equal(old[0, :, :past], present[0, :, :past])
        assert np.abs(present[0, :, past : past + len(tree)] - rows).max() < 1e-5
        assert np.array_equal(old[0, :, past + len(tree) :], present[0, :, past + len(tree) :], equal_nan=True)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "apart"])
@pytest.mark.parametrize(
    ("width", "pairs"),
    [(8, 4), (16, None), (32, 8), (40, 20), (64, 32), (80, 16), (80, 40), (96, 48), (96, 0), (128, 64), (256, 128)],
)
def test_heads_of_every_width(width: int, pairs: int | None, packed: bool) -> None:
    """Rotated whole, in part or not at all; lone nodes, chains, trees; nothing before them or much."""
    attention = Attention(width=width, pairs=pairs, packed=packed, norms=width % 3 == 0)
    for nodes, past in ((1, 0), (1, 77), (5, 16), (16, 31), (19, 0), (34, 50)):
        check(attention, random_tree(np.random.default_rng(nodes), nodes), past)
        check(attention, chain(nodes), past)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 3), (8, 1), (9, 3), (14, 2)])
def test_heads_share_keys(heads: int, kv_heads: int) -> None:
    attention = Attention(heads, kv_heads, 64, norms=True)
    for nodes, past in ((1, 50), (2, 3), (7, 80), (16, 20)):
        check(attention, random_tree(np.random.default_rng(nodes), nodes, 3), past)


@pytest.mark.parametrize("window", [1, 2, 7, 16, 40, 1000])
def test_a_window_counts_positions(window: int) -> None:
    """It may end among the committed rows, among the nodes, or at the node itself."""
    attention = Attention(window=window, width=64)
    for nodes, past in ((1, 0), (1, 60), (12, 0), (12, 5), (40, 20), (9, 87)):
        check(attention, chain(nodes), past)
        check(attention, random_tree(np.random.default_rng(past), nodes, 6), past)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Attention, Mask, int]:
    width = 8 * draw(st.integers(1, 17))
    kv_heads = draw(st.integers(1, 3))
    attention = Attention(
        heads=kv_heads * draw(st.integers(1, 5)),
        kv_heads=kv_heads,
        width=width,
        slots=draw(st.integers(24, 70)),
        pairs=draw(st.none() | st.integers(0, width // 2)),
        window=draw(st.just(0) | st.integers(1, 30)),
        packed=draw(st.booleans()),
        norms=draw(st.booleans()),
        positions=80,
    )
    nodes = draw(st.integers(1, 24))
    past = draw(st.integers(0, attention.slots - nodes))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    return attention, random_tree(rng, nodes, draw(st.integers(1, nodes))), past


@settings(max_examples=250, deadline=None)
@given(case=cases(), seed=st.integers(0, 9))
def test_any_tree(case: tuple[Attention, Mask, int], seed: int) -> None:
    check(*case, seed)


def paths(tree: Mask) -> list[list[int]]:
    """From the root to each leaf."""
    leaves = [node for node in range(len(tree)) if not tree[node + 1 :, node].any()]
    return [np.flatnonzero(tree[leaf]).tolist() for leaf in leaves]


def check_bits(attention: Attention, tree: Mask, past: int, seed: int = 5) -> None:
    """Each node's row is, bit for bit, that of its path decoded node by node, or as a chain, and so are its cache
    rows."""
    caches, states = attention.caches(past), attention.states(len(tree), seed)
    y, *presents = attention.run(states, tree, past, caches)
    for path in paths(tree):
        rows, after = [], list(caches)
        for depth, node in enumerate(path):
            row, *after = attention.run(states[[node]], chain(1), past + depth, after)
            rows.append(row)
        at_once, *others = attention.run(states[path], chain(len(path)), past, caches)
        assert np.array_equal(np.concatenate(rows), y[path])
        assert np.array_equal(at_once, y[path])
        places = [past + node for node in path]
        for present, one, other in zip(presents, after, others, strict=True):
            assert np.array_equal(present[0, :, places], one[0, :, past : past + len(path)].swapaxes(0, 1))
            assert np.array_equal(one, other, equal_nan=True)


@settings(max_examples=200, deadline=None)
@given(case=cases(), seed=st.integers(0, 9))
def test_a_node_of_a_tree_is_what_plain_decoding_gives(case: tuple[Attention, Mask, int], seed: int) -> None:
    check_bits(*case, seed)


@pytest.mark.parametrize("window", [0, 1, 5, 16, 33])
@pytest.mark.parametrize(("width", "heads", "kv_heads"), [(64, 9, 3), (128, 4, 1), (256, 4, 1), (80, 6, 2), (8, 2, 2)])
def test_that_holds_where_rows_share_their_loads(width: int, heads: int, kv_heads: int, window: int) -> None:
    """Units of one to four rows, over ranges of columns that differ from row to row."""
    attention = Attention(heads, kv_heads, width, 96, width // 2, window)
    for nodes, past, first in ((3, 70, 1), (16, 33, 1), (24, 50, 12), (30, 3, 29), (33, 0, 5)):
        check_bits(attention, random_tree(np.random.default_rng(nodes), nodes, first), past)


def test_threads_do_not_change_a_bit() -> None:
    one = Attention(6, 2, 64, window=20)
    two = replace(one, threads=2)
    for nodes, past in ((1, 60), (5, 40), (30, 60)):
        tree, caches, states = random_tree(np.random.default_rng(1), nodes), one.caches(past), one.states(nodes)
        found = zip(one.run(states, tree, past, caches), two.run(states, tree, past, caches), strict=True)
        assert all(np.array_equal(mine, other, equal_nan=True) for mine, other in found)


@pytest.mark.parametrize("window", [0, 100])
def test_a_long_prompt_and_the_last_slot(window: int) -> None:
    """A prompt of more than 512 nodes is what its parts are, in any cut, and fills the cache to the end."""
    count = 611
    attention = Attention(2, 1, 64, count, 32, window)
    states, empty = attention.states(count), attention.caches(0)
    y, *presents = attention.run(states, chain(count), 0, empty)
    wanted, _ = expected(attention, states, chain(count), 0, empty)
    assert np.abs(y - wanted).max() < 1e-5
    rows, after, past = [], list(empty), 0
    for size in (513, 1, 64, 32, 1):
        row, *after = attention.run(states[past : past + size], chain(size), past, after)
        rows.append(row)
        past += size
    assert past == attention.slots
    assert np.array_equal(np.concatenate(rows), y)
    assert all(map(np.array_equal, presents, after))


def test_caches_that_are_bound_in_place() -> None:
    """The same memory as past and present: only the call's rows are written, and the results are those of a copy."""
    attention = Attention()
    tree = random_tree(np.random.default_rng(2), 9)
    states, caches = attention.states(9), attention.caches(40)
    wanted = attention.run(states, tree, 40, caches)
    feeds = attention.feeds(states, tree, 40, caches)
    binding = attention.session.io_binding()
    for name, array in feeds.items():
        if not name.startswith(("past_k", "past_v")):
            binding.bind_cpu_input(name, array)
    held = [ort.OrtValue.ortvalue_from_numpy(cache.copy()) for cache in caches]
    for kind, value in zip("kv", held, strict=True):
        binding.bind_ortvalue_input(f"past_{kind}", value)
        binding.bind_ortvalue_output(f"present_{kind}", value)
    binding.bind_output("y")
    attention.session.run_with_iobinding(binding)
    found = {name: value.numpy() for name, value in zip(("k", "v", "y"), binding.get_outputs(), strict=True)}
    assert np.array_equal(found["y"][0], wanted[0])
    for kind, value, present in zip("kv", held, wanted[1:], strict=True):
        assert np.shares_memory(found[kind], value.numpy())
        assert np.array_equal(value.numpy(), present, equal_nan=True)


def test_no_nodes_are_no_rows() -> None:
    attention = Attention()
    caches = attention.caches(5)
    y, *presents = attention.run(attention.states(0), np.zeros((0, 0), bool), 5, caches)
    assert y.shape == (0, attention.heads * attention.width)
    assert all(np.array_equal(old, new, equal_nan=True) for old, new in zip(caches, presents, strict=True))


@pytest.mark.parametrize("part", [0, 4, 6], ids=["query", "key", "value"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_node_without_numbers_spoils_its_descendants_alone(bad: float, part: int) -> None:
    """Its NaN reaches who sees it, as in plain decoding, and no other row changes by a bit."""
    attention = Attention(4, 2, 64)
    tree, caches = random_tree(np.random.default_rng(4), 20, 3), attention.caches(30)
    states = attention.states(20)
    whole, *_ = attention.run(states, tree, 30, caches)
    spoilt = states.copy()
    spoilt[2, part] = bad  # all values of one head
    y, *_ = attention.run(spoilt, tree, 30, caches)
    reached = tree[:, 2] if part else np.arange(20) == 2
    assert 0 < reached.sum() < 20
    assert np.array_equal(y[~reached], whole[~reached])
    assert (~np.isfinite(y[reached])).any(axis=1).all()


def test_scores_that_are_huge_or_alike_stay_numbers() -> None:
    attention = Attention(2, 1, 64, pairs=None)
    key, value = attention.caches(40)
    caches = np.nan_to_num(key), np.nan_to_num(value)
    for factor in (0.0, 1e-30, 1e6, 1e15):
        states = attention.states(6) * np.float32(1)
        states[:, :3] *= np.float32(factor)
        y, *_ = attention.run(states, chain(6), 40, caches)
        wanted, _ = expected(attention, states, chain(6), 40, caches)
        assert np.isfinite(y).all() and np.abs(y - wanted).max() < 1e-5


@pytest.mark.parametrize("window", [0, 9])
@pytest.mark.parametrize("width", [24, 64])
def test_without_a_tree_a_call_is_a_chain(width: int, window: int) -> None:
    """To the last bit, output and caches; and not by way of what an earlier call left in the lists."""
    attention = Attention(width=width, pairs=width // 2, window=window, norms=True)
    treeless = replace(attention, treeless=True)
    rng = np.random.default_rng(0)
    for nodes, past in ((1, 0), (7, 0), (30, 20), (5, 91), (1, 40)):
        states, caches = attention.states(nodes), attention.caches(past)
        attention.run(attention.states(40), random_tree(rng, 40), 10, attention.caches(10))
        found, wanted = (each.run(states, chain(nodes), past, caches) for each in (treeless, attention))
        assert all(np.array_equal(mine, other, equal_nan=True) for mine, other in zip(found, wanted, strict=True))
        y, _ = expected(attention, states, chain(nodes), past, caches)
        assert np.abs(found[0] - y).max() < 1e-5
