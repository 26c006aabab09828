"""Medusa heads: four layouts of the same residual blocks (Cai et al. 2024, https://github.com/FasterDecoding/Medusa).

* ``medusa``: ``{h}.{l}.linear.*``, and ``{h}.{layers}.weight`` where a head has its own lm_head. Without them it is the
  legacy V2 / TGI layout, whose logits go through the target's lm_head. ``medusa-2``: the same under ``medusa_head.``
  inside the shards of a fine-tuned target.
* ``tensorrt-llm``: ``medusa_heads.{h}.medusa_layers.{l}.linear.*``, ``medusa_heads.{h}.lm_head.weight``.
* ``vllm``: ``blocks.{h}.layers.{l}.*``, ``lm_heads.{h}.weight`` or one ``lm_head.weight``, optionally ``token_map``.

Counts come from the tensors: the published config of the Vicuna heads says 2 for a file of 5.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from specexport.exporter.config import TargetConfig
from specexport.exporter.config_values import LIMITS, text
from specexport.exporter.heads.base import Keys, Reading, Tensors, both, lineage, select_rows
from specexport.exporter.heads.block_parts import activation, agree
from specexport.exporter.heads.record import MedusaRecord
from specexport.exporter.heads.vocab import read_token_map
from specexport.runtime.errors import CheckpointError

LmHead = Literal["own", "shared", "target"]
Output = tuple[LmHead, int, NDArray[np.int64] | None]

MEDUSA2_PREFIX = "medusa_head."


@dataclass(frozen=True, slots=True)
class Layout:
    """How one dialect names things: patterns with groups (head, layer), and the config's keys."""

    block: str
    lm_head: str
    heads_key: str
    layers_key: str


LAYOUTS: Mapping[str, Layout] = {
    "medusa": Layout("{h}.{l}.linear", "{h}.{n}.weight", "medusa_num_heads", "medusa_num_layers"),
    "tensorrt-llm": Layout(
        "medusa_heads.{h}.medusa_layers.{l}.linear",
        "medusa_heads.{h}.lm_head.weight",
        "num_medusa_heads",
        "num_medusa_layers",
    ),
    "vllm": Layout("blocks.{h}.layers.{l}", "lm_heads.{h}.weight", "num_heads", "num_hidden_layers"),
}


def layout_of(names: set[str]) -> str | None:
    """The layout whose blocks are among ``names``."""
    for dialect, layout in LAYOUTS.items():
        pattern = _pattern(layout.block + ".weight")
        if any(pattern.fullmatch(name) for name in names):
            return dialect
    return None


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(re.escape(template).replace(r"\{h\}", r"(\d{1,3})").replace(r"\{l\}", r"(\d{1,3})"))


def read_medusa(keys: Keys, tensors: Tensors, target: TargetConfig | None, *, merged: bool = False) -> Reading:
    """Read heads of any layout.

    Args:
        target: needed where the logits go through the target's lm_head, for its number of rows.
        merged: the config is the target's own, which ``exporter.config`` reads; only the heads' keys are taken here.

    Raises:
        CheckpointError: anything missing, not understood or contradictory.
    """
    dialect = layout_of(set(tensors.names()))
    if dialect is None:
        raise CheckpointError("no Medusa block among the tensors")
    layout = LAYOUTS[dialect]
    heads, layers = _counts(tensors, layout)
    warnings = [w for w in (_count(keys, layout.heads_key, heads), _count(keys, layout.layers_key, layers)) if w]
    first = layout.block.format(h=0, l=0)
    hidden = tensors.matrix(first + ".weight")[1]
    bias = _biases(keys, tensors, layout, dialect, heads, layers)
    for h in range(heads):
        for layer in range(layers):
            name = layout.block.format(h=h, l=layer)
            canonical = f"heads.{h}.blocks.{layer}"
            tensors.take(f"{canonical}.weight", f"{name}.weight", (hidden, hidden), why=f"{first!r}")
            if bias:
                tensors.take(f"{canonical}.bias", f"{name}.bias", (hidden,), why=f"{first!r}")
    if not merged:
        if "hidden_size" in keys:
            agree(keys, "hidden_size", hidden, first + ".weight")
        keys.ignore("medusa_head_name_or_path", "max_medusa_token_len", "max_paths", "topk", "medusa_choices")
    shape = (heads, layers, hidden)
    source, rows, token_map = (
        _read_vllm_head(keys, tensors, shape) if dialect == "vllm" else _read_head(keys, tensors, target, layout, shape)
    )
    record = MedusaRecord(
        dialect="medusa-2" if merged else "medusa-legacy" if dialect == "medusa" and source == "target" else dialect,
        num_heads=heads,
        num_layers=layers,
        hidden_size=hidden,
        vocab_size=rows,
        block_bias=bias,
        activation=activation(keys, "medusa_hidden_act"),
        lm_head=source,
        token_map=token_map,
        lineage=lineage(keys, "base_model_name_or_path"),
    )
    tensors.finish(record.dialect)
    if not merged:
        keys.finish()
    return Reading(record, tensors.parts, tuple(warnings))


def _counts(tensors: Tensors, layout: Layout) -> tuple[int, int]:
    """Heads and layers; every head must have every layer."""
    pattern = _pattern(layout.block + ".weight")
    found = {(int(m[1]), int(m[2])) for name in tensors.names() if (m := pattern.fullmatch(name))}
    heads, layers = 1 + max(h for h, _ in found), 1 + max(layer for _, layer in found)
    for h in range(heads):
        for layer in range(layers):
            if (h, layer) not in found:
                raise CheckpointError(
                    f"tensor {layout.block.format(h=h, l=layer) + '.weight'!r} is missing from the head"
                )
    return heads, layers


