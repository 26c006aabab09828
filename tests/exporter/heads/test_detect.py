"""Every dialect: the record and the tensors that reading it gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from specexport.exporter.checkpoint import open_checkpoint
from specexport.exporter.config import TargetConfig, read_config
from specexport.exporter.heads import detect
from specexport.exporter.heads.base import Head
from specexport.exporter.heads.detect import open_head
from specexport.exporter.heads.files import HeadFiles
from specexport.exporter.heads.merged import check_target, target_view
from specexport.exporter.heads.record import HeadLineage, RecurrentRecord
from specexport.runtime.errors import CheckpointError, UsageError
from tests.exporter.heads.writers import TARGET, VD, H, Memory, N, Tiny, V, every, same
from tests.tiny import write_checkpoint

ALL = dict(every())


@pytest.mark.parametrize("name", ALL)
def test_every_dialect(name: str, tmp_path: Path) -> None:
    tiny: Tiny = ALL[name]
    head = open_head(str(tiny.write(tmp_path)), target=tiny.target)
    assert same(head.record, tiny.record), f"{head.record}\n{tiny.record}"
    assert set(head.weights.names()) == set(tiny.canonical)
    for canonical, tensor in tiny.canonical.items():
        assert head.weights.shape(canonical) == tuple(tensor.shape)
        assert torch.equal(head.weights.read(canonical), tensor), canonical
    assert len(head.warnings) == tiny.warnings
    assert head.fingerprint().startswith("sha256:") and head.fingerprint(fast=True) != head.fingerprint()
    with pytest.raises(CheckpointError, match="no tensor nothing"):
        head.weights.read("nothing")


def memory_head(
    monkeypatch: pytest.MonkeyPatch,
    config: dict[str, Any] | None,
    tensors: Mapping[str, torch.Tensor],
    target: TargetConfig | None = None,
) -> Head:
    files = HeadFiles("head", Path("head"), config, Memory(tensors))
    monkeypatch.setattr(detect, "open_files", lambda *_, **__: files)
    return open_head("head", target=target)


def refused(monkeypatch: pytest.MonkeyPatch, tiny: Tiny, *words: str, target: TargetConfig | None = None) -> None:
    """The head is refused and the message holds all ``words``."""
    with pytest.raises(CheckpointError) as caught:
        memory_head(monkeypatch, tiny.config, tiny.tensors | tiny.others, target or tiny.target)
    for word in words:
        assert word in str(caught.value), caught.value


def changed(name: str, config: Mapping[str, Any] | None = None, **tensors: torch.Tensor | None) -> Tiny:
    """A dialect with other keys and tensors; a None takes one out. ``__`` in a tensor's name stands for a dot."""
    tiny = ALL[name]
    keys = {key: value for key, value in ((tiny.config or {}) | dict(config or {})).items() if value is not None}
    renamed = {key.replace("__", "."): value for key, value in tensors.items()}
    kept = {key: value for key, value in (tiny.tensors | renamed).items() if value is not None}
    return replace(tiny, config=keys, tensors=kept)


