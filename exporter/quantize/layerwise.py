"""A target run over whole texts one decoder block at a time, straight from its checkpoint.

Memory holds one block and the hidden states of the texts, whatever the size of the model. It is the float32 module
that is exported (:mod:`specexport.exporter.layers`), so calibration sees what the graph computes, and it is the
unquantised model that a quantised one is compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from specexport.exporter import ops
from specexport.exporter.config import TargetConfig
from specexport.exporter.layers import Block, Masks, RMSNorm, Step, Target
from specexport.exporter.models import ARCHITECTURES
from specexport.exporter.models.rules import Binding, bind
from specexport.exporter.quantize.agreement import Rows, chunks
from specexport.exporter.quantize.text import Window
from specexport.exporter.rope import rope_tables
from specexport.exporter.weights import WeightSource


class Layerwise:
    """The hidden states of some sequences, on their way through a target.

    Args:
        slots: S of the bundle: some rope dialects depend on it. At least the longest sequence.
        sequences: token ids; each is attended from an empty cache.

    Attributes:
        states: float32 [1, len, H] of each sequence: what enters the next block.
    """

    def __init__(
        self, config: TargetConfig, weights: WeightSource, slots: int, sequences: Sequence[Sequence[int]]
    ) -> None:
        self.config, self._weights = config, weights
        with torch.device("meta"):
            target = Target(config, slots, torch.float32)
        bindings = bind(dict(target.named_parameters()), weights, config, ARCHITECTURES[config.architecture])
        self._bindings: dict[str, Binding] = {binding.parameter: binding for binding in bindings}
        self._ropes = [[torch.from_numpy(table) for table in rope_tables(rope, slots)] for rope in config.ropes]
        self._masks: dict[int, dict[int | None, Tensor]] = {}
        table = self._read("embedding")
        ids = (torch.tensor([list(tokens)], dtype=torch.int64) for tokens in sequences)
        self.states = [torch.nn.functional.embedding(tokens, table) * config.embedding_scale for tokens in ids]

    def _read(self, parameter: str) -> Tensor:
        return self._bindings[parameter].read(self._weights, self.config)

    def blocks(self) -> Iterator[tuple[str, Block]]:
        """Each block with its weights, and the prefix of its parameters' names; :meth:`advance` it before the next."""
        with torch.device("meta"):
            empty = Block(self.config, torch.float32)
        names = [name for name, _ in empty.named_parameters()]
        for index in range(self.config.num_layers):
            prefix = f"layers.{index}."
            block = Block(self.config, torch.float32).eval()
            state = block.state_dict()
            for name in names:
                state[name].copy_(self._read(prefix + name))
            self._window, self._rope = self.config.layers[index].window, self._ropes[self.config.layers[index].rope]
            yield prefix, block

    def attend(self, block: Block, state: Tensor) -> Tensor:
        """What the first half of the current block makes of [1, len, H]; ``block.feed`` is the second."""
        count = state.shape[1]
        nothing, zero, positions = torch.zeros(0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), _range(count)
        if count not in self._masks:
            masks = Masks(count, (layer.window for layer in self.config.layers), torch.float32)
            causal = torch.ones(1, count, count, dtype=torch.bool).tril()
            self._masks[count] = masks(causal, zero, positions.unsqueeze(0))
        step = Step(positions.unsqueeze(0), zero, nothing, positions)
        cache = torch.zeros(1, self.config.num_kv_heads, count, self.config.head_dim)
        rope = (self._rope[0], self._rope[1])
        return block.attend(state, step, rope, self._masks[count][self._window], (cache, cache))[0]

    def advance(self, block: Block) -> None:
        """Put every state through the current block."""
        self.each(lambda state: block.feed(self.attend(block, state)))

    def each(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change every state."""
        for index, state in enumerate(self.states):
            self.states[index] = change(state)

    def finish(self) -> Tensor:
        """Norm the states for the lm_head, whose matrix [V, H] is returned."""
        norm = RMSNorm(self.config.hidden_size, self.config.norm_eps)
        norm.weight.copy_(self._read("norm.weight"))
        self.states = [norm(state) for state in self.states]
        return self._read("embedding" if self.config.tie_word_embeddings else "lm_head")


def logits(run: Layerwise, head: Tensor, windows: Sequence[Window], rows: int) -> Iterator[Rows]:
    """Logits [n, V] of every scored position of the finished states, cut as the engine's are."""
    for window, state in zip(windows, run.states, strict=True):
        for _, stop, first in chunks(window, rows):
            if first < stop:
                yield ops.linear_transposed(state[0, first:stop], head).numpy()


def _range(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int64)
