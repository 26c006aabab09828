"""GrowTree: trees beside a reference in double precision, what is left of them, and calls that can say nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engines.kernels.grow_node import HEADS, Call, Drafted, Head, Path, Reference
from tests.engines.kernels.one_node import needs_kernels

pytestmark = needs_kernels

#: The reference rounds rows as the operator does, so that they agree to the rounding of floats (CLOSE), but for a value
#: that lies half between two codes: one code of 254 more or less moves a log probability by a hundredth at most.
CLOSE, TOLERANCE = 1e-5, 0.02
CALLS = [(0, 1), (0, 4), (6, 1), (17, 3), (21, 3)]


def well_formed(head: Head, drafted: Drafted) -> None:
    """Parents first, no more nodes than asked for, and in the order of EAGLE-2: depth by depth, the children of the
    better node first, the better child first."""
    count = len(drafted.tokens)
    assert drafted.parents.shape == drafted.logprobs.shape == (count,) and count <= head.nodes
    scores, depths = [0.0, *drafted.logprobs.tolist()], [0]
    order = []
    for node, parent in enumerate(drafted.parents.tolist()):
        assert 0 <= parent <= node
        depths.append(depths[parent] + 1)
        assert scores[node + 1] <= scores[parent]
        order.append((depths[-1], -scores[parent], -scores[node + 1]))
    assert order == sorted(order)
    assert max(depths) <= head.depth
    assert drafted.tokens.size == 0 or (drafted.tokens.min() >= 0 and drafted.tokens.max() < head.ids)


@pytest.mark.parametrize("name", HEADS)
def test_trees_are_the_references(name: str) -> None:
    head, compared, errors = HEADS[name], 0, list[float]()
    deepest = 0
    for past, fresh in CALLS:
        for seed in (0, 1):
            call = head.call(past, fresh, seed)
            drafted, reference = head.run(call), Reference(head, call)
            well_formed(head, drafted)
            mine = drafted.paths(head)
            errors += [abs(score - reference.score(path)) for path, score in mine.items()]
            kept, margin, _ = reference.grow()
            deepest = max(deepest, *map(len, mine))
            if margin > TOLERANCE:
                assert mine.keys() == kept.keys()
                compared += 1
    assert max(errors) < TOLERANCE and np.median(errors) < CLOSE
    assert compared >= 5 and deepest >= min(3, head.depth)


def test_the_comparison_would_tell() -> None:
    """Each thing that the operator is told apart by gives log probabilities that are far from the reference's."""
    base = HEADS["norms of heads"]
    others = {
        "hidden_first": replace(base, hidden_first=True),
        "feed_normed": replace(base, feed_normed=True),
        "gate": replace(base, gate=1),
        "norm": replace(base, norms=base.norms - {"query_norm"}),
        "rotation": replace(base, pairs=None),
        "topk": replace(base, topk=2),
    }
    call = base.call(17, 3, 1)
    kept, margin, _ = Reference(base, call).grow()
    assert margin > TOLERANCE and base.run(call).paths(base).keys() == kept.keys()
    for name, other in others.items():
        mine = other.run(call).paths(other)
        assert mine.keys() != kept.keys() or max(abs(mine[path] - kept[path]) for path in kept) > TOLERANCE, name


def test_equal_candidates_come_by_their_rows() -> None:
    """Every token is as good as any other: rows come first to last, and a child is never before its parent."""
    head = replace(HEADS["projected"], nodes=12)
    call = head.call().set(logits=np.zeros((1, head.rows), np.float32), noise=np.zeros((4, head.rows), np.float32))
    made = head.session(constants={"lm_head_scales": np.zeros_like(head.constants["lm_head_scales"])})
    tokens, parents, logprobs = made.run(None, call.feeds)
    assert tokens.tolist() == [0, 1, 2] * 4 and parents.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert np.allclose(logprobs, np.repeat([1, 2], [3, 9]) * -np.log(60), atol=1e-5)


def test_a_child_as_good_as_its_parent_comes_after_it() -> None:
    """Log probabilities of 0: where a token is certain, its path costs nothing."""
    head = replace(HEADS["projected"], nodes=3)
    noise = np.full((4, head.rows), -1e4, np.float32)
    noise[:, 7] = 0
    drafted = head.run(head.call().set(noise=noise, logits=np.zeros((1, head.rows), np.float32)))
    assert drafted.tokens.tolist() == [7, 7, 7] and drafted.parents.tolist() == [0, 1, 2]
    assert np.abs(drafted.logprobs).max() == 0


def test_as_many_nodes_as_candidates() -> None:
    head = HEADS["all candidates"]
    assert len(head.run(head.call()).tokens) == 2 + 2 * 2 * 2 < head.nodes
    assert len(HEADS["one depth"].run(HEADS["one depth"].call()).tokens) == 4


# least ----------------------------------------------------------------------------------------------------------


def prefix(head: Head, call: Call, depth: int) -> Drafted:
    """The tree of a smaller depth."""
    return replace(head, depth=depth).run(call.set(noise=call.feeds["noise"][:depth]))


