"""The lowering to ``specexport::TreeAttention``: its reference body computes what the exported graph does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from specexport.engines.ort import TARGET_FILE, OrtEngine
from specexport.engines.plugins.tree_attention import DOMAIN, INPUTS, OPERATOR, OUTPUTS
from specexport.exporter.passes import tree_attention
from specexport.runtime.bundle import Bundle
from specexport.runtime.cache import CacheRows
from specexport.runtime.engine import Step
from specexport.runtime.errors import SpecExportError
from tests.exporter.test_parity import reference, save_engine
from tests.tiny import LLAMA

LAYERS = LLAMA["num_hidden_layers"]


@pytest.fixture
def model(tiny_bundle: Bundle) -> ir.Model:
    """A target graph as exported."""
    return ir.load(tiny_bundle.path / TARGET_FILE)


def lowered_nodes(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type == OPERATOR]


def test_what_the_lowered_graph_is(model: ir.Model) -> None:
    before = [value.name for value in [*model.graph.inputs, *model.graph.outputs]]
    tree_attention.lower(model, [None] * LAYERS, body=True)
    assert [value.name for value in [*model.graph.inputs, *model.graph.outputs]] == before
    after = Counter(node.op_type for node in model.graph)
    assert after[OPERATOR] == LAYERS
    assert not {"Attention", "TensorScatter", "Where", "Range"} & after.keys()
    for layer, node in enumerate(lowered_nodes(model)):
        assert (node.domain, len(node.inputs), len(node.outputs)) == (DOMAIN, len(INPUTS), len(OUTPUTS))
        for kind, index in (("k", 1), ("v", 2)):
            past, present = node.inputs[2 + index], node.outputs[index]
            assert past is not None and (past.name, present.name) == (f"past_{kind}.{layer}", f"present_{kind}.{layer}")
    (function,) = model.functions.values()
    assert [value.name for value in function.inputs] == list(INPUTS)
    assert [value.name for value in function.outputs] == list(OUTPUTS)


def steps(seed: int, vocabulary: int, slots: int) -> list[Step]:
    """Calls of a decoding run: a prompt, then trees of which some nodes are accepted, so that rows move."""
    rng, rows = np.random.default_rng(seed), CacheRows()
    calls: list[Step] = []
    for nodes in (13, 1, 33, 7, 40):
        if rows.past + len(rows.commit) + nodes > slots:
            break
        tree, depth = np.eye(nodes, dtype=bool), np.zeros(nodes, np.int64)
        for node in range(1, nodes):
            parent = node - 1 if not calls else int(rng.integers(0, node))
            tree[node] |= tree[parent]
            depth[node] = depth[parent] + 1
        calls.append(
            Step(
                rng.integers(0, vocabulary, nodes),
                rows.past + depth,
                tree,
                rows.past,
                rows.write,
                rows.commit_array,
                np.arange(nodes),
            )
        )
        rows = rows.accept(np.flatnonzero(tree[nodes - 1]).tolist())
    return calls


@pytest.mark.parametrize("case", ["llama-gqa", "mistral-window", "gemma3"])
def test_the_reference_body_is_the_exported_graph(case: str, tmp_path: Path) -> None:
    """Bit for bit, logits and caches, over calls that commit, with trees of more than one word and windows."""
    _, config, weights = reference(case)
    save_engine(config, weights, tmp_path)
    model = ir.load(tmp_path / TARGET_FILE)
    tree_attention.lower(model, [layer.window for layer in config.layers], body=True)
    ir.save(model, tmp_path / "lowered.onnx")
    exported = OrtEngine(tmp_path, threads=1, lowered=False)
    lowered = OrtEngine(tmp_path, threads=1, lowered=False, graph="lowered.onnx")
    calls = steps(5, config.vocab_size, exported.slots)
    assert any(len(call.commit) for call in calls)
    assert any(len(call.tokens) > 32 for call in calls)
    for call in calls:
        assert np.array_equal(exported.run(call), lowered.run(call))
    for left, right in zip(exported.read_cache(40), lowered.read_cache(40), strict=True):
        assert np.array_equal(left, right)


def softcap(model: ir.Model) -> None:
    next(node for node in model.graph if node.op_type == "Attention").attributes["softcap"] = ir.AttrFloat32(
        "softcap", 3.0
    )


def cache_that_stays_inside(model: ir.Model) -> None:
    model.graph.outputs.remove(next(value for value in model.graph.outputs if value.name == "present_v.0"))


def one_layer_more(model: ir.Model) -> None:
    node = next(node for node in model.graph if node.op_type == "Attention")
    model.graph.append(ir.node("Attention", node.inputs, {"scale": 1.0}))


def input_renamed(model: ir.Model) -> None:
    next(value for value in model.graph.inputs if value.name == "order").name = "sequence"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (softcap, "softcap is 3.0, expected none"),
        (cache_that_stays_inside, "its cache 'present_v.0' is not from an input to an output"),
        (one_layer_more, "3 Attention nodes, expected 2"),
        (input_renamed, "the graph has no input order"),
    ],
)
def test_what_is_not_a_target_is_refused(model: ir.Model, change: Callable[[ir.Model], None], message: str) -> None:
    change(model)
    with pytest.raises(SpecExportError) as caught:
        tree_attention.lower(model, [None] * LAYERS, body=True)
    assert message in str(caught.value)


def test_windows_must_fit_the_masks(model: ir.Model) -> None:
    with pytest.raises(SpecExportError, match=r"the windows \[None, 8\] do not fit the masks"):
        tree_attention.lower(model, [None, 8], body=True)


def test_heads_without_a_kernel_are_refused(model: ir.Model) -> None:
    with pytest.raises(SpecExportError, match="heads of width 16, expected one of"):
        tree_attention.lower(model, [None] * LAYERS)
