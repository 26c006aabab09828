"""Plans from ONNX graphs: one builder for ``tensorrt`` and ``tensorrt_rtx`` (see ``engines.tensorrt_module``).

A plan is strongly typed, has one optimisation profile for each set of sizes, each pinned (least = usual = most), and
with TensorRT-RTX is for several compute capabilities at once. It is compiled in a process of its own
(``engines.tensorrt_worker``); what the compiler made of attention and cache updates is read from its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import specexport.runtime
from specexport.engines.tensorrt_log import Fusion, check_fusion, read_layers
from specexport.engines.tensorrt_module import Compiler, plugins_need_library
from specexport.engines.tensorrt_worker import Report
from specexport.runtime.errors import SpecExportError

#: Memory of the compiler beside three copies of the weights: the parsed ones (mapped), its own, and what it writes.
#: Measured with tensorrt-rtx 1.7: 135M fp16 0.27 GB of weights 1.3 GB, 8B int4 see README.
_FIXED_RAM, _RAM_PER_BYTE = 1 << 29, 3
#: Of a plan, beside the weights: kernels of a layer in one profile.
_CODE_PER_LAYER = 1 << 19
_WORKER = "specexport.engines.tensorrt_worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the worker is told, as JSON.

    Attributes:
        module: to import. onnx: graph, its data beside it. plan, log, timing_cache: files to write (the cache is read
            first where it exists). capabilities: to compile for; empty: the device at hand.
        profiles: for each, the shape of every input that has an open one. memory: limits by name of a pool, in bytes.
        plugin: register the attention plugin.
    """

    module: str
    onnx: str
    plan: str
    log: str
    timing_cache: str
    capabilities: Sequence[str]
    profiles: Sequence[Mapping[str, Sequence[int]]]
    memory: Mapping[str, int]
    plugin: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """A compiled plan.

    Attributes:
        bytes, sha256: of it. seconds: of compiling. peak_rss_bytes: of the worker. kinds: layers of the parsed network
            by type. fusion: of the attention nodes and caches that were asked about.
    """

    bytes: int
    sha256: str
    seconds: float
    peak_rss_bytes: int
    kinds: Mapping[str, int]
    fusion: Fusion


def estimate(weights: int, layers: int, profiles: int) -> tuple[int, int]:
    """Bytes of memory and of disk that compiling takes, from above.

    Args:
        weights: bytes of the graph's tensors.
    """
    plan = weights + layers * profiles * _CODE_PER_LAYER
    return _FIXED_RAM + _RAM_PER_BYTE * plan, plan


def check_room(memory: int, disk: int, folder: Path, available: int | None) -> None:
    """Refuse to begin what cannot end.

    Args:
        available: bytes of memory that are free; None: not known.

    Raises:
        SpecExportError: too little memory or disk, and how much is missing.
    """
    free = shutil.disk_usage(folder).free
    for name, need, has in (("memory", memory, available), ("disk space", disk, free)):
        if has is not None and need > has:
            raise SpecExportError(
                f"compiling needs about {need / (1 << 30):.1f} GiB of {name}, {has / (1 << 30):.1f} GiB are free: free "
                "some, or compile on a larger machine"
            )


def compile_plan(
    job: Job, compiler: Compiler, report: Report, attention: Sequence[str] = (), caches: Mapping[str, str] | None = None
) -> Built:
    """Compile one plan and see what became of its attention nodes and caches (output -> input).

    Raises:
        SpecExportError: the compiler refuses or ends; the message names the node and the reason.
    """
    with _library_path(job, compiler) as environment:
        built = _run(job, compiler, report, environment)
    with Path(job.log).open(encoding="utf-8", errors="replace") as lines:
        fusion = check_fusion(read_layers(lines), attention, caches or {}, len(job.profiles))
    return Built(**built, fusion=fusion)


def _run(job: Job, compiler: Compiler, report: Report, environment: Mapping[str, str]) -> dict[str, Any]:
    built: dict[str, Any] | None = None
    failed: str | None = None
    with tempfile.TemporaryFile("w+", errors="replace") as noise:
        command = [sys.executable, "-m", _WORKER]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=noise, text=True, env=environment) as worker:
            try:
                assert worker.stdin is not None and worker.stdout is not None
                with contextlib.suppress(BrokenPipeError):  # it ended before it read
                    print(json.dumps(asdict(job)), file=worker.stdin, flush=True)
                for line in worker.stdout:
                    event = json.loads(line)
                    built, failed = event.get("built"), event.get("failed")
                    if "phase" in event:
                        report(event["phase"], event["done"], event["total"])
                worker.wait()  # with its input open till then: it ends with that, so that no kill leaves it running
            finally:
                worker.kill()
        noise.seek(0)
        last = next((line.strip() for line in reversed(noise.readlines()) if line.strip()), "it printed nothing")
    if failed is not None:
        raise SpecExportError(f"{compiler.title} refuses it: {failed}")
    if built is None:
        how = _ending(worker.returncode)
        raise SpecExportError(f"{compiler.title} {how} while compiling: {last[:400]}")
    return built


def _ending(code: int) -> str:
    if code >= 0:
        return f"ended with code {code}"
    name = next((known.name for known in signal.Signals if known == -code), str(-code))
    hint = " (out of memory, most likely)" if name == "SIGKILL" else ""
    return f"ended by {name}{hint}"


@contextmanager
def _library_path(job: Job, compiler: Compiler) -> Iterator[dict[str, str]]:
    """The worker's environment: our modules, and the compiler's library under the name that plugins load it by."""
    ours = str(Path(next(iter(specexport.runtime.__path__))).parent.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([ours, *filter(None, [os.environ.get("PYTHONPATH")])])}
    if not job.plugin or not plugins_need_library(compiler):
        yield environment
        return
    with tempfile.TemporaryDirectory() as folder:
        library = _library(compiler)
        (Path(folder) / library.name.partition(".so")[0]).with_suffix(".so").symlink_to(library)
        known = os.environ.get("LD_LIBRARY_PATH")
        environment["LD_LIBRARY_PATH"] = os.pathsep.join([folder, *filter(None, [known])])
        yield environment


def _library(compiler: Compiler) -> Path:
    """The compiler's shared library, as this process has it loaded."""
    with Path("/proc/self/maps").open() as maps:
        for line in maps:
            path = Path(line.split(maxsplit=5)[-1].strip())
            if path.name.startswith(f"lib{compiler.name}.so"):
                return path
    raise SpecExportError(f"lib{compiler.name}.so is not loaded: plugins cannot be compiled with {compiler.title}")
