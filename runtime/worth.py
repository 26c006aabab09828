"""What asking a head is worth, and what may be lost by asking heads: the judgement of the controller.

All times here are in plain steps (calls of one node), so that a machine which is slow for a while changes nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specexport.runtime.drafters.base import Drafter, LaggingDrafter, StepwiseDrafter

#: A head that is asked must lose by this much before it is left out; one that is left out must win by as much.
HYSTERESIS = 0.02
#: Share of the time that heads may lose by being tried; what they may lose at first, and what they may save up of what
#: they won.
EXPLORE, EXPLORE_FIRST, EXPLORE_MOST = 0.0075, 1.5, 5.0
#: What heads that are judged to pay may lose besides: most of that is luck.
TRUST = 2.0
#: What may be lost by tries, and by heads that are judged to pay, in a new text where one is expected to.
EXPLORE_AGAIN = 0.75
#: What is left to lose after a head has caught up with a prompt, however long that took.
EXPLORE_LEFT = 1.0
#: Steps between two tries of a head, at first and at most.
PROBE_FIRST, PROBE_MOST = 2, 32
#: The most of them of a head that is expected to be worth less than another one.
PROBE_OTHERS = 128
#: The most of them after a new text begins, of a head that was expected to be worth most.
PROBE_AGAIN = 8
#: Steps are told apart by how many tokens the lookups promise beyond the bonus token: up to each of these, and more.
PROMISES = (0.25, 0.75, 1.5, 3.0)
CLASSES = len(PROMISES) + 1
#: Weight of the newest step in what a head's drafts are worth, and of a try.
_RATE, _PROBE_RATE = 0.1, 0.2
#: What a head adds beside lookups that promise so much, of what it adds beside those that promise nothing; and of what
#: it adds to plain decoding it adds this beside the latter: where lookups find nothing the text is hard for all.
_BESIDE, BESIDE_LOOKUPS = (1.0, 0.65, 0.5, 0.4, 0.3), 0.6
#: Steps with other promises, or as was known beforehand, that the steps with one promise are weighed against.
_SHARED = 4.0
#: How far what is expected of a head in a new text goes from what it was worth in the last one to what it was in most,
#: and the weight of the newest step in the latter.
_LIKE_MOST, _TYPICAL_RATE = 0.5, 0.01
#: How much of what a head promised and of what it gave is left a step, and tokens that both begin with.
_KEPT, _TRUSTED = 0.99, 8.0
#: How much of the rate of the last steps is left a step, and steps of plain decoding that it begins with.
_LATELY, _TYPICAL = 0.97, 8.0


def promise_of(tokens: float) -> int:
    """Class of a step whose lookups promise so many tokens beyond the bonus token."""
    return bisect_left(PROMISES, tokens)


@dataclass(frozen=True, slots=True)
class Prior:
    """What is known of a head beforehand: tokens that it adds to a step, and how much longer the step takes."""

    more: float
    cost: float

    @property
    def rate(self) -> float:
        """Tokens a plain step's time."""
        return (1.0 + self.more) / (1.0 + self.cost)


def first_choice(priors: Mapping[str, Prior]) -> str | None:
    """The head that is expected to be worth most; None if none is expected to pay."""
    best = max(priors, key=lambda name: priors[name].rate, default=None)
    return best if best is not None and priors[best].rate > 1.0 else None


class Mean:
    """Tokens that a head adds to a step, as its drafts promise, and what that costs, in means of the last steps.

    That of all steps is of tokens beside lookups that promise nothing.
    """

    def __init__(self, prior: Prior | None = None) -> None:
        self.more, self.cost = (prior.more, prior.cost) if prior else (0.0, 0.0)
        self.seen = _SHARED if prior else 0.0

    def begin(self, typical: Mean | None = None) -> None:
        """Another text: it may be like the last one, or like most."""
        if typical is not None and typical.seen:
            self.more += _LIKE_MOST * (typical.more - self.more)
            self.cost += _LIKE_MOST * (typical.cost - self.cost)
        self.seen = min(self.seen, _SHARED)

    def learn(self, more: float, cost: float, rate: float) -> None:
        self.seen = min(1.0 / rate, self.seen + 1.0)
        self.more += (more - self.more) / self.seen
        self.cost += (cost - self.cost) / self.seen


