"""What several passes need of a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from specexport.runtime.errors import SpecExportError

#: Domain of ONNX Runtime's own operators.
MICROSOFT = "com.microsoft"


def constant(graph: ir.Graph, name: str, array: NDArray[Any]) -> ir.Value:
    """A new initializer."""
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, const_value=tensor, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype))
    graph.initializers[name] = value
    return value


def initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    """A new initializer of a tensor that is stored already."""
    shape = ir.Shape(tensor.shape.numpy())
    value = ir.Value(name=name, const_value=tensor, shape=shape, type=ir.TensorType(tensor.dtype))
    graph.initializers[name] = value
    return value


class Emitter:
    """Collects nodes that are put into the graph together, and the small constants that they need.

    Attributes:
        nodes: so far, in order.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self.nodes: list[ir.Node] = []

    def __call__(self, op_type: str, inputs: Sequence[ir.Value | None], **attributes: int | ir.DataType) -> ir.Value:
        """A node's only output."""
        self.nodes.append(ir.node(op_type, inputs, attributes))
        return self.nodes[-1].outputs[0]

    def constant(self, array: NDArray[Any]) -> ir.Value:
        """An initializer of this value, one for all that ask for it."""
        name = f"const_{array.tolist()}"
        found = self._graph.initializers.get(name)
        return constant(self._graph, name, array) if found is None else found


def is_arange(value: ir.Value | None, slots: int) -> bool:
    """Whether a value is the constant 0 .. slots - 1 (the columns of a mask over a cache)."""
    if value is None or value.const_value is None or value.const_value.dtype != ir.DataType.INT64:
        return False
    return value.const_value.shape == (slots,) and bool(np.array_equal(value.const_value.numpy(), np.arange(slots)))


def producer(value: ir.Value | None, op_type: str, layer: str | None) -> ir.Node:
    """The node behind a value of an attention layer.

    Raises:
        SpecExportError: it is of another type than ``op_type``, or the value is an input.
    """
    node = value.producer() if value is not None else None
    if node is None or node.op_type != op_type:
        found = node.op_type if node is not None else "an input"
        raise SpecExportError(f"attention {layer!r}: expected {op_type}, found {found}")
    return node


def new_rows(scatter: ir.Node, layer: str | None) -> ir.Value:
    """The rows a layer adds to a cache, [1, Hkv, T, D], behind the commit recipe."""
    picked = producer(scatter.inputs[1], "Gather", layer)
    joined = producer(picked.inputs[0], "Concat", layer)
    new = joined.inputs[1]
    assert new is not None
    return new


def check_attention(node: ir.Node) -> None:
    """Refuse an ``Attention`` node that is more than query, key, value, mask and scale.

    Raises:
        SpecExportError: the message says what is missing or too much.
    """
    name = node.outputs[0].name
    if len(node.inputs) != 4 or any(value is None for value in node.inputs) or "scale" not in node.attributes:
        raise SpecExportError(f"attention {name!r}: expected query, key, value, mask and a scale")
    # Fused operators have no place for the others (softcap, is_causal, ...): 0 is their default.
    if odd := [attribute for attribute in node.attributes.values() if attribute.name != "scale" and attribute.value]:
        raise SpecExportError(f"attention {name!r}: {odd[0].name} is {odd[0].value}, expected none")


def replace_cache(graph: ir.Graph, scatter: ir.Node, present: ir.Value, layer: str | None) -> None:
    """Make ``present`` the graph's output in place of a cache update's.

    Raises:
        SpecExportError: the update does not lead from an input to an output of the graph.
    """
    old = scatter.outputs[0]
    if old not in graph.outputs or scatter.inputs[0] not in graph.inputs:
        raise SpecExportError(f"attention {layer!r}: its cache {old.name!r} is not from an input to an output")
    present.name, present.shape, present.type = old.name, old.shape, old.type
    index = next(i for i, value in enumerate(graph.outputs) if value is old)
    graph.outputs[index] = present
    old.name = None
