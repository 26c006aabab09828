"""GrowTree where a graph or a call fits nothing: one line that says what, and never the end of the process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engines.kernels.grow_node import Call, Drafted, Head
from tests.engines.kernels.one_node import needs_kernels

pytestmark = needs_kernels

HEAD = Head(norms=frozenset({"embedding_norm", "hidden_norm", "input_norm", "norm", "query_norm", "key_norm"}))
HUGE = np.iinfo(np.int64).max


def refused(words: str, call: Callable[[], object]) -> None:
    with pytest.raises(Exception, match=f"GrowTree: {words}") as caught:
        call()
    assert "\n" not in str(caught.value).strip()


INTEGERS = [
    *("num_heads", "kv_num_heads", "topk", "depth", "nodes", "gate", "hidden_first", "norm_residual", "feed_normed"),
    *("fuse_width", "fuse_bits", "qkv_block", "lm_head_width"),
]
LIMITS = "topk must be 1 to 64, depth 1 to 64 and nodes 1 to 4096"
SIZES = "N and K must be 1 to 2"
BLOCKS = "block_size must be a multiple of 16, at most 65536"


@pytest.mark.parametrize("name", [*INTEGERS, "scale", "epsilon", "least"])
@pytest.mark.parametrize("value", [None, -1, 1 << 40])
def test_attributes_that_are_none(name: str, value: int | None) -> None:
    wrong = "is out of range" if value is not None and name in INTEGERS else "is missing or of another type"
    refused(f"the attribute {name} {wrong}", lambda: HEAD.session({name: value}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 0}, "num_heads must be a multiple of kv_num_heads"),
        ({"kv_num_heads": 0}, "num_heads must be a multiple of kv_num_heads"),
        ({"kv_num_heads": 3}, "num_heads must be a multiple of kv_num_heads"),
        ({"topk": 0}, LIMITS),
        ({"topk": 65}, LIMITS),
        ({"depth": 0}, LIMITS),
        ({"depth": 65}, LIMITS),
        ({"nodes": 0}, LIMITS),
        ({"nodes": 4097}, LIMITS),
        ({"topk": (1 << 31) - 1, "depth": (1 << 31) - 1, "nodes": (1 << 31) - 1}, LIMITS),
        ({"gate": 0}, "gate must be 1 or 2"),
        ({"gate": 3}, "gate must be 1 or 2"),
        ({"qkv_width": 0}, SIZES),
        ({"lm_head_width": 0}, SIZES),
        ({"down_width": (1 << 31) - 1}, SIZES),
        ({"down_bits": 2}, "bits must be 4 or 8"),
        ({"down_bits": 0}, "bits must be 4 or 8"),
        ({"down_bits": 4}, "codes have another size"),
        ({"down_block": 0}, BLOCKS),
        ({"down_block": 24}, BLOCKS),
        ({"down_block": 65552}, BLOCKS),
        ({"down_block": 32}, "codes have another size|scales have another size"),
        ({"down_width": 48}, "codes have another size|scales have another size"),
        # As many blocks as the codes have, in rows that are shorter by some columns: what reads them would not fit.
        ({"lm_head_width": 31}, "the matrices do not fit each other"),
        ({"gate_up_width": 31}, "the matrices do not fit each other"),
        ({"down_width": 31}, "the matrices do not fit each other"),
        ({"qkv_width": 31}, "the matrices do not fit each other"),
        ({"fuse_width": 0}, None),
    ],
    ids=str,
)
def test_attributes_that_fit_nothing(changes: dict[str, int], words: str | None) -> None:
    if words is None:  # a layer without fuse is another one: its own matrices tell
        made = HEAD.session(changes)
        refused("embedding and state are not as wide as what reads them", lambda: made.run(None, HEAD.call().feeds))
    else:
        refused(words, lambda: HEAD.session(changes))


def resized(name: str, outputs: int, width: int) -> dict[str, Any]:
    """A matrix of another size in the place of one."""
    matrix = replace(HEAD.matrices[name], outputs=outputs, width=width)
    return {f"{name}_{part}": array for part, array in matrix.stored.items()}


@pytest.mark.parametrize(
    ("name", "outputs", "width", "words"),
    [
        ("fuse", 48, 64, "the matrices do not fit each other"),
        ("output", 31, 32, "the matrices do not fit each other"),
        ("gate_up", 96, 32, "the matrices do not fit each other"),
        ("gate_up", 80, 32, "a gate needs a multiple of 32 outputs"),
        ("gate_up", 64, 48, "the matrices do not fit each other"),
        ("down", 33, 32, "the matrices do not fit each other"),
        ("down", 32, 64, "the matrices do not fit each other"),
        ("qkv", 64, 48, "the matrices do not fit each other"),
        ("lm_head", 60, 48, "the matrices do not fit each other"),
        ("fuse", 32, 80, "embedding and state are not as wide"),
        ("qkv", 65, 32, "the matrices of attention do not fit its heads"),
        ("output", 32, 48, "the matrices of attention do not fit its heads"),
        ("lm_head", 61, 32, "logits must be one row of the lm_head"),
    ],
)
def test_matrices_of_another_size(name: str, outputs: int, width: int, words: str) -> None:
    def call() -> None:
        made = HEAD.session({f"{name}_width": width}, resized(name, outputs, width))
        made.run(None, HEAD.call().feeds)

    refused(words, call)


@pytest.mark.parametrize("name", ["fuse", "qkv", "lm_head"])
@pytest.mark.parametrize("part", ["codes", "scales", "zeros"])
def test_constants_of_another_size(name: str, part: str) -> None:
    head = replace(HEAD, zeros=True)
    array = head.constants[f"{name}_{part}"]
    for other in (array[..., :-1], np.zeros(0, array.dtype)):
        wrong = partial(head.session, constants={f"{name}_{part}": other})
        refused("(codes|scales|zero points) have another size", wrong)


def test_matrices_that_are_no_constants() -> None:
    """A matrix that arrives with a call, and one of an optional input that is not there though its width is."""
    given = HEAD.call().set(down_codes=HEAD.constants["down_codes"])
    refused("codes and scales must be constants", lambda: HEAD.session(constants={"down_codes": None}, call=given))
    missing = {"fuse_codes": None, "fuse_scales": None}
    refused("codes and scales must be constants", lambda: HEAD.session(constants=missing))


@pytest.mark.parametrize("name", ["qkv", "down"])
def test_zero_points_that_are_no_constants(name: str) -> None:
    """They would be left out in silence."""
    head = replace(HEAD, zeros=True)
    given = head.call().set(**{f"{name}_zeros": head.constants[f"{name}_zeros"]})

    def call() -> None:
        head.session(constants={f"{name}_zeros": None}, call=given).run(None, given.feeds)

    refused("zero points must be constants", call)


def floats(*shape: int) -> NDArray[np.float32]:
    return np.zeros(shape, np.float32)


#: What a call gives in the place of what it should, and what is said.
CALLS: dict[str, tuple[dict[str, NDArray[Any]], str]] = {
    "logits few": ({"logits": floats(1, 59)}, "logits must be one row of the lm_head"),
    "logits many": ({"logits": floats(2, 60)}, "logits must be one row of the lm_head"),
    "logits none": ({"logits": floats(0, 60)}, "logits must be one row of the lm_head"),
    "state short": ({"state": floats(1, 1, 31)}, "state must be one row as wide as the lm_head"),
    "state rows": ({"state": floats(1, 2, 32)}, "state must be one row as wide as the lm_head"),
    "noise shallow": ({"noise": floats(3, 60)}, r"noise must be \[depth, rows\]"),
    "noise deep": ({"noise": floats(5, 60)}, r"noise must be \[depth, rows\]"),
    "noise narrow": ({"noise": floats(4, 2)}, r"noise must be \[depth, rows\] with topk to as many rows"),
    "noise wide": ({"noise": floats(4, 61)}, r"noise must be \[depth, rows\] with topk to as many rows"),
    "noise none": ({"noise": floats(4, 0)}, r"noise must be \[depth, rows\] with topk to as many rows"),
    "past beyond": ({"past": np.array([23])}, "past and tokens do not fit the cache"),
    "past far": ({"past": np.array([HUGE])}, "past and tokens do not fit the cache"),
    "past negative": ({"past": np.array([-1])}, "past and tokens do not fit the cache"),
    "past least": ({"past": np.array([-HUGE - 1])}, "past and tokens do not fit the cache"),
    "past many": ({"past": np.array([1, 2])}, r"past must be \[1\] and tokens \[1, A\]"),
    "past none": ({"past": np.zeros(0, np.int64)}, r"past must be \[1\] and tokens \[1, A\]"),
    "tokens many": ({"tokens": np.zeros((1, 20), np.int64)}, "past and tokens do not fit the cache"),
    "nothing at all": (
        {"tokens": np.zeros((1, 0), np.int64), "past": np.array([0])},
        "past and tokens do not fit the cache",
    ),
    "caches differ": ({"cache_v": floats(1, 2, 23, 8)}, r"caches must be \[1, kv_num_heads, slots, width\]"),
    "caches of heads": ({"cache_k": floats(1, 3, 24, 8)}, r"caches must be \[1, kv_num_heads, slots, width\]"),
    "two sequences": ({"cache_k": floats(2, 2, 24, 8)}, r"caches must be \[1, kv_num_heads, slots, width\]"),
    "no width": (dict.fromkeys(("cache_k", "cache_v"), floats(1, 2, 24, 0)), "heads must have 1 to 1024 values"),
    "wide": (dict.fromkeys(("cache_k", "cache_v"), floats(1, 2, 24, 1025)), "heads must have 1 to 1024 values"),
    "narrow": (dict.fromkeys(("cache_k", "cache_v"), floats(1, 2, 24, 7)), "the matrices of attention do not fit"),
    "no slots": (dict.fromkeys(("cache_k", "cache_v"), floats(1, 2, 0, 8)), "past and tokens do not fit the cache"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_fit_nothing(name: str) -> None:
    changes, words = CALLS[name]
    call = HEAD.call()
    wanted = HEAD.run(call)
    refused(words, lambda: HEAD.run(call.set(**changes)))
    assert HEAD.run(call).same(wanted)  # the next call is none the worse for it


def test_a_call_without_new_rows_drafts_from_what_is_there() -> None:
    call = HEAD.call(7, 0)
    wanted = HEAD.run(call.set(past=np.array([6]), tokens=np.zeros((1, 1), np.int64)))
    assert HEAD.run(call).same(wanted)


#: Constants in the place of the layer's own, and what a call says.
TABLES: dict[str, tuple[dict[str, NDArray[Any] | None], str]] = {
    "no embedding": ({"embedding": None}, "there must be an embedding, or its codes and scales"),
    "codes alone": (
        {"embedding": None, "embedding_codes": np.zeros((90, 32), np.int8)},
        "there must be an embedding, or its codes and scales",
    ),
    "scales alone": ({"embedding": None, "embedding_scales": floats(90, 1)}, "there must be an embedding"),
    "both": (
        {"embedding_codes": np.zeros((90, 32), np.int8), "embedding_scales": floats(90, 1)},
        "there must be an embedding, or its codes and scales",
    ),
    "embedding and scales": ({"embedding_scales": floats(90, 1)}, "there must be an embedding"),
    "embedding flat": ({"embedding": floats(90 * 32)}, r"the embedding must be \[ids, He\]"),
    "embedding without ids": ({"embedding": floats(0, 32)}, r"the embedding must be \[ids, He\]"),
    "embedding without values": ({"embedding": floats(90, 0)}, r"the embedding must be \[ids, He\]"),
    "embedding narrow": ({"embedding": floats(90, 31)}, "embedding and state are not as wide as what reads them"),
    "ids few": ({"embedding": floats(59, 32)}, "the lm_head has rows that are no ids"),
    "vocabulary short": ({"vocabulary": np.arange(59)}, "the vocabulary must have an id for each row of the lm_head"),
    "vocabulary none": ({"vocabulary": np.zeros(0, np.int64)}, "the vocabulary must have an id for each row"),
    "vocabulary beyond": ({"vocabulary": np.arange(60) + 90}, "the vocabulary has an id that the embedding has not"),
    "vocabulary far": ({"vocabulary": np.full(60, HUGE)}, "the vocabulary has an id that the embedding has not"),
    "vocabulary negative": ({"vocabulary": -1 - np.arange(60)}, "the vocabulary has an id that the embedding has not"),
    "cosines alone": ({"sin": None}, "cosines and sines come together"),
    "sines alone": ({"cos": None}, "cosines and sines come together"),
    "tables differ": ({"sin": floats(32, 3)}, r"rotation tables must be \[positions, pairs\]"),
    "tables flat": ({"cos": floats(32), "sin": floats(32)}, r"rotation tables must be \[positions, pairs\]"),
    "tables broad": ({"cos": floats(32, 5), "sin": floats(32, 5)}, r"rotation tables must be \[positions, pairs\]"),
    "tables short": ({"cos": floats(7, 4), "sin": floats(7, 4)}, "a position is beyond the rotation tables"),
    "tables none": ({"cos": floats(0, 4), "sin": floats(0, 4)}, "a position is beyond the rotation tables"),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_that_fit_nothing(name: str) -> None:
    changes, words = TABLES[name]
    made = HEAD.session(constants=changes)
    refused(words, lambda: made.run(None, HEAD.call().feeds))


@pytest.mark.parametrize("scales", [89, 91, 90 * 3, 90 * 64, 0], ids=str)
def test_scales_of_an_embedding_that_fit_nothing(scales: int) -> None:
    head = replace(HEAD, embedding_blocks=1)
    made = head.session(constants={"embedding_scales": floats(scales)})
    refused(r"the embedding's scales must be \[ids, blocks\]", lambda: made.run(None, head.call().feeds))


@pytest.mark.parametrize("name", [*sorted(HEAD.norms), "mlp_norm"])
def test_norms_of_another_width(name: str) -> None:
    width = HEAD.constants[name].size
    for other in (width - 1, 2 * width, 0):
        made = HEAD.session(constants={name: np.ones(other, np.float32)})
        refused("a norm has another width than what it norms", partial(made.run, None, HEAD.call().feeds))


def test_norms_that_have_no_place() -> None:
    beside = Head(fused=False, norms=frozenset({"norm"}))
    made = beside.session(constants={"input_norm": np.ones(32, np.float32)})
    refused("without fuse the layer's input has no norm of its own", lambda: made.run(None, beside.call().feeds))
    fed = Head(feed_normed=True)
    without = fed.session(constants={"norm": None})
    refused("there is no norm to feed back", lambda: without.run(None, fed.call().feeds))


def test_the_last_rows_of_the_cache_are_used() -> None:
    for past, fresh in ((23, 1), (0, 24)):
        call = HEAD.call(past, fresh)
        drafted: Drafted = HEAD.run(call)
        assert len(drafted.tokens) == HEAD.nodes and np.isfinite(drafted.logprobs).all()
    last: Call = HEAD.call(23, 1)
    refused("past and tokens do not fit the cache", lambda: HEAD.run(last.set(past=np.array([24]))))
