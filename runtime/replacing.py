"""Files and directories that appear whole or not at all, whatever ends the process that makes them.

What is made lies hidden beside its place, as ``.NAME.tmp-1a2b3c4d``, and is moved there at the end. An exception
removes it. A directory that a killed process leaves behind is cleared away by whoever makes the same one next: its
maker holds a lock on it, which the system drops with the process.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

try:
    import fcntl
except ImportError:  # Windows: no locks, so nothing of other processes is touched
    fcntl = None  # type: ignore[assignment]


class NewDirectory:
    """A directory to fill that takes the place of another when it is whole.

        with NewDirectory(Path("out")) as new:
            (new.path / "file").write_text("content")
            new.move()

    Leaving without :meth:`move` removes what was written. Call :func:`clear` before.

    Attributes:
        path: the hidden directory, made on entering; the parent of ``destination`` must be there.
    """

    def __init__(self, destination: Path) -> None:
        self.destination = destination
        self.path = _hidden(destination, "tmp")
        self._lock: int | None = None

    def __enter__(self) -> Self:
        try:
            self._lock = _claim(self.path, Path.mkdir)
        except BaseException:  # a signal just after it was made: nobody leaves what was not entered
            shutil.rmtree(self.path, ignore_errors=True)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        _unlock(self._lock)

    def move(self) -> None:
        """Put it in its place; what lies there comes back if that fails, and is removed otherwise."""
        old = _hidden(self.destination, "old")
        lock = _lock(self.destination) if self.destination.exists() else None
        try:
            if self.destination.exists():
                self.destination.rename(old)
            self.path.rename(self.destination)
        finally:
            if old.exists() and not self.destination.exists():
                old.rename(self.destination)
            shutil.rmtree(old, ignore_errors=True)
            _unlock(lock)


def clear(destination: Path) -> None:
    """Remove what killed processes left of making ``destination``; what they had only moved aside is put back."""
    ours = re.compile(rf"\.{re.escape(destination.name)}\.(tmp|old)-[0-9a-f]{{8}}")
    with contextlib.suppress(OSError):  # what cannot be cleared away does no harm
        for path in sorted(destination.parent.iterdir()):
            if (match := ours.fullmatch(path.name)) is None or path.is_symlink() or (lock := _lock(path)) is None:
                continue
            if match[1] == "old" and not destination.exists():
                path.rename(destination)
            elif path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
            _unlock(lock)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A file to write that takes the place of ``path`` if all goes well, and disappears otherwise."""
    clear(path)
    temporary, lock = _hidden(path, "tmp"), None
    try:
        lock = _claim(temporary, Path.touch)
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
        _unlock(lock)


def replace_text(path: Path, content: str) -> None:
    """Write a text file whole or not at all."""
    with new_file(path) as temporary:
        temporary.write_text(content, encoding="utf-8")


def _hidden(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}-{secrets.token_hex(4)}")


def _claim(path: Path, make: Callable[[Path], object]) -> int | None:
    """Make a hidden file or directory, and lock it."""
    while True:
        make(path)
        try:
            lock = _lock(path, wait=True)
        except FileNotFoundError:
            continue
        if path.exists():  # nobody cleared it away before it was locked
            return lock
        _unlock(lock)


def _lock(path: Path, *, wait: bool = False) -> int | None:
    """What holds the lock of a path until it is given to :func:`_unlock`; None: it cannot be had."""
    if fcntl is None:
        return None
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # another process has it, or the file system has no locks
        os.close(handle)
        return None
    return handle


def _unlock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)
