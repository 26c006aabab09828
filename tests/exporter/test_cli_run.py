"""The verbs that decode, and how they fail."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specexport.engines.ort import OrtEngine
from specexport.exporter import cli, cli_run, demo
from specexport.runtime.bundle import Bundle
from specexport.runtime.rules import RULES
from specexport.runtime.session import Result
from specexport.runtime.statistics import RunStatistics


def test_options_name_sampling_parameters() -> None:
    """A field without an option would be a parameter that the command line cannot set."""
    from dataclasses import fields

    from specexport.runtime.sampling import SamplingParams

    assert {field.name for field in fields(SamplingParams)} == {name for name, *_ in cli_run.SAMPLING} | {"logit_bias"}


def test_lossy_acceptance_says_so(tiny_bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["run", str(tiny_bundle.path), "hi", "--temperature", "1", "--max-tokens", "8"]
    for name, lossy in (("match", False), ("typical", True)):
        assert cli.main([*words, "--acceptance", name, "--json"]) == 0
        shown = capsys.readouterr()
        record = json.loads(shown.out)
        assert (record["acceptance"], record["lossy"], shown.err) == (name, lossy, "")
        assert cli.main([*words, "--acceptance", name]) == 0
        note = "note: typical acceptance is lossy: this is not the model's own output\n"
        assert capsys.readouterr().err == (note if lossy else "")


def test_an_engine_that_rounds_by_width_says_so(
    tiny_bundle: Bundle, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["run", str(tiny_bundle.path), "hi", "--max-tokens", "4"]
    assert cli.main(words) == 0 and capsys.readouterr().err == ""
    monkeypatch.setattr(OrtEngine, "width_exact", False, raising=False)
    assert cli.main([*words, "--no-spec"]) == 0 and capsys.readouterr().err == ""
    assert cli.main(words) == 0 and "note: this engine rounds by the width" in capsys.readouterr().err


def test_acceptance_choices_are_the_rules() -> None:
    option = next(each for each in cli_run.run.params if each.name == "acceptance")
    assert list(option.type.choices) == list(RULES) and option.default == "match"  # type: ignore[attr-defined]


@pytest.mark.e2e
def test_run(smollm2_bundle: Bundle, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(smollm2_bundle.path)
    words = ["run", path, "--chat", "--max-tokens", "24", "--temperature", "0.8", "--seed", "7"]
    assert cli.main([*words, "Count from one to ten.", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert {"text", "token_ids", "tau", "acceptance_by_depth", "time_share", "bundle"} <= record.keys()
    assert set(record["time_share"]) == {"draft", "verify", "host"}
    assert record["bundle"] == path
    assert {"eagle3", "medusa"} <= {info.name for info in smollm2_bundle.manifest.drafters}
    assert record["drafter"] == "auto"
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(b"Count from one to ten.")))
    assert cli.main([*words, "--no-spec", "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert (plain["drafter"], plain["tau"]) == ("none", 1.0)
    assert plain["token_ids"] == record["token_ids"]
    assert cli.main([*words, "Count from one to ten."]) == 0
    assert capsys.readouterr() == (record["text"] + "\n", "")


@pytest.mark.e2e
def test_demo(smollm2_bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["demo", "--max-tokens", "32", "--prompt", "Repeat word for word: the cat sat on the mat."]
    assert cli.main([*words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["tokens_identical"] is True
    assert record["plain_tokens_per_second"] > 0
    assert record["speculative_tokens_per_second"] > 0
    assert record["tau"] > 1
    assert {"text", "token_ids", "acceptance_by_depth", "time_share"} <= record.keys()
    assert record["bundle"] == str(smollm2_bundle.path)
    assert cli.main(words) == 0
    shown = capsys.readouterr()
    assert "tokens       identical" in shown.out
    assert "answer, plain: " in shown.err


def test_demo_fails_when_tokens_differ(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def result(tokens: list[int]) -> Result:
        return Result("text", tokens, "length", None, None, RunStatistics(tokens=len(tokens)))

    bundle: Any = SimpleNamespace(path=Path("/bundle"))
    different = demo.DemoResult(bundle, result([1, 2]), result([1, 3]))
    monkeypatch.setattr(demo, "demo_bundle", lambda *_: bundle)
    monkeypatch.setattr(demo, "compare", lambda *_: different)
    assert cli.main(["demo"]) == 1
    assert "tokens       DIFFERENT" in capsys.readouterr().out
    assert cli.main(["demo", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["tokens_identical"] is False


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([""], 2, "the prompt is empty"),
        (["x" * 200], 2, "200 tokens and the context 128"),
        (["\udcff"], 2, "the text cannot be tokenized: it is not valid Unicode"),
        (["hi", "--threads", "-3"], 2, "-3 is not in the range"),
        (["hi", "--threads", "100000"], 2, "100000 is not in the range"),
        (["hi", "--max-tokens", "0"], 2, "max_tokens must be 1 or more, got 0"),
        (["hi", "--temperature", "nan"], 2, "temperature must be a finite number, got nan"),
        (["hi", "--top-p", "2"], 2, "top_p must be above 0 and at most 1 (off), got 2.0"),
        (["hi", "--logit-bias", "5=1e300"], 2, "logit_bias of token 5 must be -1e6 to 1e6"),
        (["hi", "--logit-bias", "300=1"], 2, "token id 300 is outside the vocabulary"),
        (["hi", "--stop", ""], 2, "a stop string must have 1 to 1024 characters"),
        (["hi", "--drafter", "oracle"], 2, "unknown drafter 'oracle'"),
        (["hi", "--acceptance", "lucky"], 2, "'lucky' is not one of 'match', 'rejection', 'typical'"),
        (["hi", "--acceptance", "rejection"], 2, "needs drafts drawn at random, but drafter 'suffix' does not draw"),
        (["hi", "--acceptance", "typical", "--no-spec"], 2, "judges drafts, but drafter 'none' proposes none"),
        (["hi", "--engine", "abacus"], 2, "unknown engine 'abacus'"),
        (["hi", *(word for token in range(300) for word in ("--logit-bias", f"{token}=-inf"))], 1, "bans all"),
    ],
)
def test_run_refuses_in_one_line(
    words: list[str], code: int, message: str, tiny_bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard output stays empty, so that whoever parses it is not misled."""
    assert cli.main(["run", str(tiny_bundle.path), "--json", *words]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("specexport: error: ") and shown.err.count("\n") == 1
    assert message in shown.err


@pytest.mark.parametrize("data", [b"\xff\xfe", b"the \xc3"])
def test_standard_input_that_is_not_text(
    data: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(data)))
    assert cli.main(["run", "bundle"]) == 2
    assert "is not UTF-8 (byte " in capsys.readouterr().err


