"""Checkpoints quantised by GPTQ, as AutoGPTQ, GPTQModel, AutoRound and Transformers write them.

Stored for a matrix [out, in] of ``b`` bits in groups of ``g`` inputs:

    qweight int32 [in b/32, out]            input i is bits b (i mod 32/b) of word i // (32/b)
    qzeros  int32 [ceil(in/g), out b/32]    likewise along the outputs
    scales  float [ceil(in/g), out]
    g_idx   int32 [in]                      the group of each input

``value = (code - zero) * scale``. Checkpoints of format ``gptq`` store ``zero - 1``, those of ``gptq_v2`` ``zero``.
Sources: https://arxiv.org/abs/2210.17323; AutoGPTQ's and GPTQModel's ``QuantLinear``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specexport.exporter.config_values import boolean, integer, text
from specexport.exporter.keys import Keys
from specexport.exporter.quantize.names import pattern
from specexport.exporter.quantize.packing import group_order, quantized, unpack
from specexport.exporter.quantize.record import Quantized
from specexport.exporter.quantize.stored import AUTOROUND, SCALES, Modules, Packed, Reading, by_default, check_coverage
from specexport.runtime.errors import CheckpointError

_NEEDED = frozenset({"qweight", "qzeros", "scales"})
_GROUPS = frozenset({"g_idx"})
# How the weights were found, or which kernel the writer likes: nothing of the values.
_IGNORED = """
    quant_method method true_sequential static_groups damp_percent damp_auto_increment mse model_name_or_path
    model_file_base_name dataset tokenizer use_exllama exllama_config max_input_length cache_block_outputs batch_size
    pad_token_id use_cuda_fp16 block_name_to_quantize module_name_preceding_first_block model_seqlen backend
    act_group_aware disable_exllama use_marlin offload_to_disk offload_to_disk_path
