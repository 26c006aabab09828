"""Qwen3: no projection biases, but a norm of every query and key head before rope."""

from specexport.exporter.models.rules import COMMON, QK_NORM, Table

TENSORS: Table = {**COMMON, **QK_NORM}