def start(*words: str, **streams: Any) -> subprocess.Popen[bytes]:
    """``specexport run`` of the source tree as a process of its own, on a terminal that knows Latin-1."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / ".dev"), "PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "specexport.exporter.cli", "run", *words]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, **streams)


def test_output_that_the_terminal_has_no_letters_for_or_nobody_reads(tiny_bundle: Bundle) -> None:
    words = [str(tiny_bundle.path), "hi", "--temperature", "5", "--seed", "3", "--threads", "1"]
    done = start(*words, stdout=subprocess.PIPE)
    text, message = done.communicate()
    assert (done.returncode, message) == (0, b"") and b"?" in text
    reader, writer = os.pipe()
    os.close(reader)
    done = start(*words, stdout=writer)
    os.close(writer)
    assert (done.communicate()[1], done.returncode) == (b"", 1)
    closed = start(str(tiny_bundle.path), preexec_fn=lambda: os.close(0))
    assert b"the prompt is empty" in closed.communicate()[1]


def test_a_graph_that_is_no_target(tiny_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = Path(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    graph = copy / "target.cpu.onnx"
    graph.write_bytes(graph.read_bytes().replace(b"logits", b"logitz"))
    assert cli.main(["run", str(copy), "hi"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "target.cpu.onnx is not a target graph: logits is missing or unknown" in shown.err
