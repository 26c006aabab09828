"""The controller: each step it picks which drafters to ask and how many of their nodes to verify, none included.

It maximises the rate of the step it is about to take, expected tokens over expected time:

    (1 + sum of the chances of the drafted nodes) / (t(nodes, rows in use) + time of the drafts)

Chances come from what each drafter said and how often that came true lately (:mod:`specexport.runtime.calibration`),
times from :mod:`specexport.runtime.costs`. Joined drafts are sorted by chance (:mod:`specexport.runtime.merge`), so the
best width is found in one pass over their prefix sums; width one is plain decoding. Lookup drafters cost nothing and
are asked every step. A head costs a call, so whether to ask it is decided before: by what it added lately when the
lookups were about as sure as they are now, beyond what its time is worth at the rate of the last steps, and against
what it has to catch up with. What is known of heads beforehand counts as a few steps would; of those heads only the one
that is expected to be worth most is asked at once. What is not known to pay is tried now and then. A ledger
(:mod:`specexport.runtime.worth`) bounds what all of that may lose, so no head, whatever it says, makes a long text
slower than the lookups alone by more than a small share.

Whatever is picked, the acceptance rule decides the tokens: choices change the speed alone. With a measured cost curve
the choices are a function of the tokens; with learned costs they also follow the clock.

Idea of cost-aware drafting: Sequoia (Chen et al. 2024), SmartSpec (Liu et al. 2024), DISCO (Mamou et al. 2024).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
    Observation,
)
from specexport.runtime.merge import Draft, Joined, join
from specexport.runtime.rules import SampledDrafter
from specexport.runtime.sampling import SamplingParams
from specexport.runtime.tree import Tree
from specexport.runtime.worth import CLASSES, Head, Ledger, Prior, first_choice, promise_of

#: Share of the time that is left of an answer which a head may take to catch up with the prompt.
CATCH_UP = 0.02
#: Steps over which a head has to earn what it must catch up with, if the answer goes on for as long.
HORIZON = 64
#: Weight of the newest step in how often lookups promise how much.
_LATELY = 0.1
#: Nodes that a try may add to the tree: a draft teaches as much about the head if it is not verified.
TRY_NODES = 4
#: Steps that a try stands for, in what it teaches about the head.
_PROBE_WEIGHT = 4.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What was asked and how much of it is verified.

    Attributes:
        asked: name of the head that was asked, None for lookups alone. nodes: T, the root included.
        promise: class of what the lookups promise. expected, alone: tokens, the bonus included, and those of the
            lookups alone.
        steps: time that the step takes, in plain steps, but for catching up. cost: of that, what it takes longer than
            with the lookups alone. catching_up: plain steps that the head catches up in. tried: it is not known to pay.
    """

    asked: str | None
    nodes: int
    promise: int
    expected: float
    alone: float
    steps: float
    cost: float = 0.0
    catching_up: float = 0.0
    tried: bool = False


