"""Latent attention, experts, gated queries and chains of prediction layers: module and graph against plain loops, and
decoder layers against Transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.glm4_moe import modeling_glm4_moe as glm
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from specexport.exporter.heads.attention import DraftAttention
from specexport.exporter.heads.export import export_recurrent
from specexport.exporter.heads.record import RecurrentRecord
from specexport.exporter.heads.trees import DynamicTree
from specexport.exporter.rope import rope_tables
from specexport.runtime.contract import DRAFT_LOGPROBS, DRAFT_PARENTS, DRAFT_TOKENS
from tests.exporter.block_reference import Chain, grow
from tests.exporter.draft_reference import SLOTS, Drafted, Weights, distance, module_of, run_graph
from tests.exporter.heads.writers import H, N, Tiny, V, every

ALL = dict(every())
#: Each kind of attention, of experts, and a chain; the others are made of the same.
CASES = [("mtp_qwen3_next_moe", 3), ("mtp_deepseek_chain", 3), ("mtp_deepseek_v3", 3)]
OTHERS = [("mtp_qwen3_next", 3), ("mtp_glm4_moe", 3), ("mtp_deepseek_chain", 5)]
PROPOSAL = (DRAFT_TOKENS, DRAFT_PARENTS, DRAFT_LOGPROBS)


def calm(tiny: Tiny) -> tuple[RecurrentRecord, dict[str, Tensor]]:
    """The record and its canonical tensors, matrices scaled so that log probabilities stay small."""
    assert isinstance(tiny.record, RecurrentRecord)
    tables = {"embedding": torch.randn(V, H, generator=torch.Generator().manual_seed(2))}
    tensors = {"lm_head": tables["embedding"].flip(0), **tables, **tiny.canonical}
    return replace(tiny.record, embedding="head", lm_head="head"), {n: scaled(tensor) for n, tensor in tensors.items()}


def scaled(tensor: Tensor) -> Tensor:
    return tensor * tensor.shape[-1] ** -0.5 if tensor.ndim == 2 else tensor


def inputs(count: int) -> tuple[np.ndarray[Any, Any], list[int]]:
    rng = np.random.default_rng(3)
    return rng.standard_normal((count, H)).astype(np.float32), rng.integers(0, V - 3, count).tolist()


@pytest.mark.parametrize(
    ("case", "depth"), [*CASES, *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)]
)
def test_module_and_graph_are_the_reference(case: str, depth: int, tmp_path: Path) -> None:
    """Four calls: a prompt of one token, a longer one, an accepted path, and one again after a rewind.

    A chain of three is drafted from to its own depth and past it.
    """
    record, tensors = calm(ALL[case])
    tree, valid = DynamicTree(depth, 3, 8), V - 3
    weights = Weights(tensors)
    module = module_of(record, weights, tree, valid=valid)
    path = tmp_path / "drafter.onnx"
    export_recurrent(
        record, weights, path, dtype=torch.float32, slots=SLOTS, tree=tree, valid_vocab=valid, target_graph=path
    )
    run = run_graph(path, record)
    chain = Chain(record, tensors)
    features, tokens = inputs(6)
    caches = [torch.zeros(shape) for shape in record.cache_shapes(SLOTS).values()]
    silence = torch.zeros(depth, valid)
    for past, end in ((0, 1), (1, 4), (4, 6), (3, 5)):
        reference = grow(partial(chain.logprobs, features[:end], tokens[:end], valid), tree)
        new = torch.from_numpy(features[past:end])[None]
        with torch.no_grad():
            mine = module(new, torch.tensor([tokens[past:end]]), torch.tensor([past]), silence, *caches)
        caches = list(mine[3:])
        exported = run(features[past:end], tokens[past:end], past)
        assert distance(as_drafted(mine[:3]), reference) < 1e-5
        assert distance(as_drafted([exported[name] for name in PROPOSAL]), reference) < 1e-5


@pytest.mark.parametrize("depth", [1, 2])
def test_a_tree_less_deep_than_a_chain_takes_as_many_layers(depth: int, tmp_path: Path) -> None:
    """Fault: the norm behind the last prediction layer, which nothing drafts from, was a fault of the exporter."""
    record, tensors = calm(ALL["mtp_deepseek_chain"])
    tree, path, valid = DynamicTree(depth, 3, 3), tmp_path / "drafter.onnx", V - 3
    weights = Weights(tensors)
    export_recurrent(
        record, weights, path, dtype=torch.float32, slots=SLOTS, tree=tree, valid_vocab=valid, target_graph=path
    )
    run, chain = run_graph(path, replace(record, prediction_layers=depth)), Chain(record, tensors)
    features, tokens = inputs(6)
    for past, end in ((0, 4), (4, 6)):
        reference = grow(partial(chain.logprobs, features[:end], tokens[:end], valid), tree)
        exported = run(features[past:end], tokens[past:end], past)
        assert distance(as_drafted([exported[name] for name in PROPOSAL]), reference) < 1e-5


def as_drafted(outputs: Any) -> Drafted:
    tokens, parents, scores = (np.asarray(value) for value in outputs)
    return tokens.tolist(), parents.tolist(), scores.astype(np.float64)


#: dialect -> Transformers' module, the family that its classes are named after, and the tensors' prefix.
LAYERS: Mapping[str, tuple[Any, str, str]] = {
    "mtp_deepseek_v3": (deepseek, "DeepseekV3", f"model.layers.{N}."),
    "mtp_glm4_moe": (glm, "Glm4Moe", f"model.layers.{N}."),
    "mtp_qwen3_next_moe": (qwen, "Qwen3Next", "mtp.layers.0."),
    "mtp_qwen3_next": (qwen, "Qwen3Next", "mtp.layers.0."),
}


@pytest.mark.parametrize("case", LAYERS)
def test_a_decoder_layer_is_transformers(case: str) -> None:
    """Twelve rows through the published implementation of the same layer, with the same tensors by their own names."""
    implementation, family, prefix = LAYERS[case]
    tiny = ALL[case]
    record, tensors = calm(tiny)
    keys = {**(tiny.config or {}), "num_hidden_layers": 1, "first_k_dense_replace": 0, "attn_implementation": "eager"}
    if family == "Qwen3Next":
        keys |= {"layer_types": ["full_attention"], "partial_rotary_factor": record.blocks.rope.rotary_dim / 8}
        keys |= {} if record.blocks.experts else {"num_experts": 0}
    config = getattr(implementation, f"{family}Config")(**keys)
    layer = getattr(implementation, f"{family}DecoderLayer")(config, 0).eval()
    stored = {name.removeprefix(prefix): scaled(tensor) for name, tensor in tiny.tensors.items()}
    state = layer.state_dict()
    layer.load_state_dict({name: stored[name] for name in state}, strict=True)

    count = 12
    x = torch.randn(1, count, H, generator=torch.Generator().manual_seed(4))
    positions = torch.arange(count)[None]
    mask = torch.full((count, count), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.no_grad():
        rotary = getattr(implementation, f"{family}RotaryEmbedding")(config)(x, positions)
        theirs = layer(x, position_embeddings=rotary, attention_mask=mask, position_ids=positions)
    theirs = theirs[0] if isinstance(theirs, tuple) else theirs

    module = module_of(record, Weights(tensors), DynamicTree(1, 1, 1))
    rope = tuple(map(torch.from_numpy, rope_tables(record.blocks.rope, count)))

    def attend(attention: DraftAttention, normed: Tensor) -> Tensor:
        query, key, value = attention.project(normed, rope, positions)
        return attention.over_cache(query, (key, value), mask)

    with torch.no_grad():
        mine = module.layers[0](x, x, attend)
    assert float((mine - theirs).abs().max()) <= 1e-5 * max(1.0, float(theirs.abs().max()))
