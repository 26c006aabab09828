"""EAGLE-1 and EAGLE-2 heads (the same weights; Li et al. 2024, https://github.com/SafeAILab/EAGLE).

``fc(cat(embed(x), f))`` -> one decoder layer without an input norm -> the target's lm_head; the un-normed output is the
next feature. f is the target's state after its final norm. Dialects differ in names and in extra norms:

* ``eagle``: the original; ``bias`` of fc is true where the config is silent.
* ``eagle-vllm``: ``{"model_type": "eagle", "model": {...}, "eagle_fc_bias": ...}``, usually with a copy of the lm_head.
* ``eagle-speculators``: ``fusion_bias``, and with ``layernorms`` (HASS-style training) norms of the embedding, of layer
  0's input and before the lm_head.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from specexport.exporter.config_values import LIMITS
from specexport.exporter.heads.base import FLOATS, Keys, Reading, Tensors, both, lineage, select_rows
from specexport.exporter.heads.block import check_layer_types, model_type, read_blocks
from specexport.exporter.heads.block_parts import agree
from specexport.exporter.heads.record import HeadLineage, RecurrentRecord, Source
from specexport.exporter.heads.speculators import read_lineage
from specexport.exporter.heads.vocab import read_token_map
from specexport.runtime.errors import CheckpointError

#: Names of speculators' EAGLE-1 exports, by the original's.
SPECULATORS_NAMES: Mapping[str, str] = {"fusion_fc.": "fc.", "transformer.": "layers.0."}
#: Norms of HASS-style training under each of their names.
EMBEDDING_NORMS = ("embed_layernorm.weight", "embedding_layernorm.weight", "post_embedding_layernorm.weight")
OUTPUT_NORMS = ("pre_lm_head_layernorm.weight", "lm_head_layernorm.weight")


def read_eagle1(keys: Keys, tensors: Tensors) -> Reading:
    """Read a head of any EAGLE-1 dialect.

    Raises:
        CheckpointError: anything missing, not understood or contradictory.
    """
    nested = keys.object("model")
    inner = keys.object("transformer_layer_config")
    head_lineage = HeadLineage()
    norms = False
    if inner is not None:
        dialect, block = "eagle-speculators", inner
        head_lineage = read_lineage(keys, "eagle")
        norms, bias, key = keys.boolean("layernorms", False), keys.boolean("fusion_bias", False), "fusion_bias"
        keys.boolean("tie_word_embeddings", False)
        keys.ignore("transformer_layer_architecture")
    elif nested is not None:
        dialect, block, key = "eagle-vllm", nested, "eagle_fc_bias"
        keys.fixed("model_type", "eagle")
        keys.fixed("logit_scale", 1.0, 1)
        bias = keys.boolean("eagle_fc_bias", False)
    else:
        dialect, block, key = "eagle", keys, "bias"
        bias = keys.boolean("bias", True)
        head_lineage = lineage(keys, "base_model_name_or_path")
    kind = model_type(block)
    hidden, width = tensors.matrix("fc.weight")
    agree(block, "hidden_size", hidden, "fc.weight")
    tensors.take("fuse.weight", "fc.weight", (hidden, 2 * hidden), why=f"{width} columns for a width of {hidden}")
    # Zeros beside a config without a bias are for loaders whose fc always has one (SGLang).
    nothing = not bias and "fc.bias" in tensors and not tensors.read("fc.bias", FLOATS, "floating point").any()
    if bias != ("fc.bias" in tensors) and not (nothing and tensors.shape("fc.bias") == (hidden,)):
        there = "is in the file" if "fc.bias" in tensors else "is missing"
        origin = f"{key} is {str(bias).lower()}" + ("" if key in keys else " (absent)")
        raise CheckpointError(
            f"tensor 'fc.bias' {there}, but {origin}; set {key} to {str(not bias).lower()} if it should be so"
        )
    if bias:
        tensors.take("fuse.bias", "fc.bias", (hidden,))
    embedding_norm = _norm(tensors, "embedding_norm.weight", EMBEDDING_NORMS, hidden, norms)
    output_norm = _norm(tensors, "norm.weight", OUTPUT_NORMS, hidden, norms)
    if "hidden_layernorm.weight" in tensors:
        raise both(
            "tensor 'hidden_layernorm.weight'",
            "a norm of the target's feature before fc",
            "layer 0's input norm after fc (as speculators converts it)",
            "rename it to layers.0.input_layernorm.weight if it is the second, with a speculators config",
        )
    count = block.integer("num_hidden_layers", *LIMITS["num_hidden_layers"], default=1) or 1
    check_layer_types(block, count)
    prefixes = [f"layers.{index}." for index in range(count)]
    input_norm, final_norm = (norms, output_norm) if nested is None else _vllm_norms(nested, tensors, hidden)
    blocks = read_blocks(block, tensors, prefixes, hidden, first_width=hidden, first_input_norm=input_norm, kind=kind)
    vocab = _vocab(block, tensors)
    block.boolean("tie_word_embeddings", False)  # nothing to tie: the lm_head is the target's, or in the file
    embedding: Source = "head" if "embed_tokens.weight" in tensors else "target"
    if embedding == "head":
        tensors.take("embedding", "embed_tokens.weight", (vocab, hidden))
    lm_head, rows, ids = _lm_head(keys, tensors, vocab, hidden, nested is not None)
    tensors.finish(dialect)
    for part in (keys, nested, inner):
        if part is not None:
            part.finish()
    record = RecurrentRecord(
        method="eagle1",
        dialect=dialect,
        captures=("final",),
        target_hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab_size=rows,
        reduce=False,
        reduce_bias=False,
        reduce_norm="none",
        fusion="project",
        fuse_bias=bias,
        order=("embedding", "hidden"),
        embedding_norm=embedding_norm,
        hidden_norm=False,
        norm_before_residual=False,
        blocks=blocks,
        final_norm=final_norm,
        feedback="normed" if nested is not None and final_norm else "raw",
        embedding=embedding,
        embedding_size=hidden,
        lm_head=lm_head,
        draft_to_target=ids,
        max_positions=blocks.rope.max_position_embeddings,
        lineage=head_lineage,
    )
    return Reading(record, tensors.parts)


def _norm(tensors: Tensors, canonical: str, names: tuple[str, ...], hidden: int, wanted: bool) -> bool:
    """Take an extra norm under whichever of its names; the config says whether there is one."""
    held = [name for name in names if name in tensors]
    if len(held) > 1:
        raise CheckpointError(f"tensors {held[0]!r} and {held[1]!r} are the same norm; remove one")
    if bool(held) != wanted:
        name = held[0] if held else names[0]
        there = "is in the file" if held else "is missing"
        raise CheckpointError(
            f"tensor {name!r} {there}, but layernorms is {str(wanted).lower()} (or absent) in the config"
        )
    if held:
        tensors.take(canonical, held[0], (hidden,))
    return wanted


def _vllm_norms(model: Keys, tensors: Tensors, hidden: int) -> tuple[bool, bool]:
    """Whether layer 0's input norm and the final norm of a vLLM-converted head are used (not, unless it says so)."""
    used = []
    for name, key in (("layers.0.input_layernorm.weight", "skip_prenorm"), ("norm.weight", "skip_output_norm")):
        skip = model.flag(key)
        if name in tensors and skip is None:
            raise both(
                f"tensor {name!r} of a vLLM-converted head without {key}",
                "a placeholder that is skipped (EAGLE has no such norm)",
                "a norm that is applied",
                f"set {key} to false in the model's config to apply it, or remove the tensor",
            )
        if (skip is False) != (name in tensors):
            raise CheckpointError(
                f"tensor {name!r} and {key} = {skip} contradict: false means that the norm is applied"
            )
        used.append(skip is False)
    if used[1]:
        tensors.take("norm.weight", "norm.weight", (hidden,))
    return used[0], used[1]


