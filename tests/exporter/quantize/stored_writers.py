"""Writers of tiny quantised checkpoints, one matrix at a time with plain loops, and what each matrix must be worth.

They follow the papers' and libraries' formats as documented at each function, and share no code with the readers. A
packer makes random codes, zero points and scales, packs them, and computes every value by its definition.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tests.tiny import LLAMA, llama_tensors, write_checkpoint, write_tokenizer

Matrix = NDArray[np.float32]
Leaves = dict[str, torch.Tensor]
#: (random numbers, rows, inputs) -> stored tensors by the last part of their names, and the matrix [out, in].
Packer = Callable[[random.Random, int, int], tuple[Leaves, Matrix]]

#: Large enough for groups of 32 and words of eight, with a last group that may be short.
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "head_dim": 16}


@dataclass(frozen=True)
class Case:
    """One format: the ``quantization_config``, and what packs a matrix."""

    config: dict[str, Any]
    pack: Packer


def projections(config: dict[str, Any]) -> list[str]:
    """Modules that every format quantises."""
    attention = [f"self_attn.{name}_proj" for name in "qkvo"]
    mlp = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    return [f"model.layers.{i}.{name}" for i in range(config["num_hidden_layers"]) for name in attention + mlp]


_MADE: dict[tuple[Any, ...], tuple[Case, Leaves, dict[str, Matrix]]] = {}


def quantized_tensors(case: Case, **changes: Any) -> tuple[dict[str, Any], Leaves, dict[str, Matrix]]:
    """Config, stored tensors (to be changed at will), and the value of each quantised matrix by its plain name."""
    key = (id(case), *changes.items())  # the case is kept, so its id is not another's
    if key not in _MADE:
        _MADE[key] = (case, *_make(case, changes))
    _, tensors, values = _MADE[key]
    config = LLAMA | SHAPE | changes | {"quantization_config": case.config}
    return config, {name: tensor.clone() for name, tensor in tensors.items()}, values


def _make(case: Case, changes: dict[str, Any]) -> tuple[Leaves, dict[str, Matrix]]:
    config = LLAMA | SHAPE | changes
    tensors = llama_tensors(config)
    rng = random.Random(0)
    values: dict[str, Matrix] = {}
    for module in projections(config):
        plain = tensors.pop(f"{module}.weight")
        leaves, values[f"{module}.weight"] = case.pack(rng, *plain.shape)
        tensors |= {f"{module}.{leaf}": tensor for leaf, tensor in leaves.items()}
    return tensors, values


def write_quantized(directory: Path, case: Case, **changes: Any) -> dict[str, Matrix]:
    """A whole checkpoint; returns the value of each quantised matrix by its plain name."""
    config, tensors, values = quantized_tensors(case, **changes)
    write_checkpoint(directory, config, tensors)
    write_tokenizer(directory)
    return values


def draw_scale(rng: random.Random, bits: int, dtype: torch.dtype = torch.float16) -> float:
    """A scale that ``dtype`` holds exactly, so that the value of a code is small."""
    return torch.tensor(rng.uniform(0.05, 0.4) / (1 << (bits - 1)), dtype=dtype).item()


def _word(values: list[int], bits: int) -> int:
    """The signed 32-bit word whose field ``k`` of ``bits`` bits is ``values[k]``."""
    total = 0
    for place, value in enumerate(values):
        assert 0 <= value < 1 << bits
        total |= value << (bits * place)
    return total - (1 << 32) if total >= 1 << 31 else total


def _value(code: int, zero: int, scale: float) -> np.float32:
    return np.float32(code - zero) * np.float32(scale)


def _groups(width: int, block: int, shuffled: bool) -> list[int]:
    """The group of each input. Act-order follows the inputs, so matrices that read the same ones (here: as many) have
    the same order."""
    groups = [i // block for i in range(width)]
    if shuffled:
        random.Random(width).shuffle(groups)
    return groups


def gptq(
    bits: int,
    group: int,
    *,
    symmetric: bool,
    version: int = 1,
    act_order: bool = False,
    writer: str | None = None,
    **more: Any,
) -> Case:
    """AutoGPTQ's ``QuantLinear.pack``: qweight packed along the inputs, qzeros along the outputs, lowest bits first;
    version 1 stores each zero point less one, of ``gptqmodel`` by subtracting ones from whole words."""

    def pack(rng: random.Random, out: int, width: int) -> tuple[Leaves, Matrix]:
        block = width if group == -1 else group
        count, per_word, top = -(-width // block), 32 // bits, (1 << bits) - 1
        groups = _groups(width, block, act_order)
        codes = [[rng.randint(0, top) for _ in range(width)] for _ in range(out)]
        low = 0 if version == 2 or writer else 1
        zeros = [[1 << (bits - 1) if symmetric else rng.randint(low, top) for _ in range(count)] for _ in range(out)]
        scales = [[draw_scale(rng, bits) for _ in range(count)] for _ in range(out)]
        qweight = torch.zeros(width // per_word, out, dtype=torch.int32)
        for row in range(width // per_word):
            for o in range(out):
                qweight[row, o] = _word([codes[o][row * per_word + k] for k in range(per_word)], bits)
        qzeros = torch.zeros(count, out // per_word, dtype=torch.int32)
        for g in range(count):
            for column in range(out // per_word):
                true = [zeros[column * per_word + k][g] for k in range(per_word)]
                if version == 2:
                    qzeros[g, column] = _word(true, bits)
                elif writer is None:
                    qzeros[g, column] = _word([zero - 1 for zero in true], bits)
                else:
                    less = (_word(true, bits) - _word([1] * per_word, bits)) % (1 << 32)
                    qzeros[g, column] = less - (1 << 32) if less >= 1 << 31 else less
        value = np.zeros((out, width), np.float32)
        for o in range(out):
            for i in range(width):
                value[o, i] = _value(codes[o][i], zeros[o][groups[i]], scales[o][groups[i]])
        stored = torch.tensor([[scales[o][g] for o in range(out)] for g in range(count)], dtype=torch.float16)
        leaves = {
            "qweight": qweight,
            "qzeros": qzeros,
            "scales": stored,
            "g_idx": torch.tensor(groups, dtype=torch.int32),
        }
        return leaves, value

    config: dict[str, Any] = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": act_order,
        "checkpoint_format": "gptq_v2" if version == 2 else "gptq",
        "damp_percent": 0.01,
        "true_sequential": True,
        **({"meta": {"quantizer": [writer]}} if writer else {}),
        **more,
    }
    return Case(config, pack)


def awq(group: int, *, zero_point: bool = True, layout: str = "gemm", **more: Any) -> Case:
    """AutoAWQ's ``WQLinear_GEMM.from_linear`` (eight outputs a word, place i holds number 0 2 4 6 1 3 5 7 [i]) and
    ``WQLinear_GEMV.from_linear`` (eight inputs a word in order, groups padded to what its kernel loads)."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def pack(rng: random.Random, out: int, width: int) -> tuple[Leaves, Matrix]:
        block = width if group == -1 else group
        count = width // block
        codes = [[rng.randint(0, 15) for _ in range(width)] for _ in range(out)]
        zeros = [[rng.randint(0, 15) if zero_point else 8 for _ in range(count)] for _ in range(out)]
        scales = [[draw_scale(rng, 4) for _ in range(count)] for _ in range(out)]
        value = np.zeros((out, width), np.float32)
        for o in range(out):
            for i in range(width):
                value[o, i] = _value(codes[o][i], zeros[o][i // block], scales[o][i // block])
        if layout == "gemm":
            qweight = torch.zeros(width, out // 8, dtype=torch.int32)
            qzeros = torch.zeros(count, out // 8, dtype=torch.int32)
            for column in range(out // 8):
                for i in range(width):
                    qweight[i, column] = _word([codes[column * 8 + order[k]][i] for k in range(8)], 4)
                for g in range(count):
                    qzeros[g, column] = _word([zeros[column * 8 + order[k]][g] for k in range(8)], 4)
            stored = torch.tensor([[scales[o][g] for o in range(out)] for g in range(count)], dtype=torch.float16)
            return {"qweight": qweight, "qzeros": qzeros, "scales": stored}, value
        padded = -(-count // 8)
        multiple = {64: 2, 32: 4}.get(block, 1)
        padded = -(-padded // multiple) * multiple
        qweight = torch.zeros(out, width // 8, dtype=torch.int32)
        qzeros = torch.zeros(out, padded, dtype=torch.int32)
        stored = torch.zeros(out, padded * 8, dtype=torch.float16)
        for o in range(out):
            for column in range(width // 8):
                qweight[o, column] = _word([codes[o][column * 8 + k] for k in range(8)], 4)
            for column in range(-(-count // 8)):
                qzeros[o, column] = _word([zeros[o][g] for g in range(column * 8, min(count, column * 8 + 8))], 4)
            for g in range(count):
                stored[o, g] = scales[o][g]
        return {"qweight": qweight, "qzeros": qzeros, "scales": stored}, value

    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group,
        "zero_point": zero_point,
        "version": layout,
        "modules_to_not_convert": None,
        **more,
    }
    return Case(config, pack)


def compressed(
    bits: int,
    strategy: str,
    *,
    group: int | None = None,
    symmetric: bool = True,
    packed: bool = True,
    act_order: bool = False,
    old_zeros: bool = False,
    inputs: str | None = None,
    layout: str | None = None,
) -> Case:
    """compressed-tensors' ``pack_to_int32`` (codes plus half their range, lowest bits first, along the inputs; zero
    points along the outputs, or as int8 in old versions) and its one-byte formats.

    Args:
        inputs: activations are quantised too, ``static`` (with a scale) or ``dynamic``.
    """

    def pack(rng: random.Random, out: int, width: int) -> tuple[Leaves, Matrix]:
        block = group if strategy == "group" and group else width
        count, half = -(-width // block), 1 << (bits - 1)
        groups = _groups(width, block, act_order)
        codes = [[rng.randint(-half, half - 1) for _ in range(width)] for _ in range(out)]
        zeros = [[0 if symmetric else rng.randint(-half, half - 1) for _ in range(count)] for _ in range(out)]
        scales = [[draw_scale(rng, bits, torch.bfloat16) for _ in range(count)] for _ in range(out)]
        if strategy == "tensor":
            zeros, scales = [zeros[0]] * out, [scales[0]] * out
        value = np.zeros((out, width), np.float32)
        for o in range(out):
            for i in range(width):
                value[o, i] = _value(codes[o][i], zeros[o][groups[i]], scales[o][groups[i]])
        rows = scales[:1] if strategy == "tensor" else scales
        leaves: Leaves = {"weight_scale": torch.tensor(rows, dtype=torch.bfloat16)}
        if strategy == "tensor":
            leaves["weight_scale"] = leaves["weight_scale"].reshape(1)
        per_word = 32 // bits
        if packed:
            words = torch.zeros(out, -(-width // per_word), dtype=torch.int32)
            for o in range(out):
                for column in range(words.shape[1]):
                    part = codes[o][column * per_word : (column + 1) * per_word]
                    words[o, column] = _word([code + half for code in part], bits)
            leaves |= {"weight_packed": words, "weight_shape": torch.tensor([out, width])}
        else:
            leaves["weight"] = torch.tensor(codes, dtype=torch.int8)
        if not symmetric and packed and not old_zeros:
            words = torch.zeros(-(-out // per_word), count, dtype=torch.int32)
            for row in range(words.shape[0]):
                for g in range(count):
                    part = [zeros[o][g] + half for o in range(row * per_word, min(out, (row + 1) * per_word))]
                    words[row, g] = _word(part, bits)
            leaves["weight_zero_point"] = words
        elif not symmetric or old_zeros:
            stored = torch.tensor(zeros[:1] if strategy == "tensor" else zeros, dtype=torch.int8)
            leaves["weight_zero_point"] = stored.reshape(1) if strategy == "tensor" else stored
        if act_order:
            leaves["weight_g_idx"] = torch.tensor(groups, dtype=torch.int32)
        if inputs == "static":
            leaves["input_scale"] = torch.tensor([0.02], dtype=torch.bfloat16)
        return leaves, value

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": group,
        "actorder": "group" if act_order else None,
        "dynamic": False,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    return compressed_case(weights, layout or ("pack-quantized" if packed else "int-quantized"), inputs, pack)


def compressed_case(weights: dict[str, Any], layout: str, inputs: str | None, pack: Packer) -> Case:
    activations = None
    if inputs is not None:
        activations = {**weights, "strategy": "tensor", "group_size": None, "dynamic": inputs == "dynamic"}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": 1.5,
    }
    return Case(config, pack)
