"""Which machine this is, as far as it decides how fast a bundle runs."""

# ruff: noqa: RUF009 - see specexport.runtime.records

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from specexport.runtime.records import integer, read, table, text

#: Distributions whose version decides how fast a bundle runs.
LIBRARIES = ("onnxruntime", "onnxruntime-gpu", "openvino", "tensorrt", "tensorrt-rtx", "numpy")
_CPUINFO = Path("/proc/cpuinfo")
_MODEL = re.compile(r"^(?:model name|Model)\s*:\s*(.*)$", re.MULTILINE)
_TREE_MODEL = Path("/proc/device-tree/model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a measurement was made on.

    Attributes:
        cpu: model name. cores: logical cores this process may use. threads: of the engine.
        system: operating system and architecture. engine: entry point. libraries: versions.
    """

    cpu: str = read(text(256))
    cores: int = read(integer(1, 1 << 16))
    threads: int = read(integer(1, 1 << 16))
    system: str = read(text(128))
    engine: str = read(text(64))
    libraries: dict[str, str] = read(table(text(64), text(128), 64))

    def changes(self, now: Machine) -> list[str]:
        """What is different ``now``, a line each: ``threads: 2, was 4``."""
        return [
            f"{field.name}: {_shown(getattr(now, field.name))}, was {_shown(getattr(self, field.name))}"
            for field in fields(self)
            if getattr(now, field.name) != getattr(self, field.name)
        ]

    @property
    def slug(self) -> str:
        """A short name, fit for a file: ``amd-epyc-2c-2t``."""
        words = re.sub(r"\(r\)|\(tm\)|@.*|\b(?:cpu|processor)\b", " ", self.cpu.lower())
        stem = "-".join(re.findall(r"[a-z0-9]+", words))[:40].strip("-") or "cpu"
        return f"{stem}-{self.cores}c-{self.threads}t"


def cpu_model() -> str:
    """Model of the CPU, or of the board where Linux knows only that."""
    for path, pattern in ((_CPUINFO, _MODEL), (_TREE_MODEL, re.compile(r"([^\0]+)"))):
        try:
            found = pattern.search(path.read_text(errors="replace"))
        except OSError:
            continue
        if found:
            return "".join(letter for letter in found[1].strip() if letter.isprintable())[:256]
    return platform.processor() or platform.machine()


def physical_cores() -> int:
    """Cores this process may use, hyper-threads counted once where Linux tells; at least 1."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # not Linux
        return max(1, os.cpu_count() or 1)
    siblings = set()
    for cpu in allowed:
        try:
            siblings.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            siblings.add(str(cpu))
    return max(1, len(siblings))


def this_machine(engine: str, threads: int) -> Machine:
    """The machine as it is now, for an engine with ``threads`` threads (0: one a physical core)."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    libraries = {}
    for name in LIBRARIES:
        try:
            libraries[name] = version(name)
        except PackageNotFoundError:
            continue
    return Machine(
        cpu=cpu_model(),
        cores=cores,
        threads=threads or physical_cores(),
        system=f"{platform.system()} {platform.machine()}",
        engine=engine,
        libraries=libraries,
    )


def peak_rss_bytes() -> int:
    """Peak resident memory of this process."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _shown(value: object) -> str:
    return ", ".join(f"{key} {entry}" for key, entry in value.items()) if isinstance(value, dict) else str(value)
