"""The one reader of files with prompts and texts: lines, or JSON lines, gzipped or not."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from specexport.runtime.errors import UsageError

#: Most characters of a line, and of a file.
LINE_LIMIT, LIMIT = 1 << 22, 1 << 30


def has_records(path: Path) -> bool:
    """Whether the name says JSON lines: ``.jsonl`` or ``.json``, maybe before ``.gz``."""
    return (Path(path.stem) if path.suffix == ".gz" else path).suffix in (".jsonl", ".json")


@contextmanager
def open_data(path: Path) -> Iterator[TextIO]:
    """A file as UTF-8 text.

    Raises:
        UsageError: it, or what it is packed in, cannot be read, also while it is.
    """
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as stream:
            yield stream
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise UsageError(f"{path}: cannot be read as data ({error})") from None


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """(where, line) of every line that is not blank; ``where`` names the file and the line's number.

    Raises:
        UsageError: see :func:`open_data`; or larger than a prompt file is.
    """
    total = 0
    with open_data(path) as stream:
        number = 0
        while line := stream.readline(LINE_LIMIT + 1):
            number, total = number + 1, total + len(line)
            if len(line) > LINE_LIMIT:
                raise UsageError(f"{path}, line {number}: more than {LINE_LIMIT} characters")
            if total > LIMIT:
                raise UsageError(f"{path}: more than {LIMIT} characters")
            if line.strip():
                yield f"{path}, line {number}", line.strip("\r\n")


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, object) of every line.

    Raises:
        UsageError: see :func:`read_lines`; or a line that is no JSON object.
    """
    for where, line in read_lines(path):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: not JSON ({error})") from None
        if not isinstance(record, dict):
            raise UsageError(f"{where}: expected an object, got {line.strip()[:40]}")
        yield where, record


def prompt_of(record: dict[str, Any], where: str) -> str:
    """The prompt of a record: the first of ``turns``, or ``prompt``, or ``question``.

    Raises:
        UsageError: it has none.
    """
    turns = record.get("turns")
    text = turns[0] if isinstance(turns, list) and turns else record.get("prompt", record.get("question"))
    if not isinstance(text, str) or not text:
        raise UsageError(f'{where}: expected "turns", "prompt" or "question", got the keys {keys_of(record)}')
    return text


def keys_of(record: dict[str, Any]) -> str:
    """What a record has, in words."""
    return ", ".join(sorted(map(str, record))[:8]) or "none"
