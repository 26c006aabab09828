"""Quantised matrices in graphs: what the standard operators make of the codes, bit for bit, and the CPU's own ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from specexport.engines.ort_session import session_options
from specexport.exporter.graph_file import DataFile, save_graph
from specexport.exporter.passes import matmul_nbits
from specexport.exporter.quantize.plan import Format, Plan
from specexport.exporter.quantize.record import Quantized
from specexport.exporter.quantize.rtn import quantizer, round_to_nearest
from specexport.runtime.errors import SpecExportError

FLOAT, INT64 = ir.TensorType(ir.DataType.FLOAT), ir.TensorType(ir.DataType.INT64)
ROWS, WIDTH = 96, 192


def graph(use: str, rows: int = ROWS, width: int = WIDTH) -> ir.Model:
    """One product or look-up of an initializer ``m`` that has no data yet."""
    weight = ir.Value(name="m", shape=ir.Shape((width, rows) if use == "MatMul" else (rows, width)), type=FLOAT)
    ids = use == "Gather"
    x = ir.Value(name="x", shape=ir.Shape([1, "T"] if ids else ["T", width]), type=INT64 if ids else FLOAT)
    inputs = [weight, x] if ids else [x, weight]
    node = ir.node(use, inputs, {"transB": 1} if use == "Gemm" else {})
    out = node.outputs[0]
    out.name, out.type = "y", FLOAT
    out.shape = ir.Shape([1, "T", width] if ids else ["T", rows])
    made = ir.Graph([x], [out], nodes=[node], initializers=[weight], opset_imports={"": 24}, name="one")
    return ir.Model(made, ir_version=11)


def save(folder: Path, use: str, matrix: Quantized) -> Path:
    path = folder / "one.onnx"
    save_graph(graph(use, *matrix.shape), [("m", lambda: matrix)], path)
    onnx.checker.check_model(path, full_check=True)
    return path


def run(path: Path, x: NDArray[Any], *, fused: bool = False) -> NDArray[Any]:
    options = session_options(1)
    if not fused:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    found: NDArray[Any] = session.run(None, {"x": x})[0]
    return found


def asked(use: str, seed: int = 0) -> NDArray[Any]:
    rng = np.random.default_rng(seed)
    if use == "Gather":
        return rng.integers(0, ROWS, (1, 9))
    return rng.standard_normal((9, WIDTH)).astype(np.float32)


def expected(use: str, matrix: Quantized, x: NDArray[Any]) -> NDArray[Any]:
    values = matrix.dequantize().numpy()
    found: NDArray[Any] = values[x] if use == "Gather" else x @ values.T
    return found


@pytest.fixture(scope="module")
def values() -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(ROWS, WIDTH, generator=generator) * torch.rand(ROWS, 1, generator=generator)


FORMATS = [
    Format("int8"),
    Format("int8", 64),
    Format("int8", 32, symmetric=False),
    Format("int4", 32),
    Format("int4", 64, symmetric=False),
    Format("int4", 128),
    Format("int4"),
]
USES = ("MatMul", "Gemm", "Gather")


def whole(use: str) -> NDArray[Any]:
    """What reads the matrix itself out of a product or look-up."""
    return np.arange(ROWS)[None] if use == "Gather" else np.eye(WIDTH, dtype=np.float32)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_the_standard_graph_has_the_values_bit_for_bit(form: Format, use: str, values: Tensor, tmp_path: Path) -> None:
    matrix = round_to_nearest(values, form.kind, form.block, symmetric=form.symmetric)
    found = run(save(tmp_path, use, matrix), whole(use))
    got = found[0] if use == "Gather" else found.T
    assert np.array_equal(got, matrix.dequantize().numpy())


@pytest.mark.parametrize("use", ("MatMul", "Gemm"))
def test_act_order_gathers_the_inputs(use: str, values: Tensor, tmp_path: Path) -> None:
    order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(1))
    plain = round_to_nearest(values[:, order], "int4", 32)
    matrix = Quantized(4, plain.codes, plain.scales, None, 32, order)
    assert np.array_equal(run(save(tmp_path, use, matrix), whole(use)).T, matrix.dequantize().numpy())


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_the_cpu_lowering_is_the_same_product(form: Format, use: str, values: Tensor, tmp_path: Path) -> None:
    """With activations in float32 up to their rounding, with 8-bit activations within what those cost."""
    matrix = round_to_nearest(values, form.kind, form.block, symmetric=form.symmetric)
    path = save(tmp_path, use, matrix)
    x = asked(use)
    wanted = expected(use, matrix, x)
    for level, limit in ((matmul_nbits.PRECISE, 1e-5), (matmul_nbits.FAST, 2e-2)):
        lowered = tmp_path / f"level{level}.onnx"
        model = ir.load(path)
        with DataFile(tmp_path / f"{lowered.name}.data") as data:
            matmul_nbits.lower(model, matmul_nbits.Packed(data.put), level)
        ir.save(model, lowered)
        kinds = {node.op_type for node in model.graph}
        assert kinds == ({"GatherBlockQuantized"} if use == "Gather" else {"MatMulNBits"}) or use == "Gather"
        assert "DequantizeLinear" not in kinds
        error = np.abs(run(lowered, x, fused=True) - wanted).max() / np.abs(wanted).max()
        assert error < limit, (level, error)


@pytest.mark.parametrize("block", [0, 64, 32], ids=["row", "64", "32"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_row_does_not_depend_on_an_even_number_of_them(kind: str, block: int, values: Tensor, tmp_path: Path) -> None:
    """For every width; this is what speculation's identical tokens rest on."""
    path = save(tmp_path, "MatMul", round_to_nearest(values, kind, block))
    model = ir.load(path)
    with DataFile(tmp_path / "packed.onnx.data") as data:
        matmul_nbits.lower(model, matmul_nbits.Packed(data.put))
    ir.save(model, tmp_path / "packed.onnx")
    (node,) = (node for node in model.graph if node.op_type == "MatMulNBits")
    assert node.attributes["block_size"].as_int() == (block or matmul_nbits.ROW_BLOCK)
    session = ort.InferenceSession(tmp_path / "packed.onnx", session_options(2), providers=["CPUExecutionProvider"])
    x = np.random.default_rng(3).standard_normal((40, WIDTH)).astype(np.float32)
    (wide,) = session.run(None, {"x": x})
    for count in range(2, 40, 2):
        (few,) = session.run(None, {"x": x[:count]})
        assert np.array_equal(few, wide[:count]), count
    (odd,) = session.run(None, {"x": x[:7]})
    assert np.array_equal(odd[:6], wide[:6]) and np.allclose(odd[6], wide[6], atol=0.1)


