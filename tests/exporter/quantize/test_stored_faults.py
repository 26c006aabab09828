"""Checkpoints that are quantised already, damaged or contradicting themselves: every fault of one is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specexport.runtime.errors import CheckpointError
from tests.exporter.quantize.stored_cases import CASES
from tests.exporter.quantize.stored_reading import Q, read_all
from tests.exporter.quantize.stored_writers import Case, gptq, quantized_tensors
from tests.tiny import write_checkpoint


def parts(case: str) -> list[tuple[str, str]]:
    """(case, last part of a stored name) of every tensor of a matrix."""
    _, tensors, _ = quantized_tensors(CASES[case])
    return [(case, name.removeprefix(f"{Q}.")) for name in tensors if name.startswith(f"{Q}.")]


#: One case of every layout, so that each of their tensors is damaged once.
LAYOUTS = (
    "gptq4_act_order",
    "awq",
    "awq_gemv",
    "packed4_asymmetric",
    "packed4_act_order",
    "int8_static",
    "int8_groups",
    "float_rows",
    "float_whole",
    "fp8_tiles",
    "fp8_static",
)
_OTHER = {torch.int32: torch.int64, torch.int8: torch.uint8, torch.float8_e4m3fn: torch.float8_e5m2}


def retyped(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as another type, or the nearest there is of scales: an integer."""
    if tensor.dtype in (torch.int8, torch.float8_e4m3fn):
        return tensor.view(_OTHER[tensor.dtype])
    return tensor.to(torch.int64 if tensor.dtype == torch.int32 else torch.int16)


DAMAGE: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "dropped": lambda tensor: None,
    "retyped": retyped,
    "longer": lambda tensor: torch.cat([tensor.reshape(1) if tensor.ndim == 0 else tensor] * 2),
    "flat": lambda tensor: tensor.reshape(1, 1, -1),
    "empty": lambda tensor: tensor.new_zeros(0, *tensor.shape[1:]),
}


@pytest.mark.parametrize(("case", "leaf"), [pair for case in LAYOUTS for pair in parts(case)])
def test_one_damaged_tensor(tmp_path: Path, case: str, leaf: str) -> None:
    config, tensors, _ = quantized_tensors(CASES[case])
    for index, (what, damage) in enumerate(DAMAGE.items()):
        changed = dict(tensors)
        broken = damage(changed.pop(f"{Q}.{leaf}"))
        if broken is not None:
            changed[f"{Q}.{leaf}"] = broken
        with pytest.raises(CheckpointError) as caught:
            read_all(write_checkpoint(tmp_path / str(index), config, changed))
        assert "\n" not in str(caught.value), what
    for index, (old, new) in enumerate({f"{Q}.{leaf}": f"{Q}.{leaf}s", f"{Q}": f"{Q}x"}.items()):
        changed = {name.replace(old, new) if name == f"{Q}.{leaf}" else name: t for name, t in tensors.items()}
        with pytest.raises(CheckpointError):
            read_all(write_checkpoint(tmp_path / f"renamed{index}", config, changed))


STRAYS = ("qweight", "weight", "weight_packed", "input_zero_point", "extra", "weight_scale_2")
#: Layouts that may have a zero point of their inputs.
STATIC = ("int8_static", "float_whole")


@pytest.mark.parametrize(
    ("case", "leaf"),
    [
        (case, leaf)
        for case in LAYOUTS
        for leaf in STRAYS
        if (case, leaf) not in parts(case) and not (leaf == "input_zero_point" and case in STATIC)
    ],
)
def test_one_more_tensor(tmp_path: Path, case: str, leaf: str) -> None:
    config, tensors, _ = quantized_tensors(CASES[case])
    tensors[f"{Q}.{leaf}"] = torch.ones(4, 4)
    with pytest.raises(CheckpointError):
        read_all(write_checkpoint(tmp_path, config, tensors))


def edit(name: str, place: tuple[int, ...], value: Any) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name][place] = value

    return change


