from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport.profiles.acceptance import constant
from specexport.profiles.tree_search import (
    best_chain,
    best_tree,
    chain_speedup,
    expected_tokens,
    mean_step,
    search,
)

Path = tuple[int, ...]
Rows = list[list[float]]


def trees(nodes: int, depth: int, ranks: int) -> set[frozenset[Path]]:
    """Every tree of 1 to ``nodes`` drafted nodes: ancestor-closed sets of rank paths."""
    found: set[frozenset[Path]] = set()
    newest = {frozenset[Path]()}
    for _ in range(nodes):
        newest = {
            tree | {(*parent, rank)}
            for tree in newest
            for parent, rank in product([(), *(path for path in tree if len(path) < depth)], range(ranks))
            if (*parent, rank) not in tree
        }
        found |= newest
    return found


def random_rows(random: Random, depth: int, ranks: int) -> Rows:
    """Acceptance rows that sum to at most 1, in no order."""
    rows = []
    for _ in range(depth):
        values = [random.random() for _ in range(ranks)]
        share = random.random() / max(1e-9, sum(values))
        rows.append([value * share for value in values])
    return rows


@pytest.mark.parametrize("seed", range(8))
def test_best_tree_equals_brute_force(seed: int) -> None:
    rows = random_rows(Random(seed), depth=3, ranks=3)
    for nodes in (1, 2, 3, 4):
        for depth in (1, 2, 3):
            best = max(expected_tokens(sorted(tree), rows) for tree in trees(nodes, depth, 3))
            found = best_tree(rows, nodes, depth)
            assert len(found) <= nodes and max(map(len, found)) <= depth
            assert expected_tokens(found, rows) == pytest.approx(best)
            assert all(path[:-1] == () or path[:-1] in found[: found.index(path)] for path in found)


@pytest.mark.parametrize("seed", range(6))
def test_search_equals_brute_force_over_the_cost_curve(seed: int) -> None:
    """Real curves bend and step: the best rate over every tree, with depth charged."""
    random = Random(100 + seed)
    rows = random_rows(random, depth=3, ranks=2)
    step = {nodes: 1.0 + 0.1 * nodes + random.random() * 0.3 for nodes in range(1, 6)}
    draft = 0.05 + random.random() * 0.3
    best = 1.0 / step[1]
    for tree in trees(4, 3, 2):
        seconds = step[len(tree) + 1] + draft * max(map(len, tree))
        best = max(best, expected_tokens(sorted(tree), rows) / seconds)
    found = search(rows, step.__getitem__, lambda depth: draft * depth, range(1, 6), max_depth=3)
    assert found.rate == pytest.approx(best)
    assert found.seconds == pytest.approx(step[found.nodes] + (draft * found.depth if found.paths else 0.0))


def test_static_widths_cost_what_the_engine_was_built_for() -> None:
    """With widths 1 and 8 only, a tree of three nodes is paid for as eight."""
    rows = [[0.5, 0.2], [0.5, 0.2]]
    found = search(rows, lambda nodes: 1.0 + 0.05 * nodes, lambda _: 0.0, [1, 8], max_depth=2)
    assert found.seconds == pytest.approx(1.4)
    assert found.nodes == 7  # all six paths: the seventh drafted node does not exist


def test_nothing_is_drafted_where_it_does_not_pay() -> None:
    rows = [[0.1]] * 4
    found = search(rows, lambda nodes: float(nodes), lambda _: 0.0, range(1, 9), max_depth=4)
    assert (found.paths, found.tau, found.seconds) == ((), 1.0, 1.0)
    assert search([], lambda _: 1.0, lambda _: 0.0, range(1, 9), max_depth=4).paths == ()
    assert search([[]], lambda _: 1.0, lambda _: 0.0, range(1, 9), max_depth=4).paths == ()


def test_expected_tokens_of_the_published_formula() -> None:
    """E[tokens] = (1 - a^(K+1)) / (1 - a): Leviathan et al. 2023, equation 1."""
    for alpha, depth in product((0.1, 0.5, 0.8, 0.95), (1, 3, 7)):
        rows = constant(alpha, depth, 1)
        chain = [(0,) * length for length in range(1, depth + 1)]
        assert expected_tokens(chain, rows) == pytest.approx((1 - alpha ** (depth + 1)) / (1 - alpha))


