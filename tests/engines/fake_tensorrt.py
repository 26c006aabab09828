"""What ``import tensorrt`` is on JetPack 6 (10.3), as far as a builder sees it: no recent operators, no targets, no
monitor, no streams. The plan is a note of what was asked for. ``FAKE_TENSORRT`` chooses how a build ends.
"""

from __future__ import annotations

import enum
import os
from typing import Any

import onnx

__version__ = "10.3.0"
#: Of the newest opset that its parser reads.
_OPSET = 21


class ILogger:
    pass


class Logger(ILogger):
    ERROR = 1

    def __init__(self, severity: int = 1) -> None:
        self.log = lambda severity, message: None


class NetworkDefinitionCreationFlag(enum.IntEnum):
    EXPLICIT_BATCH = 0
    STRONGLY_TYPED = 1


class ProfilingVerbosity(enum.IntEnum):
    DETAILED = 2


class MemoryPoolType(enum.IntEnum):
    WORKSPACE = 0


class IBuilderConfig:
    def __init__(self) -> None:
        self.profiles: list[dict[str, Any]] = []
        self.limits: dict[MemoryPoolType, int] = {}
        self.profiling_verbosity: ProfilingVerbosity | None = None

    def set_memory_pool_limit(self, pool: MemoryPoolType, limit: int) -> None:
        self.limits[pool] = limit

    def add_optimization_profile(self, profile: Any) -> None:
        self.profiles.append(profile.shapes)


class _Profile:
    def __init__(self) -> None:
        self.shapes: dict[str, Any] = {}

    def set_shape(self, name: str, least: Any, usual: Any, most: Any) -> None:
        assert least == usual == most
        self.shapes[name] = tuple(least)


class _Network:
    def __init__(self, flags: int) -> None:
        assert flags == 0b11
        self.model: onnx.ModelProto | None = None

    num_layers = 0


class Builder:
    def __init__(self, logger: ILogger) -> None:
        self._logger = logger

    def create_network(self, flags: int) -> _Network:
        return _Network(flags)

    def create_builder_config(self) -> IBuilderConfig:
        return IBuilderConfig()

    def create_optimization_profile(self) -> _Profile:
        return _Profile()

    def build_serialized_network(self, network: _Network, config: IBuilderConfig) -> bytes | None:
        match os.environ.get("FAKE_TENSORRT"):
            case "abort":
                os.abort()
            case "error":
                self._logger.log(1, "no tactic for\nlayer 7")  # type: ignore[attr-defined]
                return None
        assert network.model is not None and config.profiles and config.limits
        return repr(config.profiles).encode()


class _Error:
    def __init__(self, node: onnx.NodeProto) -> None:
        self._node = node

    def desc(self) -> str:
        return f"In node 3 with name: {self._node.name} (parse): no importer"

    def node(self) -> int:
        return 3


class OnnxParser:
    def __init__(self, network: _Network, logger: ILogger) -> None:
        self._network = network
        self._errors: list[_Error] = []

    def supports_operator(self, name: str) -> bool:
        return name not in ("Attention", "TensorScatter", "RotaryEmbedding", "RMSNormalization")

    def parse_from_file(self, path: str) -> bool:
        self._network.model = onnx.load(path, load_external_data=False)
        (version,) = (entry.version for entry in self._network.model.opset_import if entry.domain == "")
        known = version <= _OPSET
        self._errors = [
            _Error(n) for n in self._network.model.graph.node if not (known and self.supports_operator(n.op_type))
        ]
        return not self._errors

    @property
    def num_errors(self) -> int:
        return len(self._errors)

    def get_error(self, index: int) -> _Error:
        return self._errors[index]
