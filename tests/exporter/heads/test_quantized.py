"""Heads and quantisation: a head is read by its own config, whatever its target's says."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specexport.exporter.checkpoint import open_checkpoint
from specexport.exporter.heads.detect import open_head
from specexport.exporter.heads.merged import check_target, target_view
from specexport.runtime.errors import CheckpointError
from tests.exporter.heads.writers import TARGET, TARGET_CONFIG, Tiny, every
from tests.exporter.quantize.stored_writers import gptq
from tests.tiny import llama_tensors, write_checkpoint

ALL = dict(every())
CASE = gptq(8, -1, symmetric=False)


def packed(tensors: dict[str, torch.Tensor], prefix: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The projections under ``prefix`` as codes: (stored tensors, their values by plain name)."""
    stored, values, rng = dict(tensors), {}, random.Random(0)
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        if name.startswith(prefix) and module.endswith("_proj") and leaf == "weight":
            leaves, value = CASE.pack(rng, *stored.pop(name).shape)
            stored |= {f"{module}.{part}": tensor for part, tensor in leaves.items()}
            values[name] = torch.from_numpy(value)
    assert len(values) >= 7
    return stored, values


def same_values(tiny: Tiny, directory: Path, values: dict[str, torch.Tensor]) -> tuple[str, ...]:
    """Compare a head with its canonical tensors, ``values`` in the place of those that were quantised."""
    head = open_head(str(directory), target=tiny.target or TARGET)
    assert set(head.weights.names()) == set(tiny.canonical)
    for name, plain in tiny.canonical.items():
        wanted = values.get(head.weights.origin(name), plain)
        assert torch.equal(head.weights.read(name), wanted), name
    return head.warnings


@pytest.mark.parametrize("dialect", ["eagle3", "eagle1", "medusa_legacy"])
def test_a_plain_head_of_a_quantised_target(tmp_path: Path, dialect: str) -> None:
    """Its directory says nothing of quantisation, or repeats what its target's says: it is as it was trained."""
    tiny = ALL[dialect]
    assert tiny.config is not None
    assert len(same_values(tiny, tiny.write(tmp_path / "silent"), {})) == tiny.warnings
    copied = replace(tiny, config={**tiny.config, "quantization_config": CASE.config})
    warnings = same_values(tiny, copied.write(tmp_path / "copied"), {})
    assert len(warnings) == tiny.warnings + 1 and "a copy of its target's?" in warnings[0]
    foreign = replace(tiny, config={**tiny.config, "quantization_config": {"quant_method": "bitsandbytes"}})
    assert "'bitsandbytes'" in same_values(tiny, foreign.write(tmp_path / "foreign"), {})[0]


@pytest.mark.parametrize(("dialect", "prefix"), [("eagle3", "midlayer."), ("eagle1", "layers.")])
def test_a_quantised_head(tmp_path: Path, dialect: str, prefix: str) -> None:
    """By its own config, beside a target that knows nothing of it."""
    tiny = ALL[dialect]
    assert tiny.config is not None
    stored, values = packed(tiny.tensors, prefix)
    own = replace(tiny, config={**tiny.config, "quantization_config": CASE.config}, tensors=stored)
    directory = own.write(tmp_path / "own")
    same_values(tiny, directory, values)
    before = open_head(str(directory), target=tiny.target or TARGET).fingerprint()
    with pytest.raises(CheckpointError, match="is part of a quantised matrix"):
        open_head(str(replace(tiny, tensors=stored).write(tmp_path / "silent")), target=tiny.target or TARGET)
    name = next(name for name in stored if name.endswith("qweight"))
    stored[name][0, 0] ^= 1
    assert open_head(str(own.write(tmp_path / "other")), target=tiny.target or TARGET).fingerprint() != before
    del stored[name]
    with pytest.raises(CheckpointError, match="no qweight"):
        open_head(str(own.write(tmp_path / "damaged")), target=tiny.target or TARGET)


def test_a_quantised_target_beside_its_head(tmp_path: Path) -> None:
    tensors, values = packed(llama_tensors(TARGET_CONFIG | {"tie_word_embeddings": False}), "model.layers.")
    config = {**TARGET_CONFIG, "quantization_config": CASE.config}
    target = open_checkpoint(str(write_checkpoint(tmp_path / "target", config, tensors)))
    check_target(target)
    for name, value in values.items():
        assert torch.equal(target.weights.read(name), value)
    tiny = ALL["eagle3"]
    same_values(tiny, tiny.write(tmp_path / "head"), {})


def test_a_head_inside_a_quantised_target(tmp_path: Path) -> None:
    """One file, one config: the head's tensors are plain, the target's are codes, and each is read once."""
    tiny = ALL["mtp_mimo"]
    assert tiny.config is not None and tiny.others
    others, values = packed(tiny.others, "model.layers.")
    merged = replace(tiny, config={**tiny.config, "quantization_config": CASE.config}, others=others)
    directory = merged.write(tmp_path)
    same_values(tiny, directory, {})
    target = target_view(open_checkpoint(str(directory)))
    check_target(target)
    for name, value in values.items():
        assert torch.equal(target.weights.read(name), value)
    assert json.loads((directory / "config.json").read_text())["quantization_config"] == CASE.config
