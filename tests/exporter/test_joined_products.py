"""Products of one value joined, and residuals with their norms: the same numbers from fewer operators."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray

from specexport.engines.ort_session import session_options
from specexport.exporter.graph_file import DataFile
from specexport.exporter.passes import joined_products, matmul_nbits, skip_norm
from specexport.exporter.passes.graph import constant
from specexport.exporter.quantize import insert
from specexport.exporter.quantize.rtn import round_to_nearest

FLOAT = ir.TensorType(ir.DataType.FLOAT)
WIDTH, ROWS = 64, (32, 16, 48)


def value(name: str, *shape: int | str) -> ir.Value:
    return ir.Value(name=name, shape=ir.Shape(shape), type=FLOAT)


def products(data: DataFile, kinds: tuple[str, ...], block: int = 32, symmetric: bool = True) -> ir.Model:
    """``y0``, ``y1``, ``y2`` = x @ a matrix each, in these formats; the last with a bias."""
    rng = torch.Generator().manual_seed(0)
    weights = [value(f"m{index}", WIDTH, rows) for index, rows in enumerate(ROWS)]
    x = value("x", 1, "T", WIDTH)
    nodes = [ir.node("MatMul", [x, weight]) for weight in weights]
    graph = ir.Graph([x], [], nodes=nodes, initializers=weights, opset_imports={"": 24}, name="products")
    bias = constant(graph, "bias", np.linspace(-1, 1, ROWS[2], dtype=np.float32))
    nodes.append(ir.node("Add", [nodes[2].outputs[0], bias]))
    graph.append(nodes[3])
    for index, (node, rows) in enumerate(zip((*nodes[:2], nodes[3]), ROWS, strict=True)):
        out = node.outputs[0]
        out.name, out.type, out.shape = f"y{index}", FLOAT, ir.Shape([1, "T", rows])
        graph.outputs.append(out)
    for weight, kind, rows in zip(weights, kinds, ROWS, strict=True):
        matrix = round_to_nearest(torch.randn(rows, WIDTH, generator=rng), kind, block, symmetric=symmetric)
        parts = insert.store(str(weight.name), matrix, True, ir.DataType.FLOAT, data.put)
        insert.insert(graph, weight, parts, ir.DataType.FLOAT)
    return ir.Model(graph, ir_version=11)


def run(path: Path, x: NDArray[np.float32]) -> list[NDArray[Any]]:
    session = ort.InferenceSession(path, session_options(1), providers=["CPUExecutionProvider"])
    found: list[NDArray[Any]] = session.run(None, {"x": x})
    return found


def lowered(folder: Path, name: str, joined: bool, *arguments: Any) -> tuple[Counter[str], list[NDArray[Any]]]:
    """Operators and results on six rows, also of the first two alone."""
    with DataFile(folder / f"{name}.source") as data:
        model = products(data, *arguments)
    with DataFile(folder / f"{name}.data") as data:
        if joined:
            joined_products.lower(model)
        matmul_nbits.lower(model, matmul_nbits.Packed(data.put))
    ir.save(model, folder / name)
    x = np.random.default_rng(1).standard_normal((1, 6, WIDTH)).astype(np.float32)
    wide, narrow = run(folder / name, x), run(folder / name, x[:, :2])
    assert all(np.array_equal(few, many[:, :2]) for few, many in zip(narrow, wide, strict=True))
    return Counter(node.op_type for node in model.graph), wide


def check(apart: list[NDArray[Any]], together: list[NDArray[Any]]) -> None:
    """Equal bits, but for the bias: ONNX Runtime adds it inside of a product of its own."""
    assert all(np.array_equal(mine, other) for mine, other in zip(apart[:2], together[:2], strict=True))
    assert np.abs(apart[2] - together[2]).max() < 1e-5


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize(("kind", "block"), [("int8", 0), ("int8", 32), ("int4", 32), ("int4", 16)])
def test_joined_products_are_bit_for_bit_the_same(kind: str, block: int, symmetric: bool, tmp_path: Path) -> None:
    before, apart = lowered(tmp_path, "apart.onnx", False, (kind,) * 3, block, symmetric)
    after, together = lowered(tmp_path, "together.onnx", True, (kind,) * 3, block, symmetric)
    assert (before["MatMulNBits"], after["MatMulNBits"], after["Split"]) == (3, 1, 1)
    check(apart, together)


def test_only_one_format_is_joined(tmp_path: Path) -> None:
    after, together = lowered(tmp_path, "mixed.onnx", True, ("int8", "int4", "int8"))
    assert (after["MatMulNBits"], after["Split"]) == (2, 1)
    _, apart = lowered(tmp_path, "apart.onnx", False, ("int8", "int4", "int8"))
    check(apart, together)


def test_values_side_by_side_need_a_bias_each_or_none(tmp_path: Path) -> None:
    with DataFile(tmp_path / "data") as data:
        graph = products(data, ("int8",) * 3).graph
    packed = joined_products.join(graph, list(graph.outputs)[:2])
    assert packed is not None and (node := packed.producer()) is not None and node.op_type == "MatMul"
    biased = joined_products.join(graph, [graph.outputs[2], graph.outputs[2]])
    assert biased is not None and (node := biased.producer()) is not None and node.op_type == "Add"
    assert joined_products.join(graph, list(graph.outputs)) is None  # one of three has a bias
    assert joined_products.join(graph, [graph.outputs[0], graph.inputs[0]]) is None


def residual(bias: bool) -> ir.Model:
    """``y`` = norm(x + z), ``s`` = 2 (x + z); with ``bias``, z is a vector."""
    x, z = value("x", 1, "T", WIDTH), value("z", 1, "T", WIDTH)
    graph = ir.Graph([x] if bias else [x, z], [], nodes=[], opset_imports={"": 24}, name="residual")
    rng = np.random.default_rng(0)
    other = constant(graph, "b", rng.standard_normal(WIDTH).astype(np.float32)) if bias else z
    weight = constant(graph, "w", rng.standard_normal(WIDTH).astype(np.float32))
    add = ir.node("Add", [x, other])
    norm = ir.node("RMSNormalization", [add.outputs[0], weight], {"axis": -1, "epsilon": 1e-5})
    twice = ir.node("Add", [add.outputs[0], add.outputs[0]])
    graph.extend([add, twice, norm])
    for node, name in ((norm, "y"), (twice, "s")):
        out = node.outputs[0]
        out.name, out.type, out.shape = name, FLOAT, ir.Shape([1, "T", WIDTH])
        graph.outputs.append(out)
    return ir.Model(graph, ir_version=11)


def test_a_residual_and_its_norm_are_one(tmp_path: Path) -> None:
    model = residual(bias=False)
    ir.save(model, tmp_path / "apart.onnx")
    skip_norm.lower(model)
    assert Counter(node.op_type for node in model.graph) == {"SkipSimplifiedLayerNormalization": 1, "Add": 1}
    ir.save(model, tmp_path / "one.onnx")
    inputs = {name: np.random.default_rng(1).standard_normal((1, 5, WIDTH)).astype(np.float32) for name in "xz"}
    sessions = [ort.InferenceSession(tmp_path / f"{name}.onnx") for name in ("apart", "one")]
    (norm, total), (fused, summed) = (session.run(None, inputs) for session in sessions)
    assert np.abs(norm - fused).max() < 1e-5 and np.array_equal(total, summed)
    (narrow, _) = sessions[1].run(None, {name: array[:, :1] for name, array in inputs.items()})
    assert np.array_equal(narrow, fused[:, :1])


def test_a_bias_is_no_residual() -> None:
    model = residual(bias=True)
    skip_norm.lower(model)
    assert not any(node.domain for node in model.graph)
