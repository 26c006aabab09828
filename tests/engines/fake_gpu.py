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
import threading
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
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

VERSION, CAPABILITY = "10.9.0.34", "8.6"
_MAGIC = b"FAKEPLAN"
_KINDS = {"FLOAT": "fp32", "FLOAT16": "fp16", "INT64": "int64", "INT32": "int32", "BOOL": "bool"}
_NUMPY = {"fp32": np.float32, "fp16": np.float16, "int64": np.int64, "int32": np.int32, "bool": np.bool_}


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900


class Driver(ModuleType):
    """What ``cuda.bindings.driver`` is to :mod:`specexport.engines.cuda`.

    Attributes:
        capability, devices: of the machine. left: bytes that may still be allocated.
        capturing: what the stream has recorded, None while it runs. captures, launches, eager: how often graphs were
            captured and launched, and work was enqueued outside of one. pinned, memory: live allocations.
        threads: those in which a context is current.
    """

    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76
    )
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL=1)

    def __init__(self, capability: str = CAPABILITY, devices: int = 1, memory: int = 1 << 30) -> None:
        super().__init__("cuda.bindings.driver")
        self.capability, self.devices, self.left = capability, devices, memory
        self.memory: dict[int, NDArray[np.uint8]] = {}
        self.pinned: dict[int, NDArray[np.uint8]] = {}
        self.capturing: list[Callable[[], bool]] | None = None
        self.captures = self.launches = self.eager = 0
        self.threads: set[int] = set()

    def enqueue(self, work: Callable[[], bool]) -> tuple[Status]:
        """Run at once or record; as on a stream, what is recorded is looked at when it runs."""
        if threading.get_ident() not in self.threads:
            return (Status.CUDA_ERROR_INVALID_CONTEXT,)
        if self.capturing is not None:
            self.capturing.append(work)
            return (Status.CUDA_SUCCESS,)
        self.eager += 1
        return (Status.CUDA_SUCCESS if work() else Status.CUDA_ERROR_INVALID_VALUE,)

    def view(self, address: int, size: int, where: str = "memory") -> NDArray[np.uint8] | None:
        """The bytes at an address; None where they are not all of one live allocation."""
        for start, array in getattr(self, where).items():
            if start <= address and address + size <= start + len(array):
                found: NDArray[np.uint8] = array[address - start : address - start + size]
                return found
        return None

    def _copy(self, target: tuple[int, str], source: tuple[int, str], size: int) -> tuple[Status]:
        def work() -> bool:
            to, of = self.view(target[0], size, target[1]), self.view(source[0], size, source[1])
            if to is None or of is None:
                return False
            to[:] = of
            return True

        return self.enqueue(work)

    def cuInit(self, flags: int) -> tuple[Status]:
        return (Status.CUDA_SUCCESS if self.devices else Status.CUDA_ERROR_NO_DEVICE,)

    def cuGetErrorString(self, status: Status) -> tuple[Status, bytes]:
        return Status.CUDA_SUCCESS, Status(status).name.removeprefix("CUDA_ERROR_").lower().replace("_", " ").encode()

    def cuDeviceGetCount(self) -> tuple[Status, int]:
        return Status.CUDA_SUCCESS, self.devices

    def cuDeviceGet(self, ordinal: int) -> tuple[Status, int]:
        return Status.CUDA_SUCCESS, ordinal

    def cuDeviceGetName(self, length: int, device: int) -> tuple[Status, bytes]:
        return Status.CUDA_SUCCESS, b"Fake GPU".ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute: int, device: int) -> tuple[Status, int]:
        return Status.CUDA_SUCCESS, int(self.capability.split(".")[attribute - 75])

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Status, int]:
        return Status.CUDA_SUCCESS, 1

    def cuCtxSetCurrent(self, context: int) -> tuple[Status]:
        self.threads.add(threading.get_ident())
        return (Status.CUDA_SUCCESS,)

    def cuStreamCreate(self, flags: int) -> tuple[Status, int]:
        return Status.CUDA_SUCCESS, 7

    def cuMemGetInfo(self) -> tuple[Status, int, int]:
        return Status.CUDA_SUCCESS, self.left, 1 << 34

    def cuMemAlloc(self, size: int) -> tuple[Status, int]:
        if size > self.left:
            return Status.CUDA_ERROR_OUT_OF_MEMORY, 0
        array = np.full(size + 256, 0xA5, np.uint8)
        start = -array.ctypes.data % 256
        self.memory[array.ctypes.data + start] = array[start : start + size]
        self.left -= size
        return Status.CUDA_SUCCESS, array.ctypes.data + start

    def cuMemFree(self, address: int) -> tuple[Status]:
        self.left += len(self.memory.pop(address))
        return (Status.CUDA_SUCCESS,)

    def cuMemHostAlloc(self, size: int, flags: int) -> tuple[Status, int]:
        array = np.full(size, 0xA5, np.uint8)
        self.pinned[array.ctypes.data] = array
        return Status.CUDA_SUCCESS, array.ctypes.data

    def cuMemFreeHost(self, address: int) -> tuple[Status]:
        del self.pinned[address]
        return (Status.CUDA_SUCCESS,)

    def cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> tuple[Status]:
        return self._copy((target, "memory"), (source, "pinned"), size)

    def cuMemcpyDtoHAsync(self, target: int, source: int, size: int, stream: int) -> tuple[Status]:
        return self._copy((target, "pinned"), (source, "memory"), size)

    def cuMemcpyDtoDAsync(self, target: int, source: int, size: int, stream: int) -> tuple[Status]:
        return self._copy((target, "memory"), (source, "memory"), size)

    def cuMemsetD8Async(self, address: int, value: int, size: int, stream: int) -> tuple[Status]:
        def work() -> bool:
            view = self.view(address, size)
            if view is not None:
                view[:] = value
            return view is not None

        return self.enqueue(work)

    def cuStreamSynchronize(self, stream: int) -> tuple[Status]:
        return (Status.CUDA_SUCCESS if self.capturing is None else Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)

    def cuStreamBeginCapture(self, stream: int, mode: int) -> tuple[Status]:
        self.capturing = []
        return (Status.CUDA_SUCCESS,)

    def cuStreamEndCapture(self, stream: int) -> tuple[Status, Any]:
        graph, self.capturing = self.capturing, None
        return Status.CUDA_SUCCESS, graph

    def cuGraphInstantiate(self, graph: Any, flags: int) -> tuple[Status, Any]:
        self.captures += 1
        return Status.CUDA_SUCCESS, graph

    def cuGraphLaunch(self, graph: Sequence[Callable[[], bool]], stream: int) -> tuple[Status]:
        self.launches += 1
        return (Status.CUDA_SUCCESS if all([work() for work in graph]) else Status.CUDA_ERROR_INVALID_VALUE,)

    def cuGraphDestroy(self, graph: Any) -> tuple[Status]:
        return (Status.CUDA_SUCCESS,)

    def cuGraphExecDestroy(self, graph: Any) -> tuple[Status]:
        return (Status.CUDA_SUCCESS,)


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
