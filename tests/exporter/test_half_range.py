"""Numbers that half precision does not have are refused, where heads are saved and where graphs are written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specexport.exporter.checkpoint import open_checkpoint
from specexport.exporter.config import read_config
from specexport.exporter.heads.detect import open_head
from specexport.exporter.heads.modules import MedusaHeads
from specexport.exporter.onnx import build_module
from specexport.exporter.quantize.plan import narrow
from specexport.exporter.train.heads import Shape, medusa_record, new_medusa, save_head
from specexport.runtime.errors import CheckpointError

TOO_MUCH = 70000.0


def test_the_ends_of_half_precision() -> None:
    least = torch.tensor([65504.0, -65504.0, 0.0])
    assert narrow("w", least, torch.float16).dtype == torch.float16
    assert torch.equal(narrow("w", torch.tensor([TOO_MUCH]), torch.float32), torch.tensor([TOO_MUCH]))
    assert torch.isfinite(narrow("w", torch.tensor([TOO_MUCH]), torch.bfloat16)).all()
    with pytest.raises(CheckpointError, match=r"w holds -70000, fp16 ends at 65504: build with --activations bf16"):
        narrow("w", torch.tensor([1.0, -TOO_MUCH]), torch.float16)
    with pytest.raises(CheckpointError, match="w holds nan"):
        narrow("w", torch.tensor([float("nan")]), torch.float16)


def test_a_head_that_is_too_large(tiny_checkpoint: Path, tmp_path: Path) -> None:
    opened = open_checkpoint(str(tiny_checkpoint))
    config = read_config(opened.config)
    target = build_module(config, 64, torch.float32, opened.weights)
    record = medusa_record(config, Shape(heads=2))
    module = new_medusa(record, target, 300)
    own = {name: parameter for name, parameter in module.named_parameters() if name != "lm_head"}
    name, parameter = next((name, value) for name, value in own.items() if name.endswith(".weight"))
    with torch.no_grad():
        parameter[0, 0] = TOO_MUCH
    with pytest.raises(CheckpointError, match=rf"{name} holds 70000, .*save it with --dtype bf16 or fp32"):
        save_head(tmp_path / "head", record, own, {}, target_name="tiny", dtype="fp16")
    assert not list((tmp_path / "head").iterdir())
    save_head(tmp_path / "head", record, own, {}, target_name="tiny", dtype="fp32")
    head = open_head(str(tmp_path / "head"), target=config)
    module = MedusaHeads(head.record, torch.float16, 2, 300)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"head tensor .* holds 70000, .*build with --activations bf16 or fp32"):
        for _, read in module.values(head.weights):
            read()
