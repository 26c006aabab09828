"""Llama: also SmolLM2, TinyLlama and everything that ships as LlamaForCausalLM."""

from specexport.exporter.models.rules import COMMON, Table

TENSORS: Table = COMMON
