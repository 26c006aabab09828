"""The runtime is light: nothing heavy is imported, and nothing at all before it is needed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., subprocess.CompletedProcess[str]]

#: Refuses the import of anything the bare install does not have.
BLOCK = """
import importlib, sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {banned}:
            raise AssertionError(name + " is not part of the bare install")
sys.meta_path.insert(0, Block())
"""
HEAVY = {
    "torch",
    "transformers",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "gguf",
    "safetensors",
    "huggingface_hub",
    "ml_dtypes",
    "matplotlib",
}


def modules(repository: Path, part: str) -> list[str]:
    """Import names of every module of a part."""
    names = []
    for path in sorted((repository / part).rglob("*.py")):
        name = path.relative_to(repository).with_suffix("").as_posix().replace("/", ".")
        names.append(f"specexport.{name}".removesuffix(".__init__"))
    return names


@pytest.mark.parametrize(
    ("part", "extra", "banned"),
    [
        ("runtime", [], {*HEAVY, "click"}),
        ("runtime", ["specexport.engines.ort"], HEAVY),
        ("engines", [], HEAVY),
        ("profiles", [], HEAVY),
    ],
)
def test_imports_in_a_bare_environment(
    part: str, extra: list[str], banned: set[str], repository: Path, run_python: Run
) -> None:
    names = [*modules(repository, part), *extra]
    assert names
    code = BLOCK.format(banned=sorted(banned)) + f"for name in {names}: importlib.import_module(name)\n"
    done = run_python("-c", code + f"print(sorted(set(sys.modules) & set({sorted(banned)})))")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_runtime_is_imported_on_use(run_python: Run) -> None:
    """``import specexport.runtime`` and opening a bundle load no numeric library; every exported name exists."""
    code = """
import sys, specexport.runtime as runtime
print([name for name in ("numpy", "onnxruntime", "tokenizers", "jinja2") if name in sys.modules])
from specexport.runtime import Bundle
print([name for name in ("onnxruntime", "tokenizers", "jinja2") if name in sys.modules])
from specexport.runtime import Session, SamplingParams
print([name for name in ("onnxruntime",) if name in sys.modules])
print([name for name in runtime.__all__ if not hasattr(runtime, name)], runtime.Bundle is Bundle)
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:4] == ["[]", "[]", "[]", "[] True"]


def test_help_loads_no_heavy_library(run_python: Run) -> None:
    code = """
import sys
from specexport.exporter.cli import main
for words in (["--help"], ["build", "--help"], ["run", "--help"], ["verify", "--help"], ["demo", "--help"]):
    assert main(words) == 0
print([name for name in ("torch", "transformers", "onnx", "onnxruntime") if name in sys.modules], file=sys.stderr)
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stderr.strip().endswith("[]")
