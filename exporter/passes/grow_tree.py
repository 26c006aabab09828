"""Lowering of recurrent drafters of one layer to our own operator ``specexport::GrowTree`` (``engines/kernels``).

Requires: a drafter's graph of ``passes.kernels`` with the description of its layer that ``exporter.heads.export`` left
(:class:`Layer`). Ensures: the same inputs and outputs, and the same tree but for rounding, of at most as many nodes:
the operator leaves out depths that are hardly ever reached. What grows the tree, most of an unrolled graph's nodes, is
one node then, and the layer on the new rows has ``TreeAttention``, so nothing is copied or transposed any more.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from specexport.engines.ort import GROW_TREE
from specexport.exporter.passes.graph import constant
from specexport.exporter.passes.kernels import DOMAIN, GELU_TANH, SILU, take
from specexport.exporter.quantize.insert import ORDER
from specexport.runtime import contract

#: Metadata of a drafter's graph: the :class:`Layer` in it, as JSON.
LAYER = "specexport.layer"
#: A depth is drafted if the nodes it expands are right this often, all together. It brings half of that in tokens, as
#: what is right is right again half the time; one of EAGLE-3 beside an int8 target takes a twentieth of a step.
LEAST = 0.1

_GATES = {"silu": SILU, "gelu_tanh": GELU_TANH}
#: Matrices by their names in the operator, and the tensor of the graph that theirs begins with.
_MATRICES = {
    "fuse": "fuse.weight.",
    "qkv": "layers.0.attention.q_proj.weight.joined.",
    "output": "layers.0.attention.o_proj.weight.",
    "gate_up": "layers.0.mlp.gate_proj.weight.joined.",
    "down": "layers.0.mlp.down_proj.weight.",
    "lm_head": "lm_head.",
}
#: Tensors of the graph in the order of the operator's inputs.
_TABLES = ("rope_cos", "rope_sin", "embedding", "embedding.codes", "embedding.scales", "draft_to_target")
_NORMS = (
    "embedding_norm.weight",
    "hidden_norm.weight",
    "layers.0.input_norm.weight",
    "layers.0.mlp_norm.weight",
    "norm.weight",
    "layers.0.attention.q_norm.weight",
    "layers.0.attention.k_norm.weight",
)


@dataclass(frozen=True, slots=True)
class Layer:
    """What the names of tensors do not say of a drafter with one decoder layer and a dynamic tree.

    Attributes:
        fused: embedding and hidden state are projected by ``fuse``; else the layer's attention reads both side by side.
        hidden_first: of the two. norm_residual: the residual is the normed hidden state.
        feed_normed: what is fed back is normed. depth, topk, nodes: of its tree.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    epsilon: float
    activation: str
    fused: bool
    hidden_first: bool
    norm_residual: bool
    feed_normed: bool
    depth: int
    topk: int
    nodes: int

    def note(self, model: ir.Model) -> None:
        """Leave the description in a graph."""
        model.metadata_props[LAYER] = json.dumps(asdict(self))


def lower(model: ir.Model, least: float = LEAST) -> bool:
    """Lower ``model`` in place; False, and it stays as it is, where the operator does not take it.

    Args:
        least: see :data:`LEAST`; 0 drafts every depth.
    """
    graph = model.graph
    if LAYER not in model.metadata_props:
        return False
    layer = Layer(**json.loads(model.metadata_props[LAYER]))
    products = {name: _first(graph, stem) for name, stem in _MATRICES.items()}
    lm_head, qkv, output = products["lm_head"], products["qkv"], products["output"]
    missing = [name for name, node in products.items() if node is None and (name != "fuse" or layer.fused)]
    rotary = next((node for node in graph if node.op_type == "RotaryEmbedding"), None)
    gate = _GATES.get(layer.activation)
    if missing or lm_head is None or qkv is None or output is None or rotary is None or gate is None:
        return False
    together = (layer.heads + 2 * layer.kv_heads) * layer.head_dim
    gate_up = products["gate_up"]
    if qkv.attributes["N"].as_int() != together or gate_up is None or gate_up.attributes["gate"].as_int() != gate:
        return False
    state = _state(lm_head, normed=layer.feed_normed)
    tables = [_floats(graph, name) for name in _TABLES]
    if state is None or "embedding.zeros" in graph.initializers or (tables[2] is None) == (tables[3] is None):
        return False
    if any(name.endswith(f".{ORDER}") for name in graph.initializers):
        return False  # a product whose columns are in another order
    inputs, outputs = _named(graph.inputs), _named(graph.outputs)
    norms = [_floats(graph, name) for name in _NORMS]
    attributes: dict[str, int | float] = {
        "num_heads": layer.heads,
        "kv_num_heads": layer.kv_heads,
        "scale": layer.scale,
        "epsilon": layer.epsilon,
    }
    caches = _attend(graph, qkv, output, rotary, [*tables[:2], *norms[-2:]], attributes)
    attributes |= {
        "topk": layer.topk,
        "depth": layer.depth,
        "nodes": layer.nodes,
        "gate": gate,
        "hidden_first": int(layer.hidden_first),
        "norm_residual": int(layer.norm_residual),
        "feed_normed": int(layer.feed_normed),
        "least": least,
    }
    stored: list[ir.Value | None] = []
    for name, node in products.items():
        stored += [None if node is None else _input(node, place) for place in (1, 2, 3)]
        for its, own in (("width", "K"), ("bits", "bits"), ("block", "block_size")):
            attributes[f"{name}_{its}"] = 0 if node is None else node.attributes[own].as_int()
    names = (contract.NOISE, contract.PAST, contract.TOKENS)
    given = [lm_head.outputs[0], state, *(inputs[name] for name in names), *caches]
    grown = ir.node(GROW_TREE, [*given, *tables, *norms, *stored], attributes, domain=DOMAIN, num_outputs=3)
    graph.append(grown)
    for name, new in zip(
        (contract.DRAFT_TOKENS, contract.DRAFT_PARENTS, contract.DRAFT_LOGPROBS), grown.outputs, strict=True
    ):
        take(outputs[name], new)
        new.shape = ir.Shape(["drafted"])
    passes.RemoveUnusedNodesPass()(model)
    passes.TopologicalSortPass()(model)
    return True


