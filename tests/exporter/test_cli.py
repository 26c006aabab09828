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

from specexport.exporter import cli, cli_build, cli_inspect, demo
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
    context = click.Context(cli.specexport)
    for verb in cli.VERBS:
        command = cli.specexport.get_command(context, verb)
        parts = list(command.commands) if isinstance(command, click.Group) else [None]
        for part in parts:
            assert cli.main([verb, *([part] if part else []), "--help"]) == 0
            assert "--json" in capsys.readouterr().out, (verb, part)


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
        (["build", "x", "-o", "y", "--precision", "int3"], "'int3' is not one of"),
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
    from specexport.exporter.quantize.choice import PrecisionOptions

    seen = []

    def build(options: Any, progress: Progress) -> Any:
        seen.append(options)
        with progress.stage("export"):
            pass
        return SimpleNamespace(bundle=SimpleNamespace(path=tmp_path), stages=progress.seconds, peak_rss_bytes=5 << 20)

    monkeypatch.setattr(pipeline, "build", build)
    words = "build model -o out --revision r --offline --tokenizer t --precision int4 --lm-head fp16"
    words += " --drafter-precision int8 --block-size 64 --no-exact --window 64 --prefill-chunk 8"
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
            precision=PrecisionOptions("int4", lm_head="fp16", block_size=64, exact=False),
            drafter_precision="int8",
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


def test_choices_come_from_the_registries() -> None:
    from specexport.runtime.drafters import DRAFTERS
    from specexport.runtime.manifest import PRECISIONS

    choices = {option.name: option.type for option in cli_build.build.params}
    assert tuple(choices["drafters"].choices) == ("none", *DRAFTERS)  # type: ignore[attr-defined]
    assert tuple(choices["precision"].choices) == PRECISIONS  # type: ignore[attr-defined]


def test_an_interrupted_build_leaves_nothing(tiny_checkpoint: Path, repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "specexport.exporter.cli", "build", str(tiny_checkpoint), "-o"]
    env = os.environ | {"PYTHONPATH": str(repository / ".dev")}
    build = subprocess.Popen([*command, str(tmp_path / "bundle")], env=env, stderr=subprocess.PIPE)
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
