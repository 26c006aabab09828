"""Heads to be trained: their records for a target, their first weights, and the files they end up in.

A recurrent head starts from the target: its lm_head rows and final norm, and one decoder layer that takes the hidden
half of its attention, and its MLP, from the target's last layer and the embedding's half from the first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from specexport.exporter.config import RopeConfig, TargetConfig
from specexport.exporter.heads.base import OVERRIDES, TRAINING
from specexport.exporter.heads.medusa import LAYOUTS
from specexport.exporter.heads.modules import MedusaHeads
from specexport.exporter.heads.record import BlockConfig, HeadLineage, MedusaRecord, RecurrentRecord
from specexport.exporter.heads.recurrent import RecurrentDrafter
from specexport.exporter.heads.trees import DynamicTree
from specexport.exporter.layers import Block, Linear, Target
from specexport.exporter.quantize.plan import FLOATS, narrow
from specexport.exporter.rope import rope_tables
from specexport.runtime.replacing import new_file, replace_text

METHODS = ("eagle3", "eagle1", "medusa")
#: Layouts that Medusa heads are written in, and whose lm_head each has.
LM_HEADS: Mapping[str, Literal["own", "shared", "target"]] = {
    "medusa-legacy": "target",
    "medusa": "own",
    "vllm": "shared",
}
_PARTS = ("gate_proj", "up_proj", "down_proj")
#: The tree of the module while it is trained; a bundle's is chosen when it is built.
_TREE = DynamicTree(2, 1, 2)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a head; None: as the target's. ``heads`` and ``layers`` are Medusa's."""

    intermediate: int | None = None
    heads: int = 4
    layers: int = 1


def medusa_record(config: TargetConfig, shape: Shape) -> MedusaRecord:
    """Heads whose logits go through the target's lm_head."""
    return MedusaRecord(
        dialect="medusa-legacy",
        num_heads=shape.heads,
        num_layers=shape.layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        block_bias=True,
        activation="silu",
        lm_head="target",
        token_map=None,
        lineage=HeadLineage(),
    )


def recurrent_record(
    method: str,
    config: TargetConfig,
    captures: Sequence[int | str],
    ids: Tensor,
    shape: Shape,
    *,
    share_lm_head: bool = False,
) -> RecurrentRecord:
    """A head of one Llama layer as wide as the target.

    Args:
        captures: boundaries that EAGLE-3 reads. ids: int64 [Vd], its draft vocabulary, ascending.
        share_lm_head: EAGLE-3's lm_head is the target's rows ``ids``, and not part of its file.
    """
    eagle3 = method == "eagle3"
    whole = not eagle3 or len(ids) == config.vocab_size
    rope = RopeConfig("default", config.ropes[0].theta, config.head_dim, config.max_position_embeddings, {})
    blocks = BlockConfig(
        num_layers=1,
        hidden_size=config.hidden_size,
        intermediate_size=shape.intermediate or config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        norm_eps=config.norm_eps,
        activation="silu",
        rope=rope,
        attention_scale=config.head_dim**-0.5,
        first_input_norm=False,
    )
    return RecurrentRecord(
        method="eagle3" if eagle3 else "eagle1",
        dialect="eagle3" if eagle3 else "eagle",
        captures=tuple(captures) if eagle3 else ("final",),
        target_hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        draft_vocab_size=len(ids) if eagle3 else config.vocab_size,
        reduce=eagle3,
        reduce_bias=False,
        reduce_norm="none",
        fusion="concat" if eagle3 else "project",
        fuse_bias=False,
        order=("embedding", "hidden"),
        embedding_norm=eagle3,
        hidden_norm=eagle3,
        norm_before_residual=False,
        blocks=blocks,
        final_norm=eagle3,
        feedback="raw",
        embedding="target",
        embedding_size=config.hidden_size,
        lm_head="head" if eagle3 and not share_lm_head else "target",
        draft_to_target=None if whole else ids.numpy(),
        max_positions=rope.max_position_embeddings,
        lineage=HeadLineage(),
    )


def lm_head(target: Target) -> Tensor:
    """[V, H]."""
    return target.embedding if target.config.tie_word_embeddings else target.lm_head


def new_medusa(record: MedusaRecord, target: Target, valid_vocab: int) -> MedusaHeads:
    """Heads that repeat the target's own prediction: blocks of zeros (Medusa's initialisation)."""
    heads = MedusaHeads(record, torch.float32, 1, valid_vocab)
    with torch.no_grad():
        for name, parameter in heads.named_parameters():
            parameter.copy_(lm_head(target)) if name == "lm_head" else parameter.zero_()
    return heads


