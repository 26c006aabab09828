"""Multi-token-prediction heads, alone and inside their target."""

from __future__ import annotations

import math
from typing import Any

from specexport.exporter.config import RopeConfig
from specexport.exporter.heads.record import Experts, Latent
from tests.exporter.heads.writers import (
    DIM,
    HEADS,
    TARGET_CONFIG,
    H,
    N,
    Random,
    Tensors,
    Tiny,
    V,
    block_config,
    dialect,
    layer,
    llama,
    llama_tensors,
    recurrent,
)


def projection(random: Random, names: tuple[str, str, str, str]) -> tuple[Tensors, Tensors]:
    """fuse, embedding norm, hidden norm, final norm."""
    mine = ("fuse.weight", "embedding_norm.weight", "hidden_norm.weight", "norm.weight")
    made = [random(H, 2 * H), random(H), random(H), random(H)]
    return dict(zip(names, made, strict=True)), dict(zip(mine, made, strict=True))


NORMS = {"embedding_norm": True, "hidden_norm": True, "final_norm": True}


@dialect
def mtp_mimo() -> Tiny:
    """Inside a whole MiMo checkpoint, which is a Qwen2 but for the head: reversed order, q, k and v biases."""
    random = Random(30)
    stored, canonical = layer(random, "model.mtp_layers.0.", 0, H, H, dim=4, bias=True)
    prefix = "model.mtp_layers.0."
    theirs, mine = projection(
        random,
        (
            prefix + "input_proj.weight",
            prefix + "token_layernorm.weight",
            prefix + "hidden_layernorm.weight",
            prefix + "final_layernorm.weight",
        ),
    )
    config = TARGET_CONFIG | {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
    }
    rope = RopeConfig("default", 10000.0, 4, 128)
    record = recurrent(
        "mtp",
        "mtp-mimo",
        order=("hidden", "embedding"),
        feedback="normed",
        max_positions=128,
        blocks=block_config(head_dim=4, attention_bias=True, rope=rope),
        **NORMS,
    )
    return Tiny(config, stored | theirs, record, canonical | mine, others=llama_tensors(random, bias=True))


QWEN_NORMS = ("mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight")
QWEN_BLOCKS: dict[str, Any] = {"head_dim": 8, "qk_norm": True, "norm_offset": 1.0, "gated": True}


@dialect
def mtp_qwen3_next() -> Tiny:
    """Alone, with a dense layer: gated queries, norm weights stored as w - 1, half of each head rotated."""
    random = Random(31)
    stored, canonical = layer(random, "mtp.layers.0.", 0, H, H, dim=8, qk_norm=True, gated=True)
    theirs, mine = projection(random, QWEN_NORMS)
    config = llama(model_type="qwen3_next", head_dim=8, num_hidden_layers=N, partial_rotary_factor=0.5)
    blocks = block_config(rope=RopeConfig("default", 500000.0, 4, 64), **QWEN_BLOCKS)
    record = recurrent("mtp", "mtp-qwen3-next", feedback="normed", blocks=blocks, **NORMS)
    return Tiny(config, stored | theirs, record, canonical | mine)


#: Experts, how many a token takes, and the width of one.
EXPERTS, TOP, WIDE = 8, 3, 6


def experts(random: Random, stored: str, *, shared: str, shared_size: int, sigmoid: bool) -> tuple[Tensors, Tensors]:
    """A mixture of experts: (stored, canonical)."""
    names: list[tuple[str, str, tuple[int, ...]]] = [("gate.weight", "router", (EXPERTS, H))]
    parts = [(f"experts.{index}.", f"experts.{index}.", WIDE) for index in range(EXPERTS)]
    for theirs, mine, inner in [*parts, (f"{shared}.", "shared.", shared_size)]:
        names += [(f"{theirs}{n}_proj.weight", f"{mine}{n}_proj.weight", (inner, H)) for n in ("gate", "up")]
        names.append((f"{theirs}down_proj.weight", f"{mine}down_proj.weight", (H, inner)))
    if not sigmoid:
        names.append(("shared_expert_gate.weight", "shared_gate.weight", (1, H)))
    made = {theirs: random(*shape) for theirs, _, shape in names}
    theirs, mine = (
        {f"{stored}mlp.{name}": tensor for name, tensor in made.items()},
        {f"layers.0.mlp.{mine}": made[name] for name, mine, _ in names},
    )
    if sigmoid:  # scores with it stay positive
        made["bias"] = random(EXPERTS).abs()
        theirs[f"{stored}mlp.gate.e_score_correction_bias"] = mine["layers.0.mlp.correction"] = made["bias"]
    return theirs, mine


def without_mlp(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if ".mlp." not in name}


