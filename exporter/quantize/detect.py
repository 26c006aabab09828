"""Which quantisation a checkpoint has, by its config: a table of the formats that are read, one of the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specexport.exporter.config_values import text
from specexport.exporter.keys import QUANTIZATION_KEYS, Keys
from specexport.exporter.quantize.awq_checkpoint import read_awq
from specexport.exporter.quantize.compressed_tensors import read_compressed
from specexport.exporter.quantize.fp8_checkpoint import read_fp8
from specexport.exporter.quantize.gptq_checkpoint import read_gptq
from specexport.exporter.quantize.stored import Modules, QuantizedWeights, Reading, check_plain, is_packed
from specexport.exporter.shards import StoredWeights
from specexport.runtime.errors import CheckpointError

#: Files that held it before the config did, and their method.
SIDE_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}

METHODS: Mapping[str, Callable[[Keys, Modules], Reading]] = {
    "gptq": read_gptq,
    "awq": read_awq,
    "compressed-tensors": read_compressed,
    "fp8": read_fp8,
}
#: Methods that are known and not read, and why.
_REFUSED = {
    "bitsandbytes": "its blocks have a code book (NF4, FP4) or outlier columns (int8)",
    "hqq": "its codes have floating-point zero points",
    "eetq": "its layout is that of one GPU kernel",
    "quanto": "its tensors are not a public format",
    "mxfp4": "its scales are powers of two in blocks of 32 experts' inputs (gpt-oss)",
    "modelopt": "its NVFP4 and FP8 exports have scales of scales",
    "aqlm": "it has code books",
    "quip": "it has code books",
    "higgs": "it has code books",
    "vptq": "it has code books",
    "spqr": "it has outliers",
    "torchao": "its tensors are pickled subclasses",
    "auto-round": "its layouts differ by backend; export with format auto_gptq or auto_awq instead",
    "bitnet": "its weights are ternary",
    "fbgemm_fp8": "its activations have an upper bound that the weights rely on",
}


@dataclass(frozen=True, slots=True)
class Opened:
    """The tensors of a checkpoint under their plain names.

    Attributes:
        config: the raw config, with the quantisation in it wherever it was found.
        quantization: in words, None if the checkpoint is not quantised. notes: what a user should know, one line each.
    """

    weights: StoredWeights
    config: dict[str, Any]
    quantization: str | None = None
    notes: tuple[str, ...] = ()


def open_weights(
    config: Mapping[str, Any],
    side_file: Callable[[str], dict[str, Any] | None],
    load: Callable[[], StoredWeights],
    *,
    copied: bool = False,
) -> Opened:
    """Open the weights of a checkpoint, behind what undoes their quantisation if they have one.

    Args:
        config: the raw ``config.json``. side_file: reads a JSON file beside it, None if there is none.
        load: opens the stored tensors.
        copied: the config may be a copy of another model's (a head's of its target's): where no tensor is quantised,
            what it says of quantisation is not believed but noted.

    Raises:
        CheckpointError: a quantisation that is not read, or tensors that it does not explain.
    """
    raw = _find(config, side_file)
    if raw is None:
        weights = load()
        check_plain(weights, list(weights.names()))
        return Opened(weights, dict(config))
    try:
        weights = load()
    except CheckpointError:
        quantization_keys(raw)  # its dtypes may be as foreign as the method: then say that
        raise
    if copied and not is_packed(weights):
        method = text(raw.get("quant_method")) if isinstance(raw, dict) else text(raw)
        note = f"its config says it is quantised by {method}, but no tensor is (a copy of its target's?): read as it is"
        return Opened(weights, dict(config), None, (note,))
    reading = read_quantization(raw, Modules(weights))
    kinds = [kind for kind in ("int4", "int8", "fp8") if kind in reading.words]
    kept = (
        () if copied else (f"{reading.words}: --precision {kinds[0]} keeps its codes, others compute with its values",)
    )
    whole = dict(config) if QUANTIZATION_KEYS & config.keys() else {**config, "quantization_config": raw}
    return Opened(QuantizedWeights(weights, reading), whole, reading.words, (*kept, *reading.notes))


def _find(config: Mapping[str, Any], side_file: Callable[[str], dict[str, Any] | None]) -> Any:
    """The quantisation that a checkpoint says it has, None if none.

    Args:
        side_file: reads a JSON file beside the config, None if there is none.

    Raises:
        CheckpointError: it says so twice.
    """
    found = [config[key] for key in sorted(QUANTIZATION_KEYS) if config.get(key)]
    if len(found) > 1:
        raise CheckpointError("config: both quantization_config and compression_config; remove one")
    if found:
        return found[0]
    sides = {name: value for name in SIDE_FILES if (value := side_file(name)) is not None}
    if len(sides) > 1:
        raise CheckpointError(
            f"both {' and '.join(sides)} beside the config; remove the one that is not of the weights"
        )
    return next(({"quant_method": SIDE_FILES[name], **value} for name, value in sides.items()), None)


def quantization_keys(raw: Any) -> tuple[Keys, str]:
    """The keys of a quantisation, and its method.

    Raises:
        CheckpointError: a method that is not read.
    """
    if not isinstance(raw, dict):
        raise CheckpointError(f"config: quantization_config must be an object, got {text(raw)}")
    keys = Keys(
        raw,
        "config: quantization_config",
        frozenset(),
        "here; it may change the weights, so it is refused: remove it if it has no effect",
    )
    method = keys.string("quant_method")
    if method is None and "config_groups" in keys:
        method = "compressed-tensors"
    name = str(method).lower()
    if name.replace("_", "-") in METHODS:
        return keys, name.replace("_", "-")
    family = next((known for known in _REFUSED if name.startswith(known)), None)
    why = _REFUSED[family] if family else f"expected one of {', '.join(METHODS)}"
    raise CheckpointError(
        f"config: quantised by {text(method)}, which is not read ({why}): use the unquantised checkpoint with "
        f"--precision, or one quantised by {', '.join(METHODS)}, or a GGUF file"
    )


def read_quantization(raw: Any, modules: Modules) -> Reading:
    """Pair the stored tensors of a quantised checkpoint with its matrices; every key of ``raw`` is read.

    Raises:
        CheckpointError: anything that is not understood, missing or contradictory.
    """
    keys, method = quantization_keys(raw)
    reading = METHODS[method](keys, modules)
    keys.finish()
    return reading
