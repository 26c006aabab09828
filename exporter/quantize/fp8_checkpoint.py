"""Checkpoints in 8-bit floating point (E4M3): ``quant_method: fp8``.

Stored for a matrix [out, in]: ``weight`` float8_e4m3fn [out, in], and either ``weight_scale_inv`` float
[ceil(out/r), ceil(in/c)] for tiles of ``weight_block_size: [r, c]`` (DeepSeek-V3, Qwen3-FP8), or one scale of the whole
matrix. ``value = weight * scale`` (the name ``scale_inv`` says that weights were divided by it). How activations are
quantised is the other part of these configs; here they are not.
Sources: https://arxiv.org/abs/2412.19437; Transformers' ``FP8Linear``, vLLM's ``Fp8LinearMethod``.
"""

from __future__ import annotations

from functools import partial

from specexport.exporter.config_values import text
from specexport.exporter.keys import Keys
from specexport.exporter.quantize.packing import check_finite, per_row, tiled
from specexport.exporter.quantize.record import Quantized
from specexport.exporter.quantize.stored import SCALES, Modules, Packed, Reading, by_default, check_coverage, excluded
from specexport.runtime.errors import CheckpointError

#: Said where a checkpoint would quantise activations too.
ACTIVATIONS = (
    "the checkpoint also quantises activations; only its weights are, as stored: results are those of exact activations"
)
_WEIGHT, _TILES = frozenset({"weight"}), frozenset({"weight_scale_inv"})
_SCALE = frozenset({"weight_scale", "weight_scale_inv"})
_STATIC = frozenset({"input_scale", "activation_scale"})


def read_fp8(keys: Keys, modules: Modules) -> Reading:
    """Pair tensors with matrices."""
    keys.fixed("fmt", "e4m3", "float8_e4m3fn", None)
    keys.fixed("dequantize", False)
    scheme = keys.string("activation_scheme") or "dynamic"
    if scheme not in ("dynamic", "static"):
        raise CheckpointError(f"{keys.where}: activation_scheme is {text(scheme)}; expected dynamic or static")
    tile = keys.integers("weight_block_size", 1, 1 << 16)
    if tile is not None and (len(tile) != 2 or scheme == "static"):
        raise CheckpointError(
            f"{keys.where}: weight_block_size must be [rows, inputs], with dynamic activations; got {text(list(tile))}"
        )
    skipped = keys.strings("modules_to_not_convert", "ignored_layers")
    keys.fixed("kv_cache_scheme", None)
    keys.ignore("quant_method", "scale_fmt")

    def expected(module: str) -> bool | None:
        skip = excluded(module, skipped)
        return by_default(module) if skip is False else None if skip is None else False

    marked = {module for module in modules.leaves if _is_fp8(modules, module)} | set(modules.holding(_SCALE | _STATIC))
    found = {module: _pair(modules, module, tile, scheme == "static") for module in sorted(marked)}
    check_coverage(modules, found.keys(), expected)
    scales = "a scale a matrix" if tile is None else f"a scale for {tile[0]} x {tile[1]} weights"
    return Reading(f"fp8 (E4M3) with {scales}", found, (ACTIVATIONS,))


def _is_fp8(modules: Modules, module: str) -> bool:
    return "weight" in modules.leaves[module] and modules.dtype(f"{module}.weight").startswith("F8")


def _pair(modules: Modules, module: str, tile: tuple[int, ...] | None, static: bool) -> Packed:
    leaves = modules.leaves[module]
    scale = _TILES if tile is not None else (leaves & _SCALE or frozenset({"weight_scale"}))
    needed = _WEIGHT | scale | ((leaves & _STATIC or frozenset({"input_scale"})) if static else frozenset())
    parts = modules.parts(module, needed)
    out, width = modules.shape(f"{module}.weight")
    modules.check(f"{module}.weight", {"F8_E4M3"})
    for part in parts:
        kind = part.rpartition(".")[2]
        if kind in _STATIC or (kind in _SCALE and tile is None):
            modules.check(part, SCALES, (), (1,), (1, 1))
        elif kind in _SCALE and tile is not None:
            modules.check(part, SCALES, (-(-out // tile[0]), -(-width // tile[1])))
    return Packed((out, width), parts, partial(load_fp8, modules, module, min(scale), tile))


def load_fp8(modules: Modules, module: str, scale: str, tile: tuple[int, ...] | None) -> Quantized:
    """The record of an fp8 matrix: one scale, one a row or one a tile, stored as ``scale``.

    Raises:
        CheckpointError: a weight or scale that is not a finite number.
    """
    codes = modules.read(f"{module}.weight")
    scales = modules.read(f"{module}.{scale}")
    check_finite(module, scales)
    if bool(codes.float().isnan().any()):
        raise CheckpointError(f"{module}: a weight is not a number; the checkpoint is damaged, download it again")
    out, width = codes.shape
    rows = per_row(scales, out) if tile is None else tiled(scales, tile[0], out)
    block = width if tile is None else min(tile[1], width)
    return Quantized(8, codes, rows.contiguous(), None, block)
