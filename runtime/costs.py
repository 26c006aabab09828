"""What a step costs: the time of a target call by its width, and of a draft, for whoever chooses between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
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


#: Before anything was measured: each further node costs this share of a call of one node, and on ONNX Runtime's own
#: kernels by the format of the weights: the fewer bytes are read, the more it shows that there is something to compute.
#: Seen on x86 CPUs.
NODE_SHARE, NODE_SHARES = 0.05, {"int8": 0.1, "int4": 0.2}


def node_share(weights: str, *, kernels: bool) -> float:
    """What a further node of a call costs before anything was measured, as a share of a call of one node.

    Args:
        weights: their format. kernels: our own run the target.
    """
    return NODE_SHARE if kernels else NODE_SHARES.get(weights, NODE_SHARE)


@dataclass(frozen=True, slots=True)
class DraftShare:
    """What a draft is expected to cost before it was timed, as shares of a call of one node.

    Attributes:
        draft: of a proposal. row: of each token that the drafter has to catch up with. spread: how far either may be
            off, as a share of itself.
    """

    draft: float = 0.4
    row: float = 0.003
    spread: float = 1.0


#: Weight of the newest measurement.
_RATE = 0.05
#: A measurement beyond this multiple of what was expected is a hiccup of the machine and counts as the multiple.
_CLIP = 2.0
#: How far the time of one proposal may be off what proposals take, of that; how much less sure a time is for being old.
_JITTER, _AGE = 0.25, 1.05
#: Calls of one width that its departure from the line is a mean of.
_STAIRS = 24.0
#: How many measurements of other widths the prior slope is worth.
_PRIOR = 4.0


class LearnedCosts:
    """A straight line through the times of the calls so far, older ones counting less, and what widths depart from it.

    ``t(T) = base + slope * (T - 1)`` by weighted least squares, with the prior that ``slope`` is a known share of
    ``base``. Kernels work in blocks of rows, so times climb stairs: a width that was seen often
    costs what it cost. Good for a first hour on an unknown machine; ``specexport tune`` measures the curve itself.

    Args:
        node_share: what a further node costs before anything was measured, see :data:`NODE_SHARES`.
        draft_shares: what drafts are expected to cost, by drafter.
    """

    def __init__(
        self, node_share: float = NODE_SHARE, draft_shares: Mapping[str, DraftShare] = MappingProxyType({})
    ) -> None:
        self._node_share, self._draft_shares = node_share, draft_shares
        # Exponentially weighted sums of 1, x, t, x * x and x * t with x = T - 1.
        self._one = self._x = self._t = self._xx = self._xt = 0.0
        self._base, self._slope = 0.0, 0.0
        #: Calls (at most :data:`_STAIRS`) and mean departure from the line, by width.
        self._stairs: dict[int, tuple[float, float]] = {}
        self._drafts: dict[str, _DraftTime] = {}

    def step_s(self, nodes: int, used: int) -> float:
        if not self._one:
            return 1.0 + self._node_share * (nodes - 1)
        seen, departure = self._stairs.get(nodes, (0.0, 0.0))
        return max(0.5 * self._base, self._base + self._slope * (nodes - 1) + departure * seen / (seen + _PRIOR))

    def draft_s(self, name: str, behind: int = 0) -> float:
        return (self._drafts.get(name) or self._unknown(name)).seconds(behind)

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
        prior = self._node_share * mean_t / (1.0 + self._node_share * mean_x)
        weight = _PRIOR / self._one
        self._slope = max(0.0, (covariance + weight * prior) / (variance + weight))
        self._base = max(mean_t - self._slope * mean_x, 0.1 * mean_t)
        seen, departure = self._stairs.get(nodes, (0.0, 0.0))
        seen = min(seen + 1.0, _STAIRS)
        departure += (seconds - self._base - self._slope * x - departure) / seen
        self._stairs[nodes] = seen, departure

    def observe_draft(self, name: str, seconds: float, behind: int = 0) -> None:
        known = self._drafts.get(name)
        if known is None:
            known = self._drafts[name] = self._unknown(name)
        known.observe(seconds, behind)

    def _unknown(self, name: str) -> _DraftTime:
        return _DraftTime(self.step_s(1, 0), self._draft_shares.get(name, DraftShare()))


class _DraftTime:
    """Time of a proposal and of each token to catch up with: a Kalman filter (1960) of the two.

    The first proposal after a prompt shows their sum; what is known beforehand splits it.

    Args:
        step_s: time of a call of one node. share: what is expected of it.
    """

    def __init__(self, step_s: float, share: DraftShare) -> None:
        self._draft_s, self._row_s = share.draft * step_s, share.row * step_s
        # Variances of the two, and their covariance.
        self._draft, self._row, self._both = (share.spread * self._draft_s) ** 2, (share.spread * self._row_s) ** 2, 0.0

    def seconds(self, behind: int) -> float:
        """Of a proposal."""
        return self._draft_s + behind * self._row_s

    def observe(self, seconds: float, behind: int) -> None:
        """Take note of a proposal."""
        expected = self.seconds(behind)
        off = min(seconds, _CLIP * expected) - expected
        self._draft, self._row, self._both = _AGE * self._draft, _AGE * self._row, _AGE * self._both
        to_draft, to_row = self._draft + behind * self._both, self._both + behind * self._row
        whole = to_draft + behind * to_row + (_JITTER * expected) ** 2
        # Either stays positive, so that what follows can be told from it.
        self._draft_s = max(self._draft_s + off * to_draft / whole, 0.25 * self._draft_s)
        self._row_s = max(self._row_s + off * to_row / whole, 0.25 * self._row_s)
        self._draft -= to_draft * to_draft / whole
        self._row -= to_row * to_row / whole
        self._both -= to_draft * to_row / whole
