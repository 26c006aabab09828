"""Faults that other projects met in drafters: what a wrong reading of a head does is seen by parity.

Each fault is made on purpose; the right reading agrees with plain loops to 1e-5 and the wrong one is far off, so a
loader that took it could not pass unnoticed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specexport.exporter.config import RopeConfig
from specexport.exporter.heads.detect import open_head
from specexport.exporter.heads.record import RecurrentRecord
from specexport.exporter.heads.trees import DynamicTree
from specexport.exporter.layers import Capture
from specexport.exporter.onnx import build_module
from specexport.exporter.rope import rope_tables
from specexport.runtime.engine import Step
from specexport.runtime.errors import CheckpointError
from tests.exporter.draft_reference import (
    Weights,
    distance,
    drafted,
    expected,
    module_of,
    random_input,
    record,
)
from tests.exporter.heads.writers import TARGET, TARGET_CONFIG, Memory, Random, Tensors, every, llama_tensors
from tests.exporter.torch_engine import TorchEngine

TREE = DynamicTree(depth=3, topk=3, nodes=8)
FAR = 1e-2


def taken_for(heads: RecurrentRecord, weights: Weights, wrong: RecurrentRecord, count: int = 6) -> float:
    """How far a drafter that reads ``heads`` as ``wrong`` is off; asserts that the right reading is not."""
    features, tokens = random_input(heads, count)
    reference = expected(heads, weights, TREE, features, tokens)
    assert distance(drafted(module_of(heads, weights, TREE), features, tokens), reference) < 1e-5
    return distance(drafted(module_of(wrong, weights, TREE), features, tokens), reference)


@pytest.mark.parametrize(
    ("fault", "case", "changes"),
    [
        ("swapped concatenation, projected", "eagle1", {"order": ("hidden", "embedding")}),
        ("swapped concatenation, side by side", "eagle3", {"order": ("hidden", "embedding")}),
        ("reversed order of MiMo ignored", "mtp", {"order": ("embedding", "hidden")}),
        ("norm before fc ignored", "eagle3-speculators", {"reduce_norm": "none"}),
        ("norm of each capture ignored", "eagle3-each-bias", {"reduce_norm": "none"}),
        ("residual normed", "eagle3", {"norm_before_residual": True}),
        ("residual not normed", "eagle3-speculators", {"norm_before_residual": False}),
        ("normed state fed back", "eagle3", {"feedback": "normed"}),
        ("raw state fed back", "mtp", {"feedback": "raw"}),
        ("hidden state not normed", "eagle3", {"hidden_norm": False}),
        ("embedding not normed", "mtp", {"embedding_norm": False}),
        ("logits without the final norm", "eagle3", {"final_norm": False}),
        ("bias of fc dropped", "eagle1", {"fuse_bias": False}),
        ("map of draft ids ignored", "eagle3", {"draft_to_target": np.arange(23)}),
        ("offsets taken for ids", "eagle3", {"draft_to_target": record("eagle3").draft_to_target - np.arange(23)}),
    ],
)
def test_a_wrong_reading_fails_parity(fault: str, case: str, changes: dict[str, Any]) -> None:
    heads = record(case)
    assert taken_for(heads, Weights.random(heads), replace(heads, **changes)) > FAR, fault


@pytest.mark.parametrize(
    ("fault", "case", "changes"),
    [
        ("norm weights without their offset", "mtp-offset", {"norm_offset": 0.0}),
        ("another rope base", "eagle3", {"rope": RopeConfig("default", 1e6, 4, 64)}),
        ("another attention scale", "eagle1", {"attention_scale": 0.1}),
        ("first layer's norm where there is none", "eagle1", {"first_input_norm": True}),
        ("bias of attention dropped", "mtp", {"attention_bias": False}),
    ],
)
def test_a_wrong_layer_fails_parity(fault: str, case: str, changes: dict[str, Any]) -> None:
    heads = record(case)
    weights = Weights.random(heads)
    wrong = replace(heads, blocks=replace(heads.blocks, **changes))
    if changes.get("first_input_norm"):
        weights.tensors["layers.0.input_norm.weight"] = torch.ones(16)  # which the right reading does not ask for
    assert taken_for(heads, weights, wrong) > FAR, fault


def test_head_dim_is_not_width_over_heads() -> None:
    """6, where 16 / 4 is 4: agrees, and is refused with the other."""
    heads = record("eagle3-full-vocabulary")
    assert heads.blocks.head_dim != heads.blocks.hidden_size // heads.blocks.num_heads
    rope = replace(heads.blocks.rope, rotary_dim=4)
    wrong = replace(heads, blocks=replace(heads.blocks, head_dim=4, rope=rope))
    with pytest.raises(CheckpointError, match=r"layers\.0\.attention\.q_proj\.weight has shape"):
        taken_for(heads, Weights.random(heads), wrong)


HEADS = dict(every())
#: The same three states in each convention of layer ids: boundaries, layer outputs, and EAGLE-3's default by silence.
CONVENTIONS: dict[str, dict[str, Any]] = {
    "boundaries": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]},
    "layer outputs": {"target_layer_ids": [1, 3, 4]},
    "eagle_config": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}},
    "default": {},
}


def target_states(tensors: Tensors, tokens: list[int]) -> dict[Capture, np.ndarray[Any, Any]]:
    """Every state of the target by Transformers: what enters each layer, what leaves the last, and its normed form."""
    model = LlamaForCausalLM(LlamaConfig(**TARGET_CONFIG, attn_implementation="eager")).eval()
    model.load_state_dict(tensors, strict=True)
    last: list[torch.Tensor] = []
    model.model.layers[-1].register_forward_hook(
        lambda module, args, output: last.append(output[0] if isinstance(output, tuple) else output)
    )
    with torch.no_grad():
        states = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    count = len(model.model.layers)
    named: dict[Capture, torch.Tensor] = dict(enumerate(states[:count]))
    named |= {count: last[0].reshape(states[0].shape), "final": states[-1]}
    return {name: state[0].numpy() for name, state in named.items()}


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_captures_off_by_one_fail_parity(convention: str, tmp_path: Path) -> None:
    """Fault: near-zero acceptance from layer ids of the other convention. All conventions give the same states here."""
    tiny = HEADS["eagle3"]
    head = open_head(
        str(replace(tiny, config=(tiny.config or {}) | CONVENTIONS[convention]).write(tmp_path)), target=TARGET
    )
    assert isinstance(head.record, RecurrentRecord)
    tensors = llama_tensors(Random(1))
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    states = target_states(tensors, tokens)
    used = Weights(
        {name: head.weights.read(name) for name in head.weights.names()}
        | {"embedding": tensors["model.embed_tokens.weight"]}
    )
    following = [*tokens[1:], 5]
    reference = expected(
        head.record, used, TREE, np.concatenate([states[layer] for layer in (2, 4, 5)], axis=-1), following
    )
    module = module_of(head.record, used, TREE)

    def with_captures(*captures: Capture) -> float:
        target = TorchEngine(build_module(TARGET, 16, torch.float32, Memory(tensors), captures))
        target.run(Step.chain(tokens, select=[len(tokens) - 1]))
        return distance(drafted(module, target.features(), following), reference)

    assert with_captures(*head.record.captures) < 1e-4
    if convention == "boundaries":  # the same record for all
        for wrong in ((1, 3, 4), (3, 5, 6), (2, 4, 6), (5, 4, 2)):
            assert with_captures(*wrong) > FAR, wrong


def test_the_last_layer_is_captured_before_the_final_norm(tmp_path: Path) -> None:
    """Fault: boundary n taken from the last entry of ``hidden_states``, which is after the norm (gpt-oss heads)."""
    head = open_head(str(HEADS["eagle3_gpt_oss"].write(tmp_path)), target=TARGET)
    assert isinstance(head.record, RecurrentRecord) and head.record.captures[-1] == TARGET.num_layers
    tensors, tokens = llama_tensors(Random(1)), [3, 1, 4, 1, 5]
    states = target_states(tensors, tokens)
    target = TorchEngine(build_module(TARGET, 16, torch.float32, Memory(tensors), head.record.captures))
    target.run(Step.chain(tokens, select=[len(tokens) - 1]))
    last = target.features()[:, -TARGET.hidden_size :]
    assert np.abs(last - states[TARGET.num_layers]).max() < 1e-4 * np.abs(last).max()
    assert np.abs(last - states["final"]).max() > FAR * np.abs(last).max()


def test_past_2048_positions() -> None:
    """Fault: a rope cache of the length in the head's config. Tables reach as far as the cache and the tree."""
    heads, count = record("eagle3"), 2051
    assert heads.blocks.rope.max_position_embeddings < 2048
    weights = Weights.random(heads)
    features, tokens = random_input(heads, count)
    reference = expected(heads, weights, TREE, features, tokens)
    module = module_of(heads, weights, TREE, slots=count)
    assert distance(drafted(module, features, tokens), reference) < 1e-5
    for name in ("rope_cos", "rope_sin"):
        table = module.get_buffer(name)
        assert len(table) >= count + TREE.depth - 1
        table[2048:] = table[2047]
    assert distance(drafted(module, features, tokens), reference) > 1e-4


