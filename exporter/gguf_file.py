"""Parsing GGUF files (versions 2 and 3, little-endian). Nothing in them is trusted.

Counts and lengths are checked against what is left of the file before anything of their size is allocated.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from specexport.runtime.errors import CheckpointError

_STRING, _ARRAY = 8, 9
_SCALARS: Mapping[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_MAX_STRING = 1 << 24
_MAX_STRINGS = 1 << 22  # elements of a string array: each costs far more here than in the file


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: ``shape`` outermost first (GGUF stores it innermost first), ``start`` and ``size`` in bytes."""

    name: str
    type_name: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A parsed file. Metadata values are bool, int, float, str, a list of str, or a numpy array."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    header_size: int


def read_gguf(path: Path) -> GgufFile:
    """Parse the header of ``path``; no tensor data is read.

    Raises:
        CheckpointError: not GGUF, another version or byte order, truncated, or inconsistent.
    """
    with path.open("rb") as file:
        return _Parser(path, file).parse()


class _Parser:
    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        self.left = path.stat().st_size

    def parse(self) -> GgufFile:
        if self.take(4) != b"GGUF":
            raise self.error("not a GGUF file")
        version = self.number("<I")
        if version not in (2, 3):
            big = " (big-endian files are not read)" if version & 0xFFFF == 0 else ""
            raise self.error(f"version {version} is not 2 or 3{big}")
        tensors, keys = self.number("<Q"), self.number("<Q")
        self.expect(keys * 13 + tensors * 24, f"{keys} keys and {tensors} tensors")  # the least bytes either takes
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self.string()
            if key in metadata:
                raise self.error(f"the key {key[:80]!r} appears twice")
            metadata[key] = self.value(self.number("<I"))
        infos = [self.info() for _ in range(tensors)]
        header = self.path.stat().st_size - self.left
        return GgufFile(self.path, metadata, self.place(infos, metadata, header), header)

    def place(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], metadata: dict[str, Any], header: int
    ) -> dict[str, GgufTensor]:
        """Turn tensor infos into byte ranges, each within the file and none over another."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or not 1 <= align <= 1 << 20 or align & (align - 1):
            raise self.error(f"general.alignment is {align!r}, expected a power of two")
        base, total = -(-header // align) * align, self.path.stat().st_size
        found: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in infos:
            try:
                quantization = GGMLQuantizationType(kind)
            except ValueError:
                raise self.error(f"{name} has an unknown type {kind}; a newer gguf package may know it") from None
            block, block_size = GGML_QUANT_SIZES[quantization]
            if shape[-1] % block or offset % align or name in found:
                raise self.error(f"{name} appears twice, is misaligned, or has rows that are not a multiple of {block}")
            size = math.prod(shape) // block * block_size
            if base + offset + size > total:
                raise self.error(f"{name} ends at byte {base + offset + size} of {total}; download it again")
            found[name] = GgufTensor(name, quantization.name, shape, base + offset, size)
        end = 0
        for tensor in sorted(found.values(), key=lambda t: t.start):
            if tensor.start < end:
                raise self.error(f"{tensor.name} overlaps the tensor before it")
            end = tensor.start + tensor.size
        return found

    def info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, rank = self.string(), self.number("<I")
        if not 1 <= rank <= 4:
            raise self.error(f"{name[:80]!r} has {rank} dimensions, expected 1 to 4")
        shape = struct.unpack(f"<{rank}Q", self.take(8 * rank))
        if not all(0 < n <= 1 << 40 for n in shape):
            raise self.error(f"{name[:80]!r} has the shape {shape}")
        return name, tuple(reversed(shape)), self.number("<I"), self.number("<Q")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.number("<I"), self.number("<Q"))
        dtype = self.scalar(kind)
        return np.frombuffer(self.take(dtype.itemsize), dtype)[0].item()

    def array(self, kind: int, count: int) -> Any:
        if kind == _STRING:
            self.expect(count * 8, f"an array of {count} strings")
            if count > _MAX_STRINGS:
                raise self.error(f"an array of {count} strings is more than the {_MAX_STRINGS} read")
            return [self.string() for _ in range(count)]
        dtype = self.scalar(kind)
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def scalar(self, kind: int) -> np.dtype[Any]:
        if kind not in _SCALARS:
            raise self.error(f"unknown value type {kind}")
        return _SCALARS[kind]

    def string(self) -> str:
        length = self.number("<Q")
        if length > _MAX_STRING:
            raise self.error(f"a string of {length} bytes")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self.error("a string is not UTF-8") from None

    def number(self, form: str) -> int:
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def take(self, count: int) -> bytes:
        self.expect(count, f"{count} bytes")
        self.left -= count
        data = self.file.read(count)
        if len(data) != count:
            raise self.error("truncated while being read")
        return data

    def expect(self, count: int, what: str) -> None:
        if count > self.left:
            raise self.error(f"truncated or damaged: {what} announced where {self.left} bytes are left")

    def error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {reason}")
