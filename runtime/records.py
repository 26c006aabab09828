"""Strict readers of records: dataclasses whose fields say how they are read from JSON-like data.

What is read may come from a stranger, so every number, string and list has a bound, unknown keys are refused, and no
value is converted silently. A field made by :func:`read` without a default is required.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import MISSING, field, fields
from typing import Any, TypeVar

#: Checks a JSON value found at a dotted place and returns what the record stores.
Reader = Callable[[Any, str], Any]
_Record = TypeVar("_Record")

#: A short name, of a device or a drafter.
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")


class RecordError(ValueError):
    """A value that its record does not take; one line, without the name of the file."""


def fail(where: str, value: Any, expected: str) -> RecordError:
    """The error that says what stands at ``where`` and what should."""
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return RecordError(f"{where or 'it'} is {shown}, expected {expected}")


def read(reader: Reader, default: Any = MISSING) -> Any:
    """A dataclass field that is read with ``reader``."""
    return field(default=default, metadata={"read": reader})


def integer(low: int, high: int) -> Reader:
    def check(value: Any, where: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise fail(where, value, f"an integer from {low} to {high}")
        return value

    return check


def number(low: float, high: float) -> Reader:
    """A finite number; integers become floats."""

    def check(value: Any, where: str) -> float:
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
            raise fail(where, value, f"a number from {low:g} to {high:g}")
        return float(value)

    return check


def flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise fail(where, value, "true or false")
    return value


def text(limit: int = 512, pattern: re.Pattern[str] | None = None, printable: bool = True) -> Reader:
    def check(value: Any, where: str) -> str:
        if not isinstance(value, str) or len(value) > limit:
            raise fail(where, value, f"a string of at most {limit} characters")
        if pattern is not None and not pattern.fullmatch(value):
            raise fail(where, value, f"a match of {pattern.pattern}")
        if printable and not value.isprintable():
            raise fail(where, value, "printable characters only")
        return value

    return check


def choice(*values: str) -> Reader:
    def check(value: Any, where: str) -> str:
        if value not in values:
            raise fail(where, value, f"one of {', '.join(values)}")
        return str(value)

    return check


def optional(reader: Reader) -> Reader:
    return lambda value, where: None if value is None else reader(value, where)


def sequence(reader: Reader, limit: int) -> Reader:
    def check(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) > limit:
            raise fail(where, value, f"a list of at most {limit} entries")
        return tuple(reader(entry, f"{where}[{index}]") for index, entry in enumerate(value))

    return check


def table(key: Reader, reader: Reader, limit: int) -> Reader:
    def check(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > limit:
            raise fail(where, value, f"an object of at most {limit} entries")
        return {key(name, f"{where} key"): reader(entry, f"{where}.{name}") for name, entry in value.items()}

    return check


def record(cls: type[Any]) -> Reader:
    return lambda value, where: read_record(cls, value, where)


def read_record(cls: type[_Record], value: Any, where: str = "") -> _Record:
    """An instance of the dataclass ``cls`` from an object that has its fields and no others.

    Raises:
        RecordError: a key or value that ``cls`` does not take.
    """
    if not isinstance(value, dict):
        raise fail(where, value, "an object")
    known = {entry.name: entry for entry in fields(cls)}  # type: ignore[arg-type]
    prefix = f"{where}." if where else ""
    if unknown := sorted(map(str, value.keys() - known.keys())):
        raise RecordError(f"unknown key {prefix}{unknown[0][:60]!r}, expected {', '.join(known)}")
    required = {name for name, entry in known.items() if entry.default is MISSING}
    if missing := sorted(required - value.keys()):
        raise RecordError(f"missing key {prefix}{missing[0]}: the file is damaged or of another version")
    return cls(
        **{name: entry.metadata["read"](value[name], prefix + name) for name, entry in known.items() if name in value}
    )


def plain(value: Any) -> Any:
    """JSON form of a record or of anything it holds."""
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {entry.name: plain(getattr(value, entry.name)) for entry in fields(value)}
    return value


def parse_json(document: str | bytes) -> Any:
    """Parse JSON; duplicate keys, NaN and absurd nesting are refused too.

    Raises:
        RecordError: it is not JSON.
    """
    try:
        return json.loads(document, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"not valid JSON ({error})") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