def new_recurrent(record: RecurrentRecord, target: Target, positions: int, valid_vocab: int) -> RecurrentDrafter:
    """A head with its first weights.

    Args:
        positions: rows of the rope tables.
    """
    drafter = RecurrentDrafter(record, positions, torch.float32, _TREE, valid_vocab=valid_vocab)
    width, spread = record.blocks.hidden_size, record.blocks.hidden_size**-0.5
    first, last = target.layers[0], target.layers[-1]
    assert isinstance(first, Block) and isinstance(last, Block)
    with torch.no_grad():
        for _, parameter in drafter.named_parameters():
            parameter.normal_(std=0.5 * spread) if parameter.ndim == 2 else parameter.fill_(1.0)
        drafter.embedding.copy_(target.embedding)
        table = lm_head(target)
        ids = record.draft_to_target
        drafter.lm_head.copy_(table if ids is None else table[torch.from_numpy(ids)])
        layer: Any = drafter.layers[0]
        for name in _PARTS:
            own, theirs = getattr(layer.mlp, name), getattr(last.mlp, name)
            if own.weight.shape == theirs.weight.shape:
                own.weight.copy_(theirs.weight)
        layer.mlp_norm.weight.copy_(last.mlp_norm.weight)
        layer.attention.o_proj.weight.copy_(last.attention.o_proj.weight)
        for name in ("q_proj", "k_proj", "v_proj"):
            own = getattr(layer.attention, name).weight
            if record.fusion == "concat":
                own[:width].copy_(getattr(first.attention, name).weight)
                own[width:].copy_(getattr(last.attention, name).weight)
            else:
                own.copy_(getattr(last.attention, name).weight)
        if record.fusion == "concat":
            assert drafter.embedding_norm is not None and drafter.hidden_norm is not None and drafter.norm is not None
            drafter.embedding_norm.weight.copy_(first.input_norm.weight)
            drafter.hidden_norm.weight.copy_(last.input_norm.weight)
            drafter.norm.weight.copy_(target.norm.weight)
        _pass_through(drafter, width)
        for name, tensor in zip(("cos", "sin"), rope_tables(record.blocks.rope, drafter.positions), strict=True):
            drafter.get_buffer(f"rope_{name}").copy_(torch.from_numpy(tensor))
        if drafter.draft_to_target is not None and ids is not None:
            drafter.draft_to_target.copy_(torch.from_numpy(ids))
    return drafter


def _pass_through(drafter: RecurrentDrafter, width: int) -> None:
    """The last of the inputs reaches the layer as it is."""
    for linear in (drafter.reduce, drafter.fuse):
        if isinstance(linear, Linear):
            linear.weight.mul_(0.2)
            linear.weight[-width:] += torch.eye(width)


def with_lm_head(
    record: MedusaRecord, trained: Mapping[str, Tensor], layout: str, table: Tensor
) -> tuple[MedusaRecord, Mapping[str, Tensor]]:
    """Record and tensors of Medusa heads that bring the target's lm_head the way ``layout`` keeps it.

    Args:
        layout: of :data:`LM_HEADS`. table: [V, H], the target's lm_head.
    """
    lm_heads: Mapping[str, list[str]] = {
        "target": [],
        "shared": ["lm_head"],
        "own": [f"heads.{head}.lm_head" for head in range(record.num_heads)],
    }
    source = LM_HEADS[layout]
    return replace(record, dialect=layout, lm_head=source), {**trained, **dict.fromkeys(lm_heads[source], table)}


