"""How parameters of :class:`specexport.exporter.layers.Target` come from the tensors of a checkpoint.

A table maps each parameter (layer indices spelled ``{i}``) to a :class:`Rule`. Loading is strict both ways: every
parameter must be fed and every checkpoint tensor used, or named in :data:`IGNORED` with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specexport.exporter.config import TargetConfig
from specexport.exporter.quantize.record import Quantized, QuantizedSource
from specexport.exporter.weights import WeightSource
from specexport.runtime.errors import CheckpointError

Transform = Callable[[Tensor, TargetConfig], Tensor]


def as_is(tensor: Tensor, config: TargetConfig) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class Rule:
    """One checkpoint tensor, and what is done to it.

    Attributes:
        transform: of a matrix it changes rows only, so that codes and scales of a quantised one follow.
        operand: [out, in] of ``nn.Linear`` becomes [in, out], a matrix product's right operand, after it.
    """

    source: str
    transform: Transform = as_is
    operand: bool = False


Table = Mapping[str, Rule]


def norm(tensor: Tensor, config: TargetConfig) -> Tensor:
    """Norm weights in float32, Gemma's offset added."""
    return tensor.float() + config.norm_offset


def rows(part: Callable[[TargetConfig], tuple[int, ...]], index: int) -> Transform:
    """Part ``index`` of a fused [sum(part), in] matrix (Phi-3's qkv_proj and gate_up_proj)."""

    def transform(tensor: Tensor, config: TargetConfig) -> Tensor:
        sizes = part(config)
        if tensor.shape[0] != sum(sizes):
            raise CheckpointError(f"fused matrix has {tensor.shape[0]} rows, the config makes {sum(sizes)}: {sizes}")
        start = sum(sizes[:index])
        return tensor[start : start + sizes[index]]

    return transform


#: Names most decoder-only models share (Llama's).
COMMON: Table = {
    "embedding": Rule("model.embed_tokens.weight"),
    "norm.weight": Rule("model.norm.weight", norm),
    "lm_head": Rule("lm_head.weight"),
    "layers.{i}.input_norm.weight": Rule("model.layers.{i}.input_layernorm.weight", norm),
    "layers.{i}.mlp_norm.weight": Rule("model.layers.{i}.post_attention_layernorm.weight", norm),
    **{
        f"layers.{{i}}.attention.{name}_proj.weight": Rule(
            f"model.layers.{{i}}.self_attn.{name}_proj.weight", operand=True
        )
        for name in "qkvo"
    },
    **{
        f"layers.{{i}}.attention.{name}_proj.bias": Rule(f"model.layers.{{i}}.self_attn.{name}_proj.bias")
        for name in "qkvo"
    },
    **{
        f"layers.{{i}}.mlp.{name}_proj.{kind}": Rule(
            f"model.layers.{{i}}.mlp.{name}_proj.{kind}", operand=kind == "weight"
        )
        for name in ("gate", "up", "down")
        for kind in ("weight", "bias")
    },
}

#: Per-head norms of queries and keys (Qwen3, Gemma3).
QK_NORM: Table = {
    f"layers.{{i}}.attention.{name}_norm.weight": Rule(f"model.layers.{{i}}.self_attn.{name}_norm.weight", norm)
    for name in "qk"
}

#: Checkpoint tensors that carry nothing: frequencies that old Transformers versions saved beside the weights.
IGNORED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")

_INDEX = re.compile(r"(?<=layers\.)\d+")


@dataclass(frozen=True, slots=True)
class Binding:
    """One parameter and where it comes from."""

    parameter: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rule: Rule

    def check(self, weights: WeightSource, config: TargetConfig) -> None:
        """See whether the parameter will get its shape, without reading data.

        Raises:
            CheckpointError: the checkpoint's tensor does not have the shape that the config calls for.
        """
        self._apply(torch.empty(weights.shape(self.rule.source), device="meta"), config)

    def read(self, weights: WeightSource, config: TargetConfig) -> Tensor:
        """The parameter's value; raises as :meth:`check`."""
        return self._apply(weights.read(self.rule.source), config).to(self.dtype)

    def matrix(self, weights: WeightSource, config: TargetConfig) -> Tensor:
        """A matrix as :meth:`read`, but [out, in] also where it is an operand, and in its stored dtype."""
        value = self._apply(weights.read(self.rule.source), config)
        return value.t() if self.rule.operand else value

    def quantized(self, weights: WeightSource, config: TargetConfig) -> Quantized | None:
        """The matrix [out, in] as the checkpoint has it quantised, rows changed as :meth:`read` would; else None."""
        if len(self.shape) != 2 or not isinstance(weights, QuantizedSource):
            return None
        stored = weights.quantized(self.rule.source)
        return None if stored is None else stored.map_rows(lambda rows: self.rule.transform(rows, config))

    def _apply(self, stored: Tensor, config: TargetConfig) -> Tensor:
        wanted = f"the config calls for {self.shape}"
        if stored.ndim != len(self.shape):
            raise CheckpointError(f"tensor {self.rule.source!r} has shape {tuple(stored.shape)}, {wanted}")
        tensor = self.rule.transform(stored, config)
        if self.rule.operand:
            tensor = tensor.t()
        if tuple(tensor.shape) != self.shape:
            raise CheckpointError(
                f"tensor {self.rule.source!r} gives {tuple(tensor.shape)} for {self.parameter}, {wanted}"
            )
        return tensor


def bind(
    parameters: Mapping[str, Tensor], weights: WeightSource, config: TargetConfig, table: Table
) -> Iterator[Binding]:
    """Pair every parameter with its tensor, checking names, shapes and the set of tensors before any is read.

    Raises:
        CheckpointError: a tensor is missing, unused or of another shape, or a tied lm_head differs from the embedding.
    """
    available = set(weights.names())
    bindings: list[Binding] = []
    for name, parameter in parameters.items():
        found = _INDEX.search(name)
        rule = table[_INDEX.sub("{i}", name)]
        source = rule.source.replace("{i}", found.group()) if found else rule.source
        if source not in available:
            raise CheckpointError(f"tensor {source!r} is missing from the checkpoint ({name} needs it)")
        binding = Binding(name, tuple(parameter.shape), parameter.dtype, replace(rule, source=source))
        binding.check(weights, config)
        bindings.append(binding)
    unused = sorted(name for name in available - {b.rule.source for b in bindings} if not IGNORED.fullmatch(name))
    # AutoGPTQ gives every projection a bias; one of zeros is none.
    unused = [name for name in unused if not (name.endswith("_proj.bias") and not bool(weights.read(name).any()))]
    head = table["lm_head"].source
    if config.tie_word_embeddings and head in unused:
        if not torch.equal(weights.read(head), weights.read(table["embedding"].source)):
            raise CheckpointError(
                f"{head!r} differs from the embedding although the config says tie_word_embeddings: "
                "set it to false to use the tensor, or remove the tensor to use the embedding"
            )
        unused.remove(head)
    if unused:
        raise CheckpointError(
            f"{len(unused)} tensors of the checkpoint are not understood for {config.architecture}: "
            + ", ".join(unused[:5])
            + (" ..." if len(unused) > 5 else "")
        )
    return iter(bindings)
