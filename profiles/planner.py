"""Whether speculation pays: for a model, drafters and a device, before or after anything was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from specexport.profiles.acceptance import Expectation, Rows, constant
from specexport.profiles.cost import CostModel
from specexport.profiles.memory import MemoryPlan
from specexport.profiles.sizes import DraftSize
from specexport.profiles.tree_search import Shape, best_chain, expected_tokens, mean_step, search

#: Batches that are looked at for where speculation stops paying.
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
#: Longest chain that the K sweep looks at.
MAX_CHAIN = 16
#: A predicted gain below this is none.
MARGIN = 0.03

Verdict = Literal["use it", "use it for these workloads", "leave it off"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter and the acceptance that is expected of it."""

    draft: DraftSize
    expected: Expectation


@dataclass(frozen=True, slots=True)
class Workload:
    """Sequences decoded together, and cache rows that each has in use."""

    batch: int
    used: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one drafter is worth under one workload.

    Attributes:
        shape: its best tree (no paths: nothing pays). tau, tau_low, tau_high: expected tokens a step.
        step_s: time of a step, of which draft_s for the proposal. plain_s: of plain decoding.
        cost: c, one more token of depth in plain steps; 0 where depth costs nothing.
        speedup, low, high: over plain decoding; the interval holds acceptance and the error of the cost model.
        best_k, chain_speedup: of the best chain. break_even_alpha: least alpha at which a chain pays; None: none does.
    """

    drafter: str
    source: str
    shape: Shape
    tau: float
    tau_low: float
    tau_high: float
    step_s: float
    draft_s: float
    plain_s: float
    cost: float
    speedup: float
    low: float
    high: float
    best_k: int
    chain_speedup: float
    break_even_alpha: float | None

    def to_dict(self) -> dict[str, Any]:
        """``plan --json``; times in seconds."""
        values = {name: value for name, value in asdict(self).items() if name != "shape"}
        tree = [list(path) for path in self.shape.paths]
        return values | {"nodes": self.shape.nodes, "depth": self.shape.depth, "tree": tree}


@dataclass(frozen=True, slots=True)
class Sweep:
    """Speedup along one axis: of the recommended tree held fixed, and of the best tree for each value."""

    values: tuple[int, ...]
    fixed: tuple[float, ...]
    best: tuple[float, ...]

    @property
    def stops(self) -> int | None:
        """First value at which the recommended tree no longer pays, None: it does throughout."""
        return next((value for value, speedup in zip(self.values, self.fixed, strict=True) if speedup < 1.0), None)


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer of ``plan``.

    Attributes:
        estimates: by drafter, the fastest first. batches, contexts: sweeps of the fastest (None without drafters).
        chains: speedup of chains of K = 1, 2, .. of the fastest. assumptions: what was not measured, in words.
    """

    workload: Workload
    cost: str
    error: float
    estimates: tuple[Estimate, ...]
    batches: Sweep | None
    contexts: Sweep | None
    chains: tuple[float, ...]
    memory: MemoryPlan
    assumptions: tuple[str, ...]
    verdict: Verdict
    reason: str

    @property
    def best(self) -> Estimate | None:
        return self.estimates[0] if self.estimates else None

    def to_dict(self) -> dict[str, Any]:
        """``plan --json``."""
        best = self.best
        return {
            "verdict": self.verdict,
            "reason": self.reason,
            "method": best.drafter if best and best.shape.paths else None,
            "batch": self.workload.batch,
            "context": self.workload.used,
            "cost_source": self.cost,
            "cost_error": self.error,
            "estimates": [estimate.to_dict() for estimate in self.estimates],
            "chain_speedups": list(self.chains),
            "batch_sweep": _sweep(self.batches),
            "context_sweep": _sweep(self.contexts),
            "memory": self.memory.to_dict(),
            "assumptions": list(self.assumptions),
        }


def _sweep(sweep: Sweep | None) -> dict[str, Any] | None:
    return None if sweep is None else asdict(sweep) | {"stops": sweep.stops}


def make_plan(
    cost: CostModel,
    candidates: Sequence[Candidate],
    workload: Workload,
    memory: MemoryPlan,
    *,
    widths: Sequence[int],
    contexts: Sequence[int],
    assumptions: Sequence[str] = (),
) -> Plan:
    """Find the best drafter and tree, and how far they pay.

    Args:
        widths: T that the engine is built for. contexts: used lengths to look at.
    """
    estimates = sorted(
        (estimate(cost, candidate, workload, widths) for candidate in candidates), key=lambda found: -found.speedup
    )
    guesses = [candidate for candidate in candidates if candidate.expected.assumed]
    notes = [*assumptions, *(f"{guess.draft.name} accepts {guess.expected.source}" for guess in guesses)]
    if not estimates:
        reason = "there is no drafter: build with lookups, heads or a draft model"
        return _without(cost, workload, memory, notes, reason)
    best = estimates[0]
    candidate = next(candidate for candidate in candidates if candidate.draft.name == best.drafter)
    batches = _swept(cost, candidate, best.shape, widths, BATCHES, lambda value: Workload(value, workload.used))
    lengths = tuple(sorted({*contexts, workload.used}))
    by_length = _swept(cost, candidate, best.shape, widths, lengths, lambda value: Workload(workload.batch, value))
    verdict, reason = _judge(best, batches, by_length, memory, candidate.expected.assumed)
    return Plan(
        workload=workload,
        cost=cost.source,
        error=cost.error,
        estimates=tuple(estimates),
        batches=batches,
        contexts=by_length,
        chains=chain_sweep(cost, candidate, workload),
        memory=memory,
        assumptions=tuple(notes),
        verdict=verdict,
        reason=reason,
    )