@pytest.mark.parametrize("kind", ["fp8", "nvfp4"])
@pytest.mark.parametrize("use", ("MatMul", "Gemm"))
def test_gpu_formats_are_valid_onnx(kind: str, use: str, values: Tensor, tmp_path: Path) -> None:
    matrix = round_to_nearest(values, kind)
    model = onnx.load(save(tmp_path, use, matrix))
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    eight, four = onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.FLOAT4E2M1
    assert types["m.codes"] == (four if kind == "nvfp4" else eight)
    if kind == "nvfp4":
        assert types["m.scales"] == eight and types["m.outer"] == onnx.TensorProto.FLOAT
        (codes,) = (tensor for tensor in model.graph.initializer if tensor.name == "m.codes")
        stored = onnx.numpy_helper.to_array(codes).astype(np.float32)
        assert np.array_equal(stored.T if use == "MatMul" else stored, matrix.codes.float().numpy())
    with pytest.raises(
        SpecExportError,
        match=r"m(\.scales\.value)?: onnxruntime's CPU provider multiplies with int4 and int8 codes only",
    ):
        matmul_nbits.lower(ir.load(tmp_path / "one.onnx"), matmul_nbits.Packed(lambda *_: pytest.fail("written")))


def test_other_uses_are_refused(values: Tensor, tmp_path: Path) -> None:
    model = graph("MatMul")
    next(iter(model.graph)).op_type = "Add"
    matrix = round_to_nearest(values, "int8")
    with pytest.raises(SpecExportError, match=r"m is used as \[\('Add', 1\)\]: it cannot be stored quantised"):
        save_graph(model, [("m", lambda: matrix)], tmp_path / "one.onnx")


def test_a_plan_quantises_what_comes_in_floating_point(values: Tensor, tmp_path: Path) -> None:
    """Operands arrive as [in, out]; the quantiser sees [out, in] and a block that fits."""
    seen: list[tuple[str, tuple[int, ...], Format]] = []

    def spy(name: str, matrix: Tensor, form: Format) -> Quantized:
        seen.append((name, tuple(matrix.shape), form))
        return quantizer(name, matrix, form)

    model = graph("MatMul")
    model.graph.initializers["m"].name = "layers.0.mlp.up_proj.weight"
    plan = Plan(Format("int4", 128), Format("fp32"), Format("fp32"), spy)
    save_graph(model, [("layers.0.mlp.up_proj.weight", lambda: values.t())], tmp_path / "one.onnx", plan=plan)
    assert seen == [("layers.0.mlp.up_proj.weight", (ROWS, WIDTH), Format("int4", 64))]


@pytest.mark.parametrize(
    ("width", "block", "fitted"), [(576, 128, 64), (640, 128, 128), (100, 32, 32), (577, 32, 32), (20, 32, 20)]
)
def test_blocks_that_do_not_divide_a_row(width: int, block: int, fitted: int) -> None:
    assert Format("int4", block).fitted(width).block == fitted


@pytest.mark.parametrize("symmetric", [True, False])
def test_clipping_is_no_worse_than_the_full_range(symmetric: bool, values: Tensor) -> None:
    spiky = values.clone()
    spiky[:, ::32] *= 6.0
    error = (round_to_nearest(spiky, "int4", 32, symmetric=symmetric).dequantize() - spiky).square().mean()
    high = spiky.reshape(ROWS, -1, 32).amax(-1, keepdim=True)
    low = spiky.reshape(ROWS, -1, 32).amin(-1, keepdim=True)
    step = torch.maximum(high.abs(), low.abs()) / 7 if symmetric else (high.clamp(min=0) - low.clamp(max=0)) / 15
    full = ((spiky.reshape(ROWS, -1, 32) / step).round() * step - spiky.reshape(ROWS, -1, 32)).square().mean()
    assert error < full


Make = Callable[[Tensor], Tensor]


@pytest.mark.parametrize("form", [*FORMATS, Format("fp8"), Format("nvfp4", 16)], ids=str)
@pytest.mark.parametrize("make", [torch.zeros_like, lambda m: m * 0 - 3.0, lambda m: m[:, :37]], ids=["0", "-3", "37"])
def test_odd_matrices(form: Format, make: Make, values: Tensor) -> None:
    matrix = make(values)
    found = round_to_nearest(matrix, form.kind, form.block, symmetric=form.symmetric).dequantize()
    assert found.shape == matrix.shape
    limit = {"int8": 0.01, "int4": 0.15, "fp8": 0.07, "nvfp4": 0.2}[form.kind]
    assert (found - matrix).abs().max() <= limit * max(1e-9, float(matrix.abs().max()))
