"""What all head readers share: consuming every config key and every tensor exactly once, and the opened head.

A reader takes keys from :func:`head_keys` and tensors from :class:`Tensors`; whatever is left when it is done is an
error. So no dialect can be read as another one that it merely resembles.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specexport.exporter.checkpoint import Checkpoint, read_text
from specexport.exporter.config import IGNORABLE
from specexport.exporter.heads.record import HeadLineage, HeadRecord
from specexport.exporter.keys import QUANTIZATION_KEYS
from specexport.exporter.keys import Keys as Keys
from specexport.exporter.quantize.stored import QUANTIZED
from specexport.exporter.shards import StoredWeights, member
from specexport.runtime.acceptance_table import MAX_DEPTH
from specexport.runtime.errors import CheckpointError
from specexport.runtime.records import RecordError, number, sequence

#: What reads as floating point: quantised matrices dequantise.
FLOATS = frozenset({"F64", "F32", "F16", "BF16", QUANTIZED})
INTEGERS = frozenset({"I64", "I32"})
BOOLEANS = frozenset({"BOOL"})

#: Tensors that carry nothing: rotary frequencies saved by old Transformers versions, and the copies of the verifier's
#: norm and lm_head that speculators keeps for its training loss only.
IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq|verifier_(norm|lm_head)\.weight")

#: The object in a head's config.json that settles what its dialect leaves open (written by the user, not by a trainer);
#: ``HEADS?key=value`` puts a key there.
OVERRIDES = "specexport"
#: The object in which our own trainer says what a head was made for; it changes no draft.
TRAINING = "specexport_training"


def head_keys(raw: Mapping[str, Any]) -> Keys:
    """The keys of a head's ``config.json``; its quantisation was read when the files were opened."""
    effect = "for this head; it may change the drafts, so it is refused: remove it if it has no effect"
    return Keys(raw, "config", IGNORABLE | QUANTIZATION_KEYS | {TRAINING}, effect)


Transform = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """Where a canonical tensor comes from: a stored tensor, its canonical shape, and what is done to it."""

    source: str
    shape: tuple[int, ...]
    transform: Transform | None = None


