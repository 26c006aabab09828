"""Where a head's files are: a directory, one weights file, or a hub id."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specexport.exporter.checkpoint import HUB_ID, WEIGHTS, download
from specexport.exporter.shards import PickleSource, SafetensorsSource, StoredWeights, member, open_shards, read_json
from specexport.runtime.errors import CheckpointError

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
    """The files of a head: raw config (None: there is no config.json) and stored tensors."""

    source: str
    directory: Path
    config: dict[str, Any] | None
    weights: StoredWeights


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
        return HeadFiles(source, path.parent, _config(path.parent), _SUFFIXES[path.suffix]({path.name: path.resolve()}))
    if not path.is_dir():
        if not HUB_ID.fullmatch(source):
            raise CheckpointError(f"{source}: no such file or directory, and not a hub id such as org/name")
        path = download(source, revision, offline, (*WEIGHTS, "medusa_lm_head.*"))
    return HeadFiles(source, path, _config(path), _weights(path))


def _config(directory: Path) -> dict[str, Any] | None:
    path = member(directory, "config.json")
    return None if path is None else read_json(path)


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

    def stored(self, name: str) -> tuple[str, Iterator[memoryview]]:
        return self._inner.stored(self._find(name))

    def headers(self) -> Iterator[bytes]:
        yield from self._inner.headers()

    def _find(self, name: str) -> str:
        if name not in self._set:
            raise CheckpointError(f"the checkpoint has no tensor {name}")
        return name
