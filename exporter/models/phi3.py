"""Phi-3: q, k, v in one matrix, and gate and up in another; both are split so that the graph matches the others."""

from specexport.exporter.config import TargetConfig
from specexport.exporter.models.rules import COMMON, Rule, Table, rows


def _qkv(config: TargetConfig) -> tuple[int, ...]:
    narrow = config.num_kv_heads * config.head_dim
    return config.num_heads * config.head_dim, narrow, narrow


def _gate_up(config: TargetConfig) -> tuple[int, ...]:
    return config.intermediate_size, config.intermediate_size


TENSORS: Table = {
    **COMMON,
    **{
        f"layers.{{i}}.attention.{name}_proj.weight": Rule(
            "model.layers.{i}.self_attn.qkv_proj.weight", rows(_qkv, index), operand=True
        )
        for index, name in enumerate("qkv")
    },
    **{
        f"layers.{{i}}.mlp.{name}_proj.weight": Rule(
            "model.layers.{i}.mlp.gate_up_proj.weight", rows(_gate_up, index), operand=True
        )
        for index, name in enumerate(("gate", "up"))
    },
}
