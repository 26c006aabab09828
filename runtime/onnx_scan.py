"""Where an ONNX file keeps its external data: a bounded protobuf walk, standard library only.

A hostile ONNX file may point a tensor at any path, or at any offset, and the runtime that loads it follows. So a
bundle's graphs are scanned before an engine sees them. Only the messages that can hold a tensor are entered; the rest
is skipped by length, unread, so a file with gigabytes of inline weights costs no more than its structure.

Field numbers are those of the ONNX protobuf schema (onnx.proto3).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specexport.runtime.errors import BundleError

#: Deepest nesting of messages that is followed (a subgraph costs three: node, attribute, graph).
MAX_DEPTH = 64
#: Longest key or value of an external-data entry, in bytes.
MAX_ENTRY = 4096
#: Most dimensions of a tensor.
MAX_RANK = 16
#: Most fields that are looked at; real graphs have some hundred thousand.
MAX_FIELDS = 10_000_000

#: Message -> field number -> message of that field, for the paths that lead to a tensor.
_CHILDREN: dict[str, dict[int, str]] = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "function": {7: "node", 11: "attribute"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph", 22: "sparse", 23: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "tensor": {13: "entry"},
}
#: Fields above that are not repeated. Parsers merge a second occurrence into the first, which would let the two halves
#: of one tensor's record pass one at a time, so it is refused.
_SINGULAR = {("model", 7), ("training", 1), ("training", 2), ("sparse", 1), ("sparse", 2)} | {
    ("attribute", number) for number in (5, 6, 22)
}
_DATA_LOCATION = 14


@dataclass(frozen=True, slots=True)
class ExternalData:
    """One tensor's bytes: ``length`` of them (None: to the end) from ``offset`` of the file ``location``."""

    location: str
    offset: int
    length: int | None


class _Malformed(Exception):
    """The bytes are not the protobuf message they should be."""


def external_data(path: Path) -> list[ExternalData]:
    """Every external-data record of an ONNX file: initialisers, attributes, subgraphs, functions, sparse tensors.

    Raises:
        BundleError: truncated or malformed, nested too deeply, or a record that is incomplete or has unknown keys.
    """
    with _open(path) as scanner:
        return list(scanner.tensors())


def scan_initializers(path: Path) -> list[tuple[str, int, tuple[int, ...], str | None]]:
    """Name, ONNX data type, shape and external file (None: inline) of every initialiser of the main graph.

    Raises:
        BundleError: truncated or malformed.
    """
    with _open(path) as scanner:
        return list(scanner.initializers())


