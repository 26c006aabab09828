"""``compile`` with the real TensorRT-RTX, which needs no GPU for it: plans, their records, and refusals."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from specexport.engines.plan import check_plan, check_sources, plan_graphs, read_plan
from specexport.engines.tensorrt import check_room, estimate
from specexport.engines.tensorrt_module import open_compiler
from specexport.exporter import cli
from specexport.exporter.checkpoint import open_checkpoint
from specexport.exporter.compile import CompileOptions, compile_bundle
from specexport.exporter.compile_graph import slow_codes, target_sizes
from specexport.exporter.config import read_config
from specexport.exporter.heads.build import DraftOptions
from specexport.exporter.onnx import build_module
from specexport.exporter.pipeline import BuildOptions, build
from specexport.exporter.progress import Progress
from specexport.exporter.quantize.choice import PrecisionOptions
from specexport.exporter.train.heads import (
    Shape,
    medusa_record,
    new_medusa,
    new_recurrent,
    recurrent_record,
    save_head,
)
from specexport.runtime import contract
from specexport.runtime.bundle import ENGINES, Bundle
from specexport.runtime.errors import BundleError, SpecExportError, UsageError

pytest.importorskip("tensorrt_rtx", reason="pip install 'specexport[tensorrt-rtx]'")

WINDOW, LAYERS = 96, 2
CAPABILITIES = ("8.6", "8.9", "12.0")
GRAPHS = ("target.onnx", "drafter.eagle3.onnx", "drafter.medusa.onnx")


def write_heads(checkpoint: Path, folder: Path) -> tuple[str, str]:
    """An EAGLE-3 head and Medusa heads with their first weights."""
    opened = open_checkpoint(str(checkpoint))
    config = read_config(opened.config)
    target = build_module(config, WINDOW, torch.float32, opened.weights)
    medusa = medusa_record(config, Shape(heads=2))
    eagle = recurrent_record("eagle3", config, (0, 1, 2), torch.arange(0, 300, 2), Shape())
    modules = {
        "medusa": (medusa, new_medusa(medusa, target, 300)),
        "eagle3": (eagle, new_recurrent(eagle, target, WINDOW, 300)),
    }
    for name, (record, module) in modules.items():
        own = {key: value for key, value in module.named_parameters() if getattr(record, key, None) != "target"}
        save_head(folder / name, record, own, {}, target_name="tiny")
    return str(folder / "eagle3"), str(folder / "medusa")


def make(checkpoint: Path, output: Path, precision: PrecisionOptions, **options: Any) -> Bundle:
    request = BuildOptions(
        source=str(checkpoint), output=output, window=WINDOW, precision=precision, check=False, **options
    )
    return build(request, Progress(quiet=True)).bundle


@pytest.fixture(scope="module")
def half(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """fp16, with both heads."""
    folder = tmp_path_factory.mktemp("half")
    heads = write_heads(tiny_checkpoint, folder)
    draft = DraftOptions(depth=2, topk=2, nodes=4)
    return make(
        tiny_checkpoint, folder / "bundle", PrecisionOptions("fp16", activations="fp16"), heads=heads, draft=draft
    )


@pytest.fixture(scope="module")
def int4(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    precision = PrecisionOptions("int4", activations="fp16")
    return make(tiny_checkpoint, tmp_path_factory.mktemp("int4") / "bundle", precision)


@pytest.fixture(scope="module")
def compiled(half: Bundle, device: Path) -> Path:
    options = CompileOptions(half.path, str(device), capabilities=CAPABILITIES)
    return compile_bundle(options, Progress(quiet=True)).folder


def test_every_layer_is_fused_in_every_profile(half: Bundle, compiled: Path) -> None:
    assert set(plan_graphs(compiled)) == set(GRAPHS)
    for graph in GRAPHS:
        record = read_plan(compiled, graph)
        check_plan(compiled, record)
        check_sources(record, dict(half.manifest.files))
        assert record.fused and not record.plain and record.capabilities == CAPABILITIES
        assert record.peak_rss_bytes > 1 << 20 and record.build_seconds > 0
    target, eagle, medusa = (read_plan(compiled, graph) for graph in GRAPHS)
    assert (target.layers, target.cache_tensors) == (LAYERS, 2 * LAYERS)
    assert (eagle.layers, eagle.cache_tensors, medusa.layers, medusa.cache_tensors) == (1, 2, 0, 0)
    assert target.aliases == {present: past for past, present in contract.cache_names(LAYERS)}
    names = [x.name for x in target.outputs]
    assert names[:2] == [contract.LOGITS, contract.FEATURES]
    assert {contract.TOP_VALUES, contract.TOP_TOKENS} < set(names)


def test_the_profiles(compiled: Path) -> None:
    sizes = [profile.dims for profile in read_plan(compiled, "target.onnx").profiles]
    assert sizes == [
        {"T": 1, "A": 3, "O": 4, "R": 1},
        {"T": 4, "A": 3, "O": 7, "R": 4},
        {"T": 16, "A": 3, "O": 19, "R": 1},
    ]
    assert [p.dims for p in read_plan(compiled, GRAPHS[2]).profiles] == [{}]
    entries = [profile.dims["A"] for profile in read_plan(compiled, GRAPHS[1]).profiles]
    assert entries == [1, 2, 3, 16, 64], "each that two drafts and a bonus token leave, then those of prompts"


def test_sizes_fit_the_window() -> None:
    sizes = target_sizes([1, 8, 64], 20, 512, 40)
    assert sizes == [
        {"T": 1, "A": 7, "O": 8, "R": 1},
        {"T": 8, "A": 7, "O": 15, "R": 8},
        {"T": 33, "A": 7, "O": 40, "R": 1},
    ]
    assert target_sizes([1], 20, 1, 40) == [{"T": 1, "A": 1, "O": 2, "R": 1}]


def test_the_bundle_stays_whole(half: Bundle, compiled: Path) -> None:
    assert compiled == half.path / ENGINES / "small"
    Bundle.load(half.path, check="full")
    assert not [path.name for path in compiled.parent.iterdir() if path != compiled]
    assert not list(compiled.glob("*.onnx")), "lowered graphs are gone"
    assert "Layers:" in (compiled / "target.log").read_text()


def test_int4_by_command(int4: Bundle, device: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["compile", str(int4.path), "--profile", str(device), "--capability", "8.6", "--json"]
    assert cli.main(words) == 0
    (graph,) = json.loads(capsys.readouterr().out)["graphs"]
    assert graph["attention_fused"] == graph["layers"] == LAYERS
    assert graph["cache_in_place"] == graph["cache_tensors"] == 2 * LAYERS
    assert Path(graph["plan"]).stat().st_size == graph["bytes"] and graph["capabilities"] == ["8.6"]
    assert cli.main(["inspect", str(Path(graph["plan"]).parent)]) == 0
    shown = capsys.readouterr().out
    assert "2 of 2 layers fused" in shown and "T=4 A=3 O=7 R=4" in shown and "int4 weights" in shown
    assert cli.main(["inspect", graph["plan"], "--full", "--json"]) == 0
    assert (
        json.loads(capsys.readouterr().out)["graphs"][0]["sha256"]
        == read_plan(Path(graph["plan"]).parent, "target.onnx").sha256
    )


@pytest.mark.parametrize(
    ("capabilities", "message"),
    [
        (("7.5",), "int4 weights need capability 8.0 or later, not 7.5"),
        (("8.7",), "not 8.7: compile on the device itself"),
        (("8.8",), "not 8.8: name one of those"),
    ],
)
def test_capabilities_that_cannot_be(int4: Bundle, device: Path, capabilities: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compile_bundle(CompileOptions(int4.path, str(device), capabilities=capabilities), Progress(quiet=True))


def test_codes_that_no_kernel_takes(int4: Bundle) -> None:
    model = ir.load(int4.path / "target.onnx")
    assert slow_codes(model) == []
    for node in model.graph:
        if node.name == "layers.0.attention.o_proj.weight.dequantize":
            del node.attributes["block_size"]
    assert slow_codes(model) == ["layers.0.attention.o_proj.weight (int4 with one scale a row)"]


@pytest.mark.parametrize("weights", ["int8", "fp8", "nvfp4"])
def test_other_formats(tiny_checkpoint: Path, device: Path, tmp_path: Path, weights: str) -> None:
    bundle = make(tiny_checkpoint, tmp_path / "bundle", PrecisionOptions(weights, activations="fp16"))
    options = CompileOptions(bundle.path, str(device), capabilities=("12.0",))
    (record,) = compile_bundle(options, Progress(quiet=True)).plans
    assert record.fused and record.weights == weights


def test_float32_falls_back(tiny_bundle: Bundle, device: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    with pytest.raises(SpecExportError, match=r"target.onnx: .*attention.0.*--activations fp16") as caught:
        compile_bundle(CompileOptions(bundle, str(device)), Progress(quiet=True))
    assert "--allow-fallback" in str(caught.value)
    assert not list((bundle / ENGINES).glob("*/")), "nothing half-written"


def test_only_plans_are_replaced(half: Bundle, device: Path, tmp_path: Path) -> None:
    folder = half.path / ENGINES / "notes"
    folder.mkdir(parents=True)
    (folder / "mine.txt").write_text("keep")
    other = tmp_path / "notes.yaml"
    other.write_text(f"extends: {device}\n")
    try:
        with pytest.raises(UsageError, match="holds something else than plans"):
            compile_bundle(CompileOptions(half.path, str(other)), Progress(quiet=True))
        assert (folder / "mine.txt").read_text() == "keep"
    finally:
        shutil.rmtree(folder)


def test_a_plan_of_older_graphs(half: Bundle, compiled: Path) -> None:
    record = read_plan(compiled, "target.onnx")
    files = {name: info for name, info in half.manifest.files.items() if name != "target.onnx"}
    with pytest.raises(BundleError, match="compile it again"):
        check_sources(record, files)


def test_no_room(tmp_path: Path) -> None:
    memory, disk = estimate(5 << 30, 32, 12)
    assert memory > disk > 5 << 30
    with pytest.raises(SpecExportError, match=r"needs about .* GiB of memory, 1.0 GiB are free"):
        check_room(memory, 1, tmp_path, 1 << 30)
    with pytest.raises(SpecExportError, match="of disk space"):
        check_room(1, 1 << 60, tmp_path, None)


def test_what_the_module_can_do() -> None:
    compiler = open_compiler("tensorrt-rtx")
    assert {"7.5", *CAPABILITIES} <= set(compiler.targets) and not compiler.lacks
    with pytest.raises(UsageError, match="onnxruntime-cuda needs no plans"):
        open_compiler("onnxruntime-cuda")
