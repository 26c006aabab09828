"""What is refused before a plan is deserialised, and after, in one line each; over :mod:`tests.engines.fake_gpu`."""

from __future__ import annotations

import builtins
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specexport.engines import plan_loader
from specexport.engines.plan import read_plan, write_plan
from specexport.engines.tensorrt_runtime import load_tensorrt, load_tensorrt_rtx
from specexport.runtime.bundle import ENGINES, TARGET_GRAPH, Bundle, sha256
from specexport.runtime.errors import BundleError, SpecExportError, UsageError
from tests.engines.fake_driver import CAPABILITY
from tests.engines.fake_gpu import VERSION, Gpu, compile_fake, target_profiles

PLUGIN = "specexport::TreeAttention:1"


@pytest.fixture
def bundle(tiny_bundle: Bundle, tmp_path: Path) -> Bundle:
    copy = Path(shutil.copytree(tiny_bundle.path, tmp_path / "bundle"))
    compile_fake(Bundle.load(copy), target_profiles((1, 2)))
    return Bundle.load(copy)


def edit(bundle: Bundle, **changes: Any) -> None:
    """Change the record alone."""
    folder = bundle.path / ENGINES / "fake"
    write_plan(folder, replace(read_plan(folder, TARGET_GRAPH), **changes))


def flip(bundle: Bundle, sign: bool = False) -> None:
    """Flip a bit in the plan; with ``sign`` the record says so too."""
    path = bundle.path / ENGINES / "fake" / "target.plan"
    plan = bytearray(path.read_bytes())
    plan[3] ^= 1
    path.write_bytes(plan)
    if sign:
        edit(bundle, sha256=sha256(path))


def truncate(bundle: Bundle) -> None:
    path = bundle.path / ENGINES / "fake" / "target.plan"
    path.write_bytes(path.read_bytes()[:-1])


def list_other(bundle: Bundle) -> None:
    """A manifest that lists another plan, as of a bundle that was compiled where it was built."""
    path = bundle.path / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["files"][f"{ENGINES}/fake/target.plan"] = {"bytes": 5, "sha256": "0" * 64}
    path.write_text(json.dumps(manifest))


def rename_profile(bundle: Bundle) -> None:
    folder = bundle.path / ENGINES / "fake"
    profiles = read_plan(folder, TARGET_GRAPH).profiles
    edit(bundle, profiles=(replace(profiles[0], dims=profiles[0].dims | {"A": 2, "O": 3}), *profiles[1:]))


def rebuild(bundle: Bundle) -> None:
    edit(bundle, sources={"target.onnx": replace(bundle.manifest.files["target.onnx"], sha256="1" * 64)})


def compiled_for_trees_only(bundle: Bundle) -> None:
    compile_fake(bundle, target_profiles((2, 4)))


REFUSALS: dict[str, tuple[Callable[[Bundle], Any], str]] = {
    "nothing compiled": (lambda b: shutil.rmtree(b.path / ENGINES), r"engines/ has no \*.plan.json; make one with"),
    "capability": (
        lambda b: edit(b, capabilities=("8.9", "12.0")),
        rf"runs on Fake GPU: engines/fake is for capability 8.9, 12.0, the device has {CAPABILITY}; make one with "
        r"'specexport compile .*--profile DEVICE --backend tensorrt'",
    ),
    "version": (lambda b: edit(b, version="10.3.0"), rf"was compiled by tensorrt 10.3.0, installed is {VERSION}"),
    "module": (lambda b: edit(b, module="tensorrt_rtx"), "was compiled by tensorrt_rtx, this engine is tensorrt"),
    "flipped bit": (flip, "has sha256 .*, its record says .*: it is damaged and was not loaded"),
    "flipped and signed": (lambda b: flip(b, sign=True), "cannot load target.plan: the magic tag is wrong"),
    "truncated": (truncate, "target.plan has .* bytes, its record says"),
    "not the manifest's": (list_other, "target.plan is not the one that manifest.json lists"),
    "bundle built again": (rebuild, "was compiled from another target.onnx"),
    "plugin": (lambda b: edit(b, plugins=(PLUGIN,)), f"needs the plugin {PLUGIN}: build .* SPECEXPORT_PLUGINS"),
    "another record": (rename_profile, "is not what its record says, first in commit"),
    "no profile of one node": (compiled_for_trees_only, "no profile for one node"),
}


