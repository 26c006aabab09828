"""Multi-token-prediction heads, shipped inside their target: one decoder layer over a projected embedding and state.

* ``mtp-mimo``: ``mtp_layers.0.*``; ``input_proj(cat[hidden, embed])``, in that order; the normed output is reused.
* ``mtp-qwen3-next``: ``mtp.*``; norm weights are stored as w - 1; the normed output is reused.
* ``mtp-deepseek``: ``layers.{n}.*`` after the n layers of the target (DeepSeek-V3, GLM-4.5); the un-normed output is
  reused, and embedding and lm_head are copied into the file. Several layers, n and after, are a chain: each drafts one
  depth from the output of the one before.

All read the target's state after its final norm (DeepSeek-V3 report; vLLM's implementations).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from specexport.exporter.config_values import LIMITS
from specexport.exporter.heads.base import Keys, Reading, Tensors, lineage
from specexport.exporter.heads.block import check_layer_types, model_type, read_blocks, refuse_blocks
from specexport.exporter.heads.block_parts import agree
from specexport.exporter.heads.record import BlockConfig, RecurrentRecord, Source
from specexport.runtime.errors import CheckpointError

Order = tuple[Literal["embedding", "hidden"], Literal["embedding", "hidden"]]


@dataclass(frozen=True, slots=True)
class Layout:
    """Names of one dialect. ``layer`` is the prefix of the decoder layer; ``{n}`` the number of it."""

    dialect: str
    layer: str
    fuse: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    order: Order
    feedback: Literal["raw", "normed"]
    #: Names of copies of the embedding and the lm_head.
    embedding: str | None = None
    lm_head: str | None = None
    norm_offset: float = 0.0


_MIMO, _QWEN, _DEEPSEEK = "mtp_layers.0.", "mtp.", "layers.{n}."
LAYOUTS: Mapping[str, Layout] = {
    "mimo": Layout(
        "mtp-mimo",
        _MIMO,
        _MIMO + "input_proj.weight",
        _MIMO + "token_layernorm.weight",
        _MIMO + "hidden_layernorm.weight",
        _MIMO + "final_layernorm.weight",
        ("hidden", "embedding"),
        "normed",
    ),
    "qwen3_next": Layout(
        "mtp-qwen3-next",
        _QWEN + "layers.0.",
        _QWEN + "fc.weight",
        _QWEN + "pre_fc_norm_embedding.weight",
        _QWEN + "pre_fc_norm_hidden.weight",
        _QWEN + "norm.weight",
        ("embedding", "hidden"),
        "normed",
        norm_offset=1.0,
    ),
    "deepseek": Layout(
        "mtp-deepseek",
        _DEEPSEEK,
        _DEEPSEEK + "eh_proj.weight",
        _DEEPSEEK + "enorm.weight",
        _DEEPSEEK + "hnorm.weight",
        _DEEPSEEK + "shared_head.norm.weight",
        ("embedding", "hidden"),
        "raw",
        embedding=_DEEPSEEK + "embed_tokens.weight",
        lm_head=_DEEPSEEK + "shared_head.head.weight",
    ),
}
#: Of the linear attention of Qwen3-Next's own layers, which its prediction layer has none of.
_LINEAR = (
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)
#: How many layers there are to predict with, by each family's name for it.
COUNT_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")


def read_mtp(keys: Keys, tensors: Tensors, family: str, *, merged: bool) -> Reading:
    """Read the head of a family of :data:`LAYOUTS`.

    Args:
        keys: the target's own config. ``merged``: ``exporter.config`` reads all of it, so keys may be left over.

    Raises:
        CheckpointError: a block that is not built, or anything missing, not understood or contradictory.
    """
    layout = LAYOUTS[family]
    refuse_blocks(list(tensors.names()))
    kind = model_type(keys)
    layers = keys.integer("num_hidden_layers", *LIMITS["num_hidden_layers"])
    if layers is None:
        raise CheckpointError(f"{keys.where}: num_hidden_layers is missing; it is required")
    present = _count(tensors, layout, layers)
    for key in COUNT_KEYS:
        said = keys.integer(key, 1, 64)
        if said is not None and said != present:
            raise CheckpointError(f"{keys.where}: {key} is {said} but the file holds {present} prediction layers")
    hidden = tensors.matrix(layout.fuse.replace("{n}", str(layers)))[0]
    agree(keys, "hidden_size", hidden, layout.fuse.replace("{n}", str(layers)))
    if family == "qwen3_next":  # of the target's layers; this one attends to everything
        keys.ignore("layer_types", "full_attention_interval", *_LINEAR)
    else:
        check_layer_types(keys, layers)
    blocks = [_read_layer(keys, tensors, layout, layers, index, hidden, kind) for index in range(present)]
    if any(block != blocks[0] for block in blocks):
        raise CheckpointError("the prediction layers are not alike: their sizes or kinds differ")
    vocab = keys.integer("vocab_size", *LIMITS["vocab_size"])
    if vocab is None:
        raise CheckpointError(f"{keys.where}: vocab_size is missing; it is required")
    keys.boolean("tie_word_embeddings", False)  # of the target, whose reader obeys it
    numbers = range(layers, layers + present)
    embedding = _copies(tensors, "embedding", layout.embedding, numbers, (vocab, hidden))
    lm_head = _copies(tensors, "lm_head", layout.lm_head, numbers, (vocab, hidden))
    tensors.finish(layout.dialect)
    head_lineage = lineage(keys, "base_model_name_or_path")
    if not merged:
        keys.finish()
    record = RecurrentRecord(
        method="mtp",
        dialect=layout.dialect,
        captures=("final",),
        target_hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab_size=vocab,
        reduce=False,
        reduce_bias=False,
        reduce_norm="none",
        fusion="project",
        fuse_bias=False,
        order=layout.order,
        embedding_norm=True,
        hidden_norm=True,
        norm_before_residual=False,
        blocks=blocks[0],
        final_norm=True,
        feedback=layout.feedback,
        embedding=embedding,
        embedding_size=hidden,
        lm_head=lm_head,
        draft_to_target=None,
        max_positions=blocks[0].rope.max_position_embeddings,
        lineage=head_lineage,
        prediction_layers=present,
    )
    return Reading(record, tensors.parts)


def _count(tensors: Tensors, layout: Layout, layers: int) -> int:
    """Prediction layers in the file: consecutive ones, from the target's last layer on."""
    if "{n}" not in layout.layer:
        return 1
    count = 0
    while layout.fuse.replace("{n}", str(layers + count)) in tensors:
        count += 1
    return max(count, 1)  # the first is then found missing by name


