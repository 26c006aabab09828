"""The TensorRT modules that compile: ``tensorrt`` (10.3 of JetPack 6 and later) and ``tensorrt_rtx``, probed.

Nothing is concluded from a version number: what a module can do is what it has attributes for, what its parser says
it takes, and what its configuration accepts.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from specexport.runtime.errors import UsageError

#: Backend of a profile -> module, extra of the package (None: comes with the device's system software).
BACKENDS: dict[str, tuple[str, str | None]] = {
    "tensorrt": ("tensorrt", None),
    "tensorrt-rtx": ("tensorrt_rtx", "tensorrt-rtx"),
}
#: Lowest capability whose kernels multiply with weights of a format; others run everywhere.
WEIGHTS_FROM = {"int4": "8.0", "fp8": "8.9", "nvfp4": "12.0"}
#: Operators of the exported graphs that older parsers lack (``exporter.passes.plain`` replaces them).
RECENT_OPERATORS = ("Attention", "TensorScatter", "RotaryEmbedding", "RMSNormalization")


@dataclass(frozen=True, slots=True)
class Compiler:
    """A module with what it was seen to be able to do.

    Attributes:
        module: the imported module. name: of it. version: as it says.
        targets: capabilities that plans can be compiled for on any machine; empty: only for the device at hand.
        lacks: operators of :data:`RECENT_OPERATORS` that its parser does not take.
    """

    module: Any
    name: str
    version: str
    targets: tuple[str, ...]
    lacks: tuple[str, ...]

    @property
    def title(self) -> str:
        """Name and version, for people."""
        return f"{self.name} {self.version}"


def open_compiler(backend: str) -> Compiler:
    """Import and probe the module of a backend.

    Raises:
        UsageError: not a backend that compiles, not installed, or it cannot be loaded.
    """
    if backend not in BACKENDS:
        raise UsageError(f"{backend} needs no plans: expected a profile whose backend is one of {', '.join(BACKENDS)}")
    name, extra = BACKENDS[backend]
    try:
        module = importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: a library it needs is missing
        install = (
            f"pip install 'specexport[{extra}]'"
            if extra
            else "it comes with JetPack, or pip install tensorrt on servers"
        )
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise UsageError(f"backend {backend} needs the module {name} ({reason}): {install}") from None
    return probe(module, name)


def probe(module: Any, name: str) -> Compiler:
    """What a module can do."""
    targets: tuple[str, ...] = ()
    if hasattr(module, "ComputeCapability") and hasattr(module.IBuilderConfig, "set_compute_capability"):
        targets = tuple(sorted(map(_dotted, _numbered(module.ComputeCapability)), key=capability_key))
    logger = module.Logger(module.Logger.ERROR)
    network = module.Builder(logger).create_network(network_flags(module))
    parser = module.OnnxParser(network, logger)
    lacks = tuple(name for name in RECENT_OPERATORS if not parser.supports_operator(name))
    return Compiler(module, name, str(module.__version__), targets, lacks)


def network_flags(module: Any) -> int:
    """Strongly typed: the types of the graph are the types of the kernels. Explicit batch where it is not implied."""
    flags = module.NetworkDefinitionCreationFlag
    names = ("STRONGLY_TYPED", "EXPLICIT_BATCH")
    return sum(1 << int(getattr(flags, flag)) for flag in names if hasattr(flags, flag))


def _numbered(enumeration: Any) -> Iterable[str]:
    return (name for name in enumeration.__members__ if name.startswith("SM") and name[2:].isdecimal())


def _dotted(name: str) -> str:
    return f"{name[2:-1]}.{name[-1]}"


def capability_key(capability: str) -> tuple[int, int]:
    """For ordering: ``12.0`` comes after ``8.9``."""
    major, _, minor = capability.partition(".")
    return int(major), int(minor)


def check_capabilities(compiler: Compiler, capabilities: Sequence[str], weights: Sequence[str]) -> None:
    """Refuse what cannot be compiled before the work begins.

    Args:
        weights: formats of weights in the graphs.

    Raises:
        UsageError: a capability that the module does not compile for, or whose devices lack a format.
    """
    for capability in capabilities:
        if compiler.targets and capability not in compiler.targets:
            raise UsageError(
                f"{compiler.title} compiles for capability {', '.join(compiler.targets)}, not {capability}: "
                + (
                    "compile on the device itself with TensorRT"
                    if capability in ("8.7", "9.0")
                    else "name one of those"
                )
            )
        for kind in weights:
            if capability_key(capability) < capability_key(WEIGHTS_FROM.get(kind, "0.0")):
                raise UsageError(
                    f"{kind} weights need capability {WEIGHTS_FROM[kind]} or later, not {capability}: build the bundle "
                    "with --precision int8 or fp16 for such devices"
                )


def plugins_need_library(compiler: Compiler) -> bool:
    """Whether a plugin node would abort the process: TensorRT-RTX then loads its library by its unversioned name."""
    if compiler.name != "tensorrt_rtx":
        return False
    try:
        ctypes.CDLL("libtensorrt_rtx.so")
    except OSError:
        return True
    return False
