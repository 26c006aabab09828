"""``CMakeLists.txt`` of the kernels: what is compiled how, and that a poor compiler is no error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specexport.engines.plugins.tree_attention.toolchain import find_host_compiler

Configure = Callable[..., str]
#: The instruction sets that a file is compiled for, by the last word of its name.
SETS = {
    "avx2": {"-mavx2", "-mfma"},
    "avx512": {*("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"), "-mavx2", "-mfma"},
    "neon": {"-march=armv8.2-a+dotprod"},
}

needs_compiler = pytest.mark.skipif(find_host_compiler() is None, reason="needs a C++ compiler")


def tool(name: str) -> str:
    """A program of this environment, or of the path."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found, f"{name} is part of the extra dev"
    return found


@pytest.fixture
def configure(repository: Path, tmp_path: Path) -> Configure:
    """Configure a build in ``build/`` and return what cmake says."""

    def run(*options: str, **environment: str) -> str:
        command = [tool("cmake"), "-S", repository / "engines" / "kernels", "-B", tmp_path / "build", "-G", "Ninja"]
        command += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", *options]
        env = {name: value for name, value in os.environ.items() if name != "CXXFLAGS"} | environment
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


def commands(build: Path) -> dict[str, str]:
    """What compiles each file."""
    return {
        Path(each["file"]).stem: each["command"] for each in json.loads((build / "compile_commands.json").read_text())
    }


@needs_compiler
def test_a_file_is_compiled_for_the_set_in_its_name_alone(configure: Configure, tmp_path: Path) -> None:
    configure()
    compiled = commands(tmp_path / "build")
    assert compiled
    for name, command in compiled.items():
        words = set(command.split())
        assert {word for word in words if word.startswith("-m")} == SETS.get(name.rpartition("_")[2], set()), name
        assert {"-O3", "-std=c++17", "-ffp-contract=off", "-fvisibility=hidden"} <= words


@needs_compiler
def test_an_unknown_processor_gets_the_plain_files(configure: Configure, repository: Path, tmp_path: Path) -> None:
    configure("-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=riscv64")
    sources = {path.stem for path in (repository / "engines" / "kernels" / "src").glob("*.cc")}
    plain = {name for name in sources if not name.endswith(tuple(SETS))}
    assert plain < sources
    assert set(commands(tmp_path / "build")) == plain


@needs_compiler
def test_a_compiler_that_is_not_there_gives_way_to_one_on_the_path(configure: Configure, tmp_path: Path) -> None:
    said = configure(CXX="no-such-compiler")
    assert "CXX=no-such-compiler does not work: trying the compilers on the path" in said
    assert commands(tmp_path / "build")


@needs_compiler
def test_a_compiler_that_is_too_old_builds_nothing(configure: Configure, tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text(f'#!/bin/sh\ncase "$*" in *c++17*) exit 1;; esac\nexec {find_host_compiler()} "$@"\n')
    old.chmod(0o755)
    said = configure(CXX=str(old))
    assert f"{old} does not compile C++17" in said
    assert "GCC 8 or Clang 7" in said
    assert not (tmp_path / "build" / "compile_commands.json").exists()
