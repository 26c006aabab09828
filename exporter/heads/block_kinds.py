"""Layers of a head that are not Llama's: latent attention (DeepSeek-V3) and mixtures of experts.

Experts come in two layouts: ``gate`` with a correction and ``shared_experts`` (DeepSeek-V3, GLM-4.5), and ``gate`` with
a gated ``shared_expert`` (Qwen3-Next).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from specexport.exporter.config import RopeConfig
from specexport.exporter.config_values import LIMITS
from specexport.exporter.heads.base import Keys, Tensors
from specexport.exporter.heads.block_parts import Layer, activation, agree, read_rope, take_mlp
from specexport.exporter.heads.record import Experts, Latent
from specexport.runtime.errors import CheckpointError

#: Of the norms inside latent attention, whatever rms_norm_eps says (DeepSeek's code leaves them at their default).
_LATENT_EPS = 1e-6
_MOST_EXPERTS = 4096


def is_latent(tensors: Tensors, layer: Layer) -> bool:
    """Whether a layer has latent attention."""
    return f"{layer.prefix}self_attn.kv_a_proj_with_mqa.weight" in tensors


def has_experts(tensors: Tensors, layer: Layer) -> bool:
    """Whether a layer has experts in place of its MLP."""
    return f"{layer.prefix}mlp.gate.weight" in tensors


def read_latent(
    keys: Keys, tensors: Tensors, layers: Sequence[Layer], hidden: int, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Take latent attention and return its fields of :class:`BlockConfig`; sizes come from the tensors.

    Raises:
        CheckpointError: config and tensors disagree, or biases.
    """
    first = f"{layers[0].prefix}self_attn."
    heads = keys.integer("num_attention_heads", *LIMITS["num_attention_heads"])
    if heads is None:
        raise CheckpointError(f"{keys.where}: num_attention_heads is missing; latent attention needs it")
    keys.fixed("num_key_value_heads", None, heads)
    keys.fixed("attention_bias", False)
    keys.fixed("sliding_window", None)
    if any(layer.width != hidden for layer in layers):
        raise CheckpointError(f"tensor {first}o_proj.weight: latent attention over two inputs at once is not built")
    direct = f"{first}q_proj.weight" in tensors
    queries = f"{first}{'q_proj' if direct else 'q_b_proj'}.weight"
    query_rank = None if direct else tensors.vector(f"{first}q_a_layernorm.weight")
    if query_rank is None:
        keys.fixed("q_lora_rank", None)
    else:
        agree(keys, "q_lora_rank", query_rank, f"{first}q_a_layernorm.weight")
    rank = tensors.vector(f"{first}kv_a_layernorm.weight")
    compressed = tensors.matrix(f"{first}kv_a_proj_with_mqa.weight")[0]
    wide, values = tensors.matrix(queries)[0], tensors.matrix(f"{first}o_proj.weight")[1]
    rope_dim = compressed - rank
    if wide % heads or values % heads or not 0 < rope_dim < wide // heads:
        raise CheckpointError(
            f"tensors {queries!r} ({wide} rows), {first}o_proj.weight ({values} columns) and "
            f"{first}kv_a_proj_with_mqa.weight ({compressed} rows, {rank} of them the latent) do not fit {heads} heads"
        )
    latent = Latent(
        query_rank,
        rank,
        wide // heads - rope_dim,
        rope_dim,
        values // heads,
        keys.boolean("rope_interleave", True),
        _LATENT_EPS,
    )
    for key, size, name in (
        ("kv_lora_rank", rank, f"{first}kv_a_layernorm.weight"),
        ("qk_rope_head_dim", rope_dim, f"{first}kv_a_proj_with_mqa.weight"),
        ("qk_nope_head_dim", latent.nope_dim, queries),
        ("v_head_dim", latent.value_dim, f"{first}o_proj.weight"),
    ):
        agree(keys, key, size, name)
    keys.fixed("qk_head_dim", None, latent.nope_dim + rope_dim)
    keys.fixed("head_dim", None, rope_dim)  # as Transformers writes it
    for layer in layers:
        _take_latent(tensors, layer, latent, hidden, heads)
    rope = read_rope(keys, rope_dim, defaults)
    return {
        "num_heads": heads,
        "num_kv_heads": 1,
        "head_dim": rank + rope_dim,
        "rope": rope,
        "attention_scale": (latent.nope_dim + rope_dim) ** -0.5 * _mscale(rope) ** 2,
        "latent": latent,
    }


