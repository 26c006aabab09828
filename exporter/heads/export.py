"""Heads -> ``drafter.<method>.onnx``: one call yields a whole proposal.

Medusa: ``features`` [1, H] of the last accepted node -> ``draft_tokens`` int64 [heads, k] and ``draft_logprobs``
float32 [heads, k].

Recurrent: ``features`` [1, A, F] of the newly committed tokens, ``tokens`` int64 [1, A] that follow each, ``past``
int64 [1] and the draft caches ``past_k.l``, ``past_v.l`` [1, Hkv, S, D] -> ``draft_tokens``, ``draft_parents`` int64
[N - 1] (0 is the root, i + 1 the i-th drafted node), ``draft_logprobs`` float32 [N - 1] of each path, and
``present_k.l``, ``present_v.l`` in the memory of the caches.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import torch

from specexport.exporter.graph_file import save_graph, trace
from specexport.exporter.heads.modules import MedusaHeads
from specexport.exporter.heads.record import MedusaRecord, RecurrentRecord
from specexport.exporter.heads.recurrent import RecurrentDrafter
from specexport.exporter.heads.trees import DynamicTree, StaticTree
from specexport.exporter.passes import used_rows
from specexport.exporter.weights import WeightSource
from specexport.runtime import contract
from specexport.runtime.errors import CheckpointError


def export_medusa(
    record: MedusaRecord,
    weights: WeightSource,
    path: Path,
    *,
    dtype: torch.dtype,
    k: int,
    valid_vocab: int,
    target_graph: Path,
) -> None:
    """Write the drafter graph of Medusa heads.

    Args:
        target_graph: ``target.onnx`` in the same directory; a head that uses the target's lm_head refers to its data.
    """
    with torch.device("meta"):
        heads = MedusaHeads(record, dtype, k, valid_vocab).eval()
        features = torch.zeros(1, record.hidden_size, dtype=dtype)
    names = [contract.DRAFT_TOKENS, contract.DRAFT_LOGPROBS]
    model = trace(heads, {contract.FEATURES: (features, {})}, names, "drafter")
    shared = {"lm_head": target_table(target_graph, *LM_HEAD)} if record.lm_head == "target" else {}
    save_graph(model, heads.values(weights), path, shared=shared)


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
) -> None:
    """Write the drafter graph of a recurrent head, its cache cut to the used rows (``passes.used_rows``).

    Args:
        slots: rows of the draft cache. tree: shape of the trees.
        target_graph: ``target.onnx`` in the same directory; tables that are the target's refer to its data.
    """
    with torch.device("meta"):
        drafter = RecurrentDrafter(record, slots, dtype, tree, valid_vocab=valid_vocab).eval()
        accepted = torch.export.Dim(contract.COMMIT_DIM)
        width = record.target_hidden_size * len(record.captures)
        caches = contract.cache_names(record.blocks.num_layers)
        shape = (1, record.blocks.num_kv_heads, slots, record.blocks.head_dim)
        inputs: dict[str, tuple[torch.Tensor, dict[int, object]]] = {
            contract.FEATURES: (torch.zeros(1, 3, width, dtype=dtype), {1: accepted}),
            contract.TOKENS: (torch.zeros(1, 3, dtype=torch.int64), {1: accepted}),
            contract.PAST: (torch.zeros(1, dtype=torch.int64), {}),
            **{past: (torch.zeros(shape, dtype=dtype), {}) for past, _ in caches},
        }
    proposal = (contract.DRAFT_TOKENS, contract.DRAFT_PARENTS, contract.DRAFT_LOGPROBS)
    model = trace(drafter, inputs, [*proposal, *(present for _, present in caches)], "drafter")
    used_rows.lower(model, slots)
    shared = {}
    if record.embedding == "target":
        shared["embedding"] = target_table(target_graph, "embedding")
    if record.lm_head == "target":
        shared["lm_head"] = target_table(target_graph, *LM_HEAD)
    save_graph(model, drafter.values(weights), path, shared=shared)


#: Where a target keeps its lm_head [V, H]: its own, or the embedding it is tied to.
LM_HEAD = ("lm_head", "embedding")


def target_table(target_graph: Path, *names: str) -> ir.TensorProtocol:
    """The first of the tensors ``names`` that the target has: a reference into its data file, unless it is tiny."""
    initializers = ir.load(target_graph).graph.initializers
    for name in names:
        if name in initializers and (tensor := initializers[name].const_value) is not None:
            return tensor
    raise CheckpointError(f"{target_graph} has no {names[0]}: it is not a target graph")
