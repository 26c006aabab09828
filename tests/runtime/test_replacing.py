"""Directories and files that appear whole or not at all, and what killed processes leave of them."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from specexport.runtime import replacing
from specexport.runtime.replacing import NewDirectory, clear, new_file, replace_text

pytest.importorskip("fcntl", reason="without locks nothing of another process is cleared away")

#: Makes a directory half and waits.
MAKER = """
import sys
from pathlib import Path
from specexport.runtime.replacing import NewDirectory
with NewDirectory(Path(sys.argv[1])) as new:
    (new.path / "half").write_text("x")
    print("made", flush=True)
    sys.stdin.read()
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write(destination: Path, text: str) -> None:
    with NewDirectory(destination) as new:
        (new.path / "file").write_text(text)
        new.move()


@contextmanager
def maker(destination: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that is at it."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", MAKER, str(destination)], stdin=pipe, stdout=pipe, text=True) as other:
        try:
            assert other.stdout is not None and other.stdout.readline() == "made\n"
            yield other
        finally:
            other.kill()


def test_a_directory_takes_the_place_of_another(tmp_path: Path) -> None:
    write(tmp_path / "out", "first")
    write(tmp_path / "out", "second")
    assert (tmp_path / "out" / "file").read_text() == "second" and names(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, SystemExit])
def test_one_that_is_not_whole_never_appears(error: type[BaseException], tmp_path: Path) -> None:
    write(tmp_path / "out", "first")
    with pytest.raises(error), NewDirectory(tmp_path / "out") as new:
        (new.path / "file").write_text("half")
        raise error
    assert (tmp_path / "out" / "file").read_text() == "first" and names(tmp_path) == ["out"]


def test_what_a_killed_process_left_is_cleared_away(tmp_path: Path) -> None:
    with maker(tmp_path / "out") as other:
        other.send_signal(signal.SIGKILL)
        other.wait()
    (left,) = names(tmp_path)
    assert left.startswith(".out.tmp-")
    clear(tmp_path / "out")
    assert names(tmp_path) == []


def test_what_another_process_is_making_is_left(tmp_path: Path) -> None:
    with maker(tmp_path / "out"):
        (busy,) = names(tmp_path)
        clear(tmp_path / "out")
        write(tmp_path / "out", "ours")
        assert names(tmp_path) == [busy, "out"] and (tmp_path / busy / "half").is_file()


def test_what_was_only_moved_aside_is_put_back(tmp_path: Path) -> None:
    """Killed between two renames: the old directory has no name, the new one is complete but not trusted."""
    for name in (".out.old-0a1b2c3d", ".out.tmp-0a1b2c3d"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    clear(tmp_path / "out")
    assert names(tmp_path) == ["out"] and (tmp_path / "out" / "file").read_text() == ".out.old-0a1b2c3d"
    (tmp_path / ".out.old-11111111").mkdir()
    clear(tmp_path / "out")
    assert names(tmp_path) == ["out"]


def test_nothing_else_is_cleared_away(tmp_path: Path) -> None:
    kept = [".out.tmp-0a1b2c3", ".out.tmp-0a1b2c3d.txt", ".outer.tmp-0a1b2c3d", ".out.new-0a1b2c3d", "out.tmp-0a1b2c3d"]
    for name in kept:
        (tmp_path / name).mkdir()
    (tmp_path / ".out.tmp-33333333").symlink_to(tmp_path / kept[0])
    before = names(tmp_path)
    clear(tmp_path / "out")
    assert names(tmp_path) == before


def test_files(tmp_path: Path) -> None:
    replace_text(tmp_path / "a.json", "first")
    with pytest.raises(KeyboardInterrupt), new_file(tmp_path / "a.json") as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert names(tmp_path) == ["a.json"] and (tmp_path / "a.json").read_text() == "first"
    (tmp_path / ".a.json.tmp-0a1b2c3d").write_text("of a killed process")
    with new_file(tmp_path / "a.json") as temporary:
        temporary.write_text("second")
        assert names(tmp_path) == [temporary.name, "a.json"]
        with new_file(tmp_path / "a.json") as other:
            other.write_text("by somebody else meanwhile")
            assert temporary.exists()
    assert names(tmp_path) == ["a.json"] and (tmp_path / "a.json").read_text() == "second"


def test_a_signal_just_after_one_was_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: who is ended between making it and entering it never leaves it, so it stayed."""

    def ended(*_: object, **__: object) -> None:
        assert len(names(tmp_path)) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(replacing, "_lock", ended)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", "a")
    assert names(tmp_path) == []
    monkeypatch.setattr(replacing, "clear", lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        replace_text(tmp_path / "file", "a")
    assert names(tmp_path) == []
