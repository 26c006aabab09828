"""Acceptance in a bundle, and drift from it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specexport.exporter.cli import main
from specexport.exporter.pipeline import BuildOptions, build
from specexport.exporter.train.fit import CountOptions, calibrate, chance_by_depth, count, expected_tau, measure_drift
from specexport.exporter.train.run import train
from specexport.runtime.acceptance_table import Acceptance, AcceptanceTable
from specexport.runtime.bundle import Bundle
from specexport.runtime.device_profile import read_acceptance, write_acceptance
from specexport.runtime.errors import UsageError
from tests.exporter.train.conftest import QUIET, Tiny
from tests.exporter.train.test_training import shared


@pytest.fixture(scope="module")
def calibrated(tiny_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Path]:
    """A bundle with recorded acceptance, and the prompts it was recorded on."""
    folder = tmp_path_factory.mktemp("fit")
    shutil.copytree(tiny_bundle.path, folder / "bundle")
    data = folder / "prompts.txt"
    data.write_text("the quick brown fox\n12, 13, 14\ndef add(a, b)\nthe lazy dog\n")
    bundle = Bundle.load(folder / "bundle")
    calibrate(bundle, CountOptions(data, count=4, max_tokens=40, drafters=("suffix",)), QUIET)
    return bundle, data


def test_acceptance_is_stored_in_the_bundle_which_still_loads(calibrated: tuple[Bundle, Path]) -> None:
    bundle, _ = calibrated
    found = read_acceptance(Bundle.load(bundle.path, check="full"))
    assert found is not None
    assert list(found.drafters) == ["suffix"]
    assert "4 prompts of prompts.txt, 40 tokens, temperature 0, fp32" in found.measured_on
    assert found.drafters["suffix"].tried[0] > 10


def test_chains_are_counted_where_a_session_verifies_chains(calibrated: tuple[Bundle, Path]) -> None:
    bundle, data = calibrated
    options = CountOptions(data, count=4, max_tokens=40, drafters=("recycling",), threads=1)
    target = bundle.manifest.target
    precision = replace(target.precision, weights="int8", lm_head="int8")
    quantised = replace(bundle, manifest=replace(bundle.manifest, target=replace(target, precision=precision)))
    trees, chains = (count(each, options, QUIET)["recycling"].acceptance for each in (bundle, quantised))
    assert max(map(len, trees)) > 1 == max(map(len, chains))


def test_the_same_prompts_fit_and_a_better_record_does_not(
    calibrated: tuple[Bundle, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, data = calibrated
    command = ["drift", str(bundle.path), "--data", str(data), "--count", "4", "--max-tokens", "40"]
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["fits"]
    assert report["drafters"]["suffix"]["share"] == pytest.approx(1.0)
    copy = tmp_path / "bundle"
    shutil.copytree(bundle.path, copy)
    better = AcceptanceTable(acceptance=((0.98,), (0.98,), (0.98,)), tried=(100, 98, 96))
    write_acceptance(Bundle.load(copy), Acceptance(measured_on="a dream", drafters={"suffix": better}))
    assert main(["drift", str(copy), *command[2:]]) == 1
    assert "DRIFTED  suffix" in capsys.readouterr().out


def test_a_runs_statistics_and_the_targets_fingerprint(
    calibrated: tuple[Bundle, Path], tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, _ = calibrated
    stored = read_acceptance(bundle)
    assert stored is not None
    then = chance_by_depth(stored.drafters["suffix"])
    run = {"drafter": "suffix", "proposed_by_depth": [100, 50], "accepted_by_depth": [10, 2]}
    statistics = tmp_path / "run.json"
    statistics.write_text(json.dumps([run, run]))
    report = measure_drift(bundle, QUIET, statistics=statistics)
    assert report.drifts[0].current == pytest.approx(1.1 + 0.1 * 0.04)
    assert report.drifts[0].recorded == pytest.approx(expected_tau(then[:2]))
    assert report.fits == (1.104 / expected_tau(then[:2]) >= 0.9)
    assert measure_drift(bundle, QUIET, target=str(tiny_checkpoint)).target_changed is False
    other = tmp_path / "other"
    shutil.copytree(tiny_checkpoint, other)
    part = sorted(other.glob("*.safetensors"))[0]
    tensors = load_file(part)
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, part)
    assert main(["drift", str(bundle.path), "--target", str(other)]) == 1
    assert "CHANGED  target" in capsys.readouterr().out


def test_what_cannot_be_compared_is_said(calibrated: tuple[Bundle, Path], tiny_bundle: Bundle, tmp_path: Path) -> None:
    bundle, data = calibrated
    with pytest.raises(UsageError, match="run specexport train calibrate"):
        measure_drift(tiny_bundle, QUIET, target="x")
    with pytest.raises(UsageError, match="name --data, --statistics or --target"):
        measure_drift(bundle, QUIET)
    (tmp_path / "s.json").write_text('{"drafter": "suffix"}')
    with pytest.raises(UsageError, match="give what run --json prints"):
        measure_drift(bundle, QUIET, statistics=tmp_path / "s.json")
    with pytest.raises(UsageError, match="no drafter 'eagle9'"):
        calibrate(bundle, CountOptions(data, drafters=("eagle9",)), QUIET)


@pytest.mark.slow
def test_a_changed_target_drifts_and_a_head_trained_again_fits(tiny: Tiny, tmp_path: Path) -> None:
    """The head of the old target drafts worse for the new one, drift says so, and training again mends it."""
    first = shared(tiny, "eagle3", tmp_path)
    first = replace(first, train=replace(first.train, visits=12000))
    train(first, QUIET)
    tuned = tmp_path / "tuned"
    shutil.copytree(first.target, tuned)
    generator = torch.Generator().manual_seed(1)
    for part in tuned.glob("*.safetensors"):
        tensors = load_file(part)
        moved = {n: t + 0.6 * t.std() * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}
        save_file({name: t if "norm" in name else moved[name] for name, t in tensors.items()}, part)
    again = replace(first, target=str(tuned), output=tmp_path / "again", work=tmp_path / "w2")
    train(replace(again, init=str(first.output)), QUIET)
    data = first.data[0]
    options = CountOptions(data, count=8, max_tokens=32, drafters=("eagle3",))
    taus = {}
    for name, target, heads in (
        ("old", first.target, first.output),
        ("stale", str(tuned), first.output),
        ("new", str(tuned), again.output),
    ):
        build_options = BuildOptions(source=target, output=tmp_path / name, window=128, heads=(str(heads),))
        bundle = build(build_options, QUIET).bundle
        acceptance, _ = calibrate(bundle, options, QUIET)
        taus[name] = expected_tau(chance_by_depth(acceptance.drafters["eagle3"]))
    stale, old = (Bundle.load(tmp_path / name) for name in ("stale", "old"))
    report = measure_drift(stale, QUIET, options=options, target=first.target, baseline=old)
    assert report.target_changed
    assert report.drifts[0].share < 1.0
    assert taus["stale"] < taus["old"]
    assert taus["new"] > taus["stale"]
