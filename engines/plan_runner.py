"""Running a deserialised plan: memory laid out once, one execution context a profile, a CUDA graph for each.

A call is one copy of its small inputs from pinned memory, the plan, and one copy of the outputs that are wanted at
once; from the second call of a profile on the three are one captured graph. Caches never move: an output that the plan
updates in place is bound to its input's memory. Where a plan cannot (plain operators of older TensorRT), two buffers
take turns, and each order of them has a graph of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport.engines.cuda import ALIGNMENT, Layout, Pinned, Replay
from specexport.engines.plan import PlanProfile, PlanRecord, TensorInfo
from specexport.engines.plan_loader import NUMPY, Tensorrt, tensor_bytes
from specexport.runtime.errors import BundleError, SpecExportError

_LOG = logging.getLogger(__name__)
_CACHES = ("past_k.", "past_v.")


@dataclass(slots=True)
class _Bound:
    """A profile that has been used.

    Attributes:
        context: of this profile alone. inputs: views on the pinned block. outputs: where each lies in the output block.
        uploaded, downloaded: bytes of the copies. scratch: version of the memory that the context has.
        turn: order of the caches whose addresses it has, None at first. ran: orders it has run in. graphs: captured, by
            the order whose addresses they hold.
    """

    profile: PlanProfile
    context: Any
    inputs: dict[str, NDArray[Any]]
    places: dict[str, int]
    outputs: Layout
    uploaded: int
    downloaded: int
    scratch: int = -1
    turn: int | None = None
    ran: set[int] = field(default_factory=set)
    graphs: dict[int, Replay] = field(default_factory=dict)


class PlanRunner:
    """One plan with its caches.

    Args:
        trt: what it runs on. engine: deserialised. record: its own, compared with it.
        wanted: outputs that are copied to the host after every call; others on request.
        graphs: capture CUDA graphs.

    Raises:
        SpecExportError: too little memory.
    """

    def __init__(
        self, trt: Tensorrt, engine: Any, record: PlanRecord, wanted: Collection[str], *, graphs: bool = True
    ) -> None:
        self._trt, self._device, self._engine, self.record = trt, trt.device, engine, record
        self._graphs = graphs
        self._tensors = {x.name: x for x in (*record.inputs, *record.outputs)}
        caches = [x for x in record.inputs if x.name.startswith(_CACHES)]
        sizes = {x.name: tensor_bytes(x, self._static(x)) for x in caches}
        self._pairs = [(x.name, x.name.replace("past_", "present_", 1)) for x in caches]
        self._cache_layout = Layout.of(sizes)
        self._caches = self._device.allocate(self._cache_layout.size, "caches")
        moving = {past: sizes[past] for past, present in self._pairs if record.aliases.get(present) != past}
        self._moving_layout = Layout.of(moving)
        self._spare = self._device.allocate(self._moving_layout.size, "second caches") if moving else None
        #: Address of each cache; present: where the plan writes it.
        self._past = {name: self._caches.address + offset for name, offset in self._cache_layout.offsets.items()}
        self._present = {present: self._past[past] for past, present in self._pairs}
        for past, offset in self._moving_layout.offsets.items():
            assert self._spare is not None
            self._present[past.replace("past_", "present_", 1)] = self._spare.address + offset
        self._moving = [pair for pair in self._pairs if pair[0] in moving]
        #: 0, or 1 while the second buffer of those that move holds the past.
        self._turn = 0
        small = [x for x in record.inputs if x.name not in self._past]
        results = [x for x in record.outputs if x.name not in self._present]
        self._small = small
        self._results = sorted(results, key=lambda x: x.name not in wanted)  # those that are copied come first
        self._wanted = [x.name for x in self._results if x.name in wanted]
        self._uploads = max(self._layout(small, profile).size for profile in record.profiles)
        self._downloads = max(self._layout(self._results, profile).size for profile in record.profiles)
        self._input = self._device.allocate(self._uploads, "inputs")
        self._output = self._device.allocate(self._downloads, "outputs")
        self._host_input = self._device.pinned(self._uploads)
        self._host_output = self._device.pinned(max(self._copied(profile) for profile in record.profiles))
        self._staging: Pinned | None = None
        self._device.scratch.need(max(_activations(engine), ALIGNMENT))
        self._bound: dict[int, _Bound] = {}
        self._last: _Bound | None = None
        self.reset()

    def inputs(self, index: int) -> dict[str, NDArray[Any]]:
        """The arrays to fill before :meth:`run` with the profile ``index``."""
        return self._bind(index).inputs

    def run(self, index: int) -> None:
        """One call with what :meth:`inputs` holds; waits.

        Raises:
            SpecExportError: the plan or the driver failed.
        """
        bound = self._last = self._bind(index)
        self._address(bound)
        turn = self._turn
        if self._graphs and turn in bound.ran and turn not in bound.graphs:
            self._capture(bound)
        if turn in bound.graphs:
            bound.graphs[turn].launch()
        else:
            self._enqueue(bound)
        self._device.wait()
        bound.ran.add(turn)
        if self._moving:
            self._turn = 1 - turn
        for past, present in self._moving:
            self._past[past], self._present[present] = self._present[present], self._past[past]

    def output(self, name: str) -> NDArray[Any]:
        """An output of the last call that is ``wanted``: a view that the next call overwrites."""
        assert self._last is not None and name in self._wanted
        tensor = self._tensors[name]
        offset = self._last.outputs.offsets[name]
        return self._host_output.array(NUMPY[tensor.dtype], self._last.profile.shape(tensor), offset)

    def fetch(self, name: str, first: int, count: int) -> NDArray[Any]:
        """Elements ``first .. first + count`` of another output of the last call, flat; a copy."""
        assert self._last is not None
        dtype = NUMPY[self._tensors[name].dtype]
        size, start = count * dtype.itemsize, self._last.outputs.offsets[name] + first * dtype.itemsize
        if self._staging is None or self._staging.size < size:
            self._staging = self._device.pinned(size)
        self._device.download(self._staging.address, self._output.address + start, size)
        self._device.wait()
        return self._staging.array(dtype, (count,)).copy()

    def reset(self) -> None:
        """Zero the caches."""
        for buffer in (self._caches, self._spare):
            if buffer is not None:
                self._device.zero(buffer.address, buffer.size)
        self._device.wait()

    def read_caches(self) -> list[NDArray[Any]]:
        """Copies of the caches, [1, Hkv, S, D], in graph order."""
        found = []
        for past, _ in self._pairs:
            shape, dtype = self._static(self._tensors[past]), NUMPY[self._tensors[past].dtype]
            raw = self._device.read(self._past[past], tensor_bytes(self._tensors[past], shape))
            found.append(raw.view(dtype).reshape(shape))
        return found

    def _static(self, tensor: TensorInfo) -> tuple[int, ...]:
        return self.record.profiles[0].shape(tensor)

    def _layout(self, tensors: Collection[TensorInfo], profile: PlanProfile) -> Layout:
        return Layout.of({x.name: tensor_bytes(x, profile.shape(x)) for x in tensors})

    def _copied(self, profile: PlanProfile) -> int:
        return self._layout([x for x in self._results if x.name in self._wanted], profile).size

    def _bind(self, index: int) -> _Bound:
        """The context of a profile, made on first use."""
        if index in self._bound:
            return self._bound[index]
        profile = self.record.profiles[index]
        strategy = self._trt.module.ExecutionContextAllocationStrategy.USER_MANAGED
        context = self._engine.create_execution_context(strategy)
        if context is None:
            raise SpecExportError(f"{self.record.plan} has no context for profile {index}: {self._trt.log.last}")
        if not context.set_optimization_profile_async(index, self._device.stream):
            raise BundleError(f"{self.record.plan} refuses profile {index}: {self._trt.log.last}; compile it again")
        self._device.wait()
        for tensor in self.record.inputs:
            if not context.set_input_shape(tensor.name, profile.shape(tensor)):
                raise BundleError(f"{self.record.plan} refuses the shape of {tensor.name}: {self._trt.log.last}")
        for tensor in self.record.outputs:
            if (shape := tuple(context.get_tensor_shape(tensor.name))) != profile.shape(tensor):
                raise BundleError(
                    f"{self.record.plan}: {tensor.name} is {list(shape)} in profile {index}, its record says "
                    f"{list(profile.shape(tensor))}: compile it again"
                )
        layout, outputs = self._layout(self._small, profile), self._layout(self._results, profile)
        views = {
            x.name: self._host_input.array(NUMPY[x.dtype], profile.shape(x), layout.offsets[x.name])
            for x in self._small
        }
        places = {name: self._input.address + offset for name, offset in layout.offsets.items()}
        places |= {name: self._output.address + offset for name, offset in outputs.offsets.items()}
        bound = _Bound(profile, context, views, places, outputs, layout.size, self._copied(profile))
        self._bound[index] = bound
        return bound

    def _address(self, bound: _Bound) -> None:
        """Give a context the addresses of now; graphs that hold others stay valid for when those come back."""
        scratch = self._device.scratch
        if bound.scratch != scratch.version:
            if hasattr(bound.context, "set_device_memory"):
                bound.context.set_device_memory(scratch.address, scratch.size)
            else:
                bound.context.device_memory = scratch.address
            bound.scratch = scratch.version
            bound.ran.clear()
            bound.graphs.clear()  # captured with memory that is freed
        if bound.turn == self._turn:
            return
        for name, address in (bound.places | self._past | self._present).items():
            if not bound.context.set_tensor_address(name, address):
                raise SpecExportError(f"{self.record.plan} refuses the address of {name}: {self._trt.log.last}")
        bound.turn = self._turn

    def _enqueue(self, bound: _Bound) -> None:
        self._device.upload(self._input.address, self._host_input.address, bound.uploaded)
        if not bound.context.execute_async_v3(self._device.stream):
            raise SpecExportError(f"{self._trt.name} {self._trt.version} failed in a call: {self._trt.log.last}")
        self._device.download(self._host_output.address, self._output.address, bound.downloaded)

    def _capture(self, bound: _Bound) -> None:
        """A graph of a call that has run before: the first one may allocate, which no graph can hold.

        TensorRT-RTX may be compiling better kernels still, and says so; the next call tries again.
        """
        capturable = getattr(bound.context, "is_stream_capturable", None)
        if capturable is not None and not capturable(self._device.stream):
            return
        try:
            bound.graphs[self._turn] = self._device.capture(lambda: self._enqueue(bound))
        except SpecExportError as error:
            _LOG.warning("%s: no CUDA graphs, calls are enqueued one by one: %s", self.record.plan, error)
            self._graphs = False


def _activations(engine: Any) -> int:
    """Bytes of working memory that any profile needs."""
    return int(engine.device_memory_size_v2 if hasattr(engine, "device_memory_size_v2") else engine.device_memory_size)


def floats(array: NDArray[Any], dtype: str) -> NDArray[Any]:
    """An array of a record's element type in one that numpy computes with: raw bf16 bits become float32."""
    if dtype != "bf16":
        return array
    return (array.astype(np.uint32) << 16).view(np.float32)
