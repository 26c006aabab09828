"""Incremental detokenizing: text as tokens come, and the sum of the pieces is exactly the full decode.

Decoding a window and cutting off what was there before is wrong wherever a decoder looks at neighbours (byte
fallback turns a whole run of bytes into U+FFFD if any of it is invalid; the first token loses its space; WordPiece
joins). So each decoder of the ``tokenizers`` library that language models use is rebuilt here as a stream: a chain of
stages that take tokens and give back those whose text can no longer change. Work is linear in the tokens. A decoder
that has no streaming form here keeps its text until ``flush`` decodes it in one go: late, never wrong.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import tokenizers


class Stage(Protocol):
    """One step of a decoder. ``push`` may keep tokens back; ``flush`` ends the stream and returns what was kept."""

    def push(self, tokens: Iterable[str]) -> list[str]: ...

    def flush(self) -> list[str]: ...


class Detokenizer:
    """Text of one sequence of tokens, piece by piece.

    For any split of ids into blocks, the concatenation of all ``push`` results and of ``flush`` equals
    ``tokenizer.decode(ids, skip_special_tokens=...)``. Incomplete characters are kept back, so U+FFFD appears only
    where the full decode has it.

    Args:
        tokenizer: a ``tokenizers.Tokenizer``. skip_special: leave special tokens out.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, *, skip_special: bool = True) -> None:
        self._token_of: Callable[[int], str | None] = tokenizer.id_to_token
        added = tokenizer.get_added_tokens_decoder().values() if skip_special else ()
        self._special = frozenset(token.content for token in added if token.special)
        self._stage = _stage_of(tokenizer.decoder)
        self._done = False

    def push(self, tokens: Sequence[int]) -> str:
        """The text that ``tokens`` settle, maybe empty. Unknown ids have no text.

        Raises:
            ValueError: after ``flush``.
        """
        if self._done:
            raise ValueError("the detokenizer was flushed; use a new one for a new sequence")
        texts = (self._token_of(token) for token in tokens)
        return "".join(self._stage.push([text for text in texts if text is not None and text not in self._special]))

    def flush(self) -> str:
        """The text kept back; the end of the sequence. A second call returns nothing."""
        if self._done:
            return ""
        self._done = True
        return "".join(self._stage.flush())


class _Each:
    """Every token on its own; ``first`` says whether it is the first of the sequence."""

    def __init__(self, convert: Callable[[str, bool], str]) -> None:
        self._convert, self._first = convert, True

    def push(self, tokens: Iterable[str]) -> list[str]:
        result = []
        for token in tokens:
            result.append(self._convert(token, self._first))
            self._first = False
        return result

    def flush(self) -> list[str]:
        return []


