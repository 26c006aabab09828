"""Where a head's files are: a directory, one weights file, or a hub id."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from specexport.exporter.checkpoint import HUB_ID, WEIGHTS, download, side_file
from specexport.exporter.quantize.detect import open_weights
from specexport.exporter.quantize.record import Quantized, QuantizedSource
from specexport.exporter.shards import PickleSource, SafetensorsSource, StoredWeights, member, open_shards
from specexport.runtime.errors import CheckpointError, UsageError

#: Weights of a Medusa head by itself; safetensors win over the pickle.
LONE: tuple[tuple[str, type[SafetensorsSource] | type[PickleSource]], ...] = (
    ("medusa_lm_head.safetensors", SafetensorsSource),
    ("medusa_lm_head.pt", PickleSource),
)
_COMMON = ("model.safetensors", "pytorch_model.bin", "model.safetensors.index.json", "pytorch_model.bin.index.json")
_SUFFIXES: dict[str, type[SafetensorsSource] | type[PickleSource]] = {
    ".safetensors": SafetensorsSource,
    ".pt": PickleSource,
    ".bin": PickleSource,
}


@dataclass(frozen=True, slots=True)
class HeadFiles:
    """The files of a head: raw config (None: there is no config.json), its tensors (dequantised where it is quantised
    itself; its target's quantisation is not its own) and what to tell the user of them."""

    source: str
    directory: Path
    config: dict[str, Any] | None
    weights: StoredWeights
    notes: tuple[str, ...] = ()


def split_overrides(source: str) -> tuple[str, dict[str, Any]]:
    """``SOURCE?key=value&key=value`` -> the source, and values: true, false, comma-separated numbers as a list, text.

    Raises:
        UsageError: a part that is no ``key=value``.
    """
    head, mark, tail = source.rpartition("?")
    if not mark or Path(source).expanduser().exists():
        return source, {}
    values: dict[str, Any] = {}
    for part in tail.split("&"):
        key, equals, value = part.partition("=")
        if not equals or not key.isidentifier() or not value or key in values:
            raise UsageError(f"{source}: {part!r} is not one key=value, such as HEADS?feedback=raw&captures=2,16,29")
        if re.fullmatch(r"-?[0-9]{1,6}(,-?[0-9]{1,6})*", value):
            values[key] = [int(item) for item in value.split(",")]
        else:
            values[key] = {"true": True, "false": False}.get(value, value)
    return head, values


def looks_like_head(path: Path) -> bool:
    """Whether ``path`` is a weights file, or a directory with weights and no bundle in it."""
    if path.is_file():
        return path.suffix in _SUFFIXES
    names = (*_COMMON, *(name for name, _ in LONE))
    return path.is_dir() and not (path / "manifest.json").exists() and any((path / name).is_file() for name in names)


def open_files(source: str, *, revision: str | None = None, offline: bool = False) -> HeadFiles:
    """Open a directory, a weights file or a hub id.

    Raises:
        CheckpointError: nothing there, two sets of weights, or files that are damaged or hostile.
    """
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix not in _SUFFIXES:
            raise CheckpointError(
                f"{source}: expected a directory, a hub id such as org/name, or a {', '.join(_SUFFIXES)} file"
            )
        kind = _SUFFIXES[path.suffix]
        return _open(source, path.parent, lambda: kind({path.name: path.resolve()}))
    if not path.is_dir():
        if not HUB_ID.fullmatch(source):
            raise CheckpointError(f"{source}: no such file or directory, and not a hub id such as org/name")
        path = download(source, revision, offline, (*WEIGHTS, "medusa_lm_head.*"))
    return _open(source, path, partial(_weights, path))


def _open(source: str, directory: Path, load: Callable[[], StoredWeights]) -> HeadFiles:
    config = side_file(directory, "config.json")
    opened = open_weights(config or {}, partial(side_file, directory), load, copied=True)
    return HeadFiles(source, directory, config and opened.config, opened.weights, opened.notes)


def _weights(directory: Path) -> StoredWeights:
    common = [name for name in _COMMON if member(directory, name) is not None]
    for name, kind in LONE:
        if (path := member(directory, name)) is not None:
            if common:
                raise CheckpointError(
                    f"{directory}: holds both {name} and {common[0]}; pass the file of the head itself"
                )
            return kind({name: path})
    if not common:
        raise CheckpointError(
            f"{directory}: no weights; expected model.safetensors, pytorch_model.bin, an index of either, "
            "medusa_lm_head.safetensors or medusa_lm_head.pt"
        )
    return open_shards(directory)


class Subset:
    """The tensors of a :class:`StoredWeights` that ``keep`` accepts, themselves a :class:`StoredWeights`."""

    def __init__(self, inner: StoredWeights, keep: Callable[[str], bool]) -> None:
        self._inner = inner
        self._names = [name for name in inner.names() if keep(name)]
        self._set = set(self._names)

    def names(self) -> list[str]:
        return list(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(self._find(name))

    def read(self, name: str) -> Any:
        return self._inner.read(self._find(name))

    def quantized(self, name: str) -> Quantized | None:
        return self._inner.quantized(self._find(name)) if isinstance(self._inner, QuantizedSource) else None

    def stored(self, name: str) -> tuple[str, Iterator[memoryview]]:
        return self._inner.stored(self._find(name))

    def headers(self) -> Iterator[bytes]:
        yield from self._inner.headers()

    def _find(self, name: str) -> str:
        if name not in self._set:
            raise CheckpointError(f"the checkpoint has no tensor {name}")
        return name
