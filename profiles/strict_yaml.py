"""YAML without surprises: plain data only, no anchors (which can blow up), no repeated keys."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

#: Deepest nesting that is read.
MAX_NESTING = 16


class StrictYamlError(ValueError):
    """Not YAML, or more than plain data; one line."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # it ships no types
    nesting = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise StrictYamlError(f"line {self.peek_event().start_mark.line + 1}: references (*name) are not read")
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise StrictYamlError(f"nested more than {MAX_NESTING} deep")
        node = super().compose_node(parent, index)
        self.nesting -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise StrictYamlError(f"line {key.start_mark.line + 1}: key {str(key.value)[:60]!r} occurs twice")
            seen.add(key.value if isinstance(key.value, str) else id(key))
        found: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return found


def parse_yaml(content: bytes) -> Any:
    """The data of a document.

    Raises:
        StrictYamlError: not YAML, or with references, repeated keys, tags or absurd nesting.
    """
    try:
        return yaml.load(content, _Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise StrictYamlError(" ".join(str(error).split())[:300]) from None