def fill(name: str, value: Any) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].fill_(value)

    return change


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        (CASES["gptq4_act_order"], edit(f"{Q}.g_idx", (0,), 2), "names groups 0 to 2, expected 0 to 1"),
        (CASES["gptq4_act_order"], edit(f"{Q}.g_idx", (0,), -1), "names groups -1"),
        (CASES["gptq4_act_order"], fill(f"{Q}.g_idx", 1), "group 0 0 inputs, expected 32"),
        (CASES["gptq4_act_order"], fill(f"{Q}.qzeros", -1), "read as 16, others as 0"),
        (CASES["gptq4"], fill(f"{Q}.qzeros", 0x11111111), "says sym, so zero points of 8.*2 to 2"),
        (gptq(4, 32, symmetric=False, act_order=True, desc_act=False), None, "act-order although.*desc_act false"),
        (CASES["gptq4"], edit(f"{Q}.scales", (0, 3), float("nan")), "not a finite number"),
        (CASES["awq"], edit(f"{Q}.scales", (0, 3), float("inf")), "not a finite number"),
        (CASES["awq_symmetric"], fill(f"{Q}.qzeros", 0), "zero_point false.*0 to 0"),
        (CASES["packed4"], fill(f"{Q}.weight_shape", 1 << 40), "weight_shape is .* but weight_packed"),
        (CASES["packed4"], edit(f"{Q}.weight_shape", (1,), 60), "but.*calls for"),
        (CASES["packed4_act_order"], edit(f"{Q}.weight_g_idx", (0,), 9), "names groups"),
        (CASES["int8_naive"], fill(f"{Q}.weight_zero_point", 1), "not zero although the weights are symmetric"),
        (CASES["int8_rows"], edit(f"{Q}.weight_scale", (0, 0), float("nan")), "not a finite number"),
        (CASES["float_rows"], edit(f"{Q}.weight", (0, 0), float("nan")), "a weight is not a number"),
        (CASES["fp8_tiles"], edit(f"{Q}.weight_scale_inv", (0, 0), float("-inf")), "not a finite number"),
    ],
)
def test_damaged_values(
    tmp_path: Path, case: Case, change: Callable[[dict[str, torch.Tensor]], None] | None, message: str
) -> None:
    config, tensors, _ = quantized_tensors(case)
    if change is not None:
        change(tensors)
    with pytest.raises(CheckpointError, match=message.replace("but.*calls for", "calls for|but weight_packed")):
        read_all(write_checkpoint(tmp_path, config, tensors))


