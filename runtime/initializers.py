"""Shapes of the weights of a graph, from its headers: no weight is read, no ONNX library is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from specexport.runtime.onnx_scan import scan_initializers

#: Bits of an element and our name, by the number of ONNX's TensorProto.DataType (onnx.proto3).
_DTYPES = {
    1: (32, "fp32"),
    2: (8, "int8"),
    3: (8, "int8"),
    6: (32, None),
    7: (64, None),
    9: (8, None),
    10: (16, "fp16"),
    16: (16, "bf16"),
    17: (8, "fp8"),
    21: (4, "int4"),
    22: (4, "int4"),
    23: (4, "nvfp4"),
}
DTYPE_NAMES = {number: name for number, (_, name) in _DTYPES.items() if name is not None}


@dataclass(frozen=True, slots=True)
class Initializer:
    """A tensor stored in a graph: ``location`` is the file beside the graph that holds it, None for the graph."""

    name: str
    dtype: int
    shape: tuple[int, ...]
    location: str | None

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return -(-self.elements * _DTYPES.get(self.dtype, (32, None))[0] // 8)


def initializers(path: Path) -> list[Initializer]:
    """The initialisers of a graph's top level.

    Raises:
        BundleError: not an ONNX file.
    """
    return [Initializer(*found) for found in scan_initializers(path)]


def matrices(tensors: Sequence[Initializer], least: int = 4096) -> list[Initializer]:
    """Those of more than ``least`` elements, without rotary tables, scales and zero points."""
    words = ("scale", "zero")
    return [
        tensor
        for tensor in tensors
        if len(tensor.shape) > 1
        and tensor.elements > least
        and not tensor.name.startswith("rope_")
        and not any(word in tensor.name.rpartition(".")[2] for word in words)
    ]


def is_lm_head(tensor: Initializer) -> bool:
    """Whether it is the output projection, or its codes."""
    return tensor.name.partition(".")[0] == "lm_head"


def draft_matrices(tensors: Sequence[Initializer]) -> list[Initializer]:
    """The matrices that a drafter's graph reads whole: of an embedding beside an lm_head it reads a few rows."""
    found = matrices(tensors)
    if not any(map(is_lm_head, found)):
        return found
    return [tensor for tensor in found if tensor.name.partition(".")[0] != "embedding"]
