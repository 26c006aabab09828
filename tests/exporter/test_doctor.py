from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from specexport.engines.kernels import library
from specexport.exporter import cli, doctor
from specexport.runtime import machine


def test_examine(tmp_path: Path) -> None:
    report = doctor.examine(tmp_path / "not" / "made")
    assert report["can"] == {"run": True, "build": True, "verify --checkpoint": True}
    assert report["missing"] == []
    assert {"numpy", "onnxruntime", "torch", "onnx"} <= report["packages"].keys()
    assert "CPUExecutionProvider" in report["providers"]
    assert report["engines"]["onnxruntime-cpu"] is True
    assert 1 <= report["cpu"]["physical_cores"] <= report["cpu"]["logical_cores"]
    assert report["memory"]["total"] >= report["memory"]["available"] > 0
    assert report["disk"]["free"] > 0
    assert not (tmp_path / "not").exists()


def test_requirements_are_those_of_the_package() -> None:
    assert set(doctor.requirements(None)) == {"click", "jinja2", "numpy", "onnxruntime", "pyyaml", "tokenizers"}
    assert {"torch", "onnx", "gguf"} <= set(doctor.requirements("export"))
    assert "pytest" not in doctor.requirements("export")


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that some distributions are not installed."""

    def hide(*names: str) -> None:
        installed, find_spec = doctor.installed, doctor.find_spec
        monkeypatch.setattr(doctor, "installed", lambda name: None if name in names else installed(name))
        monkeypatch.setattr(doctor, "find_spec", lambda name: None if name in names else find_spec(name))

    return hide


def test_names_what_is_missing_and_the_command(without: Any, capsys: pytest.CaptureFixture[str]) -> None:
    without("torch", "gguf")
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["can"] == {"run": True, "build": False, "verify --checkpoint": False}
    assert report["missing"][0] == {
        "for": "build",
        "packages": ["gguf", "torch"],
        "command": "pip install 'specexport[export]'",
    }
    assert cli.main(["doctor"]) == 0
    assert "to build: pip install 'specexport[export]'  (missing: gguf, torch)" in capsys.readouterr().out


def test_a_broken_runtime_is_a_failure(without: Any, capsys: pytest.CaptureFixture[str]) -> None:
    without("onnxruntime")
    assert cli.main(["doctor"]) == 1
    assert "to run: pip install specexport  (missing: onnxruntime)" in capsys.readouterr().out


def test_build_without_the_extra_names_the_command(without: Any, capsys: pytest.CaptureFixture[str]) -> None:
    without("torch")
    assert cli.main(["build", "x", "-o", "y"]) == 1
    assert capsys.readouterr().err == "specexport: error: build needs torch: pip install 'specexport[export]'\n"


def test_says_where_the_kernels_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(library, "kernels_library", lambda: Path("/opt/kernels.so"))
    assert doctor.examine(Path("/"))["kernels"] == {"library": "/opt/kernels.so", "fix": None}
    assert cli.main(["doctor"]) == 0
    assert re.search(r"^kernels +/opt/kernels\.so$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(("value", "fix"), [("", "a C++ compiler"), ("off", "unset SPECEXPORT_KERNELS")])
def test_says_how_to_get_the_kernels(
    value: str, fix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECEXPORT_KERNELS", value)
    monkeypatch.setattr(library, "kernels_library", lambda: None)
    kernels = doctor.examine(Path("/"))["kernels"]
    assert kernels["library"] is None
    assert kernels["fix"].startswith(fix)
    assert cli.main(["doctor"]) == 0
    assert f"none; to get them: {kernels['fix']}" in capsys.readouterr().out


ARM = """processor : 0
model name\t: Cortex-A78AE
Features\t: fp asimd asimddp bf16 i8mm
"""


def test_reads_arm_and_unknown_systems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "_text", lambda path: ARM if path == "/proc/cpuinfo" else "")
    (tmp_path / "cpuinfo").write_text(ARM)
    monkeypatch.setattr(machine, "_CPUINFO", tmp_path / "cpuinfo")
    cpu = doctor.examine(Path("/"))["cpu"]
    assert cpu["model"] == "Cortex-A78AE"
    assert cpu["features"] == ["asimd", "asimddp", "i8mm", "bf16"]
    monkeypatch.setattr(doctor, "_text", lambda path: "")
    report = doctor.examine(Path("/"))
    assert report["cpu"]["features"] == []
    assert report["memory"] == {"total": None, "available": None}
