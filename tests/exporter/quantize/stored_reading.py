"""Reading a quantised checkpoint whole, for tests."""

from __future__ import annotations

from pathlib import Path

from specexport.exporter.checkpoint import Checkpoint, open_checkpoint
from specexport.exporter.heads.merged import check_target, target_view

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"


def read_all(directory: Path) -> Checkpoint:
    """Open a checkpoint as a build does, and read everything."""
    checkpoint = target_view(open_checkpoint(str(directory)))
    check_target(checkpoint)
    for name in checkpoint.weights.names():
        checkpoint.weights.read(name)
    return checkpoint
