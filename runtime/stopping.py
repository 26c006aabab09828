"""Where an output ends: at a stop token, a stop string, a length, the context, or because the caller said so.

The checker sees every token once, in order, also inside an accepted block: :meth:`StopChecker.push` is the ``stop``
of :func:`specexport.runtime.acceptance.match`, so nothing is sampled past the end and speculation cannot move it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

from specexport.runtime.errors import UsageError

#: stop: a stop token. stop_string: a stop string. length: max_tokens. context: no cache row is left.
FinishReason = Literal["stop", "stop_string", "length", "context", "cancelled"]

MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LENGTH = 1024


class TextSource(Protocol):
    """What the checker needs of a :class:`specexport.runtime.detokenize.Detokenizer`."""

    def push(self, tokens: list[int], /) -> str: ...

    def flush(self) -> str: ...


class StopChecker:
    """Collects one output and ends it.

    The text is cut before the stop string that is complete first (of those that end at the same character, the one
    that starts first). Text that may still grow into a stop string is held back from :meth:`take`. A stop token ends
    the output and belongs to neither text nor ``token_ids``; the token that completes a stop string does belong to
    ``token_ids``, even if its text is cut.

    Attributes:
        token_ids: the output. finish_reason: None while it goes on. stop_match: the stop string (str) or stop token
            (int) that ended it, if one did.

    Args:
        stop_ids: tokens that end the output. stop_strings: texts that end it. max_tokens: most tokens.
        detokenizer: a fresh one (None: no text, and no stop strings). min_tokens: a stop string counts only if it
            starts after the text of so many tokens (stop tokens are held off by the sampler).

    Raises:
        UsageError: a stop string is empty or too long, or there are too many.
    """

    def __init__(
        self,
        stop_ids: Iterable[int],
        stop_strings: Iterable[str],
        max_tokens: int,
        detokenizer: TextSource | None = None,
        *,
        min_tokens: int = 0,
    ) -> None:
        if isinstance(stop_strings, str):
            stop_strings = [stop_strings]
        self._stop_ids = frozenset(stop_ids)
        self._stop_strings = tuple(dict.fromkeys(stop_strings))
        if len(self._stop_strings) > MAX_STOP_STRINGS:
            raise UsageError(f"at most {MAX_STOP_STRINGS} stop strings are allowed, got {len(self._stop_strings)}")
        for text in self._stop_strings:
            if not 0 < len(text) <= MAX_STOP_STRING_LENGTH:
                raise UsageError(f"a stop string must have 1 to {MAX_STOP_STRING_LENGTH} characters, got {text[:40]!r}")
        if max_tokens < 1:
            raise UsageError(f"max_tokens must be 1 or more, got {max_tokens}")
        if self._stop_strings and detokenizer is None:
            raise ValueError("stop strings need a detokenizer")
        self._max_tokens, self._min_tokens = max_tokens, min_tokens
        self._detokenizer = detokenizer
        self._held = ""  # not released: a prefix of some stop string, or empty
        self._released: list[str] = []
        self._taken = 0
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_match: str | int | None = None

    @property
    def text(self) -> str:
        """The text so far, without what is held back; the whole text once finished."""
        return "".join(self._released)

    def push(self, token: int) -> bool:
        """Take the next token; True when the output ends with it.

        Raises:
            ValueError: the output has ended before.
        """
        if self.finish_reason is not None:
            raise ValueError(f"the output has ended ({self.finish_reason}); no token may follow")
        if token in self._stop_ids:
            self.stop_match = token
            self.finish("stop")
            return True
        self.token_ids.append(token)
        if self._detokenizer is not None:
            self._add(self._detokenizer.push([token]))
        if self.finish_reason is None and len(self.token_ids) >= self._max_tokens:
            self.finish("length")
        return self.finish_reason is not None

    def finish(self, reason: FinishReason) -> None:
        """End the output for ``reason``; no effect if it has ended.

        The detokenizer's last text is added; should it complete a stop string, that is the reason instead.
        """
        if self.finish_reason is not None:
            return
        if self._detokenizer is not None:
            self._add(self._detokenizer.flush())
        if self.finish_reason is None:
            self._released.append(self._held)
            self._held = ""
            self.finish_reason = reason

    def take(self) -> str:
        """Text that became final since the last call: what a stream may show."""
        fresh = "".join(self._released[self._taken :])
        self._taken = len(self._released)
        return fresh

    def _add(self, delta: str) -> None:
        if len(self.token_ids) <= self._min_tokens:
            self._released.append(delta)
            return
        text = self._held + delta
        found = [(at + len(stop), at, stop) for stop in self._stop_strings if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.stop_match = min(found)
            self._released.append(text[:at])
            self._held, self.finish_reason = "", "stop_string"
            return
        keep = max((_overlap(text, stop) for stop in self._stop_strings), default=0)
        self._released.append(text[: len(text) - keep])
        self._held = text[len(text) - keep :]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` with which ``stop`` begins, ``stop`` itself excluded."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
