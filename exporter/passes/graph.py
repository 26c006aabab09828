"""What several passes need of a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

#: Domain of ONNX Runtime's own operators.
MICROSOFT = "com.microsoft"


def constant(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    """A new initializer."""
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, const_value=tensor, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype))
    graph.initializers[name] = value
    return value


def is_arange(value: ir.Value | None, slots: int) -> bool:
    """Whether a value is the constant 0 .. slots - 1 (the columns of a mask over a cache)."""
    if value is None or value.const_value is None or value.const_value.dtype != ir.DataType.INT64:
        return False
    return value.const_value.shape == (slots,) and bool(np.array_equal(value.const_value.numpy(), np.arange(slots)))
