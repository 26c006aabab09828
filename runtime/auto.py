"""``auto``: the controller over everything a bundle can draft with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from specexport.runtime.bundle import Bundle
from specexport.runtime.controller import Controller, FeatureController
from specexport.runtime.costs import Costs, LearnedCosts
from specexport.runtime.device_profile import DeviceProfile, MeasuredCosts, find_profile
from specexport.runtime.drafters import DRAFTERS, GRAPH_DRAFTERS, NO_DRAFTER, Drafter, make_drafter
from specexport.runtime.drafters.base import FeatureDrafter
from specexport.runtime.drafters.ngram import NgramDrafter
from specexport.runtime.drafters.recycling import RecyclingDrafter
from specexport.runtime.drafters.suffix import SuffixDrafter
from specexport.runtime.engine import TargetEngine, grows_trees, tree_exact
from specexport.runtime.expected import Expected
from specexport.runtime.machine import this_machine
from specexport.runtime.worth import BESIDE_LOOKUPS, Prior

AUTO = "auto"
#: Widest tree that the controller may choose, the root included.
MAX_NODES = 32
#: Lookups that another one makes superfluous: what is on the left finds nothing that the right does not.
_COVERED = {NgramDrafter.name: SuffixDrafter.name}
#: Token Recycling joins another lookup if it was measured to cost at most this share of a plain step. What it adds
#: there is worth 1 to 2%; with small models it costs more than that.
RECYCLING_SHARE = 0.01


def default_policy(bundle: Bundle, engine_name: str, threads: int) -> str:
    """What to draft with unless told: a drafter's name or :data:`AUTO`.

    The controller is it where it has something to decide: a head or a draft model, which cost whether or not they pay,
    or costs that ``tune`` measured on this machine. Otherwise it is the bundle's own default.
    """
    named = bundle.manifest.drafter
    if named is None:
        return NO_DRAFTER
    decides = any(info.graph is not None for info in bundle.manifest.drafters)
    return AUTO if decides or find_profile(bundle, this_machine(engine_name, threads)) else named


def make_controller(
    bundle: Bundle, engine: TargetEngine, engine_name: str, threads: int, *, chains: bool = False
) -> Controller:
    """A controller over the drafters of a bundle.

    It begins with the costs and chances that ``tune`` measured on this machine, else with what the bundle says of its
    heads (:mod:`specexport.runtime.expected`).

    Args:
        engine_name, threads: what ``engine`` is, to find its profile. chains: see :class:`Controller`.
    """
    offered = bundle.manifest.drafters
    profile = find_profile(bundle, this_machine(engine_name, threads))
    costs: Costs
    if profile is not None and profile.chains != chains:
        profile = None  # measured with other kernels: with ours trees are verified, without them chains
    if profile is not None:
        costs, priors = MeasuredCosts(profile), tuned_priors(profile)
    else:
        expected = Expected.of(bundle, kernels=tree_exact(engine), grown=partial(grows_trees, engine))
        costs = LearnedCosts(expected.node_share, expected.draft_shares, expected.row_share)
        priors = expected.priors
    kinds = {info.kind for info in offered if info.kind in DRAFTERS}
    kinds -= {kind for kind, by in _COVERED.items() if by in kinds}
    if kinds > {RecyclingDrafter.name} and not recycling_joins(profile):
        kinds.remove(RecyclingDrafter.name)
    lookups = [
        drafter
        for info in offered
        if info.kind in kinds
        if (drafter := make_drafter(info.kind, bundle.manifest.target.valid_vocab, **info.options))
    ]
    heads: list[Drafter] = [
        GRAPH_DRAFTERS[info.kind](info, bundle, engine)
        for info in offered
        if info.graph is not None and info.kind in GRAPH_DRAFTERS
    ]
    if lookups:
        priors = beside_lookups(priors)
    reads_features = any(isinstance(head, FeatureDrafter) for head in heads)
    kind = FeatureController if reads_features else Controller
    return kind(lookups, heads, costs, max_nodes=MAX_NODES, chains=chains, priors=priors)


def recycling_joins(profile: DeviceProfile | None) -> bool:
    """Whether Token Recycling was measured to cost so little that it joins another lookup."""
    known = None if profile is None else profile.drafts.get(RecyclingDrafter.name)
    return profile is not None and known is not None and known.seconds <= RECYCLING_SHARE * profile.cost.step_s(1, 0)


def tuned_priors(profile: DeviceProfile) -> dict[str, Prior]:
    """What drafters add to plain decoding, by the acceptance and the costs that were measured."""
    plain_s = MeasuredCosts(profile).step_s(1, profile.typical_used)
    best = {
        name: max(trees, key=lambda tree: tree.tau / tree.seconds) for name, trees in profile.trees.items() if trees
    }
    return {name: Prior(tree.tau - 1.0, tree.seconds / plain_s - 1.0) for name, tree in best.items()}


def beside_lookups(priors: Mapping[str, Prior]) -> dict[str, Prior]:
    """What is left of what drafters add to plain decoding where there are lookups as well."""
    return {name: replace(prior, more=BESIDE_LOOKUPS * prior.more) for name, prior in priors.items()}
