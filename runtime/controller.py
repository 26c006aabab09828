"""The controller: each step it picks which drafters to ask and how many of their nodes to verify, none included.

It maximises the rate of the step it is about to take, expected tokens over expected time:

    (1 + sum of the chances of the drafted nodes) / (t(nodes, rows in use) + time of the drafts)

Chances come from what each drafter said and how often that came true lately (:mod:`specexport.runtime.calibration`),
times from :mod:`specexport.runtime.costs`. Joined drafts are sorted by chance (:mod:`specexport.runtime.merge`), so the
best width is found in one pass over their prefix sums; width one is plain decoding. Lookup drafters cost nothing and
are asked every step. A head costs a call, so whether to ask it is decided before: by what it added lately when the
lookups were about as sure as they are now, against what it has to catch up with. What is not known to pay is tried now
and then, from a budget: a share of the time spent, and a few steps at first. So no head, whatever it says, makes a long
text slower than the lookups alone by more than that share.

Whatever is picked, the acceptance rule decides the tokens: choices change the speed alone. With a measured cost curve
the choices are a function of the tokens; with learned costs they also follow the clock.

Idea of cost-aware drafting: Sequoia (Chen et al. 2024), SmartSpec (Liu et al. 2024), DISCO (Mamou et al. 2024).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

from numpy.typing import NDArray

from specexport.runtime.calibration import Calibration
from specexport.runtime.costs import Costs
from specexport.runtime.drafters.base import (
    CoupledDrafter,
    Drafter,
    DraftRequest,
    FeatureDrafter,
    LaggingDrafter,
    Observation,
    StepwiseDrafter,
)
from specexport.runtime.merge import Draft, Joined, join
from specexport.runtime.rules import SampledDrafter
from specexport.runtime.sampling import SamplingParams
from specexport.runtime.tree import Tree

#: A head that is asked must lose by this much before it is left out; one that is left out must win by as much.
HYSTERESIS = 0.02
#: Share of the time that may go into trying heads which are not known to pay; what there is of it at first, and what
#: may be saved up, in plain steps.
EXPLORE, EXPLORE_FIRST, EXPLORE_MOST = 0.0075, 3.0, 12.0
#: Share of the time that is left of an answer which a try of a head may cost, mostly for catching up with the prompt:
#: the very first, for which there need be no budget, and later ones.
FIRST_TRY, LATER_TRY = 0.05, 0.02
#: Steps between two tries of a head, at first and at most.
PROBE_FIRST, PROBE_MOST = 2, 32
#: Steps over which a head has to earn what it must catch up with, if the answer goes on for as long.
HORIZON = 64
#: Weight of the newest step in what a head's drafts are worth, and of a try.
_RATE, _PROBE_RATE = 0.2, 0.4
#: How much of what a head promised and of what it gave is left a step, and tokens that both begin with.
_KEPT, _TRUSTED = 0.99, 8.0
#: Steps with other promises that the steps with one promise are weighed against.
_SHARED = 4.0
#: Steps that a try stands for, in what it teaches about the head.
_PROBE_WEIGHT = 4.0
#: Steps are told apart by how many tokens the lookups promise beyond the bonus token: up to each of these, and more.
_PROMISES = (0.25, 0.75, 1.5, 3.0)
_CLASSES = len(_PROMISES) + 1


@dataclass(frozen=True, slots=True)
class Decision:
    """What was asked and how much of it is verified.

    Attributes:
        asked: name of the head that was asked, None for lookups alone. nodes: T, the root included.
        rate: expected tokens a second. lookups: that of the lookups alone. promise: class of what they promise.
        expected, alone: tokens, the bonus included, and those of the lookups alone.
        tried_s: time that the head takes beyond a step without it, where it is not known to pay; else None.
    """

    asked: str | None
    nodes: int
    rate: float
    lookups: float
    promise: int
    expected: float
    alone: float
    tried_s: float | None = None

    @property
    def tried(self) -> bool:
        """The head is not known to pay."""
        return self.tried_s is not None


class _Head:
    """A drafter that costs, and what its drafts were worth lately, by promise of the lookups.

    Worth is the rate of a step with the head over that of the step without it, less 1, while it is asked every step.

    Args:
        prior: what it is taken to be worth before it was asked; 0: nothing is known.
    """

    def __init__(self, drafter: Drafter, prior: float) -> None:
        self.drafter = drafter
        self.stepwise = isinstance(drafter, StepwiseDrafter)
        self._lagging = drafter if isinstance(drafter, LaggingDrafter) else None
        self._overall, self.known = prior, prior != 0.0
        self._worth = [0.0] * _CLASSES
        self._seen = [0.0] * _CLASSES
        self._on = [prior > 0.0] * _CLASSES
        self._promised = self._gained = 0.0
        self.quiet = self.wait = PROBE_FIRST

    @property
    def behind(self) -> int:
        """Tokens that it has to catch up with."""
        return self._lagging.behind if self._lagging else 0

    def worth(self, promise: int) -> float:
        """Estimate for a step with this promise of the lookups, from like steps and, where those are few, all."""
        seen = self._seen[promise]
        return (seen * self._worth[promise] + _SHARED * self._overall) / (seen + _SHARED)

    def margin(self, promise: int) -> float:
        """What is left of its worth after hysteresis; it pays if that is positive."""
        return self.worth(promise) + (HYSTERESIS if self._on[promise] else -HYSTERESIS)

    def judge(self, decision: Decision, gained: int) -> None:
        """Take note of a step with this head that emitted so many tokens more than the lookups alone would have."""
        # The best of many estimates is too good on average, and the more so the less is known of the drafts.
        more = decision.expected - decision.alone
        self._promised = _KEPT * self._promised + more
        self._gained = _KEPT * self._gained + gained
        truth = (self._gained + _TRUSTED) / (max(0.0, self._promised) + _TRUSTED)
        promise, tried = decision.promise, decision.tried
        worth = (decision.alone + truth * more) / decision.expected * decision.rate / decision.lookups - 1.0
        rate = _PROBE_RATE if tried else _RATE
        self._overall += (rate if self.known else 1.0) * (worth - self._overall)
        self.known = True
        seen = self._seen[promise] = min(1.0 / rate, self._seen[promise] + 1.0)
        self._worth[promise] += (worth - self._worth[promise]) / seen
        self._on[promise] = self.margin(promise) > 0.0
        self.quiet = 0
        self.wait = PROBE_FIRST if self._on[promise] else min(PROBE_MOST, 2 * self.wait)


class Controller:
    """A drafter made of drafters; see the module.

    Args:
        lookups: drafters that cost nothing to ask. heads: those that cost a call; one is asked at a time.
        costs: of a step and a draft.
        widths: numbers of nodes that the engine is built for; None: any.
        max_nodes: widest tree, the root included.
        chains: propose no branching trees, only the surest path.
        priors: what heads are taken to be worth before they were asked (see :class:`_Head`), by name; 0: unknown.
    """

    name = "auto"

    def __init__(
        self,
        lookups: Sequence[Drafter],
        heads: Sequence[Drafter],
        costs: Costs,
        *,
        max_nodes: int,
        widths: Sequence[int] | None = None,
        chains: bool = False,
        priors: Mapping[str, float] | None = None,
    ) -> None:
        self.max_nodes = max_nodes
        self._chains = chains
        self._lookups = tuple(lookups)
        self._heads = {head.name: _Head(head, (priors or {}).get(head.name, 0.0)) for head in heads}
        self._all: tuple[Drafter, ...] = (*lookups, *heads)
        self._costs = costs
        self._widths = tuple(range(1, max_nodes + 1)) if widths is None else tuple(sorted({1, *widths}))
        self._calibrations = {drafter.name: Calibration() for drafter in self._all}
        self._trees: list[tuple[Drafter, Tree]] = []
        self._used = self._fresh = 0
        self._budget_s = EXPLORE_FIRST * costs.step_s(1, 0)
        self._alone = Joined([], [], [])  # what would be verified without a head
        #: The last one; None before the first.
        self.decision: Decision | None = None

    @property
    def asked(self) -> str | None:
        """See :class:`~specexport.runtime.drafters.base.DecidingDrafter`."""
        return None if self.decision is None else self.decision.asked or "lookups"

    @property
    def drafters(self) -> tuple[str, ...]:
        """Names of those it chooses from, lookups first."""
        return tuple(drafter.name for drafter in self._all)

    def couple(self, params: SamplingParams | None) -> None:
        """See :class:`~specexport.runtime.drafters.base.CoupledDrafter`."""
        for drafter in self._all:
            if isinstance(drafter, CoupledDrafter):
                drafter.couple(params)
            elif params is not None and isinstance(drafter, SampledDrafter):
                drafter.begin_sampling(params)

    def begin(self, tokens: Sequence[int], first: int) -> None:
        """A new prompt; what was learnt about drafters and costs stays. Heads are due for a try: it is another text."""
        self._used, self._fresh, self._trees, self.decision = len(tokens), 0, [], None
        for head in self._heads.values():
            head.quiet = head.wait
        for drafter in self._all:
            drafter.begin(tokens, first)

    def propose(self, request: DraftRequest) -> Tree:
        """The joined tree of the best expected rate; the root alone where plain decoding is as fast."""
        self._trees = [(drafter, drafter.propose(request)) for drafter in self._lookups]
        drafts = [self._draft(*proposal) for proposal in self._trees]
        joined = self._join(drafts, request)
        nodes, lookups = self._best(joined, request.max_nodes, 0.0)
        expected = sum(joined.chances)
        promise = bisect_left(_PROMISES, expected - 1.0)
        step_s = self._costs.step_s(nodes, self._used)
        alone, self._alone = sum(joined.chances[:nodes]), joined.first(nodes)
        head, tried = self._choose(promise, step_s, request.max_depth / expected)
        self._budget_s = min(self._budget_s + EXPLORE * step_s, EXPLORE_MOST * self._costs.step_s(1, self._used))
        if head is None:
            self.decision = Decision(None, nodes, lookups, lookups, promise, alone, alone)
            return joined.tree(nodes)
        behind = self._lag(head)
        tree, spent_s = self._ask(head, request, behind)
        self._trees.append((head.drafter, tree))
        drafts.append(self._draft(head.drafter, tree))
        joined = self._join(drafts, request)
        nodes, rate = self._best(joined, request.max_nodes, spent_s)
        tried_s = None
        if tried:
            catching_up_s = self._costs.draft_s(head.drafter.name, behind) - self._costs.draft_s(head.drafter.name)
            tried_s = spent_s + catching_up_s + self._costs.step_s(nodes, self._used) - step_s
            self._budget_s -= tried_s
        expected = sum(joined.chances[:nodes])
        self.decision = Decision(head.drafter.name, nodes, rate, lookups, promise, expected, alone, tried_s)
        return joined.tree(nodes)

    def observe(self, observation: Observation) -> None:
        """Learn what the step showed about every tree that was proposed for it."""
        self._costs.observe_step(len(observation.tree), self._used, observation.seconds)
        if self.decision is not None:
            self._learn(self.decision, observation.emitted)
        for drafter in self._all:
            drafter.observe(observation)
        self._used += len(observation.emitted)
        self._fresh = len(observation.emitted)
        self._trees, self.decision = [], None

    def _learn(self, decision: Decision, emitted: Sequence[int]) -> None:
        for drafter, tree in self._trees:
            weight = _PROBE_WEIGHT if decision.tried and drafter.name == decision.asked else 1.0
            self._calibrations[drafter.name].learn(tree, emitted, weight)
        for name, head in self._heads.items():
            if decision.asked != name:
                head.quiet += 1
                continue
            gained = len(emitted) - self._alone.tokens_of(emitted)
            head.judge(decision, gained)
            if decision.tried_s is not None:
                # What a try gained is there for the next one, at once if the try paid for itself.
                gained_s = gained / decision.lookups
                self._budget_s += gained_s
                if gained_s >= decision.tried_s:
                    head.quiet = head.wait

    def _join(self, drafts: Sequence[Draft], request: DraftRequest) -> Joined:
        joined = join(drafts, request.root, request.max_depth)
        return joined.trunk() if self._chains else joined

    def _draft(self, drafter: Drafter, tree: Tree) -> Draft:
        return Draft(tree, self._calibrations[drafter.name].chances(tree))

    def _lag(self, head: _Head) -> int:
        """Tokens that a head has to catch up with beyond those of the last step."""
        return max(0, head.behind - self._fresh)

    def _choose(self, promise: int, step_s: float, left: float) -> tuple[_Head | None, bool]:
        """The head to ask, and whether that is a try: one that is due and that the budget allows, else the one that
        earns most in the steps to come.

        Args:
            step_s: time of a step without a head. left: about how many steps the answer can still have.
        """
        best: tuple[float, _Head | None] = (0.0, None)
        due: _Head | None = None
        for head in self._heads.values():
            name = head.drafter.name
            draft_s = self._costs.draft_s(name)
            asked_s = self._costs.draft_s(name, self._lag(head))
            gain_s = head.margin(promise) * step_s * min(HORIZON, left) - (asked_s - draft_s)
            if gain_s > best[0]:
                best = (gain_s, head)
            elif gain_s <= 0.0 and head.quiet >= head.wait:
                left_s = left * step_s
                if asked_s > (min(self._budget_s, LATER_TRY * left_s) if head.known else FIRST_TRY * left_s):
                    continue
                if due is None or head.quiet > due.quiet:
                    due = head
        return (due, True) if due is not None else (best[1], False)

    def _ask(self, head: _Head, request: DraftRequest, behind: int) -> tuple[Tree, float]:
        """A head's tree and what such a tree costs, in seconds, but for catching up."""
        name = head.drafter.name
        if head.stepwise:
            request = replace(request, max_depth=self._chain_length(name, request))
        begun = perf_counter()
        tree = head.drafter.propose(request)
        calls = max(1, len(tree) - 1) if head.stepwise else 1
        self._costs.observe_draft(name, (perf_counter() - begun) / calls, behind)
        return tree, calls * self._costs.draft_s(name)

    def _chain_length(self, name: str, request: DraftRequest) -> int:
        """Best number of drafts for one that pays for each of them; at least 1."""
        right = self._calibrations[name].by_depth()
        draft_s, chance, expected = self._costs.draft_s(name), 1.0, 1.0
        best = (0.0, 1)
        for length in range(1, min(request.max_nodes - 1, request.max_depth) + 1):
            chance *= right[min(length, len(right)) - 1]
            expected += chance
            rate = expected / (self._costs.step_s(length + 1, self._used) + length * draft_s)
            best = max(best, (rate, length), key=lambda found: found[0])
        return best[1]

    def _best(self, joined: Joined, most: int, spent_s: float) -> tuple[int, float]:
        """(nodes, tokens a second) of the best width; ``spent_s`` is what the drafts cost."""
        expected, size, best = 0.0, 0, (1, 0.0)
        for width in self._widths:
            if width > most:
                break
            while size < min(width, len(joined.chances)):
                expected += joined.chances[size]
                size += 1
            rate = expected / (self._costs.step_s(width, self._used) + spent_s)
            if rate > best[1]:
                best = (size, rate)
            if size == len(joined.chances):
                break
        return best


class FeatureController(Controller):
    """A controller with heads that read the target's hidden states."""

    def absorb(self, first: int, tokens: Sequence[int], features: NDArray[Any]) -> None:
        """See :meth:`specexport.runtime.drafters.base.FeatureDrafter.absorb`."""
        for drafter in self._all:
            if isinstance(drafter, FeatureDrafter):
                drafter.absorb(first, tokens, features)
