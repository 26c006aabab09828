"""Recurrent drafters: torch module and exported graph against plain loops in double precision."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from specexport.exporter.graph_file import DataFile
from specexport.exporter.heads.export import export_recurrent
from specexport.exporter.heads.record import RecurrentRecord
from specexport.exporter.heads.trees import DynamicTree, StaticTree
from specexport.exporter.quantize import insert
from specexport.exporter.quantize.record import Quantized
from specexport.runtime.contract import DRAFT_LOGPROBS, DRAFT_PARENTS, DRAFT_TOKENS
from tests.exporter.draft_reference import (
    CASES,
    SLOTS,
    VOCAB,
    WIDTH,
    Drafted,
    Weights,
    distance,
    drafted,
    expected,
    module_of,
    random_input,
    record,
    run_graph,
)

PROPOSAL = (DRAFT_TOKENS, DRAFT_PARENTS, DRAFT_LOGPROBS)
DYNAMIC = DynamicTree(depth=4, topk=3, nodes=9)
#: The parent's rank, depth and children count all vary; a node with children comes after one without.
STATIC = StaticTree(((0,), (2,), (3,), (0, 1), (2, 0), (3, 0), (3, 2), (2, 0, 4), (3, 2, 0), (3, 2, 1), (3, 2, 1, 0)))
#: A static tree is the same code for every dialect.
STATIC_CASES = ("eagle1", "eagle3-each-bias")


@pytest.mark.parametrize(
    ("case", "tree"),
    [*((case, DYNAMIC) for case in CASES), *((case, STATIC) for case in STATIC_CASES)],
    ids=[*CASES, *(f"{case}-static" for case in STATIC_CASES)],
)
def test_module_and_graph_are_the_reference(case: str, tree: DynamicTree | StaticTree, tmp_path: Path) -> None:
    """Three calls in a row: a prompt, then accepted paths of two and one tokens, the last two with noise."""
    heads = record(case)
    valid = VOCAB - 3
    weights = Weights.random(heads)
    module = module_of(heads, weights, tree, valid=valid)
    run = run_graph(export(heads, weights, tree, tmp_path / "drafter.onnx", valid), heads)
    features, tokens = random_input(heads, 9)
    blocks = heads.blocks
    caches = [torch.zeros(1, blocks.num_kv_heads, SLOTS, blocks.head_dim) for _ in range(2 * blocks.num_layers)]
    rng = np.random.default_rng(2)
    for past, end, scale in ((0, 6, 0), (6, 8, 1), (8, 9, 1)):
        noise = scale * rng.gumbel(size=(tree.depth, module.valid_rows)).astype(np.float32)
        reference = expected(heads, weights, tree, features[:end], tokens[:end], valid, noise)
        new = torch.from_numpy(features[past:end])[None]
        with torch.no_grad():
            mine = module(new, torch.tensor([tokens[past:end]]), torch.tensor([past]), torch.from_numpy(noise), *caches)
        caches = list(mine[3:])
        exported = run(features[past:end], tokens[past:end], past, noise)
        assert distance(as_drafted(mine), reference) < 1e-5
        assert distance(as_drafted(exported[name] for name in PROPOSAL), reference) < 1e-5


def export(
    heads: RecurrentRecord,
    weights: Weights,
    tree: DynamicTree | StaticTree,
    path: Path,
    valid: int = VOCAB,
    target: Path = Path("unused"),
) -> Path:
    export_recurrent(
        heads, weights, path, dtype=torch.float32, slots=SLOTS, tree=tree, valid_vocab=valid, target_graph=target
    )
    return path


def as_drafted(outputs: Iterable[Any]) -> Drafted:
    tokens, parents, scores = (np.asarray(value) for value in [*outputs][:3])
    return tokens.tolist(), parents.tolist(), scores.astype(np.float64)


@pytest.mark.parametrize("saturated", [False, True])
@pytest.mark.parametrize("tree", [DYNAMIC, STATIC], ids=["dynamic", "static"])
def test_ties_keep_ancestors_and_take_the_first(
    tree: DynamicTree | StaticTree, saturated: bool, tmp_path: Path
) -> None:
    """All tokens are alike, or one has log probability 0, so that a child is as good as its parent."""
    heads = record("eagle1")
    weights = Weights.random(heads)
    weights.tensors["lm_head"] = torch.zeros(VOCAB, WIDTH)
    if saturated:
        weights.tensors["lm_head"][7] = 1e4
    features, tokens = random_input(heads, 5)
    reference = expected(heads, weights, tree, features, tokens)
    assert all(parent <= place for place, parent in enumerate(reference[1]))
    assert distance(drafted(module_of(heads, weights, tree), features, tokens), reference) < 1e-5
    if saturated:  # the same graph but for its data
        outputs = run_graph(export(heads, weights, tree, tmp_path / "drafter.onnx"), heads)(features, tokens, 0)
        assert distance(as_drafted(outputs[name] for name in PROPOSAL), reference) < 1e-5


def write_target(folder: Path, tables: Mapping[str, torch.Tensor | Quantized]) -> Path:
    """A graph file with the tables of a target in its data file."""
    path = folder / "target.onnx"
    values = []
    with DataFile(folder / "target.onnx.data") as data:
        data.append("before", torch.zeros(7))
        stored: dict[str, ir.TensorProtocol] = {}
        for name, table in tables.items():
            if isinstance(table, Quantized):
                parts = insert.store(name, table, False, ir.DataType.FLOAT, data.put)
                stored |= {f"{name}.{role}": tensor for role, tensor in parts.tensors.items()}
            else:
                stored[name] = data.append(name, table)
        for name, tensor in stored.items():
            kind = ir.TensorType(tensor.dtype)
            values.append(ir.Value(name=name, const_value=tensor, shape=ir.Shape(insert.sizes(tensor)), type=kind))
    graph = ir.Graph([], values, nodes=[], initializers=values, name="target", opset_imports={"": 24})
    ir.save(ir.Model(graph, ir_version=10), path)
    return path


def test_own_tables_win_and_missing_ones_are_the_targets(tmp_path: Path) -> None:
    """Fault: a bundled embedding overwritten by the target's. A tied target has one table for both."""
    heads = record("eagle1")
    own = Weights.random(heads)
    tables = {
        name: torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(seed))
        for seed, name in enumerate(("embedding", "lm_head"))
    }
    tied = {"embedding": tables["embedding"]}
    features, tokens = random_input(heads, 5)
    answers: list[Drafted] = []
    cases: list[tuple[dict[str, Any], dict[str, torch.Tensor]]] = [
        ({}, tables),
        ({"lm_head": "target"}, tables),
        ({"embedding": "target", "lm_head": "target"}, tied),
    ]
    for sources, target in cases:
        folder = tmp_path / str(len(sources))
        folder.mkdir()
        graph = export(
            replace(heads, **sources), own, STATIC, folder / "drafter.onnx", target=write_target(folder, target)
        )
        outputs = run_graph(graph, heads)(features, tokens, 0)
        answers.append(as_drafted(outputs[name] for name in PROPOSAL))
        used = Weights(own.tensors | {name: target.get(name, target["embedding"]) for name in sources})
        assert distance(answers[-1], expected(heads, used, STATIC, features, tokens)) < 1e-5
    assert min(distance(a, b) for a, b in itertools.combinations(answers, 2)) > 1e-2


