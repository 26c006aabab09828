"""Quantised matrices in a graph: ``DequantizeLinear`` in front of the products, looked-up rows dequantised alone.

=========== ====================================================================================================
use         becomes
=========== ====================================================================================================
``MatMul``  codes [in, out], scales [blocks, out]; DequantizeLinear on axis 0 with its block size
``Gemm``    (transB) codes [out, in], scales [out, blocks]; DequantizeLinear on axis 1
``Gather``  8-bit codes of the rows, cast and multiplied: TensorRT wants constant scales in DequantizeLinear, and the
            table would be dequantised whole; 4-bit and float8 codes, which Gather does not take, go through it
=========== ====================================================================================================

One scale a row is DequantizeLinear per axis, without blocks. The initializers of a matrix ``m`` are ``m.codes``,
``m.scales``, ``m.zeros`` and ``m.order``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from torch import Tensor

from specexport.exporter.quantize.record import Quantized
from specexport.runtime.errors import SpecExportError

#: Stores the bytes of a tensor of this name, element type and shape, and returns the reference to it.
Put = Callable[[str, NDArray[np.uint8], ir.DataType, tuple[int, ...]], ir.TensorProtocol]

CODES, SCALES, ZEROS, ORDER, OUTER = "codes", "scales", "zeros", "order", "outer"
#: Suffix of a matrix that is stored in another float type than the graph's.
STORED = ".stored"
#: E2M1 by bit pattern, without the sign.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_FLOATS = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of a quantised matrix by role, laid out for its use, and the inputs that share a scale."""

    tensors: Mapping[str, ir.TensorProtocol]
    block: int


def sizes(value: ir.TensorProtocol | ir.Value) -> tuple[int, ...]:
    """The shape of what has a static one."""
    assert value.shape is not None
    return tuple(int(size) for size in value.shape.numpy())


