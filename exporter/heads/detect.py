"""Opening a head: which dialect it is by its tensors, never by its name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from specexport.exporter.checkpoint import Checkpoint
from specexport.exporter.config import TargetConfig
from specexport.exporter.heads.base import IGNORED, OVERRIDES, Head, HeadWeights, Reading, Tensors, head_keys
from specexport.exporter.heads.eagle1 import SPECULATORS_NAMES, read_eagle1
from specexport.exporter.heads.eagle3 import read_eagle3
from specexport.exporter.heads.files import HeadFiles, Subset, open_files, split_overrides
from specexport.exporter.heads.medusa import MEDUSA2_PREFIX, layout_of, read_medusa
from specexport.exporter.heads.merged import check_target, head_filter, target_view
from specexport.exporter.heads.mtp import read_mtp
from specexport.exporter.shards import StoredWeights
from specexport.runtime.errors import CheckpointError

#: Tensors of EAGLE heads that stand outside a ``model.`` prefix.
_OUTSIDE = frozenset({"lm_head.weight", "d2t", "t2d", "token_map"})
_EAGLE3 = re.compile(r"(model\.)*(midlayer\..*|layers\.0\.hidden_norm\.weight)|d2t|t2d")
_EAGLE = re.compile(r"(model\.)*(fc|fusion_fc)\.weight")
_MTP = {
    "mimo": re.compile(r"(model\.)?mtp_layers\.\d+\..*"),
    "qwen3_next": re.compile(r"mtp\..*"),
    "deepseek": re.compile(r"(model\.)?layers\.\d+\.(enorm|hnorm|eh_proj)\.weight"),
}
#: Heads that are recognised but not read, by a tensor of theirs.
_UNREAD = {
    "DFlash or DSpark": re.compile(r"(model\.)?(hidden_norm\.weight|markov_head\..*|confidence_head\..*)"),
    "P-EAGLE": re.compile(r"(model\.)?mask_hidden"),
    "Hydra": re.compile(r"hydra_(head|lm_head|mlp)\..*|prefix_embeding_layer.*"),
    "ReDrafter": re.compile(r"(drafter\.)?(rnn_u|rnn_w|input_proj|output_proj)\..*"),
}
_ORDINARY = re.compile(r"(model\.)?(embed_tokens\.weight|layers\.0\.self_attn\.q_?(kv)?_?proj\.weight)")


def open_head(
    source: str, *, target: TargetConfig | None = None, revision: str | None = None, offline: bool = False
) -> Head:
    """Open speculative heads of any dialect of ``heads.record``.

    Args:
        source: a directory, a weights file, or a hub id; ``?key=value`` behind it settles what its config leaves open
            (EAGLE-3: ``captures``, ``feedback``, ``final_norm``, ``norm_before_residual``). For heads inside a target
            (Medusa-2, multi-token prediction) the target's checkpoint; build the target itself from
            ``merged.target_view`` of it.
        target: decides what a head leaves to it (default captures, whose lm_head). ``pairing.check_pair`` compares.
        revision: branch, tag or commit on the hub. offline: use the hub cache only.

    Raises:
        CheckpointError: no head, one that is not read, or any tensor or config key that is missing, not understood,
            contradictory or open to two readings.
    """
    place, overrides = split_overrides(source)
    files = open_files(place, revision=revision, offline=offline)
    if overrides:
        config = files.config or {}
        written = config.get(OVERRIDES, {})
        files = replace(files, config=config | {OVERRIDES: (written if isinstance(written, dict) else {}) | overrides})
    names = set(files.weights.names())
    belongs = head_filter(names)
    inside = {name for name in names if belongs(name)}
    stored: StoredWeights = Subset(files.weights, inside.__contains__) if inside else files.weights
    merged = bool(inside and names - inside)
    if merged:
        check_target(target_view(Checkpoint(source, files.directory, "hf", _config(files), files.weights)))
    reading = _read(files, stored, target, merged)
    weights = HeadWeights(stored, reading.parts)
    warnings = (*files.notes, *reading.warnings)
    return Head(source, files.directory, files.config or {}, reading.record, weights, warnings, stored)


def holds_head(names: Iterable[str]) -> bool:
    """Whether the tensors of a checkpoint are those of a head, or of a target with one inside; known or not read."""
    known = set(names)
    patterns = [_EAGLE3, _EAGLE, *_MTP.values(), *_UNREAD.values()]
    return (
        any(map(head_filter(known), known))
        or bool(layout_of(known) or layout_of({name.removeprefix("medusa_heads.") for name in known}))
        or any(pattern.fullmatch(name) for pattern in patterns for name in known)
    )


def _read(files: HeadFiles, stored: StoredWeights, target: TargetConfig | None, merged: bool) -> Reading:
    names = set(stored.names())
    if any(name.startswith(MEDUSA2_PREFIX) for name in names):
        return read_medusa(head_keys(_config(files)), Tensors(stored, {MEDUSA2_PREFIX: ""}), target, merged=merged)
    nested = {"medusa_heads.": ""} if any(name.startswith("medusa_heads.blocks.") for name in names) else {}
    if layout_of({name.removeprefix("medusa_heads.") for name in names} if nested else names):
        # A lone medusa_lm_head.pt says everything: its config only repeats the counts and names the target.
        return read_medusa(head_keys(files.config or {}), Tensors(stored, nested), target)
    for family, pattern in _MTP.items():
        if any(map(pattern.fullmatch, names)):
            renames = {"model.": ""} if all(name.startswith("model.") for name in names) else {}
            return read_mtp(head_keys(_config(files)), Tensors(stored, renames), family, merged=merged)
    for kind, pattern in _UNREAD.items():
        if found := sorted(filter(pattern.fullmatch, names)):
            raise CheckpointError(f"{files.source}: tensor {found[0]!r} is that of a {kind} head, which is not read")
    if any(map(_EAGLE3.fullmatch, names)):
        return read_eagle3(head_keys(_config(files)), Tensors(stored, _eagle_names(names)), target)
    if any(map(_EAGLE.fullmatch, names)):
        return read_eagle1(head_keys(_config(files)), Tensors(stored, _eagle_names(names)))
    if any(map(_ORDINARY.fullmatch, names)):
        raise CheckpointError(
            f"{files.source}: an ordinary language model, not a head; it can draft as a model of its own: open it as a "
            "checkpoint, like a target"
        )
    raise CheckpointError(
        f"{files.source}: no known head among {len(names)} tensors (the first is {min(names, default='none')!r}); "
        "expected Medusa, EAGLE-1/2, EAGLE-3 or multi-token prediction"
    )


def _eagle_names(names: set[str]) -> dict[str, str]:
    """Prefixes to rename, each only where all names of its kind have it."""
    inner = {name for name in names - _OUTSIDE if not IGNORED.fullmatch(name)}
    prefix = next((p for p in ("model.model.", "model.") if inner and all(n.startswith(p) for n in inner)), "")
    bare = {name.removeprefix(prefix) for name in inner}
    renames: dict[str, str] = {}
    if not any(name.startswith("layers.0.") for name in bare):
        renames[prefix + "midlayer."] = "layers.0."
        if not any(name.startswith(("midlayer.", "fc.")) for name in bare):
            renames |= {prefix + old: new for old, new in SPECULATORS_NAMES.items()}
    # What stands outside the prefix is not looked for inside it.
    return renames | ({**{prefix + name: prefix + name for name in _OUTSIDE}, prefix: ""} if prefix else {})


def _config(files: HeadFiles) -> dict[str, Any]:
    if files.config is None:
        raise CheckpointError(f"{files.directory}: config.json is missing; this head cannot be read without it")
    return files.config
