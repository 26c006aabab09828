"""Signals that end a process: real ones, sent to real processes in the middle of their work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specexport.exporter import cli
from specexport.exporter.pipeline import BuildOptions, build
from specexport.exporter.progress import Progress
from specexport.exporter.quantize.choice import PrecisionOptions
from specexport.runtime.bundle import ENGINES, Bundle

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")

#: Long enough for a machine that does other things too.
PATIENCE = 300.0
MAIN = "import sys; from specexport.exporter import cli; sys.exit(cli.main(sys.argv[1:]))"


def await_that(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.02)


@contextmanager
def started(*words: str) -> Iterator[subprocess.Popen[str]]:
    """The command line in a process of its own, its standard error readable at the end."""
    command = [sys.executable, "-c", MAIN, *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def hidden(folder: Path) -> list[Path]:
    return [path for path in folder.glob(".*") if path.is_dir()] if folder.is_dir() else []


def last_line(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    text = process.stderr.read()
    assert "Traceback" not in text
    return text.splitlines()[-1]


def children(process: subprocess.Popen[str]) -> list[int]:
    """Processes that a process started and that still run."""
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(number) for number in path.read_text().split()] if path.exists() else []


def runs(number: int) -> bool:
    """Whether a process runs; one that ended and was not waited for does not."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGTERM, 143, "ended by SIGTERM"),
        pytest.param(signal.SIGHUP, 129, "ended by SIGHUP", marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, 130, "interrupted", marks=pytest.mark.slow),
    ],
)
def test_a_build_that_is_ended_leaves_nothing(
    tiny_checkpoint: Path, tmp_path: Path, number: signal.Signals, code: int, said: str
) -> None:
    with started("build", str(tiny_checkpoint), "-o", str(tmp_path / "bundle")) as process:
        await_that(lambda: hidden(tmp_path), "the hidden directory of a bundle")
        process.send_signal(number)
        assert process.wait(PATIENCE) == code
        assert last_line(process) == f"specexport: error: {said}"
    assert not list(tmp_path.iterdir())


def test_a_build_that_is_killed_is_cleared_away_by_the_next(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with started("build", str(tiny_checkpoint), "-o", str(tmp_path / "bundle")) as process:
        await_that(lambda: hidden(tmp_path), "the hidden directory of a bundle")
        process.kill()
        process.wait(PATIENCE)
    assert len(hidden(tmp_path)) == 1, "nobody was there to remove it"
    assert cli.main(["build", str(tiny_checkpoint), "-o", str(tmp_path / "bundle"), "--no-check"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    Bundle.load(tmp_path / "bundle", check="full")


def test_handlers_are_put_back_and_ignored_signals_stay_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def look(*_: object, **__: object) -> None:
        seen.append([signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)])

    monkeypatch.setattr(cli.specexport, "main", look)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert cli.main(["doctor"]) == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
    ((terminate, hang_up),) = seen
    assert callable(terminate) and hang_up == signal.SIG_IGN


SIGNALLED_TWICE = """
import signal, sys
from specexport.exporter import cli

def work(*_, **__):
    try:
        signal.raise_signal(signal.SIGTERM)
        print("went on")
    finally:
        signal.raise_signal(signal.SIGTERM)
        print("cleaned up")

cli.specexport.main = work
sys.exit(cli.main(["doctor"]))
"""


def test_a_second_signal_does_not_stop_the_cleaning_up() -> None:
    done = subprocess.run([sys.executable, "-c", SIGNALLED_TWICE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (143, "cleaned up\n")
    assert done.stderr == "specexport: error: ended by SIGTERM\n"


@pytest.fixture(scope="module")
def half(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    output = tmp_path_factory.mktemp("half") / "bundle"
    precision = PrecisionOptions("fp16", activations="fp16")
    request = BuildOptions(str(tiny_checkpoint), output, window=96, precision=precision, check=False)
    return build(request, Progress(quiet=True)).bundle


@pytest.fixture(scope="module")
def devices(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One with as many profiles as take a while to compile, and one with few of that name."""
    folder = tmp_path_factory.mktemp("profiles")
    texts = {"many": f"[{', '.join(map(str, range(1, 41)))}]", "few": "[1, 4]"}
    for name, widths in texts.items():
        (folder / name).mkdir()
        (folder / name / "device.yaml").write_text(f"extends: rtx-40\nwidths: {widths}\nprefill_chunk: 16\n")
    return folder / "many" / "device.yaml", folder / "few" / "device.yaml"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks for the worker in /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_worker_outlives_a_compile(half: Bundle, devices: tuple[Path, Path], number: signal.Signals) -> None:
    pytest.importorskip("tensorrt_rtx", reason="pip install 'specexport[tensorrt-rtx]'")
    engines, (many, few) = half.path / ENGINES, devices
    with started("compile", str(half.path), "--profile", str(many)) as process:
        await_that(lambda: children(process) and list(engines.glob(".*/target.log")), "a compiler at work")
        (worker,) = children(process)
        process.send_signal(number)
        process.wait(PATIENCE)
        await_that(lambda: not runs(worker), "the end of the worker")
        if number == signal.SIGTERM:
            assert process.returncode == 143
            assert last_line(process) == "specexport: error: ended by SIGTERM"
            assert not list(engines.iterdir())
            return
    assert len(hidden(engines)) == 1, "nobody was there to remove it"
    Bundle.load(half.path)  # what was left is not in the way
    assert cli.main(["compile", str(half.path), "--profile", str(few)]) == 0
    assert [path.name for path in engines.iterdir()] == ["device"]
