"""The script that compares predicted speedups with measured ones: what needs no measurement."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from scripts.check_plans import Row, predict, read
from specexport.profiles.cost import Roofline
from specexport.profiles.schema import load_profile
from specexport.runtime.acceptance_table import AcceptanceTable
from tests.profiles.sizes import smollm2

TABLE = AcceptanceTable(acceptance=((0.6, 0.1), (0.5, 0.1)), tried=(100, 60), proposed=(0.8, 0.6, 0.5, 0.2))


def row() -> Row:
    tau = predict(TABLE, 4, lambda _: 1.0, 0.0, copies=False).tau
    return Row(
        bundle="a",
        fingerprint="sha256:0",
        drafter="recycling",
        nodes=4,
        measured=1.25,
        spread=0.0,
        tuned=1.3,
        roofline=0.0,
        tau=1.5,
        tuned_tau=tau,
        step_s=0.01,
        tuned_step_s=0.01,
        plain_s=0.008,
        tuned_plain_s=0.008,
        roofline_step_s=0.0,
        roofline_plain_s=0.0,
        noise=0.01,
        used=200,
        proposed=TABLE.proposed,
    )


def test_the_roofline_of_a_row_is_the_planners_for_its_acceptance() -> None:
    roofline = Roofline(load_profile("cpu-x86"), smollm2("int8"))
    found = row().by(roofline)
    expected = predict(TABLE, 4, lambda width: roofline.step_s(width, 200), 0.0, copies=False)
    assert found.roofline == pytest.approx(expected.speedup)
    assert (found.roofline_step_s, found.roofline_plain_s) == pytest.approx((expected.step_s, expected.plain_s))
    assert found.error("roofline") == pytest.approx(expected.speedup / 1.25 - 1)
    # On our own kernels further nodes are cheaper.
    assert row().by(replace(roofline, size=replace(roofline.size, kernels=True))).roofline > found.roofline


def test_rows_are_read_as_they_were_kept(tmp_path: Path) -> None:
    file = tmp_path / "plans.jsonl"
    assert read(file) == read(None) == []
    file.write_text(json.dumps(asdict(row())) + "\n")
    assert read(file) == [row()]