class _ByteLevel:
    """GPT-2 bytes: each character of a token stands for a byte; a token with any other character stands for itself."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, tokens: Iterable[str]) -> list[str]:
        return [self._decoder.decode(b"".join(map(byte_level_bytes, tokens)))]

    def flush(self) -> list[str]:
        return [self._decoder.decode(b"", True)]


class _ByteFallback:
    """``<0xE2>`` tokens: a run of them is one string if it is valid UTF-8, else one U+FFFD for each.

    The last byte of a run decides over all of it, so a run is kept back until another token ends it.
    """

    _TOKEN = re.compile(r"<0x(\+[0-9A-Fa-f]|[0-9A-Fa-f]{2})>")

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, tokens: Iterable[str]) -> list[str]:
        result = []
        for token in tokens:
            if match := self._TOKEN.fullmatch(token):
                self._run.append(int(match[1], 16))
            else:
                result += [*self.flush(), token]
        return result

    def flush(self) -> list[str]:
        if not self._run:
            return []
        run = bytes(self._run)
        self._run.clear()
        try:
            return [run.decode("utf-8")]
        except UnicodeDecodeError:
            return ["\ufffd"] * len(run)


class _StripStart:
    """After Fuse there is one token, the whole text: up to ``count`` copies of ``content`` leave its start."""

    def __init__(self, content: str, count: int) -> None:
        self._content, self._left = content, count

    def push(self, tokens: Iterable[str]) -> list[str]:
        text = "".join(tokens)
        while self._left and text:
            if not text.startswith(self._content):
                self._left = 0
                break
            text, self._left = text[1:], self._left - 1
        return [text]

    def flush(self) -> list[str]:
        return []


class _LastDiffers:
    """BPE with an end-of-word suffix: a space everywhere but on the last token, which is kept back."""

    def __init__(self, suffix: str) -> None:
        self._suffix, self._kept = suffix, list[str]()

    def push(self, tokens: Iterable[str]) -> list[str]:
        self._kept += tokens
        ready, self._kept = self._kept[:-1], self._kept[-1:]
        return [token.replace(self._suffix, " ") for token in ready]

    def flush(self) -> list[str]:
        return [token.replace(self._suffix, "") for token in self._kept]


class _Chain:
    def __init__(self, stages: list[Stage]) -> None:
        self._stages = stages

    def push(self, tokens: Iterable[str]) -> list[str]:
        result = list(tokens)
        for stage in self._stages:
            result = stage.push(result)
        return result

    def flush(self) -> list[str]:
        result: list[str] = []
        for stage in self._stages:
            result = stage.push(result) + stage.flush()
        return result


class _AtTheEnd:
    """Any decoder, in one go."""

    def __init__(self, decoder: Any) -> None:
        self._decoder, self._tokens = decoder, list[str]()

    def push(self, tokens: Iterable[str]) -> list[str]:
        self._tokens += tokens
        return []

    def flush(self) -> list[str]:
        return [self._decoder.decode(self._tokens)]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: itself where printable, else the next code point from 256."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """What a token of a byte-level tokenizer stands for."""
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()


def _stage_of(decoder: Any) -> Stage:
    if decoder is None:
        return _Each(lambda token, first: token if first else " " + token)
    spec = json.loads(decoder.__getstate__())
    stages = _stages(spec["decoders"] if spec["type"] == "Sequence" else [spec])
    if stages is not None:
        return _Chain(stages)
    if spec["type"] == "WordPiece":
        # Each token depends on nothing but being the first, so the library itself can say what it becomes.
        return _Each(lambda token, first: str(decoder.decode([token]) if first else decoder.decode(["a", token])[1:]))
    return _AtTheEnd(decoder)


def _stages(specs: list[dict[str, Any]]) -> list[Stage] | None:
    """The streaming form of a decoder sequence, or None if a part has none."""
    stages: list[Stage] = []
    fused = False
    for spec in specs:
        kind = spec["type"]
        if kind == "Fuse":
            fused = True
        elif kind == "Strip" and fused and spec["stop"] == 0 and len(spec["content"]) == 1:
            stages.append(_StripStart(spec["content"], spec["start"]))
        elif fused:
            return None
        elif kind == "ByteLevel":
            stages.append(_ByteLevel())
            fused = True
        elif kind == "ByteFallback":
            stages.append(_ByteFallback())
        elif kind == "Replace" and spec["pattern"].get("String"):
            stages.append(_Each(_replacing(spec["pattern"]["String"], spec["content"])))
        elif kind == "Metaspace":
            stages.append(_Each(_metaspace(spec["replacement"], spec["prepend_scheme"] != "never")))
        elif kind == "BPEDecoder" and spec["suffix"]:
            stages.append(_LastDiffers(spec["suffix"]))
        else:
            return None
    return stages


def _replacing(pattern: str, content: str) -> Callable[[str, bool], str]:
    return lambda token, first: token.replace(pattern, content)


def _metaspace(replacement: str, prepends: bool) -> Callable[[str, bool], str]:
    return lambda token, first: token.replace(replacement, "" if first and prepends else " ")