def group(case: str, **changes: Any) -> dict[str, Any]:
    """``config_groups`` of a case with changes to its weights."""
    found = json.loads(json.dumps(CASES[case].config["config_groups"]))
    found["group_0"]["weights"] |= changes
    return {"config_groups": found}


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("gptq4", {"bits": 8}, "qzeros.*calls for"),
        ("gptq8", {"bits": 4}, "qzeros.*calls for"),
        ("gptq4", {"bits": 3}, "4 or 8 bits"),
        ("gptq4", {"bits": "4"}, "must be an integer"),
        ("gptq4", {"group_size": 64}, "qzeros.*calls for"),
        ("gptq4", {"group_size": 0}, "must be an integer"),
        ("gptq4", {"checkpoint_format": "marlin"}, "kernel"),
        ("gptq4", {"format": "gptq_v2"}, "checkpoint_format is 'gptq', format 'gptq_v2'"),
        ("gptq4", {"is_marlin_format": True}, "is_marlin_format"),
        ("gptq4", {"rotation": "hadamard"}, "rotation"),
        ("gptq4", {"surprise": 1}, "surprise = 1 is not understood"),
        ("gptq4", {"dynamic": {"-:.*q_proj": {}}}, "excludes it"),
        ("gptq4", {"dynamic": {".*q_proj": {"bits": 8}}}, "calls for"),
        ("gptq4", {"dynamic": {".*q_proj": {"rank": 8}}}, "changes 'rank'"),
        ("gptq4", {"dynamic": {"(a+)+": {}}}, "regular expression"),
        ("gptq4", {"dynamic": {"(": {}}}, "regular expression"),
        ("gptq4", {"dynamic": 3}, "dynamic must be"),
        ("gptq4", {"modules_in_block_to_quantize": [["self_attn.q_proj"]]}, "although quantization_config excludes"),
        ("gptq4", {"modules_in_block_to_quantize": "q_proj"}, "must list"),
        ("awq", {"bits": 8}, "AWQ checkpoints of 4 bits"),
        ("awq", {"group_size": 40}, "not a multiple of the group size"),
        ("awq", {"group_size": 16}, "calls for"),
        ("awq", {"version": "gemv"}, "calls for"),
        ("awq", {"sym": True}, "sym and zero_point are both True"),
        ("awq", {"data_type": "nv_fp"}, "data_type"),
        ("awq", {"version": "gemv_fast"}, "gemm and gemv"),
        ("awq", {"backend": "llm-awq"}, "backend"),
        ("awq", {"modules_to_not_convert": ["q_proj"]}, "excludes it"),
        ("awq", {"modules_to_not_convert": "q_proj"}, "list of names"),
        ("packed4", {"format": "marlin-24"}, "format 'marlin-24' is not read"),
        ("packed4", {"format": None}, "format None is not read"),
        ("packed4", {"ignore": ["re:.*q_proj"]}, "excludes it"),
        ("packed4", {"ignore": ["re:("]}, "regular expression"),
        ("packed4", {"ignore": [f"{Q}"]}, "excludes it"),
        ("packed4", {"sparsity_config": {"format": "sparse-bitmask"}}, "sparsity_config"),
        ("packed4", {"transform_config": {"config_groups": {}}}, "transform_config"),
        ("packed4", {"quantization_status": "calibration"}, "quantization_status"),
        ("packed4", {"config_groups": {}}, "config_groups is missing"),
        ("packed4", {"kv_cache_scheme": {"num_bits": 8}}, "no k_scale"),
        ("packed4", group("packed4", num_bits=8), "weight_shape is"),
        ("packed4", group("packed4", num_bits=3), "4 or 8 bits"),
        ("packed4", group("packed4", type="float"), "type is 'float'"),
        ("packed4", group("packed4", group_size=16), "calls for"),
        ("packed4", group("packed4", symmetric=False), "no weight_zero_point"),
        ("packed4", group("packed4", actorder="group"), "no weight_g_idx"),
        ("packed4", group("packed4", actorder="sideways"), "actorder"),
        ("packed4", group("packed4", dynamic=True), "dynamic"),
        ("packed4", group("packed4", strategy="channel", group_size=-1), "calls for"),
        ("packed4", group("packed4", strategy="channel"), "although the strategy is channel"),
        ("packed4", group("packed4", strategy="token"), "strategy 'token'"),
        ("packed4", group("packed4", surprise=1), "surprise"),
        ("float_rows", group("float_rows", symmetric=False), "symmetric is false"),
        ("float_tiles", group("float_tiles", block_structure=[24, 48]), "calls for"),
        ("fp8_tiles", {"weight_block_size": [128, 128]}, "calls for"),
        ("fp8_tiles", {"weight_block_size": None}, "calls for"),
        ("fp8_tiles", {"weight_block_size": [24]}, "must be"),
        ("fp8_tiles", {"fmt": "e5m2"}, "fmt"),
        ("fp8_static", {"activation_scheme": "dynamic"}, "input_scale"),
        ("fp8_dynamic", {"activation_scheme": "static"}, "no input_scale"),
        ("fp8_dynamic", {"ignored_layers": [Q]}, "excludes it"),
    ],
)
def test_contradicting_configs(tmp_path: Path, case: str, change: dict[str, Any], message: str) -> None:
    config, tensors, _ = quantized_tensors(CASES[case])
    config["quantization_config"] = CASES[case].config | change
    with pytest.raises(CheckpointError, match=message) as caught:
        read_all(write_checkpoint(tmp_path, config, tensors))
    assert "\n" not in str(caught.value)
