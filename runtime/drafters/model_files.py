"""What a bundle holds of a draft model, checked and loaded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specexport.runtime.bundle import Bundle
from specexport.runtime.drafters.model import ModelDrafter
from specexport.runtime.engine import TargetEngine
from specexport.runtime.errors import BundleError
from specexport.runtime.manifest import DrafterInfo

#: Longest draft that a manifest may ask for, and largest vocabulary of a drafter.
MAX_DEPTH, MAX_ROWS = 64, 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Options of a :class:`~specexport.runtime.manifest.DrafterInfo` of kind ``model``.

    Attributes:
        depth: most tokens of a draft. slots: cache rows, its context. vocab_size: width of a row of its logits.
        valid_vocab: ids below it are drafted; without ``vocabulary`` they are the target's own ids.
        vocabulary: file of the table of ids: little-endian int32 [valid_vocab], the target's id or -1 for none.
        architecture, source, revision, fingerprint: where it came from. cache_bytes: size of its caches.
    """

    depth: int
    slots: int
    vocab_size: int
    valid_vocab: int
    vocabulary: str | None
    architecture: str
    source: str
    revision: str | None
    fingerprint: str
    cache_bytes: int

    def __post_init__(self) -> None:
        bounds = {"depth": MAX_DEPTH, "slots": 1 << 24, "vocab_size": MAX_ROWS, "valid_vocab": self.vocab_size}
        for name, high in bounds.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= high:
                raise BundleError(f"draft model: {name} is {value!r}, expected an integer from 1 to {high}")


def open_model(info: DrafterInfo, bundle: Bundle, engine: TargetEngine) -> ModelDrafter:
    """The draft model of a bundle, on the target's device.

    Raises:
        BundleError: options that are missing or out of bounds, or files that disagree with them.
        TypeError: options that are missing or unknown.
    """
    options = ModelOptions(**info.options)  # type: ignore[arg-type]
    target = bundle.manifest.target
    model = engine.open_target(str(info.graph))
    if (model.vocab_size, model.slots) != (options.vocab_size, options.slots):
        raise BundleError(
            f"{info.graph} has vocabulary {model.vocab_size} and {model.slots} cache rows, expected "
            f"{options.vocab_size} and {options.slots} by the manifest: build the bundle again"
        )
    return ModelDrafter(
        model,
        read_vocabulary(bundle, info.name, options.valid_vocab, options.vocabulary, range(-1, target.valid_vocab)),
        target.vocab_size,
        depth=options.depth,
        prefill_chunk=target.prefill_chunk,
        name=info.name,
    )


def read_vocabulary(bundle: Bundle, drafter: str, rows: object, file: object, ids: range) -> NDArray[np.int64]:
    """int64 [rows]: the target's id of each row of a drafter's vocabulary.

    Args:
        rows, file: as the manifest states them; without a file the ids are the target's own, as far as it has them.
        ids: that a file may hold.

    Raises:
        BundleError: an impossible number of rows, or a file that is missing or damaged.
    """
    if type(rows) is not int or not 1 <= rows <= MAX_ROWS:
        raise BundleError(f"drafter {drafter!r} has {rows!r} rows of vocabulary, expected 1 to {MAX_ROWS}")
    if file is None:
        return np.arange(min(rows, ids.stop), dtype=np.int64)
    name = str(file)
    path = bundle.file(name)
    if (size := bundle.manifest.files[name].bytes) != 4 * rows:
        raise BundleError(f"{name} has {size} bytes, expected 4 for each of {rows} ids")
    table = np.fromfile(path, "<i4", rows).astype(np.int64)
    if len(table) != rows or table.min() < ids.start or table.max() >= ids.stop:
        raise BundleError(f"{name} is damaged: expected {rows} ids from {ids.start} to {ids.stop - 1}")
    return table
