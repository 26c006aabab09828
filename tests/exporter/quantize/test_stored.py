"""Checkpoints that are quantised already: every format exact to a bit, and every fault of one refused."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specexport.exporter.checkpoint import Checkpoint, open_checkpoint
from specexport.exporter.heads.merged import check_target, target_view
from specexport.exporter.quantize.record import QuantizedSource
from specexport.runtime.errors import CheckpointError
from tests.exporter.quantize.stored_writers import (
    CASES,
    Case,
    awq,
    compressed,
    fp8,
    gptq,
    quantized_tensors,
    write_quantized,
)
from tests.tiny import write_checkpoint

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"


def read_all(directory: Path) -> Checkpoint:
    """Open a checkpoint as a build does, and read everything."""
    checkpoint = target_view(open_checkpoint(str(directory)))
    check_target(checkpoint)
    for name in checkpoint.weights.names():
        checkpoint.weights.read(name)
    return checkpoint


@pytest.mark.parametrize("name", CASES)
def test_exact(tmp_path: Path, name: str) -> None:
    values = write_quantized(tmp_path, CASES[name])
    checkpoint = read_all(tmp_path)
    weights = checkpoint.weights
    assert isinstance(weights, QuantizedSource)
    assert set(values) < set(weights.names()) and checkpoint.quantization
    for matrix, value in values.items():
        assert weights.shape(matrix) == value.shape
        read = weights.read(matrix)
        assert read.dtype == torch.float32 and np.array_equal(read.numpy(), value), matrix
        held = weights.quantized(matrix)
        assert held is not None and torch.equal(held.dequantize(), read)
        assert held.codes.is_contiguous() and held.codes.shape == value.shape
        assert held.bits == (8 if "8" in name or "float" in name else 4)
        assert held.scales.shape == (value.shape[0], -(-value.shape[1] // held.block))
    assert weights.quantized("model.norm.weight") is None
    assert weights.quantized("model.embed_tokens.weight") is None


@pytest.mark.parametrize("name", ["gptq4", "gptq8", "awq_symmetric", "packed4", "packed8", "int8_naive"])
def test_symmetric_codes_are_signed(tmp_path: Path, name: str) -> None:
    """What kernels do best: no zero points, whatever the file spells out."""
    write_quantized(tmp_path, CASES[name])
    weights = read_all(tmp_path).weights
    assert isinstance(weights, QuantizedSource)
    held = weights.quantized(f"{DOWN}.weight")
    assert held is not None and held.zeros is None and held.codes.dtype == torch.int8 and int(held.codes.min()) < 0


@pytest.mark.parametrize("name", ["gptq4_act_order", "packed4_act_order"])
def test_act_order_keeps_groups_whole(tmp_path: Path, name: str) -> None:
    write_quantized(tmp_path, CASES[name])
    weights = read_all(tmp_path).weights
    assert isinstance(weights, QuantizedSource)
    held = weights.quantized(f"{DOWN}.weight")
    assert held is not None and held.order is not None and held.block == 32
    assert sorted(held.order.tolist()) == list(range(96))
    permuted = weights.read(f"{DOWN}.weight")[:, held.order]
    zeros = held.zeros
    assert zeros is not None
    blocks = (held.codes.float() - zeros.float().repeat_interleave(32, 1)) * held.scales.float().repeat_interleave(
        32, 1
    )
    assert torch.equal(blocks, permuted)


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


@pytest.mark.parametrize("case", ["gptq4", "awq", "packed4", "int8_rows", "fp8_tiles"])
def test_a_plain_projection(tmp_path: Path, case: str) -> None:
    """Refused, unless the config excludes it; and the other way round."""
    config, tensors, values = quantized_tensors(CASES[case])
    mixed = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{Q}.")}
    mixed[f"{Q}.weight"] = torch.from_numpy(values[f"{Q}.weight"]).half()
    with pytest.raises(CheckpointError, match=r"q_proj.weight' is not quantised although"):
        read_all(write_checkpoint(tmp_path / "refused", config, mixed))
    lists: dict[str, dict[str, Any]] = {
        "gptq4": {"dynamic": {rf"-:{Q}": {}}},
        "awq": {"modules_to_not_convert": ["self_attn.q_proj"]},
        "packed4": {"ignore": ["re:.*self_attn.q_proj$"]},
        "int8_rows": {"ignore": [Q]},
        "fp8_tiles": {"modules_to_not_convert": [Q, "lm_head"]},
    }
    config["quantization_config"] = CASES[case].config | lists[case]
    weights = read_all(write_checkpoint(tmp_path / "read", config, mixed)).weights
    assert torch.equal(weights.read(f"{Q}.weight"), mixed[f"{Q}.weight"])
    with pytest.raises(CheckpointError, match="excludes it"):
        read_all(write_checkpoint(tmp_path / "excluded", config, tensors))
    with pytest.raises(CheckpointError, match=r"is stored as|is part of a quantised matrix"):
        read_all(write_checkpoint(tmp_path / "unsaid", {k: v for k, v in config.items() if k[:5] != "quant"}, tensors))


def test_no_tensor_is_quantised(tmp_path: Path, tiny_checkpoint: Path) -> None:
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    plain = open_checkpoint(str(tiny_checkpoint)).weights
    tensors = {name: plain.read(name) for name in plain.names()}
    for case in ("gptq4", "awq", "packed4", "fp8_dynamic"):
        quantized = {**config, "quantization_config": CASES[case].config}
        with pytest.raises(CheckpointError, match="but no tensor is"):
            open_checkpoint(str(write_checkpoint(tmp_path / case, quantized, tensors)))


def test_rules_by_module(tmp_path: Path) -> None:
    """Several settings in one checkpoint: GPTQModel's ``dynamic``, groups of compressed-tensors by their targets."""
    rule = {r"+:.*\.down_proj$": {"bits": 8, "group_size": -1, "sym": False}}
    config, tensors, values = quantized_tensors(gptq(4, 32, symmetric=True, dynamic=rule))
    _, tensors8, values8 = quantized_tensors(gptq(8, -1, symmetric=False))
    mixed = {name: (tensors8 if DOWN in name else tensors)[name] for name in tensors}
    checkpoint = read_all(write_checkpoint(tmp_path / "gptq", config, mixed))
    assert np.array_equal(checkpoint.weights.read(f"{DOWN}.weight").numpy(), values8[f"{DOWN}.weight"])
    assert np.array_equal(checkpoint.weights.read(f"{Q}.weight").numpy(), values[f"{Q}.weight"])
    assert "int4" in str(checkpoint.quantization) and "int8" in str(checkpoint.quantization)

    config, tensors, values = quantized_tensors(CASES["packed4"])
    _, tensors8, values8 = quantized_tensors(CASES["float_rows"])
    mixed = {name: tensor for name, tensor in tensors.items() if DOWN not in name}
    mixed |= {name: tensor for name, tensor in tensors8.items() if DOWN in name}
    groups = dict(CASES["packed4"].config["config_groups"])
    groups["down"] = CASES["float_rows"].config["config_groups"]["group_0"] | {
        "targets": [r"re:.*down_proj$"],
        "format": "float-quantized",
    }
    config["quantization_config"] = CASES["packed4"].config | {"config_groups": groups}
    checkpoint = read_all(write_checkpoint(tmp_path / "compressed", config, mixed))
    assert np.array_equal(checkpoint.weights.read(f"{DOWN}.weight").numpy(), values8[f"{DOWN}.weight"])
    assert np.array_equal(checkpoint.weights.read(f"{Q}.weight").numpy(), values[f"{Q}.weight"])
    assert any("activations" in note for note in checkpoint.notes)