def stored_parts(graph: ir.Graph, name: str) -> ir.TensorProtocol | Parts | None:
    """A table of a saved graph as it is stored there; None if it has none of this name."""

    def tensor(suffix: str) -> ir.TensorProtocol | None:
        value = graph.initializers.get(name + suffix)
        return None if value is None else value.const_value

    roles = {role: tensor(f".{role}") for role in (CODES, SCALES, ZEROS, ORDER, OUTER)}
    tensors = {role: found for role, found in roles.items() if found is not None}
    if CODES not in tensors:
        whole = tensor("")
        return whole if whole is not None else tensor(STORED)
    width, scales = sizes(tensors[CODES])[1], sizes(tensors[SCALES])
    blocks = scales[1] if len(scales) == 2 else 1
    if width % blocks:
        raise SpecExportError(f"{name} has {blocks} scales for rows of {width}: a drafter cannot share it")
    return Parts(tensors, width // blocks)


def rows_of(stored: ir.TensorProtocol | Parts, ids: NDArray[np.int64]) -> ir.TensorProtocol | Parts:
    """Some rows of a table [V, H], in memory, in the format of the whole."""
    if isinstance(stored, Parts):
        count = sizes(stored.tensors[CODES])[0]
        picked = {
            role: _rows(tensor, ids) if sizes(tensor)[:1] == (count,) and role != ORDER else tensor
            for role, tensor in stored.tensors.items()
        }
        return Parts(picked, stored.block)
    return _rows(stored, ids)


def _rows(tensor: ir.TensorProtocol, ids: NDArray[np.int64]) -> ir.TensorProtocol:
    return ir.Tensor(tensor.numpy()[ids], dtype=tensor.dtype, name=tensor.name)


def is_operand(value: ir.Value) -> bool:
    """Whether a matrix is laid out [in, out] (``MatMul``) rather than [out, in].

    Raises:
        SpecExportError: it is used in a way that codes have no place in.
    """
    kinds = {(node.op_type, index) for node, index in value.uses()}
    if kinds == {("MatMul", 1)}:
        return True
    if kinds and kinds <= {("Gemm", 1), ("Gather", 0)}:
        return False
    raise SpecExportError(f"{value.name} is used as {sorted(kinds)}: it cannot be stored quantised")


def store(name: str, matrix: Quantized, operand: bool, dtype: ir.DataType, put: Put) -> Parts:
    """Lay a matrix out for a graph of activations ``dtype`` and write it."""
    four = matrix.bits == 4
    blocks = matrix.scales.shape[1]

    def layout(tensor: Tensor) -> Tensor:
        return (tensor.t() if operand else tensor).contiguous()

    def codes(tensor: Tensor, role: str) -> ir.TensorProtocol:
        kind, data = _encode(tensor, four)
        shape = tuple(tensor.shape) if len(tensor.shape) == 1 or blocks > 1 or role == CODES else (tensor.numel(),)
        return put(f"{name}.{role}", data, kind, shape)

    def floats(tensor: Tensor, role: str, kind: ir.DataType, shape: tuple[int, ...]) -> ir.TensorProtocol:
        stored = tensor.to(_FLOATS.get(kind, tensor.dtype)).contiguous()
        data: NDArray[np.uint8] = stored.reshape(-1).view(torch.uint8).numpy()
        return put(f"{name}.{role}", data, kind, shape)

    tensors = {CODES: codes(layout(matrix.codes), CODES)}
    scales = layout(matrix.scales)
    shape = tuple(scales.shape) if blocks > 1 else (scales.numel(),)
    if matrix.scales.dtype == torch.float8_e4m3fn:
        tensors[SCALES] = floats(scales, SCALES, ir.DataType.FLOAT8E4M3FN, shape)
        tensors[OUTER] = floats(torch.tensor(matrix.outer), OUTER, dtype, ())
    else:
        tensors[SCALES] = floats(scales, SCALES, dtype, shape)
    if matrix.zeros is not None:
        tensors[ZEROS] = codes(layout(matrix.zeros), ZEROS)
    if matrix.order is not None:
        order = np.ascontiguousarray(matrix.order.numpy(), np.int64)
        tensors[ORDER] = put(f"{name}.{ORDER}", order.view(np.uint8), ir.DataType.INT64, (len(order),))
    return Parts(tensors, matrix.block)


def _encode(codes: Tensor, four: bool) -> tuple[ir.DataType, NDArray[np.uint8]]:
    """Element type and bytes of codes, two to a byte where they have 4 bits (the first in the low half)."""
    if not four:
        kinds = {
            torch.int8: ir.DataType.INT8,
            torch.uint8: ir.DataType.UINT8,
            torch.float8_e4m3fn: ir.DataType.FLOAT8E4M3FN,
        }
        return kinds[codes.dtype], codes.reshape(-1).view(torch.uint8).numpy()
    if codes.dtype == torch.float8_e4m3fn:
        values = codes.float()
        patterns = torch.bucketize(values.abs(), _E2M1).to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)
        return ir.DataType.FLOAT4E2M1, pack(patterns.reshape(-1).numpy())
    kind = ir.DataType.INT4 if codes.dtype == torch.int8 else ir.DataType.UINT4
    return kind, pack(codes.reshape(-1).view(torch.uint8).numpy())


def pack(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """4-bit codes, one a byte (high halves are ignored), as two a byte along the last axis, the first low."""
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], 1), np.uint8)], axis=-1)
    packed: NDArray[np.uint8] = np.bitwise_or(codes[..., 0::2] & np.uint8(15), codes[..., 1::2] << np.uint8(4))
    return packed


def insert(graph: ir.Graph, value: ir.Value, parts: Parts, dtype: ir.DataType) -> None:
    """Put a stored matrix in the place of the initializer ``value``, whose shape is the matrix's as it is used."""
    name = value.name
    assert name is not None
    operand = is_operand(value)
    values = {role: _initializer(graph, f"{name}.{role}", tensor) for role, tensor in parts.tensors.items()}
    del graph.initializers[name]
    eight = values[CODES].dtype in (ir.DataType.INT8, ir.DataType.UINT8)
    width = sizes(value)[0 if operand else 1]
    lookups = [node for node, _ in value.uses() if node.op_type == "Gather"]
    if eight and width % parts.block == 0:
        for node in lookups:
            _look_up(graph, node, values, parts.block, width, dtype)
    users = list(value.uses())
    if not users:
        return
    scales = values[SCALES]
    before = next(node for node in graph if node in {user for user, _ in users})
    if OUTER in values:
        outer = ir.node("DequantizeLinear", [scales, values[OUTER]])
        graph.insert_before(before, outer)
        scales = outer.outputs[0]
        scales.name = f"{name}.scales.value"
    inputs = [values[CODES], scales, *([values[ZEROS]] if ZEROS in values else [])]
    blocked = len(parts.tensors[SCALES].shape) == 2
    axis = (0 if operand else 1) if blocked else (1 if operand else 0)
    attributes = {"axis": axis, **({"block_size": parts.block} if blocked else {})}
    node = ir.node("DequantizeLinear", inputs, attributes, name=f"{name}.dequantize")
    node.outputs[0].name, node.outputs[0].shape, node.outputs[0].type = name, value.shape, ir.TensorType(dtype)
    value.name = None
    graph.insert_before(before, node)
    if ORDER in values:
        _permute(graph, users, values[ORDER])
    for user, index in users:
        user.replace_input_with(index, node.outputs[0])


