"""Builds that are refused, fail or are interrupted: one line says why, and nothing is left or lost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specexport.exporter import pipeline
from specexport.runtime.bundle import Bundle
from tests.exporter.building import build, failure

pytestmark = pytest.mark.usefixtures("traced_once")


def edit_config(checkpoint: Path, **changes: Any) -> None:
    config = json.loads((checkpoint / "config.json").read_text()) | changes
    (checkpoint / "config.json").write_text(json.dumps(config))


def edit_tensors(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Merge the shards into one file and change it."""
    tensors: dict[str, torch.Tensor] = {}
    for path in checkpoint.glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    (checkpoint / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors")


def unknown_key(checkpoint: Path) -> None:
    edit_config(checkpoint, logit_twist=0.5)


def unknown_architecture(checkpoint: Path) -> None:
    edit_config(checkpoint, architectures=["MambaForCausalLM"])


def unknown_tensor(checkpoint: Path) -> None:
    edit_tensors(checkpoint, lambda tensors: tensors.update({"model.layers.0.gate": torch.zeros(3)}))


def missing_tensor(checkpoint: Path) -> None:
    edit_tensors(checkpoint, lambda tensors: tensors.__delitem__("model.layers.1.mlp.up_proj.weight"))


def wrong_shape(checkpoint: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.self_attn.k_proj.weight"
        tensors[name] = tensors[name][:-1].contiguous()

    edit_tensors(checkpoint, cut)


def missing_shard(checkpoint: Path) -> None:
    next(iter(sorted(checkpoint.glob("*.safetensors")))).unlink()


def truncated_shard(checkpoint: Path) -> None:
    path = next(iter(sorted(checkpoint.glob("*.safetensors"))))
    path.write_bytes(path.read_bytes()[:-10])


def no_tokenizer(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (unknown_key, "logit_twist"),
        (unknown_architecture, "MambaForCausalLM"),
        (unknown_tensor, "model.layers.0.gate"),
        (missing_tensor, "model.layers.1.mlp.up_proj.weight"),
        (wrong_shape, "model.layers.1.self_attn.k_proj.weight"),
        (missing_shard, "model-00001-of-00002.safetensors"),
        (truncated_shard, "model-00001-of-00002.safetensors"),
        (no_tokenizer, "no tokenizer.json"),
    ],
)
def test_what_is_not_understood_is_refused_and_leaves_nothing(
    harm: Callable[[Path], None], message: str, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    harm(checkpoint)
    assert build(checkpoint, tmp_path / "out" / "b") == 1
    assert message in failure(capsys)
    assert os.listdir(tmp_path / "out") == []


def test_features_that_are_not_there(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert build(tiny_checkpoint, tmp_path / "b", "--features", "0,3") == 2
    assert "--features 3: the model has boundaries 0 to 2" in failure(capsys)
    assert os.listdir(tmp_path) == []


def test_an_interrupted_build_leaves_nothing(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        assert any(tmp_path.rglob("target.onnx.data"))  # half-way: the weights are there
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline, "lower_target", interrupt)
    assert build(tiny_checkpoint, tmp_path / "b") == 130
    assert os.listdir(tmp_path) == []


def test_overwriting(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "b"
    assert build(tiny_checkpoint, output) == 0
    before = Bundle.load(output).manifest
    (output / "report.json").write_text("{}")
    capsys.readouterr()
    assert build(tiny_checkpoint, output) == 2
    assert "--overwrite" in failure(capsys)
    assert (output / "report.json").exists()
    assert build(tiny_checkpoint, output, "--overwrite", "--drafter", "ngram") == 0
    after = Bundle.load(output, check="full").manifest
    assert (before.drafter, after.drafter) == ("suffix", "ngram") and after.files == before.files
    assert not (output / "report.json").exists()  # it was about another bundle
    assert os.listdir(tmp_path) == ["b"]


def test_a_failed_build_keeps_the_old_bundle(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out" / "b"
    assert build(checkpoint, output) == 0
    unknown_tensor(checkpoint)
    assert build(checkpoint, output, "--overwrite") == 1
    Bundle.load(output, check="full")
    assert os.listdir(output.parent) == ["b"]


def test_what_is_no_bundle_is_not_overwritten(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").write_text("years")
    assert build(tiny_checkpoint, tmp_path / "b", "--overwrite") == 2
    assert "not a bundle" in failure(capsys)
    assert (tmp_path / "b" / "thesis.tex").read_text() == "years"
