"""Calibration of a whole tiny model, against Hessians taken from the whole module at once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor

from specexport.exporter import cli
from specexport.exporter.checkpoint import open_checkpoint
from specexport.exporter.config import read_config
from specexport.exporter.layers import Target
from specexport.exporter.onnx import build_module
from specexport.exporter.quantize.calibrate import MIN_TOKENS, Calibrated, calibration_text
from specexport.exporter.quantize.gptq import gptq
from specexport.exporter.quantize.layerwise import Layerwise
from specexport.exporter.quantize.plan import Format
from specexport.exporter.quantize.rtn import quantizer
from specexport.runtime.errors import SpecExportError, UsageError
from specexport.runtime.tokenizer import Tokenizer

SLOTS = 64
FORM = Format("int4", 32, True)
ATTENTION = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj")
PROJECTIONS = (*ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def sequences(seed: int = 0, whole: int = 2) -> list[tuple[int, ...]]:
    random = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, 300, (count,), generator=random).tolist()) for count in [SLOTS] * whole + [40]]


def load(checkpoint: Path, sequences: list[tuple[int, ...]]) -> tuple[Target, Calibrated]:
    source = open_checkpoint(str(checkpoint))
    config = read_config(source.config)
    target = build_module(config, SLOTS, torch.float32, source.weights)
    return target, Calibrated(config, source.weights, SLOTS, FORM, sequences)


def run(target: Target, tokens: tuple[int, ...]) -> Tensor:
    """Logits [len, V] of the whole module in one call of the contract."""
    count = len(tokens)
    config, positions, zero = target.config, torch.arange(count), torch.zeros(1, dtype=torch.int64)
    cache = torch.zeros(1, config.num_kv_heads, SLOTS, config.head_dim)
    causal = torch.ones(1, count, count, dtype=torch.bool).tril()
    caches = [cache] * (2 * config.num_layers)
    ids = torch.tensor([tokens])
    logits: Tensor = target(ids, positions[None], causal, zero, zero, zero[:0], positions, positions, *caches)[0]
    return logits


def hessian(target: Target, name: str, texts: list[tuple[int, ...]]) -> Tensor:
    seen: list[Tensor] = []
    linear = target.get_submodule(name)
    handle = linear.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    for tokens in texts:
        run(target, tokens)
    handle.remove()
    rows = torch.cat(seen)
    return rows.t() @ rows / len(rows)


def test_each_matrix_is_fitted_to_what_the_quantised_ones_before_it_give(tiny_checkpoint: Path) -> None:
    """Independently: the whole module, its weights replaced one projection after another."""
    texts = sequences()
    target, calibrated = load(tiny_checkpoint, texts)
    for layer in range(target.config.num_layers):
        for name in PROJECTIONS:
            full = f"layers.{layer}.{name}"
            weight = target.get_submodule(full).weight
            assert isinstance(weight, Tensor)
            matrix = weight.t().contiguous()
            # q, k and v have one input: a quantised q does not change that of k.
            expected = gptq(matrix, hessian(target, full, texts), FORM.fitted(matrix.shape[1]))
            found = calibrated(f"{full}.weight", matrix, FORM.fitted(matrix.shape[1]))
            torch.testing.assert_close(found.scales, expected.scales)
            assert float((found.codes != expected.codes).float().mean()) < 0.01  # sums in another order
            weight.copy_(found.dequantize().t())


def test_it_is_closer_to_the_model_than_rounding_to_nearest(tiny_checkpoint: Path) -> None:
    """On other text than it was calibrated with, and the same codes each time."""
    texts, other = sequences(whole=40), sequences(1)
    reference, _ = load(tiny_checkpoint, texts)
    wanted = [run(reference, tokens) for tokens in other]
    errors = []
    for method in ("nearest", "calibrated", "again"):
        target, calibrated = load(tiny_checkpoint, texts)
        for name in [f"layers.{layer}.{name}" for layer in range(2) for name in PROJECTIONS]:
            weight = target.get_submodule(name).weight
            assert isinstance(weight, Tensor)
            matrix = weight.t().contiguous()
            make = quantizer if method == "nearest" else calibrated
            weight.copy_(make(f"{name}.weight", matrix, FORM.fitted(matrix.shape[1])).dequantize().t())
        errors.append(sum(float((run(target, t) - w).square().mean()) for t, w in zip(other, wanted, strict=True)))
    assert errors[1] < 0.9 * errors[0] and errors[1] == errors[2]


def test_layer_by_layer_is_the_whole_module(tiny_checkpoint: Path) -> None:
    texts = sequences()
    target, _ = load(tiny_checkpoint, texts)
    source = open_checkpoint(str(tiny_checkpoint))
    layerwise = Layerwise(target.config, source.weights, SLOTS, texts)
    for _, block in layerwise.blocks():
        layerwise.advance(block)
    head = layerwise.finish()
    for tokens, state in zip(texts, layerwise.states, strict=True):
        torch.testing.assert_close(state[0] @ head.t(), run(target, tokens), rtol=1e-4, atol=1e-4)


def test_matrices_outside_the_blocks_are_rounded_and_order_is_kept(tiny_checkpoint: Path) -> None:
    _, calibrated = load(tiny_checkpoint, sequences())
    matrix = torch.randn(8, 64)
    assert torch.equal(calibrated("embedding", matrix, FORM).codes, quantizer("embedding", matrix, FORM).codes)
    calibrated("layers.1.mlp.down_proj.weight", matrix, FORM)
    with pytest.raises(SpecExportError, match="out of order"):
        calibrated("layers.0.mlp.down_proj.weight", matrix, FORM)


def test_a_text_becomes_sequences_and_a_short_one_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_directory(tiny_checkpoint)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    found = calibration_text(text, tokenizer, 1000, slots=SLOTS)
    assert sum(map(len, found)) == 1000 and {len(tokens) for tokens in found[:-1]} == {SLOTS}
    text.write_text("too short")
    with pytest.raises(UsageError, match=f"at least {MIN_TOKENS}"):
        calibration_text(text, tokenizer, 1000, slots=SLOTS)


def test_build_makes_the_codes_that_calibration_gives(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """Through the command, into the graph, in the order in which it writes its weights."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\ndef add(a, b):\n    return a + b\n" * 40)
    bundle = tmp_path / "bundle"
    options = ["--precision", "int4", "--window", str(SLOTS), "--calibrate", str(text), "--calibration-tokens", "512"]
    assert cli.main(["build", str(tiny_checkpoint), "-o", str(bundle), *options]) == 0
    source = open_checkpoint(str(tiny_checkpoint))
    config = read_config(source.config)
    texts = calibration_text(text, Tokenizer.from_directory(bundle), 512, SLOTS)
    calibrated = Calibrated(config, source.weights, SLOTS, FORM, texts)
    graph = onnx.load(bundle / "target.onnx")
    stored = {value.name: numpy_helper.to_array(value) for value in graph.graph.initializer}
    for layer in range(2):
        for name in PROJECTIONS:
            full = f"layers.{layer}.{name}.weight"
            found = calibrated(full, torch.empty(0), FORM)
            codes = next(value for key, value in stored.items() if key.startswith(full) and str(value.dtype) == "int4")
            assert np.array_equal(codes.astype(np.int8).reshape(-1), found.codes.t().reshape(-1).numpy()), full


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--calibrate", "TEXT"], "--calibrate is for --precision int4 and int8"),
        (["--precision", "int4", "--calibration-tokens", "5"], "name it with --calibrate"),
        (["--precision", "int4", "--calibrate", "none.txt"], "no such file"),
        (["--precision", "int4", "--calibrate", "TEXT"], "at least 128"),
    ],
)
def test_calibration_that_cannot_be_is_refused_before_anything_is_written(
    tiny_checkpoint: Path, tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("too short")
    words = [str(text) if word == "TEXT" else word for word in options]
    assert cli.main(["build", str(tiny_checkpoint), "-o", str(tmp_path / "bundle"), *words]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "bundle").exists()
