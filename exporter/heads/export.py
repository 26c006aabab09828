"""Heads -> ``drafter.<name>.onnx``: one call yields a whole proposal.

Medusa: ``features`` [1, F] of the last accepted node, ``noise`` float32 [heads, n] -> ``draft_tokens`` int64 [heads, k]
and ``draft_logprobs`` float32 [heads, k].

Recurrent: ``features`` [1, A, F] of the newly committed tokens, ``tokens`` int64 [1, A] that follow each, ``past``
int64 [1], ``noise`` float32 [depth, n] and the draft caches ``past_k.l``, ``past_v.l`` [1, Hkv, S, D] ->
``draft_tokens``, ``draft_parents`` int64 [N - 1] (0 is the root, i + 1 the i-th drafted node), ``draft_logprobs``
float32 [N - 1] of each path, and ``present_k.l``, ``present_v.l`` in the memory of the caches.

F is all that the target outputs, of which a graph picks its own captures. ``noise`` is added to the logits of each
depth, whose n rows are those that may be drafted; zeros rank by the head's own probabilities
(``runtime.drafters.noise``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from specexport.exporter.graph_file import save_graph, trace
from specexport.exporter.heads.modules import MedusaHeads
from specexport.exporter.heads.record import HeadRecord, MedusaRecord, RecurrentRecord
from specexport.exporter.heads.recurrent import RecurrentDrafter
from specexport.exporter.heads.trees import DynamicTree, StaticTree
from specexport.exporter.layers import Capture
from specexport.exporter.passes import pick_features, used_rows
from specexport.exporter.passes.grow_tree import Layer
from specexport.exporter.quantize.insert import Parts, rows_of, stored_parts
from specexport.exporter.quantize.plan import Plan
from specexport.exporter.weights import WeightSource
from specexport.runtime import contract
from specexport.runtime.errors import CheckpointError

#: Inputs of a graph: an example of each and its dynamic dimensions.
Inputs = dict[str, tuple[torch.Tensor, dict[int, object]]]


def export_medusa(
    record: MedusaRecord,
    weights: WeightSource,
    path: Path,
    *,
    dtype: torch.dtype,
    k: int,
    valid_vocab: int,
    target_graph: Path,
    offered: Sequence[Capture] | None = None,
    plan: Plan | None = None,
) -> int:
    """Write the drafter graph of Medusa heads.

    Args:
        target_graph: ``target.onnx`` in the same directory; a head that uses the target's lm_head refers to its data.
        offered: what the target's features are; None: what the heads read.
        plan: formats of the heads' own matrices.

    Returns:
        Rows of the vocabulary that may be drafted.
    """
    with torch.device("meta"):
        heads = MedusaHeads(record, dtype, k, valid_vocab).eval()
        inputs: Inputs = {
            contract.FEATURES: (torch.zeros(1, record.hidden_size, dtype=dtype), {}),
            contract.NOISE: (torch.zeros(record.num_heads, heads.valid_rows), {}),
        }
    model = trace(heads, inputs, [contract.DRAFT_TOKENS, contract.DRAFT_LOGPROBS], "drafter")
    _pick(model, record, offered)
    shared = target_tables(target_graph, {"lm_head": LM_HEAD} if record.lm_head == "target" else {})
    save_graph(model, chain(heads.values(weights), _own_lm_head(shared, plan)), path, shared=shared, plan=plan)
    return heads.valid_rows


def export_recurrent(
    record: RecurrentRecord,
    weights: WeightSource,
    path: Path,
    *,
    dtype: torch.dtype,
    slots: int,
    tree: DynamicTree | StaticTree,
    valid_vocab: int,
    target_graph: Path,
    offered: Sequence[Capture] | None = None,
    plan: Plan | None = None,
) -> int:
    """Write the drafter graph of a recurrent head, its cache cut to the used rows (``passes.used_rows``).

    Args:
        slots: rows of the draft cache. tree: shape of the trees.
        target_graph: ``target.onnx`` in the same directory; tables that are the target's refer to its data.
        offered: what the target's features are; None: what the head reads.
        plan: formats of the head's own matrices.

    Returns:
        Rows of the vocabulary that may be drafted.
    """
    # Prediction layer k drafts depth k: those below the tree's depth draft nothing.
    record = replace(record, prediction_layers=min(record.prediction_layers, tree.depth))
    with torch.device("meta"):
        drafter = RecurrentDrafter(record, slots, dtype, tree, valid_vocab=valid_vocab).eval()
        accepted = torch.export.Dim(contract.COMMIT_DIM)
        width = record.target_hidden_size * len(record.captures)
        caches = record.cache_shapes(slots)
        inputs: Inputs = {
            contract.FEATURES: (torch.zeros(1, 3, width, dtype=dtype), {1: accepted}),
            contract.TOKENS: (torch.zeros(1, 3, dtype=torch.int64), {1: accepted}),
            contract.PAST: (torch.zeros(1, dtype=torch.int64), {}),
            contract.NOISE: (torch.zeros(tree.depth, drafter.valid_rows), {}),
            **{past: (torch.zeros(shape, dtype=dtype), {}) for past, shape in caches.items()},
        }
    proposal = (contract.DRAFT_TOKENS, contract.DRAFT_PARENTS, contract.DRAFT_LOGPROBS)
    model = trace(drafter, inputs, [*proposal, *(past.replace("past", "present", 1) for past in caches)], "drafter")
    _pick(model, record, offered)
    used_rows.lower(model, slots)
    layer = _layer(record, tree)
    if layer is not None:
        layer.note(model)
    tables = {"embedding": (record.embedding, ("embedding",)), "lm_head": (record.lm_head, LM_HEAD)}
    wanted = {name: names for name, (whose, names) in tables.items() if whose == "target"}
    shared = target_tables(target_graph, wanted)
    if "lm_head" in shared and record.draft_to_target is not None:
        shared["lm_head"] = rows_of(shared["lm_head"], record.draft_to_target)
    save_graph(model, chain(drafter.values(weights), _own_lm_head(shared, plan)), path, shared=shared, plan=plan)
    return drafter.valid_rows


def _layer(record: RecurrentRecord, tree: DynamicTree | StaticTree) -> Layer | None:
    """The description of a drafter that our own operator can grow; None for the others."""
    blocks = record.blocks
    plain = blocks.latent is None and blocks.experts is None and not blocks.gated
    biased = blocks.attention_bias or blocks.output_bias or blocks.mlp_bias or record.fuse_bias
    if (blocks.num_layers, record.prediction_layers, record.embedding_scale) != (1, 1, 1.0) or not plain or biased:
        return None
    if not isinstance(tree, DynamicTree):
        return None
    return Layer(
        heads=blocks.num_heads,
        kv_heads=blocks.num_kv_heads,
        head_dim=blocks.head_dim,
        scale=blocks.attention_scale,
        epsilon=blocks.norm_eps,
        activation=blocks.activation,
        fused=record.fusion == "project",
        hidden_first=record.order[0] == "hidden",
        norm_residual=record.norm_before_residual,
        feed_normed=record.final_norm and record.feedback == "normed",
        depth=tree.depth,
        topk=tree.topk,
        nodes=tree.nodes,
    )


def _own_lm_head(
    shared: dict[str, ir.TensorProtocol | Parts], plan: Plan | None
) -> list[tuple[str, Callable[[], Tensor]]]:
    """A target's lm_head that the plan wants in codes and the target keeps without, taken out of ``shared``.

    Reading it is most of what a draft costs: a copy of an eighth to a quarter of the size is worth its memory.
    """
    stored = shared.get("lm_head")
    if plan is None or not plan.lm_head.quantized or stored is None or isinstance(stored, Parts):
        return []
    del shared["lm_head"]
    return [("lm_head", lambda: torch.from_numpy(stored.numpy().astype(np.float32)))]


def _pick(model: ir.Model, record: HeadRecord, offered: Sequence[Capture] | None) -> None:
    if offered is not None:
        pick_features.lower(model, [offered.index(capture) for capture in record.captures], len(offered))


#: Where a target keeps its lm_head [V, H]: its own, or the embedding it is tied to.
LM_HEAD = ("lm_head", "embedding")


def target_tables(target_graph: Path, wanted: Mapping[str, Sequence[str]]) -> dict[str, ir.TensorProtocol | Parts]:
    """For each table the first of its possible names that the target has, in the format it has there: references into
    its data file, but for tiny ones."""
    if not wanted:
        return {}
    graph = ir.load(target_graph).graph
    tables: dict[str, ir.TensorProtocol | Parts] = {}
    for table, names in wanted.items():
        held = [stored for name in names if (stored := stored_parts(graph, name)) is not None]
        if not held:
            raise CheckpointError(f"{target_graph} has no {names[0]}: it is not a target graph")
        tables[table] = held[0]
    return tables
