"""One plan, compiled in a process of its own: ``python -m specexport.engines.tensorrt_worker``, a job on its input.

The job is a line of JSON. When the input ends after it, whoever wanted the plan is gone, and the worker ends at once.

A compiler that aborts then takes nothing with it, its memory is given back before the next graph, and its peak is that
of this plan alone. Events go to standard output, one JSON object a line: ``{"phase", "done", "total"}`` while it works
and at the end ``{"built": ...}`` or ``{"failed": reason}``.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from specexport.engines.tensorrt_module import network_flags
from specexport.runtime.errors import SpecExportError

#: Called with the name of a phase, the steps of it that are done, and their number.
Report = Callable[[str, int, int], object]
#: Severities by number, where the enumeration of a module prints otherwise.
_SEVERITIES = ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE")


def build(job: Mapping[str, Any], module: Any, report: Report) -> dict[str, Any]:
    """Compile a job (:class:`specexport.engines.tensorrt.Job`) with a TensorRT module; the plan and log are written.

    Returns:
        ``bytes``, ``sha256`` of the plan, ``seconds`` of compiling, ``peak_rss_bytes``, and ``kinds``: how many layers
        of the parsed network have each type.

    Raises:
        SpecExportError: the parser or the builder refuses, and which node it names.
    """
    with Path(job["log"]).open("w", encoding="utf-8") as stream:
        logger = _logger(module, stream)
        return _build(job, module, logger, report)


def _build(job: Mapping[str, Any], module: Any, logger: Any, report: Report) -> dict[str, Any]:
    start = time.perf_counter()
    if job["plugin"]:
        import_module("specexport.engines.plugins.tree_attention.plugin").register(module)
    builder = module.Builder(logger)
    network = builder.create_network(network_flags(module))
    parser = module.OnnxParser(network, logger)
    if not parser.parse_from_file(job["onnx"]):
        raise SpecExportError(_parser_error(parser, logger))
    config = builder.create_builder_config()
    _configure(job, module, config, report)
    for shapes in job["profiles"]:
        profile = builder.create_optimization_profile()
        for name, shape in shapes.items():
            profile.set_shape(name, shape, shape, shape)
        config.add_optimization_profile(profile)
    # For devices that are not here nothing is timed, and to read a cache takes a driver.
    cache = None if job["capabilities"] else _open_cache(config, Path(job["timing_cache"]))
    writer = _Plan(Path(job["plan"]))
    try:
        if not _serialize(module, builder, network, config, writer):
            raise SpecExportError(logger.first_error or "the builder gave no plan and no reason")
    finally:
        writer.close()
    if logger.first_error is not None:  # a layer that was dropped, a mask that was ignored: never the graph asked for
        raise SpecExportError(logger.first_error)
    if cache is not None:
        Path(job["timing_cache"]).write_bytes(memoryview(config.get_timing_cache().serialize()))
    kinds: dict[str, int] = {}
    for index in range(network.num_layers):
        kind = str(network.get_layer(index).type).rpartition(".")[2]
        kinds[kind] = kinds.get(kind, 0) + 1
    return {
        "bytes": writer.bytes,
        "sha256": writer.digest.hexdigest(),
        "seconds": time.perf_counter() - start,
        "peak_rss_bytes": peak_rss(),
        "kinds": kinds,
    }


def _configure(job: Mapping[str, Any], module: Any, config: Any, report: Report) -> None:
    for index, capability in enumerate(job["capabilities"]):
        if not index:
            config.num_compute_capabilities = len(job["capabilities"])
        value = getattr(module.ComputeCapability, f"SM{capability.replace('.', '')}", None)
        if value is None or not config.set_compute_capability(value, index):
            raise SpecExportError(f"it does not compile for capability {capability}")
    config.profiling_verbosity = module.ProfilingVerbosity.DETAILED
    for pool, limit in job["memory"].items():
        config.set_memory_pool_limit(getattr(module.MemoryPoolType, pool), limit)
    if job["plugin"]:
        config.set_preview_feature(module.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    if hasattr(module, "IProgressMonitor") and hasattr(config, "progress_monitor"):
        config.progress_monitor = _monitor(module, report)


def _open_cache(config: Any, path: Path) -> Any:
    """A timing cache from a file, or a new one; None where there is no such thing. One of another version is left."""
    if not hasattr(config, "create_timing_cache"):
        return None
    for content in (path.read_bytes() if path.exists() else b"", b""):
        cache = config.create_timing_cache(content)
        if cache is not None and config.set_timing_cache(cache, False):
            return cache
    return None


def _serialize(module: Any, builder: Any, network: Any, config: Any, writer: _Plan) -> bool:
    """Compile into a file; past the compiler's memory where it can stream."""
    if hasattr(builder, "build_serialized_network_to_stream"):

        class Stream(module.IStreamWriter):  # type: ignore[misc]
            def __init__(self) -> None:
                module.IStreamWriter.__init__(self)

            def write(self, data: Any) -> int:
                return writer.write(data)

        return bool(builder.build_serialized_network_to_stream(network, config, Stream()))
    plan = builder.build_serialized_network(network, config)
    return plan is not None and writer.write(plan) > 0


