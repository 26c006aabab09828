"""The exported target as OpenVINO's CPU kernels want it: caches as state, attention fused with their update.

OpenVINO's ONNX reader takes every operator of a target but ``TensorScatter``, and splits ``Attention`` into products
that its plugin does not fuse again. Both are converted here instead, while the file is read:

- ``TensorScatter`` behind the commit recipe becomes ``Concat(state, new rows)``: the plugin appends in place, and
  nothing else moves. Which rows hold accepted tokens is the engine's bookkeeping.
- ``Attention`` becomes ``ScaledDotProductAttention``, keys and values broadcast as the plugin's fusion expects them.
- The masks' column index, ``arange(S)`` in the file, becomes the input ``columns``: for each cache row the index of its
  token, :data:`DEAD` where it holds none. Masks then are as wide as the used rows, and rejected rows are masked.

Quantised weights need nothing: the reader turns ``DequantizeLinear`` into what the plugin multiplies with compressed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino.opset15 as op
from openvino.frontend.onnx import ConversionExtension
from openvino.op.util import Variable, VariableInfo

from specexport.runtime import contract
from specexport.runtime.errors import BundleError

COLUMNS = "columns"
#: Inputs of the converted model, which has no caches among them.
INPUTS = (contract.TOKENS, contract.POSITIONS, contract.TREE, contract.PAST, contract.SELECT)
#: In ``columns``: a row without a token. Far beyond any slot, and within the plugin's 32-bit indices.
DEAD = 1 << 30
#: The plugin's fusion looks for a reordering of the batch between a state and its use.
_BEAM = "beam_idx"
#: What scales are multiplied with in a dequantised matrix, without and with zero points.
_CODES = ("Convert", "Subtract")
#: Inputs that are the same in every call.
CONSTANT_INPUTS = {_BEAM: np.zeros(1, np.int32)}


def first_reason(error: Exception) -> str:
    """The line of an OpenVINO exception that says something; the others name its source files."""
    lines = [line.strip() for line in str(error).splitlines()]
    telling = [
        line for line in lines if line and not line.startswith(("Exception from", "Check ", "Summary", "FrontEnd"))
    ]
    return next(iter(telling or [line for line in lines if line]), "no reason given")


def read_target(path: Path) -> tuple[ov.Model, tuple[int, ...], list[Any]]:
    """Read a target graph and convert it; also the shape of its caches, [1, Hkv, S, D], and memory it refers to.

    Raises:
        BundleError: the file cannot be read, or is no target graph.
    """
    new_rows: dict[str, Any] = {}
    core = ov.Core()
    core.add_extension(ConversionExtension("TensorScatter", lambda node: _append(node, new_rows)))
    core.add_extension(ConversionExtension("Attention", _attention))
    try:
        model = core.read_model(path)
    except Exception as error:  # OpenVINO's exceptions share no base of their own
        raise BundleError(f"{path}: openvino {ov.__version__} cannot load it: {first_reason(error)}") from error
    parameters = {name: p for p in model.get_parameters() for name in p.output(0).get_names()}
    _check_interface(model, parameters, path)
    layers = sum(name.startswith("past_k.") for name in parameters)
    beam = op.parameter([-1], np.int32, name=_BEAM)
    sinks = [_make_state(parameters[past], new_rows.get(past), beam, path) for past, _ in contract.cache_names(layers)]
    shape = _cache_shape(parameters[contract.past_name("k", 0)])
    columns = _open_columns(model, shape[2], path)
    kept_codes = _fold_shapes(model)
    results = [model.output(contract.LOGITS)]
    if contract.FEATURES in _output_names(model):
        results.append(model.output(contract.FEATURES))
    kept = [result.get_node() for result in results]
    return ov.Model(kept, sinks, [*(parameters[name] for name in INPUTS), columns, beam], "target"), shape, kept_codes


def _fold_shapes(model: ov.Model) -> list[Any]:
    """Reshape codes and scales here, to constant shapes; returns memory that must outlive the model.

    The reader leaves ``Reshape(codes, shape of codes)``: then the plugin does not recognise a compressed embedding, and
    keeps it, and an output table that shares it, in float32.
    """
    kept = []
    for node in model.get_ops():
        if node.get_type_name() not in ("Reshape", "Unsqueeze") or node.get_output_partial_shape(0).is_dynamic:
            continue
        source, shape = node.input_value(0).get_node(), node.get_output_shape(0)
        if source.get_type_name() == "Constant":
            copy = np.array(source.data)  # the view dies with the node
            if copy.size == int(np.prod(shape)):
                folded = op.constant(copy.reshape(list(shape)))
            else:  # two codes a byte
                kept.append(copy)
                folded = op.constant(ov.Tensor(copy, shape, source.get_element_type()))
            for target in list(node.output(0).get_target_inputs()):
                target.replace_source_output(folded.output(0))
        elif source.get_type_name() == "Multiply" and source.input_value(0).get_node().get_type_name() in _CODES:
            node.input(1).replace_source_output(op.constant(np.array(list(shape), np.int64)).output(0))
    return kept


def smallest_block(model: ov.Model) -> int | None:
    """Weights that share a scale, the fewest of all blocked matrices; None where no matrix is blocked.

    The reader makes ``DequantizeLinear`` with a block size ``Multiply(Convert(codes), scales)`` in three dimensions,
    ``[blocks, block, out]`` or ``[out, blocks, block]``, with scales of 1 in the place of the block.
    """
    found = []
    for node in model.get_ops():
        if node.get_type_name() != "Multiply" or node.get_output_partial_shape(0).rank != 3:
            continue
        codes = node.input_value(0).get_node()
        if codes.get_type_name() not in _CODES or not codes.get_output_partial_shape(0).is_static:
            continue
        scales = node.input_value(1).get_partial_shape()
        found += [int(size) for size, one in zip(codes.get_output_shape(0), scales.to_shape(), strict=True) if one == 1]
    return min(found, default=None)


def _output_names(model: ov.Model) -> set[str]:
    return {name for output in model.outputs for name in output.get_names()}


def _check_interface(model: ov.Model, parameters: dict[str, Any], path: Path) -> None:
    caches = contract.cache_names(sum(name.startswith("past_k.") for name in parameters))
    wrong = parameters.keys() ^ {*contract.STEP_INPUTS, *(past for past, _ in caches)}
    wrong |= {contract.LOGITS, *(present for _, present in caches)} - _output_names(model)
    if wrong or not caches:
        name = min(wrong, default="past_k.0")
        raise BundleError(f"{path} is not a target graph: {name} is missing or unknown; build the bundle again")


def _cache_shape(parameter: Any) -> tuple[int, ...]:
    shape = parameter.get_partial_shape()
    return tuple(int(dim.get_length()) for dim in shape) if shape.is_static else ()


def _append(node: Any, new_rows: dict[str, Any]) -> Any:
    """``TensorScatter(past, Gather(Concat(moved, new), order), write)`` as ``Concat(past, new)``."""
    past, block = node.get_input(0), node.get_input(1)
    joined = block.get_node().input_value(0).get_node()
    if joined.get_type_name() != "Concat" or past.get_node().get_type_name() != "Parameter":
        raise ValueError("TensorScatter is not behind the commit recipe of a target")
    result = op.concat([past, joined.input_value(1)], 2)
    for name in past.get_names():
        new_rows[name] = result
    return result.outputs()


def _make_state(parameter: Any, appended: Any, beam: Any, path: Path) -> Any:
    """Put a state in the place of an input cache; returns its update."""
    shape = _cache_shape(parameter)
    uses = [
        target for target in parameter.output(0).get_target_inputs() if target.get_node().get_type_name() == "Concat"
    ]
    if len(shape) != 4 or appended is None or len(uses) != 1:
        raise BundleError(f"{path} is not a target graph: cache {parameter.get_friendly_name()} is not updated once")
    _, heads, _, width = shape
    kind = parameter.get_element_type()
    info = VariableInfo()
    info.data_shape = ov.PartialShape([-1, heads, -1, width])
    info.data_type = kind
    info.variable_id = parameter.get_friendly_name()
    variable = Variable(info)
    empty = op.constant(ov.Tensor(kind, ov.Shape([1, heads, 0, width])))
    state = op.gather(op.read_value(empty, variable), beam, op.constant(0, np.int32))
    (use,) = uses
    use.replace_source_output(state.output(0))
    return op.assign(use.get_node(), variable)


def _attention(node: Any) -> Any:
    """``Attention(query, key, value, mask)`` as the fused operator, [1, H, T, D] throughout."""
    query, key, value, mask = (node.get_input(index) for index in range(4))
    heads, kv_heads = (int(x.get_partial_shape()[1].get_length()) for x in (query, key))
    width = int(key.get_partial_shape()[3].get_length())

    def spread(rows: Any) -> Any:
        if heads == kv_heads:
            return rows
        grouped = op.unsqueeze(rows, op.constant([2], np.int64))
        shape = op.constant([1, 1, heads // kv_heads, 1, 1], np.int64)
        repeated = op.broadcast(grouped, shape, broadcast_spec="BIDIRECTIONAL")
        return op.reshape(repeated, op.constant([0, heads, -1, width], np.int64), True)

    scale = op.constant(node.get_attribute("scale"), query.get_element_type())
    return op.scaled_dot_product_attention(query, spread(key), spread(value), mask, scale, causal=False).outputs()


def _open_columns(model: ov.Model, slots: int, path: Path) -> Any:
    """Make the constant column index 0 .. S - 1 an input."""
    index = np.arange(slots)
    for node in model.get_ops():
        if node.get_type_name() != "Constant" or node.get_element_type() != ov.Type.i64:
            continue
        if tuple(node.get_output_shape(0)) == (slots,) and np.array_equal(node.data, index):
            columns = op.parameter([-1], np.int64, name=COLUMNS)
            for target in list(node.output(0).get_target_inputs()):
                target.replace_source_output(columns.output(0))
            return columns
    raise BundleError(f"{path} is not a target graph: its masks have no column index; build the bundle again")
