"""Rows of quantised targets that do not depend on how many share a call, with attention alone computed in pairs: by
ONNX Runtime's own kernels, as ours need no pairs (``tests/engines/kernels``)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray

from specexport.engines import ort
from specexport.engines.ort import CPU_ANY_ROWS, CPU_TARGET_FILE, OrtEngine
from specexport.exporter.config import TargetConfig
from specexport.exporter.lower import lower_target
from specexport.exporter.onnx import export_target, save_target
from specexport.exporter.passes import matmul_nbits
from specexport.exporter.quantize.choice import PrecisionOptions, resolve
from specexport.runtime.engine import Step
from tests.exporter.test_parity import CASES, reference

SLOTS, VOCAB = 72, 96
TOKENS = np.random.default_rng(0).integers(0, VOCAB, SLOTS)
WIDTHS = (2, 3, 4, 5, 8, 72)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A case whose rows hold several of the largest blocks."""
    monkeypatch.setitem(CASES, "llama-wide", ("Llama", {"hidden_size": 256, "intermediate_size": 384}))


@pytest.fixture(autouse=True)
def without_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ort, "kernels_library", lambda: None)


def save(case: str, folder: Path, precision: PrecisionOptions) -> TargetConfig:
    """The exported graph of a random model in ``folder``."""
    _, config, weights = reference(case)
    plan, _ = resolve(precision, tied=config.tie_word_embeddings)
    model, target = export_target(config, SLOTS, torch.float32)
    save_target(model, target, weights, folder / "target.onnx", plan=plan)
    return config


def decode(engine: OrtEngine, width: int) -> list[NDArray[np.float32]]:
    """Logits and caches of :data:`TOKENS` in calls of this width; the window is full at the end."""
    engine.reset()
    starts = range(0, SLOTS, width)
    rows = [engine.run(Step.chain(TOKENS[start : start + width], start)).copy() for start in starts]
    return [np.concatenate(rows), *engine.read_cache(SLOTS)]


def differing(engine: OrtEngine) -> list[int]:
    """Widths whose logits or caches are not bit for bit those of one node a call."""
    plain = decode(engine, 1)
    return [width for width in WIDTHS if not all(map(np.array_equal, plain, decode(engine, width)))]


@pytest.mark.parametrize("precision", ["int8", "int4"])
@pytest.mark.parametrize("case", ["llama-gqa", "gemma3"])
def test_attention_alone_is_computed_in_pairs(case: str, precision: str, tmp_path: Path) -> None:
    """Which gives bit for bit what all of it in pairs gives, also behind sliding windows and in the last slot."""
    config = save(case, tmp_path, PrecisionOptions(precision, lm_head=precision))
    lower_target(tmp_path, config, SLOTS, "fp32")
    assert CPU_ANY_ROWS in ir.load(tmp_path / CPU_TARGET_FILE).metadata_props
    inside = OrtEngine(tmp_path, threads=1)
    assert differing(inside) == []
    found = decode(inside, 5)
    lower_target(tmp_path, config, SLOTS, "fp32", exact=False)
    assert CPU_ANY_ROWS not in ir.load(tmp_path / CPU_TARGET_FILE).metadata_props
    assert all(map(np.array_equal, found, decode(OrtEngine(tmp_path, threads=1), 5)))
    assert differing(OrtEngine(tmp_path, threads=1, exact=False)) != []


@pytest.mark.parametrize(
    "precision",
    [
        PrecisionOptions("int8", lm_head="fp32", embedding="fp32"),
        PrecisionOptions("int4", lm_head="int4", block_size=64),
    ],
    ids=["float lm_head", "large blocks"],
)
def test_where_products_need_pairs_the_engine_makes_them(precision: PrecisionOptions, tmp_path: Path) -> None:
    config = save("llama-wide", tmp_path, precision)
    lower_target(tmp_path, config, SLOTS, "fp32")
    assert CPU_ANY_ROWS not in ir.load(tmp_path / CPU_TARGET_FILE).metadata_props
    assert differing(OrtEngine(tmp_path, threads=1)) == []


def test_no_call_of_wide_heads_spans_the_border_of_two_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: 100 greedy tokens of Gemma-3-270M in int8 departed from plain decoding's when a chain of drafts reached
    from row 62 to row 64. A product of 256 values is two sums from 65 columns on, and one before."""
    monkeypatch.setitem(CASES, "llama-tall", ("Llama", {"head_dim": 256}))
    config = save("llama-tall", tmp_path, PrecisionOptions("int8"))
    lower_target(tmp_path, config, SLOTS, "fp32")
    engine = OrtEngine(tmp_path, threads=1)
    assert [engine.widest(past) for past in (0, 40, 62, 63)] == [63, 23, 1, SLOTS - 63]
    assert OrtEngine(tmp_path, threads=1, exact=False).widest(40) == SLOTS - 40
    plain = decode(engine, 1)
    for width in (2, 3, 5, 8, 16):
        engine.reset()
        rows: list[NDArray[np.float32]] = []
        while (past := sum(map(len, rows))) < SLOTS:
            taken = min(width, engine.widest(past))
            rows.append(engine.run(Step.chain(TOKENS[past : past + taken], past)).copy())
        assert all(map(np.array_equal, plain, [np.concatenate(rows), *engine.read_cache(SLOTS)])), width


def test_a_machine_whose_products_need_pairs_is_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that do not add up alike stand for kernels that do not: the engine sees it when it opens the graph."""
    monkeypatch.setattr(matmul_nbits, "LONE_ROW_BLOCKS", {4: 128, 8: 128})
    config = save("llama-wide", tmp_path, PrecisionOptions("int4", lm_head="int4", block_size=128))
    lower_target(tmp_path, config, SLOTS, "fp32")
    assert CPU_ANY_ROWS in ir.load(tmp_path / CPU_TARGET_FILE).metadata_props
    assert differing(OrtEngine(tmp_path, threads=1)) == []
    assert differing(OrtEngine(tmp_path, threads=1, exact=False)) != []
