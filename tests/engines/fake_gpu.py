"""A fake of the CUDA driver and of TensorRT, so that the code above them runs on machines without either.

"Device memory" is host memory with addresses of its own kind (copies between host and device must name the right one,
freed or foreign addresses fail, fresh memory holds garbage), a stream runs at once or records while it captures, and a
"plan" is an ONNX file behind a header: an engine that runs it by ONNX Runtime's CPU provider. Only calls that the real
modules have are here, under their names and with their results. What no fake can show: that TensorRT compiles and
computes the same, that capture works with its kernels, and any speed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from numpy.typing import NDArray

from specexport.engines.plan import PlanProfile, PlanRecord, TensorInfo, plan_names, write_plan
from specexport.exporter.passes import summary
from specexport.runtime.bundle import ENGINES, TARGET_GRAPH, Bundle, sha256
from tests.engines.fake_driver import CAPABILITY, Driver

VERSION = "10.9.0.34"
_MAGIC = b"FAKEPLAN"
_KINDS = {"FLOAT": "fp32", "FLOAT16": "fp16", "INT64": "int64", "INT32": "int32", "BOOL": "bool"}
_NUMPY = {"fp32": np.float32, "fp16": np.float16, "int64": np.int64, "int32": np.int32, "bool": np.bool_}


class Engine:
    """A deserialised "plan"; see the module docstring.

    Attributes:
        contexts: those made so far. capturable: what they say of capturing now.
    """

    device_memory_size_v2 = 4096
    capturable = True

    def __init__(self, driver: Driver, log: Any, plan: bytes) -> None:
        size = int.from_bytes(plan[8:12], "little")
        header = json.loads(plan[12 : 12 + size])
        self.driver, self.log, self.aliases, self.profiles = driver, log, header["aliases"], header["profiles"]
        self.kinds, self.modes = header["kinds"], header["modes"]
        self.shapes, self.names = header["shapes"], list(header["shapes"])
        self.num_optimization_profiles, self.num_io_tensors = len(self.profiles), len(self.names)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(plan[12 + size :], options, providers=["CPUExecutionProvider"])
        self.contexts: list[Context] = []

    def get_tensor_name(self, index: int) -> str:
        return str(self.names[index])

    def get_tensor_shape(self, name: str) -> list[int]:
        return [-1 if isinstance(size, str) else size for size in self.shapes[name]]

    def get_tensor_dtype(self, name: str) -> Any:
        kind = self.kinds[name]
        return SimpleNamespace(name={"fp32": "FLOAT", "fp16": "HALF"}.get(kind, kind.upper()))

    def get_tensor_profile_shape(self, name: str, index: int) -> list[tuple[int, ...]]:
        return [self.shape(name, index)] * 3

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return None if name not in self.aliases else str(self.aliases[name])

    def shape(self, name: str, index: int) -> tuple[int, ...]:
        return tuple(self.profiles[index].get(size, size) for size in self.shapes[name])

    def create_execution_context(self, strategy: str) -> Context:
        assert strategy == "user managed"
        self.contexts.append(Context(self))
        return self.contexts[-1]


class Context:
    """Enqueues an engine with the addresses it has at that time, as a captured graph would keep them."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.profile = engine, -1
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.scratch = (0, 0)

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile = index
        return 0 <= index < len(self.engine.profiles)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.shapes[name] = shape
        return shape == self.engine.shape(name, self.profile)

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.engine.shape(name, self.profile)

    def set_device_memory(self, address: int, size: int) -> None:
        self.scratch = address, size

    def is_stream_capturable(self, stream: int) -> bool:
        return self.engine.capturable

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return address % 256 == 0

    def execute_async_v3(self, stream: int) -> bool:
        addresses, scratch = dict(self.addresses), self.scratch
        (status,) = self.engine.driver.enqueue(lambda: self._run(addresses, scratch))
        return status == 0

    def _fail(self, why: str) -> bool:
        self.engine.log.log(1, why)
        return False

    def _run(self, addresses: Mapping[str, int], scratch: tuple[int, int]) -> bool:
        engine, driver = self.engine, self.engine.driver
        memory = driver.view(*scratch)
        if memory is None or scratch[1] < engine.device_memory_size_v2:
            return self._fail("activations have no memory")
        memory[:] = 0x5A  # whoever shares it must not count on what is there
        views: dict[str, NDArray[Any]] = {}
        for name in engine.names:
            shape, dtype = engine.shape(name, self.profile), np.dtype(_NUMPY[engine.kinds[name]])
            view = driver.view(addresses.get(name, 0), dtype.itemsize * int(np.prod(shape)))
            if view is None or (engine.modes[name] == "input" and self.shapes.get(name) != shape):
                return self._fail(f"{name} has no memory or no shape")
            views[name] = view.view(dtype).reshape(shape)
        for past in (name for name in engine.names if name.startswith("past_")):
            present = past.replace("past_", "present_")
            if (addresses[past] == addresses[present]) != (engine.aliases.get(present) == past):
                return self._fail(f"{present} is in the wrong memory")
        fed = {name: view.copy() for name, view in views.items() if engine.modes[name] == "input"}
        names = [name for name in engine.names if engine.modes[name] == "output"]
        for name, array in zip(names, engine.session.run(names, fed), strict=True):
            views[name][...] = array
        return True


