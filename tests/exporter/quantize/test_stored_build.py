"""Checkpoints that are quantised already, from the command line to tokens."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from specexport.engines.ort import OrtEngine
from specexport.exporter import cli
from specexport.exporter.checkpoint import open_checkpoint
from specexport.runtime.bundle import Bundle
from specexport.runtime.engine import Step
from specexport.runtime.sampling import SamplingParams
from specexport.runtime.session import Session
from tests.exporter.quantize.stored_cases import CASES
from tests.exporter.quantize.stored_writers import quantized_tensors, write_quantized
from tests.tiny import write_checkpoint, write_llama, write_tokenizer

PROMPT = [5, 6, 7, 8]
#: Cases and the precision that keeps their codes, one of each method; the others are read the same way.
KEPT = {"gptq4_act_order": "int4", "awq": "int4", "packed4_asymmetric": "int4", "int8_rows": "int8", "gptq8": "int8"}
REST = ("float_rows", "fp8_tiles", "fp8_static", "gptq4_v2", "awq_gemv", "packed4_act_order", "int8_whole")


def build(source: Path, output: Path, *options: str) -> Bundle:
    # The tables in fp32, so that only the matrices of the layers can differ.
    tables = ("--lm-head", "fp32", "--embedding", "fp32")
    assert cli.main(["build", str(source), "-o", str(output), "--window", "64", *tables, *options]) == 0
    return Bundle.load(output)


def decode(bundle: Bundle) -> list[int]:
    tokens = Session(bundle).generate(PROMPT, SamplingParams(max_tokens=16)).token_ids
    assert len(tokens) == 16
    return tokens


def logits(bundle: Bundle) -> NDArray[np.float32]:
    """Of a sequence by the graph as it is written: kernels for codes also round activations, values do not."""
    engine = OrtEngine(bundle.path, lowered=False, optimize=False)
    return engine.run(Step.chain(range(4, 44))).copy()


def check_kept(tmp_path: Path, case: str, precision: str) -> None:
    """Codes in the graph compute what their values in fp32 do, and take less room."""
    write_quantized(tmp_path / "checkpoint", CASES[case])
    plain = build(tmp_path / "checkpoint", tmp_path / "fp32")
    kept = build(tmp_path / "checkpoint", tmp_path / precision, "--precision", precision)
    wanted, found = logits(plain), logits(kept)
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()
    decode(kept)
    assert kept.manifest.lineage.fingerprint == plain.manifest.lineage.fingerprint
    sizes = [sum(f.stat().st_size for f in bundle.path.glob("target.onnx*")) for bundle in (plain, kept)]
    assert sizes[1] < 0.8 * sizes[0]


def test_codes_are_kept(tmp_path: Path) -> None:
    check_kept(tmp_path, "gptq4_act_order", "int4")


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in KEPT if case != "gptq4_act_order"])
def test_codes_of_every_method_are_kept(tmp_path: Path, case: str) -> None:
    check_kept(tmp_path, case, KEPT[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", [*KEPT, *REST])
def test_values_in_fp32(tmp_path: Path, case: str) -> None:
    """The bundle is that of the dequantised checkpoint, byte for byte."""
    write_quantized(tmp_path / "quantised", CASES[case])
    config, tensors, values = quantized_tensors(CASES[case])
    del config["quantization_config"]
    modules = {name.removesuffix(".weight") for name in values}
    tensors = {name: tensor for name, tensor in tensors.items() if name.rpartition(".")[0] not in modules}
    tensors |= {name: torch.from_numpy(value) for name, value in values.items()}
    write_checkpoint(tmp_path / "plain", config, tensors)
    write_tokenizer(tmp_path / "plain")
    one, two = (build(tmp_path / kind, tmp_path / f"{kind}-bundle") for kind in ("quantised", "plain"))
    for name, file in one.manifest.files.items():
        if name.startswith("target"):
            assert file.sha256 == two.manifest.files[name].sha256, name
    assert decode(one) == decode(two)


@pytest.mark.parametrize(
    ("case", "words", "notes"),
    [
        ("gptq4_act_order", "GPTQ asymmetric int4 in groups of 32 in act-order (format gptq)", ("--precision int4",)),
        ("awq_rows", "AWQ asymmetric int4 in rows (gemm layout)", ("--precision int4",)),
        ("int8_rows", "compressed-tensors, symmetric int8 with a scale a row", ("--precision int8", "activations")),
        ("fp8_tiles", "fp8 (E4M3) with a scale for 24 x 40 weights", ("--precision fp8", "activations")),
    ],
)
def test_inspect(
    tmp_path: Path, case: str, words: str, notes: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    write_quantized(tmp_path, CASES[case])
    assert cli.main(["inspect", str(tmp_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["quantization"] == words and facts["matrices"] == {"quantized": 7, "all": 8}
    assert facts["fingerprint"] == open_checkpoint(str(tmp_path)).fingerprint(fast=True)
    assert cli.main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert words in shown.out and "7 of 8 quantised" in shown.out
    assert shown.err.count("note: ") == len(notes) and all(note in shown.err for note in notes)


def test_inspect_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_llama(tmp_path / "plain")
    assert cli.main(["inspect", str(tmp_path / "plain"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["quantization"] is None and facts["matrices"]["quantized"] == 0 and facts["notes"] == []
    config, tensors, _ = quantized_tensors(CASES["gptq4"])
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    write_checkpoint(tmp_path / "foreign", config, tensors)
    assert cli.main(["inspect", str(tmp_path / "foreign")]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and "'bitsandbytes', which is not read" in shown.err
