"""Qwen2: Llama's tensors plus biases on q, k and v, which the common table already names."""

from specexport.exporter.models.rules import COMMON, Table

TENSORS: Table = COMMON
