"""What this machine and this environment can do, what is missing, and the command that gets it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from importlib.metadata import PackageNotFoundError, entry_points, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specexport.engines.kernels import library
from specexport.runtime.engine import ENTRY_POINT_GROUP
from specexport.runtime.errors import SpecExportError
from specexport.runtime.machine import cpu_model

#: Instruction sets that decide how fast a CPU decodes, by their name in /proc/cpuinfo (x86, then Arm).
CPU_FEATURES = (
    *("avx", "f16c", "fma", "avx2", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_int8"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
#: Optional packages that are reported when present.
OPTIONAL = ("transformers", "optimum-onnx", "openvino", "tensorrt", "tensorrt-rtx", "onnxruntime-gpu")
#: What an engine needs from ONNX Runtime.
_PROVIDERS = {
    "onnxruntime-cpu": "CPUExecutionProvider",
    "onnxruntime-cuda": "CUDAExecutionProvider",
    "onnxruntime-tensorrt": "TensorrtExecutionProvider",
}
#: Modules of other engines.
_MODULES = {
    "onnxruntime-tensorrt-rtx": "onnxruntime_ep_nv_tensorrt_rtx",
    "openvino-cpu": "openvino",
    "openvino-cpu-f32": "openvino",
    "tensorrt": "tensorrt",
    "tensorrt-rtx": "tensorrt_rtx",
}


class MissingPackage(SpecExportError):
    """A verb needs an extra that is not installed."""


def installed(name: str) -> str | None:
    """Version of an installed distribution, None when there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def requirements(extra: str | None) -> list[str]:
    """Names of the distributions the bare install (None) or an extra asks for."""
    names = []
    for line in requires("specexport") or []:
        spec, _, marker = line.partition(";")
        found = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        name = re.match(r"[\w.-]+", spec)
        if name and name[0] != "specexport" and (found[1] if found else None) == extra:
            names.append(name[0])
    return names


def require_export(verb: str) -> None:
    """Stop with the command to run when a package of the ``export`` extra is missing.

    Raises:
        MissingPackage: names what is missing.
    """
    missing = [name for name in requirements("export") if find_spec(name.replace("-", "_")) is None]
    if missing:
        raise MissingPackage(f"{verb} needs {', '.join(missing)}: pip install 'specexport[export]'")


def examine(cache: Path) -> dict[str, Any]:
    """Everything ``specexport doctor`` reports, as JSON data.

    Args:
        cache: directory whose free space matters. Sizes are in bytes.

    Raises:
        UsageError: ``SPECEXPORT_KERNELS`` names no file.
    """
    bare, export = requirements(None), requirements("export")
    wanted = {
        "run": (bare, "pip install specexport"),
        "build": ([*bare, *export], "pip install 'specexport[export]'"),
        "verify --checkpoint": ([*bare, *export, "transformers"], "pip install 'specexport[export]' transformers"),
    }
    missing = {verb: [name for name in names if not installed(name)] for verb, (names, _) in wanted.items()}
    providers = _providers()
    total, available = memory_sizes()
    return {
        "specexport": installed("specexport"),
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": {"system": platform.system(), "release": platform.release(), "machine": platform.machine()},
        "cpu": _cpu(),
        "memory": {"total": total, "available": available},
        "disk": {"cache": str(cache), "free": _free(cache)},
        "packages": {name: installed(name) for name in [*bare, *export]}
        | {name: installed(name) for name in OPTIONAL if installed(name)},
        "providers": providers,
        "engines": {
            point.name: _PROVIDERS.get(point.name, "") in ("", *providers)
            and (point.name not in _MODULES or find_spec(_MODULES[point.name]) is not None)
            for point in sorted(entry_points(group=ENTRY_POINT_GROUP))
        },
        "kernels": _kernels(),
        "can": {verb: not names for verb, names in missing.items()},
        "missing": [
            {"for": verb, "packages": names, "command": wanted[verb][1]} for verb, names in missing.items() if names
        ],
    }


def _providers() -> list[str]:
    try:
        import onnxruntime
    except ImportError:
        return []
    return list(onnxruntime.get_available_providers())


def _kernels() -> dict[str, str | None]:
    """Where the compiled kernels are, or what gets them."""
    found = library.kernels_library()
    if found is not None:
        return {"library": str(found), "fix": None}
    if os.environ.get(library.VARIABLE):
        return {"library": None, "fix": f"unset {library.VARIABLE}"}
    # Without the cache: pip keeps a wheel that it built when there was no compiler.
    again = "pip install --force-reinstall --no-deps --no-cache-dir specexport"
    return {"library": None, "fix": f"a C++ compiler (g++ or clang++), then {again}"}


def _cpu() -> dict[str, Any]:
    text = _text("/proc/cpuinfo")
    listed = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    flags = set(listed[1].split()) if listed else set()
    return {
        "model": cpu_model(),
        "logical_cores": os.cpu_count() or 1,
        "physical_cores": _physical_cores(),
        "features": [name for name in CPU_FEATURES if name in flags],
    }


def _physical_cores() -> int | None:
    try:
        from specexport.engines.ort import physical_cores
    except ImportError:
        return None
    return physical_cores()


def memory_sizes() -> tuple[int | None, int | None]:
    """Total and available memory in bytes."""
    sizes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", _text("/proc/meminfo"), re.MULTILINE))
    total, available = sizes.get("MemTotal"), sizes.get("MemAvailable")
    return (int(total) << 10 if total else None, int(available) << 10 if available else None)


def _free(folder: Path) -> int | None:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
