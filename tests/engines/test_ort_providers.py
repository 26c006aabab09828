"""Providers that this machine lacks: how they are asked for, and what is refused. Nothing here runs on a GPU."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from specexport.engines import ort as engine_module
from specexport.engines import ort_providers
from specexport.engines.ort import OrtEngine, load_cuda, load_tensorrt, load_tensorrt_rtx
from specexport.engines.ort_providers import CPU, CUDA, PROVIDERS, TENSORRT, TENSORRT_RTX
from specexport.runtime.bundle import Bundle
from specexport.runtime.errors import BundleError, UsageError

INSTALLED = set(onnxruntime.get_available_providers())


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (
            load_cuda,
            r"has no CUDAExecutionProvider: install .*'pip install onnxruntime-gpu' or choose .*onnxruntime-cpu",
        ),
        (load_tensorrt, r"has no TensorrtExecutionProvider: install .*'pip install onnxruntime-gpu'"),
        (
            load_tensorrt_rtx,
            r"needs NvTensorRTRTX.*: install it with 'pip install onnxruntime-ep-nv-tensorrt-rtx-cu13'",
        ),
    ],
)
def test_one_line_names_the_package(tiny_bundle: Bundle, load: Callable[[Path], Any], message: str) -> None:
    if INSTALLED & {CUDA.name, TENSORRT.name}:
        pytest.skip("this build of onnxruntime has the providers")
    with pytest.raises(UsageError, match=message) as caught:
        load(tiny_bundle.path)
    assert "\n" not in str(caught.value)


def test_every_provider_is_an_entry_point(repository: Path) -> None:
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    points = project["entry-points"]["specexport.engines"]
    for name, provider in PROVIDERS.items():
        module, function = points[name].split(":")
        assert module == "specexport.engines.ort" and hasattr(engine_module, function)
        assert provider.engine == name
    assert {"tensorrt", "tensorrt-rtx"} <= points.keys() & project["optional-dependencies"].keys()


def test_compiling_providers_are_told_every_range(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for provider, prefix in ((TENSORRT, "trt"), (TENSORRT_RTX, "nv")):
        options = provider.options()
        assert options[f"{prefix}_profile_min_shapes"] == (
            "tokens:1x1,positions:1x1,tree:1x1x1,commit:0,order:1,select:1"
        )
        assert options[f"{prefix}_profile_max_shapes"].endswith("tree:1x256x256,commit:63,order:319,select:256")
        assert all(isinstance(value, str) for value in options.values())
        assert (tmp_path / "specexport" / provider.engine).is_dir()
    assert not CPU.options()


class FakeOptions:
    """Session options that remember what they were given."""

    def __init__(self) -> None:
        self.entries: dict[str, str] = {}
        self.devices: list[Any] = []

    def add_session_config_entry(self, key: str, value: str) -> None:
        self.entries[key] = value

    def add_provider_for_devices(self, devices: list[Any], options: dict[str, str]) -> None:
        self.devices = devices


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, str]]:
    """The plugin's module; what was registered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module = ModuleType("onnxruntime_ep_nv_tensorrt_rtx")
    module.get_library_path = lambda: "/lib/ep.so"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(ort_providers, "_PLUGIN_NAMES", set())
    registered: list[tuple[str, str]] = []
    monkeypatch.setattr(
        onnxruntime, "register_execution_provider_library", lambda name, path: registered.append((name, path))
    )
    return registered


def test_a_plugin_is_registered_once_and_given_its_device(
    plugin: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, other = SimpleNamespace(ep_name=TENSORRT_RTX.name), SimpleNamespace(ep_name="CPUExecutionProvider")
    monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: [other, ours, ours])
    options = FakeOptions()
    for _ in range(2):
        assert TENSORRT_RTX.configure(options) == []
    assert plugin == [(TENSORRT_RTX.name, "/lib/ep.so")]
    assert options.devices == [ours]
    assert options.entries == {"session.record_ep_graph_assignment_info": "1"}


def test_a_plugin_without_a_device_or_libraries(plugin: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_ep_devices", lambda: [])
    with pytest.raises(UsageError, match="NvTensorRTRTXExecutionProvider sees no device"):
        TENSORRT_RTX.configure(FakeOptions())

    def fails(name: str, path: str) -> None:
        raise RuntimeError("libcuda.so.1: cannot open shared object file\nat ...")

    monkeypatch.setattr(ort_providers, "_PLUGIN_NAMES", set())
    monkeypatch.setattr(onnxruntime, "register_execution_provider_library", fails)
    with pytest.raises(
        UsageError, match=r"cannot load NvTensorRTRTXExecutionProvider: libcuda.so.1: cannot open"
    ) as caught:
        TENSORRT_RTX.configure(FakeOptions())
    assert "\n" not in str(caught.value)


def session(providers: list[str], assigned: dict[str, list[str]]) -> Any:
    parts = [
        SimpleNamespace(ep_name=name, get_nodes=lambda kinds=kinds: [SimpleNamespace(op_type=kind) for kind in kinds])
        for name, kinds in assigned.items()
    ]
    return SimpleNamespace(get_providers=lambda: providers, get_provider_graph_assignment_info=lambda: parts)


def test_what_quietly_fell_back_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    path = Path("target.onnx")
    with pytest.raises(UsageError, match="could not start CUDAExecutionProvider"):
        CUDA.confirm(session(["CPUExecutionProvider"], {}), path)
    names = [TENSORRT_RTX.name, "CPUExecutionProvider"]
    with pytest.raises(BundleError, match="compiled nothing of it, all 2 nodes"):
        TENSORRT_RTX.confirm(session(names, {"CPUExecutionProvider": ["Attention", "Add"]}), path)
    TENSORRT_RTX.confirm(session(names, {TENSORRT_RTX.name: ["EPContext"]}), path)
    assert not caplog.records
    TENSORRT_RTX.confirm(session(names, {TENSORRT_RTX.name: ["EPContext"], names[1]: ["TopK"]}), path)
    assert "left 1 nodes to others, such as TopK" in caplog.text


def test_what_a_session_says_of_its_nodes(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real record of assignments, of the one provider that is here: names and calls are as assumed."""
    monkeypatch.setattr(
        ort_providers, "_LOG", SimpleNamespace(warning=lambda *_: pytest.fail("all nodes are the CPU's"))
    )
    compiling = ort_providers.Provider("CPUExecutionProvider", "x", "onnxruntime", "cpu", compiles=True)
    assert OrtEngine(tiny_bundle.path, threads=1, provider=compiling).slots == 128
