"""What a bundle or a head says about itself, and what follows from it."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specexport.exporter.report import read_report
from specexport.runtime.bundle import CHAT_TEMPLATE, ENGINES, Bundle
from specexport.runtime.device_profile import profile_names
from specexport.runtime.manifest import DTYPES

if TYPE_CHECKING:
    from specexport.exporter.checkpoint import Checkpoint
    from specexport.exporter.heads.base import Head
    from specexport.exporter.heads.record import BlockConfig, MedusaRecord, RecurrentRecord

_ITEM_BYTES = dict(zip(DTYPES, (4, 2, 2), strict=True))


def describe(bundle: Bundle) -> dict[str, Any]:
    """``inspect --json``.

    Returns:
        ``bundle``: the path; ``manifest``: as it stands; ``derived``: ``cache_bytes`` of all layers at S slots,
        ``total_bytes`` of the listed files, ``chat_template`` (is there one), ``verified`` (the verdict of
        report.json, null without one), ``command`` (for a shell), ``devices`` (that have a profile or an engine).
    """
    manifest = bundle.manifest
    target = manifest.target
    return {
        "bundle": str(bundle.path),
        "manifest": manifest.to_dict(),
        "derived": {
            "cache_bytes": 2
            * target.layers
            * target.kv_heads
            * target.slots
            * target.head_dim
            * _ITEM_BYTES[target.precision.activations],
            "total_bytes": sum(file.bytes for file in manifest.files.values()),
            "chat_template": CHAT_TEMPLATE in manifest.files,
            "verified": _verdict(bundle),
            "command": shlex.join(manifest.command),
            "devices": {
                "profiles": profile_names(bundle),
                "engines": sorted(path.name for path in (bundle.path / ENGINES).glob("[!.]*/")),
            },
        },
    }


def precision_words(precision: Mapping[str, Any]) -> str:
    """``precision`` of a manifest in words: ``int4 (blocks of 32), lm_head int8, fp32 activations``."""
    words = [precision["weights"]]
    if precision["block"]:
        words[0] += f" (blocks of {precision['block']})"
    words += [
        f"{name} {precision[name]}" for name in ("lm_head", "embedding") if precision[name] != precision["weights"]
    ]
    return ", ".join(
        [*words, f"{precision['activations']} activations", *([] if precision["exact"] else ["not exact"])]
    )


def agreement_words(agreement: Sequence[float]) -> str:
    """Held-out agreement by depth in words: ``first choice right 61%, 56% by depth``."""
    return f"first choice right {', '.join(f'{share:.0%}' for share in agreement)} by depth"


def _verdict(bundle: Bundle) -> bool | None:
    """``passed`` of the report, None when there is no readable report."""
    passed = read_report(bundle.path).get("passed")
    return passed if isinstance(passed, bool) else None


def describe_head(head: Head, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """``inspect --json`` of a head.

    Args:
        warnings: of the pairing with a target; the head's own come first.

    Returns:
        ``head``: what the user named; ``record``: every field (a vocabulary map as its ``size``, ``first`` and ``last``
        target ids); ``tensors``: canonical name -> ``source`` (stored name) and ``shape``; ``words``: the record in
        words, by topic; ``agreement`` on held-out text, by depth, as training noted; ``fingerprint`` (headers only) and
        ``warnings``.
    """
    record = {
        field.name: getattr(head.record, field.name)
        for field in dataclasses.fields(head.record)  # not asdict, which copies vocabulary maps
    }
    for name in ("token_map", "draft_to_target"):
        if (ids := record.get(name)) is not None:
            record[name] = {"size": len(ids), "first": int(ids[0]), "last": int(ids[-1])}
    for name in ("blocks", "lineage"):
        if name in record:
            record[name] = dataclasses.asdict(record[name])
    return {
        "head": head.source,
        "record": record | {"captures": head.record.captures},
        "words": {
            "layout": f"{head.record.method}, {head.record.dialect}",
            **_words(head.record),
            **({"held out": agreement_words(agreement)} if (agreement := head.agreement()) else {}),
        },
        "agreement": list(agreement),
        "tensors": {
            name: {"source": head.weights.origin(name), "shape": head.weights.shape(name)}
            for name in head.weights.names()
        },
        "fingerprint": head.fingerprint(fast=True),
        "warnings": [*head.warnings, *warnings],
    }


def describe_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """``inspect --json`` of a target's checkpoint.

    Returns:
        ``checkpoint``: what the user named; ``config``: the fields of :class:`TargetConfig`; ``quantization``: in
        words, null if there is none; ``matrices``: how many of how many are stored as codes (of GGUF: blocks);
        ``notes``; ``fingerprint`` (headers only).
    """
    from specexport.exporter.config import read_config
    from specexport.exporter.heads.base import FLOATS
    from specexport.exporter.heads.merged import check_target
    from specexport.exporter.quantize.stored import QUANTIZED

    weights = checkpoint.weights
    config = read_config(checkpoint.config) if checkpoint.kind == "gguf" else check_target(checkpoint)
    dtypes = {name: weights.stored(name)[0] for name in weights.names() if len(weights.shape(name)) == 2}
    coded = sum(dtype == QUANTIZED or dtype not in FLOATS for dtype in dtypes.values())
    return {
        "checkpoint": checkpoint.source,
        "config": dataclasses.asdict(config),
        "quantization": checkpoint.quantization,
        "matrices": {"quantized": coded, "all": len(dtypes)},
        "notes": list(checkpoint.notes),
        "fingerprint": checkpoint.fingerprint(fast=True),
    }


def _words(record: MedusaRecord | RecurrentRecord) -> dict[str, str]:
    verifier = record.lineage.verifier or record.lineage.architecture or "not named"
    if record.method == "medusa":
        bias = "with" if record.block_bias else "without"
        whose = {"own": "one a head", "shared": "one for all heads, the head's", "target": "the target's"}[
            record.lm_head
        ]
        return {
            "captures": "the target's state after its final norm",
            "heads": f"{record.num_heads} heads of {record.num_layers} blocks x + {record.activation}(Wx), {bias} bias",
            "width": str(record.hidden_size),
            "lm_head": whose,
            "vocabulary": f"{record.vocab_size} rows" + _mapped(record.token_map),
            "made for": verifier,
        }
    blocks = record.blocks
    reduce_norm = {"none": "as they are", "concat": "normed together", "each": "each normed"}[record.reduce_norm]
    bias = " with bias" if record.reduce_bias else ""
    width = f"{len(record.captures) * record.target_hidden_size} -> {blocks.hidden_size}"
    normed = [
        name for name, there in (("embedding", record.embedding_norm), ("hidden state", record.hidden_norm)) if there
    ]
    joined = " then ".join(record.order)
    fused = "projected" + (" with bias" if record.fuse_bias else "") if record.fusion == "project" else "side by side"
    first = "" if blocks.first_input_norm or record.fusion == "concat" else ", the first without an input norm"
    extras = [
        name
        for name, there in (
            ("biases on q, k, v", blocks.attention_bias),
            ("a bias on o", blocks.output_bias),
            ("biases in the MLP", blocks.mlp_bias),
            ("q and k norms", blocks.qk_norm),
            ("a gate on each head's output", blocks.gated),
        )
        if there
    ]
    residual = ("normed" if record.norm_before_residual else "un-normed") + " hidden state"
    latent, count = blocks.latent, record.prediction_layers
    width_of_head = blocks.head_dim if latent is None else latent.nope_dim + latent.rope_dim
    theta = f"{blocks.rope.kind}, theta {blocks.rope.theta:g}, {blocks.rope.rotary_dim} of {width_of_head} dimensions"
    if latent is None:
        heads = f"{blocks.num_heads} heads ({blocks.num_kv_heads} kv) of {blocks.head_dim}"
    else:
        theta += ", neighbouring pairs" if latent.interleaved else ""
        heads = f"{blocks.num_heads} heads of {width_of_head} over a latent of {latent.rank} + {latent.rope_dim}"
    return {
        "captures": ", ".join(
            "the target's state after its final norm" if c == "final" else f"entering layer {c}"
            for c in record.captures
        ),
        "features": f"{reduce_norm}, reduced {width}{bias}" if record.reduce else "used as they are",
        "input": f"{joined}, {fused}" + (f"; normed: {' and '.join(normed)}" if normed else "; no norms"),
        "prediction": "one layer, fed its own output past the first draft"
        if count == 1
        else f"{count} layers, each drafting one depth from the one before; past them the last is fed its own output",
        "layers": f"{blocks.num_layers} of {heads}, width {blocks.hidden_size}, {_mlp(blocks)}{first}",
        "layer extras": ", ".join(extras) or "none",
        "norm weights": f"eps {blocks.norm_eps:g}"
        + (f", stored as w - {blocks.norm_offset:g}" if blocks.norm_offset else ""),
        "residual": residual if record.fusion == "concat" else "the layer's input",
        "rope": theta,
        "context": f"{record.max_positions} positions",
        "logits": ("final norm, then " if record.final_norm else "no final norm, ") + f"the {record.lm_head}'s lm_head",
        "feedback": {"raw": "the output before the final norm", "normed": "the output after the final norm"}[
            record.feedback
        ],
        "embedding": f"the {record.embedding}'s, "
        + ("not scaled" if record.embedding_scale == 1.0 else f"times {record.embedding_scale:g}"),
        "vocabulary": f"{record.draft_vocab_size} of {record.vocab_size} rows" + _mapped(record.draft_to_target),
        "made for": verifier,
    }


def _mlp(blocks: BlockConfig) -> str:
    experts = blocks.experts
    if experts is None:
        return f"MLP {blocks.intermediate_size} {blocks.activation}"
    groups = f" from the {experts.top_groups} best of {experts.groups} groups" if experts.groups > 1 else ""
    shared = f", a shared one of {experts.shared_size}" if experts.shared_size else ""
    return (
        f"{experts.top} of {experts.count} experts of {experts.intermediate_size} by {experts.scores}{groups}, weights "
        + ("normalised" if experts.normalise else "as they are")
        + (f" and times {experts.scale:g}" if experts.scale != 1.0 else "")
        + shared
        + (" with a gate" if experts.shared_gate else "")
    )


def _mapped(ids: Any) -> str:
    return "" if ids is None else f", mapped to target ids {int(ids.min())} to {int(ids.max())}"
