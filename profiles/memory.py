"""What a bundle takes of a device's memory, before anything is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specexport.profiles.schema import Profile
from specexport.profiles.sizes import CACHE_BITS, DraftSize, ModelSize

#: What a process with an engine takes before any weight: code, context, allocator.
PROCESS_BYTES = {"onnxruntime-cpu": 120 << 20}
_DEVICE_PROCESS_BYTES = 600 << 20


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by use, at S ``slots``, against those that the model may take.

    Attributes:
        weights, caches: of the target. drafters: their weights and caches. workspace: of the widest call.
        process: before any weight. available: of the device.
        largest_slots: largest S that fits, at most the model's positions; 0 where the weights alone do not fit.
    """

    slots: int
    weights: int
    caches: int
    drafters: int
    workspace: int
    process: int
    available: int
    largest_slots: int

    @property
    def total(self) -> int:
        return self.weights + self.caches + self.drafters + self.workspace + self.process

    @property
    def fits(self) -> bool:
        return self.total <= self.available

    def to_dict(self) -> dict[str, Any]:
        """``plan --json``: sizes in bytes."""
        names = ("slots", "weights", "caches", "drafters", "workspace", "process", "available", "largest_slots")
        return {name: getattr(self, name) for name in names} | {"total": self.total, "fits": self.fits}


def plan_memory(
    profile: Profile, size: ModelSize, drafts: Sequence[DraftSize], slots: int, *, batch: int = 1
) -> MemoryPlan:
    """Memory of a target with drafters at S ``slots`` for ``batch`` sequences."""
    per_slot = batch * (size.row_bytes + sum(draft.cache_row_bytes for draft in drafts))
    stored = sum(draft.stored_bytes for draft in drafts)
    process = PROCESS_BYTES.get(profile.backend, _DEVICE_PROCESS_BYTES)
    fixed = size.stored_bytes + stored + process + _workspace(profile, size, 0, batch)
    per_slot_work = _workspace(profile, size, 1, batch) - _workspace(profile, size, 0, batch)
    room = profile.memory_bytes - fixed
    largest = min(size.positions, max(0, room) // max(1, per_slot + per_slot_work))
    return MemoryPlan(
        slots=slots,
        weights=size.stored_bytes,
        caches=batch * size.row_bytes * slots,
        drafters=stored + batch * slots * sum(draft.cache_row_bytes for draft in drafts),
        workspace=_workspace(profile, size, slots, batch),
        process=process,
        available=profile.memory_bytes,
        largest_slots=largest,
    )


def _workspace(profile: Profile, size: ModelSize, slots: int, batch: int) -> int:
    """Activations of a prompt chunk, logits of the widest tree, and attention scores where they are written out."""
    item = max(2, CACHE_BITS[size.cache] // 8)
    chunk, widest = profile.prefill_chunk, max(profile.widths)
    wide = size.heads * size.head_dim + 2 * size.kv_heads * size.head_dim
    activations = chunk * (4 * size.hidden_size + 3 * size.intermediate_size + wide) * item
    logits = 2 * widest * size.vocab_size * 4
    # The CPU's attention holds the scores of all heads; a mask of the chunk over the window is made on every backend.
    scores = chunk * slots * 4 * (size.heads if profile.backend == "onnxruntime-cpu" else 1)
    mask = chunk * slots * item
    return batch * (activations + logits + scores + mask)
