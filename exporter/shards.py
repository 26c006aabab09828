"""Tensors of a Hugging Face directory: safetensors read lazily, or pickles through ``weights_only``.

Safetensors are read with plain file reads, never mapped, so that a tensor that was read and dropped leaves nothing in
the process. Headers are untrusted: every length is checked against the file before anything is allocated.
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Protocol

import torch

from specexport.exporter.weights import WeightSource
from specexport.runtime.errors import CheckpointError

_CHUNK = 1 << 24
_HEADER_LIMIT = 100_000_000  # the reference implementation's
_JSON_LIMIT = 256 << 20

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class StoredWeights(WeightSource, Protocol):
    """A weight source that can also be fingerprinted."""

    def stored(self, name: str) -> tuple[str, Iterator[memoryview]]:
        """Stored dtype, and the stored bytes in pieces."""
        ...

    def headers(self) -> Iterator[bytes]:
        """What identifies the files without reading their data: sizes, and headers where there are any."""
        ...


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies: ``start`` and ``size`` are bytes in ``path``."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def member(directory: Path, name: str) -> Path | None:
    """The regular file ``name`` of a checkpoint directory, or None if there is none.

    Links may lead anywhere inside the directory, and from a hub cache snapshot
    (``models--o--n/snapshots/<revision>``) into the ``blobs`` of that same repository.

    Raises:
        CheckpointError: the name or its link leaves the directory.
    """
    pure = PurePosixPath(name)
    if not name or pure.is_absolute() or ".." in pure.parts or "\\" in name or PureWindowsPath(name).drive:
        raise CheckpointError(f"{directory}: {name!r} is not a plain file name inside the checkpoint")
    path = directory / name
    if not path.is_file():
        return None
    root, target = directory.resolve(), path.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(base) for base in allowed):
        raise CheckpointError(f"{path} links to {target}, outside the checkpoint; copy the file into the directory")
    return target


def read_json(path: Path, limit: int = _JSON_LIMIT) -> dict[str, Any]:
    """The JSON object in ``path``.

    Raises:
        CheckpointError: too large, not JSON, not an object, or a key twice.
    """
    if (size := path.stat().st_size) > limit:
        raise CheckpointError(f"{path.name}: {size} bytes is more than the {limit} expected of such a file")
    return parse_json(path.read_bytes(), str(path))


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    """The JSON object in ``data``; ``where`` names it in errors. Raises as :func:`read_json`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            keys = [key for key, _ in pairs]
            raise ValueError(f"the key {next(k for k in keys if keys.count(k) > 1)!r} appears twice")
        return result

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def read_bytes(path: Path, start: int, size: int) -> torch.Tensor:
    """``size`` bytes of ``path`` from ``start``, as a fresh uint8 tensor. Raises CheckpointError when truncated."""
    data = torch.empty(size, dtype=torch.uint8)
    view, done = data.numpy().data, 0
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while done < size:
            count = file.readinto(view[done : done + _CHUNK])
            if not count:
                raise CheckpointError(f"{path}: truncated, {size - done} bytes are missing at offset {start + done}")
            done += count
    return data


def read_pieces(path: Path, start: int, size: int) -> Iterator[memoryview]:
    """The same bytes in bounded pieces."""
    for offset in range(0, size, _CHUNK):
        yield read_bytes(path, start + offset, min(_CHUNK, size - offset)).numpy().data


def read_header(path: Path) -> tuple[dict[str, Entry], bytes]:
    """Entries of one safetensors file and its raw header.

    Raises:
        CheckpointError: anything the format does not allow, a gap or an overlap between tensors included.
    """
    total = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(total - 8, _HEADER_LIMIT):
            raise CheckpointError(f"{path}: not a safetensors file (header of {length} bytes in a file of {total})")
        raw = file.read(length)
    entries: dict[str, Entry] = {}
    base = 8 + length
    for name, value in parse_json(raw, f"{path} header").items():
        if name != "__metadata__":
            entries[name] = _entry(path, name, value, base)
    end = base
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].size)):
        if entry.start != end:
            raise CheckpointError(f"{path}: {name} starts at byte {entry.start}, expected {end} (a gap or an overlap)")
        end += entry.size
    if end != total:
        raise CheckpointError(f"{path}: tensors end at byte {end} but the file has {total}; download it again")
    return entries, raw


def _entry(path: Path, name: str, value: Any, base: int) -> Entry:
    if not isinstance(value, dict) or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{path}: {name} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(f"{path}: {name} has dtype {str(dtype)[:40]!r}; expected one of {', '.join(DTYPES)}")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or len(numbers) > 8 or not all(type(n) is int and n >= 0 for n in numbers):
            raise CheckpointError(f"{path}: {name} has a bad shape or data_offsets")
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise CheckpointError(f"{path}: {name} of shape {shape} and {dtype} needs {size} bytes, offsets say {offsets}")
    return Entry(path, dtype, tuple(shape), base + offsets[0], size)


