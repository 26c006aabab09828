"""The few calls of the CUDA driver that running a plan needs, through ``cuda.bindings`` (package ``cuda-bindings``).

No kernel is launched from here: memory, one stream, copies, and graphs that replay what the stream was given. All work
goes through the one stream of a :class:`Device`, so whatever was enqueued is done when :meth:`Device.wait` returns.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport.runtime.errors import SpecExportError, UsageError

#: What addresses of tensors and of workspaces are multiples of.
ALIGNMENT = 256
_PINNED = 0  # CU_MEMHOSTALLOC: no flag, page-locked


class CudaError(SpecExportError):
    """The driver refused a call."""


class Device:
    """One CUDA device: its primary context, a stream, and memory. Any thread may use it, one at a time.

    Attributes:
        name: of the device. capability: such as ``8.6``. stream: handle of the stream.

    Raises:
        UsageError: no driver, no device, or no ``cuda.bindings``.
    """

    def __init__(self, ordinal: int = 0) -> None:
        self._cuda, self._context, self._thread = _driver(), None, 0
        count = self._start()
        if not 0 <= ordinal < count:
            raise UsageError(f"no CUDA device {ordinal}: the driver shows {count}; look at nvidia-smi")
        self._device = self._call("cuDeviceGet", ordinal)
        self.name = bytes(self._call("cuDeviceGetName", 128, self._device)).split(b"\0")[0].decode(errors="replace")
        self.capability = f"{self._capability('MAJOR')}.{self._capability('MINOR')}"
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        self._stream = self._call("cuStreamCreate", int(self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self.stream = int(self._stream)
        self.scratch = Scratch(self)

    def _start(self) -> int:
        """Devices there are."""
        try:
            self._call("cuInit", 0)
            return int(self._call("cuDeviceGetCount"))
        except CudaError as error:
            raise UsageError(f"no CUDA device can be used: {error}") from None
        except Exception as error:  # cuda-pathfinder's and the loader's own, where libcuda is missing
            raise UsageError(
                "libcuda was not found: install the NVIDIA driver, or choose an engine for the CPU "
                f"({(str(error).splitlines() or [type(error).__name__])[0]})"
            ) from None

    def _capability(self, part: str) -> int:
        attribute = getattr(self._cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{part}")
        return int(self._call("cuDeviceGetAttribute", attribute, self._device))

    def _call(self, name: str, *arguments: Any) -> Any:
        self._enter()
        status, *values = getattr(self._cuda, name)(*arguments)
        if int(status):
            raise CudaError(f"{name} failed: {self._reason(status)}")
        return values[0] if values else None

    def _enter(self) -> None:
        """Make the context current in this thread; an engine may be loaded in one and used in another."""
        if self._context is not None and self._thread != (thread := threading.get_ident()):
            self._cuda.cuCtxSetCurrent(self._context)
            self._thread = thread

    def release(self, name: str, handle: Any) -> None:
        """Give something back, from a destructor: whether that works is nobody's concern any more."""
        self._enter()
        getattr(self._cuda, name)(handle)

    def _reason(self, status: Any) -> str:
        _, text = self._cuda.cuGetErrorString(status)
        return f"{bytes(text).decode(errors='replace') if text else 'unknown error'} (CUDA error {int(status)})"

    def free_bytes(self) -> int:
        """Memory that is free on the device."""
        self._enter()
        free, _ = self._cuda.cuMemGetInfo()[1:]
        return int(free)

    def allocate(self, size: int, purpose: str) -> Buffer:
        """Device memory, at least a byte.

        Raises:
            SpecExportError: there is too little.
        """
        try:
            return Buffer(self, self._call("cuMemAlloc", max(size, 1)), size)
        except CudaError as error:
            raise SpecExportError(
                f"{self.name} has no {mebibytes(size)} left for {purpose}: {mebibytes(self.free_bytes())} are free; "
                f"close what else uses it or build the bundle with a smaller --window ({error})"
            ) from None

    def pinned(self, size: int) -> Pinned:
        """Page-locked host memory, zeroed."""
        return Pinned(self, int(self._call("cuMemHostAlloc", max(size, 1), _PINNED)), max(size, 1))

    def upload(self, target: int, source: int, size: int) -> None:
        """Enqueue a copy from pinned memory."""
        if size:
            self._call("cuMemcpyHtoDAsync", target, source, size, self._stream)

    def download(self, target: int, source: int, size: int) -> None:
        """Enqueue a copy to pinned memory."""
        if size:
            self._call("cuMemcpyDtoHAsync", target, source, size, self._stream)

    def copy(self, target: int, source: int, size: int) -> None:
        """Enqueue a copy within the device."""
        if size:
            self._call("cuMemcpyDtoDAsync", target, source, size, self._stream)

    def zero(self, address: int, size: int) -> None:
        """Enqueue filling with zeros."""
        if size:
            self._call("cuMemsetD8Async", address, 0, size, self._stream)

    def wait(self) -> None:
        """Until everything enqueued is done.

        Raises:
            CudaError: some of it failed.
        """
        self._call("cuStreamSynchronize", self._stream)

    def read(self, address: int, size: int) -> NDArray[np.uint8]:
        """A copy of device memory; waits."""
        staging = self.pinned(size)
        self.download(staging.address, address, size)
        self.wait()
        return staging.array(np.dtype(np.uint8), (size,)).copy()

    def capture(self, work: Callable[[], None]) -> Replay:
        """What ``work`` enqueues as a graph, without running it.

        Raises:
            SpecExportError: ``work`` failed, or did what cannot be captured.
        """
        mode = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", self._stream, mode)
        try:
            work()
        except BaseException:
            status, graph = self._cuda.cuStreamEndCapture(self._stream)  # also ends one that failed
            if not int(status):
                self._cuda.cuGraphDestroy(graph)
            raise
        graph = self._call("cuStreamEndCapture", self._stream)
        try:
            return Replay(self, self._call("cuGraphInstantiate", graph, 0))
        finally:
            self._cuda.cuGraphDestroy(graph)


