"""Mistral: Llama's tensors; its sliding window is in the config."""

from specexport.exporter.models.rules import COMMON, Table

TENSORS: Table = COMMON
