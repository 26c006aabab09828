"""What is installed is what is in the tree: every mistake here is silent at install time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from specexport.runtime.bundle import Bundle

PARTS = ("engines", "exporter", "profiles", "runtime")


@pytest.fixture(scope="module")
def archives(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Source archive of the tree, and the wheel that was built from that archive."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(repository)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.tar.gz")), next(out.glob("*.whl"))


def tree(repository: Path) -> set[str]:
    """Files of the four parts, by path relative to the repository."""
    return {
        path.relative_to(repository).as_posix()
        for part in PARTS
        for path in (repository / part).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_wheel_holds_the_tree_and_nothing_else(archives: tuple[Path, Path], repository: Path) -> None:
    names = set(zipfile.ZipFile(archives[1]).namelist())
    code = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    assert code == {f"specexport/{name}" for name in tree(repository)}
    assert {f"specexport/{part}/py.typed" for part in PARTS} <= code
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_source_archive_has_the_tree_and_the_tests_once(archives: tuple[Path, Path], repository: Path) -> None:
    with tarfile.open(archives[0]) as archive:
        names = [member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()]
        links = [member.name for member in archive.getmembers() if member.issym() or member.islnk()]
    assert not links
    assert {name for name in names if name.split("/")[0] in PARTS} == tree(repository)
    assert {"LICENSE", "README.md", "pyproject.toml", "tests/packaging/test_wheel.py"} <= set(names)
    assert not [name for name in names if name.startswith((".dev", ".venv", ".git/"))]


def test_wheel_metadata(archives: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(archives[1]) as wheel:
        folder = next(name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name)
        metadata = wheel.read(f"{folder}/METADATA").decode()
        points = wheel.read(f"{folder}/entry_points.txt").decode()
    bare = {
        re.split("[><=]", line.split()[1])[0]
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist") and "extra ==" not in line
    }
    assert bare == {"click", "jinja2", "numpy", "onnxruntime", "pyyaml", "tokenizers"}
    assert "specexport = specexport.exporter.cli:main" in points
    assert "onnxruntime-cpu = specexport.engines.ort:load_cpu" in points


BARE_USE = """
import importlib, pathlib, sys
import specexport.runtime
root = pathlib.Path(specexport.runtime.__file__).parent
names = [path.relative_to(root.parent).with_suffix("").as_posix().replace("/", ".") for path in root.rglob("*.py")]
for name in [f"specexport.{name}" for name in names] + ["specexport.engines.ort", "specexport.exporter.cli"]:
    importlib.import_module(name.removesuffix(".__init__"))
print(root, len(names), [name for name in ("torch", "transformers", "onnx") if name in sys.modules])
"""


def test_bare_install_runs(archives: tuple[Path, Path], repository: Path, tiny_bundle: Bundle, tmp_path: Path) -> None:
    """In a new environment with only the wheel and what it asks for, the runtime and the command line work."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    constraints = repository / "constraints.txt"
    pip = [python, "-m", "pip", "install", "-q", "-c", constraints, archives[1]]
    subprocess.run(pip, check=True, cwd=tmp_path, capture_output=True)
    done = subprocess.run([python, "-c", BARE_USE], cwd=tmp_path, capture_output=True, text=True, check=True)
    where, count, heavy = done.stdout.strip().split(" ", 2)
    assert where.startswith(str(tmp_path))
    assert int(count) > 10
    assert heavy == "[]"

    def specexport(*words: object) -> subprocess.CompletedProcess[str]:
        command = [python.with_name("specexport"), *map(str, words)]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    answer = specexport("run", tiny_bundle.path, "the quick", "--json")
    assert (answer.returncode, answer.stderr) == (0, "")
    assert len(json.loads(answer.stdout)["token_ids"]) == 24
    assert json.loads(specexport("doctor", "--json").stdout)["can"]["run"] is True
    refused = specexport("build", "somewhere", "-o", "bundle")
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1 and "pip install 'specexport[export]'" in refused.stderr