""".split()  # noqa: SIM905 - a word list


@dataclass(frozen=True, slots=True)
class _Settings:
    """How one matrix is stored; ``group`` -1: all inputs, ``act_order`` None: as ``g_idx`` says."""

    bits: int
    group: int
    symmetric: bool
    act_order: bool | None


def read_gptq(keys: Keys, modules: Modules) -> Reading:
    """Pair tensors with matrices. Raises CheckpointError as all readers here do."""
    settings = _Settings(
        _bits("bits", keys.need("bits")),
        _group("group_size", keys.need("group_size")),
        keys.boolean("sym", True),
        keys.flag("desc_act"),
    )
    version = _version(keys)
    overrides = _dynamic(keys.take("dynamic", {}))
    lm_head = keys.boolean("lm_head", False)
    listed = _listed(keys.take("modules_in_block_to_quantize"))
    keys.fixed("pack_dtype", "int32", None)
    keys.fixed("is_marlin_format", False)
    keys.fixed("rotation", None)
    keys.fixed("adapter", None)
    keys.fixed("data_type", "int", None)
    keys.ignore(*_IGNORED, *AUTOROUND)

    def settings_of(module: str) -> _Settings | None:
        for match, change in overrides:
            if match(module):
                return None if change is None else replace(settings, **change)
        return settings

    def expected(module: str) -> bool | None:
        if settings_of(module) is None:
            return False
        if module.rpartition(".")[2] == "lm_head":
            return lm_head
        default = by_default(module)
        if default and listed is not None:
            return any(module.endswith(f".{name}") for name in listed)
        return default

    found: dict[str, Packed] = {}
    used: set[_Settings] = set()
    for module in modules.holding(_NEEDED | _GROUPS):
        mine = settings_of(module)
        if mine is None:
            raise CheckpointError(f"{module} is quantised although quantization_config excludes it (dynamic)")
        found[module] = _pair(modules, module, mine, version)
        used.add(mine)
    check_coverage(modules, found.keys(), expected)
    words = ", ".join(sorted({_words(one) for one in used}))
    return Reading(f"GPTQ {words} (format {'gptq_v2' if version == 2 else 'gptq'})", found)


def _words(settings: _Settings) -> str:
    groups = "rows" if settings.group == -1 else f"groups of {settings.group}"
    order = " in act-order" if settings.act_order else ""
    return f"{'' if settings.symmetric else 'a'}symmetric int{settings.bits} in {groups}{order}"


def _version(keys: Keys) -> int:
    """0: stored zeros are one less, and wrap with a carry; 1: one less; 2: as they are."""
    formats = [value for key in ("checkpoint_format", "format") if (value := keys.string(key)) is not None]
    if len(set(formats)) > 1:
        raise CheckpointError(f"{keys.where}: checkpoint_format is {text(formats[0])}, format {text(formats[1])}")
    name = formats[0] if formats else "gptq"
    if name not in ("gptq", "gptq_v2"):
        raise CheckpointError(
            f"{keys.where}: the checkpoint format {text(name)} is that of one kernel; expected gptq or gptq_v2: "
            "convert it with GPTQModel"
        )
    meta = keys.take("meta", {})
    writers = meta.get("quantizer") if isinstance(meta, dict) else None
    carried = any(
        str(writer).startswith("gptqmodel") for writer in (writers if isinstance(writers, list) else [writers])
    )
    return 2 if name == "gptq_v2" else 0 if carried else 1


def _bits(key: str, value: Any) -> int:
    bits = integer(key, value, 2, 8)
    if bits not in (4, 8):
        raise CheckpointError(f"config: {key} is {bits}; GPTQ checkpoints of 4 or 8 bits are read")
    return bits


def _group(key: str, value: Any) -> int:
    return -1 if value == -1 and type(value) is int else integer(key, value, 8, 1 << 16)


def _listed(value: Any) -> tuple[str, ...] | None:
    """``modules_in_block_to_quantize``: names, or lists of them (those quantised together)."""
    if value is None:
        return None
    flat = (
        [name for part in value for name in (part if isinstance(part, list) else [part])]
        if isinstance(value, list)
        else []
    )
    if not flat or not all(isinstance(name, str) and name for name in flat):
        raise CheckpointError(f"config: modules_in_block_to_quantize must list names of modules, got {text(value)}")
    return tuple(flat)


def _dynamic(value: Any) -> list[tuple[Any, dict[str, Any] | None]]:
    """GPTQModel's rules by module, the first that matches holds: ``-:pattern`` excludes, ``+:pattern`` (or a bare one)
    changes settings."""
    if not isinstance(value, dict) or len(value) > 4096:
        raise CheckpointError(f"config: dynamic must be an object of patterns, got {text(value)}")
    rules: list[tuple[Any, dict[str, Any] | None]] = []
    readers = {
        "bits": ("bits", _bits),
        "group_size": ("group", _group),
        "sym": ("symmetric", boolean),
        "desc_act": ("act_order", boolean),
    }
    for key, change in value.items():
        match = pattern(key.removeprefix("-:").removeprefix("+:"), "dynamic")
        if key.startswith("-:"):
            rules.append((match, None))
            continue
        if not isinstance(change, dict) or (unknown := sorted(change.keys() - readers.keys())):
            what = unknown[0] if isinstance(change, dict) else change
            raise CheckpointError(
                f"config: dynamic {text(key)} changes {text(what)}; only {', '.join(readers)} are read"
            )
        rules.append((match, {readers[name][0]: readers[name][1](name, item) for name, item in change.items()}))
    return rules


def _pair(modules: Modules, module: str, settings: _Settings, version: int) -> Packed:
    parts = modules.parts(module, _NEEDED, _GROUPS)
    per_word = 32 // settings.bits
    rows, out = modules.shape(f"{module}.qweight")
    width = rows * per_word
    block = width if settings.group == -1 else min(settings.group, width)
    groups = -(-width // block)
    if out % per_word:
        raise CheckpointError(f"{module}: {out} outputs are not a multiple of the {per_word} in a word of qzeros")
    modules.check(f"{module}.qweight", {"I32"})
    modules.check(f"{module}.qzeros", {"I32"}, (groups, out // per_word))
    modules.check(f"{module}.scales", SCALES, (groups, out))
    if f"{module}.g_idx" in parts:
        modules.check(f"{module}.g_idx", {"I32"}, (width,))
    elif settings.act_order:
        raise CheckpointError(f"{module} has no g_idx although quantization_config says desc_act")
    return Packed((out, width), parts, partial(_load, modules, module, settings, block, version))


def _load(modules: Modules, module: str, settings: _Settings, block: int, version: int) -> Quantized:
    bits = settings.bits
    codes = unpack(modules.read(f"{module}.qweight").t(), bits)
    zeros = _zeros(module, modules.read(f"{module}.qzeros"), bits, version).t()
    if settings.symmetric and not bool((zeros == 1 << (bits - 1)).all()):
        raise CheckpointError(
            f"{module}: quantization_config says sym, so zero points of {1 << (bits - 1)}, but the tensors have "
            f"{int(zeros.min())} to {int(zeros.max())}: some kernels read these, others do not; set sym to false, or "
            "checkpoint_format to gptq_v2 if it was written so"
        )
    order = None
    if "g_idx" in modules.leaves[module]:
        order = group_order(module, modules.read(f"{module}.g_idx"), block)
    if order is not None and settings.act_order is False:
        raise CheckpointError(
            f"{module}: g_idx is in act-order although quantization_config says desc_act false; set it to true if it is"
        )
    return quantized(module, bits, codes, zeros, modules.read(f"{module}.scales").t(), block, order)


def _zeros(module: str, words: Tensor, bits: int, version: int) -> Tensor:
    """Zero points uint8 [groups, out], from their words."""
    if version == 0:  # GPTQModel subtracts ones from whole words, so a zero point of 0 borrows from its neighbour
        ones = sum(1 << shift for shift in range(0, 32, bits))
        words = (words.long() + ones).to(torch.int32)  # wraps
    zeros = unpack(words, bits)
    if version != 1:
        return zeros
    top = (1 << bits) - 1
    if bool((zeros == top).any()):
        raise CheckpointError(
            f"{module}: a stored zero point is {top}, which some kernels read as {top + 1}, others as 0; convert "
            "the checkpoint to gptq_v2 with GPTQModel"
        )
    return zeros + 1
