"""Tiny checkpoints of every format, written into a temporary directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from safetensors.torch import save_file


def write_checkpoint(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], shards: int = 1
) -> Path:
    """A Hugging Face directory: ``config.json`` and safetensors, with an index if there are several shards."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    owned = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    if shards == 1:
        save_file(owned, directory / "model.safetensors")
        return directory
    weight_map: dict[str, str] = {}
    for part in range(shards):
        file = f"model-{part + 1:05}-of-{shards:05}.safetensors"
        names = list(owned)[part::shards]
        save_file({name: owned[name] for name in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in owned.values())}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def write_gguf(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray[Any, Any]],
    types: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """A GGUF file by the reference writer. A ``.`` before a key stands for the architecture; ``types`` quantises."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in metadata.items():
        key = architecture + name if name.startswith(".") else name
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case Sequence():
                writer.add_array(key, list(value))
    for name, array in tensors.items():
        kind = (types or {}).get(name)
        data = array if kind is None else gguf.quants.quantize(array, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
