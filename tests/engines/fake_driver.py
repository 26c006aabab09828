"""A fake of the CUDA driver; :mod:`tests.engines.fake_gpu` says what it is for and what it cannot show."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

CAPABILITY = "8.6"


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
