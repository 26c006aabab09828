"""Small ONNX files with external data in every place it may be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

DATA = "target.onnx.data"


def external(location: str | None = DATA, name: str = "w", **entries: object) -> TensorProto:
    """A float tensor of 4 elements with external data."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (({"location": location} if location is not None else {}) | entries).items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def graph(*initializers: TensorProto, nodes: list[onnx.NodeProto] | None = None, name: str = "g") -> onnx.GraphProto:
    return helper.make_graph(nodes or [], name, [], [], initializer=list(initializers))


def model(*initializers: TensorProto, **more: Any) -> bytes:
    return bytes(helper.make_model(graph(*initializers, **more)).SerializeToString())


def nested(attribute: dict[str, Any]) -> bytes:
    return model(nodes=[helper.make_node("If", ["c"], ["y"], **attribute)])


FIRST, SECOND = external("a", "a", offset=0, length=4), external("b", "b", offset=4)
SPARSE = onnx.SparseTensorProto(values=FIRST, indices=SECOND, dims=[9])


def _function() -> bytes:
    function = helper.make_function("d", "f", [], ["y"], [helper.make_node("Constant", [], ["y"], value=FIRST)], [])
    function.attribute_proto.append(helper.make_attribute("default", SECOND))
    proto = helper.make_model(graph(), functions=[function])
    return bytes(proto.SerializeToString())


def _sparse_initializer() -> bytes:
    proto = helper.make_model(graph())
    proto.graph.sparse_initializer.append(SPARSE)
    return bytes(proto.SerializeToString())


def _training() -> bytes:
    proto = helper.make_model(graph())
    proto.training_info.add(initialization=graph(FIRST), algorithm=graph(SECOND))
    return bytes(proto.SerializeToString())


PLACES: dict[str, Callable[[], bytes]] = {
    "initializers": lambda: model(FIRST, SECOND),
    "among inline ones": lambda: model(numpy_helper.from_array(np.ones(99, np.float32), "i"), FIRST, SECOND),
    "attributes": lambda: nested({"t": FIRST, "u": SECOND}),
    "attribute lists": lambda: nested({"t": [FIRST, SECOND]}),
    "subgraphs": lambda: nested({"then_branch": graph(FIRST), "else_branch": graph(SECOND)}),
    "subgraph lists": lambda: nested({"branches": [graph(FIRST), graph(SECOND)]}),
    "subgraph in a subgraph": lambda: nested(
        {"g": graph(FIRST, nodes=[helper.make_node("If", ["c"], ["y"], g=graph(SECOND))])}
    ),
    "functions": _function,
    "sparse attributes": lambda: nested({"s": SPARSE}),
    "sparse attribute lists": lambda: nested({"s": [SPARSE]}),
    "sparse initializers": _sparse_initializer,
    "training": _training,
}
