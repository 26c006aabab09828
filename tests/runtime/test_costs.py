"""Learned costs: the surface is found, hiccups and single widths do not bend it."""

from __future__ import annotations

import random

import pytest

from specexport.runtime.costs import NODE_SHARE, NODE_SHARES, DraftShare, LearnedCosts


def test_the_line_is_found_in_noise_and_followed_when_it_moves() -> None:
    rng, costs = random.Random(1), LearnedCosts()
    for slope in (0.002, 0.0005):
        for _ in range(400):
            nodes = rng.choice([1, 1, 4, 8, 16])
            costs.observe_step(nodes, 100, (0.02 + slope * (nodes - 1)) * rng.uniform(0.9, 1.1))
        for nodes in (1, 8, 16):
            assert costs.step_s(nodes, 100) == pytest.approx(0.02 + slope * (nodes - 1), rel=0.08)


def test_one_width_alone_keeps_the_prior_slope() -> None:
    costs = LearnedCosts()
    for _ in range(100):
        costs.observe_step(1, 0, 0.5)
    assert costs.step_s(1, 0) == pytest.approx(0.5)
    assert costs.step_s(11, 0) == pytest.approx(0.5 * (1 + 10 * NODE_SHARE))


def test_what_a_long_text_showed_holds_for_a_short_one_and_a_mood_of_the_machine_for_all_widths() -> None:
    def true_s(nodes: int, used: int) -> float:
        return 0.004 * (1 + 0.03 * (nodes - 1) + 0.2 * used / 1000 + 0.06 * (nodes - 1) * used / 1000)

    rng, costs = random.Random(2), LearnedCosts(0.05, row_share=0.3)
    for mood, first, last in ((1.0, 100, 300), (1.0, 1200, 1500)):
        for used in range(first, last):
            nodes = rng.choice([1, 1, 2, 6, 12])
            costs.observe_step(nodes, used, mood * true_s(nodes, used) * rng.uniform(0.95, 1.05))
    for _ in range(60):  # a short text in which nothing is drafted, on a machine that is slower now
        costs.observe_step(1, 150, 1.3 * true_s(1, 150) * rng.uniform(0.95, 1.05))
    for nodes, used in ((1, 150), (8, 150), (8, 1400), (16, 700)):
        assert costs.step_s(nodes, used) == pytest.approx(1.3 * true_s(nodes, used), rel=0.12)


def test_before_any_measurement_only_ratios_mean_something() -> None:
    costs = LearnedCosts()
    assert costs.step_s(11, 0) / costs.step_s(1, 0) == pytest.approx(1 + 10 * NODE_SHARE)
    assert 0 < costs.draft_s("head") < costs.step_s(1, 0)


@pytest.mark.parametrize("behind", [0, 50, 700])
def test_what_a_draft_costs_is_told_from_what_catching_up_costs(behind: int) -> None:
    rng, costs = random.Random(1), LearnedCosts()
    costs.observe_step(1, 0, 0.02)
    draft_s, row_s = 0.011, 3e-5
    for step in range(20):
        lag = behind if step == 0 else 0
        costs.observe_draft("head", (draft_s + lag * row_s) * rng.uniform(0.8, 1.2), lag)
        # From the first one on it is within a factor of two: a draft never seems to cost nothing.
        assert 0.5 * draft_s < costs.draft_s("head") < 2.0 * draft_s
    assert costs.draft_s("head") == pytest.approx(draft_s, rel=0.15)
    if behind > 500:
        assert costs.draft_s("head", 1000) - costs.draft_s("head") == pytest.approx(1000 * row_s, rel=0.4)


def test_a_step_of_small_weights_shows_each_node_more() -> None:
    shares = [LearnedCosts(share).step_s(9, 0) for share in (NODE_SHARE, NODE_SHARES["int8"], NODE_SHARES["int4"])]
    assert shares == sorted(shares) and shares[0] < shares[-1]


def test_a_hiccup_of_the_machine_is_no_cost() -> None:
    costs = LearnedCosts()
    for step in range(200):
        costs.observe_step(1 + step % 8, 0, 0.01)
        costs.observe_draft("head", 0.002)
    costs.observe_step(8, 0, 100.0)
    costs.observe_draft("head", 100.0)
    assert costs.step_s(8, 0) < 0.012 and costs.draft_s("head") < 0.003


def test_what_is_expected_of_a_draft_holds_until_it_is_timed_and_only_for_its_drafter() -> None:
    costs = LearnedCosts(draft_shares={"head": DraftShare(draft=0.1, row=0.001, spread=0.5)})
    costs.observe_step(1, 0, 0.02)
    assert costs.draft_s("head") == pytest.approx(0.1 * costs.step_s(1, 0))
    assert costs.draft_s("head", 100) == pytest.approx(2 * costs.draft_s("head"))
    assert costs.draft_s("other") == pytest.approx(DraftShare().draft * costs.step_s(1, 0))
    for _ in range(20):
        costs.observe_draft("head", 0.006)
    assert costs.draft_s("head") == pytest.approx(0.006, rel=0.1)
