# mypy: ignore-errors
# The body is ONNX Script, which has types of its own; onnxscript reads its annotations, so they cannot be left out.
"""``ops.experts`` as an ONNX function: one ``Loop`` over the experts that any row chose."""

from onnxscript import FLOAT, INT64, opset18, script


@script(default_opset=opset18)
def experts_loop(rows: FLOAT, chosen: INT64, weights: FLOAT, gate: FLOAT, up: FLOAT, down: FLOAT) -> FLOAT:
    """A function of opset 18, which the exporter's own library is written in and which it converts to ours."""
    taken = opset18.Unique(chosen)
    count = opset18.Size(taken)
    zero = opset18.Constant(value_float=0.0)
    first, second = opset18.Constant(value_ints=[0]), opset18.Constant(value_ints=[1])
    out = opset18.Mul(opset18.Cast(rows, to=1), zero)
    for index in range(count):
        expert = opset18.Gather(taken, index)
        mine = opset18.Equal(chosen, expert)
        share = opset18.ReduceSum(opset18.Where(mine, weights, zero), second, keepdims=1)
        places = opset18.NonZero(opset18.ReduceMax(opset18.Cast(mine, to=1), second, keepdims=0))
        which = opset18.Squeeze(places, first)
        x = opset18.Gather(rows, which)
        gated = opset18.MatMul(x, opset18.Gather(gate, expert))
        inner = opset18.Mul(opset18.Mul(gated, opset18.Sigmoid(gated)), opset18.MatMul(x, opset18.Gather(up, expert)))
        fed = opset18.Cast(opset18.MatMul(inner, opset18.Gather(down, expert)), to=1)
        part = opset18.Mul(fed, opset18.Gather(share, which))
        out = opset18.ScatterND(out, opset18.Transpose(places), part, reduction="add")
    return out
