"""``compile`` with what no real module here is: TensorRT 10.3 of JetPack 6, builders that refuse or abort."""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from specexport.engines.plan import plan_graphs, read_plan
from specexport.exporter.compile import CompileOptions, compile_bundle
from specexport.exporter.passes import plain
from specexport.exporter.progress import Progress
from specexport.runtime.bundle import ENGINES, Bundle
from specexport.runtime.errors import SpecExportError, UsageError

LAYERS = 2


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``import tensorrt``, here and in a worker, finds the old API."""
    folder = tmp_path / "modules"
    folder.mkdir()
    shutil.copy(Path(__file__).parent.parent / "engines" / "fake_tensorrt.py", folder / "tensorrt.py")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    importlib.invalidate_caches()
    yield
    sys.modules.pop("tensorrt", None)


@pytest.fixture
def bundle(tiny_bundle: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))


def options(bundle: Path, **changes: object) -> CompileOptions:
    return CompileOptions(bundle, "jetson-orin-nano", **changes)  # type: ignore[arg-type]


def test_plain_operators_and_said_so(old: None, bundle: Path, capfd: pytest.CaptureFixture[str]) -> None:
    result = compile_bundle(options(bundle), Progress())
    assert "has no Attention, TensorScatter, RotaryEmbedding, RMSNormalization, and --plugin" in capfd.readouterr().err
    assert plan_graphs(result.folder) == ["target.onnx"] and result.folder.name == "jetson-orin-nano"
    record = read_plan(result.folder, "target.onnx")
    assert record.plain and not record.fused and not record.aliases and record.capabilities == ("8.7",)
    assert (record.module, record.version) == ("tensorrt", "10.3.0")
    pinned = ast.literal_eval((result.folder / record.plan).read_text())
    assert [shapes["tokens"] for shapes in pinned] == [p.shape(record.inputs[0]) for p in record.profiles]
    assert len(pinned) == 8 and pinned[-1]["select"] == (1,)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("error", r"tensorrt 10.3.0 refuses it: no tactic for layer 7; build log: .*target.failed.log"),
        ("abort", r"tensorrt 10.3.0 ended by SIGABRT while compiling"),
    ],
)
def test_a_build_that_ends_badly(
    old: None, bundle: Path, monkeypatch: pytest.MonkeyPatch, end: str, message: str
) -> None:
    monkeypatch.setenv("FAKE_TENSORRT", end)
    with pytest.raises(SpecExportError, match=message):
        compile_bundle(options(bundle), Progress(quiet=True))
    assert [path.name for path in (bundle / ENGINES).iterdir()] == ["jetson-orin-nano.target.failed.log"]
    Bundle.load(bundle)


def test_a_node_that_the_parser_refuses(old: None, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "lower", lambda model, operators: model)
    with pytest.raises(SpecExportError, match=r"refuses it: node 3 \(unknown operator\): .*no importer"):
        compile_bundle(options(bundle, allow_fallback=True), Progress(quiet=True))


def test_one_device_at_a_time(old: None, bundle: Path) -> None:
    with pytest.raises(UsageError, match="for the device at hand only"):
        compile_bundle(options(bundle, capabilities=("8.7", "9.0")), Progress(quiet=True))


def test_without_the_module(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(UsageError, match=r"backend tensorrt needs the module tensorrt .*JetPack"):
        compile_bundle(options(bundle), Progress(quiet=True))
