"""What is installed is what is in the tree: every mistake here is silent at install time."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from specexport.engines.plugins.tree_attention.toolchain import find_host_compiler
from specexport.runtime.bundle import Bundle

PARTS = ("engines", "exporter", "profiles", "runtime")
LIBRARY = "specexport/engines/kernels/libspecexport_kernels.so"


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


def packed(wheel: Path) -> tuple[set[str], set[str]]:
    """Files of a wheel: the package, and what is said about it."""
    names = set(zipfile.ZipFile(wheel).namelist())
    code = {name for name in names if not name.split("/")[0].endswith(".dist-info")}
    return code, names - code


def test_wheel_holds_the_tree_the_kernels_and_nothing_else(archives: tuple[Path, Path], repository: Path) -> None:
    code, about = packed(archives[1])
    built = {LIBRARY} if find_host_compiler() else set()
    assert code == {f"specexport/{name}" for name in tree(repository)} | built
    assert {f"specexport/{part}/py.typed" for part in PARTS} <= code
    assert any(name.endswith("/licenses/LICENSE") for name in about)
    # No module is compiled: one wheel for every version of Python, but for one kind of machine.
    assert re.search(r"-py3-none-(?!any)\w+\.whl$", archives[1].name)


def test_kernels_export_two_kinds_of_names(archives: tuple[Path, Path], tmp_path: Path) -> None:
    """Another library of the process must not bind to what the compiler left behind in this one."""
    symbols = shutil.which("nm")
    if symbols is None or LIBRARY not in packed(archives[1])[0]:
        pytest.skip("needs a C++ compiler and nm")
    library = zipfile.ZipFile(archives[1]).extract(LIBRARY, tmp_path)
    listed = subprocess.run([symbols, "-D", "--defined-only", library], capture_output=True, text=True, check=True)
    names = [line.split()[-1] for line in listed.stdout.splitlines()]
    assert "RegisterCustomOps" in names
    assert not [name for name in names if name != "RegisterCustomOps" and not name.startswith("specexport_kernels_")]


def test_wheel_without_a_compiler_lacks_only_the_kernels(repository: Path, tmp_path: Path) -> None:
    """The path has cmake and ninja alone, or nothing where those are Python packages."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cmake", "ninja"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    bare = {"PATH": str(tools), "CC": "no-such-compiler", "CXX": "no-such-compiler"}
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(repository)]
    done = subprocess.run(command, env=os.environ | bare, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no C++ compiler found: installing without the CPU kernels" in done.stdout + done.stderr
    wheel = next(tmp_path.glob("*.whl"))
    assert packed(wheel)[0] == {f"specexport/{name}" for name in tree(repository)}
    # -S: nothing that is installed here, so not this package with its library either.
    zipfile.ZipFile(wheel).extractall(tmp_path / "unpacked")
    code = "from specexport.engines.kernels import library; print(library.__file__, library.kernels_library())"
    alone = os.environ | {"PYTHONPATH": str(tmp_path / "unpacked")}
    found = subprocess.run([sys.executable, "-S", "-c", code], env=alone, capture_output=True, text=True, check=True)
    module = tmp_path / "unpacked" / LIBRARY
    assert found.stdout == f"{module.with_name('library.py')} None\n"


def test_source_archive_has_the_tree_and_the_tests_once(archives: tuple[Path, Path], repository: Path) -> None:
    with tarfile.open(archives[0]) as archive:
        names = [member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()]
        links = [member.name for member in archive.getmembers() if member.issym() or member.islnk()]
    assert not links
    assert {name for name in names if name.split("/")[0] in PARTS} == tree(repository)
    assert {
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "engines/kernels/CMakeLists.txt",
        "tests/packaging/test_wheel.py",
    } <= set(names)
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
    report = json.loads(specexport("doctor", "--json").stdout)
    assert report["can"]["run"] is True
    assert report["kernels"]["library"] == (f"{Path(where).parent.parent}/{LIBRARY}" if find_host_compiler() else None)
    refused = specexport("build", "somewhere", "-o", "bundle")
    assert refused.returncode == 1
    assert refused.stderr.count("\n") == 1 and "pip install 'specexport[export]'" in refused.stderr
