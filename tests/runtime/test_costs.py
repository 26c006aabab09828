"""Learned costs: the line is found, hiccups and single widths do not bend it."""

from __future__ import annotations

import random

import pytest

from specexport.runtime.costs import NODE_SHARE, LearnedCosts


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


def test_before_any_measurement_only_ratios_mean_something() -> None:
    costs = LearnedCosts()
    assert costs.step_s(11, 0) / costs.step_s(1, 0) == pytest.approx(1 + 10 * NODE_SHARE)
    assert 0 < costs.draft_s("head") < costs.step_s(1, 0)


def test_a_hiccup_of_the_machine_is_no_cost() -> None:
    costs = LearnedCosts()
    for step in range(200):
        costs.observe_step(1 + step % 8, 0, 0.01)
        costs.observe_draft("head", 0.002)
    costs.observe_step(8, 0, 100.0)
    costs.observe_draft("head", 100.0)
    assert costs.step_s(8, 0) < 0.012 and costs.draft_s("head") < 0.003
