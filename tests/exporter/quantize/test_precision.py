"""``--precision`` from the options to the tokens: defaults, contradictions, and bundles that decode."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from specexport.engines.ort import CPU_TARGET_FILE, TARGET_FILE, OrtEngine, cpu_files, load_cpu
from specexport.exporter.heads.build import precision_warnings
from specexport.exporter.pipeline import BuildOptions, build
from specexport.exporter.progress import Progress
from specexport.exporter.quantize.choice import PrecisionOptions, resolve
from specexport.exporter.quantize.plan import Format
from specexport.runtime import Bundle, SamplingParams, Session
from specexport.runtime.engine import Step
from specexport.runtime.errors import UsageError
from tests.e2e.test_heads import CASES, WINDOW, write_words
from tests.exporter.heads.writers import TARGET_CONFIG, Random, llama_tensors
from tests.tiny import write_checkpoint, write_llama


@pytest.mark.parametrize(
    ("asked", "tied", "formats", "activations"),
    [
        ({}, True, ("fp32", "fp32", "fp32"), "fp32"),
        ({"precision": "fp16"}, True, ("fp16", "fp16", "fp16"), "fp32"),
        ({"precision": "int8"}, False, ("int8", "int8", "int8"), "fp32"),
        ({"precision": "int4"}, False, ("int4", "int8", "int8"), "fp32"),
        ({"precision": "int4", "lm_head": "int4"}, True, ("int4", "int4", "int4"), "fp32"),
        ({"precision": "int4", "embedding": "fp16"}, True, ("int4", "fp16", "fp16"), "fp32"),
        ({"precision": "int4", "embedding": "fp16"}, False, ("int4", "int8", "fp16"), "fp32"),
        ({"precision": "fp8"}, False, ("fp8", "fp8", "fp16"), "fp16"),
        ({"precision": "nvfp4"}, True, ("nvfp4", "fp16", "fp16"), "fp16"),
    ],
)
def test_defaults(asked: dict[str, Any], tied: bool, formats: tuple[str, ...], activations: str) -> None:
    plan, info = resolve(PrecisionOptions(**asked), tied=tied)
    assert (plan.weights.kind, plan.lm_head.kind, plan.embedding.kind) == formats
    assert (info.weights, info.lm_head, info.embedding) == formats and info.activations == activations


def test_a_block_size_is_of_the_layers() -> None:
    plan, info = resolve(PrecisionOptions("int4", block_size=128, symmetric=False), tied=False)
    assert plan.weights == Format("int4", 128, False) and plan.lm_head == Format("int8", 0, False)
    assert info.block == 128


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"activations": "fp16"}, "--activations fp16 with --precision fp32: .*ask for --precision fp16"),
        ({"precision": "fp8", "block_size": 32}, "--block-size 32: fp8 has no block size"),
        ({"precision": "fp16", "symmetric": False}, "--asymmetric: fp16 has no zero points"),
        ({"precision": "int4", "lm_head": "int8", "embedding": "int4"}, "one table for both"),
    ],
)
def test_contradictions_are_refused(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve(PrecisionOptions(**asked), tied=True)


def made(source: Path, output: Path, precision: PrecisionOptions, **more: Any) -> Bundle:
    options = BuildOptions(source=str(source), output=output, window=128, precision=precision, **more)
    return build(options, Progress(quiet=True)).bundle


def logits(engine: OrtEngine, count: int = 24) -> Any:
    return engine.run(Step.chain(np.random.default_rng(5).integers(0, 300, count))).copy()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("precision", "limit"),
    [
        (PrecisionOptions("fp16"), 2e-3),
        (PrecisionOptions("bf16"), 2e-2),
        (PrecisionOptions("int8"), 0.1),
        (PrecisionOptions("int4", lm_head="int4", symmetric=False), 1.0),
    ],
    ids=lambda value: getattr(value, "precision", ""),
)
def test_every_cpu_precision_decodes(
    precision: PrecisionOptions, limit: float, tied: bool, tiny_bundle: Bundle, tmp_path: Path
) -> None:
    source = write_llama(tmp_path / "model", tie_word_embeddings=tied)
    bundle = made(source, tmp_path / "bundle", precision)
    for name in (TARGET_FILE, CPU_TARGET_FILE):
        onnx.checker.check_model(bundle.path / name)
    lowered, standard = OrtEngine(bundle.path, threads=1), OrtEngine(bundle.path, lowered=False, optimize=False)
    plain = logits(standard)
    size = float(np.abs(plain).max())
    codes = precision.precision.startswith("int")
    assert np.abs(logits(lowered) - plain).max() < (0.15 if codes else 1e-5) * size  # random weights amplify rounding
    if tied:  # the same weights
        assert 0 < np.abs(plain - logits(OrtEngine(tiny_bundle.path, threads=1))).max() < limit * size
    texts = [
        Session(bundle, drafter=name, threads=1).generate("a + b", SamplingParams(max_tokens=40)).token_ids
        for name in ("none", "suffix", "recycling", "auto")
    ]
    assert all(text == texts[0] for text in texts)
    full = (tiny_bundle.path / f"{TARGET_FILE}.data").stat().st_size
    assert (bundle.path / f"{TARGET_FILE}.data").stat().st_size < 0.8 * full
    assert bundle.manifest.target.precision.weights == precision.precision


@pytest.mark.parametrize("precision", ["fp8", "nvfp4"])
def test_gpu_precisions_build_and_the_cpu_refuses(precision: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    bundle = made(tiny_checkpoint, tmp_path / "bundle", PrecisionOptions(precision))
    onnx.checker.check_model(bundle.path / TARGET_FILE)
    assert not (bundle.path / CPU_TARGET_FILE).exists()
    with pytest.raises(UsageError, match=rf"weights {precision}: onnxruntime-cpu multiplies with .*--precision int4"):
        load_cpu(bundle.path)


def kinds(path: Path) -> dict[str, ir.DataType]:
    graph = ir.load(path).graph
    return {str(name): value.const_value.dtype for name, value in graph.initializers.items() if value.const_value}


@pytest.mark.parametrize("drafting", [None, "fp32", "int4"])
def test_a_head_has_its_own_precision_and_the_targets_tables(drafting: str | None, tmp_path: Path) -> None:
    """What is the head's is as asked; a table of the target's is read as the target stores it, from its file."""
    target = write_checkpoint(tmp_path / "target", TARGET_CONFIG, llama_tensors(Random(1)))
    write_words(target)
    heads = CASES["eagle1"].write(tmp_path / "heads")
    options = BuildOptions(
        source=str(target),
        output=tmp_path / "bundle",
        window=WINDOW,
        heads=(str(heads),),
        precision=PrecisionOptions("int8"),
        drafter_precision=drafting,
    )
    bundle = build(options, Progress(quiet=True)).bundle
    (info,) = (info for info in bundle.manifest.drafters if info.graph is not None)
    assert info.graph is not None
    stored = kinds(bundle.path / info.graph)
    own = {kind for name, kind in stored.items() if "proj.weight" in name and not name.endswith(("scales", "zeros"))}
    wanted = {None: ir.DataType.INT8, "fp32": ir.DataType.FLOAT, "int4": ir.DataType.INT4}[drafting]
    assert own == {wanted}
    shared = {name: kind for name, kind in stored.items() if name.startswith(("lm_head.codes", "embedding.codes"))}
    assert shared and set(shared.values()) == {ir.DataType.INT8}
    assert (bundle.path / cpu_files(info.graph)[0]).is_file()
    tokens = [
        Session(bundle, drafter=name, threads=1).generate([3, 1, 4, 1, 5], SamplingParams(max_tokens=24)).token_ids
        for name in ("none", info.name)
    ]
    assert len(tokens[0]) == len(tokens[1])


@pytest.mark.parametrize("case", ["eagle1", "medusa_legacy"])
def test_beside_fp32_a_head_has_8_bits_and_its_own_lm_head(case: str, tmp_path: Path) -> None:
    """Reading the target's fp32 lm_head would be most of a draft; its embedding is read a row at a time and shared."""
    target = write_checkpoint(tmp_path / "target", TARGET_CONFIG, llama_tensors(Random(1)))
    write_words(target)
    heads = CASES[case].write(tmp_path / "heads")
    options = BuildOptions(str(target), tmp_path / "bundle", window=WINDOW, heads=(str(heads),))
    bundle = build(options, Progress(quiet=True)).bundle
    (info,) = (info for info in bundle.manifest.drafters if info.graph is not None)
    assert info.graph is not None
    stored = kinds(bundle.path / info.graph)
    assert {kind for name, kind in stored.items() if name.endswith(".codes")} == {ir.DataType.INT8}
    assert "lm_head.codes" in stored
    assert {stored.get("embedding")} <= {ir.DataType.FLOAT, None}
    assert bundle.manifest.target.precision.weights == "fp32"


def test_a_head_for_another_precision_is_told() -> None:
    trained = SimpleNamespace(config={"specexport_training": {"target_precision": "fp32"}})
    heads: Any = {"eagle3": trained}
    assert precision_warnings(heads, "fp32") == [] == precision_warnings(heads, "bf16")
    (line,) = precision_warnings(heads, "int4")
    assert line.startswith("heads eagle3 were trained on the features of a target in fp32, this one is int4")
