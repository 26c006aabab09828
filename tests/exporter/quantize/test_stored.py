"""Checkpoints that are quantised already: every format exact to a bit, and what is mixed with or near it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specexport.exporter.checkpoint import open_checkpoint
from specexport.exporter.quantize.record import QuantizedSource
from specexport.runtime.errors import CheckpointError
from tests.exporter.quantize.stored_cases import CASES
from tests.exporter.quantize.stored_floats import fp8
from tests.exporter.quantize.stored_reading import DOWN, Q, read_all
from tests.exporter.quantize.stored_writers import Case, awq, compressed, gptq, quantized_tensors, write_quantized
from tests.tiny import write_checkpoint


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
