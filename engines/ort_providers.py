"""ONNX Runtime's execution providers as engines: what each is called, needs, and is told.

Only the CPU's and CUDA's run the exported graph with exact shapes. TensorRT's and TensorRT-RTX's compile it at first
use, for the ranges of sizes that :func:`_ranges` states; that takes minutes unless what was compiled is in the user's
cache. Plans that were compiled beforehand, by width, are the engines ``tensorrt`` and ``tensorrt-rtx``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import onnxruntime as ort

from specexport.runtime import contract
from specexport.runtime.errors import BundleError, UsageError

_LOG = logging.getLogger(__name__)
#: Ranges that compiling providers are given: nodes, those they are tuned for, rows to commit.
MOST_NODES, USUAL_NODES, MOST_ACCEPTED = 256, 8, 63
_PLUGIN_NAMES: set[str] = set()


@dataclass(frozen=True, slots=True)
class Provider:
    """An execution provider.

    Attributes:
        name: ONNX Runtime's. engine: our entry point. package: what installs it. device: where caches lie.
        options: of the provider, made when it is used. compiles: it compiles whole graphs for a target.
        plugin: module of a provider that comes as a package of its own, beside ONNX Runtime.
        heads: provider that runs graphs of drafters; None: itself.
    """

    name: str
    engine: str
    package: str
    device: str
    options: Callable[[], Mapping[str, str]] = field(default=dict)
    compiles: bool = False
    plugin: str | None = None
    heads: Provider | None = None

    def configure(self, options: ort.SessionOptions) -> list[Any]:
        """Add the provider to a session's options, or return it for the session's list of providers.

        Raises:
            UsageError: it is not installed, or there is no device for it.
        """
        if self.compiles:
            options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        if self.plugin is not None:
            options.add_provider_for_devices(self._devices(self.plugin)[:1], dict(self.options()))
            return []
        if self.name not in ort.get_available_providers():
            raise UsageError(
                f"onnxruntime {ort.__version__} has no {self.name}: install the GPU build with 'pip install "
                f"{self.package}' or choose the engine onnxruntime-cpu"
            )
        return [(self.name, dict(self.options()))]

    def confirm(self, session: Any, path: Path) -> None:
        """Refuse a session that ONNX Runtime quietly made without the provider.

        Raises:
            UsageError: it could not start. BundleError: it took no part of the graph.
        """
        if self.name not in session.get_providers():
            raise UsageError(
                f"onnxruntime {ort.__version__} could not start {self.name}: look for its CUDA, cuDNN or TensorRT "
                "libraries and at nvidia-smi, or choose the engine onnxruntime-cpu"
            )
        if not self.compiles:
            return
        nodes: dict[str, list[str]] = {}
        for part in session.get_provider_graph_assignment_info():
            nodes.setdefault(part.ep_name, []).extend(node.op_type for node in part.get_nodes())
        left = [kind for name, kinds in nodes.items() if name != self.name for kind in kinds]
        if not nodes.get(self.name):
            raise BundleError(f"{path}: {self.name} compiled nothing of it, all {len(left)} nodes were left to others")
        if left:
            _LOG.warning("%s: %s left %d nodes to others, such as %s", path, self.name, len(left), left[0])

    def _devices(self, plugin: str) -> list[Any]:
        """Devices of a plugin, which is registered on first use."""
        try:
            module = import_module(plugin)
        except ImportError:
            raise UsageError(
                f"engine {self.engine} needs {self.name}: install it with 'pip install {self.package}'"
            ) from None
        if self.name not in _PLUGIN_NAMES:
            try:
                ort.register_execution_provider_library(self.name, module.get_library_path())
            except Exception as error:  # onnxruntime's exceptions share no base of their own
                reason = (str(error).splitlines() or ["no reason given"])[0]
                raise UsageError(f"onnxruntime {ort.__version__} cannot load {self.name}: {reason}") from None
            _PLUGIN_NAMES.add(self.name)
        found = [device for device in ort.get_ep_devices() if device.ep_name == self.name]
        if not found:
            raise UsageError(f"{self.name} sees no device: look at nvidia-smi, or choose the engine onnxruntime-cpu")
        return found


def _ranges(prefix: str) -> dict[str, str]:
    """Smallest, usual and largest shape of each input with symbolic sizes, as both compiling providers take them."""
    sizes = {
        "min": (1, 0, 1),
        "opt": (USUAL_NODES, USUAL_NODES // 2, USUAL_NODES),
        "max": (MOST_NODES, MOST_ACCEPTED, MOST_NODES),
    }
    ranges = {}
    for which, (nodes, accepted, rows) in sizes.items():
        shapes = {
            contract.TOKENS: f"1x{nodes}",
            contract.POSITIONS: f"1x{nodes}",
            contract.TREE: f"1x{nodes}x{nodes}",
            contract.COMMIT: f"{accepted}",
            contract.ORDER: f"{nodes + accepted}",
            contract.SELECT: f"{rows}",
        }
        ranges[f"{prefix}_profile_{which}_shapes"] = ",".join(f"{name}:{shape}" for name, shape in shapes.items())
    return ranges


def _cache(engine: str) -> str:
    """Where what an engine compiled is kept: in the user's cache, because it is executable."""
    base = os.environ.get("XDG_CACHE_HOME")
    folder = (Path(base) if base else Path.home() / ".cache") / "specexport" / engine
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)


def _tensorrt() -> dict[str, str]:
    kept = _cache("onnxruntime-tensorrt")
    return {
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": kept,
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": kept,
        **_ranges("trt"),
    }


def _tensorrt_rtx() -> dict[str, str]:
    return {"nv_runtime_cache_path": _cache("onnxruntime-tensorrt-rtx"), **_ranges("nv")}


CPU = Provider("CPUExecutionProvider", "onnxruntime-cpu", "onnxruntime", "cpu")
#: Caches are allocated once, so the arena need not grow by powers of two.
CUDA = Provider(
    "CUDAExecutionProvider",
    "onnxruntime-cuda",
    "onnxruntime-gpu",
    "cuda",
    lambda: {"arena_extend_strategy": "kSameAsRequested"},
)
TENSORRT = Provider(
    "TensorrtExecutionProvider", "onnxruntime-tensorrt", "onnxruntime-gpu", "cuda", _tensorrt, compiles=True, heads=CUDA
)
TENSORRT_RTX = Provider(
    "NvTensorRTRTXExecutionProvider",
    "onnxruntime-tensorrt-rtx",
    "onnxruntime-ep-nv-tensorrt-rtx-cu13",
    "cuda",
    _tensorrt_rtx,
    compiles=True,
    plugin="onnxruntime_ep_nv_tensorrt_rtx",
    heads=CPU,
)
#: By entry point.
PROVIDERS = {provider.engine: provider for provider in (CPU, CUDA, TENSORRT, TENSORRT_RTX)}
