"""The lowering for the CPU: what it makes of a target graph, and that it refuses everything else."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from numpy.typing import NDArray

from specexport.engines.ort import CPU_COMMIT_FILE, CPU_SPARE_ROWS, CPU_TARGET_FILE, TARGET_FILE, OrtEngine
from specexport.exporter.config import TargetConfig
from specexport.exporter.lower import lower_target
from specexport.exporter.passes import grouped_query
from specexport.runtime import contract
from specexport.runtime.bundle import Bundle
from specexport.runtime.cache import CacheRows
from specexport.runtime.engine import Step
from specexport.runtime.errors import SpecExportError
from specexport.runtime.tree import Tree
from tests.exporter.test_parity import SLOTS, reference, save_engine
from tests.tiny import LLAMA

WINDOW = 128
LAYERS = LLAMA["num_hidden_layers"]


@pytest.fixture
def model(tiny_bundle: Bundle) -> ir.Model:
    """A target graph as exported."""
    return ir.load(tiny_bundle.path / TARGET_FILE)


def lower(model: ir.Model, slots: int = WINDOW, windows: Sequence[int | None] = (None,) * LAYERS) -> ir.Model:
    """The lowering, with tables kept in memory."""

    def put(name: str, data: NDArray[np.uint8], kind: ir.DataType, shape: tuple[int, ...]) -> ir.TensorProtocol:
        return ir.Tensor(data.reshape(-1).view(kind.numpy()).reshape(shape), dtype=kind, name=name)

    return grouped_query.lower(model, slots, windows, put)


def first(model: ir.Model, op_type: str) -> ir.Node:
    return next(node for node in model.graph if node.op_type == op_type)


def parent(node: ir.Node, *path: int) -> ir.Node:
    """The node reached by following inputs."""
    for index in path:
        value = node.inputs[index]
        assert value is not None
        found = value.producer()
        assert found is not None
        node = found
    return node


def names(values: object) -> list[str | None]:
    return [value.name for value in values]  # type: ignore[attr-defined]


def test_what_the_lowered_graph_is(model: ir.Model) -> None:
    before = Counter(node.op_type for node in model.graph)
    outputs = names(model.graph.outputs)
    assert lower(model) is model
    after = Counter(node.op_type for node in model.graph)
    assert (before["Attention"], before["TensorScatter"]) == (LAYERS, 2 * LAYERS)
    assert (after["Attention"], after["TensorScatter"], after["GroupQueryAttention"]) == (0, 0, LAYERS)
    assert after["Transpose"] == 0 and after["MatMul"] == before["MatMul"]  # in floating point none are joined
    assert before["RotaryEmbedding"] == 2 * LAYERS and after["RotaryEmbedding"] == 0
    for node in model.graph:
        if node.op_type == "GroupQueryAttention":
            assert node.attributes["do_rotary"].as_int() == 1
            table = node.inputs[7]
            assert table is not None and table.shape is not None and table.shape[0] == WINDOW + CPU_SPARE_ROWS
    moved = {contract.WRITE, contract.COMMIT, contract.ORDER}
    caches = contract.cache_names(LAYERS)
    kept = [name for name in contract.STEP_INPUTS if name not in moved]
    assert names(model.graph.inputs) == [*kept, *(past for past, _ in caches)]
    assert names(model.graph.outputs) == outputs == [contract.LOGITS, *(present for _, present in caches)]
    for value in [*model.graph.inputs, *model.graph.outputs]:
        if value.name in {name for pair in caches for name in pair}:
            assert value.shape is not None and value.shape[2] == WINDOW + CPU_SPARE_ROWS
    assert model.opset_imports["com.microsoft"] == 1


def test_the_bundle_holds_that_graph_and_shares_its_weights(tiny_bundle: Bundle) -> None:
    lowered = ir.load(tiny_bundle.path / CPU_TARGET_FILE)
    exported = ir.load(tiny_bundle.path / TARGET_FILE)

    def places(model: ir.Model) -> dict[str, tuple[str, int | None]]:
        tensors = {name: value.const_value for name, value in model.graph.initializers.items()}
        return {
            name: (os.fspath(tensor.location), tensor.offset)
            for name, tensor in tensors.items()
            if isinstance(tensor, ir.ExternalTensor)
        }

    own = {name for name in places(lowered) if name.endswith(".longer")}  # tables of the rotation
    shared = {name: place for name, place in places(lowered).items() if name not in own}
    assert shared.items() <= places(exported).items() and len(shared) > 7 * LAYERS
    assert (tiny_bundle.path / CPU_TARGET_FILE).stat().st_size < 100_000
    assert (tiny_bundle.path / CPU_COMMIT_FILE).stat().st_size < 10_000


def no_mask(model: ir.Model) -> None:
    first(model, "Attention").replace_input_with(3, None)


def no_scale(model: ir.Model) -> None:
    del first(model, "Attention").attributes["scale"]


def softcap(model: ir.Model) -> None:
    first(model, "Attention").attributes["softcap"] = ir.AttrFloat32("softcap", 30.0)


def causal(model: ir.Model) -> None:
    first(model, "Attention").attributes["is_causal"] = ir.AttrInt64("is_causal", 1)


def interleaved(model: ir.Model) -> None:
    first(model, "RotaryEmbedding").attributes["interleaved"] = ir.AttrInt64("interleaved", 1)


def key_without_cache(model: ir.Model) -> None:
    attention = first(model, "Attention")
    attention.replace_input_with(1, parent(attention, 1).inputs[0])


def other_cache_update(model: ir.Model) -> None:
    parent(first(model, "Attention"), 2).op_type = "ScatterElements"


def block_without_order(model: ir.Model) -> None:
    scatter = parent(first(model, "Attention"), 1)
    scatter.replace_input_with(1, parent(scatter, 1).inputs[0])


def block_without_commit(model: ir.Model) -> None:
    gather = parent(first(model, "Attention"), 1, 1)
    gather.replace_input_with(0, parent(gather, 0).inputs[1])


def cache_that_stays_inside(model: ir.Model) -> None:
    model.graph.outputs.remove(next(value for value in model.graph.outputs if value.name == "present_v.0"))


def query_without_transpose(model: ir.Model) -> None:
    rotary = parent(first(model, "Attention"), 0)
    rotary.replace_input_with(0, parent(rotary, 0).inputs[0])


def mask_without_choice(model: ir.Model) -> None:
    attention = first(model, "Attention")
    mask = parent(attention, 3, 0, 0)
    mask.op_type = "Add"


def result_used_twice(model: ir.Model) -> None:
    attention = first(model, "Attention")
    extra = ir.node("Identity", [attention.outputs[0]])
    model.graph.append(extra)
    model.graph.outputs.append(extra.outputs[0])


def result_not_merged(model: ir.Model) -> None:
    (user,) = (user for user, _ in first(model, "Attention").outputs[0].uses())
    user.op_type = "Identity"


def write_used_elsewhere(model: ir.Model) -> None:
    write = next(value for value in model.graph.inputs if value.name == contract.WRITE)
    extra = ir.node("Identity", [write])
    model.graph.append(extra)
    model.graph.outputs.append(extra.outputs[0])


def input_renamed(model: ir.Model) -> None:
    next(value for value in model.graph.inputs if value.name == contract.PAST).name = "length"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (no_mask, "'attention': expected query, key, value, mask and a scale"),
        (no_scale, "'attention': expected query, key, value, mask and a scale"),
        (softcap, "'attention': softcap is 30.0, expected none"),
        (causal, "'attention': is_causal is 1, expected none"),
        (interleaved, "'attention': expected half-split RotaryEmbedding, found interleaved"),
        (key_without_cache, "'attention': expected TensorScatter, found an input"),
        (other_cache_update, "'attention': expected TensorScatter, found ScatterElements"),
        (block_without_order, "'attention': expected Gather, found Concat"),
        (block_without_commit, "'attention': expected Concat, found RotaryEmbedding"),
        (cache_that_stays_inside, "'attention': its cache 'present_v.0' is not from an input to an output"),
        (query_without_transpose, "'attention': expected Transpose, found Reshape"),
        (mask_without_choice, "'attention': expected Where, found Add"),
        (result_used_twice, "'attention': expected one Transpose after Attention"),
        (result_not_merged, "'attention': expected one Transpose after Attention"),
        (write_used_elsewhere, "inputs write are still used after lowering"),
        (input_renamed, "the graph has no input past"),
    ],
)
def test_what_is_not_a_target_is_refused(model: ir.Model, change: Callable[[ir.Model], None], message: str) -> None:
    change(model)
    with pytest.raises(SpecExportError) as caught:
        lower(model)
    assert message in str(caught.value)


def test_the_slots_must_be_those_of_the_graph(model: ir.Model) -> None:
    with pytest.raises(SpecExportError, match=f"caches have not {WINDOW // 2} rows"):
        lower(model, WINDOW // 2)


@pytest.mark.parametrize("name", [CPU_TARGET_FILE, CPU_COMMIT_FILE])
def test_a_graph_is_lowered_once(tiny_bundle: Bundle, name: str) -> None:
    with pytest.raises(SpecExportError, match="not a target graph, or was lowered already"):
        lower(ir.load(tiny_bundle.path / name))


def grouped(folder: Path) -> list[ir.Node]:
    return [node for node in ir.load(folder / CPU_TARGET_FILE).graph if node.op_type == "GroupQueryAttention"]


def save(case: str, folder: Path) -> TargetConfig:
    _, config, weights = reference(case)
    save_engine(config, weights, folder)
    lower_target(folder, config, SLOTS, "fp32")
    return config


def test_sliding_windows_keep_a_mask_of_their_own(tmp_path: Path) -> None:
    """Layers of one window share one mask; the operator's own window, which knows no trees, is not used."""
    config = save("gemma3", tmp_path)
    masks: dict[int | None, set[str | None]] = {}
    for node, layer in zip(grouped(tmp_path), config.layers, strict=True):
        assert "local_window_size" not in node.attributes
        mask = node.inputs[10]
        assert mask is not None
        masks.setdefault(layer.window, set()).add(mask.name)
    assert len(masks) == 2 and all(len(found) == 1 for found in masks.values())
    assert len(set.union(*masks.values())) == 2


