"""``compile --plugin`` with the real TensorRT-RTX: the attention plugin in every layer and profile of a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specexport.engines.plan import read_plan
from specexport.exporter import cli
from specexport.exporter.pipeline import BuildOptions, build
from specexport.exporter.progress import Progress
from specexport.exporter.quantize.choice import PrecisionOptions
from specexport.runtime.bundle import Bundle
from tests.tiny import write_llama

pytest.importorskip("tensorrt_rtx", reason="pip install 'specexport[tensorrt-rtx]'")

PROFILES, LAYERS = 3, 2


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A target whose heads are as wide as a kernel's."""
    folder = tmp_path_factory.mktemp("wide")
    source = write_llama(folder / "checkpoint", hidden_size=256)
    precision = PrecisionOptions("fp16", activations="fp16")
    request = BuildOptions(str(source), folder / "bundle", window=96, precision=precision, check=False)
    return build(request, Progress(quiet=True)).bundle


def compile_with_plugin(bundle: Path, device: Path, *more: str) -> int:
    return cli.main(["compile", str(bundle), "--profile", str(device), "--plugin", "--json", *more])


def test_every_layer_attends_with_the_plugin(wide: Bundle, device: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compile_with_plugin(wide.path, device, "--capability", "8.6", "--capability", "8.9") == 0
    (graph,) = json.loads(capsys.readouterr().out)["graphs"]
    assert (graph["layers"], graph["attention_fused"]) == (LAYERS, LAYERS)
    assert (graph["cache_tensors"], graph["cache_in_place"]) == (2 * LAYERS, 2 * LAYERS)
    assert graph["plugins"] == ["::TreeAttention:1"] and len(graph["profiles"]) == PROFILES
    folder = Path(graph["plan"]).parent
    log = (folder / "target.log").read_text()
    assert log.count("PluginType: TreeAttention") == PROFILES * LAYERS
    assert "_mha_" not in log.partition("Layers:")[2], "nothing else attends"
    record = read_plan(folder, "target.onnx")
    assert record.fused and len(record.aliases) == 2 * LAYERS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 16}, "heads of width 64, 80, 96, 128, 256, the bundle's are 16 wide: compile without --plugin"),
        ({"precision": {"activations": "fp32"}}, "activations are fp32: build with --activations fp16"),
    ],
)
def test_what_has_no_kernel(
    wide: Bundle,
    device: Path,
    tmp_path: Path,
    change: dict[str, Any],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Refused before the compiler sees it: of float32 in a plugin it says nothing, and ends."""
    for file in wide.path.iterdir():
        if file.is_file():
            (tmp_path / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    target = manifest["target"]
    target |= change | {"precision": target["precision"] | change.get("precision", {})}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    assert compile_with_plugin(tmp_path, device) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "engines").exists()
