"""What a step costs: the time of a target call by its width, and of a draft, for whoever chooses between them."""

from __future__ import annotations

from typing import Protocol


class Costs(Protocol):
    """Times in seconds. ``observe_*`` tell what was just measured; a curve measured beforehand may ignore them."""

    def step_s(self, nodes: int, used: int) -> float:
        """A target call of ``nodes`` nodes over ``used`` cache rows."""
        ...

    def draft_s(self, name: str, behind: int = 0) -> float:
        """One proposal of a drafter that has to catch up with ``behind`` tokens, beyond those of the last step."""
        ...

    def observe_step(self, nodes: int, used: int, seconds: float) -> None: ...

    def observe_draft(self, name: str, seconds: float, behind: int = 0) -> None: ...


#: Before anything was measured: each further node costs this share of a call of one node. It is what fp32 costs on a
#: CPU; 4-bit weights cost more a node, accelerators less.
NODE_SHARE = 0.06
#: A draft costs this share of a call of one node, until it was timed.
DRAFT_SHARE = 0.2
#: So does each token that a drafter has to catch up with, until that was timed.
ROW_SHARE = 0.008
#: Weight of the newest measurement.
_RATE = 0.05
#: A measurement beyond this multiple of what was expected is a hiccup of the machine and counts as the multiple.
_CLIP = 2.0
#: Tokens to catch up with from which on they decide the time of a proposal.
_LAG = 64
#: Calls of one width that its departure from the line is a mean of.
_STAIRS = 24.0
#: How many measurements of other widths the prior slope is worth.
_PRIOR = 4.0


class LearnedCosts:
    """A straight line through the times of the calls so far, older ones counting less, and what widths depart from it.

    ``t(T) = base + slope * (T - 1)`` by weighted least squares, with the prior that ``slope`` is
    :data:`NODE_SHARE` of ``base``. Kernels work in blocks of rows, so times climb stairs: a width that was seen often
    costs what it cost. Good for a first hour on an unknown machine; ``specexport tune`` measures the curve itself.
    """

    def __init__(self) -> None:
        # Exponentially weighted sums of 1, x, t, x * x and x * t with x = T - 1.
        self._one = self._x = self._t = self._xx = self._xt = 0.0
        self._base, self._slope = 0.0, 0.0
        #: Calls (at most :data:`_STAIRS`) and mean departure from the line, by width.
        self._stairs: dict[int, tuple[float, float]] = {}
        self._drafts: dict[str, float] = {}
        self._rows: dict[str, float] = {}  # of a token to catch up with

    def step_s(self, nodes: int, used: int) -> float:
        if not self._one:
            return 1.0 + NODE_SHARE * (nodes - 1)
        seen, departure = self._stairs.get(nodes, (0.0, 0.0))
        return max(0.5 * self._base, self._base + self._slope * (nodes - 1) + departure * seen / (seen + _PRIOR))

    def draft_s(self, name: str, behind: int = 0) -> float:
        step_s = self.step_s(1, 0)
        return self._drafts.get(name, DRAFT_SHARE * step_s) + behind * self._rows.get(name, ROW_SHARE * step_s)

    def observe_step(self, nodes: int, used: int, seconds: float) -> None:
        if self._one:
            seconds = min(seconds, _CLIP * self.step_s(nodes, used))
        x, keep = nodes - 1.0, 1.0 - _RATE
        self._one = keep * self._one + 1.0
        self._x = keep * self._x + x
        self._t = keep * self._t + seconds
        self._xx = keep * self._xx + x * x
        self._xt = keep * self._xt + x * seconds
        # Ridge towards slope = share * mean time: few widths say little about the slope.
        mean_x, mean_t = self._x / self._one, self._t / self._one
        variance = self._xx / self._one - mean_x * mean_x
        covariance = self._xt / self._one - mean_x * mean_t
        prior = NODE_SHARE * mean_t / (1.0 + NODE_SHARE * mean_x)
        weight = _PRIOR / self._one
        self._slope = max(0.0, (covariance + weight * prior) / (variance + weight))
        self._base = max(mean_t - self._slope * mean_x, 0.1 * mean_t)
        seen, departure = self._stairs.get(nodes, (0.0, 0.0))
        seen = min(seen + 1.0, _STAIRS)
        departure += (seconds - self._base - self._slope * x - departure) / seen
        self._stairs[nodes] = seen, departure

    def observe_draft(self, name: str, seconds: float, behind: int = 0) -> None:
        if behind >= _LAG:
            self._rows[name] = max(0.0, seconds - self.draft_s(name)) / behind
            return
        known = self._drafts.get(name)
        seconds = max(0.0, seconds - self.draft_s(name, behind) + self.draft_s(name))
        if known is not None:
            seconds = known + 4 * _RATE * (min(seconds, _CLIP * known) - known)
        self._drafts[name] = seconds