@pytest.mark.parametrize("case", ["eagle1", "eagle3"])
def test_codes_of_a_target_in_an_order_of_their_own(case: str, tmp_path: Path) -> None:
    """Fault: an lm_head with GPTQ's act-order that the head multiplied with its columns out of place."""
    heads = replace(record(case), lm_head="target")
    own, rng = Weights.random(heads), torch.Generator().manual_seed(3)
    codes = torch.randint(-127, 128, (VOCAB, WIDTH), generator=rng, dtype=torch.int8)
    scales = (0.5 + torch.rand(VOCAB, 1, generator=rng)) / 200
    stored = Quantized(8, codes, scales, None, WIDTH, torch.randperm(WIDTH, generator=rng))
    target = write_target(tmp_path, {"lm_head": stored})
    features, tokens = random_input(heads, 5)
    outputs = run_graph(export(heads, own, DYNAMIC, tmp_path / "drafter.onnx", target=target), heads)(
        features, tokens, 0
    )
    rows = slice(None) if heads.draft_to_target is None else heads.draft_to_target
    used = Weights(own.tensors | {"lm_head": stored.dequantize()[rows]})
    assert distance(
        as_drafted(outputs[name] for name in PROPOSAL), expected(heads, used, DYNAMIC, features, tokens)
    ) < (1e-5)
