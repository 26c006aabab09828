"""Checkpoints quantised by AWQ, as AutoAWQ writes them: 4 bits, in two layouts of a matrix [out, in].

    gemm: qweight int32 [in, out/8], qzeros int32 [in/g, out/8], scales [in/g, out]; eight outputs a word, of which
          place i holds output 0 2 4 6 1 3 5 7 [i]
    gemv: qweight int32 [out, in/8], qzeros int32 [out, n], scales [out, 8 n]; eight inputs (or groups) a word in order,
          n words for in/g groups, the rest of the row unused

``value = (code - zero) * scale``; the activations' scales are folded into the weights before them.
Sources: https://arxiv.org/abs/2306.00978; AutoAWQ's ``WQLinear_GEMM`` and ``WQLinear_GEMV``.
"""

from __future__ import annotations

from functools import partial

from specexport.exporter.config_values import integer, text
from specexport.exporter.keys import Keys
from specexport.exporter.quantize.packing import quantized, unpack
from specexport.exporter.quantize.record import Quantized
from specexport.exporter.quantize.stored import (
    AUTOROUND,
    SCALES,
    Modules,
    Packed,
    Reading,
    by_default,
    check_coverage,
    excluded,
)
from specexport.runtime.errors import CheckpointError

#: Codes in a word.
PER_WORD = 8
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_NEEDED = frozenset({"qweight", "qzeros", "scales"})


def read_awq(keys: Keys, modules: Modules) -> Reading:
    """Pair tensors with matrices."""
    bits = keys.take("bits", keys.take("w_bit"))
    if bits != 4:
        raise CheckpointError(f"{keys.where}: bits is {text(bits)}; AWQ checkpoints of 4 bits are read")
    size = keys.take("group_size", keys.take("q_group_size"))
    group = -1 if size == -1 else integer("group_size", size, 8, 1 << 16)
    zero_point = keys.boolean("zero_point", True)
    layout = str(keys.string("version") or "gemm").lower()
    if layout not in ("gemm", "gemv"):
        raise CheckpointError(f"{keys.where}: version is {text(layout)}; AWQ checkpoints of gemm and gemv are read")
    keys.fixed("backend", "autoawq", None)
    skipped = keys.strings("modules_to_not_convert")
    keys.ignore("quant_method", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", *AUTOROUND)
    keys.fixed("data_type", "int", None)
    if keys.flag("sym") is zero_point:
        raise CheckpointError(f"{keys.where}: sym and zero_point are both {zero_point}; one contradicts the other")

    def expected(module: str) -> bool | None:
        skip = excluded(module, skipped)
        return by_default(module) if skip is False else None if skip is None else False

    found = {module: _pair(modules, module, group, zero_point, layout) for module in modules.holding(_NEEDED)}
    check_coverage(modules, found.keys(), expected)
    kind = "asymmetric" if zero_point else "symmetric"
    groups = "rows" if group == -1 else f"groups of {group}"
    return Reading(f"AWQ {kind} int4 in {groups} ({layout} layout)", found)


def _pair(modules: Modules, module: str, group: int, zero_point: bool, layout: str) -> Packed:
    parts = modules.parts(module, _NEEDED)
    rows, words = modules.shape(f"{module}.qweight")
    width, out = (rows, words * PER_WORD) if layout == "gemm" else (words * PER_WORD, rows)
    block = width if group == -1 else group
    if width % block:
        raise CheckpointError(f"{module}: {width} inputs are not a multiple of the group size {block}")
    groups = width // block
    modules.check(f"{module}.qweight", {"I32"})
    if layout == "gemm":
        modules.check(f"{module}.qzeros", {"I32"}, (groups, words))
        modules.check(f"{module}.scales", SCALES, (groups, out))
    else:
        padded = -(-groups // PER_WORD)
        multiple = max(1, min(4, 128 // block))  # a kernel's alignment
        padded = -(-padded // multiple) * multiple
        modules.check(f"{module}.qzeros", {"I32"}, (out, padded))
        modules.check(f"{module}.scales", SCALES, (out, padded * PER_WORD))
    return Packed((out, width), parts, partial(_load, modules, module, block, groups, zero_point, layout))


def _load(modules: Modules, module: str, block: int, groups: int, zero_point: bool, layout: str) -> Quantized:
    words, zero_words, scales = (modules.read(f"{module}.{kind}") for kind in ("qweight", "qzeros", "scales"))
    if layout == "gemm":
        codes, zeros = unpack(words, 4, _ORDER).t(), unpack(zero_words, 4, _ORDER).t()
        scales = scales.t()
    else:
        codes, zeros, scales = unpack(words, 4), unpack(zero_words, 4)[:, :groups], scales[:, :groups]
    if not zero_point and not bool((zeros == 8).all()):
        raise CheckpointError(
            f"{module}: quantization_config says zero_point false, so zero points of 8, but the tensors have "
            f"{int(zeros.min())} to {int(zeros.max())}; set zero_point to true if they are meant"
        )
    return quantized(module, 4, codes, zeros, scales, block)