def _take_latent(tensors: Tensors, layer: Layer, latent: Latent, hidden: int, heads: int) -> None:
    wide, halves = heads * (latent.nope_dim + latent.rope_dim), heads * (latent.nope_dim + latent.value_dim)
    shapes: dict[tuple[str, str], tuple[int, ...]] = {
        ("kv_a_proj", "kv_a_proj_with_mqa"): (latent.rank + latent.rope_dim, hidden),
        ("kv_a_norm", "kv_a_layernorm"): (latent.rank,),
        ("kv_b_proj", "kv_b_proj"): (halves, latent.rank),
        ("o_proj", "o_proj"): (hidden, heads * latent.value_dim),
    }
    if latent.query_rank is None:
        shapes["q_proj", "q_proj"] = (wide, hidden)
    else:
        shapes["q_a_proj", "q_a_proj"] = (latent.query_rank, hidden)
        shapes["q_a_norm", "q_a_layernorm"] = (latent.query_rank,)
        shapes["q_b_proj", "q_b_proj"] = (wide, latent.query_rank)
    for (mine, theirs), shape in shapes.items():
        tensors.take(f"{layer.canonical}attention.{mine}.weight", f"{layer.prefix}self_attn.{theirs}.weight", shape)


def _mscale(rope: RopeConfig) -> float:
    """DeepSeek's factor on queries and keys each, beside the one in YaRN's tables."""
    factor, weight = rope.params.get("factor", 1.0), rope.params.get("mscale_all_dim", 0.0)
    if (
        rope.kind != "yarn"
        or not isinstance(factor, float)
        or not isinstance(weight, float)
        or factor <= 1
        or not weight
    ):
        return 1.0
    return 0.1 * weight * math.log(factor) + 1.0


def read_experts(keys: Keys, tensors: Tensors, layers: Sequence[Layer], hidden: int, kind: str) -> dict[str, Any]:
    """Take a mixture of experts and return its fields of :class:`BlockConfig`.

    What tensors cannot tell (how many experts a token takes, and how their weights are made) must be in the config.

    Raises:
        CheckpointError: config and tensors disagree, or experts of a ``model_type`` without any.
    """
    read = {"deepseek_v3": _deepseek, "glm4_moe": _deepseek, "qwen3_next": _qwen}.get(kind)
    router = f"{layers[0].prefix}mlp.gate.weight"
    if read is None:
        raise CheckpointError(f"tensor {router!r}: a mixture of experts is not built for a model_type of {kind}")
    if activation(keys) != "silu":
        raise CheckpointError(f"{keys.where}: hidden_act must be silu for a mixture of experts")
    count = tensors.matrix(router)[0]
    gate = f"{layers[0].prefix}mlp.experts.0.gate_proj.weight"
    inner = tensors.matrix(gate)[0]
    agree(keys, "moe_intermediate_size", inner, gate)
    keys.integer("intermediate_size", *LIMITS["intermediate_size"])  # of the target's dense layers
    top = keys.integer("num_experts_per_tok", 1, count)
    normalise = keys.flag("norm_topk_prob")
    if top is None or normalise is None:
        raise CheckpointError(
            f"{keys.where}: {'num_experts_per_tok' if top is None else 'norm_topk_prob'} is missing; experts need it"
        )
    experts = read(keys, tensors, layers[0], count, top, inner, normalise)
    for layer in layers:
        _take_experts(tensors, layer, experts, hidden)
    return {"intermediate_size": inner, "experts": experts}


