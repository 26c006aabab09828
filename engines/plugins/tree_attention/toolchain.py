"""Compilers for the kernels: nvcc (from the path, a toolkit or the wheels of the extra ``kernels``) and the host's."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specexport.runtime.errors import SpecExportError

SOURCE = Path(__file__).parent
#: Compute capabilities the kernels are built for, as far as the compiler knows them.
ARCHITECTURES = (75, 80, 86, 87, 89, 90, 100, 110, 120, 121)
_HOST = ("-std=c++17", "-O2", "-fPIC", "-shared", "-ffp-contract=off", "-U_FORTIFY_SOURCE")
_DEVICE = ("-std=c++17", "-O3")


@dataclass(frozen=True, slots=True)
class Nvcc:
    """A CUDA compiler and what it needs beside its own defaults."""

    path: Path
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel uses, by ``ptxas -v``: registers of a thread, bytes of its stack, bytes that it spills to it.

    ``kernel`` is its name with arguments, as in ``attend<Fp16, 128, codes>``; ``head_dim`` 0 means any.
    """

    architecture: int
    kernel: str
    head_dim: int
    registers: int
    stack: int
    spilled: int


def find_nvcc() -> Nvcc | None:
    """nvcc of ``CUDA_HOME`` or ``CUDA_PATH``, on the path, in /usr/local/cuda, or of the extra ``kernels``."""
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    for home in homes:
        if (home / "bin" / "nvcc").is_file():
            return Nvcc(home / "bin" / "nvcc")
    if found := shutil.which("nvcc"):
        return Nvcc(Path(found))
    for root in [Path("/usr/local/cuda"), *_wheel_roots()]:
        if (root / "bin" / "nvcc").is_file():
            # The wheels have `lib` where a toolkit has `lib64`; nvcc is told, a toolkit does not mind.
            return Nvcc(root / "bin" / "nvcc", (f"-I{root / 'include'}", f"-L{root / 'lib'}"))
    return None


def _wheel_roots() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield from sorted(Path(folder).glob("cu*"), reverse=True)


def find_host_compiler() -> str | None:
    """The C++ compiler: ``CXX``, or g++, c++ or clang++ on the path."""
    return next((found for name in (os.environ.get("CXX"), "g++", "c++", "clang++") if (found := _which(name))), None)


def _which(name: str | None) -> str | None:
    return shutil.which(name) if name else None


def build_emulated(output: Path, compiler: str, source: Path = SOURCE) -> Path:
    """Build the kernels for this machine's processor, with ``emulator.h``, as the shared library ``output``."""
    _run([compiler, "-x", "c++", *_HOST, str(source / "launch.cu"), "-o", str(output)])
    return output


def build_device(output: Path, nvcc: Nvcc, architectures: Sequence[int]) -> Path:
    """Build the kernels as the shared library ``output`` for some compute capabilities (89 for 8.9)."""
    codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in architectures]
    command = [str(nvcc.path), *nvcc.options, *_DEVICE, *codes, "-Xcompiler=-fPIC", "-shared"]
    _run([*command, str(SOURCE / "launch.cu"), "-o", str(output)])
    return output


def known_architectures(nvcc: Nvcc) -> list[int]:
    """Those of :data:`ARCHITECTURES` that this compiler has."""
    listed = re.findall(r"sm_(\d+)\b", _run([str(nvcc.path), "--list-gpu-code"]))
    return [arch for arch in ARCHITECTURES if str(arch) in listed]


def measure(nvcc: Nvcc, architecture: int, output: Path, head_dim: int | None = None) -> list[Resources]:
    """Compile the kernels for one capability and read what each uses.

    Args:
        output: where the machine code goes (a ``.cubin``).
        head_dim: instantiate attention for this width alone.
    """
    chosen = [f"-DTREE_ATTENTION_HEAD_DIM={head_dim}"] if head_dim else []
    command = [str(nvcc.path), *nvcc.options, *_DEVICE, f"-arch=sm_{architecture}", "-Xptxas=-v", "-cubin", *chosen]
    return list(parse_resources(_run([*command, str(SOURCE / "launch.cu"), "-o", str(output)]), architecture))


_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_KERNEL = re.compile(r"(commit|attend|combine)I\w*?(Fp16|Bf16)E(?:Li(\d+)E)?(?:Lb([01])E)?")


def parse_resources(log: str, architecture: int) -> Iterator[Resources]:
    """Read the log of ``ptxas -v``."""
    name, stack, spilled = "", 0, 0
    for line in log.splitlines():
        if found := _ENTRY.search(line):
            name, stack, spilled = found[1], 0, 0
        elif found := _STACK.search(line):
            stack, spilled = int(found[1]), max(int(found[2]), int(found[3]))
        elif name and (found := _USED.search(line)):
            yield Resources(architecture, *_kernel(name), int(found[1]), stack, spilled)
            name = ""


def _kernel(mangled: str) -> tuple[str, int]:
    """``attend<Fp16, 128, codes>`` of a mangled name, and its head width."""
    found = _KERNEL.search(mangled)
    if found is None:
        return mangled, 0
    parts = [found[2], found[3], {"1": "codes", "0": "elements", None: None}[found[4]]]
    return f"{found[1]}<{', '.join(part for part in parts if part)}>", int(found[3] or 0)


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if "error" in line.lower()]
        raise SpecExportError(
            f"{command[0]} failed with {done.returncode}: {(lines or ['no reason given'])[0].strip()}"
        )
    return done.stdout + done.stderr
