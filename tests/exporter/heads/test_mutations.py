"""Loader strictness: every single change of every tiny checkpoint is refused, or shows in the record, or is listed.

A change that shows in the record is not silent: it is what the file now says, and ``inspect`` prints it. A change that
is accepted with the record as it was must be in :data:`HARMLESS`, with the reason why it cannot matter.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

from specexport.exporter.config import TargetConfig, read_config
from specexport.exporter.heads import detect
from specexport.exporter.heads.files import HeadFiles
from specexport.exporter.heads.merged import target_config
from specexport.runtime.errors import CheckpointError
from tests.exporter.heads.writers import Memory, Tensors, Tiny, every, same

#: (dialect, change, tensor or key) patterns -> why the head is the same.
HARMLESS: dict[tuple[str, str, str], str] = {
    ("*", "retype to float16", "*"): "values are read as they are stored, in any floating dtype",
    ("*", "retype to int32", "d2t"): "integers of another width",
    ("*", "retype to int32", "*token_map"): "integers of another width",
    ("*", "*", "*architectures"): "bookkeeping; tensors decide",
    ("*", "*", "*torch_dtype"): "bookkeeping; the tensors carry their dtype",
    ("*", "*", "*transformers_version"): "bookkeeping",
    ("*", "*", "*use_cache"): "bookkeeping",
    ("*", "*", "speculators_version"): "bookkeeping of a format whose keys are all read",
    ("*", "*", "speculators_config.proposal_methods"): "proposals are chosen when building",
    ("*", "*", "speculators_config.default_proposal_method"): "proposals are chosen when building",
    ("*", "*", "transformer_layer_architecture"): "the layer's tensors decide",
    ("eagle3_deepspec", "*", "ttt_length"): "of the training run",
    ("medusa_tensorrt", "*", "max_medusa_token_len"): "the tree is chosen when building",
    ("medusa_vllm", "*", "max_paths"): "the tree is chosen when building",
    ("medusa_vllm", "*", "topk"): "the tree is chosen when building",
    ("eagle3_speculators", "*", "verifier_norm.weight"): "the verifier's own, which the format drops",
    # Absent keys that Transformers or the dialect fills in with the value they had.
    ("*", "drop", "*hidden_act"): "the default is silu",
    ("*", "drop", "*hidden_size"): "the tensors tell",
    ("*", "drop", "*intermediate_size"): "the tensors tell",
    ("*", "drop", "*num_hidden_layers"): "the default of a head is one layer",
    ("*", "drop", "*draft_vocab_size"): "the default is the whole vocabulary",
    ("*", "drop", "*vocab_size"): "the map or the embedding tells",
    ("*", "drop", "*target_hidden_size"): "the target or fc tells",
    ("*", "drop", "*num_target_layers"): "only checked",
    ("*", "change", "num_target_layers"): "only checked, against a target",
    ("*", "drop", "*layer_types"): "the default is full attention",
    ("*", "drop", "*model_type"): "tensors decide whether there are biases and q and k norms",
    ("*", "drop", "*head_dim"): "the rows of q over the heads, or the q norm, tell",
    ("*", "drop", "*use_sliding_window"): "the default is full attention",
    ("*", "drop", "*tie_word_embeddings"): "the default is false",
    ("eagle1*", "change", "*tie_word_embeddings"): "the lm_head is the target's: nothing to tie",
    ("eagle3*", "change", "*tie_word_embeddings"): "the lm_head has other rows than the embedding, so it is not tied",
    ("*", "drop", "*norm_output"): "SpecForge's default",
    ("*", "drop", "embed_requires_grad"): "the embedding is in the file",
    ("*", "change", "embed_requires_grad"): "the embedding is in the file",
    ("*", "drop", "*use_aux_hidden_state"): "the default is several captures",
    ("*", "drop", "speculators_config.algorithm"): "speculators_model_type says it too",
    ("*", "drop", "rope_parameters.rope_theta"): "rope_theta says it too",
    ("*", "drop", "rope_scaling"): "rope_parameters says it too",
    ("*", "drop", "rope_parameters"): "rope_scaling says it too",
    ("*", "drop", "num_nextn_predict_layers"): "the file holds one layer to predict with",
    ("medusa_*", "drop", "*medusa_num_heads"): "counts come from the tensors",
    ("medusa_*", "drop", "*medusa_num_layers"): "counts come from the tensors",
    ("medusa_*", "drop", "num_medusa_*"): "counts come from the tensors",
    ("medusa_*", "drop", "num_heads"): "counts come from the tensors",
    ("medusa_pickle", "change", "medusa_num_heads"): "3 is the right number",
    ("medusa_vllm_shared", "change", "vocab_size"): "only a bound of the token map, which the pairing checks too",
    ("mtp_mimo", "drop", "attention_bias"): "Qwen2 and MiMo always have these biases",
    ("mtp_qwen3_next*", "change", "num_hidden_layers"): "of the target, which is not in this file",
    ("mtp_qwen3_next*", "drop", "num_key_value_heads"): "Qwen3-Next's default is 2",
    ("mtp_qwen3_next_moe", "*", "linear_conv_kernel_dim"): "of the target's linear attention",
    ("mtp_qwen3_next_moe", "*", "full_attention_interval"): "of the target's layers",
    ("mtp_qwen3_next_moe", "drop", "decoder_sparse_step"): "the default is 1, and the tensors tell",
    ("mtp_qwen3_next_moe", "*", "mlp_only_layers"): "the default is none, as is the change of an empty list",
    ("mtp_*", "change", "intermediate_size"): "of the target's dense layers, where a head has experts",
    ("mtp_deepseek_v3", "drop", "num_key_value_heads"): "latent attention has as many as heads",
    ("mtp_deepseek_v3", "drop", "*_lora_rank"): "the tensors tell",
    ("mtp_deepseek_v3", "drop", "scoring_func"): "the default is DeepSeek-V3's own",
    ("mtp_deepseek_v3", "drop", "topk_method"): "the default is DeepSeek-V3's own",
    ("mtp_glm4_moe", "drop", "partial_rotary_factor"): "GLM-4.5's default is 0.5",
    ("mtp_*", "drop", "num_experts"): "the tensors tell",
    ("mtp_*", "drop", "n_*_experts"): "the tensors tell",
    ("mtp_*", "*", "first_k_dense_replace"): "only checked: the prediction layer comes after the dense ones",
    ("mtp_deepseek_chain", "drop", "*.embed_tokens.weight"): "the other prediction layers hold the same table",
    ("mtp_deepseek_chain", "drop", "*.shared_head.head.weight"): "the other prediction layers hold the same table",
    ("medusa_*", "drop", "version"): "the tensors tell: there is no lm_head",
}


def tensor_changes(tensors: Tensors) -> Iterator[tuple[str, str, Tensors]]:
    """(change, tensor, the changed tensors): drop, rename, reshape in three ways, retype in two; and add."""
    for name, tensor in tensors.items():
        rest = {other: value for other, value in tensors.items() if other != name}
        stem, _, last = name.rpartition(".")
        yield "drop", name, rest
        for new in (f"{name}_x", f"x.{name}", f"model.{name}", f"{stem}_x.{last}" if stem else "x"):
            yield f"rename to {new}", name, rest | {new: tensor}
        for change, value in (
            ("reshape to another rank", tensor[None]),
            ("reshape to fewer rows", tensor[:-1]),
            ("reshape to more rows", torch.cat([tensor, tensor[:1]])),
        ):
            yield change, name, rest | {name: value}
        if tensor.dim() == 2:
            yield "reshape to fewer columns", name, rest | {name: tensor[:, :-1]}
            if tensor.shape[0] != tensor.shape[1]:
                yield "reshape to the transpose", name, rest | {name: tensor.t()}
        types = (
            (torch.float16, torch.int32) if tensor.is_floating_point() else (torch.float32, torch.uint8, torch.int32)
        )
        for dtype in types:
            yield f"retype to {str(dtype).removeprefix('torch.')}", name, rest | {name: tensor.to(dtype)}
    some = next(iter(tensors.values()))
    for name in ("extra.weight", "extra", "layers.9.self_attn.q_proj.weight", "fc.extra", "norm.bias"):
        yield "add", name, tensors | {name: some}


def config_changes(config: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """(change, key, the changed object), nested objects included: drop, rename, change, retype; and add."""
    for key, value in config.items():
        name = path + key
        rest = {other: copy.deepcopy(item) for other, item in config.items() if other != key}
        yield "drop", name, rest
        yield "rename", name, rest | {f"{key}_x": value}
        for other in ("x", [1], 7.5, {}):
            yield f"retype to {type(other).__name__}", name, rest | {key: other}
        if isinstance(value, bool):
            yield "change", name, rest | {key: not value}
        elif isinstance(value, (int, float)):
            yield "change", name, rest | {key: value + 1}
            yield "change", name, rest | {key: 10**12}
            yield "change", name, rest | {key: -value}
        elif isinstance(value, str):
            yield "change", name, rest | {key: value + "x"}
        elif isinstance(value, list):
            yield "change", name, rest | {key: value[:-1]}
            yield "change", name, rest | {key: value[::-1] if len(value) > 1 else value + value}
            if all(type(item) is int for item in value):
                yield "change", name, rest | {key: [item + 1 for item in value]}
        elif isinstance(value, dict):
            for change, inner, changed in config_changes(value, f"{name}."):
                yield change, inner, rest | {key: changed}
    yield "add", f"{path}unknown_key", config | {"unknown_key": 1}


def changes(tiny: Tiny) -> Iterator[tuple[str, str, dict[str, Any] | None, Tensors]]:
    """(change, name, config, tensors) of every single change."""
    others = tiny.others
    for change, name, tensors in tensor_changes(tiny.tensors):
        yield change, name, tiny.config, tensors | others
    # The target's own tensors: one of each kind, its other layers are the same again.
    sample = {name: others[name] for name in others if "layers." not in name or ".layers.0." in name}
    for change, name, tensors in tensor_changes(sample) if others else ():
        rest = {name: value for name, value in others.items() if name not in sample}
        yield change, name, tiny.config, tiny.tensors | rest | tensors
    for change, name, config in config_changes(tiny.config or {}):
        yield change, name, config, tiny.tensors | others


ALL = dict(every())


def listed(dialect: str, change: str, name: str) -> bool:
    """Whether this change is known to be harmless."""
    rules = {rule for rule in HARMLESS if all(map(fnmatch, (dialect, change, name), rule))}
    USED.update(rules)
    return bool(rules)


def whole(config: dict[str, Any] | None) -> TargetConfig:
    """The target's record of a merged config."""
    return read_config(target_config(config or {}))


