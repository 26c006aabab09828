"""The architectures that can be exported, one file each, behind one table."""

from __future__ import annotations

from specexport.exporter.models import gemma3, llama, mistral, phi3, qwen2, qwen3
from specexport.exporter.models.rules import Table

ARCHITECTURES: dict[str, Table] = {
    "gemma3": gemma3.TENSORS,
    "llama": llama.TENSORS,
    "mistral": mistral.TENSORS,
    "phi3": phi3.TENSORS,
    "qwen2": qwen2.TENSORS,
    "qwen3": qwen3.TENSORS,
}
