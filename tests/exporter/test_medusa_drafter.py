"""Medusa heads: torch module and exported graph against plain loops, and the drafter's trees."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray

from specexport.engines.ort_session import OrtGraph, open_session, session_options
from specexport.exporter.heads.export import export_medusa
from specexport.exporter.heads.modules import MedusaHeads
from specexport.exporter.heads.record import HeadLineage, MedusaRecord
from specexport.runtime.contract import DRAFT_LOGPROBS, DRAFT_TOKENS, FEATURES, NOISE
from specexport.runtime.drafters import DraftRequest
from specexport.runtime.drafters.medusa import MedusaDrafter
from specexport.runtime.errors import CheckpointError, UsageError

WIDTH, ROWS, K = 24, 61, 5
KINDS = {
    "own": {},
    "own-two-layers-gelu": {"num_layers": 2, "activation": "gelu_tanh", "block_bias": False},
    "shared-map": {"lm_head": "shared", "token_map": np.arange(ROWS) * 3 + 1},
    "target": {"lm_head": "target", "num_heads": 2},
}


def record(**changes: Any) -> MedusaRecord:
    base: dict[str, Any] = {
        "dialect": "test",
        "num_heads": 3,
        "num_layers": 1,
        "hidden_size": WIDTH,
        "vocab_size": ROWS,
        "block_bias": True,
        "activation": "silu",
        "lm_head": "own",
        "token_map": None,
        "lineage": HeadLineage(),
    }
    return MedusaRecord(**{**base, **changes})


class Weights:
    """Random tensors under the canonical names."""

    def __init__(self, heads: MedusaRecord) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tensors: dict[str, torch.Tensor] = {}
        for head in range(heads.num_heads):
            for block in range(heads.num_layers):
                place = f"heads.{head}.blocks.{block}."
                self.tensors[place + "weight"] = torch.randn(WIDTH, WIDTH, generator=generator) * 0.3
                if heads.block_bias:
                    self.tensors[place + "bias"] = torch.randn(WIDTH, generator=generator)
            if heads.lm_head == "own":
                self.tensors[f"heads.{head}.lm_head"] = torch.randn(ROWS, WIDTH, generator=generator)
        if heads.lm_head != "own":
            self.tensors["lm_head"] = torch.randn(ROWS, WIDTH, generator=generator)

    def names(self) -> Iterable[str]:
        return self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name]


def reference(heads: MedusaRecord, weights: Weights, state: list[float]) -> list[list[float]]:
    """Log probabilities of every head, written out in double precision."""

    def act(value: float) -> float:
        if heads.activation == "silu":
            return value / (1 + math.exp(-value))
        return 0.5 * value * (1 + math.tanh(math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)))

    rows = []
    for head in range(heads.num_heads):
        x = list(state)
        for block in range(heads.num_layers):
            matrix = weights.read(f"heads.{head}.blocks.{block}.weight").double().tolist()
            bias = (
                weights.read(f"heads.{head}.blocks.{block}.bias").double().tolist()
                if heads.block_bias
                else [0.0] * WIDTH
            )
            x = [x[i] + act(sum(matrix[i][j] * x[j] for j in range(WIDTH)) + bias[i]) for i in range(WIDTH)]
        name = f"heads.{head}.lm_head" if heads.lm_head == "own" else "lm_head"
        logits = [sum(w * v for w, v in zip(row, x, strict=True)) for row in weights.read(name).double().tolist()]
        top = max(logits)
        total = top + math.log(sum(math.exp(value - top) for value in logits))
        rows.append([value - total for value in logits])
    return rows


def write_target(folder: Path, weights: Weights) -> Path:
    """A graph file whose lm_head lies in a data file, as a target's does."""
    from specexport.exporter.graph_file import DataFile

    path = folder / "target.onnx"
    with DataFile(folder / "target.onnx.data") as data:
        data.append("before", torch.zeros(7))
        tensor = data.append("lm_head", weights.read("lm_head"))
    value = ir.Value(name="lm_head", const_value=tensor, shape=ir.Shape(tensor.shape), type=ir.TensorType(tensor.dtype))
    graph = ir.Graph([], [value], nodes=[], initializers=[value], name="target", opset_imports={"": 24})
    ir.save(ir.Model(graph, ir_version=10), path)
    return path