COUNTS: Counter[str] = Counter()
DONE: set[str] = set()
USED: set[tuple[str, str, str]] = set()


@pytest.mark.parametrize(("dialect", "tiny"), ALL.items(), ids=list(ALL))
def test_no_change_is_silent(dialect: str, tiny: Tiny, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    silent, shown = [], Counter[str]()
    for change, name, config, tensors in changes(tiny):
        files = HeadFiles("head", tmp_path, config, Memory(tensors))
        monkeypatch.setattr(detect, "open_files", lambda *_, files=files, **__: files)
        try:
            head = detect.open_head("head", target=tiny.target)
        except CheckpointError as error:
            assert "\n" not in str(error) and len(str(error)) < 600, error
            shown["refused"] += 1
            continue
        canonical = set(head.weights.names()) & set(tiny.canonical)
        assert all(torch.allclose(head.weights.read(n).float(), tiny.canonical[n], atol=4e-3) for n in canonical)
        if tiny.others and whole(config) != whole(tiny.config):
            shown["shown in the target's record"] += 1
        elif not same(head.record, tiny.record) or set(head.weights.names()) != set(tiny.canonical):
            shown["shown in the record"] += 1
        elif len(head.warnings) > tiny.warnings:
            shown["warned of"] += 1
        elif listed(dialect, change, name):
            shown["harmless, listed"] += 1
        else:
            silent.append((change, name, config and config.get(name)))
    COUNTS.update(shown)
    DONE.add(dialect)
    assert shown["refused"] > len(tiny.tensors) * 5
    assert not silent, "\n".join(map(str, silent))


def test_counts(record_property: pytest.RecordProperty, capsys: pytest.CaptureFixture[str]) -> None:
    """Print what the changes above came to. Runs last, as it stands last; alone it has nothing to count."""
    with capsys.disabled():
        kinds = ", ".join(f"{count} {kind}" for kind, count in COUNTS.most_common())
        print(f"\n{sum(COUNTS.values())} single changes of {len(ALL)} tiny heads: {kinds}")
    if set(ALL) == DONE:
        assert not (idle := HARMLESS.keys() - USED), f"listed for nothing: {idle}"
    for kind, count in COUNTS.items():
        record_property(kind, count)