@pytest.mark.parametrize(("damage", "message"), REFUSALS.values(), ids=REFUSALS)
def test_refused_in_one_line(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Bundle], Any], message: str
) -> None:
    gpu = Gpu(monkeypatch)
    damage(bundle)
    with pytest.raises(BundleError if "plugin" not in message else SpecExportError, match=message) as caught:
        load_tensorrt(bundle.path)
    assert "\n" not in str(caught.value)
    assert len(gpu.engines) == ("record says, first" in message or "one node" in message)


@pytest.mark.parametrize(("memory", "message"), [(1 << 20, "needs about .* MiB on Fake GPU, 1 MiB are free")])
def test_too_little_memory(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, memory: int, message: str) -> None:
    gpu = Gpu(monkeypatch, memory=memory)
    with pytest.raises(SpecExportError, match=message):
        load_tensorrt(bundle.path)
    assert not gpu.engines


def test_memory_that_runs_out_later(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process takes it between the estimate and the allocation."""
    gpu = Gpu(monkeypatch)
    monkeypatch.setattr(gpu.driver, "cuMemGetInfo", lambda: (0, 1 << 30, 1 << 34))
    gpu.driver.left = 1000
    with pytest.raises(SpecExportError, match=r"has no .* left for caches: .*out of memory"):
        load_tensorrt(bundle.path)


def test_plugins_come_from_the_libraries_that_are_named(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    gpu.registry.libraries["/lib/tree.so"] = ("TreeAttention", "1", "specexport")
    edit(bundle, plugins=(PLUGIN,))
    monkeypatch.setenv("SPECEXPORT_PLUGINS", "/lib/tree.so")
    assert load_tensorrt(bundle.path).slots == 128
    monkeypatch.setenv("SPECEXPORT_PLUGINS", "/lib/other.so")
    with pytest.raises(SpecExportError, match=r"cannot load /lib/other.so of SPECEXPORT_PLUGINS"):
        load_tensorrt(bundle.path)


def test_plugins_that_would_end_the_process(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch)
    gpu.registry.creators.add(("TreeAttention", "1", "specexport"))
    edit(bundle, plugins=(PLUGIN,), module="tensorrt_rtx")
    monkeypatch.setattr(plan_loader, "plugins_need_library", lambda compiler: compiler.name == "tensorrt_rtx")
    with pytest.raises(SpecExportError, match=r"finds no libtensorrt_rtx\.so: link that name"):
        load_tensorrt_rtx(bundle.path)
    edit(bundle, module="tensorrt")
    assert load_tensorrt(bundle.path).slots == 128


def test_the_plan_for_this_device_is_found_among_others(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    Gpu(monkeypatch)
    compile_fake(bundle, target_profiles((1, 2)), folder="a-first", capabilities=("9.0",))
    compile_fake(bundle, target_profiles((1, 2)), folder="z-last", module="tensorrt_rtx")
    assert load_tensorrt(bundle.path)._folder.name == "fake"
    assert load_tensorrt_rtx(bundle.path)._folder.name == "z-last"


def test_no_gpu_and_no_driver(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, devices=0)
    with pytest.raises(UsageError, match="no CUDA device can be used: cuInit failed: no device"):
        load_tensorrt(bundle.path)

    def missing(flags: int) -> Any:
        raise RuntimeError('"cuda" is an NVIDIA driver library and was not found\nmore')

    monkeypatch.setattr(gpu.driver, "cuInit", missing)
    with pytest.raises(UsageError, match="libcuda was not found: install the NVIDIA driver") as caught:
        load_tensorrt(bundle.path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("module", "load", "extra"),
    [
        ("tensorrt", load_tensorrt, r"specexport\[tensorrt\]"),
        ("tensorrt_rtx", load_tensorrt_rtx, r"specexport\[tensorrt-rtx\]"),
        ("cuda.bindings", load_tensorrt, r"specexport\[tensorrt\]"),
    ],
)
def test_packages_that_are_missing(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, module: str, load: Callable[[Path], Any], extra: str
) -> None:
    Gpu(monkeypatch)
    for name in [name for name in sys.modules if name == module or name.startswith(module + ".")]:
        monkeypatch.delitem(sys.modules, name)
    real = builtins.__import__

    def no_module(name: str, *rest: Any) -> Any:
        if name == module:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", no_module)
    monkeypatch.setattr("specexport.engines.plan_loader.import_module", no_module)
    with pytest.raises(UsageError, match=extra):
        load(bundle.path)
