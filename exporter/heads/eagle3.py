"""EAGLE-3 heads (Li et al. 2025, https://github.com/SafeAILab/EAGLE) in every dialect, told apart by structure.

``fc`` reduces several captured states of the target; layer 0 attends over ``cat(input_layernorm(embed),
hidden_norm(hidden))``. Logits come from ``lm_head(norm(h))``; h is fed back, as it is or normed.

* ``eagle3``: the original, ``midlayer.*``; captures by default. ``eagle3-specforge``: the same with ``eagle_config``.
* ``eagle3-deepspec``: ``target_layer_ids`` (five), q and k norms, ``layers.0.*``.
* ``eagle3-speculators``: ``transformer_layer_config`` and explicit norm flags.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from specexport.exporter.config import TargetConfig
from specexport.exporter.config_values import LIMITS, text
from specexport.exporter.heads.base import OVERRIDES, Keys, Reading, Tensors, both, lineage
from specexport.exporter.heads.block import check_layer_types, model_type, read_blocks
from specexport.exporter.heads.block_parts import agree
from specexport.exporter.heads.captures import read_ids, resolve_captures
from specexport.exporter.heads.record import HeadLineage, RecurrentRecord, Source
from specexport.exporter.heads.speculators import read_lineage
from specexport.exporter.heads.vocab import read_offsets
from specexport.exporter.layers import Capture
from specexport.runtime.errors import CheckpointError

Feedback = Literal["raw", "normed"]
#: Of the training run.
_TRAINING = ("ttt_length", "step_loss_decay", "target_model_type", "draft_num_hidden_layers", "enable_sp_ulysses")


@dataclass(frozen=True, slots=True)
class _Frame:
    """What the config says around the decoder layers."""

    dialect: str
    block: Keys
    lineage: HeadLineage
    captures: tuple[Capture, ...]
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    feedback: Feedback
    final_norm: bool
    target_rows: bool  #: the lm_head is the target's, cut to the draft vocabulary


def read_eagle3(keys: Keys, tensors: Tensors, target: TargetConfig | None) -> Reading:
    """Read a head of any EAGLE-3 dialect.

    Raises:
        CheckpointError: anything missing, not understood, contradictory, or with two readings.
    """
    frame = _frame(keys, tensors, target)
    block = frame.block
    hidden = tensors.vector("layers.0.hidden_norm.weight")
    agree(block, "hidden_size", hidden, "layers.0.hidden_norm.weight")
    features = _reduce(keys, tensors, frame, hidden, target)
    tensors.take("embedding_norm.weight", "layers.0.input_layernorm.weight", (hidden,))
    tensors.take("hidden_norm.weight", "layers.0.hidden_norm.weight", (hidden,))
    count = block.integer("num_hidden_layers", *LIMITS["num_hidden_layers"], default=1) or 1
    check_layer_types(block, count)
    blocks = read_blocks(
        block,
        tensors,
        [f"layers.{index}." for index in range(count)],
        hidden,
        first_width=2 * hidden,
        first_input_norm=False,
        kind=model_type(block),
    )
    if frame.final_norm:
        tensors.take("norm.weight", "norm.weight", (hidden,))
    vocab = _vocab(block, tensors)
    embedding = _embedding(keys, tensors, vocab, hidden, features)
    lm_head, rows = _lm_head(keys, block, tensors, vocab, hidden, features, embedding, frame.target_rows)
    ids = read_offsets(tensors, rows, vocab)
    tensors.finish(frame.dialect)
    keys.finish()
    if block is not keys:
        block.finish()
    record = RecurrentRecord(
        method="eagle3",
        dialect=frame.dialect,
        captures=frame.captures,
        target_hidden_size=features,
        vocab_size=vocab,
        draft_vocab_size=rows,
        reduce=frame.captures != ("final",),
        reduce_bias="reduce.bias" in tensors.parts,
        reduce_norm="concat" if frame.norm_before_fc else "each" if frame.fc_norm else "none",
        fusion="concat",
        fuse_bias=False,
        order=("embedding", "hidden"),
        embedding_norm=True,
        hidden_norm=True,
        norm_before_residual=frame.norm_before_residual,
        blocks=blocks,
        final_norm=frame.final_norm,
        feedback=frame.feedback,
        embedding=embedding,
        embedding_size=hidden,
        lm_head=lm_head,
        draft_to_target=ids,
        max_positions=blocks.rope.max_position_embeddings,
        lineage=frame.lineage,
    )
    return Reading(record, tensors.parts)


def _frame(keys: Keys, tensors: Tensors, target: TargetConfig | None) -> _Frame:
    inner, eagle = keys.object("transformer_layer_config"), keys.object("eagle_config")
    override = keys.object(OVERRIDES)
    explicit: tuple[int, ...] | None = None
    feedback: Any = None
    normed: bool | None = None
    before: bool | None = None
    whose: str | None = None
    if override is not None:
        explicit, feedback = read_ids(override, "captures"), override.string("feedback")
        normed, before = override.flag("final_norm"), override.flag("norm_before_residual")
        whose = override.string("lm_head")
        override.finish()
        if feedback not in (None, "raw", "normed"):
            raise CheckpointError(f"{override.where}: feedback is {text(feedback)}; expected raw or normed")
        if whose not in (None, "target"):
            raise CheckpointError(f"{override.where}: lm_head is {text(whose)}; expected target, or nothing")
    outputs = read_ids(keys, "target_layer_ids")
    boundaries = read_ids(keys, "eagle_aux_hidden_state_layer_ids")
    unsure = None if eagle is None else read_ids(eagle, "eagle_aux_hidden_state_layer_ids")
    aux = True if eagle is None else eagle.boolean("use_aux_hidden_state", True)
    if eagle is not None:
        eagle.finish()
    head_lineage = HeadLineage()
    if inner is not None:
        dialect = "eagle3-speculators"
        head_lineage = read_lineage(keys, "eagle3")
        if "norm_before_residual" not in keys and before is None:
            raise both(
                "a speculators head without norm_before_residual",
                "false (speculators' own default)",
                "true (the default of vLLM's loader)",
                "write the value of the training run into config.json, or HEADS?norm_before_residual=false (or true)",
            )
    else:
        dialect = "eagle3-deepspec" if outputs is not None else "eagle3" if eagle is None else "eagle3-specforge"
        head_lineage = lineage(keys, "target_model_name_or_path", "base_model_name_or_path")
    said = keys.integer("num_target_layers", *LIMITS["num_hidden_layers"])
    if said is not None and target is not None and said != target.num_layers:
        raise CheckpointError(
            f"config: num_target_layers is {said} but the target has {target.num_layers}; another target?"
        )
    layers = target.num_layers if target is not None else said
    keys.ignore(*_TRAINING)
    final_norm, fed = _output(keys, tensors, inner is not None, feedback, normed)
    if before is not None and keys.flag("norm_before_residual") not in (None, before):
        raise CheckpointError(f"config: norm_before_residual contradicts {OVERRIDES}.norm_before_residual = {before}")
    captures: tuple[Capture, ...] = ("final",)
    if aux:
        captures = resolve_captures(explicit, boundaries, outputs, unsure, layers)
    elif any(ids is not None for ids in (explicit, boundaries, outputs)):
        raise CheckpointError("config: use_aux_hidden_state is false but layer ids are given; remove one of them")
    return _Frame(
        dialect=dialect,
        block=keys if inner is None else inner,
        lineage=head_lineage,
        captures=captures,
        norm_before_residual=keys.boolean("norm_before_residual", False if before is None else before),
        norm_before_fc=keys.boolean("norm_before_fc", False),
        fc_norm=keys.boolean("fc_norm", False),
        feedback=fed,
        final_norm=final_norm,
        target_rows=whose is not None,
    )


def _output(
    keys: Keys, tensors: Tensors, speculators: bool, explicit: Feedback | None, normed: bool | None
) -> tuple[bool, Feedback]:
    """Whether the lm_head reads a normed state, and what is fed back. ``norm_output`` means either, by dialect.

    Args:
        explicit, normed: what the user says is fed back, and whether the lm_head reads a normed state.
    """
    said = keys.flag("norm_output")
    if speculators:
        fed: Feedback = "normed" if said else "raw"
        if explicit not in (None, fed) or normed is False:
            told = f"feedback {explicit}" if normed is not False else "final_norm false"
            raise CheckpointError(
                f"config: norm_output makes the feedback {fed}, after a norm, but {OVERRIDES} says {told}"
            )
        return True, fed
    if normed is False:
        if "norm.weight" in tensors:
            tensors.skip("norm.weight")
        return False, explicit or "raw"
    if said is False and explicit is None and normed is None and "norm.weight" in tensors:
        raise both(
            "norm_output = false with a tensor 'norm.weight'",
            "no norm before the lm_head (SpecForge)",
            "the un-normed state is fed back, the lm_head reads the normed one (EAGLE-3.1)",
            "say HEADS?final_norm=false for the first, HEADS?feedback=raw for the second",
        )
    if said and explicit is None and keys.raw.get("fc_norm"):
        raise both(
            "norm_output = true with fc_norm",
            "a norm before the lm_head, the un-normed state fed back (SpecForge)",
            "the normed state fed back (EAGLE-3.1)",
            f'say HEADS?feedback=raw for the first, HEADS?feedback=normed for the second (or "{OVERRIDES}": '
            '{"feedback": ..} in its config.json)',
        )
    final = explicit is not None or normed is True or said is not False
    return final, explicit or "raw"


def _reduce(keys: Keys, tensors: Tensors, frame: _Frame, hidden: int, target: TargetConfig | None) -> int:
    """Take ``fc`` and its norms; return H, the width of one capture."""
    if frame.norm_before_fc and frame.fc_norm:
        raise CheckpointError("config: norm_before_fc and fc_norm are both true; the features are normed once")
    said = keys.integer("target_hidden_size", *LIMITS["hidden_size"])
    count = len(frame.captures)
    if frame.captures == ("final",):
        if "fc.weight" in tensors:
            raise CheckpointError(
                "tensor 'fc.weight' is in the file, but use_aux_hidden_state is false (one state, no fc): remove the "
                "tensor, or set it to true for a head of several captures"
            )
        if said not in (None, hidden):
            raise CheckpointError(
                f"config: target_hidden_size is {said}; without fc it must be the head's width {hidden}"
            )
        return hidden
    if "fc.weight" not in tensors:
        raise both(
            "a head without tensor 'fc.weight'",
            f"{count} captures reduced by fc, which is missing",
            "one post-norm state without fc",
            'set "eagle_config": {"use_aux_hidden_state": false} for the second',
        )
    width = tensors.matrix("fc.weight")[1]
    features = said if said is not None else target.hidden_size if target is not None else width // count
    if width != count * features:
        raise CheckpointError(
            f"tensor 'fc.weight' has {width} columns, but {count} captures of width {features} make "
            f"{count * features}: the captures or the target are not this head's"
        )
    tensors.take("reduce.weight", "fc.weight", (hidden, width))
    if "fc.bias" in tensors:
        tensors.take("reduce.bias", "fc.bias", (hidden,))
    for flag, key, names in (
        (frame.norm_before_fc, "norm_before_fc", [("reduce_norm.weight", "input_norm.weight", width)]),
        (
            frame.fc_norm,
            "fc_norm",
            [(f"reduce_norms.{i}.weight", f"fc_norm.{i}.weight", features) for i in range(count)],
        ),
    ):
        for canonical, name, size in names:
            if (name in tensors) != flag:
                there = "is in the file" if name in tensors else "is missing"
                raise CheckpointError(
                    f"tensor {name!r} {there}, but {key} is {str(flag).lower()} (or absent) in the config"
                )
            if flag:
                tensors.take(canonical, name, (size,))
    return features


def _vocab(block: Keys, tensors: Tensors) -> int:
    """V: what the config says, or the length of t2d or of the embedding."""
    found = [tensors.vector("t2d")] if "t2d" in tensors else []
    if "embed_tokens.weight" in tensors:
        found.append(tensors.matrix("embed_tokens.weight")[0])
    said = block.integer("vocab_size", *LIMITS["vocab_size"])
    if said is None and not found:
        raise CheckpointError(f"{block.where}: vocab_size is missing; it is required")
    return said if said is not None else found[0]


def _embedding(keys: Keys, tensors: Tensors, vocab: int, hidden: int, features: int) -> Source:
    trained = keys.flag("embed_requires_grad")
    if "embed_tokens.weight" in tensors:
        tensors.take("embedding", "embed_tokens.weight", (vocab, hidden))
        return "head"
    if trained:
        raise CheckpointError(
            "tensor 'embed_tokens.weight' is missing, but embed_requires_grad says that it was trained"
        )
    if hidden != features:
        raise CheckpointError(
            f"tensor 'embed_tokens.weight' is missing: the head's width {hidden} differs from the target's {features}, "
            "so the target's embedding does not fit"
        )
    return "target"


def _lm_head(
    keys: Keys,
    block: Keys,
    tensors: Tensors,
    vocab: int,
    hidden: int,
    features: int,
    embedding: Source,
    target_rows: bool,
) -> tuple[Source, int]:
    """Whose lm_head, and Vd."""
    said = keys.integer("draft_vocab_size", *LIMITS["vocab_size"])
    rows = vocab if said is None else said
    if rows > vocab:
        raise CheckpointError(f"config: draft_vocab_size {rows} is more than vocab_size {vocab}")
    tied = any([part.boolean("tie_word_embeddings", False) for part in (keys, block)])
    if target_rows:
        if "lm_head.weight" in tensors or hidden != features:
            held = "the file has 'lm_head.weight'" if "lm_head.weight" in tensors else f"the head is {hidden} wide"
            raise CheckpointError(f"config: {OVERRIDES}.lm_head is 'target' (rows of its lm_head), but {held}")
        return "target", rows
    if "lm_head.weight" in tensors:
        why = "draft_vocab_size" if said is not None else "vocab_size (draft_vocab_size is absent)"
        tensors.take("lm_head", "lm_head.weight", (rows, hidden), why=why)
        if tied and embedding == "head" and rows == vocab:
            pair = [tensors.stored.read(tensors.parts[name].source) for name in ("lm_head", "embedding")]
            if not torch.equal(*pair):
                raise both(
                    "tie_word_embeddings = true with an lm_head that differs from the embedding",
                    "the tensor 'lm_head.weight'",
                    "the tensor 'embed_tokens.weight'",
                    "set it to false, or remove the lm_head",
                )
        return "head", rows
    if rows != vocab or hidden != features or tied:
        raise CheckpointError(
            f"tensor 'lm_head.weight' [{rows}, {hidden}] is missing: the target's lm_head [{vocab}, {features}] is "
            "used only for the same shape and without tie_word_embeddings"
        )
    return "target", rows
