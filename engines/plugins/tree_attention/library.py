"""The compiled kernels from Python: ``tree_attention.h`` through ctypes, over addresses of any kind of memory."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import ClassVar

from specexport.runtime.errors import SpecExportError

#: ``element`` and ``cache`` of a call, by name.
ELEMENTS = {"fp16": 0, "bf16": 1}
CACHES = {"element": 0, "int8": 1, "e4m3": 2}


class Call(ctypes.Structure):
    """``SpecexportTreeAttention``; the header has the shapes. Addresses are of device memory (or of the emulator's)."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int32) for name in ("nodes", "heads", "kv_heads", "head_dim", "slots", "committed")),
        *((name, ctypes.c_int32) for name in ("window", "element", "cache")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("query", "key", "value", "cache_k", "cache_v", "scale_k", "scale_v")),
        *((name, ctypes.c_void_p) for name in ("tree", "positions", "past", "write", "commit", "order")),
        *((name, ctypes.c_void_p) for name in ("output", "workspace")),
        ("workspace_bytes", ctypes.c_size_t),
    ]


#: ``launch.cu``'s, with a tile's cache rows and a block's query rows by head width.
_MOST_SPLITS, _MOST_BLOCKS = 128, 512


def workspace_bytes(nodes: int, heads: int, kv_heads: int, head_dim: int, slots: int) -> int:
    """``tree_attention_workspace`` of a call on caches of elements, for builders without a library of the kernels."""
    columns, most_rows = (64, 64) if head_dim <= 128 else (32, 32)
    rows = heads // kv_heads * nodes
    block_rows = 16 if rows <= 16 else 32 if rows <= 32 else most_rows
    blocks = -(-rows // block_rows) * kv_heads
    splits = min(max(_MOST_BLOCKS // blocks, 1), min(-(-slots // columns), _MOST_SPLITS))
    return 0 if splits == 1 else kv_heads * rows * splits * (head_dim + 2) * 4


class Library:
    """A shared library of the kernels.

    Raises:
        SpecExportError: ``path`` cannot be loaded, or was built from another version of the header.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
            call_size = self._library.tree_attention_call_size
        except (OSError, AttributeError) as error:
            raise SpecExportError(f"{path} is no library of the TreeAttention kernels: {error}") from error
        call_size.restype = ctypes.c_size_t
        if call_size() != ctypes.sizeof(Call):
            raise SpecExportError(
                f"{path} was built from another version: a call has {call_size()} bytes, expected {ctypes.sizeof(Call)}"
            )
        self._library.tree_attention_error.restype = ctypes.c_char_p
        self._library.tree_attention_enqueue.argtypes = [ctypes.POINTER(Call), ctypes.c_void_p]
        self._library.tree_attention_workspace.argtypes = [ctypes.POINTER(Call), ctypes.POINTER(ctypes.c_size_t)]

    def workspace(self, call: Call) -> int:
        """Bytes of workspace that a call of these sizes needs on any device."""
        size = ctypes.c_size_t()
        self._check(self._library.tree_attention_workspace(ctypes.byref(call), ctypes.byref(size)))
        return size.value

    def enqueue(self, call: Call, stream: int = 0) -> None:
        """Enqueue the call on a CUDA stream (the emulator runs it at once).

        Raises:
            SpecExportError: the call is refused, or CUDA failed; the message is the library's.
        """
        self._check(self._library.tree_attention_enqueue(ctypes.byref(call), stream))

    def emulate(self, processors: int, shared_bytes: int, reverse: bool) -> None:
        """Emulator builds: the device that launches are planned for, and whether threads run in the opposite order."""
        self._library.tree_attention_emulate(processors, shared_bytes, int(reverse))

    def emulated_reads(self) -> int:
        """Emulator builds: bytes of the caches that attention has read since this was last called."""
        reads = self._library.tree_attention_emulated_reads
        reads.restype = ctypes.c_size_t
        return int(reads())

    def _check(self, code: int) -> None:
        if code:
            reason = self._library.tree_attention_error(code).decode()
            raise SpecExportError(f"TreeAttention: {reason} (code {code})")
