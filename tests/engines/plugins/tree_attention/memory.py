"""Tensors of a call in the memory of a processor or of a CUDA device, between guard bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from specexport.engines.plugins.tree_attention.library import CACHES, ELEMENTS, Call, Library
from tests.engines.plugins.tree_attention.cases import Case, Values

GUARD = 256
_MARK = 0xA5


class HostMemory:
    """Buffers of the emulator: aligned, guarded on both sides."""

    def __init__(self) -> None:
        self._buffers: list[tuple[NDArray[np.uint8], NDArray[Any], int]] = []

    def put(self, array: NDArray[Any]) -> int:
        """Copy an array (or space for one) into guarded memory; returns its address."""
        data = np.ascontiguousarray(array)
        raw = np.full(data.nbytes + 2 * GUARD + 64, _MARK, np.uint8)
        start = GUARD + -(raw.ctypes.data + GUARD) % 64
        raw[start : start + data.nbytes] = data.reshape(-1).view(np.uint8)
        self._buffers.append((raw, data, start))
        return self._address(len(self._buffers) - 1)

    def _address(self, index: int) -> int:
        raw, _, start = self._buffers[index]
        return int(raw.ctypes.data) + start

    def _raw(self, index: int) -> NDArray[np.uint8]:
        return self._buffers[index][0]

    def get(self, address: int) -> NDArray[Any]:
        """The array at an address that :meth:`put` gave."""
        index = next(i for i in range(len(self._buffers)) if self._address(i) == address)
        _, data, start = self._buffers[index]
        return self._raw(index)[start : start + data.nbytes].view(data.dtype).reshape(data.shape)

    def check_guards(self) -> None:
        for index, (_, data, start) in enumerate(self._buffers):
            raw = self._raw(index)
            assert (raw[:start] == _MARK).all() and (raw[start + data.nbytes :] == _MARK).all()

    def finish(self) -> None:
        """Wait until calls are done."""


class CudaMemory(HostMemory):
    """The same on the current CUDA device, by torch's allocator."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: list[Any] = []

    def put(self, array: NDArray[Any]) -> int:
        import torch

        super().put(array)
        self._tensors.append(torch.from_numpy(self._buffers[-1][0]).cuda())
        start = GUARD  # the allocator aligns to more than 64 bytes
        raw, data, old = self._buffers[-1]
        self._tensors[-1][:] = _MARK
        self._tensors[-1][start : start + data.nbytes] = torch.from_numpy(raw[old : old + data.nbytes]).cuda()
        self._buffers[-1] = (raw, data, start)
        return self._address(len(self._buffers) - 1)

    def _address(self, index: int) -> int:
        return int(self._tensors[index].data_ptr()) + self._buffers[index][2]

    def _raw(self, index: int) -> NDArray[np.uint8]:
        raw: NDArray[np.uint8] = self._tensors[index].cpu().numpy()
        return raw

    def finish(self) -> None:
        import torch

        torch.cuda.synchronize()


def prepare(library: Library, memory: HostMemory, case: Case, values: Values, **changes: int) -> Call:
    """Put all tensors into memory and fill a call; ``changes`` overwrite its fields."""
    codes = case.cache != "element"
    call = Call(
        nodes=case.nodes,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        slots=case.slots,
        committed=len(values.commit),
        window=case.window,
        element=ELEMENTS[case.element],
        cache=CACHES[case.cache],
        scale=case.scale,
        query=memory.put(values.query),
        key=memory.put(values.key),
        value=memory.put(values.value),
        cache_k=memory.put(values.caches[0]),
        cache_v=memory.put(values.caches[1]),
        scale_k=memory.put(values.scales[0]) if codes else None,
        scale_v=memory.put(values.scales[1]) if codes else None,
        tree=memory.put(values.words()),
        positions=memory.put(values.positions),
        past=memory.put(np.array([values.past], np.int32)),
        write=memory.put(np.array([values.write], np.int32)),
        commit=memory.put(values.commit),
        order=memory.put(values.order),
        output=memory.put(np.full(values.query.shape, np.nan, values.query.dtype)),
    )
    call.workspace_bytes = library.workspace(call)
    call.workspace = memory.put(np.full(max(call.workspace_bytes, 4) // 4, np.nan, np.float32))
    for name, value in changes.items():
        setattr(call, name, value)
    return call
