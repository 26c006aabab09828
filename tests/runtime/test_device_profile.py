from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specexport.runtime.acceptance_table import Acceptance, AcceptanceCounter, AcceptanceTable
from specexport.runtime.bundle import Bundle
from specexport.runtime.cost_curve import CostCurve
from specexport.runtime.device_profile import (
    MAX_PROFILE_BYTES,
    DeviceProfile,
    DraftCost,
    MeasuredCosts,
    TunedTree,
    find_profile,
    fingerprint,
    profile_names,
    read_acceptance,
    read_profile,
    write_acceptance,
    write_profile,
)
from specexport.runtime.errors import BundleError, UsageError
from specexport.runtime.machine import this_machine
from specexport.runtime.manifest import FileInfo
from specexport.runtime.records import RecordError, plain, read_record

CURVE = CostCurve(widths=(1, 4), used=(0, 100), seconds=((0.010, 0.016), (0.012, 0.018)), noise=0.01)
MACHINE = this_machine("onnxruntime-cpu", 1)


@pytest.fixture
def bundle(tiny_bundle: Bundle, tmp_path: Path) -> Bundle:
    return Bundle.load(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))


def profile_of(bundle: Bundle) -> DeviceProfile:
    return DeviceProfile(
        fingerprint=fingerprint(bundle),
        machine=MACHINE,
        cost=CURVE,
        host_s=0.001,
        drafts={"suffix": DraftCost(seconds=1e-4), "model": DraftCost(seconds=0.02, depth=5)},
        measured_on="4 prompts",
        acceptance={"suffix": AcceptanceTable(acceptance=((0.5,), (0.8,)), tried=(100, 50))},
        trees={"suffix": (TunedTree(width=4, paths=((0,), (0, 0)), tau=1.9, seconds=0.02),)},
        drafter="suffix",
        width=4,
    )


def test_round_trip(bundle: Bundle) -> None:
    profile = profile_of(bundle)
    path = write_profile(bundle, "laptop", profile)
    assert path == bundle.path / "profiles" / "laptop.json"
    assert read_profile(bundle, "laptop") == profile
    assert profile_names(bundle) == ["laptop"]
    Bundle.load(bundle.path, check="full")  # an added profile needs no line in the manifest
    assert list(bundle.path.glob("profiles/.*")) == []


def test_found_by_machine_and_graphs(bundle: Bundle) -> None:
    profile = profile_of(bundle)
    assert find_profile(bundle, MACHINE) is None
    write_profile(bundle, "other", replace(profile, machine=replace(MACHINE, threads=63)))
    write_profile(bundle, "stale", replace(profile, fingerprint="sha256:0"))
    write_profile(bundle, "noisy", replace(profile, cost=replace(CURVE, noise=0.5)))
    (bundle.path / "profiles" / "broken.json").write_text("{")
    assert find_profile(bundle, MACHINE) is None
    write_profile(bundle, "this", profile)
    assert find_profile(bundle, MACHINE) == profile


def test_a_profile_that_was_built_in_keeps_its_hash(bundle: Bundle) -> None:
    file = "profiles/laptop.json"
    write_profile(bundle, "laptop", profile_of(bundle))
    info = FileInfo(bytes=1, sha256="0" * 64)
    listed = Bundle(bundle.path, replace(bundle.manifest, files=bundle.manifest.files | {file: info}))
    write_profile(listed, "laptop", replace(profile_of(bundle), width=2))
    again = Bundle.load(bundle.path, check="full")
    assert file in again.manifest.files and read_profile(again, "laptop").width == 2


@pytest.mark.parametrize("name", ["", "../x", "A", "acceptance", "a/b", "a" * 65])
def test_bad_names_are_refused(bundle: Bundle, name: str) -> None:
    with pytest.raises(UsageError, match="profile name"):
        write_profile(bundle, name, profile_of(bundle))