def _named(values: Iterable[ir.Value]) -> dict[str, ir.Value]:
    return {value.name: value for value in values if value.name is not None}


def _input(node: ir.Node, place: int) -> ir.Value | None:
    """An input of a node; those that are left out may be missing at the end."""
    return node.inputs[place] if place < len(node.inputs) else None


def _first(graph: ir.Graph, stem: str) -> ir.Node | None:
    """The first product with a matrix whose name begins so."""
    for node in graph:
        codes = node.inputs[1] if node.op_type == "QuantizedProduct" else None
        if codes is not None and (codes.name or "").startswith(stem):
            return node
    return None


def _floats(graph: ir.Graph, name: str) -> ir.Value | None:
    """An initializer that the operator reads; None if there is none, or one of another type."""
    value = graph.initializers.get(name)
    wanted = {"embedding.codes": ir.DataType.INT8, "draft_to_target": ir.DataType.INT64}
    return value if value is not None and value.dtype == wanted.get(name, ir.DataType.FLOAT) else None


def _state(lm_head: ir.Node, *, normed: bool) -> ir.Value | None:
    """What the root feeds back: what its lm_head reads, before or after the norm."""
    value, gamma = _input(lm_head, 0), _input(lm_head, 4)
    if gamma is not None:  # the norm is a part of the product
        return None if normed else value
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "RMSNormalization":
            return value if normed else node.inputs[0]
        if node.op_type == "SkipSimplifiedLayerNormalization":
            return value if normed else node.outputs[3]
        if node.op_type not in ("Gather", "Reshape", "Squeeze"):
            break
        value = node.inputs[0]
    return value


def _attend(
    graph: ir.Graph,
    qkv: ir.Node,
    output: ir.Node,
    rotary: ir.Node,
    parts: Sequence[ir.Value | None],
    attributes: dict[str, int | float],
) -> list[ir.Value]:
    """Attention of the new rows, a chain, in one node, of which the last is read; returns the caches with them.

    Args:
        parts: cos, sin, and the norms of queries and keys.
    """
    inputs, outputs = _named(graph.inputs), _named(graph.outputs)
    pasts = [contract.past_name(kind, 0) for kind in "kv"]
    cos, sin, query_norm, key_norm = parts
    node = ir.node(
        "TreeAttention",
        [
            qkv.outputs[0],
            None,
            None,
            *(inputs[name] for name in pasts),
            cos,
            sin,
            rotary.inputs[3],
            inputs[contract.PAST],
            None,
            query_norm,
            key_norm,
        ],
        {**attributes, "window": 0},
        domain=DOMAIN,
        num_outputs=3,
    )
    newest = ir.node("Gather", [node.outputs[0], constant(graph, "newest", np.array([-1], np.int64))], {"axis": 1})
    graph.insert_after(qkv, [node, newest])
    output.replace_input_with(0, newest.outputs[0])
    for name, new in zip(pasts, node.outputs[1:], strict=True):
        take(outputs[name.replace("past", "present", 1)], new)
    return list(node.outputs[1:])
