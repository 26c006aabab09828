"""Stated confidence against what came true."""

from __future__ import annotations

import random

import numpy as np
import pytest

from specexport.runtime.calibration import Calibration
from specexport.runtime.tree import Tree


def tree(tokens: list[int], parents: list[int], shares: list[float]) -> Tree:
    scores = [0.0]
    for parent, share in zip(parents[1:], shares, strict=True):
        scores.append(scores[parent] + float(np.log(share)))
    return Tree(np.array(tokens), np.array(parents), np.array(scores, np.float32))


def test_at_first_a_drafter_is_taken_at_its_word() -> None:
    drafted = tree([9, 1, 2, 3], [-1, 0, 1, 0], [0.6, 0.5, 0.3])
    assert Calibration().chances(drafted) == pytest.approx([1.0, 0.6, 0.3, 0.3], rel=1e-6)


@pytest.mark.parametrize(("says", "true"), [(0.9, 0.4), (0.3, 0.7), (0.97, 0.97)])
def test_counts_correct_the_word(says: float, true: float) -> None:
    rng, calibration = random.Random(2), Calibration()
    drafted = tree([9, 1, 2], [-1, 0, 1], [says, says])
    estimates = []
    for step in range(1500):
        first = 1 if rng.random() < true else 5
        calibration.learn(drafted, [first, 2 if rng.random() < true else 5])
        if step > 300:
            estimates.append(calibration.chances(drafted)[1:])
    assert np.mean(estimates, axis=0) == pytest.approx([true, true**2], abs=0.05)


def test_only_nodes_whose_parent_is_right_are_counted_verified_or_not() -> None:
    drafted = tree([9, 1, 2, 3], [-1, 0, 1, 2], [0.7, 0.7, 0.7])
    wrong, right = Calibration(), Calibration()
    for _ in range(20):
        wrong.learn(drafted, [5])
        right.learn(drafted, [1])  # says nothing about the nodes below
    assert wrong.chances(drafted)[1] < 0.2 and right.chances(drafted)[1] > 0.9
    assert wrong.by_depth()[1:] == right.by_depth()[1:]


def test_a_change_is_noticed_within_a_dozen_decisions() -> None:
    calibration, drafted = Calibration(), tree([9, 1], [-1, 0], [0.7])
    for _ in range(500):
        calibration.learn(drafted, [1])
    assert calibration.chances(drafted)[1] > 0.95
    for _ in range(12):
        calibration.learn(drafted, [5])
    assert calibration.chances(drafted)[1] < 0.4


def test_another_text_is_judged_by_all_of_the_past_more_than_the_last_one_was() -> None:
    calibration, drafted = Calibration(), tree([9, 1], [-1, 0], [0.7])
    for right, count in ((1, 300), (5, 60)):
        for _ in range(count):
            calibration.learn(drafted, [right])
    late = calibration.chances(drafted)[1]
    calibration.begin()
    assert late < 0.2 and late + 0.1 < calibration.chances(drafted)[1] < 0.9
