"""What a step costs: the time of a target call by its width, and of a draft, for whoever chooses between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import mul
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


#: A thousand rows in use: they make a call longer by what reading them takes, of what a call reads; and of that share
#: this again for each further node, which reads nothing but computes (seen on x86 CPUs).
ROW_SHARE, NODE_ROWS = 0.1, 0.25
#: A measurement beyond this multiple of what was expected is a hiccup of the machine and counts as the multiple.
_CLIP = 2.0
#: How far the time of one proposal may be off what proposals take, of that; how much less sure a time is for being old.
_JITTER, _AGE = 0.25, 1.05
#: How far what was expected of a call's shares may be off, of them; how much of that is forgotten a call.
_UNSURE, _FORGOTTEN = 0.75, 0.0005
#: How far the time of one call may be off what calls take, and how far a machine's speed wanders from call to call.
_CALL_JITTER, _WANDER = 0.3, 0.03
#: Calls of one width that its departure from the surface is a mean of, and calls that it is weighed against.
_STAIRS, _FLAT = 24.0, 4.0
_UNSEEN = (0.0, 0.0)


class LearnedCosts:
    """A surface through the times of the calls so far, older ones counting less, and what widths depart from it.

    ``t(T, used) = base * (1 + a (T - 1) + c used + d (T - 1) used)``: a machine is slow or fast for a while, which
    changes the base at once, and what its kernels are like, the shares a, c and d, hardly changes. So what was seen in
    a long text says what to expect of a short one. A Kalman filter (1960) whose state wanders so, from the shares that
    were expected. Kernels work in blocks of rows, so times climb stairs: a width that was seen often costs what it
    cost. Good for a first hour on an unknown machine; ``specexport tune`` measures the curve itself.

    Args:
        node_share: what a further node costs before anything was measured, see :data:`NODE_SHARES`.
        draft_shares: what drafts are expected to cost, by drafter.
        row_share: what a thousand rows in use cost before anything was measured.
    """

    def __init__(
        self,
        node_share: float = NODE_SHARE,
        draft_shares: Mapping[str, DraftShare] = MappingProxyType({}),
        row_share: float = ROW_SHARE,
    ) -> None:
        self._draft_shares = draft_shares
        self._state = [1.0, node_share, row_share, NODE_ROWS * row_share]
        #: Variances of the shares before anything was measured: they never get less sure.
        self._most = [(_UNSURE * share) ** 2 for share in self._state]
        self._covariance: list[list[float]] = []  # none before the first call: the base has no unit
        #: Calls (at most :data:`_STAIRS`) and mean departure from the surface, as a share of it, by width.
        self._stairs: dict[int, tuple[float, float]] = {}
        self._drafts: dict[str, _DraftTime] = {}

    def step_s(self, nodes: int, used: int) -> float:
        seen, departure = self._stairs.get(nodes, _UNSEEN)
        return self._surface(nodes, used) * (1.0 + departure * seen / (seen + _FLAT))

    def draft_s(self, name: str, behind: int = 0) -> float:
        return (self._drafts.get(name) or self._unknown(name)).seconds(behind)

    def observe_step(self, nodes: int, used: int, seconds: float) -> None:
        if not self._covariance:
            base = seconds / self._surface(nodes, used)
            self._state = [base * share for share in self._state]
            self._covariance = [[base * base * self._most[i] if i == j else 0.0 for j in range(4)] for i in range(4)]
        seconds = min(seconds, _CLIP * self.step_s(nodes, used))
        self._learn(nodes, used, seconds)
        seen, departure = self._stairs.get(nodes, _UNSEEN)
        seen = min(seen + 1.0, _STAIRS)
        departure += (seconds / self._surface(nodes, used) - 1.0 - departure) / seen
        self._stairs[nodes] = seen, departure

    def observe_draft(self, name: str, seconds: float, behind: int = 0) -> None:
        known = self._drafts.get(name)
        if known is None:
            known = self._drafts[name] = self._unknown(name)
        known.observe(seconds, behind)

    def _unknown(self, name: str) -> _DraftTime:
        return _DraftTime(self.step_s(1, 0), self._draft_shares.get(name, DraftShare()))

    def _surface(self, nodes: int, used: int) -> float:
        base, node, row, both = self._state
        more, rows = nodes - 1.0, used / 1000.0
        return base + node * more + (row + both * more) * rows

    def _learn(self, nodes: int, used: int, seconds: float) -> None:
        """The filter's step: the whole state grows or shrinks together, each share a little by itself."""
        state, base, wander = self._state, self._state[0], _WANDER * _WANDER
        covariance = [
            [known + wander * mine * other for known, other in zip(row, state, strict=True)]
            for row, mine in zip(self._covariance, state, strict=True)
        ]
        for i in range(1, 4):
            most = base * base * self._most[i]
            covariance[i][i] += _FORGOTTEN * most
            if covariance[i][i] > most > 0.0:  # seldom seen, it is as unsure as at first, not less
                shrink = (most / covariance[i][i]) ** 0.5
                covariance[i] = [shrink * each for each in covariance[i]]
                for row in covariance:
                    row[i] *= shrink
        expected, more, rows = self._surface(nodes, used), nodes - 1.0, used / 1000.0
        features = (1.0, more, rows, more * rows)
        towards = [sum(map(mul, row, features)) for row in covariance]
        whole = sum(map(mul, towards, features)) + (_CALL_JITTER * expected) ** 2
        off = (seconds - expected) / whole
        self._state = [max(each + off * mine, 0.0) for each, mine in zip(state, towards, strict=True)]
        self._state[0] = max(self._state[0], 0.25 * base)
        self._covariance = [
            [known - mine * other / whole for known, other in zip(row, towards, strict=True)]
            for row, mine in zip(covariance, towards, strict=True)
        ]


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