def _without(cost: CostModel, workload: Workload, memory: MemoryPlan, notes: Sequence[str], reason: str) -> Plan:
    return Plan(workload, cost.source, cost.error, (), None, None, (), memory, tuple(notes), "leave it off", reason)


def _times(
    cost: CostModel, candidate: Candidate, workload: Workload
) -> tuple[Callable[[int], float], Callable[[int], float]]:
    """Mean time of a step by width and of a proposal by depth."""

    def step_s(nodes: int) -> float:
        return cost.step_s(nodes, workload.used, workload.batch)

    def draft_s(depth: int) -> float:
        return cost.draft_s(candidate.draft, depth, workload.used, workload.batch)

    return mean_step(step_s, candidate.expected.proposed), draft_s


def estimate(cost: CostModel, candidate: Candidate, workload: Workload, widths: Sequence[int]) -> Estimate:
    """What a drafter is worth: its best tree, and the best chain beside it."""
    draft, expected = candidate.draft, candidate.expected
    step_s, draft_s = _times(cost, candidate, workload)
    plain = step_s(1)
    copies = draft.copies
    shape = search(
        expected.rows,
        step_s,
        draft_s,
        draft.widths(widths),
        max_depth=draft.depth,
        nodes=draft.nodes,
        copies=copies,
    )
    chain = best_chain(expected.rows, step_s, draft_s, min(draft.depth, MAX_CHAIN), copies=copies)
    low, high = (expected_tokens(shape.paths, rows, copies=copies) for rows in (expected.low, expected.high))
    drafting = draft_s(shape.depth) if shape.paths else 0.0
    error = cost.error if shape.paths else 0.0
    return Estimate(
        drafter=draft.name,
        source=expected.source,
        shape=shape,
        tau=shape.tau,
        tau_low=low,
        tau_high=high,
        step_s=shape.seconds,
        draft_s=drafting,
        plain_s=plain,
        cost=(draft_s(2) - draft_s(1)) / plain,
        speedup=shape.tau * plain / shape.seconds,
        low=(1 - error) * low * plain / shape.seconds,
        high=(1 + error) * high * plain / shape.seconds,
        best_k=chain.depth,
        chain_speedup=chain.rate * plain,
        break_even_alpha=break_even(step_s, draft_s, min(draft.depth, MAX_CHAIN)),
    )


def break_even(step_s: Callable[[int], float], draft_s: Callable[[int], float], depth: int) -> float | None:
    """Least alpha at which some chain is as fast as plain decoding, to 0.001; None: not even alpha 1."""

    def pays(alpha: float) -> bool:
        return best_chain(constant(alpha, depth, 1), step_s, draft_s, depth).rate * step_s(1) >= 1.0

    if not pays(1.0):
        return None
    low, high = 0.0, 1.0
    while high - low > 5e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return round(high, 3)


def chain_sweep(cost: CostModel, candidate: Candidate, workload: Workload) -> tuple[float, ...]:
    """Speedup of chains of 1, 2, .. drafts."""
    step_s, draft_s = _times(cost, candidate, workload)
    rows: Rows = candidate.expected.rows
    plain = step_s(1)
    found = []
    for depth in range(1, min(candidate.draft.depth, len(rows), MAX_CHAIN) + 1):
        paths = [(0,) * length for length in range(1, depth + 1)]
        tau = expected_tokens(paths, rows, copies=candidate.draft.copies)
        found.append(tau * plain / (step_s(depth + 1) + draft_s(depth)))
    return tuple(found)


def _swept(
    cost: CostModel,
    candidate: Candidate,
    shape: Shape,
    widths: Sequence[int],
    values: Sequence[int],
    workload_of: Callable[[int], Workload],
) -> Sweep:
    fixed, best = [], []
    width = next((width for width in widths if width >= shape.nodes), shape.nodes)
    for value in values:
        step_s, draft_s = _times(cost, candidate, workload_of(value))
        spent = step_s(width) + (draft_s(shape.depth) if shape.paths else 0.0)
        fixed.append(shape.tau * step_s(1) / spent)
        draft = candidate.draft
        found = search(
            candidate.expected.rows,
            step_s,
            draft_s,
            draft.widths(widths),
            max_depth=draft.depth,
            nodes=draft.nodes,
            copies=draft.copies,
        )
        best.append(found.rate * step_s(1))
    return Sweep(tuple(values), tuple(fixed), tuple(best))


def _judge(best: Estimate, batches: Sweep, contexts: Sweep, memory: MemoryPlan, assumed: bool) -> tuple[Verdict, str]:
    """The verdict and why, in one sentence each. What rests on assumed acceptance is never a plain yes."""
    if memory.weights + memory.drafters + memory.process > memory.available:
        return "leave it off", "the weights do not fit into the device's memory"
    if not best.shape.paths or best.speedup < 1 + MARGIN:
        need = best.break_even_alpha
        hint = "no acceptance would pay here" if need is None else f"a chain pays from alpha {need:.2f}"
        return "leave it off", f"no tree of {best.drafter} is expected to be faster than plain decoding; {hint}"
    gain = f"{best.drafter} is expected to give {best.speedup:.2f}x ({best.low:.2f} to {best.high:.2f})"
    limits = []
    if best.break_even_alpha is not None:
        limits.append(f"text whose drafts are accepted at alpha {best.break_even_alpha:.2f} or more")
    for sweep, word in ((batches, "batches"), (contexts, "contexts")):
        if sweep.stops is not None:
            limits.append(f"{word} below {sweep.stops}")
    if best.low >= 1.0 and not assumed:
        return "use it", gain + (f"; it pays for {', '.join(limits)}" if limits else "")
    return "use it for these workloads", f"{', '.join(limits) or 'those like the calibration prompts'}: {gain}"
