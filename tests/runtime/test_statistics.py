"""Counts of one run, by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest

from specexport.runtime.statistics import RunStatistics
from specexport.runtime.tree import Tree


def branching() -> Tree:
    """Root 5 with children 6 and 7; 7 has a child 8."""
    return Tree(np.array([5, 6, 7, 8]), np.array([-1, 0, 0, 2]))


def test_acceptance_by_depth_counts_only_decided_drafts() -> None:
    statistics = RunStatistics(tokens=1)
    statistics.add_call(branching(), [0, 2, 3], [7, 8, 9])  # both depths right, nothing below
    statistics.add_call(branching(), [0, 2], [7, 9])  # depth 2 wrong
    statistics.add_call(branching(), [0, 1], [6, 9])  # depth 1 right, a leaf
    statistics.add_call(branching(), [0], [9])  # depth 1 wrong
    statistics.add_call(Tree.chain([5]), [0], [9])  # nothing drafted
    assert statistics.proposed == [4, 2]
    assert statistics.accepted == [3, 1]
    assert statistics.acceptance_by_depth == [0.75, 0.5]
    assert statistics.target_calls == 5 and statistics.tokens == 10
    assert statistics.tau == pytest.approx(9 / 5)
    assert statistics.drafted_nodes == 12 and statistics.tree_sizes == {4: 4, 1: 1}


def test_a_right_draft_cut_by_a_stop_is_accepted_and_nothing_below_it_is_judged() -> None:
    statistics = RunStatistics(tokens=1)
    statistics.add_call(Tree.chain([1, 2, 3, 4]), [0], [2])
    assert statistics.proposed == [1] and statistics.accepted == [1]


def test_plain_decoding_has_tau_one() -> None:
    statistics = RunStatistics(tokens=1)
    for token in range(7):
        statistics.add_call(Tree.chain([token]), [0], [token + 1])
    assert statistics.tau == 1.0 and statistics.acceptance_by_depth == []


def test_shares_sum_to_one_and_speed_excludes_the_prefill() -> None:
    statistics = RunStatistics(tokens=1, prefill_s=100.0, decode_s=2.0, draft_s=0.3, verify_s=1.2)
    for token in range(8):
        statistics.add_call(Tree.chain([token]), [0], [token + 1])
    assert sum(statistics.time_share.values()) == pytest.approx(1.0)
    assert statistics.time_share["host"] == pytest.approx(0.25)
    assert statistics.tokens_per_second == pytest.approx(4.0)


def test_a_run_without_decode_calls_is_all_zeros() -> None:
    statistics = RunStatistics(tokens=1)
    assert statistics.tau == statistics.tokens_per_second == 0.0
    assert set(statistics.time_share.values()) == {0.0}


def test_names_are_stable_and_plain_json() -> None:
    statistics = RunStatistics(tokens=1)
    statistics.add_call(branching(), [0, 2, 3], [7, 8, 9])
    figures = statistics.as_dict()
    assert json.loads(json.dumps(figures)) == figures
    assert list(figures) == [
        "drafter",
        "acceptance",
        "lossy",
        "finish_reason",
        "prompt_tokens",
        "reused_tokens",
        "tokens",
        "target_calls",
        "tau",
        "tokens_per_second",
        "time_to_first_token_s",
        "prefill_s",
        "prefill_calls",
        "decode_s",
        "time_share",
        "acceptance_by_depth",
        "proposed_by_depth",
        "accepted_by_depth",
        "drafted_nodes",
        "tree_sizes",
        "decisions",
    ]