def _drop(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda data: data.pop(key)


def _put(*path: str, value: Any) -> Callable[[dict[str, Any]], object]:
    def change(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


BAD: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "unknown key": (_put("colour", value=1), "unknown key 'colour'"),
    "missing key": (_drop("cost"), "missing key cost"),
    "another version": (_put("schema", value=2), "schema is 2"),
    "widths fall": (_put("cost", "widths", value=[4, 1]), "each larger"),
    "no width 1": (_put("cost", "widths", value=[2, 4]), "widths from 1 on"),
    "ragged times": (_put("cost", "seconds", value=[[0.1], [0.1, 0.2]]), "rows of 2 times"),
    "negative time": (_put("cost", "seconds", value=[[-1.0, 1.0], [1.0, 1.0]]), "cost.seconds"),
    "a million widths": (_put("cost", "widths", value=[1] * 1000), "at most 256"),
    "acceptance above one": (_put("acceptance", "suffix", "acceptance", value=[[0.9, 0.9], [0.1]]), "sum of at most 1"),
    "counts of other depths": (_put("acceptance", "suffix", "tried", value=[1]), "one count for each"),
    "odd drafter": (_put("drafter", value="../suffix"), "drafter is"),
    "deep tree": (_put("trees", "suffix", value=[{"width": 4, "paths": [[0] * 99], "tau": 1, "seconds": 1}]), "paths"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_profile_is_refused(bundle: Bundle, case: str) -> None:
    change, message = BAD[case]
    data = plain(profile_of(bundle))
    change(data)
    folder = bundle.path / "profiles"
    folder.mkdir()
    (folder / "laptop.json").write_text(json.dumps(data))
    with pytest.raises(BundleError) as caught:
        read_profile(bundle, "laptop")
    assert message in str(caught.value) and "specexport tune" in str(caught.value)


def test_hostile_files_are_refused(bundle: Bundle, tmp_path: Path) -> None:
    folder = bundle.path / "profiles"
    folder.mkdir()
    (folder / "large.json").write_bytes(b" " * (MAX_PROFILE_BYTES + 1))
    with pytest.raises(BundleError, match=f"more than {MAX_PROFILE_BYTES} bytes"):
        read_profile(bundle, "large")
    (tmp_path / "outside.json").write_text("{}")
    (folder / "link.json").symlink_to(tmp_path / "outside.json")
    with pytest.raises(BundleError, match="link out of the bundle"):
        read_profile(bundle, "link")
    (folder / "nan.json").write_text('{"schema": NaN}')
    with pytest.raises(BundleError, match="not valid JSON"):
        read_profile(bundle, "nan")
    with pytest.raises(BundleError, match="missing from the bundle"):
        read_profile(bundle, "nowhere")


def test_acceptance_file(bundle: Bundle) -> None:
    assert read_acceptance(bundle) is None
    table = AcceptanceTable(acceptance=((0.5, 0.2), (0.4,)), tried=(10, 5))
    acceptance = Acceptance(measured_on="gsm8k, temperature 0", drafters={"eagle3": table})
    path = write_acceptance(bundle, acceptance)
    assert path.name == "acceptance.json" and profile_names(bundle) == []
    assert read_acceptance(bundle) == acceptance and table.top1 == (0.5, 0.4)
    path.write_text("[]")
    with pytest.raises(BundleError, match="expected an object"):
        read_acceptance(bundle)


def test_measured_costs_are_fixed(bundle: Bundle) -> None:
    costs = MeasuredCosts(profile_of(bundle))
    assert costs.step_s(4, 100) == pytest.approx(0.019)
    assert (costs.draft_s("suffix"), costs.draft_s("never measured")) == (1e-4, 0.02)
    costs.observe_step(4, 100, 9.0)
    costs.observe_draft("suffix", 9.0)
    assert costs.step_s(4, 100) == pytest.approx(0.019) and costs.draft_s("suffix") == 1e-4
    assert DraftCost(seconds=0.02, depth=5).at(2) == pytest.approx(0.008)


@pytest.mark.parametrize(
    ("nodes", "used", "seconds"),
    [(1, 0, 0.010), (4, 100, 0.018), (2, 0, 0.012), (1, 50, 0.011), (3, 50, 0.015), (10, 0, 0.028), (1, 200, 0.014)],
)
def test_curve_is_linear_between_and_beyond_its_points(nodes: int, used: int, seconds: float) -> None:
    assert CURVE.step_s(nodes, used) == pytest.approx(seconds)


def test_noise_never_makes_more_work_cheaper() -> None:
    curve = CostCurve(
        widths=(1, 2, 4, 8),
        used=(0, 100, 200),
        seconds=((0.010, 0.009, 0.012, 0.015), (0.0095, 0.011, 0.0115, 0.016), (0.012, 0.0125, 0.012, 0.018)),
        noise=0.1,
    )
    for used in range(0, 201, 25):
        times = [curve.step_s(nodes, used) for nodes in range(1, 12)]
        assert times == sorted(times)
    for nodes in (1, 3, 8):
        times = [curve.step_s(nodes, used) for used in range(0, 301, 25)]
        assert times == sorted(times)
    assert curve.step_s(1, 0) == pytest.approx(0.0095, rel=0.06)


def test_machine_changes_are_named() -> None:
    now = replace(MACHINE, cpu="Another CPU", threads=MACHINE.threads + 1)
    assert MACHINE.changes(MACHINE) == []
    assert MACHINE.changes(now) == [
        f"cpu: Another CPU, was {MACHINE.cpu}",
        f"threads: {now.threads}, was {MACHINE.threads}",
    ]
    assert replace(MACHINE, cpu="AMD Ryzen(TM) 7 PRO CPU @ 3.0GHz", cores=8, threads=4).slug == "amd-ryzen-7-pro-8c-4t"
    assert read_record(type(MACHINE), plain(MACHINE)) == MACHINE


def test_counter_counts_ranks_of_accepted_nodes() -> None:
    """Root 10 with children 11, 12; 12 has children 13, 14: emitted 12, 14, then a bonus token."""
    counter = AcceptanceCounter(3)
    parents, tokens = [-1, 0, 0, 2, 2], [10, 11, 12, 13, 14]
    counter.add(parents, tokens, [12, 14, 99], max_depth=3)
    counter.add(parents, tokens, [50], max_depth=3)  # nothing right
    counter.add([-1], [10], [11], max_depth=3)  # nothing proposed: decided all the same
    counter.add(parents, tokens, [12, 13, 7], max_depth=1)  # the budget ended at depth 1
    table = counter.table()
    assert table.tried == (4, 1, 1)
    assert table.acceptance == ((0.0, 0.5), (0.0, 1.0), ())
    assert table.proposed == pytest.approx((2 / 3, 2 / 3, 2 / 3, 2 / 3))


def test_tables_that_promise_more_than_one_are_refused() -> None:
    with pytest.raises(RecordError, match="sum of at most 1"):
        AcceptanceTable(acceptance=((0.7, 0.7),), tried=(3,))