def _deepseek(keys: Keys, tensors: Tensors, layer: Layer, count: int, top: int, inner: int, normalise: bool) -> Experts:
    """DeepSeek-V3's choice (arXiv 2412.19437): sigmoid scores, corrected, from the best groups."""
    agree(keys, "n_routed_experts", count, f"{layer.prefix}mlp.gate.weight")
    groups, kept = keys.integer("n_group", 1, count), keys.integer("topk_group", 1, count)
    if groups is None or kept is None or "routed_scaling_factor" not in keys:
        raise CheckpointError(f"{keys.where}: experts need n_group, topk_group and routed_scaling_factor")
    if count % groups or kept > groups or (groups > 1 and count // groups < 2) or top > kept * (count // groups):
        raise CheckpointError(
            f"{keys.where}: n_group {groups}, topk_group {kept}, num_experts_per_tok {top} do not fit {count} experts"
        )
    for key, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        keys.fixed(key, value)
    dense, layers = keys.integer("first_k_dense_replace", 0, 512), keys.integer("num_hidden_layers", 1, 512)
    if dense is not None and layers is not None and dense > layers:
        raise CheckpointError(f"{keys.where}: first_k_dense_replace {dense} makes this layer dense, but it has experts")
    keys.ignore("ep_size", "seq_aux", "aux_loss_alpha")  # of training and of sharding
    name = f"{layer.prefix}mlp.shared_experts.gate_proj.weight"
    shared = tensors.matrix(name)[0] if name in tensors else 0
    said = keys.integer("n_shared_experts", 0, _MOST_EXPERTS)
    if said is not None and said * inner != shared:
        raise CheckpointError(
            f"{keys.where}: n_shared_experts is {said}, of width {inner}, but tensor {name!r} has {shared} rows"
        )
    scaled = keys.number("routed_scaling_factor", 1.0, 0.0, 1e3)
    return Experts(count, top, inner, "sigmoid", groups, kept, normalise, scaled, shared, False)


def _qwen(keys: Keys, tensors: Tensors, layer: Layer, count: int, top: int, inner: int, normalise: bool) -> Experts:
    """Qwen's choice: softmax scores, and a shared expert with a gate."""
    agree(keys, "num_experts", count, f"{layer.prefix}mlp.gate.weight")
    keys.fixed("decoder_sparse_step", 1)
    keys.fixed("mlp_only_layers", [])
    keys.ignore("output_router_logits", "router_aux_loss_coef")
    name = f"{layer.prefix}mlp.shared_expert.gate_proj.weight"
    shared = tensors.matrix(name)[0] if name in tensors else 0
    if shared:
        agree(keys, "shared_expert_intermediate_size", shared, name)
    else:
        keys.fixed("shared_expert_intermediate_size", None, 0)
    return Experts(count, top, inner, "softmax", 1, 1, normalise, 1.0, shared, shared > 0)


def _take_experts(tensors: Tensors, layer: Layer, experts: Experts, hidden: int) -> None:
    mine, theirs = f"{layer.canonical}mlp.", f"{layer.prefix}mlp."
    tensors.take(f"{mine}router", f"{theirs}gate.weight", (experts.count, hidden))
    if experts.scores == "sigmoid":
        tensors.take(f"{mine}correction", f"{theirs}gate.e_score_correction_bias", (experts.count,))
    for index in range(experts.count):
        place = f"experts.{index}."
        take_mlp(tensors, mine + place, theirs + place, hidden, experts.intermediate_size)
    if experts.shared_size:
        name = "shared_expert." if experts.shared_gate else "shared_experts."
        take_mlp(tensors, f"{mine}shared.", theirs + name, hidden, experts.shared_size)
    if experts.shared_gate:
        tensors.take(f"{mine}shared_gate.weight", f"{theirs}shared_expert_gate.weight", (1, hidden))