def insert_cast(graph: ir.Graph, value: ir.Value, tensor: ir.TensorProtocol) -> None:
    """Feed a matrix that is stored in another float type through a cast to its own."""
    assert value.dtype is not None and value.name is not None
    users = list(value.uses())
    stored = _initializer(graph, f"{value.name}{STORED}", tensor)
    del graph.initializers[value.name]
    cast = ir.node("Cast", [stored], {"to": value.dtype})
    cast.outputs[0].name, cast.outputs[0].shape, cast.outputs[0].type = value.name, value.shape, value.type
    value.name = None
    for user, index in users:
        user.replace_input_with(index, cast.outputs[0])
    graph.insert_before(next(node for node in graph if node in {user for user, _ in users}), cast)


def _initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    value = ir.Value(name=name, const_value=tensor, shape=ir.Shape(sizes(tensor)), type=ir.TensorType(tensor.dtype))
    graph.initializers[name] = value
    return value


def _look_up(
    graph: ir.Graph, node: ir.Node, values: Mapping[str, ir.Value], block: int, width: int, dtype: ir.DataType
) -> None:
    """Dequantise looked-up rows of tokens [1, T]: one Gather each of codes, scales and zeros."""
    nodes: list[ir.Node] = []
    tokens = node.inputs[1]
    blocks = width // block

    def emit(op_type: str, inputs: list[ir.Value | None], **attributes: int | ir.DataType) -> ir.Value:
        nodes.append(ir.node(op_type, inputs, attributes))
        return nodes[-1].outputs[0]

    def gather(role: str) -> ir.Value:
        rows = emit("Gather", [values[role], tokens], axis=0)
        if role != CODES:
            return emit("Unsqueeze", [rows, _small(graph, [-1])])
        return rows if blocks == 1 else emit("Reshape", [rows, _small(graph, [0, 0, blocks, block])])

    rows = emit("Cast", [gather(CODES)], to=dtype)
    if ZEROS in values:
        rows = emit("Sub", [rows, emit("Cast", [gather(ZEROS)], to=dtype)])
    rows = emit("Mul", [rows, gather(SCALES)])
    if blocks > 1:
        rows = emit("Reshape", [rows, _small(graph, [0, 0, width])])
    old = node.outputs[0]
    rows.name, rows.shape, rows.type = old.name, old.shape, old.type
    old.name = None
    graph.insert_before(node, nodes)
    old.replace_all_uses_with(rows, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _small(graph: ir.Graph, numbers: list[int]) -> ir.Value:
    name = f"shape_{numbers}".replace(" ", "")
    if name in graph.initializers:
        return graph.initializers[name]
    return _initializer(graph, name, ir.tensor(np.array(numbers, np.int64), name=name))


def _permute(graph: ir.Graph, users: Sequence[tuple[ir.Node, int]], order: ir.Value) -> None:
    """Bring the products' left operands into the order of the codes; products of one operand and order share it."""
    wanted = _array(order)
    for user, _ in users:
        source = user.inputs[0]
        assert source is not None
        for other, index in source.uses():
            known = other.inputs[1] if other.op_type == "Gather" and index == 0 else None
            if known is not None and known.const_value is not None and np.array_equal(_array(known), wanted):
                user.replace_input_with(0, other.outputs[0])
                break
        else:
            gather = ir.node("Gather", [source, order], {"axis": -1})
            gather.outputs[0].shape, gather.outputs[0].type = source.shape, source.type
            producer = source.producer()
            if producer is None:
                graph.insert_before(user, gather)
            else:
                graph.insert_after(producer, gather)
            user.replace_input_with(0, gather.outputs[0])


def _array(value: ir.Value) -> NDArray[Any]:
    assert value.const_value is not None
    found: NDArray[Any] = value.const_value.numpy()
    return found
