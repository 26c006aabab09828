"""Several products of one value, each with a dequantised matrix, as one: a call of a kernel instead of three.

Requires: matrices as ``exporter.quantize.insert`` puts them, before ``passes.matmul_nbits``. Ensures: the same numbers.
Only where the matrices have one format; in floating point nothing is joined, for the lowered graph shares those weights
with the exported one, and a product bound by memory gains nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from specexport.exporter.passes.graph import Emitter, constant, initializer
from specexport.exporter.quantize.insert import sizes


def lower(model: ir.Model) -> ir.Model:
    """Join what reads the same value, in place, and return the model."""
    graph = model.graph
    alike: dict[tuple[object, ...], list[_Product]] = {}
    for node in graph:
        product = _read_product(node)
        if product is not None:
            alike.setdefault(product.form(), []).append(product)
    for products in alike.values():
        if len(products) > 1:
            _split(graph, products)
    passes.RemoveUnusedNodesPass()(model)
    passes.TopologicalSortPass()(model)
    return model


def join(graph: ir.Graph, values: Sequence[ir.Value]) -> ir.Value | None:
    """``values``, products with or without a bias, side by side from one product; None where they are not alike.

    The old products stay until unused nodes are removed.
    """
    found = [_read_biased(value) for value in values]
    pairs = [pair for pair in found if pair is not None]
    if len(pairs) < len(found) or len({(product.form(), bias is None) for product, bias in pairs}) > 1:
        return None
    products = [product for product, _ in pairs]
    together = _join(graph, products)
    biases = [bias.numpy() for _, bias in pairs if bias is not None]
    if not biases:
        return together
    name = f"{together.name}.bias"
    node = ir.node("Add", [together, constant(graph, name, np.concatenate(biases))])
    graph.insert_before(products[0].matmul, node)
    return node.outputs[0]


@dataclass(frozen=True, slots=True)
class _Product:
    """x @ dequantise(parts); ``parts`` are codes, scales and maybe zeros, [in or blocks, out] or [out]."""

    x: ir.Value
    matmul: ir.Node
    dequantize: ir.Node
    parts: tuple[ir.TensorProtocol, ...]

    def form(self) -> tuple[object, ...]:
        """What products must have in common."""
        attributes = {(each.name, each.value) for each in self.dequantize.attributes.values()}
        kinds = tuple((part.dtype, sizes(part)[:-1]) for part in self.parts)
        return id(self.x), frozenset(attributes), kinds

    @property
    def width(self) -> int:
        return sizes(self.parts[0])[-1]


def _read_product(node: ir.Node | None) -> _Product | None:
    if node is None or node.op_type != "MatMul" or node.inputs[0] is None or node.inputs[1] is None:
        return None
    dequantize = node.inputs[1].producer()
    if dequantize is None or dequantize.op_type != "DequantizeLinear":
        return None
    parts = [each.const_value for each in dequantize.inputs if each is not None]
    stored = tuple(part for part in parts if part is not None)
    return _Product(node.inputs[0], node, dequantize, stored) if len(stored) == len(parts) else None


def _read_biased(value: ir.Value) -> tuple[_Product, ir.TensorProtocol | None] | None:
    node, bias = value.producer(), None
    if node is not None and node.op_type == "Add":
        constants = [each.const_value for each in node.inputs if each is not None and each.const_value is not None]
        others = [each for each in node.inputs if each is not None and each.const_value is None]
        if len(constants) != 1:
            return None
        bias, node = constants[0], others[0].producer()
    product = _read_product(node)
    return None if product is None else (product, bias)


def _split(graph: ir.Graph, products: Sequence[_Product]) -> None:
    together = _join(graph, products)
    first = products[0].matmul
    emit = Emitter(graph)
    sections = emit.constant(np.array([product.width for product in products]))
    node = ir.node("Split", [together, sections], {"axis": -1}, num_outputs=len(products))
    graph.insert_before(first, node)
    for product, new in zip(products, node.outputs, strict=True):
        old = product.matmul.outputs[0]
        new.name, new.shape, new.type = old.name, old.shape, old.type
        old.name = None
        old.replace_all_uses_with(new, replace_graph_outputs=True)


def _join(graph: ir.Graph, products: Sequence[_Product]) -> ir.Value:
    """The products side by side, made in front of the first of them."""
    first = products[0]
    name = f"{first.dequantize.outputs[0].name}.joined"
    role = f"{name}.codes"
    if role in graph.initializers:  # the same matrices again, as in the steps of a drafter
        matrix = next(user for user, _ in graph.initializers[role].uses()).outputs[0]
    else:
        inputs = []
        for index, role in enumerate(("codes", "scales", "zeros")[: len(first.parts)]):
            inputs.append(_joined(graph, f"{name}.{role}", [product.parts[index] for product in products]))
        dequantize = ir.node("DequantizeLinear", inputs, first.dequantize.attributes)
        graph.insert_before(first.matmul, dequantize)
        matrix = dequantize.outputs[0]
        matrix.name = name
    matmul = ir.node("MatMul", [first.x, matrix])
    times = len(matrix.uses())
    matmul.outputs[0].name = f"{name}.product" if times == 1 else f"{name}.product_{times}"
    graph.insert_before(first.matmul, matmul)
    return matmul.outputs[0]


def _joined(graph: ir.Graph, name: str, parts: Sequence[ir.TensorProtocol]) -> ir.Value:
    """An initializer that is put together when it is read: all layers' at once would be half the model."""
    *others, _ = sizes(parts[0])
    shape = ir.Shape([*others, sum(sizes(part)[-1] for part in parts)])
    return initializer(graph, name, ir.LazyTensor(partial(_together, name, parts), parts[0].dtype, shape, name=name))


def _together(name: str, parts: Sequence[ir.TensorProtocol]) -> ir.TensorProtocol:
    array = np.concatenate([part.numpy() for part in parts], axis=-1)
    return ir.Tensor(array, dtype=parts[0].dtype, name=name)
