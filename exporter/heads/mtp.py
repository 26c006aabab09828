"""Multi-token-prediction heads, shipped inside their target: one decoder layer over a projected embedding and state.

* ``mtp-mimo``: ``mtp_layers.0.*``; ``input_proj(cat[hidden, embed])``, in that order; the normed output is reused.
* ``mtp-qwen3-next``: ``mtp.*``; norm weights are stored as w - 1; the normed output is reused.
* ``mtp-deepseek``: ``layers.{n}.*`` after the n layers of the target (DeepSeek-V3, GLM-4.5); the un-normed output is
  reused, and embedding and lm_head are copied into the file.

All read the target's state after its final norm (DeepSeek-V3 report; vLLM's implementations). Blocks with multi-head
latent attention, experts or gated queries are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from specexport.exporter.config_values import LIMITS
from specexport.exporter.heads.base import Keys, Reading, Tensors, lineage
from specexport.exporter.heads.block import agree, check_layer_types, model_type, read_blocks, refuse_blocks
from specexport.exporter.heads.record import RecurrentRecord, Source
from specexport.runtime.errors import CheckpointError

Order = tuple[Literal["embedding", "hidden"], Literal["embedding", "hidden"]]


@dataclass(frozen=True, slots=True)
class Layout:
    """Names of one dialect. ``layer`` is the prefix of the decoder layer; ``{n}`` the target's number of layers."""

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
    counts = [count for key in COUNT_KEYS if (count := keys.integer(key, 1, 64)) is not None]
    if any(count != 1 for count in counts):
        raise CheckpointError(f"{keys.where}: {counts[0]} prediction layers; only one, reused, is built")

    def named(template: str) -> str:
        return template.replace("{n}", str(layers))

    fuse = named(layout.fuse)
    hidden = tensors.matrix(fuse)[0]
    agree(keys, "hidden_size", hidden, fuse)
    tensors.take("fuse.weight", fuse, (hidden, 2 * hidden))
    for canonical, name in (
        ("embedding_norm.weight", layout.embedding_norm),
        ("hidden_norm.weight", layout.hidden_norm),
        ("norm.weight", layout.norm),
    ):
        tensors.take(canonical, named(name), (hidden,))
    check_layer_types(keys, layers)
    blocks = read_blocks(
        keys,
        tensors,
        [named(layout.layer)],
        hidden,
        first_width=hidden,
        first_input_norm=True,
        kind=kind,
        norm_offset=layout.norm_offset,
    )
    vocab = keys.integer("vocab_size", *LIMITS["vocab_size"])
    if vocab is None:
        raise CheckpointError(f"{keys.where}: vocab_size is missing; it is required")
    keys.boolean("tie_word_embeddings", False)  # of the target, whose reader obeys it
    embedding = _copy(tensors, "embedding", layout.embedding and named(layout.embedding), (vocab, hidden))
    lm_head = _copy(tensors, "lm_head", layout.lm_head and named(layout.lm_head), (vocab, hidden))
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
        blocks=blocks,
        final_norm=True,
        feedback=layout.feedback,
        embedding=embedding,
        embedding_size=hidden,
        lm_head=lm_head,
        draft_to_target=None,
        max_positions=blocks.rope.max_position_embeddings,
        lineage=head_lineage,
    )
    return Reading(record, tensors.parts)


def _copy(tensors: Tensors, canonical: str, name: str | None, shape: tuple[int, int]) -> Source:
    """The file's own copy where it has one (it wins), else the target's."""
    if name is None or name not in tensors:
        return "target"
    tensors.take(canonical, name, shape)
    return "head"
