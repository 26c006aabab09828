"""Heads in a build: read and checked against the target, then written as a drafter of the bundle."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specexport.engines.ort import TARGET_FILE
from specexport.exporter.config import TargetConfig
from specexport.exporter.heads.base import Head
from specexport.exporter.heads.detect import open_head
from specexport.exporter.heads.export import export_medusa, export_recurrent
from specexport.exporter.heads.pairing import check_pair, fit_record
from specexport.exporter.heads.record import MedusaRecord
from specexport.exporter.heads.trees import DynamicTree, StaticTree
from specexport.runtime.drafters.paths import Path as RankPath
from specexport.runtime.drafters.paths import template
from specexport.runtime.errors import UsageError
from specexport.runtime.manifest import DrafterInfo


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Shape of the drafts.

    Attributes:
        tree: rank paths of a static tree, which then says depth, topk and nodes itself; None for a dynamic one.
        depth: edges below the root of the deepest node (recurrent heads and draft models; Medusa has one depth a head).
        topk: candidates a depth; recurrent heads expand as many nodes.
        nodes: drafted nodes of a dynamic tree.
    """

    tree: tuple[RankPath, ...] | None = None
    depth: int = 5
    topk: int = 8
    nodes: int = 15


def read_head(
    source: str, config: TargetConfig, target_source: str, target_tokenizer: bytes, *, offline: bool
) -> tuple[Head, list[str]]:
    """Open heads and compare them with their target.

    Returns:
        The heads, and warnings for the user.

    Raises:
        CheckpointError: they are not understood, or belong to another target.
    """
    head = open_head(source, target=config, offline=offline)
    warnings = check_pair(head.record, config, head.tokenizer(), target_tokenizer, target_source=target_source)
    return replace(head, record=fit_record(head.record, config)), [*head.warnings, *warnings]


def check_draft(head: Head, draft: DraftOptions) -> None:
    """Refuse a draft that the heads cannot fill, before anything is exported.

    Raises:
        UsageError: the option, what it is and what is possible.
    """
    record = head.record
    if isinstance(record, MedusaRecord):
        width, rows = medusa_topk(draft), record.vocab_size
        if draft.tree is not None:
            template(draft.tree, record.num_heads, width)
    else:
        width, rows = recurrent_tree(draft).topk, record.draft_vocab_size
    if width > rows:
        raise UsageError(f"{width} candidates of each draft: the head has {rows} tokens to choose from")


def medusa_topk(draft: DraftOptions) -> int:
    """Candidates of each Medusa head: as many as a static tree takes."""
    return draft.topk if draft.tree is None else StaticTree(draft.tree).topk


def recurrent_tree(draft: DraftOptions) -> DynamicTree | StaticTree:
    """The trees that recurrent heads grow.

    Raises:
        UsageError: a dynamic tree that is larger than its candidates, a static one that is none.
    """
    if draft.tree is not None:
        return StaticTree(draft.tree)
    try:
        return DynamicTree(draft.depth, draft.topk, draft.nodes)
    except ValueError as error:
        raise UsageError(f"--draft-nodes {draft.nodes}: {error}") from None


def write_drafter(
    head: Head, folder: Path, draft: DraftOptions, *, dtype: torch.dtype, slots: int, valid_vocab: int
) -> DrafterInfo:
    """Write the drafter graph beside ``target.onnx`` in ``folder``.

    Args:
        slots: cache rows of the target; the drafter has as many, or what it was trained for if that is less.
    """
    record = head.record
    graph = folder / f"drafter.{record.method}.onnx"
    target_graph = folder / TARGET_FILE
    options: dict[str, bool | int | float | str | None]
    if isinstance(record, MedusaRecord):
        export_medusa(
            record,
            head.weights,
            graph,
            dtype=dtype,
            k=medusa_topk(draft),
            valid_vocab=valid_vocab,
            target_graph=target_graph,
        )
        options = {"heads": record.num_heads, "k": medusa_topk(draft)}
    else:
        rows, tree = min(slots, record.max_positions), recurrent_tree(draft)
        export_recurrent(
            record,
            head.weights,
            graph,
            dtype=dtype,
            slots=rows,
            tree=tree,
            valid_vocab=valid_vocab,
            target_graph=target_graph,
        )
        options = {"nodes": tree.nodes, "depth": tree.depth, "slots": rows, "max_positions": record.max_positions}
    return DrafterInfo(name=record.method, kind=record.method, options=options, graph=graph.name, tree=draft.tree)
