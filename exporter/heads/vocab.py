"""Vocabulary maps of heads with a smaller vocabulary than the target: always absolute, ascending target ids."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from specexport.exporter.heads.base import BOOLEANS, INTEGERS, Tensors, both
from specexport.runtime.errors import CheckpointError


def read_offsets(tensors: Tensors, rows: int, vocab: int) -> NDArray[np.int64] | None:
    """EAGLE-3's ``d2t`` [Vd] and ``t2d`` [V] as absolute target ids; None where both vocabularies are one.

    ``d2t`` is an offset: target id = i + d2t[i]. ``t2d`` marks the same ids, which proves that reading.

    Raises:
        CheckpointError: one map without the other, no map for a smaller vocabulary, or maps that contradict.
    """
    held = [name for name in ("d2t", "t2d") if name in tensors]
    if not held:
        if rows != vocab:
            raise both(
                f"draft vocabulary of {rows} in a target vocabulary of {vocab} without d2t and t2d",
                f"the first {rows} ids",
                "any other choice",
                "add the maps of the training run",
            )
        return None
    if len(held) == 1:
        other = "t2d" if held == ["d2t"] else "d2t"
        raise CheckpointError(f"tensor {held[0]!r} is there but {other!r} is missing; they prove each other")
    for name, size in (("d2t", rows), ("t2d", vocab)):
        if tensors.vector(name) != size:
            raise CheckpointError(
                f"tensor {name!r} has {tensors.vector(name)} entries; the vocabulary calls for {size}"
            )
    offset = tensors.read("d2t", INTEGERS, "an integer type").to(torch.int64)
    marks = tensors.read("t2d", BOOLEANS, "bool")
    if rows == vocab and not bool(offset.any()) and bool(marks.all() or not marks.any()):
        return None
    ids = torch.arange(rows) + offset
    marked = marks.nonzero().flatten()
    if not torch.equal(ids, marked):
        if torch.equal(offset, marked):
            raise both(
                "tensor 'd2t'",
                "offsets (target id = i + d2t[i], EAGLE-3's meaning), which contradicts t2d",
                "absolute target ids, which t2d confirms",
                "subtract torch.arange(len(d2t)) from it",
            )
        count = min(len(ids), len(marked))
        wrong = (ids[:count] != marked[:count]).nonzero().flatten()
        index = int(wrong[0]) if len(wrong) else count
        mine = int(ids[index]) if index < len(ids) else None
        yours = int(marked[index]) if index < len(marked) else None
        raise CheckpointError(f"draft id {index} is target id {mine} by d2t but {yours} by t2d; the maps contradict")
    return None if rows == vocab else ids.numpy()


def read_token_map(tensors: Tensors, vocab: int) -> NDArray[np.int64]:
    """vLLM's ``token_map`` [k]: absolute target ids in the order of the lm_head's rows.

    Raises:
        CheckpointError: ids out of range or twice.
    """
    ids = tensors.read("token_map", INTEGERS, "an integer type").to(torch.int64)
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab or len(set(ids.tolist())) != len(ids):
        raise CheckpointError(f"tensor 'token_map' must hold distinct ids below the vocabulary's {vocab}")
    return ids.numpy()