class SafetensorsSource:
    """One or more safetensors files as a :class:`StoredWeights`."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._entries: dict[str, Entry] = {}
        self._headers: dict[str, bytes] = {}
        for label, path in files.items():
            entries, self._headers[label] = read_header(path)
            if twice := sorted(entries.keys() & self._entries.keys()):
                raise CheckpointError(f"{path}: {twice[0]} is also in {self._entries[twice[0]].path}")
            self._entries |= entries

    def files(self) -> dict[str, set[str]]:
        """Tensor names by file name."""
        found: dict[str, set[str]] = {}
        for name, entry in self._entries.items():
            found.setdefault(str(entry.path), set()).add(name)
        return found

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def read(self, name: str) -> torch.Tensor:
        entry = self._find(name)
        return read_bytes(entry.path, entry.start, entry.size).view(DTYPES[entry.dtype]).reshape(entry.shape)

    def stored(self, name: str) -> tuple[str, Iterator[memoryview]]:
        entry = self._find(name)
        return entry.dtype, read_pieces(entry.path, entry.start, entry.size)

    def headers(self) -> Iterator[bytes]:
        for label in sorted(self._headers):
            yield self._headers[label]

    def _find(self, name: str) -> Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise CheckpointError(f"the checkpoint has no tensor {name}") from None


class PickleSource:
    """``pytorch_model*.bin`` files, unpickled with ``weights_only`` and mapped one file at a time."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = dict(files)
        self._open: tuple[Path, dict[str, torch.Tensor]] | None = None
        self._where: dict[str, tuple[Path, tuple[int, ...], torch.dtype]] = {}
        for path in files.values():
            for name, tensor in self._load(path).items():
                if name in self._where:
                    raise CheckpointError(f"{path}: {name} is also in {self._where[name][0]}")
                self._where[name] = (path, tuple(tensor.shape), tensor.dtype)

    def files(self) -> dict[str, set[str]]:
        """Tensor names by file name."""
        found: dict[str, set[str]] = {}
        for name, (path, _, _) in self._where.items():
            found.setdefault(str(path), set()).add(name)
        return found

    def names(self) -> list[str]:
        return list(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name)[1]

    def read(self, name: str) -> torch.Tensor:
        # The copy lets go of the mapping, whose pages would count as ours.
        return self._load(self._find(name)[0])[name].detach().clone(memory_format=torch.contiguous_format)

    def stored(self, name: str) -> tuple[str, Iterator[memoryview]]:
        dtype = next((key for key, value in DTYPES.items() if value == self._find(name)[2]), "?")
        return dtype, self._pieces(name)

    def _pieces(self, name: str) -> Iterator[memoryview]:
        data = self.read(name).reshape(-1).view(torch.uint8).numpy()
        for start in range(0, data.size, _CHUNK):
            yield data[start : start + _CHUNK].data

    def headers(self) -> Iterator[bytes]:
        for label in sorted(self._files):
            yield f"{label} {self._files[label].stat().st_size}".encode()

    def _find(self, name: str) -> tuple[Path, tuple[int, ...], torch.dtype]:
        try:
            return self._where[name]
        except KeyError:
            raise CheckpointError(f"the checkpoint has no tensor {name}") from None

    def _load(self, path: Path) -> dict[str, torch.Tensor]:
        if self._open is not None and self._open[0] == path:
            return self._open[1]
        self._open = None
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # a damaged archive can raise anything the unpickler knows
            reason = str(error).split("\n")[0][:120]
            raise CheckpointError(f"{path}: not a safe PyTorch archive ({reason}); convert it to safetensors") from None
        if not isinstance(loaded, dict) or not all(isinstance(k, str) and _plain(v) for k, v in loaded.items()):
            raise CheckpointError(f"{path}: expected a dictionary of names to plain tensors")
        self._open = (path, loaded)
        return loaded


def _plain(value: object) -> bool:
    """Whether ``value`` is a dense tensor whose storage really holds all its elements (an expanded one does not)."""
    return (
        isinstance(value, torch.Tensor)
        and value.layout == torch.strided
        and value.dtype in DTYPES.values()
        and value.numel() * value.itemsize <= value.untyped_storage().nbytes()
    )


def open_shards(directory: Path) -> StoredWeights:
    """The weights of a Hugging Face directory; safetensors win over pickles, one file over an index.

    Raises:
        CheckpointError: no weights, a missing shard, or an index that disagrees with its shards.
    """
    kinds: tuple[tuple[str, type[SafetensorsSource] | type[PickleSource]], ...] = (
        ("model.safetensors", SafetensorsSource),
        ("pytorch_model.bin", PickleSource),
    )
    for name, source in kinds:
        if (single := member(directory, name)) is not None:
            return source({name: single})
        if (index := member(directory, f"{name}.index.json")) is not None:
            return _indexed(directory, index, source)
    hint = next((f"; pass {path} itself" for path in sorted(directory.glob("*.gguf"))), "")
    raise CheckpointError(f"{directory}: no model.safetensors, pytorch_model.bin, or index of either{hint}")


def _indexed(directory: Path, index: Path, source: type[SafetensorsSource] | type[PickleSource]) -> StoredWeights:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map must name the file of each tensor")
    files: dict[str, Path] = {}
    for label in sorted(set(weight_map.values())):
        path = member(directory, label)
        if path is None:
            raise CheckpointError(f"{directory}: the shard {label} is missing; download it again")
        files[label] = path
    weights = source(files)
    held = weights.files()
    for label, path in files.items():
        listed = {name for name, file in weight_map.items() if file == label}
        if wrong := sorted(listed ^ held.get(str(path), set())):
            place = "in the index but not in the file" if wrong[0] in listed else "in the file but not in the index"
            raise CheckpointError(f"{label}: {wrong[0]} is {place}")
    return weights
