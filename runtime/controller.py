"""The controller: each step it picks which drafters to ask and how many of their nodes to verify, none included.

It maximises the rate of the step it is about to take, expected tokens over expected time:

    (1 + sum of the chances of the drafted nodes) / (t(nodes, rows in use) + time of the drafts)

Chances come from what each drafter said and how often that came true lately (:mod:`specexport.runtime.calibration`),
times from :mod:`specexport.runtime.costs`. Joined drafts are sorted by chance (:mod:`specexport.runtime.merge`), so the
best width is found in one pass over their prefix sums; width one is plain decoding. Lookup drafters cost nothing and
are asked every step. A head costs a call, so whether to ask it is decided before: by what it added lately when the
lookups were about as sure as they are now. A head that stopped paying is asked again now and then, ever more seldom.

Whatever is picked, the acceptance rule decides the tokens: choices change the speed alone. With a measured cost curve
the choices are a function of the tokens; with learned costs they also follow the clock.

Idea of cost-aware drafting: Sequoia (Chen et al. 2024), SmartSpec (Liu et al. 2024), DISCO (Mamou et al. 2024).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
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
    Observation,
    StepwiseDrafter,
)
from specexport.runtime.merge import Draft, Joined, join
from specexport.runtime.rules import SampledDrafter
from specexport.runtime.sampling import SamplingParams
from specexport.runtime.tree import Tree

#: A head that is asked must lose by this much before it is left out; one that is left out must win by as much.
HYSTERESIS = 0.02
#: Steps until a head that was left out is asked again: at first, and at most.
PROBE_FIRST, PROBE_MOST = 8, 64
#: Weight of the newest step in what a head's drafts are worth, and of a probe.
_RATE, _PROBE_RATE = 0.25, 0.5
#: Steps that a probe stands for at most, in what it teaches about the head.
_PROBE_WEIGHT = 8.0
#: Steps are told apart by how many tokens the lookups promise beyond the bonus token: up to each of these, and more.
_PROMISES = (0.25, 0.75, 1.5, 3.0)
_CLASSES = len(_PROMISES) + 1


@dataclass(frozen=True, slots=True)
class Decision:
    """What was asked and how much of it is verified.

    Attributes:
        asked: name of the head that was asked, None for lookups alone. nodes: T, the root included.
        rate: expected tokens a second. lookups: that of the lookups alone. promise: class of what they promise.
    """

    asked: str | None
    nodes: int
    rate: float
    lookups: float
    promise: int


class _Head:
    """A drafter that costs, and what its drafts were worth lately, by promise of the lookups."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.stepwise = isinstance(drafter, StepwiseDrafter)
        #: Rate of a step with this head over one without it; None until it was asked.
        self.worth: list[float | None] = [None] * _CLASSES
        self.on = [True] * _CLASSES
        self.quiet, self.wait = 0, PROBE_FIRST

    def wanted(self, promise: int) -> bool:
        """Whether to ask it now."""
        return self.on[promise] or self.quiet >= self.wait

    def judge(self, promise: int, worth: float, right: bool) -> None:
        """Take note of a step with this head; ``right``: its first token was."""
        known, on = self.worth[promise], self.on[promise]
        rate = _RATE if on else _PROBE_RATE
        now = worth if known is None else known + rate * (worth - known)
        self.worth[promise] = now
        self.on[promise] = now > (1.0 - HYSTERESIS if on else 1.0 + HYSTERESIS)
        self.quiet = 0
        if self.on[promise]:
            self.wait = PROBE_FIRST
        elif right and not on:
            self.quiet = self.wait  # one step proves little: probe again at once
        elif not on:
            self.wait = min(PROBE_MOST, 2 * self.wait)


