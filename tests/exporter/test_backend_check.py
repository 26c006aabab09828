"""``verify --backend``: engines that agree, and a lowering that was broken on purpose, found where it is broken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest

from specexport.engines.ort import CPU_TARGET_FILE
from specexport.exporter import cli
from specexport.exporter.backend_check import compare
from specexport.exporter.progress import Progress
from specexport.runtime.bundle import Bundle


@pytest.fixture
def broken(tiny_bundle: Bundle, tmp_path: Path) -> Path:
    """The bundle with the second layer's attention of the CPU's lowering scaled wrongly."""
    copy = Path(shutil.copytree(tiny_bundle.path, tmp_path / "copy"))
    model = onnx.load(copy / CPU_TARGET_FILE, load_external_data=False)
    node = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"][1]
    (scale,) = (attribute for attribute in node.attribute if attribute.name == "scale")
    scale.f *= 1.5
    onnx.save(model, copy / CPU_TARGET_FILE)
    path = copy / "manifest.json"
    manifest: dict[str, Any] = json.loads(path.read_text())
    manifest["files"][CPU_TARGET_FILE]["bytes"] = (copy / CPU_TARGET_FILE).stat().st_size
    path.write_text(json.dumps(manifest))
    return copy


def test_engines_that_agree(tiny_bundle: Bundle) -> None:
    pytest.importorskip("openvino")
    for backend, least in (("onnxruntime-cpu", 20), ("openvino-cpu-f32", 30)):
        found = compare(tiny_bundle.path, backend, threads=1, layers=True, progress=Progress(quiet=True))
        assert found.passed and found.first is None
        assert found.outputs.keys() == {"logits", "caches"}
        assert all(0 < worst.relative < 1e-5 for worst in found.outputs.values())
        assert len(found.layers) >= least
        assert {"MatMul", "SwiGLU", "Mul"} & {found.operators[name] for name in found.layers}


def test_the_first_tensor_that_is_off_is_named(broken: Path) -> None:
    found = compare(broken, "onnxruntime-cpu", threads=1, layers=True, progress=Progress(quiet=True))
    assert not found.passed
    names = list(found.layers)
    assert found.first is not None and found.operators[found.first] == "MatMul"  # what reads that attention
    before = [found.layers[name].relative for name in names[: names.index(found.first)]]
    assert len(before) > 5 and max(before) < 1e-5
    assert found.outputs["logits"].relative > 1e-3
    layers = found.to_dict()["layers"]
    assert layers["first"]["tensor"] == found.first and layers["compared"] == len(names)
    # The last layer's caches hold what came before the attention: they are right.
    assert found.outputs["caches"].relative < 1e-5


def test_the_verb(broken: Path, tiny_bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--backend", "onnxruntime-cpu", "--threads", "1"]
    assert cli.main(["verify", str(tiny_bundle.path), *arguments, "--layers", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["passed"] is True
    assert cli.main(["verify", str(broken), *arguments, "--layers"]) == 1
    shown = capsys.readouterr().out.splitlines()
    assert any(line.startswith("FAILED  first tensor that is off: ") and " of MatMul, by " in line for line in shown)
    assert shown[-1] == "FAILED"
    assert cli.main(["verify", str(tiny_bundle.path), *arguments]) == 0
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers"], "--layers is for --backend"),
        (["--backend", "onnxruntime-cpu", "--quality"], "--backend goes with"),
        (["--backend", "onnxruntime-cpu", "--engine", "x"], "--backend goes with"),
        (["--backend", "nothing"], "unknown engine 'nothing'"),
    ],
)
def test_refused(tiny_bundle: Bundle, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert cli.main(["verify", str(tiny_bundle.path), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("tensorrt-rtx", "a plan of tensorrt-rtx gives no tensors but its outputs: leave --layers out, or name"),
        ("tensorrt", "--backend onnxruntime-tensorrt, where TensorRT compiles the graph with its tensors as outputs"),
        ("nothing", "expected one of onnxruntime-cpu, "),
    ],
)
def test_layers_that_cannot_be_seen(
    tiny_bundle: Bundle, capsys: pytest.CaptureFixture[str], backend: str, message: str
) -> None:
    assert cli.main(["verify", str(tiny_bundle.path), "--backend", backend, "--layers"]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1, "and nothing was run before"
