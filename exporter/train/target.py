"""The target that heads are trained for, opened once: its module, its texts, and what identifies it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from specexport.exporter.checkpoint import Checkpoint, open_checkpoint
from specexport.exporter.config import TargetConfig, read_config
from specexport.exporter.heads.merged import target_view
from specexport.exporter.layers import Capture
from specexport.exporter.onnx import build_module
from specexport.exporter.progress import Progress
from specexport.exporter.tokenizer import collect_tokenizer
from specexport.exporter.train.batch import BatchedTarget
from specexport.exporter.train.prompts import Chat


def usual_captures(config: TargetConfig) -> tuple[Capture, ...]:
    """What a corpus keeps of a target of n layers: EAGLE-3's boundaries (2, n // 2, n - 3), and the final state that
    EAGLE-1 and Medusa read. Shallow targets give what they have."""
    n = config.num_layers
    low, mid, high = (2, n // 2, n - 3) if n >= 6 else (0, n // 2, n)
    return (low, mid, high, "final")


@dataclass(frozen=True, slots=True)
class Opened:
    """An opened target.

    Attributes:
        fingerprint: of config and weights. template_hash: sha256 of the chat template, None for a base model.
        captures: columns of the corpus's features, in order.
    """

    checkpoint: Checkpoint
    config: TargetConfig
    chat: Chat
    fingerprint: str
    captures: tuple[Capture, ...]
    dtype: torch.dtype

    @property
    def template_hash(self) -> str | None:
        template = self.chat.files.chat_template
        return None if template is None else hashlib.sha256(template.encode()).hexdigest()

    def model(self, slots: int, device: str = "cpu") -> BatchedTarget:
        """The target's module with its weights, for sequences of up to ``slots`` tokens."""
        slots = min(slots, self.config.max_position_embeddings)
        module = build_module(self.config, slots, self.dtype, self.checkpoint.weights, self.captures)
        return BatchedTarget(module.to(device))


def open_target(
    source: str,
    progress: Progress,
    *,
    tokenizer: Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    revision: str | None = None,
    offline: bool = False,
) -> Opened:
    """Open a target to train for.

    Raises:
        CheckpointError: it is not fully understood.
    """
    with progress.stage("read target"):
        checkpoint = target_view(open_checkpoint(source, revision=revision, offline=offline))
        config = read_config(checkpoint.config)
        chat = Chat(collect_tokenizer(checkpoint, tokenizer))
        return Opened(checkpoint, config, chat, checkpoint.fingerprint(), usual_captures(config), dtype)
