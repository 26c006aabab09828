"""What acceptance a plan reckons with: measured, given as alpha, or assumed, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from specexport.profiles.sizes import DraftSize
from specexport.runtime.acceptance_table import AcceptanceTable

#: Chance of a draft's best token by kind, where nothing was measured: the middle of what publications report for chat
#: (Spec-Bench, arXiv 2401.07851; 0.67 for EAGLE in SpecDecode-Bench, arXiv 2601.11580). Lookups: text without repeats.
ASSUMED_ALPHA = {"medusa": 0.55, "eagle1": 0.65, "eagle3": 0.72, "mtp": 0.72, "model": 0.7}
ASSUMED_LOOKUP_ALPHA = 0.3
#: How far an assumed alpha may be off.
ASSUMED_SPREAD = 0.1
_SPREADS = (0.0, -ASSUMED_SPREAD, ASSUMED_SPREAD)
#: Share of what the best candidate leaves that the next one takes, and so on: heads, and a table of successors.
SIBLING_SHARE, LOOKUP_SIBLING_SHARE = 0.3, 0.15
#: Normal quantile of a two-sided 90% interval.
_Z = 1.645

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Expectation:
    """Acceptance of one drafter: ``rows[depth][rank]``, with a low and a high estimate, and where it is from.

    ``proposed``: how often it drafts as many nodes as it may, see :class:`AcceptanceTable`. ``assumed``: nobody
    measured it or vouches for it.
    """

    rows: Rows
    low: Rows
    high: Rows
    source: str
    proposed: tuple[float, ...] = ()
    assumed: bool = False


def constant(alpha: float, depth: int, ranks: int, share: float = SIBLING_SHARE) -> Rows:
    """The same chance at every depth: alpha for the best token, a falling share of the rest for its siblings."""
    siblings = [(1.0 - alpha) * share * (1.0 - share) ** rank for rank in range(ranks - 1)]
    return ((alpha, *siblings),) * depth


def given(alpha: float, draft: DraftSize) -> Expectation:
    """The alpha that the user named."""
    rows = _rows([alpha], draft)
    return Expectation(rows, rows, rows, f"alpha {alpha:g}, given")


def assumed(draft: DraftSize) -> Expectation:
    """How often a head was right on the text that was held out when it was trained, by depth; of others the usual alpha
    of their kind."""
    if draft.agreement:
        alphas, source = draft.agreement, "as held out in training"
    else:
        alpha = ASSUMED_ALPHA.get(draft.kind, ASSUMED_LOOKUP_ALPHA)
        alphas, source = (alpha,), f"alpha {alpha:g}"
    middle, low, high = (_rows([alpha + spread for alpha in alphas], draft) for spread in _SPREADS)
    return Expectation(middle, low, high, f"{source} +- {ASSUMED_SPREAD:g}", assumed=True)


def measured(table: AcceptanceTable, source: str) -> Expectation:
    """A calibrated table; its interval is that of the shares it counted (90%)."""
    return Expectation(table.acceptance, _shifted(table, -1), _shifted(table, 1), source, table.proposed)


def _rows(alphas: Sequence[float], draft: DraftSize) -> Rows:
    """One row for each depth; the last of ``alphas`` holds for all that are deeper."""
    share = SIBLING_SHARE if draft.steps else LOOKUP_SIBLING_SHARE
    each = [min(max(alpha, 0.0), 1.0) for alpha in alphas]
    each += each[-1:] * (draft.depth - len(each))
    return tuple(constant(alpha, 1, draft.ranks, share)[0] for alpha in each[: draft.depth])


def _shifted(table: AcceptanceTable, sign: int) -> Rows:
    return tuple(_shift(row, tried, sign) for row, tried in zip(table.acceptance, table.tried, strict=True))


def _shift(row: Sequence[float], tried: int, sign: int) -> tuple[float, ...]:
    """The row with the chance that any child is right at one end of its Wilson interval."""
    share = min(1.0, sum(row))
    if not tried or share == 0.0:
        return tuple(row)
    z2 = _Z * _Z / tried
    middle = (share + z2 / 2) / (1 + z2)
    half = _Z * sqrt(share * (1 - share) / tried + z2 / (4 * tried)) / (1 + z2)
    scale = min(1.0, max(0.0, middle + sign * half)) / share
    return tuple(chance * scale for chance in row)
