"""Text files as tokens: what is read, how windows are cut, and what is refused."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specexport.exporter.quantize.text import cut, prefix_of, read_tokens
from specexport.runtime.errors import UsageError


class Letters:
    """One token a character, and a bos where asked for."""

    def __init__(self, bos: bool = False) -> None:
        self.bos = bos
        self.longest = 0

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        self.longest = max(self.longest, len(text))
        return ([0] if self.bos and add_special else []) + [ord(letter) for letter in text]


def test_plain_and_gzip_are_the_same_and_only_the_start_is_read(tmp_path: Path) -> None:
    words = "äöü€ " * 20_000
    (tmp_path / "a.txt").write_text(words, encoding="utf-8")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(words.encode()))
    for name in ("a.txt", "a.txt.gz"):
        letters = Letters()
        assert read_tokens(tmp_path / name, letters, 1000) == [ord(letter) for letter in words[:1000]]
        assert letters.longest < 40_000
    assert len(read_tokens(tmp_path / "a.txt", Letters(), 10**6)) == len(words)


def test_a_prefix_is_what_the_tokenizer_puts_before_a_text() -> None:
    assert prefix_of(Letters(bos=True)) == [0] and prefix_of(Letters()) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.txt", None, "no such file"),
        ("empty.txt", b"", "is empty"),
        ("latin.txt", b"caf\xe9 " * 10, "not UTF-8 text .byte 3."),
        ("binary.txt", b"abc\x00def", "NUL"),
        ("cut.gz", gzip.compress(b"a long text " * 1000, mtime=0)[:-20], "cannot be read"),
        ("wrong.gz", b"\x1f\x8b\x08 no gzip at all", "cannot be read"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_tokens(tmp_path / name, Letters(), 10**6)


@given(count=st.integers(2, 200), prefix=st.integers(0, 2), width=st.integers(4, 40), data=st.data())
def test_every_token_counts_once_with_its_own_context(count: int, prefix: int, width: int, data: st.DataObject) -> None:
    tokens = list(range(100, 100 + count))
    stride = data.draw(st.integers(1, width - prefix))
    windows = cut(tokens, [1] * prefix, width=width, stride=stride)
    scored = [token for window in windows for token in window.tokens[window.first :]]
    overlaps = stride < width - prefix
    if prefix:
        assert scored == tokens
    elif overlaps:
        assert scored == tokens[1:]
    else:  # the first of each window has nothing before it
        assert scored == [token for index, token in enumerate(tokens) if index % width]
    for window in windows:
        assert len(window.tokens) <= width and window.tokens[:prefix] == (1,) * prefix
        assert list(window.tokens[prefix:]) == list(range(window.tokens[prefix], window.tokens[-1] + 1))
    for window in windows[1:]:
        assert window.first - prefix >= (width - prefix - stride if overlaps else 0)


@pytest.mark.parametrize(("width", "stride"), [(8, 0), (8, 9), (1, 1), (2, 2)])
def test_windows_that_cannot_be_are_refused(width: int, stride: int) -> None:
    with pytest.raises(UsageError, match="window"):
        cut(list(range(20)), [1], width=width, stride=stride)


def test_one_token_has_nothing_to_predict() -> None:
    with pytest.raises(UsageError, match="too few"):
        cut([5], [], width=8, stride=8)