class Head:
    """A drafter that costs a call, and what its drafts were worth lately, by promise of the lookups.

    Args:
        prior: what is known of it beforehand. due: it is tried, or asked, from the first step on; a head that is not
            expected to be worth most waits.

    Attributes:
        quiet: steps since it was asked. wait: steps between two tries.
    """

    def __init__(self, drafter: Drafter, prior: Prior | None, *, due: bool = True) -> None:
        self.drafter, self.name = drafter, drafter.name
        self._due = due and prior is not None
        self.stepwise = isinstance(drafter, StepwiseDrafter)
        self._lagging = drafter if isinstance(drafter, LaggingDrafter) else None
        self._overall, self._typical = Mean(prior), Mean(prior)
        self._classes = [Mean() for _ in range(CLASSES)]
        self._on = [due and prior is not None and share * prior.more > prior.cost for share in _BESIDE]
        self._promised, self._gained = [0.0] * CLASSES, [0.0] * CLASSES
        self._most = PROBE_MOST if due else PROBE_OTHERS
        self.wait = PROBE_FIRST if due else PROBE_MOST
        self.quiet = PROBE_FIRST if due else 0

    def begin(self) -> None:
        """Another text: what paid now and then, or is expected to pay, is due for a try."""
        self._overall.begin(self._typical)
        for mean in self._classes:
            mean.begin()
        if self._due:
            self.wait = min(self.wait, PROBE_AGAIN)
        if self.wait < PROBE_MOST:
            self.quiet = self.wait

    @property
    def behind(self) -> int:
        """Tokens that it has to catch up with."""
        return self._lagging.behind if self._lagging else 0

    def truth(self, promise: int) -> float:
        """Tokens that came of each that was promised, in steps with this promise of the lookups: the best of many
        estimates is too good on average, and the more so the less is known of the drafts and the more the lookups say.
        """
        overall = _truth(sum(self._gained), sum(self._promised), 1.0)
        return _truth(self._gained[promise], self._promised[promise], overall)

    def worth(self, promise: int, price: float) -> float:
        """Plain steps that asking it saves in a step with this promise of the lookups, while it is asked every step:
        from like steps and, where those are few, all.

        Args:
            price: tokens that a plain step's time is worth.
        """
        mine, all_ = self._classes[promise], self._overall
        more = (mine.seen * mine.more + _SHARED * _BESIDE[promise] * all_.more) / (mine.seen + _SHARED)
        cost = (mine.seen * mine.cost + _SHARED * all_.cost) / (mine.seen + _SHARED)
        return self.truth(promise) * more / price - cost

    def margin(self, promise: int, price: float) -> float:
        """What is left of its worth after hysteresis; it pays if that is positive."""
        return self.worth(promise, price) + (HYSTERESIS if self._on[promise] else -HYSTERESIS)

    def outlook(self, shares: Sequence[float], price: float) -> float:
        """Plain steps that it saves a step to come, if ``shares`` of them have each promise and it is asked where it
        pays."""
        return sum(share * max(0.0, self.margin(promise, price)) for promise, share in enumerate(shares))

    def judge(self, promise: int, more: float, cost: float, gained: int, price: float, *, tried: bool) -> None:
        """Take note of a step with this head.

        Args:
            more, gained: tokens beyond those of the lookups that were promised, and that came. cost: how much longer
                the step took, but for catching up.
        """
        for sums, fresh in ((self._promised, more), (self._gained, gained)):
            sums[:] = [_KEPT * each for each in sums]
            sums[promise] += fresh
        rate = _PROBE_RATE if tried else _RATE
        self._overall.learn(more / _BESIDE[promise], cost, rate)
        self._typical.learn(more / _BESIDE[promise], cost, _TYPICAL_RATE)
        self._classes[promise].learn(more, cost, rate)
        self._on[promise] = self.margin(promise, price) > 0.0
        self.quiet = 0
        self.wait = PROBE_FIRST if self._on[promise] else min(self._most, 2 * self.wait)


def _truth(gained: float, promised: float, expected: float) -> float:
    """Share of what was promised that was gained; ``expected`` before anything was."""
    return (gained + _TRUSTED * expected) / (max(0.0, promised) + _TRUSTED)


class Ledger:
    """What heads won and lost, against the lookups alone, and what time is worth.

    A head is asked only if that may be lost: a share of the time spent, a step or two at first, and what heads won
    before. So whatever heads say, and however wrong they are judged, a long text is slower than with the lookups alone
    by that share at most, and by those few steps.

    Attributes:
        budget: plain steps that may be lost by tries. trust: those that heads which are judged to pay may lose besides.
    """

    def __init__(self) -> None:
        self.budget, self.trust = EXPLORE_FIRST, TRUST
        self._all, self._alone = _Rate(), _Rate()

    def begin(self) -> None:
        """Another prompt: what time was worth says little about it."""
        self._all.fade()
        self._alone.fade()

    def trust_again(self) -> None:
        """Another prompt, where a head is expected to pay: what was lost in the last one says little about it."""
        self.budget, self.trust = max(self.budget, EXPLORE_AGAIN), max(self.trust, EXPLORE_AGAIN)

    @property
    def price(self) -> float:
        """Tokens that a plain step's time is worth: as many as it gave lately."""
        return self._all.tokens / self._all.steps

    def spend(self, tokens: int, steps: float, alone: int, alone_steps: float) -> None:
        """Take note of a step: what it emitted and how long it took, and the same of the lookups alone."""
        self._all.add(tokens, steps)
        self._alone.add(alone, alone_steps)
        self.budget = min(self.budget + EXPLORE * steps, EXPLORE_MOST)

    def settle(self, gained: int, cost: float, catching_up: float, *, tried: bool) -> float:
        """Take note of what asking a head gave and took; returns plain steps won."""
        won = gained * self._alone.steps / self._alone.tokens - cost
        self.budget = max(self.budget - catching_up, min(self.budget, EXPLORE_LEFT))
        if tried and won < 0.0:
            self.budget += won
        else:
            trust = min(max(self.trust + won, 0.0), TRUST)
            self.budget += self.trust + won - trust  # what does not fit, or was not there
            self.trust = trust
        return won - catching_up


class _Rate:
    """Tokens and plain steps of the last steps."""

    def __init__(self) -> None:
        self.tokens = self.steps = _TYPICAL

    def add(self, tokens: int, steps: float) -> None:
        self.tokens = _LATELY * self.tokens + tokens
        self.steps = _LATELY * self.steps + steps

    def fade(self) -> None:
        """Keep no more weight than it began with."""
        share = min(1.0, _TYPICAL / self.steps)
        self.tokens, self.steps = share * self.tokens, share * self.steps
