"""Outputs end exactly where a plain reading of the whole text says, whatever the split into tokens."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specexport.runtime.errors import UsageError
from specexport.runtime.stopping import StopChecker


class Pieces:
    """A detokenizer whose token i is the i-th piece; it holds ``late`` characters back until more come."""

    def __init__(self, pieces: list[str], late: int = 0) -> None:
        self.pieces, self.late, self.kept, self.flushes = pieces, late, "", 0

    def push(self, tokens: list[int]) -> str:
        self.kept += "".join(self.pieces[token] for token in tokens)
        cut = max(0, len(self.kept) - self.late)
        ready, self.kept = self.kept[:cut], self.kept[cut:]
        return ready

    def flush(self) -> str:
        self.flushes += 1
        ready, self.kept = self.kept, ""
        return ready


def reference(text: str, stops: list[str]) -> str | None:
    """Character by character: the text before the first stop string that is complete, or None."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return None


@settings(max_examples=500, deadline=None)
@given(
    pieces=st.lists(st.text("abc", max_size=4), min_size=1, max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
    late=st.integers(0, 2),
)
@example(pieces=["a", "abca", "b"], stops=["abcabc", "b"], late=0)
@example(pieces=["aab", "aaa", "b"], stops=["aaab"], late=0)
def test_cut_at_the_character(pieces: list[str], stops: list[str], late: int) -> None:
    source = Pieces(pieces, late)
    checker = StopChecker([99], stops, 100, source)
    streamed = ""
    ended = False
    for token in range(len(pieces)):
        ended = checker.push(token)
        streamed += checker.take()
        whole = "".join(pieces[: token + 1])
        cut = reference(whole, stops)
        assert (cut if cut is not None else whole).startswith(streamed)
        if ended:
            break
    if not ended:
        assert checker.push(99)
        streamed += checker.take()
    whole = "".join(pieces)
    cut = reference(whole, stops)
    assert streamed == checker.text == (whole if cut is None else cut)
    assert checker.finish_reason == ("stop" if cut is None else "stop_string")
    assert checker.take() == ""
    if late == 0 and cut is not None:  # it ended at the very token that completed the stop string
        needed = next(n for n in range(1, len(pieces) + 1) if reference("".join(pieces[:n]), stops) is not None)
        assert checker.token_ids == list(range(needed))


def test_held_back_only_while_it_can_match() -> None:
    pieces = ["one ", "EN", "D? ", "E", "ND", "!"]
    checker = StopChecker([], ["END!"], 100, Pieces(pieces))
    shown = []
    for token in range(len(pieces)):
        checker.push(token)
        shown.append(checker.take())
    assert shown == ["one ", "", "END? ", "", "", ""]
    assert (checker.text, checker.finish_reason, checker.stop_match) == ("one END? ", "stop_string", "END!")
    assert checker.token_ids == list(range(6))


def test_stop_token_is_in_neither_text_nor_ids() -> None:
    checker = StopChecker([1], [], 100, Pieces(["a", "<eos>", "b"]))
    assert [checker.push(0), checker.push(1)] == [False, True]
    assert (checker.text, checker.token_ids, checker.finish_reason, checker.stop_match) == ("a", [0], "stop", 1)
    with pytest.raises(ValueError, match="ended"):
        checker.push(2)


def test_length_ends_at_the_token_and_releases_what_is_held() -> None:
    checker = StopChecker([], ["abc"], 2, Pieces(["a", "b", "c"]))
    assert [checker.push(0), checker.push(1)] == [False, True]
    assert (checker.text, checker.take(), checker.finish_reason) == ("ab", "ab", "length")


def test_a_stop_string_wins_over_the_length_it_coincides_with() -> None:
    checker = StopChecker([], ["b"], 2, Pieces(["a", "b"]))
    checker.push(0)
    checker.push(1)
    assert (checker.text, checker.finish_reason) == ("a", "stop_string")


@pytest.mark.parametrize("reason", ["context", "cancelled"])
def test_outside_reasons(reason: str) -> None:
    source = Pieces(["ab", "c"], late=1)
    checker = StopChecker([], ["bx"], 9, source)
    checker.push(0)
    checker.finish(reason)  # type: ignore[arg-type]
    checker.finish("length")
    assert (checker.text, checker.finish_reason, source.flushes) == ("ab", reason, 1)


def test_flushed_text_can_complete_a_stop_string() -> None:
    checker = StopChecker([], ["b"], 1, Pieces(["ab"], late=1))
    assert checker.push(0)
    assert (checker.text, checker.finish_reason) == ("a", "stop_string")


def test_min_tokens_shields_the_first_text() -> None:
    checker = StopChecker([], ["ab"], 9, Pieces(["ab", "a", "b", "ab", "a", "b"]), min_tokens=2)
    ends = [checker.push(token) for token in range(4)]
    assert ends == [False, False, False, True]  # "a" of token 1 is shielded, so token 2 completes nothing
    assert checker.text == "abab"


def test_without_text() -> None:
    checker = StopChecker([7], [], 3)
    assert [checker.push(token) for token in (1, 2, 3)] == [False, False, True]
    assert (checker.text, checker.token_ids, checker.finish_reason) == ("", [1, 2, 3], "length")
    with pytest.raises(ValueError, match="detokenizer"):
        StopChecker([], ["x"], 3)


@pytest.mark.parametrize(
    ("strings", "tokens", "words"),
    [
        ([""], 5, "1 to 1024"),
        (["x" * 2000], 5, "1 to 1024"),
        ([str(i) for i in range(65)], 5, "65"),
        ([], 0, "max_tokens"),
    ],
)
def test_bad_limits(strings: list[str], tokens: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        StopChecker([], strings, tokens, Pieces([]))


def test_one_string_is_not_a_list_of_characters() -> None:
    checker = StopChecker([], "bc", 9, Pieces(["b", "a", "bc"]))
    assert [checker.push(token) for token in range(3)] == [False, False, True]
