"""Every drafter by name: lookup drafters, which need no weights, and those that run a graph of the bundle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specexport.runtime.bundle import Bundle
from specexport.runtime.drafters.base import Drafter, DraftRequest, Observation
from specexport.runtime.drafters.medusa import MedusaDrafter
from specexport.runtime.drafters.model import ModelDrafter
from specexport.runtime.drafters.model_files import MAX_DEPTH, open_model, read_vocabulary
from specexport.runtime.drafters.ngram import NgramDrafter
from specexport.runtime.drafters.recurrent import RecurrentDrafter
from specexport.runtime.drafters.recycling import RecyclingDrafter
from specexport.runtime.drafters.suffix import SuffixDrafter
from specexport.runtime.engine import TargetEngine
from specexport.runtime.errors import BundleError, UsageError
from specexport.runtime.manifest import DrafterInfo

__all__ = ["DRAFTERS", "GRAPH_DRAFTERS", "NO_DRAFTER", "DraftRequest", "Drafter", "Observation", "make_drafter"]

#: Plain decoding.
NO_DRAFTER = "none"

#: Every lookup drafter: name -> factory(vocab_size, **options). Command-line choices come from here.
DRAFTERS: dict[str, Callable[..., Drafter]] = {
    NgramDrafter.name: NgramDrafter,
    SuffixDrafter.name: SuffixDrafter,
    RecyclingDrafter.name: RecyclingDrafter,
}


def _head(factory: Callable[..., Drafter]) -> Callable[[DrafterInfo, Bundle, TargetEngine], Drafter]:
    def open_head(info: DrafterInfo, bundle: Bundle, engine: TargetEngine) -> Drafter:
        options: dict[str, Any] = dict(info.options)
        rows, vocabulary = options.pop("rows", None), options.pop("vocabulary", None)
        for name in ("depth", "heads"):
            if name in options and (type(options[name]) is not int or not 1 <= options[name] <= MAX_DEPTH):
                raise BundleError(f"drafter {info.name!r}: {name} is {options[name]!r}, expected 1 to {MAX_DEPTH}")
        ids = read_vocabulary(bundle, info.name, rows, vocabulary, range(bundle.manifest.target.vocab_size))
        return factory(engine.open_graph(str(info.graph)), ids, name=info.name, tree=info.tree, **options)

    return open_head


#: Drafters with a graph: kind -> opener(record with a graph, its bundle, engine of the target).
GRAPH_DRAFTERS: dict[str, Callable[[DrafterInfo, Bundle, TargetEngine], Drafter]] = {
    "medusa": _head(MedusaDrafter),
    "eagle1": _head(RecurrentDrafter),
    "eagle3": _head(RecurrentDrafter),
    "mtp": _head(RecurrentDrafter),
    ModelDrafter.kind: open_model,
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
