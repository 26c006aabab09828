"""Fixtures of builds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from specexport.exporter import pipeline
from specexport.exporter.onnx import export_target

_GRAPHS: dict[str, tuple[Any, Any]] = {}


@pytest.fixture
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing is most of a build: keep the graphs, which every build fills with weights anew."""

    def traced(*arguments: Any) -> tuple[Any, Any]:
        key = repr(arguments)
        if key not in _GRAPHS:
            _GRAPHS[key] = export_target(*arguments)
        return _GRAPHS[key]

    monkeypatch.setattr(pipeline, "export_target", traced)


@pytest.fixture
def checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))


@pytest.fixture(scope="session")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The profile of a device of few, narrow widths."""
    path = tmp_path_factory.mktemp("profiles") / "small.yaml"
    path.write_text("extends: rtx-40\nwidths: [1, 4]\nprefill_chunk: 16\n")
    return path
