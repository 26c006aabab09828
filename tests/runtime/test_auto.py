"""Which policy a bundle gets, and what the controller is made of."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specexport.runtime.auto import AUTO, default_policy, make_controller
from specexport.runtime.bundle import Bundle
from specexport.runtime.cost_curve import CostCurve
from specexport.runtime.costs import NODE_SHARE, NODE_SHARES, node_share
from specexport.runtime.device_profile import DeviceProfile, DraftCost, TunedTree, fingerprint, write_profile
from specexport.runtime.engine import find_engine, tree_exact
from specexport.runtime.machine import this_machine

ENGINE = "onnxruntime-cpu"


@pytest.fixture
def bundle(tiny_bundle: Bundle, tmp_path: Path) -> Bundle:
    return Bundle.load(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))


def profile(bundle: Bundle, recycling_s: float) -> DeviceProfile:
    """Measured here: a step takes 10 ms."""
    return DeviceProfile(
        fingerprint=fingerprint(bundle),
        machine=this_machine(ENGINE, 1),
        cost=CostCurve(widths=(1, 4), used=(0, 64), seconds=((0.01, 0.012), (0.01, 0.012)), noise=0.01),
        host_s=0.0,
        drafts={"suffix": DraftCost(seconds=1e-4), "recycling": DraftCost(seconds=recycling_s)},
        measured_on="4 prompts",
        acceptance={},
        trees={"recycling": (TunedTree(width=4, paths=((0,),), tau=1.5, seconds=0.012),)},
        drafter="recycling",
        width=4,
    )


def test_auto_is_the_default_where_there_is_something_to_decide(bundle: Bundle) -> None:
    assert default_policy(bundle, ENGINE, 1) == bundle.manifest.drafter == "suffix"
    plain = replace(bundle, manifest=replace(bundle.manifest, drafter=None))
    head = replace(bundle.manifest.drafters[0], name="head", kind="medusa", graph="drafter.head.onnx")
    headed = replace(bundle, manifest=replace(bundle.manifest, drafters=(head, *bundle.manifest.drafters)))
    assert (default_policy(plain, ENGINE, 1), default_policy(headed, ENGINE, 1)) == ("none", AUTO)
    write_profile(bundle, "here", profile(bundle, 1e-3))
    assert default_policy(bundle, ENGINE, 1) == AUTO and default_policy(plain, ENGINE, 1) == "none"
    assert default_policy(bundle, ENGINE, 2) == "suffix"  # tuned for another number of threads


@pytest.mark.parametrize(("recycling_s", "joined"), [(None, False), (1e-3, False), (5e-5, True)])
def test_token_recycling_joins_where_it_is_cheap(bundle: Bundle, recycling_s: float | None, joined: bool) -> None:
    if recycling_s is not None:
        write_profile(bundle, "here", profile(bundle, recycling_s))
    engine = find_engine(ENGINE)(bundle.path, threads=1)
    names = make_controller(bundle, engine, ENGINE, 1).drafters
    assert names == (("suffix", "recycling") if joined else ("suffix",))
    only = tuple(info for info in bundle.manifest.drafters if info.kind == "recycling")
    alone = replace(bundle, manifest=replace(bundle.manifest, drafters=only, drafter="recycling"))
    assert make_controller(alone, engine, ENGINE, 1).drafters == ("recycling",)


@pytest.mark.parametrize("chains", [False, True])
def test_a_profile_of_other_kernels_is_passed_over(bundle: Bundle, chains: bool) -> None:
    """It says that recycling is cheap, which is believed only of a run that verified what this one does."""
    write_profile(bundle, "here", replace(profile(bundle, 1e-6), chains=True))
    engine = find_engine(ENGINE)(bundle.path, threads=1)
    assert ("recycling" in make_controller(bundle, engine, ENGINE, 1, chains=chains).drafters) is chains


def test_a_node_costs_less_where_trees_are_exact() -> None:
    """Our own kernels, which promise that, read weights once for many rows."""
    ours: Any = SimpleNamespace(tree_exact=True)
    others: Any = SimpleNamespace()

    def share(weights: str, engine: Any) -> float:
        return node_share(weights, kernels=tree_exact(engine))

    assert share("int8", ours) == share("fp32", others) == NODE_SHARE
    assert share("int8", others) == NODE_SHARES["int8"]
    assert share("int4", others) > share("int8", others) > NODE_SHARE
