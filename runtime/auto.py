"""``auto``: the controller over everything a bundle can draft with."""

from __future__ import annotations

from specexport.runtime.bundle import Bundle
from specexport.runtime.controller import Controller, FeatureController
from specexport.runtime.costs import Costs, LearnedCosts
from specexport.runtime.device_profile import MeasuredCosts, find_profile
from specexport.runtime.drafters import DRAFTERS, GRAPH_DRAFTERS, Drafter, make_drafter
from specexport.runtime.drafters.base import FeatureDrafter
from specexport.runtime.engine import TargetEngine
from specexport.runtime.machine import this_machine

AUTO = "auto"
#: Widest tree that the controller may choose, the root included.
MAX_NODES = 32
#: Lookups that another one makes superfluous: what is on the left finds nothing that the right does not.
_COVERED = {"ngram": "suffix"}


def make_controller(
    bundle: Bundle, engine: TargetEngine, engine_name: str, threads: int, *, chains: bool = False
) -> Controller:
    """A controller over the drafters of a bundle, with the costs that ``tune`` measured on this machine, else learnt.

    Args:
        engine_name, threads: what ``engine`` is, to find its profile. chains: see :class:`Controller`.
    """
    offered = bundle.manifest.drafters
    kinds = {info.kind for info in offered}
    lookups = [
        drafter
        for info in offered
        if info.kind in DRAFTERS and _COVERED.get(info.kind) not in kinds
        if (drafter := make_drafter(info.kind, bundle.manifest.target.valid_vocab, **info.options))
    ]
    heads: list[Drafter] = [
        GRAPH_DRAFTERS[info.kind](info, bundle, engine)
        for info in offered
        if info.graph is not None and info.kind in GRAPH_DRAFTERS
    ]
    profile = find_profile(bundle, this_machine(engine_name, threads))
    costs: Costs = LearnedCosts() if profile is None else MeasuredCosts(profile)
    reads_features = any(isinstance(head, FeatureDrafter) for head in heads)
    kind = FeatureController if reads_features else Controller
    return kind(lookups, heads, costs, max_nodes=MAX_NODES, chains=chains)
