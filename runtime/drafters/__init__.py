"""Every drafter by name: lookup drafters, which need no weights, and those that run a graph of the bundle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specexport.runtime.drafters.base import Drafter, DraftRequest, Observation
from specexport.runtime.drafters.medusa import MedusaDrafter
from specexport.runtime.drafters.ngram import NgramDrafter
from specexport.runtime.drafters.recurrent import RecurrentDrafter
from specexport.runtime.drafters.recycling import RecyclingDrafter
from specexport.runtime.drafters.suffix import SuffixDrafter
from specexport.runtime.errors import UsageError

__all__ = ["DRAFTERS", "GRAPH_DRAFTERS", "NO_DRAFTER", "DraftRequest", "Drafter", "Observation", "make_drafter"]

#: Plain decoding.
NO_DRAFTER = "none"

#: Every lookup drafter: name -> factory(vocab_size, **options). Command-line choices come from here.
DRAFTERS: dict[str, Callable[..., Drafter]] = {
    NgramDrafter.name: NgramDrafter,
    SuffixDrafter.name: SuffixDrafter,
    RecyclingDrafter.name: RecyclingDrafter,
}


#: Drafters with a graph: kind -> factory(graph, name=, tree=, **options).
GRAPH_DRAFTERS: dict[str, Callable[..., Drafter]] = {
    "medusa": MedusaDrafter,
    "eagle1": RecurrentDrafter,
    "eagle3": RecurrentDrafter,
    "mtp": RecurrentDrafter,
}


def make_drafter(name: str, vocab_size: int, **options: Any) -> Drafter | None:
    """The drafter called ``name``; None for ``"none"``.

    Args:
        vocab_size: valid ids of the target; no id at or above it is proposed.
        options: settings of that drafter (its constructor's keywords).

    Raises:
        UsageError: no such drafter, or an option it does not take.
    """
    if name == NO_DRAFTER:
        return None
    if name not in DRAFTERS:
        raise UsageError(f"unknown drafter {name!r}: expected {NO_DRAFTER}, {', '.join(DRAFTERS)}")
    try:
        return DRAFTERS[name](vocab_size, **options)
    except TypeError as error:
        raise UsageError(f"drafter {name!r}: {error}") from error