class Registry:
    """Plugins by (name, version, namespace); ``load_library`` registers what ``libraries`` says of a path."""

    def __init__(self) -> None:
        self.creators: set[tuple[str, str, str]] = set()
        self.libraries: dict[str, tuple[str, str, str]] = {}

    def get_creator(self, name: str, version: str, space: str) -> object | None:
        return object() if (name, version, space) in self.creators else None

    def load_library(self, path: str) -> object | None:
        if path not in self.libraries:
            return None
        self.creators.add(self.libraries[path])
        return object()


class Gpu:
    """Both fakes, put where the real modules would be imported from. ``engines``: those that were deserialised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        self.driver, self.engines, self.registry = Driver(**settings), [], Registry()
        self.engines: list[Engine]
        bindings = ModuleType("cuda.bindings")
        bindings.driver = self.driver  # type: ignore[attr-defined]
        gpu = self

        class ILogger:
            def log(self, severity: int, message: str) -> None: ...

        class Runtime:
            def __init__(self, log: Any) -> None:
                self.log = log

            def deserialize_cuda_engine(self, plan: Any) -> Engine | None:
                if plan[:8] != _MAGIC:
                    self.log.log(1, "the magic tag is wrong")
                    return None
                gpu.engines.append(Engine(gpu.driver, self.log, plan[:]))
                return gpu.engines[-1]

        for name in ("tensorrt", "tensorrt_rtx"):
            module = ModuleType(name)
            vars(module).update(
                __version__=VERSION,
                ILogger=ILogger,
                Runtime=Runtime,
                ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED="user managed"),
                get_plugin_registry=lambda: gpu.registry,
            )
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", self.driver)

    def read(self, address: int, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        """Device memory as an array that is that memory."""
        view = self.driver.view(address, np.dtype(dtype).itemsize * int(np.prod(shape)))
        assert view is not None
        return view.view(dtype).reshape(shape)


def compile_fake(
    bundle: Bundle,
    profiles: Sequence[Mapping[str, int]],
    graph: str = TARGET_GRAPH,
    *,
    in_place: bool = True,
    falls_back: bool = False,
    summarise: bool = True,
    folder: str = "fake",
    **changes: Any,
) -> PlanRecord:
    """Put a "plan" of a graph and its record where the compiler would.

    Args:
        in_place, falls_back: caches are updated in place; the record says so, but the engine could not.
        changes: to the record alone.
    """
    target = bundle.manifest.target
    model = ir.load(bundle.path / graph)
    names = {value.name for value in model.graph.outputs}
    if summarise and graph == TARGET_GRAPH:
        summary.lower(model, target.valid_vocab, 8)
    inputs, outputs = (
        tuple(
            TensorInfo(
                name=str(value.name),
                dtype=_KINDS[str(value.dtype)],
                shape=tuple(size if isinstance(size, int) else str(size) for size in value.shape or ()),
            )
            for value in values
        )
        for values in (model.graph.inputs, model.graph.outputs)
    )
    presents = sorted(name for name in names if name and name.startswith("present_"))
    aliases = {name: name.replace("present_", "past_") for name in presents} if in_place else {}
    proto = ir.to_proto(model)
    assert isinstance(proto, onnx.ModelProto)
    onnx.load_external_data_for_model(proto, str(bundle.path))
    header = {
        "aliases": {} if falls_back else aliases,
        "profiles": [dict(profile) for profile in profiles],
        "shapes": {x.name: x.shape for x in (*inputs, *outputs)},
        "kinds": {x.name: x.dtype for x in (*inputs, *outputs)},
        "modes": {x.name: mode for xs, mode in ((inputs, "input"), (outputs, "output")) for x in xs},
    }
    text = json.dumps(header).encode()
    place = bundle.path / ENGINES / folder
    place.mkdir(parents=True, exist_ok=True)
    path = place / plan_names(graph)[0]
    path.write_bytes(_MAGIC + len(text).to_bytes(4, "little") + text + proto.SerializeToString())
    sources = {name: bundle.manifest.files[name] for name in (graph,)}
    record: dict[str, Any] = {
        "graph": graph,
        "plan": path.name,
        "bytes": path.stat().st_size,
        "sha256": sha256(path),
        "sources": sources,
        "module": "tensorrt",
        "version": VERSION,
        "capabilities": (CAPABILITY,),
        "slots": target.slots,
        "inputs": inputs,
        "outputs": outputs,
        "aliases": aliases,
        "profiles": tuple(PlanProfile(index=index, dims=dict(dims)) for index, dims in enumerate(profiles)),
        "plugins": (),
        "weights": "fp32",
        "activations": "fp32",
        "layers": target.layers,
        "attention_fused": target.layers,
        "cache_tensors": 2 * target.layers,
        "cache_in_place": 2 * target.layers if in_place else 0,
        "plain": not in_place,
        "build_seconds": 0.1,
        "peak_rss_bytes": 1,
    }
    found = PlanRecord(**record | changes)
    write_plan(place, found)
    return found


def target_profiles(widths: Sequence[int] = (1, 2, 4, 8), chunk: int = 16) -> list[dict[str, int]]:
    """Trees of these widths, and a chunk of a prompt with one row of logits."""
    accepted = max(widths) - 1
    sizes = [(width, width) for width in widths] + [(chunk, 1)]
    return [{"T": nodes, "A": accepted, "O": accepted + nodes, "R": rows} for nodes, rows in sizes]