@dialect
def mtp_qwen3_next_moe() -> Tiny:
    """As published: experts with a gated shared one; a quarter of each head rotated, by silence."""
    random = Random(34)
    stored, canonical = map(
        without_mlp, layer(random, "mtp.layers.0.", 0, H, H, dim=8, qk_norm=True, gated=True, input_norm=True)
    )
    for mine, theirs in zip(
        experts(random, "mtp.layers.0.", shared="shared_expert", shared_size=10, sigmoid=False),
        (stored, canonical),
        strict=True,
    ):
        theirs |= mine
    theirs, mine = projection(random, QWEN_NORMS)
    config = llama(
        model_type="qwen3_next",
        architectures=["Qwen3NextForCausalLM"],
        head_dim=8,
        num_hidden_layers=N,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP,
        moe_intermediate_size=WIDE,
        shared_expert_intermediate_size=10,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        linear_conv_kernel_dim=4,
        full_attention_interval=4,
    )
    blocks = block_config(
        rope=RopeConfig("default", 500000.0, 2, 64),
        experts=Experts(EXPERTS, TOP, WIDE, "softmax", 1, 1, True, 1.0, 10, True),
        **(QWEN_BLOCKS | {"intermediate_size": WIDE}),
    )
    record = recurrent("mtp", "mtp-qwen3-next", feedback="normed", blocks=blocks, **NORMS)
    return Tiny(config, stored | theirs, record, canonical | mine)


def deepseek(random: Random, dim: int) -> tuple[Tensors, Tensors]:
    prefix = f"model.layers.{N}."
    stored, canonical = layer(random, prefix, 0, H, H, dim=dim)
    names = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    theirs, mine = projection(random, tuple(f"{prefix}{name}.weight" for name in names))  # type: ignore[arg-type]
    return stored | theirs, canonical | mine


@dialect
def mtp_deepseek() -> Tiny:
    """Alone, with a dense layer and its own copies of embedding and lm_head."""
    random = Random(32)
    stored, canonical = deepseek(random, DIM)
    stored[f"model.layers.{N}.embed_tokens.weight"] = canonical["embedding"] = random(V, H)
    stored[f"model.layers.{N}.shared_head.head.weight"] = canonical["lm_head"] = random(V, H)
    config = llama(model_type="deepseek_v3", num_hidden_layers=N, num_nextn_predict_layers=1)
    record = recurrent("mtp", "mtp-deepseek", embedding="head", lm_head="head", **NORMS)
    return Tiny(config, stored, record, canonical)


@dialect
def mtp_deepseek_merged() -> Tiny:
    """In the DeepSeek layout after the layers of a dense target."""
    random = Random(33)
    stored, canonical = deepseek(random, 4)
    rope = RopeConfig("default", 10000.0, 4, 128)
    blocks = block_config(head_dim=4, rope=rope)
    record = recurrent("mtp", "mtp-deepseek", max_positions=128, blocks=blocks, **NORMS)
    config = TARGET_CONFIG | {"num_nextn_predict_layers": 1}
    return Tiny(config, stored, record, canonical, others=llama_tensors(random))


def chained(canonical: Tensors, index: int) -> Tensors:
    return {f"chain.{index - 1}.{name}": tensor for name, tensor in canonical.items()} if index else canonical


@dialect
def mtp_deepseek_chain() -> Tiny:
    """Three prediction layers, each with copies of the tables."""
    random = Random(35)
    stored: Tensors = {}
    canonical: Tensors = {"embedding": random(V, H), "lm_head": random(V, H)}
    for index in range(3):
        theirs, mine = deepseek(random, DIM)
        prefix = f"model.layers.{N + index}."
        stored |= {name.replace(f"model.layers.{N}.", prefix): tensor for name, tensor in theirs.items()}
        stored[f"{prefix}embed_tokens.weight"] = canonical["embedding"].clone()
        stored[f"{prefix}shared_head.head.weight"] = canonical["lm_head"].clone()
        canonical |= chained(mine, index)
    config = llama(model_type="deepseek_v3", num_hidden_layers=N, num_nextn_predict_layers=3)
    record = recurrent("mtp", "mtp-deepseek", embedding="head", lm_head="head", prediction_layers=3, **NORMS)
    return Tiny(config, stored, record, canonical)


#: Sizes of latent attention: ranks of queries and of keys and values, without and with a position, values.
QUERY_RANK, RANK, NOPE, ROPE, VALUE = 10, 7, 6, 4, 5
MOE_KEYS: dict[str, Any] = {
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": TOP,
    "moe_intermediate_size": WIDE,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}
YARN = {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 32, "beta_slow": 1}


