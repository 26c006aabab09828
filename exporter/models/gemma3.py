"""Gemma 3 (text): norms on both sides of attention and MLP. What Llama calls post_attention_layernorm (the norm before
the MLP) is here the norm *after* attention; the one before the MLP is pre_feedforward_layernorm."""

from specexport.exporter.models.rules import COMMON, QK_NORM, Rule, Table, norm

TENSORS: Table = {
    **COMMON,
    **QK_NORM,
    "layers.{i}.attention_out_norm.weight": Rule("model.layers.{i}.post_attention_layernorm.weight", norm),
    "layers.{i}.mlp_norm.weight": Rule("model.layers.{i}.pre_feedforward_layernorm.weight", norm),
    "layers.{i}.mlp_out_norm.weight": Rule("model.layers.{i}.post_feedforward_layernorm.weight", norm),
}