class Buffer:
    """Device memory that is freed with this object."""

    def __init__(self, device: Device, pointer: Any, size: int) -> None:
        self._device, self._pointer, self.size = device, pointer, size
        self.address = int(pointer)

    def __del__(self) -> None:
        self._device.release("cuMemFree", self._pointer)


class Pinned:
    """Page-locked host memory that is freed with this object; arrays on it must not outlive it."""

    def __init__(self, device: Device, address: int, size: int) -> None:
        self._device, self.address, self.size = device, address, size
        self._bytes = np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)), np.uint8)
        self._bytes[:] = 0

    def array(self, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int = 0) -> NDArray[Any]:
        """A view."""
        size = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
        view: NDArray[Any] = self._bytes[offset : offset + size].view(dtype).reshape(shape)
        return view

    def __del__(self) -> None:
        self._device.release("cuMemFreeHost", self.address)


class Replay:
    """A captured graph."""

    def __init__(self, device: Device, graph: Any) -> None:
        self._device, self._graph = device, graph

    def launch(self) -> None:
        """Enqueue it."""
        self._device._call("cuGraphLaunch", self._graph, self._device._stream)

    def __del__(self) -> None:
        self._device.release("cuGraphExecDestroy", self._graph)


class Scratch:
    """Working memory that everything on the stream shares, because one thing runs at a time.

    Attributes:
        version: changes whenever the address does; whatever holds the address must then take the new one.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffer: Buffer | None = None
        self.version = 0

    @property
    def address(self) -> int:
        return self._buffer.address if self._buffer else 0

    @property
    def size(self) -> int:
        return self._buffer.size if self._buffer else 0

    def need(self, size: int) -> None:
        """Have at least ``size`` bytes."""
        if size > self.size:
            self._device.wait()
            self._buffer = None  # freed first: on a small device both would not fit
            self._buffer = self._device.allocate(size, "activations")
            self.version += 1


@dataclass(frozen=True, slots=True)
class Layout:
    """Where tensors lie in a block: offsets by name, each a multiple of :data:`ALIGNMENT`; ``size`` of all."""

    offsets: dict[str, int]
    size: int

    @staticmethod
    def of(sizes: Mapping[str, int]) -> Layout:
        """One behind the other, in order; an empty tensor has a place too."""
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = end
            end += -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        return Layout(offsets, end)


def mebibytes(size: int) -> str:
    """``123 MiB``."""
    return f"{size / 2**20:.0f} MiB"


def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ModuleNotFoundError:
        raise UsageError(
            "cuda.bindings is missing: install the driver's bindings with \"pip install 'specexport[tensorrt]'\""
        ) from None
    return driver
