"""What the operators refuse: a line that says why, and the process lives."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from specexport.engines.kernels.library import kernels_library
from tests.engines.kernels.one_node import Attention, Product, needs_kernels, random_tree, session

pytestmark = needs_kernels

RunPython = Callable[..., subprocess.CompletedProcess[str]]
Feeds = dict[str, NDArray[Any]]


def refused(words: str, call: Callable[[], object]) -> None:
    with pytest.raises(Exception, match=words) as caught:
        call()
    assert "\n" not in str(caught.value).strip()


def product_session(
    product: Product, attributes: Mapping[str, Any] | None = None, constants: Mapping[str, Any] | None = None
) -> Any:
    """A session of a product with these attributes and constants in place of its own; None leaves one out."""
    merged: dict[str, Any] = {**product.attributes, **(attributes or {})}
    stored = {name: each for name, each in {**product.stored, **(constants or {})}.items() if each is not None}
    inputs = {"x": np.zeros((1, 1, 1), np.float32), "codes": None, "scales": None, "zeros": None}
    known = {name: value for name, value in merged.items() if value is not None}
    return session("QuantizedProduct", inputs, ["y"], known, stored)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("N", 0, "N and K must be 1 to 2"),
        ("N", -1, "attribute N is out of range"),
        ("N", 1 << 40, "attribute N is out of range"),
        ("N", (1 << 31) - 1, "N and K must be 1 to 2"),
        ("N", 21, "codes have another size than N, K and block_size say"),
        ("N", None, "attribute N is missing or of another type"),
        ("N", 20.0, "attribute N is missing or of another type"),
        ("K", 0, "N and K must be 1 to 2"),
        ("K", (1 << 31) - 1, "N and K must be 1 to 2"),
        ("K", 97, "codes have another size"),
        ("bits", 2, "bits must be 4 or 8"),
        ("bits", 4, "codes have another size"),
        ("block_size", 0, "block_size must be a multiple of 16"),
        ("block_size", 24, "block_size must be a multiple of 16"),
        ("block_size", 64, "codes have another size|scales have another size"),
        ("block_size", 65552, "block_size must be a multiple of 16, at most 65536"),
        ("block_size", (1 << 31) - 16, "block_size must be a multiple of 16, at most 65536"),
        ("gate", 3, "gate must be 0, 1 or 2"),
        ("gate", 1, "a gate needs a multiple of 32 outputs"),
        ("gate", -1, "attribute gate is out of range"),
        ("epsilon", 1, "attribute epsilon is missing or of another type"),
    ],
)
def test_attributes_out_of_range(name: str, value: object, words: str) -> None:
    refused(words, lambda: product_session(Product(20, 96, zeros=True), {name: value}))


@pytest.mark.parametrize("name", ["codes", "scales", "zeros"])
def test_constants_of_another_size(name: str) -> None:
    product = Product(20, 96, zeros=True)
    short = product.stored[name][..., :-1]
    words = {"codes": "codes have", "scales": "scales have", "zeros": "zero points have"}[name]
    refused(f"{words} another size", lambda: product_session(product, constants={name: short}))
    nothing = np.zeros(0, product.stored[name].dtype)
    refused("another size", lambda: product_session(product, constants={name: nothing}))


@pytest.mark.parametrize("name", ["codes", "scales", "zeros"])
def test_what_is_packed_once_must_be_constant(name: str) -> None:
    """A zero point that arrives with a call would be left out in silence."""
    product = Product(20, 96, zeros=True)
    stored = product.stored
    given = {"x": product.rows(2), "codes": None, "scales": None, "zeros": None, name: stored.pop(name)}

    def call() -> None:
        made = session("QuantizedProduct", given, ["y"], product.attributes, stored)
        made.run(None, {key: array for key, array in given.items() if array is not None})

    refused("must be constants", call)


@pytest.mark.parametrize(
    ("x", "skip", "words"),
    [
        ((2, 95), None, "x has another width than the matrix"),
        ((), None, "x has another width than the matrix"),
        ((96, 2), None, "x has another width than the matrix"),
        ((2, 96), (3, 96), "x and skip differ in shape"),
        ((2, 96), (96,), "x and skip differ in shape"),
        ((0, 96), (1, 96), "x and skip differ in shape"),
    ],
)
def test_rows_of_another_shape(x: tuple[int, ...], skip: tuple[int, ...] | None, words: str) -> None:
    product = Product(20, 96)
    feeds = {"x": np.zeros(x, np.float32)} | ({} if skip is None else {"skip": np.zeros(skip, np.float32)})
    inputs = {"x": feeds["x"], "codes": None, "scales": None, "zeros": None, "gamma": None, "skip": feeds.get("skip")}
    made = session("QuantizedProduct", inputs, ["y"], product.attributes, product.stored)
    refused(words, lambda: made.run(None, feeds))


def test_a_norm_of_another_width() -> None:
    product = Product(20, 96)
    inputs = {"x": product.rows(2), "codes": None, "scales": None, "zeros": None, "gamma": np.ones(95, np.float32)}
    made = session("QuantizedProduct", inputs, ["y"], product.attributes, product.stored)
    refused("the norm has another width", lambda: made.run(None, {"x": inputs["x"], "gamma": inputs["gamma"]}))


def test_rows_of_every_rank() -> None:
    product = Product(20, 96)
    rows = product.rows(6)
    (wanted,) = product.run(rows)
    for shape in ((6, 96), (2, 3, 96), (1, 2, 1, 3, 96)):
        inputs = {"x": rows.reshape(shape), "codes": None, "scales": None}
        made = session("QuantizedProduct", inputs, ["y"], product.attributes, product.stored)
        (y,) = made.run(None, {"x": inputs["x"]})
        assert y.shape == (*shape[:-1], 20) and np.array_equal(y.reshape(6, 20), wanted[0])


@pytest.mark.parametrize("name", ["num_heads", "kv_num_heads", "window", "scale", "epsilon"])
@pytest.mark.parametrize("value", [None, -1, 1 << 40])
def test_heads_out_of_range(name: str, value: int | None) -> None:
    attention = Attention()
    feeds = attention.feeds(attention.states(1), np.ones((1, 1), bool), 0, attention.caches(0))
    order = ("query", "key", "value", "past_k", "past_v", "cos", "sin", "positions", "past", "tree")
    attributes: dict[str, Any] = {"num_heads": 4, "kv_num_heads": 2, "window": 0, "scale": 1.0, "epsilon": 0.0}
    known = {key: each for key, each in (attributes | {name: value}).items() if each is not None}
    inputs = {key: feeds.get(key) for key in order}
    wrong = "out of range" if value is not None and name not in ("scale", "epsilon") else "missing or of another type"
    refused(
        f"TreeAttention: the attribute {name} is {wrong}",
        lambda: session("TreeAttention", inputs, ["y", "k", "v"], known, attention.constants),
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(0, 1), (1, 0), (0, 0), (3, 2), (2, 4)])
def test_heads_that_do_not_divide(heads: int, kv_heads: int) -> None:
    made = Attention(heads, kv_heads)
    refused("num_heads must be a multiple of kv_num_heads", lambda: made.session)


def _set(name: str, array: NDArray[Any]) -> Callable[[Feeds], None]:
    return lambda feeds: feeds.__setitem__(name, array)


CALLS: dict[str, tuple[Callable[[Feeds], None], str]] = {
    "past beyond": (_set("past", np.array([90])), "the call does not fit the cache"),
    "past far beyond": (_set("past", np.array([np.iinfo(np.int64).max])), "the call does not fit the cache"),
    "past negative": (_set("past", np.array([-1])), "the call does not fit the cache"),
    "past least": (_set("past", np.array([np.iinfo(np.int64).min])), "the call does not fit the cache"),
    "past many": (_set("past", np.array([1, 2])), r"past \[1\]"),
    "past none": (_set("past", np.zeros(0, np.int64)), r"past \[1\]"),
    "position beyond": (lambda feeds: feeds["positions"].__setitem__((0, 3), 4096), "beyond the rotation tables"),
    "position far": (
        lambda feeds: feeds["positions"].__setitem__((0, 0), np.iinfo(np.int64).max),
        "beyond the rotation tables",
    ),
    "position negative": (lambda feeds: feeds["positions"].__setitem__((0, 6), -1), "a position is negative"),
    "positions few": (_set("positions", np.zeros((1, 6), np.int64)), "query has another size"),
    "positions many": (_set("positions", np.zeros((1, 8), np.int64)), "query has another size"),
    "tree small": (_set("tree", np.ones((1, 6, 6), bool)), r"tree must be \[1, T, T\]"),
    "tree blind": (lambda feeds: feeds["tree"].__setitem__((0, 4), False), "a node does not see itself"),
    "query wide": (_set("query", np.zeros((1, 7, 8 * 64 + 1), np.float32)), "query has another size"),
    "query none": (_set("query", np.zeros((1, 0, 8 * 64), np.float32)), "query has another size"),
    "caches differ": (_set("past_v", np.zeros((1, 2, 95, 64), np.float32)), "caches must be"),
    "caches of more heads": (_set("past_k", np.zeros((1, 3, 96, 64), np.float32)), "caches must be"),
    "two sequences": (_set("past_k", np.zeros((2, 2, 96, 64), np.float32)), "caches must be"),
}


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("name", CALLS)
def test_calls_that_fit_nothing(name: str, window: int) -> None:
    change, words = CALLS[name]
    attention = Attention(window=window)
    states, tree, caches = attention.states(7), random_tree(np.random.default_rng(0), 7), attention.caches(20)
    feeds = attention.feeds(states, tree.copy(), 20, caches)
    change(feeds)
    refused(f"TreeAttention: .*{words}", lambda: attention.session.run(None, feeds))
    # The next call is none the worse for it.
    y, *_ = attention.run(states, tree, 20, caches)
    assert np.isfinite(y).all()


def test_caches_without_room() -> None:
    attention = Attention(slots=0)
    refused("the call does not fit the cache", lambda: attention.run(*_call(attention, 1)))
    thin = Attention(width=8, pairs=4)
    states, tree, past, _ = _call(thin, 1)
    feeds = thin.feeds(states, tree, past, [np.zeros((1, 2, 96, 0), np.float32)] * 2)
    refused("heads must have 1 to 1024 values", lambda: thin.session.run(None, feeds))
    wide = Attention(1, 1, 1032, 2, 4)
    refused("heads must have 1 to 1024 values", lambda: wide.run(*_call(wide, 1)))
    widest = Attention(1, 1, 1024, 2, 4, norms=True)
    assert np.isfinite(widest.run(*_call(widest, 1))[0]).all()


def _call(attention: Attention, nodes: int) -> tuple[Any, ...]:
    return attention.states(nodes), np.tri(nodes, dtype=bool), 0, attention.caches(0)


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_tables_of_another_shape(name: str) -> None:
    for table in (np.zeros((4096, 31), np.float32), np.zeros((32, 4096), np.float32), np.zeros(4096, np.float32)):
        attention = Attention()
        attention.constants[name] = table
        refused("rotation tables must be", partial(attention.run, *_call(attention, 2)))
    alone = Attention()
    del alone.constants[name]
    refused("cosines and sines come together", lambda: alone.run(*_call(alone, 2)))
    broad = Attention(pairs=33)
    refused("rotation tables must be", lambda: broad.run(*_call(broad, 2)))


def test_keys_without_values() -> None:
    attention = Attention(packed=False)
    feeds = attention.feeds(*_call(attention, 2))
    for name in ("key", "value"):
        short = feeds | {name: feeds[name][..., :-1]}
        refused("key and value have another size", partial(attention.session.run, None, short))
    packed = replace(attention, packed=True)
    alone = packed.feeds(*_call(packed, 2)) | {"query": feeds["query"]}
    refused("query has another size", lambda: packed.session.run(None, alone))


def test_norms_of_another_width() -> None:
    attention = Attention(norms=True)
    attention.constants["key_norm"] = np.ones(63, np.float32)
    refused("a norm of heads has another width", lambda: attention.run(*_call(attention, 2)))


def test_positions_that_are_none_of_a_tree() -> None:
    """Any that are not negative: without tables they only say what a window reaches, and a node sees itself always."""
    attention = Attention(pairs=None, window=3)
    rng = np.random.default_rng(0)
    for nodes, tree in ((9, np.tri(9, dtype=bool)), (20, random_tree(rng, 20))):
        feeds = attention.feeds(attention.states(nodes), tree, 30, [np.nan_to_num(c) for c in attention.caches(30)])
        for high in (3, 60, np.iinfo(np.int64).max):
            feeds["positions"] = rng.integers(0, high, (1, nodes))
            y, *_ = attention.session.run(None, feeds)
            assert np.isfinite(y).all()


def test_truth_is_any_byte_but_zero() -> None:
    attention = Attention()
    states, tree, past, caches = attention.states(9), random_tree(np.random.default_rng(3), 9), 20, attention.caches(20)
    feeds = attention.feeds(states, tree, past, caches)
    wanted = attention.session.run(None, feeds)
    feeds["tree"] = (feeds["tree"].view(np.uint8) * 77).view(np.bool_)
    found = attention.session.run(None, feeds)
    assert all(np.array_equal(mine, other, equal_nan=True) for mine, other in zip(wanted, found, strict=True))


NO_MEMORY = """
import resource, sys
import numpy as np, onnxruntime as ort
sys.path.insert(0, sys.argv[1])
from one_node import Attention
attention = Attention(8, 1, 1, 1 << 23, None, threads=2)
caches = [np.zeros((1, 1, attention.slots, 1), np.float32)] * 2
feeds = attention.feeds(attention.states(9), np.tri(9, dtype=bool), 5, caches)
binding = attention.session.io_binding()
held = [ort.OrtValue.ortvalue_from_numpy(cache.copy()) for cache in caches]
for kind, value in zip("kv", held):
    binding.bind_ortvalue_input(f"past_{kind}", value)
    binding.bind_ortvalue_output(f"present_{kind}", value)
    del feeds[f"past_{kind}"]
for name, array in feeds.items():
    binding.bind_cpu_input(name, array)
binding.bind_output("y")
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
# Not enough for the scores of 4 rows of 8 million columns, which each thread has; then for all.
for room in (used + (100 << 20), resource.RLIM_INFINITY):
    resource.setrlimit(resource.RLIMIT_AS, (room, resource.RLIM_INFINITY))
    try:
        attention.session.run_with_iobinding(binding)
        print(np.isfinite(binding.get_outputs()[2].numpy()).all())
    except Exception as error:
        print(str(error).rpartition("Status Message: ")[2])
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux, where a process can be short of memory")
def test_no_memory_is_one_line_on_every_thread(run_python: RunPython) -> None:
    """An exception that left a worker thread would end the process."""
    place = str(Path(__file__).parent)
    done = run_python("-c", NO_MEMORY, place, SPECEXPORT_KERNELS=str(kernels_library()))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == ["TreeAttention: std::bad_alloc", "True"]