@pytest.mark.parametrize("case", ["gptq4", "packed4"])
def test_lm_head(tmp_path: Path, case: str) -> None:
    made = CASES[case]
    told = {"lm_head": True} if case == "gptq4" else {"ignore": []}
    config, tensors, _ = quantized_tensors(made, tie_word_embeddings=False)
    del tensors["lm_head.weight"]
    leaves, value = made.pack(random.Random(1), 320, 64)
    tensors |= {f"lm_head.{leaf}": tensor for leaf, tensor in leaves.items()}
    with pytest.raises(CheckpointError, match="excludes it"):
        read_all(write_checkpoint(tmp_path / "unsaid", config, tensors))
    config["quantization_config"] = made.config | told
    weights = read_all(write_checkpoint(tmp_path / "said", config, tensors)).weights
    assert np.array_equal(weights.read("lm_head.weight").numpy(), value)


def test_biases(tmp_path: Path) -> None:
    """AutoGPTQ writes a bias of zeros for every projection; any other is a tensor that nobody understands."""
    config, tensors, _ = quantized_tensors(CASES["gptq4"])
    zero = {f"{Q}.bias": torch.zeros(64, dtype=torch.float16)}
    read_all(write_checkpoint(tmp_path / "zero", config, tensors | zero))
    zero[f"{Q}.bias"][3] = 1
    with pytest.raises(CheckpointError, match=r"not understood.*q_proj\.bias"):
        read_all(write_checkpoint(tmp_path / "one", config, tensors | zero))


def test_cache_scales(tmp_path: Path) -> None:
    config, tensors, _ = quantized_tensors(CASES["float_rows"])
    config["quantization_config"] = CASES["float_rows"].config | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    scales = {f"model.layers.0.self_attn.{x}_scale": torch.tensor([0.1]) for x in "kv"}
    checkpoint = read_all(write_checkpoint(tmp_path / "beside", config, tensors | scales))
    assert any("KV cache" in note for note in checkpoint.notes)
    with pytest.raises(CheckpointError, match="no v_scale"):
        scales.popitem()
        read_all(write_checkpoint(tmp_path / "missing", config, tensors | scales))


