"""Multi-token-prediction heads, alone and inside their target."""

from __future__ import annotations

from specexport.exporter.config import RopeConfig
from tests.exporter.heads.writers import (
    DIM,
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


@dialect
def mtp_qwen3_next() -> Tiny:
    """Alone, with a dense layer: norm weights stored as w - 1, half of each head rotated."""
    random = Random(31)
    stored, canonical = layer(random, "mtp.layers.0.", 0, H, H, dim=8, qk_norm=True)
    theirs, mine = projection(
        random,
        ("mtp.fc.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"),
    )
    config = llama(model_type="qwen3_next", head_dim=8, num_hidden_layers=N, partial_rotary_factor=0.5)
    record = recurrent(
        "mtp",
        "mtp-qwen3-next",
        feedback="normed",
        blocks=block_config(head_dim=8, qk_norm=True, norm_offset=1.0, rope=RopeConfig("default", 500000.0, 4, 64)),
        **NORMS,
    )
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
