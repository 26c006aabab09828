"""``scripts/bench_peers.py`` with our own engine as both sides, and with peers that are not there or fall over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import bench_peers
from specexport.runtime.bundle import Bundle

KIND = "onnxruntime-cpu"


@pytest.fixture
def measure(tiny_bundle: Bundle, tmp_path: Path) -> Any:
    """Runs the script and gives its record."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": text, "task": task} for text, task in (("a b a b a b", "one"), ("c d c", "two"))]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def run(what: str, *options: str) -> dict[str, Any]:
        output, path = tmp_path / "record.json", str(tiny_bundle.path)
        arguments = ["--bundle", path, "--prompts", str(prompts), "--threads", "1", "--json", str(output)]
        bench_peers.main([what, *arguments, "--run", "ours", KIND, path, *options])
        found: dict[str, Any] = json.loads(output.read_text())
        return found

    return run


def rows(table: str) -> dict[str, list[str]]:
    """Lines of the table by what they begin with."""
    return {words[0]: words[1:] for line in table.splitlines() if (words := line.split())}


def test_drafters_of_ours_beside_the_lookup(measure: Any, capsys: pytest.CaptureFixture[str]) -> None:
    record = measure("decode", "--new", "12", "--longest", "64", "--drafter", "ours", "auto")
    runs = {(run["drafter"], run["prompt"]): run for run in record["runs"]}
    assert runs.keys() == {(drafter, prompt) for drafter in ("none", "lookup", "auto") for prompt in (0, 1)}
    assert all(runs[drafter, prompt]["tokens"] == runs["none", prompt]["tokens"] for drafter, prompt in runs)
    assert runs["auto", 0]["decisions"] and not runs["lookup", 0]["decisions"]
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in shown[-2:]] == ["lookup", "auto"]
    assert all(line.endswith(" 2/2") for line in shown[-2:])


def test_steps_and_an_environment_for_one_run(
    measure: Any, tiny_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = str(tmp_path / "no_kernels.so")
    broken = ["--run", "broken", KIND, str(tiny_bundle.path), "--env", "broken", f"SPECEXPORT_KERNELS={missing}"]
    absent = ["--run", "genai", "genai", str(tmp_path)]
    options = ["--past", "4", "--new", "4", "--longest", "64", "--rounds", "1"]
    record = measure("steps", *options, *broken, *absent)
    assert {width: len(times) for width, times in record["samples"]["ours"].items()} == dict.fromkeys(
        map(str, bench_peers.WIDTHS), 3
    )
    ours, broken_one, genai = record["engines"]
    assert ours["problem"] is None and ours["versions"]["onnxruntime"]
    assert broken_one["variables"] and missing in broken_one["problem"]
    assert genai["problem"] == "skipped: no interpreter, give --python genai=PATH"
    table = rows(capsys.readouterr().out)
    assert len(table["ours"]) >= len(bench_peers.WIDTHS) and table["broken"][0] == "failed:"


def test_start_measures_new_processes(measure: Any, capsys: pytest.CaptureFixture[str]) -> None:
    [*starts] = measure("start", "--new", "4", "--longest", "64", "--past", "32", "--rounds", "2")["starts"]["ours"]
    assert len(starts) == 2
    for each in starts:
        assert each["seconds"] > 0 and each["peak"] >= each["anonymous"] + each["files"] > each["files"] > 0
    assert len(rows(capsys.readouterr().out)["ours"]) == 4


def test_a_process_that_ends_says_why(tmp_path: Path) -> None:
    worker = bench_peers.Worker("peer", "genai", str(tmp_path), "/bin/sh", 1, {})
    worker._command = ["/bin/sh", "-c", "echo no such instruction >&2; kill -ILL $$"]
    worker.start()
    worker.close()
    assert worker.problem == "failed: the process ended with signal 4: no such instruction"


def test_labels_must_be_of_runs(measure: Any) -> None:
    with pytest.raises(SystemExit, match="--env or --drafter other: expected the label of a --run, ours"):
        measure("steps", "--drafter", "other", "auto")


def test_no_turn_begins_after_its_time(measure: Any, capsys: pytest.CaptureFixture[str]) -> None:
    record = measure("decode", "--new", "4", "--longest", "64", "--seconds", "1e-9")
    assert record["runs"] == []
    assert "stopped after --seconds 1e-09" in capsys.readouterr().out
