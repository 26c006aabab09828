"""Heads in a build: read and checked against the target, then written as a drafter of the bundle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from specexport.engines.ort import TARGET_FILE
from specexport.exporter.config import TargetConfig
from specexport.exporter.heads.base import Head
from specexport.exporter.heads.detect import open_head
from specexport.exporter.heads.export import export_medusa, export_recurrent
from specexport.exporter.heads.pairing import check_pair
from specexport.exporter.heads.record import MedusaRecord
from specexport.runtime.drafters.paths import Path as RankPath
from specexport.runtime.drafters.paths import template
from specexport.runtime.errors import UsageError
from specexport.runtime.manifest import DrafterInfo


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Shape of the drafts.

    Attributes:
        tree: rank paths of a static tree (Medusa), None for a dynamic one.
        depth: edges below the root of the deepest node (recurrent heads; Medusa has one depth a head).
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
    return head, [*head.warnings, *warnings]


def check_draft(head: Head, draft: DraftOptions) -> None:
    """Refuse a draft that the heads cannot fill, before anything is exported.

    Raises:
        UsageError: the option, what it is and what is possible.
    """
    record = head.record
    if isinstance(record, MedusaRecord):
        if draft.tree is not None:
            template(draft.tree, record.num_heads, draft.topk)
        return
    if draft.tree is not None:
        raise UsageError(f"--tree is for Medusa heads: {record.method} heads grow their own")
    pool = draft.topk + (draft.depth - 1) * draft.topk**2
    if draft.nodes > pool:
        raise UsageError(
            f"--draft-nodes {draft.nodes}: depth {draft.depth} with {draft.topk} candidates gives at most {pool}"
        )


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
            k=draft.topk,
            valid_vocab=valid_vocab,
            target_graph=target_graph,
        )
        options = {"heads": record.num_heads, "k": draft.topk}
    else:
        rows = min(slots, record.max_positions)
        export_recurrent(
            record,
            head.weights,
            graph,
            dtype=dtype,
            slots=rows,
            depth=draft.depth,
            k=draft.topk,
            nodes=draft.nodes,
            valid_vocab=valid_vocab,
            target_graph=target_graph,
        )
        options = {"nodes": draft.nodes, "depth": draft.depth, "slots": rows, "max_positions": record.max_positions}
    return DrafterInfo(name=record.method, kind=record.method, options=options, graph=graph.name, tree=draft.tree)