def _count(keys: Keys, key: str, found: int) -> str | None:
    """Compare a count of the config with the tensors': fewer is a published mistake, more means a missing tensor."""
    said = keys.integer(key, 1, 999)
    if said is not None and said > found:
        raise CheckpointError(f"{keys.where}: {key} is {said} but the file holds {found}; tensors are missing")
    return f"{key} is {said} but the file holds {found}: all {found} are used" if said not in (None, found) else None


def _biases(keys: Keys, tensors: Tensors, layout: Layout, dialect: str, heads: int, layers: int) -> bool:
    names = [f"{layout.block.format(h=h, l=layer)}.bias" for h in range(heads) for layer in range(layers)]
    missing = [name for name in names if name not in tensors]
    if dialect != "vllm":
        wanted, reason = True, "blocks of this layout always have a bias"
        keys.fixed("medusa_fc_bias", True)  # which vLLM needs to hear of this layout too
    else:
        wanted = keys.boolean("medusa_fc_bias", False)
        reason = f"medusa_fc_bias is {str(wanted).lower()}" + ("" if "medusa_fc_bias" in keys else " (absent)")
    if wanted and missing:
        raise CheckpointError(f"tensor {missing[0]!r} is missing from the head: {reason}")
    if not wanted and len(missing) < len(names):
        held = next(name for name in names if name in tensors)
        raise CheckpointError(f"tensor {held!r} is in the file, but {reason}; set it to true or remove the biases")
    return wanted


def _read_head(
    keys: Keys, tensors: Tensors, target: TargetConfig | None, layout: Layout, shape: tuple[int, int, int]
) -> Output:
    """Own lm_heads where the file has them, else the target's. ``shape``: heads, layers, H."""
    heads, layers, hidden = shape
    names = [layout.lm_head.format(h=h, n=layers) for h in range(heads)]
    held = [name for name in names if name in tensors]
    version = keys.take("version")
    if held:
        if str(version) == "2":
            raise both(
                f"a Medusa head of version {text(version)} with tensor {held[0]!r}",
                "logits through the target's lm_head (version 2)",
                "logits through the tensor",
                "remove the version to use the tensor, or the tensors to use the target's",
            )
        rows = tensors.matrix(held[0])[0]
        for h, name in enumerate(names):
            tensors.take(f"heads.{h}.lm_head", name, (rows, hidden), why=f"{held[0]!r}")
        if "vocab_size" in keys:
            agree(keys, "vocab_size", rows, held[0])
        return "own", rows, None
    if version is not None and str(version) != "2":
        raise CheckpointError(
            f"{keys.where}: version {text(version)} calls for lm_heads of its own, but tensor {names[0]!r} is missing"
        )
    if target is None:
        raise CheckpointError(
            f"tensor {names[0]!r} is not in the head, so logits go through the target's lm_head; name the target too "
            "(--target), or add the tensors"
        )
    if "vocab_size" in keys:
        keys.integer("vocab_size", *LIMITS["vocab_size"])
    return "target", target.vocab_size, None


def _read_vllm_head(keys: Keys, tensors: Tensors, shape: tuple[int, int, int]) -> Output:
    heads, _, hidden = shape
    keys.fixed("model_type", "medusa", None)
    shared = keys.boolean("original_lm_head", False)
    keys.fixed("logit_scale", 1.0, 1)
    vocab = keys.integer("vocab_size", *LIMITS["vocab_size"])
    rows = keys.integer("truncated_vocab_size", *LIMITS["vocab_size"])
    names = ["lm_head.weight" if shared and "lm_head.weight" in tensors else "lm_heads.0.weight"]
    if not shared:
        names += [f"lm_heads.{h}.weight" for h in range(1, heads)]
    stored = tensors.matrix(names[0])[0]
    vocab = stored if vocab is None else vocab
    rows = vocab if rows is None else rows
    if rows > vocab:
        raise CheckpointError(f"{keys.where}: truncated_vocab_size {rows} is more than vocab_size {vocab}")
    token_map = read_token_map(tensors, vocab) if "token_map" in tensors else None
    if (rows < vocab) != (token_map is not None):
        there = "no" if token_map is None else "a"
        raise both(
            f"a truncated_vocab_size of {rows} with vocab_size {vocab} and {there} token_map",
            f"all {vocab} ids",
            "the ids of a token_map",
            "add the one that is missing, or remove the other",
        )
    transform = None
    if token_map is not None:
        if len(token_map) != rows:
            raise CheckpointError(f"tensor 'token_map' has {len(token_map)} ids; truncated_vocab_size is {rows}")
        if stored == vocab:
            transform = select_rows(torch.from_numpy(token_map))
        elif stored != rows:
            raise CheckpointError(
                f"tensor {names[0]!r} has {stored} rows; expected {rows} (truncated) or {vocab} (all)"
            )
    for h, name in enumerate(names):
        canonical = "lm_head" if shared else f"heads.{h}.lm_head"
        expected = (stored if token_map is not None else rows, hidden)
        tensors.take(canonical, name, expected, transform=transform, out=(rows, hidden))
    return "shared" if shared else "own", rows, token_map