def test_a_window_counts_positions_not_rows(tmp_path: Path) -> None:
    """Siblings have one position: a wide, flat tree must not push committed rows out of the window."""
    config = save("mistral-window", tmp_path)
    window = config.layers[0].window
    assert window is not None
    lowered, exported = OrtEngine(tmp_path, threads=1), OrtEngine(tmp_path, threads=1, lowered=False)
    rng = np.random.default_rng(0)
    prompt, nodes = rng.integers(0, config.vocab_size, 20), rng.integers(0, config.vocab_size, window + 4)
    size = len(nodes)
    parents = np.where(np.arange(size) == 0, -1, 0)
    found = []
    for engine in (lowered, exported):
        engine.run(Step.chain(prompt, select=[19]))
        found.append(engine.run(Step.of(Tree(nodes, parents), CacheRows(20))).copy())
        for node in (1, size - 1):  # the same as alone under the root
            alone = engine.run(Step.chain(nodes[[0, node]], 20, [1]))
            assert np.abs(alone[0] - found[-1][node]).max() < 1e-4
    assert np.abs(found[0] - found[1]).max() < 1e-4


def test_a_window_as_long_as_the_cache_is_none(model: ir.Model) -> None:
    lower(model, windows=[WINDOW, None])
    masks = {node.inputs[10] for node in model.graph if node.op_type == "GroupQueryAttention"}
    assert len(masks) == 1 and not any(node.op_type == "Less" for node in model.graph)


