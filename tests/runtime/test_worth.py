"""What heads may lose, and what is made of what they gave."""

from __future__ import annotations

import random

import pytest

from specexport.runtime.drafters import make_drafter
from specexport.runtime.worth import EXPLORE, EXPLORE_FIRST, EXPLORE_MOST, TRUST, Head, Ledger, Prior, promise_of


def head(prior: Prior | None = None) -> Head:
    drafter = make_drafter("suffix", 100)
    assert drafter is not None
    return Head(drafter, prior)


@pytest.mark.parametrize("tried", [True, False])
@pytest.mark.parametrize("cost", [0.05, 0.6, 1.4])
def test_a_head_that_gives_nothing_loses_what_it_may(cost: float, tried: bool) -> None:
    ledger, lost = Ledger(), 0.0
    for _ in range(1000):
        asked = ledger.budget + (0.0 if tried else ledger.trust) >= cost
        if asked:
            lost -= ledger.settle(0, cost, 0.0, tried=tried)
        ledger.spend(1, 1.0 + cost * asked, 1, 1.0)
    first = EXPLORE_FIRST + (0.0 if tried else TRUST)
    assert 0.5 * first < lost <= first + EXPLORE * (1000.0 + lost)


def test_a_head_that_pays_on_average_is_not_stopped_by_bad_luck() -> None:
    """What it wins is what the lookups alone would have needed, not what it needs itself."""
    rng, ledger, stopped = random.Random(1), Ledger(), 0
    ledger.budget = EXPLORE_MOST
    for _ in range(2000):
        right = 0
        while right < 6 and rng.random() < 0.8:
            right += 1
        if ledger.budget + ledger.trust < 0.8:
            stopped += 1
            ledger.spend(1, 1.0, 1, 1.0)
            continue
        ledger.settle(right, 0.8, 0.0, tried=False)
        ledger.spend(1 + right, 1.8, 1, 1.0)
    assert stopped < 20
    assert ledger.price == pytest.approx(3.95 / 1.8, rel=0.25)


def test_catching_up_with_a_long_prompt_leaves_something_to_lose() -> None:
    ledger = Ledger()
    assert ledger.settle(1, 0.5, 9.0, tried=True) == pytest.approx(1 - 0.5 - 9.0)
    assert ledger.budget == pytest.approx(min(EXPLORE_FIRST, 1.0) + 0.5)


def test_a_new_prompt_changes_the_price_soon() -> None:
    ledger = Ledger()
    for _ in range(300):
        ledger.spend(4, 1.2, 4, 1.2)
    assert ledger.price == pytest.approx(4 / 1.2, rel=0.01)
    ledger.begin()
    assert ledger.price == pytest.approx(4 / 1.2, rel=0.01)
    for _ in range(20):
        ledger.spend(1, 1.0, 1, 1.0)
    assert ledger.price < 1.6


def test_what_a_head_is_worth_follows_the_price_and_what_came_of_its_promises() -> None:
    good = head()
    assert not good.known and good.margin(0, 1.0) < 0.0
    for _ in range(40):
        good.judge(promise_of(0.0), 1.5, 0.7, 1, 1.0, tried=False)
    assert good.known and good.worth(0, 1.0) > 0.2 > -0.1 > good.worth(0, 3.0)
    before = good.worth(0, 1.0)
    for _ in range(40):
        good.judge(promise_of(0.0), 1.5, 0.7, 0, 1.0, tried=False)
    assert good.truth < 0.5 and good.worth(0, 1.0) < 0.0 < before
    assert head(Prior(2.0, 0.5)).margin(0, 1.0) > 1.0 and head(Prior(0.2, 0.5)).margin(0, 1.0) < 0.0


def test_promises_fall_into_classes() -> None:
    assert [promise_of(tokens) for tokens in (0.0, 0.5, 1.0, 2.0, 9.0)] == [0, 1, 2, 3, 4]
