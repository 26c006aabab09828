"""``scripts/gpu_check.py`` without a GPU: its budget, tables and rules; phases over :mod:`tests.engines.fake_gpu`."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from scripts import gpu_check, gpu_phases
from specexport.engines.cuda import Device
from specexport.engines.plugins.tree_attention import toolchain
from specexport.engines.tensorrt_runtime import load_tensorrt
from specexport.runtime.bundle import Bundle
from specexport.runtime.engine import find_engine
from specexport.runtime.errors import UsageError
from tests.engines.fake_gpu import Gpu, compile_fake, target_profiles

DEVICE = {"figures": {"name": "A GPU", "capability": "8.9", "copy_gb_s": 800.0}}


class Clock:
    """Time that a phase takes as told."""

    def __init__(self, **seconds: float) -> None:
        self.now, self.seconds, self.given = 100.0, seconds, dict[str, float]()

    def __call__(self) -> float:
        return self.now

    def run(self, name: str, left: float) -> Mapping[str, Any]:
        self.given[name] = left
        took = self.seconds.get(name, 1.0)
        self.now += min(took, left)
        return {"failed": "not done"} if took > left else DEVICE if name == "device" else {"figures": {}}


def test_the_budget_is_kept_and_what_is_left_out_is_said() -> None:
    clock, said = Clock(compile_kernels=200, test_kernels=500), list[str]()
    outcomes = gpu_check.run_phases(clock.run, 360, clock, said.append)
    assert clock.now - 100 <= 360 - gpu_check.RESERVE
    states = {name: outcome.state for name, outcome in outcomes.items()}
    assert list(states) == [name for name, _, _ in gpu_check.PHASES]
    assert states["compile_kernels"] == "done" and states["test_kernels"] == "failed"
    assert clock.given["test_kernels"] == 360 - gpu_check.RESERVE - 201
    assert {states[name] for name in list(states)[3:]} == {"skipped"}
    assert len(said) == len(states) and "skipped bundle on tensorrt (0 s): 0 s are left, it needs 30" in said


def test_without_a_device_nothing_else_is_tried() -> None:
    clock = Clock()
    said: list[str] = []
    outcomes = gpu_check.run_phases(lambda name, left: {"skipped": "no driver"}, 360, clock, said.append)
    assert list(outcomes) == ["device"] and not said


def test_tables() -> None:
    kernel = {"nodes": 8, "used": 2048, "us": 20.0, "share": 0.84, "torch_us": 50.0}
    step = {"nodes": 1, "ms": 2.5, "of_one": 1.0, "of_bound": 1.25}
    outcomes = {
        "device": gpu_check.Outcome("done", None, DEVICE["figures"], 1),
        "time_kernels": gpu_check.Outcome("done", None, {"rows": [kernel, kernel | {"torch_us": None}]}, 1),
        "tensorrt": gpu_check.Outcome("done", None, {"tokens": "8 of 8", "steps": [step]}, 1),
        "tensorrt-rtx": gpu_check.Outcome("skipped", "not there", {}, 0),
    }
    lines = gpu_check.tables(outcomes)
    assert lines[0] == "A GPU, capability 8.9, copies at 800 GB/s"
    assert [line.split() for line in lines[4:6]] == [
        ["8", "2048", "20.0", "84", "50.0", "2.50"],
        ["8", "2048", "20.0", "84", "-", "-"],
    ]
    assert "tensorrt: 8 of 8" in lines and lines[-1].split() == ["1", "2.500", "1.00", "1.25"]
    assert len({len(line) for line in lines[3:6]}) == 1
    assert json.dumps(outcomes["tensorrt"].to_dict()).startswith('{"state": "done"')


def test_bytes_that_must_move(tiny_bundle: Bundle) -> None:
    assert gpu_phases.attention_bytes(1, 2048, 32, 8, 128) == 2 * (2 * 8 * 2048 * 128 + 4 * 8 * 128 + 2 * 32 * 128)
    assert gpu_phases.attention_bytes(64, 2048, 32, 8, 128) < 1.5 * gpu_phases.attention_bytes(1, 2048, 32, 8, 128)
    target = tiny_bundle.manifest.target
    row = 2 * target.layers * target.kv_heads * target.head_dim * 4
    assert gpu_phases.step_bytes(1000, target, 4, 10) == 1000 + 14 * row + 16 * target.vocab_size


def test_the_margin_rule() -> None:
    row = np.array([10.0, 9.99, 5.0], np.float32)
    asked: list[int] = []

    def row_at(index: int) -> Any:
        asked.append(index)
        return row

    judge = gpu_phases.judge
    assert judge([1, 2, 0], [1, 2, 0], row_at, 1e-4) == (True, "equal") and not asked
    assert judge([1, 2, 0], [1, 2, 1], row_at, 2e-3)[0] and asked == [2]
    passes, words = judge([1, 0, 0], [1, 1, 2], row_at, 1e-4)
    assert not passes and words == "token 1 differs by a margin of 1.0e-03 (past 0.0001)"
    assert not judge([0], [2], row_at, 2e-3)[0]
    assert not judge([1], [0], row_at, 2e-3)[0]  # the reference's own token was not its best: no rounding explains it
    assert judge([0, 1], [0], row_at, 1) == (False, "one ends after 1 tokens")


def test_the_device_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Gpu(monkeypatch)
    monkeypatch.setattr(gpu_phases, "COPY_BYTES", 1 << 20)
    found = gpu_phases.phase_device(tmp_path, None)
    assert found["name"] == "Fake GPU" and found["copy_gb_s"] > 0
    assert gpu_phases.copy_rate(tmp_path) == pytest.approx(found["copy_gb_s"] * 1e9)


@pytest.fixture
def bundle(tiny_bundle: Bundle, tmp_path: Path) -> Bundle:
    copy = Bundle.load(Path(shutil.copytree(tiny_bundle.path, tmp_path / "bundle")))
    compile_fake(copy, target_profiles())
    return copy


def test_a_bundle_on_an_engine(bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Gpu(monkeypatch)
    (tmp_path / "device.figures").write_text(json.dumps(DEVICE["figures"]))
    engines = {"tensorrt": load_tensorrt, "onnxruntime-cpu": find_engine("onnxruntime-cpu")}
    monkeypatch.setattr(gpu_phases, "find_engine", engines.__getitem__)
    found = gpu_phases.outcome("tensorrt", tmp_path, bundle.path)["figures"]
    assert found["tokens"].startswith("8 of 8 outputs equal")
    assert [step["nodes"] for step in found["steps"]] == [1, 2, 4, 8]
    assert found["steps"][0]["of_one"] == 1 and all(step["of_bound"] > 0 for step in found["steps"])
    shutil.rmtree(bundle.path / "engines")
    assert "no plan of this bundle runs" in gpu_phases.outcome("tensorrt", tmp_path, bundle.path)["skipped"]


def test_what_is_missing_is_skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    Gpu(monkeypatch)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    assert "no nvcc" in gpu_phases.outcome("compile_kernels", tmp_path, None)["skipped"]
    assert gpu_phases.outcome("time_kernels", tmp_path, None) == {"skipped": "the kernels were not compiled"}

    def crash() -> Any:
        raise AssertionError("case 7: 2.0 bounds\nmore")

    monkeypatch.setattr(gpu_phases, "phase_test_kernels", lambda folder, bundle: crash())
    assert gpu_phases.outcome("test_kernels", tmp_path, None) == {"failed": "case 7: 2.0 bounds"}


@pytest.mark.slow
def test_kernels_are_called_as_the_library_wants(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The emulator's build of the kernels on the fake's memory; of the times only that there are any."""
    compiler = toolchain.find_host_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    Gpu(monkeypatch)
    toolchain.build_emulated(tmp_path / "kernels.so", compiler)
    (tmp_path / "device.figures").write_text(json.dumps(DEVICE["figures"]))
    for name, value in {"NODES": (1, 3), "USED": (40,), "SLOTS": 64}.items():
        monkeypatch.setattr(gpu_phases, name, value)
    found = gpu_phases.outcome("time_kernels", tmp_path, None)
    assert [row["nodes"] for row in found["figures"]["rows"]] == [1, 3]


