"""The target as one configurable torch module with explicit caches (see :mod:`specexport.runtime.contract`).

Weights are stored as matrix-product operands, [in, out], so that the exported graph refers to them directly. The
residual stream and the norms stay in float32 whatever the dtype of weights and caches: half-precision residuals
overflow on Gemma and cost accuracy everywhere, and at a handful of rows their traffic is nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from specexport.exporter import ops
from specexport.exporter.config import TargetConfig

#: A feature to capture: an int b is the residual stream entering layer b (b == layers: leaving the last one, before the
#: final norm; this is Hugging Face's ``hidden_states[b]`` for b < layers); "final" is the state after the final norm.
Capture = int | str


def _weight(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """x @ weight + bias, weight [in, out]."""

    def __init__(self, inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _weight(inputs, outputs, dtype=dtype)
        self.bias = _weight(outputs, dtype=dtype) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


class RMSNorm(nn.Module):
    """Root mean square norm in float32; the weight includes Gemma's offset of one."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = _weight(width, dtype=torch.float32)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = ops.rms_norm(x.float(), self.weight, self.eps)
        return normed


class Step(NamedTuple):
    """What every layer needs of one call's inputs."""

    positions: Tensor
    write: Tensor
    commit: Tensor
    order: Tensor


class Masks(nn.Module):
    """Additive attention masks [1, 1, T, S] of every distinct window, made once a call from the tree."""

    def __init__(self, slots: int, windows: Iterable[int | None], dtype: torch.dtype) -> None:
        super().__init__()
        self.slots = slots
        self.windows = tuple(dict.fromkeys(windows))  # a set's order would differ from run to run, and so the graph
        self.dtype = dtype

    def forward(self, tree: Tensor, past: Tensor, positions: Tensor) -> dict[int | None, Tensor]:
        nodes = tree.shape[1]
        offset = torch.arange(self.slots, device=tree.device) - past  # [S]: < 0 committed, 0..T-1 this call's nodes
        committed = offset < 0
        node = offset.clamp(min=0).clamp(max=nodes - 1)
        visible = (tree[0].index_select(1, node) & (offset < nodes)) | committed  # [T, S]
        masks: dict[int | None, Tensor] = {}
        low = torch.finfo(self.dtype).min
        zero = torch.zeros((), dtype=self.dtype, device=tree.device)
        floor = torch.full((), low, dtype=self.dtype, device=tree.device)
        for window in self.windows:
            seen = visible
            if window is not None:
                # A committed row holds the token of its own index; a node's position comes with it.
                column = torch.where(committed, offset + past, positions[0].index_select(0, node))
                seen = seen & (positions[0].unsqueeze(1) - column.unsqueeze(0) < window)
            masks[window] = torch.where(seen, zero, floor).unsqueeze(0).unsqueeze(0)
        return masks


