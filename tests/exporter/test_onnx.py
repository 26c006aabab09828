"""The exported graph's face (names, shapes, operators), and how weights get into it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from onnx import TensorProto

from specexport.engines.ort import CPU_COMMIT_FILE, CPU_TARGET_FILE, TARGET_FILE
from specexport.exporter.config import read_config
from specexport.exporter.graph_file import ALIGNMENT, INLINE_BYTES
from specexport.exporter.layers import Target
from specexport.exporter.onnx import export_target, save_target
from specexport.exporter.quantize.plan import FLOATS
from specexport.exporter.weights import WeightSource
from specexport.runtime import contract
from specexport.runtime.bundle import Bundle
from specexport.runtime.errors import SpecExportError
from tests.tiny import LLAMA, llama_tensors

CONFIG = read_config(LLAMA)
SLOTS = 32
LAYERS = LLAMA["num_hidden_layers"]
GRAPHS = (TARGET_FILE, CPU_TARGET_FILE, CPU_COMMIT_FILE)


class Weights:
    """A :class:`WeightSource` that remembers what was read."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.reads: list[str] = []

    def names(self) -> Iterable[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str) -> torch.Tensor:
        self.reads.append(name)
        return self.tensors[name]


@pytest.fixture(scope="module")
def exported() -> tuple[ir.Model, Target]:
    return export_target(CONFIG, SLOTS, torch.float32)


def save(exported: tuple[ir.Model, Target], weights: WeightSource, folder: Path) -> ir.Model:
    save_target(*exported, weights, folder / TARGET_FILE)
    return ir.load(folder / TARGET_FILE)


def test_inputs_and_outputs_are_the_contract(tiny_bundle: Bundle) -> None:
    graph = ir.load(tiny_bundle.path / TARGET_FILE).graph
    cache = [1, LLAMA["num_key_value_heads"], 128, 16]
    caches = contract.cache_names(LAYERS)
    integers, floats = ir.DataType.INT64, ir.DataType.FLOAT
    expected = {
        "tokens": (integers, [1, "T"]),
        "positions": (integers, [1, "T"]),
        "tree": (ir.DataType.BOOL, [1, "T", "T"]),
        "past": (integers, [1]),
        "write": (integers, [1]),
        "commit": (integers, ["A"]),
        "order": (integers, ["O"]),
        "select": (integers, ["R"]),
    } | {past: (floats, cache) for past, _ in caches}
    results = {"logits": (floats, ["R", LLAMA["vocab_size"]])} | {present: (floats, cache) for _, present in caches}

    def faces(values: Iterable[ir.Value]) -> dict[str | None, tuple[object, list[object]]]:
        return {v.name: (v.dtype, [d if isinstance(d, int) else d.value for d in v.shape or ()]) for v in values}

    assert faces(graph.inputs) == expected and list(faces(graph.inputs)) == list(expected)
    assert faces(graph.outputs) == results and list(faces(graph.outputs)) == list(results)


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_are_valid_and_standard(tiny_bundle: Bundle, name: str) -> None:
    path = tiny_bundle.path / name
    onnx.checker.check_model(os.fspath(path))
    model = onnx.load(path, load_external_data=False)
    assert {opset.domain: opset.version for opset in model.opset_import}[""] == 24
    domains = {node.domain for node in model.graph.node}
    assert domains == ({"", "com.microsoft"} if name == CPU_TARGET_FILE else {""})
    assert not model.functions


@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_tell_nothing_of_the_machine(tiny_bundle: Bundle, tiny_checkpoint: Path, name: str) -> None:
    raw = (tiny_bundle.path / name).read_bytes()
    repository = Path(contract.__file__).parent.parent
    for trace in (tiny_checkpoint.parent, repository, Path(torch.__file__).parent, Path.home()):
        assert os.fsencode(trace) not in raw
    assert b".py" not in raw and b"torch" not in raw and b"site-packages" not in raw
    model = onnx.load_from_string(raw)
    assert model.producer_name == "specexport" and not model.metadata_props and not model.doc_string
    assert not model.graph.metadata_props and not model.graph.doc_string
    for node in model.graph.node:
        assert not node.metadata_props and not node.doc_string
    for value in [*model.graph.input, *model.graph.output, *model.graph.value_info, *model.graph.initializer]:
        assert not value.metadata_props and not value.doc_string


