"""Text that a user names, as tokens: to measure perplexity on, or to calibrate with."""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from specexport.runtime.errors import UsageError

_GZIP = b"\x1f\x8b"
#: Characters read for each wanted token at first; doubled until the tokens are enough.
_CHARACTERS = 8
#: Bytes of one character in UTF-8, at most.
_UTF8 = 4
_PIECE = 1 << 20
#: Tokens at the end of a cut text that may differ from those of the whole text.
_EDGE = 64


class Encoder(Protocol):
    """What of :class:`specexport.runtime.tokenizer.Tokenizer` is needed."""

    def encode(self, text: str, add_special: bool = True) -> list[int]: ...


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens that a model sees in one go, and the first of them that counts (each after it does too)."""

    tokens: tuple[int, ...]
    first: int

    @property
    def scored(self) -> int:
        return len(self.tokens) - self.first


def prefix_of(tokenizer: Encoder) -> list[int]:
    """What the tokenizer puts before every text: a bos or nothing. Some models (Gemma) are lost without it."""
    with_ends, text = tokenizer.encode("a"), tokenizer.encode("a", add_special=False)
    starts = (n for n in range(len(with_ends)) if with_ends[n : n + len(text)] == text)
    return with_ends[: next(starts, 0)]


def read_tokens(path: Path, tokenizer: Encoder, count: int) -> list[int]:
    """At most ``count`` tokens from the start of a text file, plain or gzip; no more of it is read than they need.

    Raises:
        UsageError: not there, not UTF-8 text, damaged, or empty.
    """
    characters = count * _CHARACTERS
    while True:
        text, whole = _head(path, characters)
        tokens = tokenizer.encode(text, add_special=False)
        if whole or len(tokens) >= count + _EDGE:
            break
        characters *= 2
    if not tokens:
        raise UsageError(f"{path} is empty: expected text")
    return tokens[:count]


def _head(path: Path, characters: int) -> tuple[str, bool]:
    """The first ``characters`` of a file, and whether that is all of it."""
    try:
        with path.open("rb") as plain:
            packed = plain.read(len(_GZIP)) == _GZIP
        with gzip.open(path, "rb") if packed else path.open("rb") as file:
            data = _read(cast(BinaryIO, file), characters * _UTF8)
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file, expected text") from None
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    whole = len(data) < characters * _UTF8
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        if whole or error.start < len(data) - _UTF8:
            raise UsageError(f"{path} is not UTF-8 text (byte {error.start})") from None
        text = data[: error.start].decode("utf-8")  # a character was cut in two
    if (at := text.find("\0")) >= 0:
        raise UsageError(f"{path} is not text: character {at} is NUL")
    return text, whole


def _read(file: BinaryIO, limit: int) -> bytes:
    """In pieces: a request is allocated whole, however little there is to read."""
    parts = []
    while limit and (part := file.read(min(limit, _PIECE))):
        parts.append(part)
        limit -= len(part)
    return b"".join(parts)


def cut(tokens: list[int], prefix: list[int], *, width: int, stride: int) -> list[Window]:
    """Windows of ``width`` tokens, ``prefix`` at the start of each, so that each token counts once.

    A window starts ``stride`` tokens after the one before it and counts the tokens that are new. The very first token
    counts where there is a prefix to predict it from; with windows that do not overlap that holds for each of them.

    Raises:
        UsageError: ``width`` and ``stride`` do not fit together, or nothing is left to count.
    """
    room = width - len(prefix)
    if room < 2 or not 1 <= stride <= room:
        raise UsageError(
            f"windows of {width} tokens at a stride of {stride}: expected a stride of 1 to {max(room, 1)} "
            f"and a window of at least {2 + len(prefix)}"
        )
    windows, done = [], 0
    for start in range(0, len(tokens), stride):
        part = tokens[start : start + room]
        first = max(len(prefix) + done - start, 1)
        done = start + len(part)
        if first < len(prefix) + len(part):
            windows.append(Window((*prefix, *part), first))
        if done == len(tokens):
            break
    if not windows:
        raise UsageError(f"{len(tokens)} tokens of text are too few: expected at least 2")
    return windows
