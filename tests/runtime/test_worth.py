"""What heads may lose, and what is made of what they gave."""

from __future__ import annotations

import random

import pytest

from specexport.runtime.drafters import make_drafter
from specexport.runtime.worth import (
    EXPLORE,
    EXPLORE_AGAIN,
    EXPLORE_FIRST,
    EXPLORE_MOST,
    PROBE_FIRST,
    PROBE_MOST,
    TRUST,
    Head,
    Ledger,
    Prior,
    first_choice,
    promise_of,
)


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
    assert good.margin(0, 1.0) < 0.0
    for _ in range(40):
        good.judge(promise_of(0.0), 1.5, 0.7, 1, 1.0, tried=False)
    assert good.worth(0, 1.0) > 0.2 > -0.1 > good.worth(0, 3.0)
    before = good.worth(0, 1.0)
    for _ in range(40):
        good.judge(promise_of(0.0), 1.5, 0.7, 0, 1.0, tried=False)
    assert good.truth(0) < 0.5 and good.worth(0, 1.0) < 0.0 < before
    assert head(Prior(2.0, 0.5)).margin(0, 1.0) > 1.0 and head(Prior(0.2, 0.5)).margin(0, 1.0) < 0.0


def test_what_came_of_promises_is_told_apart_by_what_the_lookups_say() -> None:
    """Joined with sure lookups a head promises as much and gives less."""
    both = head()
    for _ in range(40):
        both.judge(0, 1.0, 0.3, 1, 1.0, tried=False)
        both.judge(3, 1.0, 0.3, 0, 1.0, tried=False)
    assert both.truth(0) > 0.8 > 0.4 > both.truth(3)
    assert both.worth(0, 1.0) > 0.4 > 0.1 > both.worth(3, 1.0)


def test_what_is_known_says_less_of_steps_with_sure_lookups() -> None:
    known = head(Prior(1.0, 0.45))
    assert known.worth(0, 1.0) == pytest.approx(0.55)
    assert known.margin(1, 1.0) > 0.0 > known.margin(3, 1.0)


def test_what_is_known_is_weak() -> None:
    """Some tens of steps that show otherwise are believed."""
    praised, blamed = head(Prior(2.0, 0.5)), head(Prior(0.1, 0.5))
    for _ in range(20):
        praised.judge(0, 0.1, 0.5, 0, 1.0, tried=False)
        blamed.judge(0, 1.5, 0.5, 2, 1.0, tried=False)
    assert praised.margin(0, 1.0) < 0.0 < blamed.margin(0, 1.0)


def test_the_first_choice_is_the_best_rate_that_beats_plain_decoding() -> None:
    dear, cheap, poor = Prior(1.0, 0.6), Prior(0.5, 0.1), Prior(0.3, 0.4)
    assert first_choice({"dear": dear, "cheap": cheap, "poor": poor}) == "cheap"
    assert first_choice({"poor": poor}) is None is first_choice({})


def test_a_head_that_is_not_due_waits_whatever_the_prompt() -> None:
    due = head()
    assert due.quiet == due.wait == PROBE_FIRST
    waiting = Head(due.drafter, Prior(0.1, 0.5), due=False)
    waiting.begin()
    assert (waiting.quiet, waiting.wait) == (0, PROBE_MOST)
    for _ in range(3):
        due.judge(0, 0.0, 0.5, 0, 1.0, tried=True)
    due.begin()
    assert due.quiet == due.wait == 8 * PROBE_FIRST


def test_promises_fall_into_classes() -> None:
    assert [promise_of(tokens) for tokens in (0.0, 0.5, 1.0, 2.0, 9.0)] == [0, 1, 2, 3, 4]


def test_a_new_text_is_taken_to_be_half_like_the_last_one_and_half_like_most() -> None:
    mine, useless = head(Prior(0.5, 0.3)), head()
    for _ in range(50):
        for each, gives in ((mine, 1), (useless, 0)):
            each.begin()
            for _ in range(10):
                each.judge(0, float(gives), 0.3, gives, 1.2, tried=False)
    usual = mine.margin(0, 1.2)
    for _ in range(12):
        mine.judge(0, 0.0, 0.3, 0, 1.2, tried=False)
    disappointing = mine.margin(0, 1.2)
    mine.begin()
    useless.begin()
    assert disappointing < 0.0 < mine.margin(0, 1.2) < usual
    assert useless.margin(0, 1.2) < -0.3


def test_where_a_head_is_expected_to_pay_a_new_text_begins_with_something_to_lose() -> None:
    ledger = Ledger()
    for _ in range(20):
        ledger.settle(0, 1.0, 0.0, tried=True)
        ledger.settle(0, 1.0, 0.0, tried=False)
    assert ledger.budget < 0.0 and ledger.trust == 0.0
    ledger.trust_again()
    assert ledger.budget == ledger.trust == EXPLORE_AGAIN
    ledger.budget = EXPLORE_MOST
    ledger.trust_again()
    assert ledger.budget == EXPLORE_MOST