@contextmanager
def _open(path: Path) -> Iterator[_Scanner]:
    with path.open("rb") as file:
        if not file.seek(0, 2):
            raise BundleError(f"{path.name} is empty: the bundle is damaged, build it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                yield _Scanner(data)
            except _Malformed as error:
                raise BundleError(f"{path.name} is not a valid ONNX file ({error}): build the bundle again") from None


class _Scanner:
    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.budget = MAX_FIELDS

    def tensors(self) -> Iterator[ExternalData]:
        """The records of the model that fills the file."""
        data = self.data
        graphs = 0
        pending = [("model", 0, len(data), 0)]
        while pending:
            kind, start, end, depth = pending.pop()
            graphs += kind == "graph"
            if depth > MAX_DEPTH:
                raise _Malformed(f"nested more than {MAX_DEPTH} deep")
            children = _CHILDREN[kind]
            seen: set[int] = set()
            entries: list[tuple[str, str]] = []
            external = False
            for number, value, size in self.fields(start, end):
                child = children.get(number)
                if size < 0:
                    external = external or (kind == "tensor" and number == _DATA_LOCATION and value & 0xFFFFFFFF == 1)
                elif child == "entry":
                    entries.append(self.entry(value, value + size))
                elif child is not None:
                    if number in seen and (kind, number) in _SINGULAR:
                        raise _Malformed(f"field {number} of a {kind} occurs twice")
                    seen.add(number)
                    pending.append((child, value, value + size, depth + 1))
            if external or entries:
                yield _record(entries)
        if not graphs:
            raise _Malformed("no graph in it")

    def initializers(self) -> Iterator[tuple[str, int, tuple[int, ...], str | None]]:
        """Of the model's graph: its field 5; a tensor's dims are field 1, data type 2, name 8."""
        for graph_number, graph, graph_size in self.fields(0, len(self.data)):
            if graph_number != 7 or graph_size < 0:
                continue
            for number, start, size in self.fields(graph, graph + graph_size):
                if number == 5 and size >= 0:
                    yield self.initializer(start, start + size)

    def initializer(self, start: int, end: int) -> tuple[str, int, tuple[int, ...], str | None]:
        name, dtype, location = "", 0, None
        shape: list[int] = []
        for number, value, size in self.fields(start, end):
            if number == 1 and size < 0:
                shape.append(value)
            elif number == 1:  # packed
                place = value
                while place < value + size:
                    dim, place = self.varint(place, value + size)
                    shape.append(dim)
            elif number == 2 and size < 0:
                dtype = value
            elif number == 8 and size >= 0:
                name = self.data[value : value + min(size, MAX_ENTRY)].decode(errors="replace")
            elif number == 13 and size >= 0:
                key, text = self.entry(value, value + size)
                location = text if key == "location" else location
            if len(shape) > MAX_RANK or any(dim > 1 << 40 for dim in shape):
                raise _Malformed(f"a tensor of shape {shape[:4]}")
        return name, dtype, tuple(shape), location

    def entry(self, start: int, end: int) -> tuple[str, str]:
        """Key and value of a StringStringEntryProto."""
        parts = {1: b"", 2: b""}
        for number, value, size in self.fields(start, end):
            if number in parts and size >= 0:
                if size > MAX_ENTRY:
                    raise _Malformed(f"external-data entry of {size} bytes")
                parts[number] = self.data[value : value + size]
        try:
            return parts[1].decode(), parts[2].decode()
        except UnicodeDecodeError:
            raise _Malformed("external-data entry that is not UTF-8") from None

    def fields(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """``(number, value, -1)`` of a varint field, ``(number, first byte, size)`` of a length-delimited one."""
        position = start
        while position < end:
            self.budget -= 1
            if self.budget < 0:
                raise _Malformed(f"more than {MAX_FIELDS} fields")
            tag, position = self.varint(position, end)
            number, wire = tag >> 3, tag & 7
            if not 0 < number < 1 << 29:
                raise _Malformed(f"field number {number} at byte {position}")
            if wire == 2:
                size, position = self.varint(position, end)
                if size > end - position:
                    raise _Malformed(f"truncated: a field of {size} bytes at byte {position}, {end - position} left")
                yield number, position, size
                position += size
            elif wire == 0:
                value, position = self.varint(position, end)
                yield number, value, -1
            elif wire in (1, 5):
                position += 8 if wire == 1 else 4
                if position > end:
                    raise _Malformed(f"truncated at byte {end}")
            else:
                raise _Malformed(f"wire type {wire} at byte {position}")

    def varint(self, position: int, end: int) -> tuple[int, int]:
        """A base-128 number of at most 64 bits and the position after it."""
        value = 0
        for shift in range(0, 70, 7):
            if position >= end:
                raise _Malformed(f"truncated at byte {end}")
            byte = self.data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value, position
        raise _Malformed(f"a number of more than 64 bits at byte {position}")


def _record(entries: list[tuple[str, str]]) -> ExternalData:
    values = dict(entries)
    if len(values) != len(entries) or "location" not in values or values.keys() - {"location", "offset", "length"}:
        raise _Malformed(f"external data with keys {', '.join(key for key, _ in entries)[:80] or 'none'}")
    numbers = [values.get(key, "0") for key in ("offset", "length")]
    if not all(number.isascii() and number.isdigit() and len(number) <= 18 for number in numbers):
        raise _Malformed(f"external data at offset {numbers[0][:24]!r} of length {numbers[1][:24]!r}")
    return ExternalData(values["location"], int(numbers[0]), int(numbers[1]) if "length" in values else None)
