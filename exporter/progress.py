"""Stage names and bars on standard error: bars on a terminal only, one line a finished stage elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_WIDTH = 30
#: Least time between two drawings of a bar, in seconds.
_INTERVAL = 0.1


class Stage:
    """One running stage. ``advance`` moves its bar; without a total there is none."""

    def __init__(self, progress: Progress, name: str, total: int | None) -> None:
        self.name = name
        self.total = total
        self.done = 0
        self._progress = progress
        self._drawn = 0.0

    def advance(self, amount: int = 1) -> None:
        """``amount`` more of ``total`` is done (bytes, tensors, whatever the total counts)."""
        self.done += amount
        now = time.monotonic()
        if now - self._drawn >= _INTERVAL:
            self._drawn = now
            self._progress.draw(self)


class Progress:
    """Where a long operation reports to. Also measures: :attr:`seconds` has the time of each finished stage.

    Args:
        quiet: print nothing. stream: where to print (default: standard error, looked up at every print).
    """

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._quiet = quiet
        self._stream = stream

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        """Run a named stage; its time is added to :attr:`seconds` when it ends without an error."""
        stage = Stage(self, name, total)
        self.draw(stage)
        start = time.perf_counter()
        try:
            yield stage
        finally:
            self._clear()
        spent = time.perf_counter() - start
        self.seconds[name] = self.seconds.get(name, 0.0) + spent
        self.log(f"{self._bold(name)}: {spent:.1f} s")

    def log(self, message: str) -> None:
        """A line of its own."""
        if not self._quiet:
            self._clear()
            print(message, file=self._out, flush=True)

    def draw(self, stage: Stage) -> None:
        """Show the state of a stage on a terminal."""
        if self._quiet or not self._out.isatty():
            return
        bar = ""
        if stage.total:
            share = min(stage.done / stage.total, 1.0)
            bar = f" [{'#' * round(share * _WIDTH):<{_WIDTH}}] {share:4.0%}"
        print(f"\r\x1b[K{self._bold(stage.name)}{bar} ...", end="", file=self._out, flush=True)

    def _clear(self) -> None:
        if not self._quiet and self._out.isatty():
            print("\r\x1b[K", end="", file=self._out, flush=True)

    def _bold(self, text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if self._out.isatty() and not os.environ.get("NO_COLOR") else text

    @property
    def _out(self) -> TextIO:
        return self._stream or sys.stderr