def _read_layer(
    keys: Keys, tensors: Tensors, layout: Layout, layers: int, index: int, hidden: int, kind: str
) -> BlockConfig:
    """Take prediction layer ``index``."""
    canonical = f"chain.{index - 1}." if index else ""
    names = {
        "fuse.weight": layout.fuse,
        "embedding_norm.weight": layout.embedding_norm,
        "hidden_norm.weight": layout.hidden_norm,
        "norm.weight": layout.norm,
    }
    for mine, theirs in names.items():
        shape = (hidden, 2 * hidden) if mine == "fuse.weight" else (hidden,)
        tensors.take(canonical + mine, theirs.replace("{n}", str(layers + index)), shape)
    return read_blocks(
        keys,
        tensors,
        [layout.layer.replace("{n}", str(layers + index))],
        hidden,
        first_width=hidden,
        first_input_norm=True,
        kind=kind,
        norm_offset=layout.norm_offset,
        canonical=canonical,
    )


def _copies(tensors: Tensors, canonical: str, template: str | None, numbers: range, shape: tuple[int, int]) -> Source:
    """The file's own copy where it has one (it wins), else the target's. Each layer may have one: all alike."""
    names = [] if template is None else [template.replace("{n}", str(number)) for number in numbers]
    held = [name for name in names if name in tensors]
    for name in held:
        if name == held[0]:
            tensors.take(canonical, name, shape)
        else:
            tensors.take_copy(canonical, name)
    return "head" if held else "target"
