"""Reading one JSON object of a config: every key is taken, known to be harmless, or an error."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from specexport.exporter.config_values import boolean, integer, number, text
from specexport.runtime.errors import CheckpointError

#: Keys of a ``config.json`` that hold a quantisation (the second is older); ``exporter.quantize.detect`` reads them.
QUANTIZATION_KEYS = frozenset({"quantization_config", "compression_config"})


class Keys:
    """One JSON object of a config; every key must be taken, or be one that cannot change a logit.

    Args:
        where: names the object in errors. ignorable: keys that need not be taken.
        effect: what a key that nobody took could change, for the error.
    """

    def __init__(self, raw: Mapping[str, Any], where: str, ignorable: Set[str], effect: str) -> None:
        self.raw, self.where, self.ignorable, self.effect = raw, where, ignorable, effect
        self._taken: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Whether ``key`` is there and not null. Does not take it."""
        return self.raw.get(key) is not None

    def take(self, key: str, default: Any = None) -> Any:
        """The value of ``key``; ``default`` where it is absent or null."""
        self._taken.add(key)
        value = self.raw.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        """The value of ``key``, which must be there."""
        if key not in self:
            raise CheckpointError(f"{self.where}: {key} is missing; it is required")
        return self.take(key)

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int | None:
        value = self.take(key)
        return default if value is None else integer(key, value, low, high)

    def number(self, key: str, default: float, low: float, high: float) -> float:
        return number(key, self.take(key, default), low, high)

    def boolean(self, key: str, default: bool) -> bool:
        return boolean(key, self.take(key, default))

    def flag(self, key: str) -> bool | None:
        """``key`` as a boolean, None where it is absent or null."""
        value = self.take(key)
        return None if value is None else boolean(key, value)

    def string(self, key: str) -> str | None:
        value = self.take(key)
        if value is not None and not isinstance(value, str):
            raise CheckpointError(f"{self.where}: {key} must be text, got {text(value)}")
        return value

    def strings(self, *names: str) -> tuple[str, ...]:
        """All of several lists of strings; absent or null ones are empty."""
        found: list[str] = []
        for key in names:
            value = self.take(key, [])
            if not isinstance(value, list) or len(value) > 1 << 14 or not all(isinstance(v, str) and v for v in value):
                raise CheckpointError(f"{self.where}: {key} must be a list of names, got {text(value)}")
            found += value
        return tuple(found)

    def integers(self, key: str, low: int, high: int) -> tuple[int, ...] | None:
        """A list of integers, None where it is absent or null."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, list) or not value or len(value) > 64:
            raise CheckpointError(f"{self.where}: {key} must be a list of 1 to 64 integers, got {text(value)}")
        return tuple(integer(key, item, low, high) for item in value)

    def object(self, key: str) -> Keys | None:
        """A nested object, None where it is absent or null."""
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.where}: {key} must be an object, got {text(value)}")
        return Keys(value, f"{self.where}.{key}", self.ignorable, self.effect)

    def fixed(self, key: str, *values: Any) -> None:
        """``key`` may be there, with one of ``values`` only."""
        value = self.raw.get(key, values[0])
        self._taken.add(key)
        if not any(value == allowed and type(value) is type(allowed) for allowed in values):
            raise CheckpointError(f"{self.where}: {key} is {text(value)}; only {text(values[0])} is supported")

    def ignore(self, *keys: str) -> None:
        """Take keys that cannot change a logit."""
        self._taken.update(keys)

    def finish(self) -> None:
        """Raise CheckpointError for the first key that nobody took."""
        for key in sorted(set(map(str, self.raw)) - self._taken - self.ignorable):
            raise CheckpointError(f"{self.where}: {key} = {text(self.raw.get(key))} is not understood {self.effect}")