def latent_layer(random: Random, stored: str) -> tuple[Tensors, Tensors]:
    """Latent attention and the layer's norms: (stored, canonical)."""
    names: list[tuple[str, str, tuple[int, ...]]] = [
        ("self_attn.q_a_proj", "attention.q_a_proj", (QUERY_RANK, H)),
        ("self_attn.q_a_layernorm", "attention.q_a_norm", (QUERY_RANK,)),
        ("self_attn.q_b_proj", "attention.q_b_proj", (HEADS * (NOPE + ROPE), QUERY_RANK)),
        ("self_attn.kv_a_proj_with_mqa", "attention.kv_a_proj", (RANK + ROPE, H)),
        ("self_attn.kv_a_layernorm", "attention.kv_a_norm", (RANK,)),
        ("self_attn.kv_b_proj", "attention.kv_b_proj", (HEADS * (NOPE + VALUE), RANK)),
        ("self_attn.o_proj", "attention.o_proj", (H, HEADS * VALUE)),
        ("input_layernorm", "input_norm", (H,)),
        ("post_attention_layernorm", "mlp_norm", (H,)),
    ]
    made = {theirs: random(*shape) for theirs, _, shape in names}
    return (
        {f"{stored}{theirs}.weight": tensor for theirs, tensor in made.items()},
        {f"layers.0.{mine}.weight": made[theirs] for theirs, mine, _ in names},
    )


@dialect
def mtp_deepseek_v3() -> Tiny:
    """As published: latent attention with YaRN, experts chosen from the best groups."""
    random = Random(36)
    prefix = f"model.layers.{N}."
    stored, canonical = latent_layer(random, prefix)
    names = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    for theirs, mine in (
        experts(random, prefix, shared="shared_experts", shared_size=2 * WIDE, sigmoid=True),
        projection(random, tuple(f"{prefix}{name}.weight" for name in names)),  # type: ignore[arg-type]
    ):
        stored |= theirs
        canonical |= mine
    stored[f"{prefix}embed_tokens.weight"] = canonical["embedding"] = random(V, H)
    stored[f"{prefix}shared_head.head.weight"] = canonical["lm_head"] = random(V, H)
    config = llama(
        model_type="deepseek_v3",
        architectures=["DeepseekV3ForCausalLM"],
        num_hidden_layers=N,
        num_key_value_heads=HEADS,
        head_dim=None,
        q_lora_rank=QUERY_RANK,
        kv_lora_rank=RANK,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
        rope_scaling={"type": "yarn", "original_max_position_embeddings": 16, **YARN},
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        **MOE_KEYS,
    )
    rope = RopeConfig("yarn", 500000.0, ROPE, 64, {**YARN, "original_max_position_embeddings": 16})
    mscale = 0.1 * 0.5 * math.log(4.0) + 1.0
    blocks = block_config(
        num_kv_heads=1,
        head_dim=RANK + ROPE,
        intermediate_size=WIDE,
        rope=rope,
        attention_scale=(NOPE + ROPE) ** -0.5 * mscale**2,
        latent=Latent(QUERY_RANK, RANK, NOPE, ROPE, VALUE, True, 1e-6),
        experts=Experts(EXPERTS, TOP, WIDE, "sigmoid", 4, 2, True, 2.5, 2 * WIDE, False),
    )
    record = recurrent("mtp", "mtp-deepseek", embedding="head", lm_head="head", blocks=blocks, **NORMS)
    return Tiny(config, stored, record, canonical)


@dialect
def mtp_glm4_moe() -> Tiny:
    """GLM-4.5: DeepSeek's layout and experts with grouped attention, half of each head rotated, the target's tables."""
    random = Random(37)
    prefix = f"model.layers.{N}."
    stored, canonical = map(without_mlp, layer(random, prefix, 0, H, H, dim=8, bias=True, qk_norm=True))
    names = ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    for theirs, mine in (
        experts(random, prefix, shared="shared_experts", shared_size=2 * WIDE, sigmoid=True),
        projection(random, tuple(f"{prefix}{name}.weight" for name in names)),  # type: ignore[arg-type]
    ):
        stored |= theirs
        canonical |= mine
    config = llama(
        model_type="glm4_moe",
        architectures=["Glm4MoeForCausalLM"],
        num_hidden_layers=N,
        head_dim=8,
        attention_bias=True,
        use_qk_norm=True,
        partial_rotary_factor=0.5,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.5,
        **MOE_KEYS,
    )
    blocks = block_config(
        head_dim=8,
        intermediate_size=WIDE,
        attention_bias=True,
        qk_norm=True,
        rope=RopeConfig("default", 500000.0, 4, 64),
        experts=Experts(EXPERTS, TOP, WIDE, "sigmoid", 1, 1, True, 1.5, 2 * WIDE, False),
    )
    record = recurrent("mtp", "mtp-deepseek", blocks=blocks, **NORMS)
    return Tiny(config, stored, record, canonical)