def test_a_phase_that_hangs_or_crashes_ends_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import sys, time, pathlib\n"
        "if sys.argv[1] == 'hangs': time.sleep(60)\n"
        "if sys.argv[1] == 'crashes': sys.exit('Segmentation fault')\n"
        'pathlib.Path(sys.argv[2]).write_text(\'{"figures": {"x": 1}}\')\n'
    )
    monkeypatch.setattr(gpu_check, "WORKER", script)
    run = gpu_check.worker(SimpleNamespace(bundle=None), tmp_path)  # type: ignore[arg-type]
    assert run("works", 30) == {"figures": {"x": 1}}
    assert run("crashes", 30) == {"failed": "ended with 1: Segmentation fault"}
    assert "not done after the" in run("hangs", 0.5)["failed"]


def test_one_line_and_1_without_cuda(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        Device()
        pytest.skip("this machine has a GPU")
    except UsageError:
        pass
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--output", str(tmp_path / "x.json")])
    monkeypatch.setattr(
        gpu_check, "worker", lambda arguments, folder: lambda name, left: gpu_phases.outcome(name, folder, None)
    )
    assert gpu_check.main() == 1
    shown = capsys.readouterr()
    assert not shown.out and len(shown.err.splitlines()) == 1 and shown.err.startswith("no GPU check: ")
    assert not (tmp_path / "x.json").exists()
