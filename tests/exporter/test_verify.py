"""``verify`` on a small bundle: it passes, and each kind of damage makes it fail."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from specexport.exporter import cli, verify
from specexport.exporter.progress import Progress
from specexport.runtime import acceptance
from specexport.runtime.bundle import Bundle, sha256
from specexport.runtime.drafters import DRAFTERS
from specexport.runtime.manifest import MANIFEST_NAME
from specexport.runtime.rules import DEFAULT_RULE, RULES
from tests.tiny import LLAMA, llama_tensors, write_gguf, write_llama

LOGITS = {"logits_teacher_forced", "cache_equals_fresh_prefill"}
LABELS = ("greedy", "sampled_temperature_0.8_top_p_0.9", "sampled_temperature_1")
TOKENS = {f"{label}_tokens_{name}" for label in LABELS for name in DRAFTERS}
TRANSFORMERS = {"transformers_logits", "transformers_greedy_tokens"}


@pytest.fixture
def copy(tiny_bundle: Bundle, tmp_path: Path) -> Path:
    """A bundle that may be damaged."""
    return Path(shutil.copytree(tiny_bundle.path, tmp_path / "copy"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts of fewer tokens."""
    monkeypatch.setattr(verify, "PROMPTS", verify.PROMPTS[1:3])
    short = {name: replace(params, max_tokens=24) for name, params in verify.SETTINGS.items()}
    monkeypatch.setattr(verify, "SETTINGS", short)


def damage(bundle: Path, change: Callable[[onnx.ModelProto], None], name: str = "target.cpu.onnx") -> None:
    """Change a graph and enter its new hash into the manifest, as someone who means harm would."""
    model = onnx.load(bundle / name, load_external_data=False)
    change(model)
    onnx.save(model, bundle / name)
    adopt(bundle, name)


def adopt(bundle: Path, name: str) -> None:
    manifest = json.loads((bundle / MANIFEST_NAME).read_text())
    manifest["files"][name] = {"bytes": (bundle / name).stat().st_size, "sha256": sha256(bundle / name)}
    (bundle / MANIFEST_NAME).write_text(json.dumps(manifest))


def run(bundle: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any], set[str]]:
    """Exit code, the report, and the names of what failed."""
    code = cli.main(["verify", str(bundle), "--json", "--threads", "1", *options])
    shown = json.loads(capsys.readouterr().out)
    # A bundle travels: its report names no place on this machine.
    report = json.loads((bundle / "report.json").read_text())
    assert report == {name: value for name, value in shown.items() if name != "bundle"}
    return code, shown, {check["name"] for check in shown["checks"] if not check["passed"]}