class Attention(nn.Module):
    """Grouped-query attention over a cache that it updates and returns."""

    def __init__(self, config: TargetConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = config.attention_scale
        hidden, wide = config.hidden_size, config.num_heads * config.head_dim
        narrow = config.num_kv_heads * config.head_dim
        self.q_proj = Linear(hidden, wide, config.attention_bias, dtype)
        self.k_proj = Linear(hidden, narrow, config.attention_bias, dtype)
        self.v_proj = Linear(hidden, narrow, config.attention_bias, dtype)
        self.o_proj = Linear(wide, hidden, config.output_bias, dtype)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def _heads(self, x: Tensor, heads: int, norm: RMSNorm | None) -> Tensor:
        x = x.reshape(1, -1, heads, self.head_dim)
        if norm is not None:
            x = norm(x).to(self.q_proj.weight.dtype)
        return x.transpose(1, 2)

    def forward(
        self,
        x: Tensor,
        step: Step,
        rope: tuple[Tensor, Tensor],
        mask: Tensor,
        cache: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        query = ops.rotary(self._heads(self.q_proj(x), self.heads, self.q_norm), *rope, step.positions)
        key = ops.rotary(self._heads(self.k_proj(x), self.kv_heads, self.k_norm), *rope, step.positions)
        value = self._heads(self.v_proj(x), self.kv_heads, None)
        present = [
            ops.commit_and_append(past, new, step.commit, step.order, step.write)
            for past, new in zip(cache, (key, value), strict=True)
        ]
        mixed = ops.attention(query, present[0], present[1], mask, self.scale)
        mixed = mixed.transpose(1, 2).reshape(1, -1, self.heads * self.head_dim)
        return self.o_proj(mixed), present[0], present[1]


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": nn.functional.silu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
}


class MLPSizes(Protocol):
    """The part of a config that :class:`MLP` reads; drafters have records of their own."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def activation(self) -> str: ...


class MLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: MLPSizes, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(hidden, inner, config.mlp_bias, dtype)
        self.up_proj = Linear(hidden, inner, config.mlp_bias, dtype)
        self.down_proj = Linear(inner, hidden, config.mlp_bias, dtype)
        self._act = ACTIVATIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        gate = self._act(self.gate_proj(x))
        fed: Tensor = self.down_proj(gate * self.up_proj(x))
        return fed


class Block(nn.Module):
    """One decoder layer; ``sandwich`` adds Gemma's norms on the outputs of attention and MLP."""

    def __init__(self, config: TargetConfig, dtype: torch.dtype) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.norm_eps
        self.dtype = dtype
        self.input_norm = RMSNorm(width, eps)
        self.attention = Attention(config, dtype)
        self.mlp_norm = RMSNorm(width, eps)
        self.mlp = MLP(config, dtype)
        self.attention_out_norm = RMSNorm(width, eps) if config.sandwich_norms else None
        self.mlp_out_norm = RMSNorm(width, eps) if config.sandwich_norms else None

    def forward(
        self,
        x: Tensor,
        step: Step,
        rope: tuple[Tensor, Tensor],
        mask: Tensor,
        cache: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, key, value = self.attend(x, step, rope, mask, cache)
        return self.feed(x), key, value

    def attend(
        self,
        x: Tensor,
        step: Step,
        rope: tuple[Tensor, Tensor],
        mask: Tensor,
        cache: tuple[Tensor, Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The first half of the layer."""
        normed = self.input_norm(x).to(self.dtype)
        mixed, key, value = self.attention(normed, step, rope, mask, cache)
        mixed = mixed.float()
        return x + (mixed if self.attention_out_norm is None else self.attention_out_norm(mixed)), key, value

    def feed(self, x: Tensor) -> Tensor:
        """The second half."""
        fed: Tensor = self.mlp(self.mlp_norm(x).to(self.dtype)).float()
        x = x + (fed if self.mlp_out_norm is None else self.mlp_out_norm(fed))
        return x


class Target(nn.Module):
    """A target that runs one step of the contract.

    Args:
        slots: S, cache rows; also the rows of the rope tables.
        dtype: of weights and caches.
        captures: what ``features`` concatenates, in order; empty: no such output.
    """

    def __init__(
        self, config: TargetConfig, slots: int, dtype: torch.dtype, captures: tuple[Capture, ...] = ()
    ) -> None:
        super().__init__()
        for capture in captures:
            if capture != "final" and not (isinstance(capture, int) and 0 <= capture <= config.num_layers):
                raise ValueError(f"capture {capture!r}: expected 0..{config.num_layers} or 'final'")
        self.config, self.slots, self.dtype, self.captures = config, slots, dtype, captures
        self.embedding = _weight(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(Block(config, dtype) for _ in config.layers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = _weight(config.vocab_size, config.hidden_size, dtype=dtype)
        self.masks = Masks(slots, (layer.window for layer in config.layers), dtype)
        for index, rope in enumerate(config.ropes):
            for name in ("cos", "sin"):
                self.register_buffer(f"rope_{name}_{index}", torch.empty(slots, rope.rotary_dim // 2, dtype=dtype))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        tree: Tensor,
        past: Tensor,
        write: Tensor,
        commit: Tensor,
        order: Tensor,
        select: Tensor,
        *caches: Tensor,
    ) -> tuple[Tensor, ...]:
        """One step. Shapes as in the contract; ``caches`` is k then v of each layer.

        Returns:
            (logits, features if captured, present_k.0, present_v.0, ...)
        """
        config = self.config
        x = nn.functional.embedding(tokens, self.embedding).float()
        if config.embedding_scale != 1.0:
            x = x * config.embedding_scale
        masks = self.masks(tree, past, positions)
        step = Step(positions, write, commit, order)
        ropes = [(getattr(self, f"rope_cos_{i}"), getattr(self, f"rope_sin_{i}")) for i in range(len(config.ropes))]
        presents: list[Tensor] = []
        boundary: dict[Capture, Tensor] = {0: x}
        for index, (block, layer) in enumerate(zip(self.layers, config.layers, strict=True)):
            cache = (caches[2 * index], caches[2 * index + 1])
            x, key, value = block(x, step, ropes[layer.rope], masks[layer.window], cache)
            boundary[index + 1] = x
            presents += [key, value]
        if "final" in self.captures:
            boundary["final"] = x = self.norm(x)
            rows = x[0].index_select(0, select)
        else:
            rows = self.norm(x[0].index_select(0, select))
        head = self.embedding if config.tie_word_embeddings else self.lm_head
        logits = ops.linear_transposed(rows.to(self.dtype), head).float()
        features = [torch.cat([boundary[c] for c in self.captures], dim=-1).to(self.dtype)] if self.captures else []
        return (logits, *features, *presents)
