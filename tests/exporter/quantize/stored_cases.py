"""The quantised checkpoints that tests write, by name."""

from __future__ import annotations

from tests.exporter.quantize.stored_floats import compressed_fp8, fp8
from tests.exporter.quantize.stored_writers import Case, awq, compressed, gptq

#: Every format that is read.
CASES: dict[str, Case] = {
    "gptq4": gptq(4, 32, symmetric=True),
    "gptq4_asymmetric": gptq(4, 32, symmetric=False),
    "gptq4_act_order": gptq(4, 32, symmetric=False, act_order=True),
    "gptq4_short_group": gptq(4, 64, symmetric=True, act_order=True),
    "gptq4_rows": gptq(4, -1, symmetric=False),
    "gptq4_v2": gptq(4, 32, symmetric=False, version=2),
    "gptq4_gptqmodel": gptq(4, 32, symmetric=False, writer="gptqmodel:2.0.0"),
    "gptq8": gptq(8, 32, symmetric=True),
    "gptq8_asymmetric": gptq(8, 32, symmetric=False, act_order=True),
    "gptq8_v2": gptq(8, -1, symmetric=False, version=2),
    "awq": awq(32),
    "awq_symmetric": awq(32, zero_point=False),
    "awq_rows": awq(-1),
    "awq_gemv": awq(32, layout="gemv"),
    "awq_gemv_rows": awq(-1, layout="gemv"),
    "packed4": compressed(4, "group", group=32),
    "packed4_rows": compressed(4, "channel"),
    "packed4_asymmetric": compressed(4, "group", group=32, symmetric=False),
    "packed4_asymmetric_rows": compressed(4, "channel", symmetric=False),
    "packed4_old_zeros": compressed(4, "group", group=32, symmetric=False, old_zeros=True),
    "packed4_act_order": compressed(4, "group", group=32, symmetric=False, act_order=True),
    "packed8": compressed(8, "group", group=32),
    "packed8_asymmetric": compressed(8, "group", group=32, symmetric=False),
    "int8_rows": compressed(8, "channel", packed=False, inputs="dynamic"),
    "int8_static": compressed(8, "channel", packed=False, inputs="static"),
    "int8_whole": compressed(8, "tensor", packed=False, symmetric=False),
    "int8_groups": compressed(8, "group", group=32, packed=False, symmetric=False),
    "int8_naive": compressed(8, "channel", packed=False, old_zeros=True, layout="naive-quantized"),
    "float_rows": compressed_fp8("channel", inputs="dynamic"),
    "float_whole": compressed_fp8("tensor", inputs="static"),
    "float_tiles": compressed_fp8("block", tile=(24, 40)),
    "fp8_tiles": fp8(tile=(24, 40)),
    "fp8_dynamic": fp8(),
    "fp8_static": fp8(static=True),
    "fp8_inverse": fp8(scale="weight_scale_inv"),
}