def test_a_sound_bundle_passes_and_says_by_how_much(
    copy: Path, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report, failed = run(copy, capsys, "--checkpoint", str(tiny_checkpoint))
    assert (code, report["passed"], failed) == (0, True, set())
    assert report["bundle"] == str(copy) and report["engine"] == "onnxruntime-cpu"
    assert all(set(check) == {"name", "passed", "figure", "limit", "note"} for check in report["checks"])
    figures = {check["name"]: check["figure"] for check in report["checks"]}
    assert figures.keys() == {"files", *LOGITS, *TOKENS, *TRANSFORMERS}
    # Two implementations never agree to the bit; a zero would mean that something was compared with itself.
    assert all(0 < figures[name] < 1e-5 for name in ("logits_teacher_forced", "transformers_logits"))
    assert cli.main(["inspect", str(copy), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["derived"]["verified"] is True
    assert cli.main(["verify", str(copy)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "passed"


def scale(model: onnx.ModelProto) -> None:
    node = next(node for node in model.graph.node if node.op_type == "GroupQueryAttention")
    next(attribute for attribute in node.attribute if attribute.name == "scale").f *= 1.05


def no_mask(model: onnx.ModelProto) -> None:
    """Every node sees every other one."""
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            node.input[10] = ""


def other_sign(model: onnx.ModelProto) -> None:
    """Rotate the wrong way."""
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            node.input[7], node.input[8] = node.input[8], node.input[7]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("change", [scale, no_mask, other_sign])
def test_a_wrong_lowering_fails(
    change: Callable[[onnx.ModelProto], None], copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(copy, change)
    code, report, failed = run(copy, capsys)
    assert (code, report["passed"]) == (1, False)
    assert "logits_teacher_forced" in failed
    note = next(check["note"] for check in report["checks"] if check["name"] == "logits_teacher_forced")
    assert "node" in note
    assert cli.main(["inspect", str(copy), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["derived"]["verified"] is False


@pytest.mark.usefixtures("quick")
def test_a_wrong_commit_fails(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def swap(model: onnx.ModelProto) -> None:
        """The first cache is refilled from the second."""
        first, second = (node for node in model.graph.node[:4] if node.op_type == "Gather")
        first.input[0] = second.input[0]

    damage(copy, swap, "commit.cpu.onnx")
    code, _, failed = run(copy, capsys)
    assert code == 1 and failed >= LOGITS


@pytest.mark.usefixtures("quick")
def test_not_a_number_is_a_failure_and_still_json(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def poison(model: onnx.ModelProto) -> None:
        node = next(node for node in model.graph.node if node.op_type == "RMSNormalization")
        next(attribute for attribute in node.attribute if attribute.name == "epsilon").f = float("nan")

    damage(copy, poison)
    code, report, failed = run(copy, capsys)
    assert code == 1 and failed == {*LOGITS, "generation"}
    assert next(check for check in report["checks"] if check["name"] == "logits_teacher_forced")["figure"] is None


def test_damaged_files_are_reported_and_not_run(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray((copy / "target.onnx.data").read_bytes())
    data[100] ^= 1
    (copy / "target.onnx.data").write_bytes(data)
    code, report, _ = run(copy, capsys)
    assert code == 1
    assert [check["name"] for check in report["checks"]] == ["files"]
    assert "target.onnx.data has sha256" in report["checks"][0]["note"]


@pytest.mark.usefixtures("quick")
def test_wrong_acceptance_fails_for_every_drafter(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An acceptance that takes the first child whatever the target says: lossy, though it looks fast."""

    def gullible(tree: Any, logits: Any, sampler: Any, past: int, *, limit: int, stop: Any) -> Any:
        accepted = acceptance.match(tree, logits, sampler, past, limit=limit, stop=stop)
        if len(tree) > 1 and len(accepted.path) == 1 and limit > 1:
            emitted = [int(tree.tokens[1]), *accepted.tokens]
            return replace(accepted, tokens=emitted, path=[0, 1], logprobs=None)
        return accepted

    monkeypatch.setitem(RULES, DEFAULT_RULE, replace(RULES[DEFAULT_RULE], accept=gullible))
    code, report, failed = run(copy, capsys)
    assert code == 1
    assert {f"greedy_tokens_{name}" for name in DRAFTERS} <= failed and not failed & LOGITS
    for check in report["checks"]:
        if check["name"].startswith("greedy"):
            assert check["figure"] >= 1 and check["note"].startswith("prompt ")


@pytest.mark.usefixtures("quick")
def test_another_checkpoint_fails(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_llama(tmp_path / "other", rms_norm_eps=1e-3)
    code, _, failed = run(copy, capsys, "--checkpoint", str(other))
    assert code == 1 and failed == TRANSFORMERS


def test_gguf_as_the_checkpoint(tmp_path: Path) -> None:
    """Read without ``accelerate``: the model that our reader fills equals the one Transformers loads itself."""
    import torch

    config = LLAMA | {"tie_word_embeddings": True}
    tensors = llama_tensors(config)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
    names |= {"self_attn.o_proj": "attn_output", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {"mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}
    stored: dict[str, np.ndarray[Any, Any]] = {}
    for name, tensor in tensors.items():
        array = tensor.numpy()
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        for part, count in heads.items():
            if part in name:  # llama.cpp interleaves the halves of each head
                array = array.reshape(count, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        theirs = name.replace("model.embed_tokens", "token_embd").replace("model.norm", "output_norm")
        theirs = theirs.replace("model.layers.", "blk.")
        for long, short in names.items():
            theirs = theirs.replace(long, short)
        stored[theirs] = np.ascontiguousarray(array)
    metadata = {
        ".block_count": config["num_hidden_layers"],
        ".context_length": config["max_position_embeddings"],
        ".embedding_length": config["hidden_size"],
        ".feed_forward_length": config["intermediate_size"],
        ".attention.head_count": config["num_attention_heads"],
        ".attention.head_count_kv": config["num_key_value_heads"],
        ".attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        ".rope.freq_base": 10000.0,
        ".vocab_size": config["vocab_size"],
    }
    path = write_gguf(tmp_path / "model.gguf", "llama", metadata, stored)
    directory = write_llama(tmp_path / "model")
    prompt = torch.tensor([[5, 80, 17, 200, 33]])
    with torch.no_grad():
        theirs_logits, ours = (verify.load_transformers(source)(prompt).logits for source in (directory, path))
    assert torch.equal(theirs_logits, ours)


@pytest.mark.parametrize(
    ("options", "content", "message"),
    [
        (["--prompts"], b"\n \n", "has no prompts"),
        (["--prompts"], b"\xff\n", "is not UTF-8 (byte 0)"),
        (["--engine", "abacus"], None, "unknown engine 'abacus'"),
        (["--checkpoint"], b"{}", "expected a directory, a .gguf file"),
    ],
)
def test_bad_options_are_one_line(
    options: list[str],
    content: bytes | None,
    message: str,
    copy: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if content is not None:
        (tmp_path / "file.txt").write_bytes(content)
        options = [*options, str(tmp_path / "file.txt")]
    assert cli.main(["verify", str(copy), *options]) in (1, 2)
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("specexport: error: ") and message in error
    assert not (copy / "report.json").exists()


@pytest.mark.usefixtures("quick")
def test_prompts_from_a_file_longer_than_the_window(
    copy: Path, tmp_path: Path, tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last slots included: prompt and output fill the cache to the end."""
    (tmp_path / "prompts.txt").write_text("a long line " * 50 + "\nx\n")
    code, _, failed = run(
        copy, capsys, "--prompts", str(tmp_path / "prompts.txt"), "--checkpoint", str(tiny_checkpoint)
    )
    assert (code, failed) == (0, set())


@pytest.mark.slow
@pytest.mark.e2e
def test_smollm2(smollm2_bundle: Bundle, smollm2_gguf: Path, tmp_path: Path) -> None:
    """The real model against Transformers; a copy (of links, where it can be) keeps the report out of the cache."""

    def link(source: str, destination: str) -> None:
        try:
            os.link(source, destination)
        except OSError:  # another file system
            shutil.copyfile(source, destination)

    copy = tmp_path / "bundle"
    shutil.copytree(smollm2_bundle.path, copy, copy_function=link)
    report = verify.verify(copy, checkpoint=smollm2_gguf, progress=Progress(quiet=True))
    assert report.passed, [check for check in report.checks if not check.passed]
    assert {check.name for check in report.checks} == {"files", *LOGITS, *TOKENS, *TRANSFORMERS}