class Controller:
    """A drafter made of drafters; see the module.

    Args:
        lookups: drafters that cost nothing to ask. heads: those that cost a call; one is asked at a time.
        costs: of a step and a draft.
        widths: numbers of nodes that the engine is built for; None: any.
        max_nodes: widest tree, the root included.
        chains: propose no branching trees, only the surest path.
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
    ) -> None:
        self.max_nodes = max_nodes
        self._chains = chains
        self._lookups = tuple(lookups)
        self._heads = {head.name: _Head(head) for head in heads}
        self._all: tuple[Drafter, ...] = (*lookups, *heads)
        self._costs = costs
        self._widths = tuple(range(1, max_nodes + 1)) if widths is None else tuple(sorted({1, *widths}))
        self._calibrations = {drafter.name: Calibration() for drafter in self._all}
        self._trees: list[tuple[Drafter, Tree]] = []
        self._used = 0
        #: The last one; None before the first.
        self.decision: Decision | None = None

    @property
    def asked(self) -> str | None:
        """See :class:`~specexport.runtime.drafters.base.DecidingDrafter`."""
        return None if self.decision is None else self.decision.asked or "lookups"

    def couple(self, params: SamplingParams | None) -> None:
        """See :class:`~specexport.runtime.drafters.base.CoupledDrafter`."""
        for drafter in self._all:
            if isinstance(drafter, CoupledDrafter):
                drafter.couple(params)
            elif params is not None and isinstance(drafter, SampledDrafter):
                drafter.begin_sampling(params)

    def begin(self, tokens: Sequence[int], first: int) -> None:
        """A new prompt; what was learnt about drafters and costs stays."""
        self._used, self._trees, self.decision = len(tokens), [], None
        for drafter in self._all:
            drafter.begin(tokens, first)

    def propose(self, request: DraftRequest) -> Tree:
        """The joined tree of the best expected rate; the root alone where plain decoding is as fast."""
        self._trees = [(drafter, drafter.propose(request)) for drafter in self._lookups]
        drafts = [self._draft(*proposal) for proposal in self._trees]
        joined = self._join(drafts, request)
        nodes, lookups = self._best(joined, request.max_nodes, 0.0)
        promise = bisect_left(_PROMISES, sum(joined.chances[1:]))
        head = self._choose(promise)
        if head is None:
            self.decision = Decision(None, nodes, lookups, lookups, promise)
            return joined.tree(nodes)
        tree, spent_s = self._ask(head, request)
        self._trees.append((head.drafter, tree))
        drafts.append(self._draft(head.drafter, tree))
        joined = self._join(drafts, request)
        nodes, rate = self._best(joined, request.max_nodes, spent_s)
        self.decision = Decision(head.drafter.name, nodes, rate, lookups, promise)
        return joined.tree(nodes)

    def observe(self, observation: Observation) -> None:
        """Learn what the step showed about every tree that was proposed for it."""
        self._costs.observe_step(len(observation.tree), self._used, observation.seconds)
        if self.decision is not None:
            self._learn(self.decision, observation.emitted)
        for drafter in self._all:
            drafter.observe(observation)
        self._used += len(observation.emitted)
        self._trees, self.decision = [], None

    def _learn(self, decision: Decision, emitted: Sequence[int]) -> None:
        for drafter, tree in self._trees:
            head = self._heads.get(drafter.name)
            weight = 1.0 if head is None or head.on[decision.promise] else _PROBE_WEIGHT
            self._calibrations[drafter.name].learn(tree, emitted, weight)
        for name, head in self._heads.items():
            if decision.asked == name:
                tree = self._trees[-1][1]
                right = emitted[0] in tree.tokens[tree.parents == 0]
                head.judge(decision.promise, decision.rate / decision.lookups, right)
            else:
                head.quiet += 1

    def _join(self, drafts: Sequence[Draft], request: DraftRequest) -> Joined:
        joined = join(drafts, request.root, request.max_depth)
        return joined.trunk() if self._chains else joined

    def _draft(self, drafter: Drafter, tree: Tree) -> Draft:
        return Draft(tree, self._calibrations[drafter.name].chances(tree))

    def _choose(self, promise: int) -> _Head | None:
        """The head to ask: one that was never asked, then one that is due for a probe, then the one worth most."""
        wanted = [head for head in self._heads.values() if head.wanted(promise)]

        def key(head: _Head) -> tuple[bool, bool, float]:
            worth = head.worth[promise]
            return worth is None, head.quiet >= head.wait, worth or 0.0

        return max(wanted, key=key, default=None)

    def _ask(self, head: _Head, request: DraftRequest) -> tuple[Tree, float]:
        """A head's tree and what such a tree costs, in seconds."""
        name = head.drafter.name
        if head.stepwise:
            request = replace(request, max_depth=self._chain_length(name, request))
        begun = perf_counter()
        tree = head.drafter.propose(request)
        calls = max(1, len(tree) - 1) if head.stepwise else 1
        self._costs.observe_draft(name, (perf_counter() - begun) / calls)
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