@pytest.mark.parametrize(
    ("file", "case"), [("quantize_config.json", CASES["gptq4"]), ("quant_config.json", awq(32, version="GEMM"))]
)
def test_side_files(tmp_path: Path, file: str, case: Case) -> None:
    """Where older versions kept the quantisation; it is part of what a checkpoint is all the same."""
    config, tensors, values = quantized_tensors(case)
    quantization = {key: value for key, value in config.pop("quantization_config").items() if key != "quant_method"}
    if file == "quant_config.json":
        quantization |= {"w_bit": quantization.pop("bits"), "q_group_size": quantization.pop("group_size")}
    write_checkpoint(tmp_path, config, tensors)
    (tmp_path / file).write_text(json.dumps(quantization))
    checkpoint = read_all(tmp_path)
    assert np.array_equal(checkpoint.weights.read(f"{Q}.weight").numpy(), values[f"{Q}.weight"])
    before = checkpoint.fingerprint()
    (tmp_path / file).write_text(json.dumps(quantization | {"damp_percent": 0.5, "do_fuse": False}))
    if file == "quantize_config.json":
        with pytest.raises(CheckpointError, match="do_fuse"):
            open_checkpoint(str(tmp_path))
        (tmp_path / file).write_text(json.dumps(quantization | {"damp_percent": 0.5}))
    else:
        (tmp_path / file).write_text(json.dumps(quantization | {"do_fuse": False}))
    assert read_all(tmp_path).fingerprint() != before


@pytest.mark.parametrize(
    "method",
    ["bitsandbytes", "hqq", "eetq", "quanto", "mxfp4", "modelopt", "modelopt_fp4", "aqlm", "torchao", "new", None, 3],
)
def test_methods_that_are_not_read(tmp_path: Path, method: Any) -> None:
    config, tensors, _ = quantized_tensors(CASES["gptq4"])
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    write_checkpoint(tmp_path, config, tensors)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(str(tmp_path))
    assert "\n" not in str(caught.value)
    if method != 3:
        assert str(method) in str(caught.value) and "use the unquantised checkpoint" in str(caught.value)


def test_foreign_dtypes_name_the_method(tmp_path: Path) -> None:
    config, tensors, _ = quantized_tensors(CASES["gptq4"])
    config["quantization_config"] = {"quant_method": "mxfp4"}
    write_checkpoint(tmp_path, config, tensors)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"dtype":"F16"', b'"dtype":"F8E"', 1))
    with pytest.raises(CheckpointError, match="quantised by 'mxfp4'"):
        open_checkpoint(str(tmp_path))


def test_two_quantisations(tmp_path: Path) -> None:
    config, tensors, _ = quantized_tensors(CASES["packed4"])
    both = {**config, "compression_config": config["quantization_config"]}
    with pytest.raises(CheckpointError, match="both quantization_config and compression_config"):
        open_checkpoint(str(write_checkpoint(tmp_path / "both", both, tensors)))
    older = {**config, "compression_config": config["quantization_config"]}
    del older["quantization_config"]
    read_all(write_checkpoint(tmp_path / "older", older, tensors))


@pytest.mark.parametrize("case", ["gptq4_act_order", "packed4", "fp8_static"])
def test_fingerprint_covers_every_tensor(tmp_path: Path, case: str) -> None:
    config, tensors, _ = quantized_tensors(CASES[case])
    one = read_all(write_checkpoint(tmp_path / "one", config, tensors)).fingerprint()
    assert one == read_all(write_checkpoint(tmp_path / "two", config, tensors)).fingerprint()
    for index, name in enumerate(n for n in tensors if n.startswith(f"{Q}.")):
        changed = {key: tensor.clone() for key, tensor in tensors.items()}
        flat = changed[name].reshape(-1).view(torch.uint8)
        flat[0] ^= 1
        other = (
            open_checkpoint(str(write_checkpoint(tmp_path / str(index), config, changed)))
            if (not name.endswith("weight_shape"))
            else None
        )
        assert other is None or other.fingerprint() != one, name


def test_pickles(tmp_path: Path) -> None:
    for case in ("gptq4", "fp8_tiles"):
        config, tensors, values = quantized_tensors(CASES[case])
        directory = tmp_path / case
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
        torch.save(tensors, directory / "pytorch_model.bin")
        weights = read_all(directory).weights
        assert np.array_equal(weights.read(f"{Q}.weight").numpy(), values[f"{Q}.weight"])


def test_notes_on_activations(tmp_path: Path) -> None:
    for index, case in enumerate((fp8(), compressed(8, "channel", packed=False, inputs="dynamic"))):
        write_quantized(tmp_path / str(index), case)
        assert any("activations" in note for note in open_checkpoint(str(tmp_path / str(index))).notes)
    write_quantized(tmp_path / "none", CASES["packed4"])
    (note,) = open_checkpoint(str(tmp_path / "none")).notes
    assert "--precision int4 keeps its codes" in note