class Controller:
    """A drafter made of drafters; see the module.

    Args:
        lookups: drafters that cost nothing to ask. heads: those that cost a call; one is asked at a time.
        costs: of a step and a draft.
        widths: numbers of nodes that the engine is built for; None: any.
        max_nodes: widest tree, the root included.
        chains: propose no branching trees, only the surest path.
        priors: what is known of heads before they were asked, by name.
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
        priors: Mapping[str, Prior] | None = None,
    ) -> None:
        self.max_nodes = max_nodes
        self._chains = chains
        self._lookups = tuple(lookups)
        known = {name: prior for name, prior in (priors or {}).items() if name in {head.name for head in heads}}
        first = first_choice(known)
        self._heads = {
            head.name: Head(head, known.get(head.name), due=head.name not in known or head.name == first)
            for head in heads
        }
        self._all: tuple[Drafter, ...] = (*lookups, *heads)
        self._costs = costs
        self._widths = tuple(range(1, max_nodes + 1)) if widths is None else tuple(sorted({1, *widths}))
        self._calibrations = {drafter.name: Calibration() for drafter in self._all}
        self._trees: list[tuple[Drafter, Tree]] = []
        self._used = self._fresh = 0
        self._ledger = Ledger()
        self._promises = [1.0 / CLASSES] * CLASSES  # share of the last steps with each promise of the lookups
        self._timed = False  # some step was: until then nothing is known of the machine, and no head is asked
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
        """A new prompt; what was learnt about drafters and costs stays."""
        self._used, self._fresh, self._trees, self.decision = len(tokens), 0, [], None
        self._ledger.begin()
        if any(head.margin(0, self._ledger.price) > 0.0 for head in self._heads.values()):
            self._ledger.trust_again()
        for head in self._heads.values():
            head.begin()
        for drafter in self._all:
            self._calibrations[drafter.name].begin()
            drafter.begin(tokens, first)

    def propose(self, request: DraftRequest) -> Tree:
        """The joined tree of the best expected rate; the root alone where plain decoding is as fast."""
        proposals = [(drafter, drafter.propose(request)) for drafter in self._lookups]
        self._trees = [proposal for proposal in proposals if len(proposal[1]) > 1]
        drafts = [self._draft(*proposal) for proposal in self._trees]
        joined = self._join(drafts, request)
        nodes = self._best(joined, request.max_nodes)
        promised = sum(joined.chances)
        promise = promise_of(promised - 1.0)
        self._promises = [(1.0 - _LATELY) * share for share in self._promises]
        self._promises[promise] += _LATELY
        expected, self._alone = sum(joined.chances[:nodes]), joined.first(nodes)
        plain_s, step_s = self._costs.step_s(1, self._used), self._costs.step_s(nodes, self._used)
        head, tried = self._choose(promise, request.max_depth / promised) if self._timed else (None, False)
        self.decision = Decision(None, nodes, promise, expected, expected, step_s / plain_s)
        if head is None:
            return joined.tree(nodes)
        behind = self._lag(head)
        catching_up_s = self._costs.draft_s(head.name, behind) - self._costs.draft_s(head.name)
        tree, draft_s = self._ask(head, request, behind)
        self._trees.append((head.drafter, tree))
        drafts.append(self._draft(head.drafter, tree))
        joined = self._join(drafts, request)
        nodes = self._best(joined, min(request.max_nodes, nodes + TRY_NODES) if tried else request.max_nodes, draft_s)
        steps_s = draft_s + self._costs.step_s(nodes, self._used)
        self.decision = Decision(
            head.name,
            nodes,
            promise,
            sum(joined.chances[:nodes]),
            expected,
            steps_s / plain_s,
            (steps_s - step_s) / plain_s,
            catching_up_s / plain_s,
            tried,
        )
        return joined.tree(nodes)

    def observe(self, observation: Observation) -> None:
        """Learn what the step showed about every tree that was proposed for it."""
        self._costs.observe_step(len(observation.tree), self._used, observation.seconds)
        self._timed = True
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
        alone = self._alone.tokens_of(emitted)
        for name, head in self._heads.items():
            if decision.asked != name:
                head.quiet += 1
                continue
            gained = len(emitted) - alone
            won = self._ledger.settle(gained, decision.cost, decision.catching_up, tried=decision.tried)
            more = decision.expected - decision.alone
            head.judge(decision.promise, more, decision.cost, gained, self._ledger.price, tried=decision.tried)
            if decision.tried and won > 0.0:
                head.quiet = head.wait  # the try paid for itself: the next one is due at once
        self._ledger.spend(len(emitted), decision.steps, alone, decision.steps - decision.cost)

    def _join(self, drafts: Sequence[Draft], request: DraftRequest) -> Joined:
        joined = join(drafts, request.root, request.max_depth)
        return joined.trunk() if self._chains else joined

    def _draft(self, drafter: Drafter, tree: Tree) -> Draft:
        return Draft(tree, self._calibrations[drafter.name].chances(tree))

    def _lag(self, head: Head) -> int:
        """Tokens that a head has to catch up with beyond those of the last step."""
        return max(0, head.behind - self._fresh)

    def _choose(self, promise: int, left: float) -> tuple[Head | None, bool]:
        """The head to ask, and whether that is a try: one that is due, else the one that earns most a step to come.
        While that one is more than may be lost, nobody is tried: what may be lost is saved up for it.

        Args:
            left: about how many steps the answer can still have.
        """
        plain_s, price, budget = self._costs.step_s(1, self._used), self._ledger.price, self._ledger.budget
        best: tuple[float, float, Head | None] = (0.0, 0.0, None)
        due: list[Head] = []
        for head in self._heads.values():
            draft = self._costs.draft_s(head.name) / plain_s
            catching_up = self._costs.draft_s(head.name, self._lag(head)) / plain_s - draft
            gain = head.margin(promise, price)
            if gain > 0.0 and catching_up > 0.0:
                gain = head.outlook(self._promises, price) - catching_up / min(HORIZON, left)
            if catching_up > max(CATCH_UP * left, 0.5 * budget):
                continue
            if gain > 0.0:
                if gain > best[0]:
                    best = (gain, draft, head)
            elif head.quiet >= head.wait and draft <= budget:
                due.append(head)
        if best[1] > budget + self._ledger.trust:
            return None, False
        return (max(due, key=lambda head: head.quiet), True) if due else (best[2], False)

    def _ask(self, head: Head, request: DraftRequest, behind: int) -> tuple[Tree, float]:
        """A head's tree and what such a tree costs, in seconds, but for catching up."""
        name = head.name
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

    def _best(self, joined: Joined, most: int, spent_s: float = 0.0) -> int:
        """Nodes of the width with the best rate of this step; ``spent_s`` is what the drafts cost."""
        expected, size, best = 0.0, 0, (0.0, 1)
        for width in self._widths:
            if width > most:
                break
            while size < min(width, len(joined.chances)):
                expected += joined.chances[size]
                size += 1
            rate = expected / (self._costs.step_s(width, self._used) + spent_s)
            if rate > best[0]:
                best = (rate, size)
            if size == len(joined.chances):
                break
        return best[1]


class FeatureController(Controller):
    """A controller with heads that read the target's hidden states."""

    @cached_property
    def _readers(self) -> list[FeatureDrafter]:
        # Asking what a drafter can do takes longer than letting three of them absorb a step.
        return [drafter for drafter in self._all if isinstance(drafter, FeatureDrafter)]

    def absorb(self, first: int, tokens: Sequence[int], features: NDArray[Any]) -> None:
        """See :meth:`specexport.runtime.drafters.base.FeatureDrafter.absorb`."""
        for drafter in self._readers:
            drafter.absorb(first, tokens, features)