@pytest.mark.parametrize(
    ("alpha", "depth", "speedup"),
    # Leviathan et al. 2023, table 1 (c = 0).
    [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 2, 2.71), (0.9, 10, 6.86)],
)
def test_published_speedups(alpha: float, depth: int, speedup: float) -> None:
    assert chain_speedup(alpha, depth, 0.0) == pytest.approx(speedup, abs=0.006)


@pytest.mark.parametrize(("alpha", "cost"), list(product((0.3, 0.6, 0.8, 0.9), (0.01, 0.05, 0.2))))
def test_k_sweep_agrees_with_the_formula(alpha: float, cost: float) -> None:
    """On flat costs the best chain is the best K of the published formula, summed term by term here."""
    values = {k: sum(alpha**i for i in range(k + 1)) / (k * cost + 1) for k in range(1, 17)}
    found = best_chain(constant(alpha, 16, 1), lambda _: 1.0, lambda depth: cost * depth, 16)
    best = max(values, key=lambda depth: values[depth])
    assert (found.depth, found.rate) == (best, pytest.approx(values[best]))
    assert all(chain_speedup(alpha, depth, cost) == pytest.approx(value) for depth, value in values.items())


@given(st.floats(0.01, 0.99), st.integers(1, 12), st.floats(0.0, 1.0))
def test_formula_is_monotone(alpha: float, depth: int, cost: float) -> None:
    assert chain_speedup(alpha, depth, cost) <= chain_speedup(min(1.0, alpha + 0.01), depth, cost)
    assert chain_speedup(alpha, depth, cost + 0.01) < chain_speedup(alpha, depth, cost)


def test_certain_drafts_give_one_token_a_draft() -> None:
    assert chain_speedup(1.0, 4, 0.0) == 5.0


def test_prefixes_of_the_best_tree_are_best_trees() -> None:
    rows = random_rows(Random(7), depth=4, ranks=4)
    whole = best_tree(rows, 20, 4)
    for nodes in range(1, 20):
        assert expected_tokens(whole[:nodes], rows) == pytest.approx(expected_tokens(best_tree(rows, nodes, 4), rows))


def test_steps_that_draft_less_cost_less() -> None:
    """Half of the steps find nothing, a quarter one node, a quarter three or more."""
    step = {1: 10.0, 2: 12.0, 3: 15.0, 4: 20.0, 9: 40.0}.__getitem__
    mean = mean_step(step, (0.5, 0.25, 0.25))
    assert mean(1) == 10.0
    assert mean(2) == pytest.approx(0.5 * 10 + 0.5 * 12)
    assert mean(4) == pytest.approx(0.5 * 10 + 0.25 * 12 + 0.25 * 20)
    assert mean(9) == pytest.approx(0.5 * 10 + 0.25 * 12 + 0.25 * 40)
    assert mean_step(step, ())(9) == 40.0


def test_search_work_is_widths_times_depths() -> None:
    calls = 0

    def step_s(nodes: int) -> float:
        nonlocal calls
        calls += 1
        return 1.0 + 0.01 * nodes

    search(constant(0.6, 8, 8), step_s, lambda depth: 0.01 * depth, range(1, 65), max_depth=8)
    assert calls <= 8 * 64 + 1


def test_a_copy_that_goes_on_gives_short_chains_more_than_their_first_rows_say() -> None:
    """Matches of 7 tokens half of the time, else nothing: a chain of 3 takes a match in two steps."""
    rows = ((0.5,), *((1.0,),) * 6, (0.0,))
    chain = [(0,) * depth for depth in (1, 2, 3)]
    assert expected_tokens(chain, rows) == pytest.approx(1 + 1.5)
    assert expected_tokens(chain, rows, copies=True) == pytest.approx((0.5 * 1 + 0.5 * 8) / (0.5 * 1 + 0.5 * 2))
    constant = ((0.6,),) * 4  # nothing to know about where a step begins
    assert expected_tokens(chain, constant, copies=True) == pytest.approx(expected_tokens(chain, constant))
    assert expected_tokens([], rows, copies=True) == 1.0
    assert expected_tokens(chain, ((1.0,),), copies=True) == pytest.approx(4.0)
