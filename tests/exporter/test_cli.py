from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from specexport.exporter import cli, cli_build, cli_inspect, cli_run, demo
from specexport.exporter.progress import Progress
from specexport.runtime.bundle import Bundle
from specexport.runtime.bundle_writer import BundleWriter
from specexport.runtime.errors import BundleError, SpecExportError, UsageError
from specexport.runtime.manifest import Manifest
from specexport.runtime.session import Result
from specexport.runtime.statistics import RunStatistics

GRAPH = b"\x3a\x00"  # a model with an empty graph


@pytest.fixture
def bundle(tmp_path: Path, manifest_dict: dict[str, Any]) -> Path:
    """A bundle that can be looked at, but not run."""
    with BundleWriter(tmp_path / "bundle") as writer:
        writer.add_file("target.onnx", GRAPH)
        writer.add_file("tokenizer.json", "{}")
        return writer.finish(Manifest.from_dict(manifest_dict)).path


def test_every_verb_has_help_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in cli.VERBS:
        assert cli.main([verb, "--help"]) == 0
        assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (SpecExportError("first\nsecond"), 1, "first second"),
        (BundleError("broken"), 1, "broken"),
        (UsageError("impossible"), 2, "impossible"),
        (click.UsageError("no such thing"), 2, "no such thing"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device", "/x"), 1, "No space left on device: /x"),
    ],
)
def test_errors_become_one_line_and_an_exit_code(
    error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**_: Any) -> None:
        raise error

    monkeypatch.setattr(cli_inspect.doctor, "callback", fail)
    assert cli.main(["doctor"]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.strip() == f"specexport: error: {message}"


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise BundleError("broken")

    monkeypatch.setattr(cli_inspect.doctor, "callback", fail)
    with pytest.raises(BundleError):
        cli.main(["--debug", "doctor"])
    assert cli.main(["doctor"]) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Usage: specexport"),
        (["fly"], "No such command 'fly'"),
        (["build", "x"], "Missing option '-o'"),
        (["build", "x", "-o", "y", "--dtype", "int3"], "'int3' is not one of"),
        (["build", "x", "-o", "y", "--drafter", "oracle"], "'oracle' is not one of"),
        (["build", "x", "-o", "y", "--features", "1,x"], "'1,x' is not a list of layers"),
        (["run"], "Missing argument 'BUNDLE'"),
        (["run", "x", "y", "--logit-bias", "7"], "'7' is not a token id and its bias"),
        (["run", "x", "y", "--no-spec", "--drafter", "suffix"], "exclude each other"),
        (["verify", "x", "--checkpoint", "/nothing"], "does not exist"),
    ],
)
def test_usage_errors(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_errors_of_a_process(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = run_python("-m", "specexport.exporter.cli", "inspect", "/nothing/here")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("specexport: error: no bundle at '/nothing/here'")
    assert done.stderr.count("\n") == 1


def test_inspect(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(bundle), "--full", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["bundle"] == str(bundle)
    assert facts["manifest"] == json.loads((bundle / "manifest.json").read_text())
    assert facts["derived"] == {
        "cache_bytes": 2 * 2 * 1 * 64 * 8 * 4,
        "total_bytes": len(GRAPH) + 2,
        "chat_template": False,
        "verified": None,
        "command": "specexport build model -o bundle",
        "devices": {"profiles": [], "engines": []},
    }
    assert cli.main(["inspect", str(bundle)]) == 0
    text = capsys.readouterr().out
    assert "llama, 2 layers, fp32" in text
    assert "no report" in text


@pytest.mark.parametrize(("report", "verdict"), [('{"passed": true}', True), ('{"passed": false}', False), ("[", None)])
def test_inspect_reads_the_report(
    report: str, verdict: bool | None, bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bundle / "report.json").write_text(report)
    assert cli.main(["inspect", str(bundle), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["derived"]["verified"] is verdict


def test_inspect_prints_no_control_characters(
    tmp_path: Path, manifest_dict: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    manifest_dict["command"] = ["specexport", "\x1b[2J"]
    with BundleWriter(tmp_path / "bundle") as writer:
        writer.add_file("target.onnx", GRAPH)
        writer.add_file("tokenizer.json", "{}")
        writer.finish(Manifest.from_dict(manifest_dict))
    assert cli.main(["inspect", str(tmp_path / "bundle")]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_build_passes_its_options_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from specexport.exporter import pipeline

    seen = []

    def build(options: Any, progress: Progress) -> Any:
        seen.append(options)
        with progress.stage("export"):
            pass
        return SimpleNamespace(bundle=SimpleNamespace(path=tmp_path), stages=progress.seconds, peak_rss_bytes=5 << 20)

    monkeypatch.setattr(pipeline, "build", build)
    words = "build model -o out --revision r --offline --tokenizer t --dtype fp16 --window 64 --prefill-chunk 8"
    words += " --drafter suffix --drafter ngram --features 1,final --overwrite --json"
    assert cli.main(words.split()) == 0
    shown = capsys.readouterr()
    record = json.loads(shown.out)
    assert record == {"bundle": str(tmp_path), "stages": record["stages"], "peak_rss_bytes": 5 << 20}
    assert list(record["stages"]) == ["export"]
    assert "export: " in shown.err
    assert seen == [
        pipeline.BuildOptions(
            source="model",
            output=Path("out"),
            revision="r",
            offline=True,
            tokenizer=Path("t"),
            dtype="fp16",
            window=64,
            prefill_chunk=8,
            drafters=("suffix", "ngram"),
            features=(1, "final"),
            overwrite=True,
        )
    ]


def test_size_is_for_people() -> None:
    assert [cli_inspect.size(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40, None)] == [
        *("0 B", "1023 B", "1.5 KiB", "5.0 MiB", "3072.0 GiB", "unknown")
    ]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_draws_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    pipe, terminal = io.StringIO(), _Terminal()
    for stream in (pipe, terminal):
        progress = Progress(stream=stream)
        with progress.stage("write", total=4) as stage:
            stage.advance(2)
        assert list(progress.seconds) == ["write"]
    assert pipe.getvalue().startswith("write: ")
    assert pipe.getvalue().count("\n") == 1
    assert f"[{'#' * 15}{' ' * 15}]  50%" in terminal.getvalue()
    assert "\x1b[1m" in terminal.getvalue()


def test_progress_obeys_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = _Terminal()
    with Progress(stream=terminal).stage("write"):
        pass
    assert "\x1b[1m" not in terminal.getvalue()


def test_a_failed_stage_has_no_time() -> None:
    stream = io.StringIO()
    progress = Progress(stream=stream)
    with pytest.raises(ValueError, match="x"), progress.stage("write"):
        raise ValueError("x")
    assert progress.seconds == {}
    assert stream.getvalue() == ""


def test_quiet_progress_still_measures(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(quiet=True)
    with progress.stage("write", total=1) as stage:
        stage.advance()
    progress.log("a word")
    assert list(progress.seconds) == ["write"]
    assert capsys.readouterr() == ("", "")


def test_options_name_sampling_parameters() -> None:
    """A field without an option would be a parameter that the command line cannot set."""
    from dataclasses import fields

    from specexport.runtime.sampling import SamplingParams

    assert {field.name for field in fields(SamplingParams)} == {name for name, *_ in cli_run.SAMPLING} | {"logit_bias"}


def test_choices_come_from_the_registries() -> None:
    from specexport.runtime.drafters import DRAFTERS
    from specexport.runtime.manifest import DTYPES

    choices = {option.name: option.type for option in cli_build.build.params}
    assert tuple(choices["drafters"].choices) == ("none", *DRAFTERS)  # type: ignore[attr-defined]
    assert tuple(choices["dtype"].choices) == DTYPES  # type: ignore[attr-defined]


@pytest.mark.e2e
def test_run(smollm2_bundle: Bundle, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(smollm2_bundle.path)
    words = ["run", path, "--chat", "--max-tokens", "24", "--temperature", "0.8", "--seed", "7"]
    assert cli.main([*words, "Count from one to ten.", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert {"text", "token_ids", "tau", "acceptance_by_depth", "time_share", "bundle"} <= record.keys()
    assert set(record["time_share"]) == {"draft", "verify", "host"}
    assert record["bundle"] == path
    assert record["drafter"] == "suffix"
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
    """The command line of the source tree as a process of its own."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / ".dev"), "PYTHONIOENCODING": "latin-1"}
    return subprocess.Popen([sys.executable, "-m", "specexport.exporter.cli", *words], env=env, **streams)


def test_output_that_the_terminal_has_no_letters_for_or_nobody_reads(tiny_bundle: Bundle) -> None:
    words = ["run", str(tiny_bundle.path), "hi", "--temperature", "5", "--seed", "3", "--threads", "1"]
    done = start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    text, message = done.communicate()
    assert (done.returncode, message) == (0, b"") and b"?" in text
    reader, writer = os.pipe()
    os.close(reader)
    done = start(*words, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (done.communicate()[1], done.returncode) == (b"", 1)
    closed = start("run", str(tiny_bundle.path), stdin=None, stderr=subprocess.PIPE, preexec_fn=lambda: os.close(0))
    assert b"the prompt is empty" in closed.communicate()[1]


def test_an_interrupted_build_leaves_nothing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    build = start("build", str(tiny_checkpoint), "-o", str(tmp_path / "bundle"), stderr=subprocess.PIPE)
    assert build.stderr is not None
    assert build.stderr.readline().startswith(b"read checkpoint: ")  # the graph is being traced, for seconds
    assert list(tmp_path.iterdir())
    build.send_signal(signal.SIGINT)
    assert build.communicate()[1].split() == b"specexport: error: interrupted".split()
    assert build.returncode == 130
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_without_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["build", "nobody/nothing", "--offline", "-o", str(tmp_path / "bundle")]) == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith("specexport: error: nobody/nothing: not in the local hub cache")
    assert not list(tmp_path.iterdir())


def documented(readme: str, verb: str) -> set[str]:
    """Top-level keys that the README's table gives for a verb."""
    row = next(line for line in readme.splitlines() if line.startswith(f"| `{verb}` |"))
    names = re.sub(r"\([^)]*\)|\{[^}]*\}", "", row.split("|")[2])
    return set(re.findall(r"`(\w+)`", names))


def test_readme_names_every_key(
    repository: Path, tiny_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from specexport.exporter.verify import Report

    readme = (repository / "README.md").read_text()
    words = {
        "run": [str(tiny_bundle.path), "hi", "--logprobs", "2", "--threads", "1"],
        "inspect": [str(tiny_bundle.path)],
        "doctor": [],
    }
    for verb, rest in words.items():
        assert cli.main([verb, *rest, "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert record.keys() == documented(readme, verb), verb
    report = Report(tmp_path, "onnxruntime-cpu", ()).to_dict()
    assert report.keys() == documented(readme, "verify") - {"json"}
    result = Result("", [], "length", None, None, RunStatistics())
    extra = demo.DemoResult(tiny_bundle, result, result).to_dict().keys() - documented(readme, "run")
    assert extra == documented(readme, "demo") - {"run"}


def test_readme_example_of_the_python_interface(
    repository: Path, tiny_bundle: Bundle, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (repository / "README.md").read_text().split("```python\n")[1].split("```")[0]
    assert '"smollm2"' in code
    exec(compile(code.replace('"smollm2"', repr(str(tiny_bundle.path))), "README.md", "exec"), {})
    assert capsys.readouterr().out