def test_weights_lie_once_and_aligned(tiny_bundle: Bundle) -> None:
    model = onnx.load(tiny_bundle.path / TARGET_FILE, load_external_data=False)
    end, size = 0, (tiny_bundle.path / "target.onnx.data").stat().st_size
    external = [t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL]
    for tensor in sorted(external, key=lambda t: int({e.key: e.value for e in t.external_data}["offset"])):
        place = {entry.key: entry.value for entry in tensor.external_data}
        offset, length = int(place["offset"]), int(place["length"])
        assert place["location"] == "target.onnx.data" and offset % ALIGNMENT == 0 == ALIGNMENT % 4096
        assert end <= offset < end + ALIGNMENT and length >= INLINE_BYTES
        assert length == 4 * np.prod(tensor.dims)
        end = offset + length
    assert end == size
    # Tied embeddings are one table, used by the lookup and the last product.
    rows = [t for t in model.graph.initializer if LLAMA["vocab_size"] in t.dims]
    assert len(rows) == 1
    assert sorted(n.op_type for n in model.graph.node if rows[0].name in n.input) == ["Gather", "Gemm"]


def test_each_operator_is_one_node(tiny_bundle: Bundle) -> None:
    """Spelled out in small operators, no backend would fuse them again."""
    counts = Counter(node.op_type for node in ir.load(tiny_bundle.path / TARGET_FILE).graph)
    assert counts["Attention"] == LAYERS and counts["TensorScatter"] == 2 * LAYERS
    assert counts["RotaryEmbedding"] == 2 * LAYERS and counts["RMSNormalization"] == 2 * LAYERS + 1
    assert counts["MatMul"] == 7 * LAYERS and counts["Gemm"] == 1
    assert counts["Softmax"] == counts["Cast"] == counts["Expand"] == counts["Identity"] == 0


def test_the_mask_is_made_once(tiny_bundle: Bundle) -> None:
    graph = ir.load(tiny_bundle.path / TARGET_FILE).graph
    masks = {node.inputs[3] for node in graph if node.op_type == "Attention"}
    assert len(masks) == 1
    assert sum(node.op_type == "Where" for node in graph) == 1


def test_weights_are_written_one_by_one_as_matrix_operands(exported: tuple[ir.Model, Target], tmp_path: Path) -> None:
    weights = Weights(llama_tensors(LLAMA))
    progress: list[int] = []
    save_target(*exported, weights, tmp_path / TARGET_FILE, progress.append)
    assert sorted(os.listdir(tmp_path)) == [TARGET_FILE, TARGET_FILE + ".data"]
    assert Counter(weights.reads) == Counter(weights.names())  # each once
    assert len(progress) == len(weights.reads) + 2  # and two tables of the rotation
    found = ir.load(tmp_path / TARGET_FILE).graph.initializers
    for name in ("self_attn.q_proj", "mlp.down_proj"):
        ours = name.replace("self_attn", "attention")
        value = found[f"layers.1.{ours}.weight"].const_value
        assert value is not None
        assert np.array_equal(value.numpy(), weights.tensors[f"model.layers.1.{name}.weight"].numpy().T)


def test_small_tensors_stay_in_the_graph(exported: tuple[ir.Model, Target], tmp_path: Path) -> None:
    for name, value in save(exported, Weights(llama_tensors(LLAMA)), tmp_path).graph.initializers.items():
        tensor = value.const_value
        assert tensor is not None
        assert isinstance(tensor, ir.ExternalTensor) == (tensor.nbytes >= INLINE_BYTES), name
        if isinstance(tensor, ir.ExternalTensor):
            assert tensor.offset is not None and tensor.offset % ALIGNMENT == 0


def test_a_graph_can_be_filled_again(exported: tuple[ir.Model, Target], tmp_path: Path) -> None:
    """Nothing of the first weights is left in it."""
    for part, seed in (("a", 0), ("b", 1)):
        (tmp_path / part).mkdir()
        model = save(exported, Weights(llama_tensors(LLAMA, seed)), tmp_path / part)
        tensor = model.graph.initializers["embedding"].const_value
        assert tensor is not None
        assert np.array_equal(tensor.numpy(), llama_tensors(LLAMA, seed)["model.embed_tokens.weight"].numpy())


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_tensors_that_do_not_fit_are_refused(change: str, exported: tuple[ir.Model, Target], tmp_path: Path) -> None:
    tensors = llama_tensors(LLAMA)
    if change == "missing":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    elif change == "unknown":
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2)
    else:
        tensors["model.norm.weight"] = torch.zeros(65)
    weights = Weights(tensors)
    with pytest.raises(SpecExportError, match=r"up_proj|model\.norm\.weight"):
        save(exported, weights, tmp_path)
    if change != "shape":  # names are checked before the first tensor is read
        assert weights.reads == []
    assert not (tmp_path / TARGET_FILE).exists()


def test_tracing_gives_the_same_graph_again(exported: tuple[ir.Model, Target], tmp_path: Path) -> None:
    for part, graph in (("a", exported), ("b", export_target(CONFIG, SLOTS, FLOATS["fp32"]))):
        (tmp_path / part).mkdir()
        save(graph, Weights(llama_tensors(LLAMA)), tmp_path / part)
    for name in (TARGET_FILE, TARGET_FILE + ".data"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