@pytest.mark.parametrize("case", ["llama-mqa-head-dim", "mistral-window"])
def test_the_first_call_may_be_a_tree(case: str, tmp_path: Path) -> None:
    """The operator makes up the positions of what it takes for a first prompt."""
    config = save(case, tmp_path)
    parents = np.array([-1, 0, 0, 1, 1, 2, 5])
    tree = Tree(np.random.default_rng(0).integers(0, config.vocab_size, 7), parents)
    found = [
        OrtEngine(tmp_path, threads=1, lowered=lowered).run(Step.of(tree, CacheRows())) for lowered in (True, False)
    ]
    assert np.abs(found[0] - found[1]).max() < 1e-4


def test_norms_of_heads_stay_in_front_of_the_rotation(tmp_path: Path) -> None:
    config = save("qwen3", tmp_path)
    assert config.qk_norm
    for node in grouped(tmp_path):
        for index in (0, 1):
            norm = parent(node, index)  # on flat rows: no split into heads and back
            assert norm.op_type == "BranchwiseRMSNorm" and parent(norm, 0).op_type == "MatMul"
            assert norm.attributes["num_branches"].as_int() == (config.num_heads, config.num_kv_heads)[index]
        assert node.attributes["do_rotary"].as_int() == 1
        assert node.attributes["num_heads"].as_int() == config.num_heads
        assert node.attributes["kv_num_heads"].as_int() == config.num_kv_heads


def test_partial_rotation_keeps_its_width(tmp_path: Path) -> None:
    config = save("phi3-partial", tmp_path)
    rotary = parent(grouped(tmp_path)[0], 0)
    assert rotary.attributes["rotary_embedding_dim"].as_int() == config.ropes[0].rotary_dim < config.head_dim


@pytest.mark.parametrize("dtype", [ir.DataType.FLOAT, ir.DataType.FLOAT16])
def test_the_commit_graph_states_its_caches(dtype: ir.DataType) -> None:
    model = grouped_query.commit_model(3, 2, 8, 32, dtype)
    caches = contract.cache_names(3)
    assert names(model.graph.inputs) == [contract.WRITE, contract.COMMIT, *(past for past, _ in caches)]
    assert names(model.graph.outputs) == [present for _, present in caches]
    for value in [*list(model.graph.inputs)[2:], *model.graph.outputs]:
        assert value.dtype == dtype and value.shape == (1, 2, 32 + CPU_SPARE_ROWS, 8)