def test_absolute_d2t(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue item: a map of absolute ids is told from one of offsets by t2d."""
    absolute = ALL["eagle3"].tensors["d2t"] + torch.arange(VD)
    refused(monkeypatch, changed("eagle3", d2t=absolute), "'d2t'", "offsets", "absolute")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d2t, t2d: (d2t.roll(1), t2d), ("contradict",)),
        (lambda d2t, t2d: (d2t, t2d.roll(1)), ("contradict",)),
        (lambda d2t, t2d: (d2t, ~t2d), ("contradict",)),
        (lambda d2t, t2d: (d2t, None), ("'t2d' is missing",)),
        (lambda d2t, t2d: (None, None), ("two readings", "the first 20 ids")),
        (lambda d2t, t2d: (d2t - 50, t2d), ("contradict", "-")),
    ],
)
def test_maps_that_contradict(change: Any, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = ALL["eagle3"].tensors
    d2t, t2d = change(tensors["d2t"], tensors["t2d"])
    refused(monkeypatch, changed("eagle3", d2t=d2t, t2d=t2d), *words)


def test_renamed_extra_and_misfit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue items: a renamed key, an extra tensor, a wrong width, an embedding that the target's would replace."""
    up = ALL["eagle3"].tensors["midlayer.mlp.up_proj.weight"]
    renamed = changed("eagle3", midlayer__mlp__up_proj__weight=None, midlayer__mlp__upper_proj__weight=up)
    refused(monkeypatch, renamed, "'layers.0.mlp.up_proj.weight' is missing")
    refused(monkeypatch, changed("eagle3", fc__bias2=torch.zeros(H)), "'fc.bias2'", "not understood")
    wide = replace(TARGET, hidden_size=2 * H)
    refused(monkeypatch, ALL["eagle3"], "'fc.weight' has 48 columns", "make 96", target=wide)
    refused(monkeypatch, changed("eagle3_wide", embed_tokens__weight=None), "'embed_tokens.weight'", "does not fit")


@pytest.mark.parametrize(
    ("config", "target", "expected"),
    [
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}}, None, (2, 4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, TARGET, (2, 4, 5)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 6, 8]}}, TARGET, (4, 6, 8)),
        ({"eagle_aux_hidden_state_layer_ids": [3, 5, 6]}, None, (3, 5, 6)),
        ({"target_layer_ids": [2, 4, 5]}, None, (3, 5, 6)),
        ({"num_target_layers": 8}, None, (2, 4, 5)),
        ({"specexport": {"captures": [0, 1, 2]}}, None, (0, 1, 2)),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 6]}, "specexport": {"captures": [3, 4, 7]}},
            None,
            (3, 4, 7),
        ),
    ],
)
def test_both_capture_conventions_resolve_to_boundaries(
    config: dict[str, Any], target: TargetConfig | None, expected: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = changed("eagle3", config)
    assert memory_head(monkeypatch, tiny.config, tiny.tensors, target).record.captures == expected


@pytest.mark.parametrize(
    ("config", "target", "words"),
    [
        ({}, None, ("two readings", "(2, n // 2, n - 3)", "--target")),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 6]}}, TARGET, ("[2, 3, 6]", "[3, 4, 7]")),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}}, None, ("[2, 4, 5]", "[3, 5, 6]")),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 9]}, TARGET, ("0 to 8",)),
        ({"eagle_aux_hidden_state_layer_ids": [4, 2, 5]}, TARGET, ("must ascend",)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "target_layer_ids": [2, 4, 5]}, TARGET, ("two readings",)),
        ({"num_target_layers": 9}, TARGET, ("num_target_layers is 9",)),
        ({}, replace(TARGET, layers=TARGET.layers[:4]), ("must ascend",)),
    ],
)
def test_captures_that_cannot_be_told(
    config: dict[str, Any], target: TargetConfig | None, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = replace(changed("eagle3", config), target=None)
    refused(monkeypatch, tiny, *words, target=target)


def test_readings_of_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = changed("eagle3_speculators", {"norm_before_residual": None})
    refused(monkeypatch, tiny, "norm_before_residual", "speculators' own default", "vLLM")
    norm = torch.zeros(H)
    refused(monkeypatch, changed("eagle3", input_norm__weight=norm), "'input_norm.weight'", "norm_before_fc is false")
    three = {f"fc_norm__{i}__weight": norm for i in range(3)}
    refused(monkeypatch, changed("eagle3", {"fc_norm": True, "norm_output": True}, **three), "SpecForge", "EAGLE-3.1")
    settled = changed("eagle3", {"fc_norm": True, "norm_output": True, "specexport": {"feedback": "normed"}}, **three)
    record = memory_head(monkeypatch, settled.config, settled.tensors, TARGET).record
    assert isinstance(record, RecurrentRecord) and record.feedback == "normed" and record.reduce_norm == "each"
    refused(monkeypatch, changed("eagle3", {"norm_output": False}), "norm_output", "SpecForge")
    bare = changed("eagle3", {"norm_output": False}, norm__weight=None)
    record = memory_head(monkeypatch, bare.config, bare.tensors, TARGET).record
    assert isinstance(record, RecurrentRecord) and not record.final_norm
    refused(monkeypatch, changed("eagle1", hidden_layernorm__weight=norm), "hidden_layernorm", "two readings")
    placeholder = changed("eagle1_vllm", **{"model__layers__0__input_layernorm__weight": norm})
    refused(monkeypatch, placeholder, "skip_prenorm", "placeholder")


def test_both_readings_are_within_reach(tmp_path: Path) -> None:
    """What a head leaves open is settled behind its source, without touching its files; the config may not disagree."""
    three = {f"fc_norm__{i}__weight": torch.zeros(H) for i in range(3)}
    both = str(changed("eagle3", {"fc_norm": True, "norm_output": True}, **three).write(tmp_path / "both"))
    with pytest.raises(CheckpointError, match=r"HEADS\?feedback=raw .*HEADS\?feedback=normed"):
        open_head(both, target=TARGET)
    for feedback in ("raw", "normed"):
        record = open_head(f"{both}?feedback={feedback}", target=TARGET).record
        assert isinstance(record, RecurrentRecord) and record.feedback == feedback and record.final_norm
    bare = str(changed("eagle3", {"norm_output": False}).write(tmp_path / "bare"))
    with pytest.raises(CheckpointError, match=r"HEADS\?final_norm=false .*HEADS\?feedback=raw"):
        open_head(bare, target=TARGET)
    for settled, normed in (("final_norm=false", False), ("feedback=raw&captures=1,2,3", True)):
        record = open_head(f"{bare}?{settled}", target=TARGET).record
        assert isinstance(record, RecurrentRecord) and record.final_norm == normed and record.feedback == "raw"
        assert record.captures == ((1, 2, 3) if "captures" in settled else (2, 4, 5))
    silent = str(changed("eagle3_speculators", {"norm_before_residual": None}).write(tmp_path / "silent"))
    record = open_head(f"{silent}?norm_before_residual=true").record
    assert isinstance(record, RecurrentRecord) and record.norm_before_residual
    said = str(ALL["eagle3_speculators"].write(tmp_path / "said"))
    for wrong in ("norm_before_residual=false", "feedback=raw", "final_norm=false", "mood=good"):
        with pytest.raises(CheckpointError, match=wrong.split("=")[0]):
            open_head(f"{said}?{wrong}")
    with pytest.raises(CheckpointError, match="specexport"):
        open_head(f"{ALL['eagle1'].write(tmp_path / 'one')}?feedback=raw")
    with pytest.raises(UsageError, match="not one key=value"):
        open_head(f"{said}?feedback")


def test_embeddings_are_not_scaled(tmp_path: Path) -> None:
    """A Gemma target multiplies its embeddings, its heads do not: they were trained on a plain copy of the table."""
    gemma = replace(TARGET, architecture="gemma3", embedding_scale=H**0.5)
    head = open_head(str(ALL["eagle3"].write(tmp_path)), target=gemma)
    assert isinstance(head.record, RecurrentRecord)
    assert head.record.embedding == "target" and head.record.embedding_scale == 1.0


def test_layouts_by_tensors_not_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """EAGLE-1 tensors in an "eagle3" repository are an EAGLE-1 head; its keys, though, would contradict."""
    tiny = changed("eagle1", {"architectures": ["LlamaForCausalLMEagle3"]})
    assert memory_head(monkeypatch, tiny.config, tiny.tensors).record.method == "eagle1"
    refused(monkeypatch, changed("eagle1", {"draft_vocab_size": VD}), "draft_vocab_size")
    refused(monkeypatch, changed("medusa_safetensors", {"version": "2"}), "version", "'0.1.weight'")
    refused(monkeypatch, replace(ALL["medusa_legacy"], target=None), "--target")


@pytest.mark.parametrize(
    ("dialect", "tensor", "words"),
    [
        ("eagle1", "layers.0.mlp.gate.weight", "a mixture of experts is not built for a model_type of llama"),
        ("mtp_qwen3_next", "mtp.layers.0.linear_attn.conv1d.weight", "linear attention"),
    ],
)
def test_blocks_that_are_not_built(dialect: str, tensor: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = ALL[dialect]
    refused(
        monkeypatch,
        replace(tiny, tensors=tiny.tensors | {tensor: torch.zeros(H, H)}),
        words,
        tensor.split("layers.")[1],
    )


def test_gated_queries_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    query = ALL["mtp_deepseek"].tensors["model.layers.8.self_attn.q_proj.weight"]
    tiny = changed("mtp_deepseek", model__layers__8__self_attn__q_proj__weight=torch.cat([query, query]))
    refused(monkeypatch, tiny, "gate (a model_type of qwen3_next")


def test_prediction_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chain is counted in the file, and its layers share their tables."""
    refused(monkeypatch, changed("mtp_deepseek_chain", {"num_nextn_predict_layers": 2}), "is 2", "holds 3")
    table = ALL["mtp_deepseek_chain"].tensors["model.layers.9.embed_tokens.weight"]
    other = changed("mtp_deepseek_chain", model__layers__9__embed_tokens__weight=table + 1)
    refused(monkeypatch, other, "'model.layers.9.embed_tokens.weight'", "'model.layers.8.embed_tokens.weight'")
    gap = changed("mtp_deepseek_chain", model__layers__9__eh_proj__weight=None)
    refused(monkeypatch, gap, "num_nextn_predict_layers is 3", "holds 1")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"], "ordinary language model"),
        (["fc.weight", "hidden_norm.weight", "layers.0.mlp.up_proj.weight"], "DFlash"),
        (["mask_hidden", "fc.weight"], "P-EAGLE"),
        (["something.weight"], "no known head among 1 tensors"),
    ],
)
def test_what_is_not_a_head_is_named(names: list[str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=words):
        memory_head(monkeypatch, {}, {name: torch.zeros(2, 2) for name in names})


def test_merged_checkpoints_have_two_readers(tmp_path: Path) -> None:
    """Both readers together take every tensor: neither has one of the other's."""
    for name in ("medusa_2", "mtp_mimo", "mtp_deepseek_merged"):
        tiny = ALL[name]
        checkpoint = open_checkpoint(str(tiny.write(tmp_path / name)))
        with pytest.raises(CheckpointError):
            read_config(checkpoint.config)
        view = target_view(checkpoint)
        assert set(view.weights.names()) == set(tiny.others)
        config = check_target(view)
        assert config.hidden_size == H and config.num_layers == N
        assert config.architecture == ("qwen2" if name == "mtp_mimo" else "llama")
        assert view.fingerprint() != checkpoint.fingerprint()
        head = open_head(str(tmp_path / name))
        taken = {head.weights.origin(canonical) for canonical in head.weights.names()}
        assert taken == set(tiny.tensors) == set(checkpoint.weights.names()) - set(view.weights.names())
    plain = open_checkpoint(str(write_checkpoint(tmp_path / "plain", {}, {"a": torch.zeros(1)})))
    assert target_view(plain) is plain


def test_files(tmp_path: Path) -> None:
    tiny = ALL["medusa_pickle"]
    lone = tmp_path / "lone"
    tiny.write(lone)
    assert same(open_head(str(lone / "medusa_lm_head.pt")).record, tiny.record)
    (lone / "config.json").unlink()
    assert open_head(str(lone)).record.lineage == HeadLineage()
    save_file({"a": torch.zeros(1)}, lone / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"both medusa_lm_head\.pt and model\.safetensors"):
        open_head(str(lone))
    bare = ALL["eagle1"].write(tmp_path / "bare")
    (bare / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        open_head(str(bare))
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no weights"):
        open_head(str(tmp_path / "empty"))
    (tmp_path / "head.onnx").write_text("")
    with pytest.raises(CheckpointError, match="expected a directory"):
        open_head(str(tmp_path / "head.onnx"))
    with pytest.raises(CheckpointError, match="not a hub id"):
        open_head("a/b/c")
    with pytest.raises(CheckpointError, match="not in the local hub cache"):
        open_head("org/nothing-here", offline=True)
    shards = write_checkpoint(
        tmp_path / "shards", ALL["eagle3_deepspec"].config or {}, ALL["eagle3_deepspec"].tensors, 3
    )
    assert same(open_head(str(shards)).record, ALL["eagle3_deepspec"].record)


def test_a_pickle_that_runs_code_is_refused(tmp_path: Path) -> None:
    class Attack:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "marker",)

    torch.save({"0.0.linear.weight": Attack()}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="not a safe PyTorch archive"):
        open_head(str(tmp_path))
    assert not (tmp_path / "marker").exists()


def test_medusa_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository with nothing but Medusa's own file is fetched by that name."""
    tiny = ALL["medusa_pickle"]
    asked: list[str] = []

    def download(repository: str, *, allow_patterns: list[str], **options: Any) -> str:
        asked.extend(allow_patterns)
        if "medusa_lm_head.*" in allow_patterns:
            tiny.write(tmp_path)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert same(open_head("org/medusa").record, tiny.record)
    assert "model*.safetensors" in asked


def test_biases_of_a_qwen2_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """EAGLE's own ``qkv_bias``: q, k and v have biases, o has none."""
    rows = {"q": 24, "k": 12, "v": 12}
    biases = {f"layers__0__self_attn__{name}_proj__bias": torch.zeros(count) for name, count in rows.items()}
    tiny = changed("eagle1_llama3", {"model_type": "qwen2", "qkv_bias": True}, **biases)
    record = memory_head(monkeypatch, tiny.config, tiny.tensors).record
    assert isinstance(record, RecurrentRecord)
    assert record.blocks.attention_bias and not record.blocks.output_bias
    refused(monkeypatch, changed("eagle1_llama3", {"qkv_bias": True}), "qkv_bias is true", "missing from the file")


def test_tied_head_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = changed("eagle3_deepspec", {"tie_word_embeddings": True}, embed_tokens__weight=torch.zeros(V, H))
    refused(monkeypatch, tiny, "tie_word_embeddings", "'lm_head.weight'", "'embed_tokens.weight'")