@pytest.mark.parametrize("kind", KINDS)
def test_module_and_graph_are_the_reference(kind: str, tmp_path: Path) -> None:
    heads = record(**KINDS[kind])
    weights = Weights(heads)
    target = write_target(tmp_path, weights) if heads.lm_head == "target" else tmp_path / "unused"
    path = tmp_path / "drafter.onnx"
    export_medusa(heads, weights, path, dtype=torch.float32, k=K, valid_vocab=ROWS - 2, target_graph=target)
    graph = OrtGraph(open_session(path, session_options(1), ["CPUExecutionProvider"]), "cpu")
    state = np.random.default_rng(0).standard_normal((1, WIDTH)).astype(np.float32)
    expected = np.array(reference(heads, weights, state[0].tolist()))
    if heads.token_map is None:
        expected = expected[:, : ROWS - 2]  # padding rows are never proposed
        expected -= np.log(np.exp(expected).sum(-1, keepdims=True))
    gumbel = np.random.default_rng(1).gumbel(size=expected.shape).astype(np.float32)
    for noise in (np.zeros_like(gumbel), gumbel):
        noisy = expected + noise
        noisy -= np.log(np.exp(noisy).sum(-1, keepdims=True))
        ranks = np.argsort(-noisy, axis=-1)[:, :K]
        outputs = graph.run({FEATURES: state, NOISE: noise})
        ids = ranks if heads.token_map is None else np.asarray(heads.token_map)[ranks]
        assert outputs[DRAFT_TOKENS].tolist() == ids.tolist()
        assert np.abs(outputs[DRAFT_LOGPROBS] - np.take_along_axis(noisy, ranks, -1)).max() < 1e-5
    if heads.lm_head == "target":
        assert not path.with_name("drafter.onnx.data").exists()  # nothing is stored twice


def test_a_tensor_of_another_shape_is_refused(tmp_path: Path) -> None:
    heads = record()
    weights = Weights(heads)
    weights.tensors["heads.1.blocks.0.weight"] = torch.zeros(WIDTH, WIDTH + 1)
    module = MedusaHeads(heads, torch.float32, K, ROWS)
    with pytest.raises(CheckpointError, match=r"heads\.1\.blocks\.0\.weight has shape"):
        [read() for _, read in module.values(weights)]


class FixedGraph:
    """Two heads with known probabilities."""

    calls = 0

    def run(self, inputs: Any) -> dict[str, NDArray[Any]]:
        self.calls += 1
        return {
            DRAFT_TOKENS: np.array([[10, 11, 12], [20, 21, 22]]),
            DRAFT_LOGPROBS: np.log(np.array([[0.6, 0.3, 0.05], [0.5, 0.4, 0.02]], np.float32)),
        }


def test_a_dynamic_tree_has_the_most_probable_paths() -> None:
    graph = FixedGraph()
    drafter = MedusaDrafter(graph, np.arange(30), heads=2, k=3)
    assert len(drafter.propose(DraftRequest(7, 8, 5))) == 1  # no state yet
    drafter.absorb(0, [7], np.ones((1, 4), np.float32))
    tree = drafter.propose(DraftRequest(7, 6, 5))
    # 0.6; 0.6 * 0.5 = 0.3 ties with 0.3; 0.6 * 0.4; 0.3 * 0.5
    paths = [[int(tree.tokens[index]) for index in tree.path(node)][1:] for node in range(1, 6)]
    assert paths[0] == [10]
    assert sorted(paths[1:]) == sorted([[10, 20], [11], [10, 21], [11, 20]])
    assert np.allclose(
        np.exp(tree.scores[1:]), [np.prod([{10: 0.6, 11: 0.3, 20: 0.5, 21: 0.4}[t] for t in p]) for p in paths]
    )
    assert len(drafter.propose(DraftRequest(7, 6, 1))) == 4  # depth 1: the three ranks of head 0
    assert graph.calls == 1  # one call a state, however often it is asked
    drafter.absorb(1, [8], np.ones((1, 4), np.float32))
    drafter.propose(DraftRequest(8, 6, 5))
    assert graph.calls == 2


def test_a_static_tree_has_its_paths() -> None:
    drafter = MedusaDrafter(FixedGraph(), np.arange(30), heads=2, k=3, tree=[(2,), (0,), (0, 1), (2, 2)])
    drafter.absorb(0, [7], np.ones((1, 4), np.float32))
    tree = drafter.propose(DraftRequest(7, 8, 5))
    assert tree.tokens.tolist() == [7, 10, 12, 21, 22]
    assert tree.parents.tolist() == [-1, 0, 0, 1, 2]
    assert drafter.propose(DraftRequest(7, 3, 5)).tokens.tolist() == [7, 10, 12]


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([(0, 0)], "no parent"),
        ([(0,), (0,)], "twice"),
        ([(0,), (0, 0), (0, 0, 0)], "1 to 2 ranks"),
        ([(3,)], "each from 0 to 2"),
    ],
)
def test_a_static_tree_that_cannot_be_filled(tree: list[tuple[int, ...]], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        MedusaDrafter(FixedGraph(), np.arange(30), heads=2, k=3, tree=tree)
