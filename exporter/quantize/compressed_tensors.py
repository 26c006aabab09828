"""Checkpoints of compressed-tensors (llm-compressor, vLLM): integers packed or one a byte, and fp8.

Stored for a matrix [out, in] with groups of ``g`` inputs, one group a row, or one scale a matrix:

    pack-quantized: weight_packed int32 [out, ceil(in b/32)], codes plus 2^(b-1), the lowest bits first;
                    weight_shape int64 [2]; weight_zero_point int32 [ceil(out b/32), groups], packed along the outputs
                    (int8 [out, groups] from older versions); weight_g_idx int32 [in] with actorder "group"
    int-quantized, naive-quantized, float-quantized:
                    weight int8 or float8_e4m3fn [out, in]; weight_zero_point [out, groups]
    all:            weight_scale float [out, groups], [out, 1] or [1]; tiles for strategy "block"

``value = (code - zero) * scale``. Source: the compressors of https://github.com/vllm-project/compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from specexport.exporter.config_values import integer, text
from specexport.exporter.keys import Keys
from specexport.exporter.quantize.fp8_checkpoint import ACTIVATIONS, load_fp8
from specexport.exporter.quantize.names import pattern
from specexport.exporter.quantize.packing import check_finite, group_order, per_row, signed, unpack
from specexport.exporter.quantize.record import Quantized
from specexport.exporter.quantize.stored import SCALES, Modules, Packed, Reading, check_coverage
from specexport.runtime.errors import CheckpointError

#: Formats that are read, and the kind of number each holds.
_FORMATS = {
    "pack-quantized": ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}
_STRATEGIES = ("tensor", "channel", "group", "block")
_SCALE = frozenset({"weight_scale"})
_PACKED = frozenset({"weight_packed", "weight_shape"})
_ZERO = frozenset({"weight_zero_point"})
_ACTIVATIONS = ("input", "output")
_MARKS = frozenset({*_SCALE, *_PACKED, *_ZERO, "weight_g_idx", "input_scale", "input_zero_point"})
_CACHE_NOTE = "the checkpoint also quantises the KV cache; here the cache has the precision that the build is given"
#: Modules of this class are what ``targets`` select; nothing else is quantised in a language model.
_CLASS = "Linear"


@dataclass(frozen=True, slots=True)
class _Scheme:
    """How the matrices of one config group are stored; ``group`` -1: all inputs, ``tile``: rows and inputs,
    ``activations``: which of them (``input``, ``output``) have a fixed scale."""

    packed: bool
    kind: str
    bits: int
    symmetric: bool
    strategy: str
    group: int = -1
    tile: tuple[int, ...] | None = None
    act_order: bool = False
    activations: tuple[str, ...] = ()

    def words(self) -> str:
        number = "fp8 (E4M3)" if self.kind == "float" else f"{'' if self.symmetric else 'a'}symmetric int{self.bits}"
        where = {
            "tensor": "with a scale a matrix",
            "channel": "with a scale a row",
            "group": f"in groups of {self.group}",
            "block": f"with a scale for {self.tile[0]} x {self.tile[1]} weights" if self.tile else "",
        }[self.strategy]
        return f"{number} {where}" + (" in act-order" if self.act_order else "")


def read_compressed(keys: Keys, modules: Modules) -> Reading:
    """Pair tensors with matrices."""
    overall = keys.string("format")
    keys.fixed("quantization_status", "compressed", "frozen")
    cache = keys.take("kv_cache_scheme") is not None
    keys.fixed("sparsity_config", None, {})
    keys.fixed("moe_sparsity_config", None, {})
    keys.fixed("transform_config", None, {})
    keys.ignore("quant_method", "global_compression_ratio", "version", "run_compressed")
    ignored = [_matcher(name) for name in keys.strings("ignore")]
    groups = keys.object("config_groups")
    if groups is None or not groups.raw:
        raise CheckpointError(f"{keys.where}: config_groups is missing; nothing says how weights are quantised")
    targets: list[tuple[tuple[int, str], Callable[[str], Any], _Scheme]] = []
    activations = False
    for name in groups.raw:
        group = groups.object(name)
        if group is None:
            raise CheckpointError(f"{groups.where}: {text(name)} is empty")
        scheme, more = _scheme(group, overall)
        activations = activations or more
        targets += [(_rank(target), _matcher(target), scheme) for target in group.strings("targets")]
        group.finish()
    groups.finish()
    targets.sort(key=lambda one: one[0])  # names before patterns before classes, as the library matches

    def scheme_of(module: str) -> _Scheme | None:
        if any(match(module) for match in ignored):
            return None
        return next((scheme for _, match, scheme in targets if match(module)), None)

    marked = {module for module in modules.leaves if _is_codes(modules, module)} | set(modules.holding(_MARKS))
    found: dict[str, Packed] = {}
    used: set[str] = set()
    for module in sorted(marked):
        own = scheme_of(module)
        if own is None:
            raise CheckpointError(f"{module} is quantised although quantization_config excludes it")
        found[module] = _pair(modules, module, own, cache)
        used.add(own.words())
    check_coverage(modules, found.keys(), lambda module: scheme_of(module) is not None)
    notes = (*((ACTIVATIONS,) if activations else ()), *((_CACHE_NOTE,) if cache else ()))
    return Reading(f"compressed-tensors, {', '.join(sorted(used))}", found, notes)


def _rank(target: str) -> tuple[int, str]:
    return 2 if target == _CLASS else 1 if target.startswith("re:") else 0, target


def _matcher(target: str) -> Callable[[str], Any]:
    if target.startswith("re:"):
        return pattern(target.removeprefix("re:"), "a target or ignore list")
    if target == _CLASS:
        return lambda module: not module.endswith("embed_tokens")
    return target.__eq__


def _is_codes(modules: Modules, module: str) -> bool:
    return "weight" in modules.leaves[module] and modules.dtype(f"{module}.weight") in ("I8", "F8_E4M3", "F8_E5M2")


def _scheme(group: Keys, overall: str | None) -> tuple[_Scheme, bool]:
    """One config group, and whether it quantises activations too."""
    layout = group.string("format") or overall
    if layout not in _FORMATS:
        raise CheckpointError(
            f"{group.where}: the format {text(layout)} is not read; expected one of {', '.join(_FORMATS)}"
        )
    weights = group.object("weights")
    if weights is None:
        raise CheckpointError(f"{group.where}: weights is missing; only activations would be quantised")
    both = {kind: group.object(f"{kind}_activations") for kind in _ACTIVATIONS}
    static = [kind for kind, one in both.items() if one is not None and one.take("dynamic", False) is False]
    kind = weights.string("type") or "int"
    if kind not in _FORMATS[layout]:
        raise CheckpointError(f"{weights.where}: type is {text(kind)}; {layout} holds {' or '.join(_FORMATS[layout])}")
    bits = integer("num_bits", weights.need("num_bits"), 1, 16)
    if bits not in ((8,) if kind == "float" else (4, 8)):
        raise CheckpointError(f"{weights.where}: num_bits is {bits}; int of 4 or 8 bits and float of 8 are read")
    symmetric = weights.boolean("symmetric", True)
    if kind == "float" and not symmetric:
        raise CheckpointError(f"{weights.where}: symmetric is false; expected true for floating point")
    size = weights.take("group_size")
    tile = weights.integers("block_structure", 1, 1 << 16)
    strategy = weights.string("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy not in _STRATEGIES or (strategy == "block") != (tile is not None):
        raise CheckpointError(
            f"{weights.where}: strategy {text(strategy)} with block_structure {text(tile)} is not read; expected one "
            f"of {', '.join(_STRATEGIES)}, the last with a block_structure"
        )
    if strategy == "block" and (kind == "int" or tile is None or len(tile) != 2):
        raise CheckpointError(f"{weights.where}: strategy block is read for fp8 and two sizes; got {text(tile)}")
    if strategy == "group":
        size = integer("group_size", size, 1, 1 << 16)
    elif size not in (None, -1, 0):
        raise CheckpointError(f"{weights.where}: group_size is {text(size)} although the strategy is {strategy}")
    order = weights.take("actorder")
    if order not in (None, False, True, "group", "dynamic", "weight", "static"):
        raise CheckpointError(f"{weights.where}: actorder is {text(order)}; expected group, weight, static or null")
    weights.fixed("dynamic", False)
    weights.ignore("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    weights.finish()
    scheme = _Scheme(
        packed=layout == "pack-quantized",
        kind=kind,
        bits=bits,
        symmetric=symmetric,
        strategy=strategy,
        group=size if strategy == "group" else -1,
        tile=tile,
        act_order=order in (True, "group", "dynamic"),
        activations=tuple(static),
    )
    if scheme.act_order and (strategy != "group" or kind == "float"):
        raise CheckpointError(f"{weights.where}: actorder {text(order)} needs integers in groups")
    return scheme, any(both.values())


def _cache_scales(modules: Modules, module: str) -> tuple[str, ...]:
    """Scales of the cache that belong to a projection of keys or values: beside it, or in it (older versions)."""
    parent, _, leaf = module.rpartition(".")
    if leaf not in ("k_proj", "v_proj"):
        return ()
    beside = [f"{leaf[0]}_scale", f"{leaf[0]}_zero_point"]
    parts = [f"{parent}.{kind}" for kind in beside if kind in modules.leaves.get(parent, ())]
    parts += [f"{module}.{kind}" for kind in ("output_scale", "output_zero_point") if kind in modules.leaves[module]]
    if not any(part.endswith("_scale") for part in parts):
        raise CheckpointError(f"{parent} has no {beside[0]} although quantization_config has a kv_cache_scheme")
    for part in parts:
        modules.check(part, SCALES | {"I8", "F8_E4M3"}, (), (1,), (1, 1))
    return tuple(parts)


def _pair(modules: Modules, module: str, scheme: _Scheme, cache: bool) -> Packed:
    needed = (_PACKED if scheme.packed else frozenset({"weight"})) | _SCALE
    needed |= frozenset() if scheme.symmetric else _ZERO
    needed |= frozenset({"weight_g_idx"}) if scheme.act_order else frozenset()
    needed |= {f"{kind}_scale" for kind in scheme.activations}
    cached = _cache_scales(modules, module) if cache else ()
    optional = {f"{kind}_zero_point" for kind in scheme.activations} | {name.rpartition(".")[2] for name in cached}
    # Older versions also store the zero points of symmetric weights.
    parts = tuple(dict.fromkeys((*modules.parts(module, needed, _ZERO | optional), *cached)))
    for kind in scheme.activations:
        modules.check(f"{module}.{kind}_scale", SCALES, (), (1,), (1, 1))
    if scheme.packed:
        modules.check(f"{module}.weight_shape", {"I64", "I32"}, (2,))
        out, width = (int(size) for size in modules.read(f"{module}.weight_shape"))
        words = modules.shape(f"{module}.weight_packed")
        if words != (out, -(-width * scheme.bits // 32)):
            raise CheckpointError(f"{module}: weight_shape is {[out, width]} but weight_packed {list(words)}")
        modules.check(f"{module}.weight_packed", {"I32"})
    else:
        out, width = modules.shape(f"{module}.weight")
        modules.check(f"{module}.weight", {"F8_E4M3" if scheme.kind == "float" else "I8"})
    block = scheme.group if scheme.strategy == "group" else width
    groups = -(-width // block)
    by_strategy: dict[str, list[tuple[int, ...]]] = {
        "tensor": [(), (1,), (1, 1)],
        "channel": [(out, 1), (out,)],
        "group": [(out, groups)],
        "block": [(-(-out // scheme.tile[0]), -(-width // scheme.tile[1]))] if scheme.tile else [],
    }
    shapes = by_strategy[scheme.strategy]
    modules.check(f"{module}.weight_scale", SCALES, *shapes)
    if f"{module}.weight_zero_point" in parts:
        packed = scheme.packed and modules.dtype(f"{module}.weight_zero_point") == "I32"
        if packed:
            shapes = [(-(-out * scheme.bits // 32), groups)]
        dtypes = {"I32"} if packed else {"I8"} if scheme.kind == "int" else {"I8", "F8_E4M3"}
        modules.check(f"{module}.weight_zero_point", dtypes, *shapes)
    if f"{module}.weight_g_idx" in parts:
        modules.check(f"{module}.weight_g_idx", {"I32"}, (width,))
    return Packed((out, width), parts, partial(_load, modules, module, scheme, (out, width), min(block, width)))


def _load(modules: Modules, module: str, scheme: _Scheme, shape: tuple[int, int], block: int) -> Quantized:
    out, width = shape
    zeros = _zeros(modules, module, scheme, out)
    if scheme.symmetric and zeros is not None and bool(zeros.float().any()):
        raise CheckpointError(f"{module}: weight_zero_point is not zero although the weights are symmetric")
    if scheme.kind == "float":
        return load_fp8(modules, module, "weight_scale", scheme.tile)
    scales = per_row(modules.read(f"{module}.weight_scale"), out)
    check_finite(module, scales)
    if not scheme.packed:
        codes = modules.read(f"{module}.weight")
    else:
        codes = signed(unpack(modules.read(f"{module}.weight_packed"), scheme.bits)[:, :width], scheme.bits)
    top = (1 << (scheme.bits - 1)) - 1
    for what, values in (("weight", codes), ("zero point", zeros)):
        if values is not None and (int(values.max()) > top or int(values.min()) < -top - 1):
            raise CheckpointError(f"{module}: a {what} is outside of the {-top - 1} to {top} of {scheme.bits} bits")
    order = None
    if scheme.act_order:
        order = group_order(module, modules.read(f"{module}.weight_g_idx"), block)
        codes = codes if order is None else codes[:, order]
    zeros = None if scheme.symmetric or zeros is None or not bool(zeros.any()) else zeros
    return Quantized(scheme.bits, codes.contiguous(), scales.contiguous(), zeros, block, order)


def _zeros(modules: Modules, module: str, scheme: _Scheme, out: int) -> torch.Tensor | None:
    """Zero points [out, groups] as signed codes, None where none are stored."""
    name = f"{module}.weight_zero_point"
    if "weight_zero_point" not in modules.leaves[module]:
        return None
    stored = modules.read(name)
    if stored.dtype == torch.int32:
        stored = signed(unpack(stored.t(), scheme.bits).t()[:out], scheme.bits)
    return per_row(stored, out).contiguous()
