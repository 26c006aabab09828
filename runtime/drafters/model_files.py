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

#: Longest draft that a manifest may ask for.
MAX_DEPTH = 64


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
        bounds = {"depth": MAX_DEPTH, "slots": 1 << 24, "vocab_size": 1 << 24, "valid_vocab": self.vocab_size}
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
        _vocabulary(bundle, options),
        target.vocab_size,
        depth=options.depth,
        prefill_chunk=target.prefill_chunk,
        name=info.name,
    )


def _vocabulary(bundle: Bundle, options: ModelOptions) -> NDArray[np.int64]:
    count, ids = options.valid_vocab, bundle.manifest.target.valid_vocab
    if options.vocabulary is None:
        return np.arange(min(count, ids), dtype=np.int64)
    name = str(options.vocabulary)
    path = bundle.file(name)
    if (size := bundle.manifest.files[name].bytes) != 4 * count:
        raise BundleError(f"{name} has {size} bytes, expected 4 for each of {count} ids")
    table = np.fromfile(path, "<i4", count).astype(np.int64)
    if len(table) != count or table.min() < -1 or table.max() >= ids:
        raise BundleError(f"{name} is damaged: expected {count} ids from -1 to {ids - 1}")
    return table