_ORIGINAL = {"factor": 4.0, "original_max_position_embeddings": 32}
#: Two places for the length that the factors refer to disagree; an unknown dialect.
REFUSED = {"longrope": "original_max_position_embeddings is 32", "unheard": "unheard"}
_FACTORS = {"short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 2.0, 4.0]}


@pytest.mark.parametrize(
    ("kind", "scaling"),
    [
        ("linear", {"factor": 4.0}),
        ("dynamic", {"factor": 4.0}),
        ("llama3", {**_ORIGINAL, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
        ("yarn", _ORIGINAL),
        ("longrope", {**_FACTORS, **_ORIGINAL}),
        ("unheard", {"factor": 4.0}),
    ],
)
def test_a_rope_dialect_is_read_or_refused(kind: str, scaling: dict[str, Any], tmp_path: Path) -> None:
    """Fault: a rope dialect of the head silently replaced by the plain one."""
    tiny = HEADS["eagle1_llama3"]
    tiny = replace(tiny, config=(tiny.config or {}) | {"rope_scaling": {"rope_type": kind, **scaling}})
    if kind in REFUSED:
        with pytest.raises(CheckpointError, match=REFUSED[kind]):
            open_head(str(tiny.write(tmp_path)))
        return
    head = open_head(str(tiny.write(tmp_path)))
    assert isinstance(head.record, RecurrentRecord)
    rope = head.record.blocks.rope
    assert rope.kind == kind
    plain = replace(rope, kind="default", params={})
    mine, other = (np.concatenate(rope_tables(which, 60), axis=1) for which in (rope, plain))
    assert (np.abs(mine - other).max() > FAR) == (kind != "dynamic")  # dynamic starts past the trained length
