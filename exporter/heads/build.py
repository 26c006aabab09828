"""Heads in a build: read and checked against the target, then written as a drafter of the bundle."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from specexport.engines.ort import TARGET_FILE
from specexport.exporter.config import TargetConfig
from specexport.exporter.heads.base import TRAINING, Head
from specexport.exporter.heads.detect import open_head
from specexport.exporter.heads.draft_model import write_vocabulary
from specexport.exporter.heads.export import export_medusa, export_recurrent
from specexport.exporter.heads.pairing import check_pair, fit_record
from specexport.exporter.heads.record import MedusaRecord
from specexport.exporter.heads.trees import DynamicTree, StaticTree
from specexport.exporter.layers import Capture
from specexport.exporter.quantize.plan import FLOATS, Plan
from specexport.runtime.auto import AUTO
from specexport.runtime.drafters import DRAFTERS, NO_DRAFTER
from specexport.runtime.drafters.model import ModelDrafter
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


#: ``NAME=HEADS``.
_NAMED = re.compile(r"([a-z0-9][a-z0-9_-]{0,63})=(.+)")


def read_heads(
    requests: Sequence[str], config: TargetConfig, target_source: str, target_tokenizer: bytes, *, offline: bool
) -> tuple[dict[str, Head], list[str]]:
    """Open every head of a bundle; see :func:`read_head`.

    Args:
        requests: sources, or ``NAME=SOURCE``. Without a name a head is called by its method, the second of a kind
            with ``-2`` behind it.

    Returns:
        The heads by name, in order, and warnings for the user.

    Raises:
        UsageError: a name that something else has.
    """
    heads: dict[str, Head] = {}
    warnings: list[str] = []
    named = [match.groups() if (match := _named(request)) else (None, request) for request in requests]
    taken = {*DRAFTERS, NO_DRAFTER, AUTO, ModelDrafter.kind}
    for name, source in named:
        if name is not None and name in taken:
            raise UsageError(f"--heads {name}={source}: the name {name!r} is taken, choose another")
        taken |= {name} if name is not None else set()
    for name, source in named:
        head, more = read_head(source, config, target_source, target_tokenizer, offline=offline)
        name = _free_name(head.record.method, taken) if name is None else name
        taken.add(name)
        heads[name] = head
        warnings += more if len(requests) == 1 else [f"{name}: {warning}" for warning in more]
    return heads, warnings


def _named(request: str) -> re.Match[str] | None:
    """The two parts of ``NAME=SOURCE``; None for a source, also for a path that looks like it."""
    return None if Path(request).exists() else _NAMED.fullmatch(request)


def _free_name(method: str, taken: set[str]) -> str:
    numbered = (f"{method}-{number}" for number in range(2, len(taken) + 3))
    return next(name for name in (method, *numbered) if name not in taken)


def union(heads: Mapping[str, Head]) -> tuple[Capture, ...]:
    """What the target has to output for all heads, in the order in which they ask for it."""
    return tuple(dict.fromkeys(capture for head in heads.values() for capture in head.record.captures))


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


def precision_warnings(heads: Mapping[str, Head], precision: str) -> list[str]:
    """One line for each head that was trained on features of a target in another precision (``target_precision`` in
    its ``specexport_training`` object); between floating-point types there is no difference to speak of."""
    warnings = []
    for name, head in heads.items():
        training = head.config.get(TRAINING)
        made_for = training.get("target_precision") if isinstance(training, dict) else None
        if made_for in (None, precision) or (str(made_for) in FLOATS and precision in FLOATS):
            continue
        warnings.append(
            f"heads {name} were trained on the features of a target in {str(made_for)[:20]}, this one is "
            f"{precision}: fewer of their drafts will be right"
        )
    return warnings


def check_draft(head: Head, draft: DraftOptions) -> None:
    """Refuse a draft that the heads cannot fill, before anything is exported.

    Raises:
        UsageError: the option, what it is and what is possible.
        CheckpointError: what the head says of its training is no such thing.
    """
    head.agreement()
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
    name: str,
    head: Head,
    folder: Path,
    draft: DraftOptions,
    *,
    dtype: torch.dtype,
    slots: int,
    valid_vocab: int,
    offered: tuple[Capture, ...],
    plan: Plan | None = None,
) -> DrafterInfo:
    """Write the drafter graph ``drafter.<name>.onnx`` beside ``target.onnx`` in ``folder``, and its table of ids.

    Args:
        slots: cache rows of the target; the drafter has as many, or what it was trained for if that is less.
        offered: what the target's features are, the captures of this head among them.
        plan: formats of its own matrices; tables that it shares are as the target stores them.
    """
    record = head.record
    graph = folder / f"drafter.{name}.onnx"
    target_graph = folder / TARGET_FILE
    options: dict[str, bool | int | float | str | None]
    if isinstance(record, MedusaRecord):
        ids = record.token_map
        valid = export_medusa(
            record,
            head.weights,
            graph,
            dtype=dtype,
            k=medusa_topk(draft),
            valid_vocab=valid_vocab,
            target_graph=target_graph,
            offered=offered,
            plan=plan,
        )
        options = {"heads": record.num_heads, "k": medusa_topk(draft)}
    else:
        rows, tree = min(slots, record.max_positions), recurrent_tree(draft)
        ids = record.draft_to_target
        valid = export_recurrent(
            record,
            head.weights,
            graph,
            dtype=dtype,
            slots=rows,
            tree=tree,
            valid_vocab=valid_vocab,
            target_graph=target_graph,
            offered=offered,
            plan=plan,
        )
        options = {"nodes": tree.nodes, "depth": tree.depth, "slots": rows, "max_positions": record.max_positions}
    vocabulary = None if ids is None else write_vocabulary(graph, ids)
    options |= {"rows": valid, "vocabulary": vocabulary}
    info = DrafterInfo(name=name, kind=record.method, options=options, graph=graph.name, tree=draft.tree)
    return replace(info, agreement=head.agreement()[: info.depth])
