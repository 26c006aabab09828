"""Heads -> ``drafter.<name>.onnx``: one call yields a whole proposal.

Medusa: ``features`` [1, H] of the last accepted node -> ``draft_tokens`` int64 [heads, k] and ``draft_logprobs``
float32 [heads, k].
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import torch

from specexport.exporter.graph_file import save_graph, trace
from specexport.exporter.heads.modules import MedusaHeads
from specexport.exporter.heads.record import MedusaRecord
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
    shared = {"lm_head": target_head(target_graph)} if record.lm_head == "target" else {}
    save_graph(model, heads.values(weights), path, shared=shared)


def target_head(target_graph: Path) -> ir.ExternalTensor:
    """Where the target keeps its lm_head [V, H]: its own, or the embedding it is tied to."""
    initializers = ir.load(target_graph).graph.initializers
    for name in ("lm_head", "embedding"):
        if name in initializers and isinstance(tensor := initializers[name].const_value, ir.ExternalTensor):
            return tensor
    raise CheckpointError(f"{target_graph} has no lm_head in its data file: its model is too small to share one")
