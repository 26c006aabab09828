"""Lowering for ONNX Runtime's CPU provider: products with dequantised matrices as ``com.microsoft::MatMulNBits``.

Requires: matrices as ``exporter.quantize.insert`` puts them, with integer codes. Ensures: the same products up to the
rounding of the activations, which the kernel quantises to 8 bits in blocks (accuracy level 4) unless told otherwise;
4-bit tables become ``GatherBlockQuantized``. Codes are laid out anew, [out, blocks, block], in a data file of the
lowered graph.

Why not leave it to ONNX Runtime, which does the same to a MatMul while loading: it leaves the Gemm of an lm_head alone
and lays the codes out at every start.

Rows do not depend on how many there are, as long as their number is even: the last of an odd number goes through
another kernel, and above :data:`LONE_ROW_BLOCKS` adds up in another order
(``tests/exporter/quantize/test_insert.py``, seen on x86-64 with AVX-512).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import common as passes

from specexport.exporter.passes.graph import MICROSOFT
from specexport.exporter.quantize.insert import Put, pack, sizes
from specexport.exporter.quantize.plan import MIN_BLOCK
from specexport.runtime.errors import SpecExportError

#: Blocks of a row that has one scale, and the largest of stored ones. The activations are rounded in the same blocks:
#: those of 128 gain 2% of a step and cost as much perplexity as all rounding else (int8 SmolLM2: 21.38, not 21.30).
ROW_BLOCK, MAX_BLOCK = 64, 128
#: Largest blocks, by bits, in which a lone row adds up as two rows do.
LONE_ROW_BLOCKS = {4: 32, 8: 64}
#: Activations as 8-bit integers; 0 keeps them in float32.
FAST, PRECISE = 4, 0


@dataclass(slots=True)
class Packed:
    """Matrices that were laid out already, by the place of their codes: drafters share their target's tables."""

    put: Put
    matrices: dict[object, dict[str, ir.TensorProtocol]] = field(default_factory=dict)


def lower(model: ir.Model, packed: Packed, accuracy_level: int = FAST) -> ir.Model:
    """Lower ``model`` in place and return it.

    Args:
        packed: where codes go, and those already there.

    Raises:
        SpecExportError: a matrix has codes that the operator does not take; the message names it.
    """
    graph = model.graph
    changed = False
    for node in [node for node in graph if node.op_type == "DequantizeLinear"]:
        matrix = _read(node)
        for user, index in list(node.outputs[0].uses()):
            if (user.op_type, index) in (("MatMul", 1), ("Gemm", 1)):
                _product(graph, user, matrix, packed, accuracy_level)
                changed = True
            elif (user.op_type, index) == ("Gather", 0):
                _look_up(graph, user, matrix, packed)
                changed = True
    if changed:
        model.opset_imports[MICROSOFT] = 1
        passes.RemoveUnusedNodesPass()(model)
    return model


