"""The torch module behind the engine protocol."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from specexport.exporter.layers import Target
from specexport.runtime.engine import Step


class TorchEngine:
    """The torch module behind the engine protocol. Commits are padded and blocks reordered, as on engines with fixed
    shapes (``pads`` extra commit rows)."""

    features_size = 0

    def __init__(self, target: Target, pads: int = 2) -> None:
        config = target.config
        self.target, self.pads = target, pads
        self.slots, self.vocab_size = target.slots, config.vocab_size
        self._shape = (1, config.num_kv_heads, target.slots, config.head_dim)
        self.reset()

    def reset(self) -> None:
        self.caches = [torch.zeros(self._shape, dtype=self.target.dtype) for _ in range(2 * len(self.target.layers))]

    def run(self, step: Step) -> NDArray[np.float32]:
        tokens, positions, tree, past, write, commit, select = step
        moved, nodes = len(commit), len(tokens)
        pads = min(self.pads, self.slots - write - moved - nodes)
        padded = np.concatenate([commit, np.zeros(pads, np.int64)])
        order = np.concatenate(
            [np.arange(moved), np.arange(nodes) + len(padded), np.arange(moved, len(padded))]
        ).astype(np.int64)
        arrays = [tokens[None], positions[None], tree[None], np.array([past]), np.array([write]), padded, order, select]
        with torch.no_grad():
            outputs = self.target(*(torch.from_numpy(np.ascontiguousarray(array)) for array in arrays), *self.caches)
        layers = 2 * len(self.target.layers)
        self.caches = list(outputs[-layers:])
        if self.target.captures:
            self._features: NDArray[np.float32] = outputs[1][0].numpy()
        logits: NDArray[np.float32] = outputs[0].numpy()
        return logits

    def features(self) -> NDArray[np.float32]:
        return self._features

    def read_cache(self, rows: int) -> list[NDArray[np.float32]]:
        return [cache[0, :, :rows].float().numpy() for cache in self.caches]