@pytest.mark.parametrize("name", ["projected", "side by side", "many rows"])
def test_depths_that_are_hardly_reached_are_left_out(name: str) -> None:
    """Between how often the nodes of two depths are right, the deeper one goes, and all below."""
    head = replace(HEADS[name], nodes=60)
    call = head.call(6, 2)
    *_, chances = Reference(head, call).grow()
    assert all(before > after + 1e-3 for before, after in pairwise(chances))
    assert head.run(call).same(prefix(head, call, head.depth))
    sizes = []
    for depth in range(1, head.depth):
        # Depth d + 1 comes of the nodes of depth d, which must be right often enough.
        least = (chances[depth - 1] + (chances[depth - 2] if depth > 1 else 2.0)) / 2
        drafted = replace(head, least=least).run(call)
        assert drafted.same(prefix(head, call, depth))
        well_formed(head, drafted)
        sizes.append(len(drafted.tokens))
    assert sizes == sorted(set(sizes)) and sizes[0] == head.topk
    # What is never reached changes nothing.
    assert replace(head, least=chances[head.depth - 2] / 2).run(call).same(head.run(call))


# What says nothing ------------------------------------------------------------------------------------------------


def _with(name: str, value: float, *place: Any) -> Callable[[Call], Call]:
    def change(call: Call) -> Call:
        array = call.feeds[name].copy()
        array[place] = value
        return call.set(**{name: array})

    return change


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["projected", "many rows", "one depth"])
def test_logits_that_are_none_draft_nothing(name: str, value: float) -> None:
    head = HEADS[name]
    for place in ((0, 0), (0, head.valid - 1), (0, slice(None))):
        drafted = head.run(_with("logits", value, *place)(head.call()))
        assert drafted.tokens.shape == drafted.parents.shape == drafted.logprobs.shape == (0,)
    nothing = _with("logits", -np.inf, 0, slice(None))(head.call())
    assert head.run(nothing).tokens.shape == (0,)
    well_formed(head, head.run(head.call()))  # the next call is none the worse for it


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["state", "cache_k", "cache_v", "noise"])
def test_below_what_is_none_nothing_is_drafted(name: str, value: float) -> None:
    """A layer whose numbers are none; the root's own candidates stay."""
    head = replace(HEADS["projected"], nodes=60)
    call = head.call(6, 2)
    changes: dict[str, tuple[Any, ...]] = {"state": (0, 0, 3), "noise": (1, 9)}
    drafted = head.run(_with(name, value, *changes.get(name, (0, slice(None), 4, 2)))(call))
    well_formed(head, drafted)
    if name == "cache_k" and np.isinf(value):
        return  # a key of +inf and -inf by query: what is left may be a number
    assert drafted.same(prefix(head, call, 1))


def test_some_nodes_of_a_depth_may_say_nothing() -> None:
    """An embedding that holds a NaN: its token has no children, the others have theirs."""
    head = replace(HEADS["projected"], nodes=60)
    call = head.call(6, 2)
    wanted = head.run(call)
    token = int(wanted.tokens[1])
    table = head.constants["embedding"].copy()
    table[token, 5] = np.nan
    found = Drafted(*head.session(constants={"embedding": table}).run(None, call.feeds))
    well_formed(head, found)
    paths = found.paths(head)
    ends = [path for path in paths if token in path]
    assert ends and all(token not in path[:-1] for path in paths)
    assert any(len(path) == head.depth for path in paths)
    first: dict[Path, float] = {path: score for path, score in wanted.paths(head).items() if len(path) == 1}
    assert first.items() <= paths.items()


def test_tokens_that_are_excluded_are_never_drafted() -> None:
    head = replace(HEADS["projected"], nodes=60)
    noise = np.full((head.depth, head.rows), -np.inf, np.float32)
    noise[:, [3, 41]] = 0
    drafted = head.run(head.call().set(noise=noise))
    well_formed(head, drafted)
    assert {*drafted.tokens.tolist()} == {3, 41}
    assert sum(parent == 0 for parent in drafted.parents) == 2 < head.topk


# Threads ----------------------------------------------------------------------------------------------------------


def test_threads_give_the_same_bits() -> None:
    """Of a layer that is large enough to be shared out."""
    small = Head(
        hidden=256, embedding=256, inner=512, dim=32, rows=3000, ids=3000, valid=3000, topk=8, depth=5, nodes=60
    )
    one, four = small, replace(small, threads=4)
    for past, fresh in ((0, 1), (17, 3)):
        call = one.call(past, fresh)
        wanted = one.run(call)
        assert len(wanted.tokens) == 60
        for _ in range(3):
            assert four.run(call).same(wanted)


def test_calls_leave_nothing_behind() -> None:
    """Scratch memory is a thread's: layers of other sizes that run in between change nothing, nor do inputs."""
    calls: list[tuple[Head, Call, Drafted]] = []
    for head in HEADS.values():
        call = head.call(3, 2)
        calls.append((head, call, head.run(call)))
    kept: list[dict[str, NDArray[Any]]] = [{name: x.copy() for name, x in call.feeds.items()} for _, call, _ in calls]
    for head, call, wanted in reversed(calls):
        assert head.run(call).same(wanted)
    for (_, call, _), before in zip(calls, kept, strict=True):
        assert all(np.array_equal(call.feeds[name], before[name], equal_nan=True) for name in before)
