"""Where tensors come from: one protocol over safetensors shards, pickles and GGUF."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch


class WeightSource(Protocol):
    """Tensors of a checkpoint under their Hugging Face names, in Hugging Face layout, read one at a time.

    Reading a tensor must not keep it, or the file's pages, resident: export streams through multi-gigabyte
    checkpoints. GGUF sources dequantise on read, and undo llama.cpp's layout changes (permuted q and k, norm offsets).
    """

    def names(self) -> Iterable[str]:
        """Every tensor in the checkpoint."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape without reading the data."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor in its stored floating dtype (float32 when it was block-quantised).

        Raises:
            CheckpointError: the data is truncated or of a dtype that is not understood.
        """
        ...