class _Plan:
    """A plan that is written and hashed as it comes."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")
        self.bytes, self.digest = 0, hashlib.sha256()

    def write(self, data: Any) -> int:
        """Append a buffer; returns how many bytes that were."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        self.digest.update(view)
        self.bytes += view.nbytes
        return view.nbytes

    def close(self) -> None:
        """Force what was written to disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _logger(module: Any, stream: TextIO) -> Any:
    class Logger(module.ILogger):  # type: ignore[misc]
        """Writes every message to a file, as ``[SEVERITY] message``, and keeps the first error."""

        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.first_error: str | None = None

        def log(self, severity: Any, message: str) -> None:
            """See ``ILogger.log``."""
            level = int(severity)
            stream.write(f"[{_SEVERITIES[level] if level < len(_SEVERITIES) else level}] {message}\n")
            if level <= 1 and self.first_error is None:
                self.first_error = " ".join(message.split())[:400]

    return Logger()


def _monitor(module: Any, report: Report) -> Any:
    class Monitor(module.IProgressMonitor):  # type: ignore[misc]
        """Reports the steps of outermost phases."""

        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)
            self._steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            """See ``IProgressMonitor``."""
            if parent_phase is None:
                self._steps[phase_name] = num_steps
                report(phase_name, 0, num_steps)

        def phase_finish(self, phase_name: str) -> None:
            """See ``IProgressMonitor``."""
            if (steps := self._steps.pop(phase_name, None)) is not None:
                report(phase_name, steps, steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            """See ``IProgressMonitor``: True goes on."""
            if phase_name in self._steps:
                report(phase_name, step + 1, self._steps[phase_name])
            return True

    return Monitor()


def _parser_error(parser: Any, logger: Any) -> str:
    """Which node the parser refuses, and why."""
    for index in range(parser.num_errors):
        error = parser.get_error(index)
        words = re.sub(r"^In node \d+[^:]*: ", "", " ".join(str(error.desc()).split()))
        name, kind = (str(getattr(error, part, str)()) for part in ("node_name", "node_operator"))
        return f"node {name or error.node()} ({kind or 'unknown operator'}): {words[:400]}"
    return str(logger.first_error or "the parser gave no reason")


def peak_rss() -> int:
    """Peak resident memory since this program began; that of the system counts what started it, too."""
    try:
        with Path("/proc/self/status").open() as lines:
            return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)
    except OSError:
        return 0


def _end_with_input(handle: int) -> None:
    while os.read(handle, 1):
        pass
    os._exit(1)  # the compiler cannot be asked to stop


def main() -> int:
    """Read a job, build it, print events."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not get between the events

    def send(**event: Any) -> None:
        print(json.dumps(event), file=events, flush=True)

    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, args=(sys.stdin.fileno(),), daemon=True).start()
    try:
        module = import_module(job["module"])
        built = build(job, module, lambda phase, done, total: send(phase=phase, done=done, total=total))
    except SpecExportError as error:
        send(failed=str(error))
        return 1
    send(built=built)
    return 0


if __name__ == "__main__":
    sys.exit(main())
