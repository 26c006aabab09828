"""A corpus on disk: sequences of tokens, which of them to learn, and the target's states, in memory-mapped shards.

``<directory>/settings.json`` says what made it; ``NNNNN.safetensors`` hold, for n sequences of N tokens in all:

* ``tokens`` int32 [N], sequences one after another; ``starts`` int64 [n + 1];
* ``learn`` uint8 [N]: 1 where the target (or an assistant) wrote the token;
* ``features`` bfloat16 [N, F]: the captures at each token, side by side (the last token's are zero: it was never fed).

A shard is written under another name and renamed, so it exists whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specexport.runtime.errors import CheckpointError
from specexport.runtime.replacing import new_file, replace_text

SETTINGS = "settings.json"


@dataclass(frozen=True, slots=True)
class Example:
    """One training sequence: ``tokens`` int64 [L], ``learn`` bool [L], ``features`` [L, F] (the last row is zero)."""

    tokens: Tensor
    learn: Tensor
    features: Tensor


def write_shard(path: Path, sequences: Sequence[Example], dtype: torch.dtype = torch.bfloat16) -> None:
    """Write sequences as one shard, features in ``dtype``."""
    lengths = torch.tensor([0, *(len(s.tokens) for s in sequences)])
    tensors = {
        "tokens": torch.cat([s.tokens for s in sequences]).to(torch.int32),
        "starts": lengths.cumsum(0),
        "learn": torch.cat([s.learn for s in sequences]).to(torch.uint8),
        "features": torch.cat([s.features for s in sequences]).to(dtype),
    }
    with new_file(path) as temporary:
        save_file(tensors, temporary)


class Corpus:
    """The shards of a directory, read lazily; sequences are numbered through all of them.

    Raises:
        CheckpointError: a damaged shard, or none.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._shards: list[tuple[Path, Tensor]] = []
        self._index: list[tuple[int, int]] = []
        for path in sorted(directory.glob("[0-9]*.safetensors")):
            try:
                with safe_open(path, "pt") as file:
                    starts, rows = file.get_tensor("starts"), file.get_slice("features").get_shape()[0]
            except SafetensorError as error:
                raise CheckpointError(f"{path}: not a shard of a corpus ({error}); remove it to make it anew") from None
            if len(starts) < 2 or int(starts[-1]) != rows:
                raise CheckpointError(f"{path}: not a shard of a corpus; remove it to make it anew")
            self._index += [(len(self._shards), i) for i in range(len(starts) - 1)]
            self._shards.append((path, starts))
        if not self._index:
            raise CheckpointError(f"{directory}: holds no shard of a corpus")

    def __len__(self) -> int:
        return len(self._index)

    def lengths(self) -> list[int]:
        """Tokens of each sequence."""
        return [int(self._shards[s][1][i + 1] - self._shards[s][1][i]) for s, i in self._index]

    def learned(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens int64 and learn bool of each shard, flat: for counting."""
        for path, _ in self._shards:
            with safe_open(path, "pt") as file:
                yield file.get_tensor("tokens").long(), file.get_tensor("learn").bool()

    def __getitem__(self, index: int) -> Example:
        shard, place = self._index[index]
        path, starts = self._shards[shard]
        begin, end = int(starts[place]), int(starts[place + 1])
        with safe_open(path, "pt") as file:
            tokens, learn, features = (file.get_slice(name)[begin:end] for name in ("tokens", "learn", "features"))
        return Example(tokens.long(), learn.bool(), features)


def open_directory(directory: Path, settings: Mapping[str, Any]) -> None:
    """Make ``directory`` for a corpus of these settings, or check that it is one of them.

    Raises:
        CheckpointError: it was made with other settings.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / SETTINGS
    wanted = json.loads(json.dumps(settings))
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        changed = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
        if changed:
            raise CheckpointError(
                f"{directory}: made with {changed[0]} = {found.get(changed[0])!r}, now it is "
                f"{wanted.get(changed[0])!r}: name another --work directory, or remove it"
            )
    else:
        replace_text(path, json.dumps(wanted, indent=1) + "\n")
