"""Heads inside a target's own checkpoint (Medusa-2, multi-token prediction): who reads which tensor.

One file, two readers, and between them every tensor and key is read exactly once: the head's reader sees the head's
tensors only, the target's reader sees :func:`target_view`, the same checkpoint without them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from specexport.exporter.checkpoint import Checkpoint
from specexport.exporter.config import TargetConfig, read_config
from specexport.exporter.heads.base import FLOATS
from specexport.exporter.heads.files import Subset
from specexport.exporter.heads.medusa import MEDUSA2_PREFIX
from specexport.exporter.layers import Target
from specexport.exporter.models import ARCHITECTURES
from specexport.exporter.models.rules import bind
from specexport.runtime.errors import CheckpointError

#: Keys of a merged config that the head's reader takes.
HEAD_KEYS = frozenset(
    {
        "medusa_num_heads",
        "medusa_num_layers",
        "medusa_hidden_act",
        "base_model_name_or_path",
        "version",
        "num_nextn_predict_layers",
        "mtp_num_hidden_layers",
    }
)
#: Targets that are another architecture but for their head.
_SAME_AS = {"MiMoForCausalLM": ("Qwen2ForCausalLM", "qwen2")}
_MTP = re.compile(r"(model\.)?mtp_layers\.|mtp\.")
_NEXTN = re.compile(r"(?:model\.)?layers\.(\d+)\.(?:enorm|hnorm|eh_proj)\.weight")


def head_filter(names: Iterable[str]) -> Callable[[str], bool]:
    """Which tensors of a checkpoint belong to a head inside it."""
    names = list(names)
    layers = {match[1] for name in names if (match := _NEXTN.fullmatch(name))}
    prefixes = tuple(f"{prefix}layers.{layer}." for layer in layers for prefix in ("", "model."))

    def belongs(name: str) -> bool:
        return name.startswith((MEDUSA2_PREFIX, *prefixes)) or _MTP.match(name) is not None

    return belongs


def target_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A merged ``config.json`` without what is the head's, for ``exporter.config.read_config``."""
    config = {key: value for key, value in raw.items() if key not in HEAD_KEYS}
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and len(names) == 1 and isinstance(names[0], str) else ""
    if name in _SAME_AS:
        architecture, config["model_type"] = _SAME_AS[name]
        config["architectures"] = [architecture]
    elif name.startswith("Medusa"):  # the training wrapper's name; model_type still names the target
        del config["architectures"]
    return config


def target_view(checkpoint: Checkpoint) -> Checkpoint:
    """The target in a checkpoint that also holds a head; the checkpoint itself where there is none.

    Build targets from this view: its weights and config have nothing left of the head, and nothing else is missing.
    """
    if checkpoint.kind != "hf":
        return checkpoint
    belongs = head_filter(checkpoint.weights.names())
    if not any(map(belongs, checkpoint.weights.names())):
        return checkpoint
    rest = Subset(checkpoint.weights, lambda name: not belongs(name))
    return replace(checkpoint, config=target_config(checkpoint.config), weights=rest)


def check_target(checkpoint: Checkpoint) -> TargetConfig:
    """Prove that the target's reader consumes everything of a :func:`target_view`, by names and shapes.

    Raises:
        CheckpointError: it does not, or the architecture is not supported.
    """
    config = read_config(checkpoint.config)
    weights = checkpoint.weights
    for name in weights.names():
        if len(weights.shape(name)) > 2:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(weights.shape(name))}; a matrix or vector is expected"
            )
    with torch.device("meta"):
        target = Target(config, 1, torch.float32)
    bindings = list(bind(dict(target.named_parameters()), weights, config, ARCHITECTURES[config.architecture]))
    for binding in bindings:
        dtype, _ = weights.stored(binding.rule.source)
        if dtype not in FLOATS:
            raise CheckpointError(f"tensor {binding.rule.source!r} is stored as {dtype}; floating point is expected")
    return config