def any_rows(model: ir.Model, accuracy_level: int = FAST) -> bool:
    """Whether, once lowered, no product of ``model`` depends on how many rows it has, even or odd."""
    products = [node for node in model.graph if node.op_type in ("MatMul", "Gemm")]
    made = [node.inputs[1].producer() if node.inputs[1] is not None else None for node in products]
    if accuracy_level != FAST or any(node is None or node.op_type != "DequantizeLinear" for node in made):
        return False  # in floating point a lone row is summed in an order of its own
    matrices = [_read(node) for node in made if node is not None]
    return all(matrix.block <= LONE_ROW_BLOCKS[matrix.bits] for matrix in matrices)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A dequantised matrix in the graph: [out, in] codes with blocks of a size that the operators take."""

    name: str
    codes: ir.TensorProtocol
    scales: ir.TensorProtocol
    zeros: ir.TensorProtocol | None
    operand: bool
    stored_block: int
    block: int
    bits: int
    rows: int
    width: int


_INTEGERS = {ir.DataType.INT4: 4, ir.DataType.UINT4: 4, ir.DataType.INT8: 8, ir.DataType.UINT8: 8}


def _read(node: ir.Node) -> _Matrix:
    name = str(node.outputs[0].name)
    tensors = [value.const_value for value in node.inputs if value is not None]
    if any(tensor is None for tensor in tensors) or tensors[0].dtype not in _INTEGERS:  # type: ignore[union-attr]
        raise SpecExportError(f"{name}: onnxruntime's CPU provider multiplies with int4 and int8 codes only")
    codes, scales = tensors[0], tensors[1]
    assert codes is not None and scales is not None
    axis, blocked = node.attributes["axis"].as_int(), "block_size" in node.attributes
    operand = axis == (0 if blocked else 1)
    first, second = sizes(codes)
    rows, width = (second, first) if operand else (first, second)
    stored = node.attributes["block_size"].as_int() if blocked else width
    return _Matrix(
        name,
        codes,
        scales,
        tensors[2] if len(tensors) > 2 else None,
        operand,
        stored,
        _block(name, stored, width),
        _INTEGERS[codes.dtype],
        rows,
        width,
    )


def _block(name: str, stored: int, width: int) -> int:
    """The operator's block, a power of two that divides the stored one, or any for a row of one scale.

    One that divides the row is preferred: what looks rows up takes whole blocks only.
    """
    block = ROW_BLOCK if stored >= width else min(MAX_BLOCK, stored & -stored)
    if block < MIN_BLOCK:
        raise SpecExportError(f"{name}: blocks of {stored} have no factor of {MIN_BLOCK}, which the CPU provider needs")
    smaller = (block >> shift for shift in range(block.bit_length()) if block >> shift >= MIN_BLOCK)
    return next((each for each in smaller if width % each == 0), block)


def _pack(matrix: _Matrix, packed: Packed) -> dict[str, ir.TensorProtocol]:
    """Codes [out, blocks, bytes], scales [out * blocks] and zeros, laid out as the operator wants them."""
    tensor = matrix.codes
    key = (str(tensor.location), tensor.offset, matrix.block) if isinstance(tensor, ir.ExternalTensor) else None
    if key in packed.matrices:
        return packed.matrices[key]
    bits, block = matrix.bits, matrix.block
    signed = tensor.dtype in (ir.DataType.INT4, ir.DataType.INT8)
    middle = 1 << (bits - 1)

    def unsigned(tensor: ir.TensorProtocol) -> NDArray[np.uint8]:
        array = _rows(tensor, matrix.operand)
        found: NDArray[np.uint8] = array.view(np.uint8)
        return (found + np.uint8(middle)) & np.uint8((1 << bits) - 1) if signed else found

    def spread(array: NDArray[Any]) -> NDArray[Any]:
        count = -(-matrix.width // block)
        repeat = count if array.shape[1] == 1 else matrix.stored_block // block
        return np.ascontiguousarray(np.repeat(array, repeat, axis=1)[:, :count])

    codes = unsigned(tensor)
    scales = spread(_rows(matrix.scales, matrix.operand))
    count = scales.shape[1]
    zeros = None if matrix.zeros is None else spread(unsigned(matrix.zeros))
    if short := count * block - matrix.width:
        # Activations are filled with zeros there; the middle makes the weight zero too.
        codes = np.concatenate([codes, np.full((matrix.rows, short), middle, np.uint8)], axis=1)
    if bits == 4:
        codes = pack(codes)
        zeros = None if zeros is None else pack(zeros)
    blob = block * bits // 8
    put, name = packed.put, matrix.name
    parts = {
        "codes": put(f"{name}.packed", codes, ir.DataType.UINT8, (matrix.rows, count, blob)),
        "scales": put(f"{name}.packed_scales", scales.view(np.uint8), matrix.scales.dtype, (matrix.rows * count,)),
    }
    if zeros is not None:
        parts["zeros"] = put(f"{name}.packed_zeros", zeros, ir.DataType.UINT8, (zeros.size,))
    if key is not None:
        packed.matrices[key] = parts
    return parts


def _rows(tensor: ir.TensorProtocol, operand: bool) -> NDArray[Any]:
    """[out, ..] whatever the layout in the graph; a vector of one scale a row is [out, 1]."""
    array = tensor.numpy()
    if array.ndim == 1:
        return array.reshape(-1, 1)
    return np.ascontiguousarray(array.T if operand else array)


def _inputs(
    graph: ir.Graph, matrix: _Matrix, parts: Mapping[str, ir.TensorProtocol], shapes: Mapping[str, tuple[int, ...]]
) -> list[ir.Value]:
    """Initializers of the packed tensors, in views of these shapes."""
    values = []
    for role, tensor in parts.items():
        shape = shapes.get(role, sizes(tensor))
        name = f"{matrix.name}.packed_{role}_{len(shape)}"
        if name not in graph.initializers:
            view = _view(tensor, shape, name)
            graph.initializers[name] = ir.Value(
                name=name, const_value=view, shape=ir.Shape(shape), type=ir.TensorType(view.dtype)
            )
        values.append(graph.initializers[name])
    return values


def _view(tensor: ir.TensorProtocol, shape: tuple[int, ...], name: str) -> ir.TensorProtocol:
    if isinstance(tensor, ir.ExternalTensor):
        return ir.ExternalTensor(
            tensor.location,
            tensor.offset,
            tensor.length,
            tensor.dtype,
            shape=ir.Shape(shape),
            name=name,
            base_dir=tensor.base_dir,
        )
    return ir.Tensor(tensor.numpy().reshape(shape), dtype=tensor.dtype, shape=ir.Shape(shape), name=name)


def _product(graph: ir.Graph, node: ir.Node, matrix: _Matrix, packed: Packed, accuracy_level: int) -> None:
    parts = _pack(matrix, packed)
    fused = ir.node(
        "MatMulNBits",
        [node.inputs[0], *_inputs(graph, matrix, parts, {})],
        {
            "K": matrix.width,
            "N": matrix.rows,
            "bits": matrix.bits,
            "block_size": matrix.block,
            "accuracy_level": accuracy_level,
        },
        domain=MICROSOFT,
    )
    _replace(graph, node, fused)


def _look_up(graph: ir.Graph, node: ir.Node, matrix: _Matrix, packed: Packed) -> None:
    parts = _pack(matrix, packed)
    count = -(-matrix.width // matrix.block)
    if count * matrix.block != matrix.width:
        raise SpecExportError(f"{matrix.name}: rows of {matrix.width} are no whole blocks of {matrix.block}")
    shapes = {
        "codes": (matrix.rows, matrix.width * matrix.bits // 8),
        "scales": (matrix.rows, count),
        "zeros": (matrix.rows, -(-count * matrix.bits // 8)),
    }
    codes, scales, *zeros = _inputs(graph, matrix, parts, shapes)
    looked = ir.node(
        "GatherBlockQuantized",
        [codes, node.inputs[1], scales, *zeros],
        {"bits": matrix.bits, "block_size": matrix.block, "gather_axis": 0, "quantize_axis": 1},
        domain=MICROSOFT,
    )
    _replace(graph, node, looked)


def _replace(graph: ir.Graph, node: ir.Node, by: ir.Node) -> None:
    graph.insert_before(node, by)
    old, new = node.outputs[0], by.outputs[0]
    new.name, new.shape, new.type = old.name, old.shape, old.type
    old.name = None
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    graph.remove(node, safe=True)