class Tensors:
    """The head's stored tensors; every one must be taken.

    Args:
        renames: prefix of a stored name -> what a dialect's reader calls it.
    """

    def __init__(self, stored: StoredWeights, renames: Mapping[str, str] | None = None) -> None:
        self.stored = stored
        self._names: dict[str, str] = {}
        for name in stored.names():
            old = next((prefix for prefix in renames or {} if name.startswith(prefix)), None)
            mine = name if old is None or renames is None else renames[old] + name.removeprefix(old)
            if mine in self._names:
                raise CheckpointError(f"tensors {self._names[mine]!r} and {name!r} are the same one under two names")
            self._names[mine] = name
        self._taken: set[str] = set()
        self.parts: dict[str, Part] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def names(self) -> Iterator[str]:
        yield from self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises CheckpointError if there is none of that name."""
        if name not in self._names:
            raise CheckpointError(f"tensor {name!r} is missing from the head")
        return self.stored.shape(self._names[name])

    def matrix(self, name: str) -> tuple[int, int]:
        """Shape of a tensor that must have two dimensions."""
        shape = self.shape(name)
        if len(shape) != 2:
            raise CheckpointError(f"tensor {name!r} has shape {list(shape)}; a matrix is expected")
        return shape[0], shape[1]

    def vector(self, name: str) -> int:
        """Length of a tensor that must have one dimension."""
        shape = self.shape(name)
        if len(shape) != 1:
            raise CheckpointError(f"tensor {name!r} has shape {list(shape)}; a vector is expected")
        return shape[0]

    def take(
        self,
        canonical: str,
        name: str,
        shape: tuple[int, ...],
        *,
        why: str = "",
        transform: Transform | None = None,
        out: tuple[int, ...] | None = None,
    ) -> None:
        """Take ``name`` as the canonical tensor ``canonical``.

        Args:
            shape: what the stored tensor must have. ``out``: the shape after ``transform``.
            why: where that shape comes from, for the error.
        """
        if self.shape(name) != shape:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(self.shape(name))}; {why or 'the config'} calls for {list(shape)}"
            )
        self._check(name, FLOATS, "floating point")
        self._taken.add(name)
        self.parts[canonical] = Part(self._names[name], shape if out is None else out, transform)

    def take_copy(self, canonical: str, name: str) -> None:
        """Take ``name``, which must hold what was taken as ``canonical``.

        Raises:
            CheckpointError: it does not.
        """
        part = self.parts[canonical]
        if self.shape(name) != part.shape or not torch.equal(
            self.stored.read(self._names[name]), self.stored.read(part.source)
        ):
            raise CheckpointError(
                f"tensor {self._names[name]!r} differs from {part.source!r}; prediction layers share one {canonical}: "
                "remove a copy if the other is the right one"
            )
        self._taken.add(name)

    def skip(self, name: str) -> None:
        """Take a tensor that the user says is not used."""
        self.shape(name)
        self._taken.add(name)

    def read(self, name: str, kinds: frozenset[str], what: str) -> Tensor:
        """Take a small tensor and read it now (a vocabulary map)."""
        self.vector(name)
        self._check(name, kinds, what)
        self._taken.add(name)
        return self.stored.read(self._names[name])

    def _check(self, name: str, kinds: frozenset[str], what: str) -> None:
        dtype, _ = self.stored.stored(self._names[name])
        if dtype not in kinds:
            raise CheckpointError(f"tensor {name!r} is stored as {dtype}; {what} is expected")

    def finish(self, dialect: str) -> None:
        """Raise CheckpointError for tensors that nobody took."""
        left = sorted(n for n in self._names.keys() - self._taken if not IGNORED.fullmatch(n))
        if left:
            more = "" if len(left) == 1 else f" (and {len(left) - 1} more)"
            raise CheckpointError(
                f"tensor {left[0]!r}{more} is not understood for the {dialect} layout; the head is another dialect, "
                "or the file is not only a head"
            )


class HeadWeights:
    """A :class:`WeightSource` over the canonical names of ``heads.record``, in the stored dtype, read lazily."""

    def __init__(self, stored: StoredWeights, parts: Mapping[str, Part]) -> None:
        self._stored, self._parts = stored, dict(parts)

    def names(self) -> Iterable[str]:
        return list(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def origin(self, name: str) -> str:
        """The stored tensor that ``name`` comes from."""
        return self._find(name).source

    def read(self, name: str) -> Tensor:
        part = self._find(name)
        tensor = self._stored.read(part.source)
        return tensor if part.transform is None else part.transform(tensor)

    def _find(self, name: str) -> Part:
        try:
            return self._parts[name]
        except KeyError:
            raise CheckpointError(f"the head has no tensor {name}") from None


def select_rows(rows: Tensor) -> Transform:
    """A transform that picks rows (the lm_head of a truncated vocabulary)."""
    return lambda tensor: tensor.index_select(0, rows)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a dialect's reader makes of a head; ``warnings`` are one line each."""

    record: HeadRecord
    parts: Mapping[str, Part]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Head:
    """An opened head.

    Attributes:
        source: what the user named. directory: where its files lie. config: its raw ``config.json``.
        record: what it is. weights: its tensors by canonical name.
        warnings: one line each, for people.
    """

    source: str
    directory: Path
    config: dict[str, Any]
    record: HeadRecord
    weights: HeadWeights
    warnings: tuple[str, ...]
    stored: StoredWeights

    def tokenizer(self) -> bytes | None:
        """The head's own ``tokenizer.json``, None where it ships none. Raises CheckpointError if it is too large."""
        path = member(self.directory, "tokenizer.json")
        return None if path is None else read_text(path).encode()

    def agreement(self) -> tuple[float, ...]:
        """How often its first choice was right on held-out text, by depth, as our trainer noted; empty where it is not
        ours. Raises CheckpointError for anything but shares."""
        training = self.config.get(TRAINING)
        held_out = training.get("held_out") if isinstance(training, dict) else None
        found = held_out.get("agreement") if isinstance(held_out, dict) else None
        try:
            return () if found is None else sequence(number(0, 1), MAX_DEPTH)(found, f"{TRAINING}.held_out.agreement")
        except RecordError as error:
            raise CheckpointError(f"{self.source}: config.json: {error}; remove it if it is not known") from None

    def fingerprint(self, *, fast: bool = False) -> str:
        """What this head is: config and every tensor, as :meth:`Checkpoint.fingerprint`."""
        return Checkpoint(self.source, self.directory, "hf", self.config, self.stored).fingerprint(fast=fast)


def lineage(keys: Keys, *names: str) -> HeadLineage:
    """Lineage from the first of ``names`` that is there; all of them are taken."""
    found = [value for name in names if (value := keys.string(name)) is not None]
    return HeadLineage(verifier=found[0] if found else None)


def both(subject: str, first: str, second: str, fix: str) -> CheckpointError:
    """The error for something that can be read in two ways."""
    return CheckpointError(f"{subject} has two readings: {first}, or {second}; {fix}")