def _vocab(block: Keys, tensors: Tensors) -> int:
    said = block.integer("vocab_size", *LIMITS["vocab_size"])
    if said is not None:
        return said
    if "embed_tokens.weight" in tensors:
        return tensors.matrix("embed_tokens.weight")[0]
    raise CheckpointError(f"{block.where}: vocab_size is missing; it is required")


def _lm_head(
    keys: Keys, tensors: Tensors, vocab: int, hidden: int, vllm: bool
) -> tuple[Source, int, NDArray[np.int64] | None]:
    if not vllm:
        return "target", vocab, None
    rows = keys.integer("truncated_vocab_size", *LIMITS["vocab_size"], default=vocab) or vocab
    ids = read_token_map(tensors, vocab) if "token_map" in tensors else None
    if rows > vocab or (rows < vocab) != (ids is not None) or (ids is not None and len(ids) != rows):
        mapped = "no token_map" if ids is None else f"a token_map of {len(ids)}"
        raise both(
            f"truncated_vocab_size {rows} of {vocab} with {mapped}",
            f"all {vocab} ids",
            "the ids of the token_map",
            "add the one that is missing, or remove the other",
        )
    if "lm_head.weight" not in tensors:
        if ids is not None:
            raise CheckpointError("tensor 'lm_head.weight' is missing from the head; its token_map needs one")
        return "target", vocab, None
    stored = tensors.matrix("lm_head.weight")[0]
    transform = None
    if ids is not None:
        # The record's ids ascend; the file's rows are in the order of token_map, or of the whole vocabulary.
        order = np.argsort(ids)
        transform = select_rows(torch.from_numpy(order if stored == rows else ids[order]))
        ids = ids[order]
    expected = (stored if ids is not None and stored in (rows, vocab) else rows, hidden)
    tensors.take("lm_head", "lm_head.weight", expected, transform=transform, out=(rows, hidden))
    return "head", rows, ids