def public_tensors(
    record: MedusaRecord | RecurrentRecord, trained: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors of a head under the names of its public format, in [out, in] layout."""
    names = _medusa_names(record) if isinstance(record, MedusaRecord) else _recurrent_names(record)
    tensors = {names[name]: _stored(name, tensor, dtype) for name, tensor in trained.items()}
    if isinstance(record, MedusaRecord):
        return tensors
    if record.method == "eagle1":
        # SGLang's fc always has a bias and would leave it random; vLLM and EAGLE's own loader pass over it.
        tensors["fc.bias"] = torch.zeros(record.blocks.hidden_size, dtype=dtype)
    if record.draft_to_target is not None:
        ids = torch.from_numpy(record.draft_to_target)
        marks = torch.zeros(record.vocab_size, dtype=torch.bool)
        marks[ids] = True
        tensors |= {"d2t": ids - torch.arange(len(ids)), "t2d": marks}
    return tensors


def _medusa_names(record: MedusaRecord) -> dict[str, str]:
    """Public names by canonical ones."""
    layout = LAYOUTS["medusa" if record.dialect == "medusa-legacy" else record.dialect]
    names = {"lm_head": "lm_head.weight"}
    for head in range(record.num_heads):
        names[f"heads.{head}.lm_head"] = layout.lm_head.format(h=head, n=record.num_layers)
        for number in range(record.num_layers):
            for part in ("weight", "bias"):
                names[f"heads.{head}.blocks.{number}.{part}"] = f"{layout.block.format(h=head, l=number)}.{part}"
    return names


def _recurrent_names(record: RecurrentRecord) -> dict[str, str]:
    """Public names by canonical ones."""
    layer = "midlayer." if record.method == "eagle3" else "layers.0."
    return {
        "reduce.weight": "fc.weight",
        "fuse.weight": "fc.weight",
        "embedding_norm.weight": f"{layer}input_layernorm.weight",
        "hidden_norm.weight": f"{layer}hidden_norm.weight",
        "layers.0.mlp_norm.weight": f"{layer}post_attention_layernorm.weight",
        "norm.weight": "norm.weight",
        "lm_head": "lm_head.weight",
        **{f"layers.0.attention.{p}_proj.weight": f"{layer}self_attn.{p}_proj.weight" for p in "qkvo"},
        **{f"layers.0.mlp.{p}.weight": f"{layer}mlp.{p}.weight" for p in _PARTS},
    }


def _stored(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    tensor = tensor.detach().cpu()
    if tensor.ndim == 2 and not name.endswith("lm_head"):
        tensor = tensor.t()
    fix = "save it with --dtype bf16 or fp32"
    return narrow(f"the head's {name}", tensor, dtype, fix).contiguous().clone()


def public_config(record: MedusaRecord | RecurrentRecord, target_name: str, dtype: str) -> dict[str, Any]:
    """``config.json`` of a head in its public format, for the loaders that tests/exporter/train/test_conventions.py
    lists."""
    if isinstance(record, MedusaRecord):
        return _medusa_config(record, dtype) | {"base_model_name_or_path": target_name}
    blocks = record.blocks
    config = {
        "architectures": _architectures(record),
        "model_type": "llama",
        "hidden_size": blocks.hidden_size,
        "intermediate_size": blocks.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": blocks.num_heads,
        "num_key_value_heads": blocks.num_kv_heads,
        "head_dim": blocks.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": blocks.norm_eps,
        "rope_theta": blocks.rope.theta,
        "max_position_embeddings": record.max_positions,
        "vocab_size": record.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
    }
    if record.method == "eagle1":
        # Not true for the zeros in the file: vLLM and SGLang read it as a bias of the attention.
        return config | {"bias": False, "base_model_name_or_path": target_name}
    boundaries = [int(boundary) for boundary in record.captures]
    shared = record.lm_head == "target" and record.draft_to_target is None
    # No target_hidden_size: EAGLE's own loader takes one for a head that brings its embedding.
    return config | {
        "draft_vocab_size": None if shared else record.draft_vocab_size,  # null: SGLang takes the target's lm_head
        "target_model_name_or_path": target_name,
        "eagle_aux_hidden_state_layer_ids": boundaries,  # vLLM's convention
        "eagle_config": {  # SGLang's and SpecForge's: the layer that a state leaves
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [boundary - 1 for boundary in boundaries],
        },
    }


def _architectures(record: RecurrentRecord) -> list[str]:
    if record.method == "eagle1":
        return ["LlamaForCausalLMEagle", "EagleLlamaForCausalLM"]  # SGLang's name, vLLM's: each skips the other's
    if record.lm_head == "target" and record.draft_to_target is not None:
        # Loaders of the public format would draft from random rows, or from the target's first, without a word.
        return ["SpecexportEagle3"]
    return ["LlamaForCausalLMEagle3"]


def _medusa_config(record: MedusaRecord, dtype: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "hidden_size": record.hidden_size,
        "vocab_size": record.vocab_size,
        "medusa_fc_bias": True,  # vLLM's, which drops the biases without it
    }
    if record.dialect == "vllm":
        return config | {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "num_heads": record.num_heads,
            "num_hidden_layers": record.num_layers,
            "original_lm_head": True,
            "torch_dtype": dtype,
        }
    config |= {"medusa_num_heads": record.num_heads, "medusa_num_layers": record.num_layers}
    return config | ({"version": "2"} if record.lm_head == "target" else {})


def save_head(
    folder: Path,
    record: MedusaRecord | RecurrentRecord,
    trained: Mapping[str, nn.Parameter | Tensor],
    training: Mapping[str, Any],
    *,
    target_name: str,
    dtype: str = "fp16",
) -> None:
    """Write a head's directory: weights, and a config that says in ``specexport_training`` what it was made for.

    Args:
        training: of that object (target fingerprint, template hash, data, figures).
    """
    folder.mkdir(parents=True, exist_ok=True)
    medusa = isinstance(record, MedusaRecord)
    path = folder / ("medusa_lm_head.safetensors" if medusa else "model.safetensors")
    with new_file(path) as temporary:
        save_file(public_tensors(record, trained, FLOATS[dtype]), temporary, metadata={"format": "pt"})
    config = public_config(record, target_name, {"fp16": "float16", "bf16": "bfloat16"}.get(dtype, "float32"))
    if record.method == "eagle3":
        config[OVERRIDES] = {"captures": list(record.captures)}  # the default of many targets, but never left to guess
        if record.lm_head == "target":
            config[OVERRIDES]["lm_head"] = "target"
    config[TRAINING] = {"captures": list(record.captures), **training}
    replace_text(folder / "config.json", json.dumps(config, indent=2) + "\n")
