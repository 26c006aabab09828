"""``build`` end to end, through the command line: what comes out, what is refused, and what is left behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto
from safetensors.torch import load_file

from specexport.engines.ort import CPU_COMMIT_FILE, CPU_TARGET_FILE, TARGET_FILE, OrtEngine
from specexport.exporter import cli, pipeline
from specexport.exporter.config import read_config
from specexport.exporter.parity import Deviation
from specexport.exporter.verify import load_transformers
from specexport.runtime.bundle import Bundle
from specexport.runtime.drafters import DRAFTERS
from specexport.runtime.engine import Step
from specexport.runtime.errors import UsageError
from specexport.runtime.sampling import SamplingParams
from specexport.runtime.session import Session
from tests.exporter.building import build, failure
from tests.tiny import LLAMA, VOCAB, write_llama

GRAPHS = (TARGET_FILE, CPU_TARGET_FILE, CPU_COMMIT_FILE)
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 40)

pytestmark = pytest.mark.usefixtures("traced_once")


def forward(engine: OrtEngine, tokens: np.ndarray = TOKENS) -> np.ndarray:
    """Logits of every token, in one call."""
    return engine.run(Step.chain(tokens)).copy()


def transformers_logits(source: Path) -> np.ndarray:
    with torch.no_grad():
        logits: np.ndarray = load_transformers(source)(torch.from_numpy(TOKENS)[None]).logits[0].numpy()
    return logits


def test_build_in_a_new_process(
    tiny_checkpoint: Path, tmp_path: Path, run_python: Callable[..., Any], tiny_bundle: Bundle
) -> None:
    """From a sharded directory; the same checkpoint makes the same bundle, byte for byte, wherever it lies."""
    output = tmp_path / "out" / "bundle"
    done = run_python(
        *(
            "-m",
            "specexport.exporter.cli",
            "build",
            str(tiny_checkpoint),
            "-o",
            str(output),
            "--window",
            "128",
            "--json",
        )
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert set(result) == {"bundle", "stages", "peak_rss_bytes"} and result["bundle"] == str(output)
    assert {"read checkpoint", "trace graph", "write weights", "lower for CPU"} <= set(result["stages"])
    assert all(seconds >= 0 for seconds in result["stages"].values()) and result["peak_rss_bytes"] > 1 << 20
    assert "\x1b" not in done.stderr and "\r" not in done.stderr  # bars only on a terminal
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == list(result["stages"])
    bundle = Bundle.load(output, check="full")
    assert bundle.manifest.files == tiny_bundle.manifest.files
    assert bundle.manifest.command[:3] == ("specexport", "build", str(tiny_checkpoint))
    assert sorted(os.listdir(output.parent)) == ["bundle"]


def test_the_manifest_says_what_was_built(tiny_bundle: Bundle, tiny_checkpoint: Path) -> None:
    manifest = tiny_bundle.manifest
    target = manifest.target
    assert (target.architecture, target.precision.weights) == ("llama", "fp32")
    assert (target.slots, target.features_size) == (128, 0)
    assert (target.layers, target.kv_heads, target.head_dim, target.hidden_size) == (2, 2, 16, 64)
    assert (target.vocab_size, target.valid_vocab) == (LLAMA["vocab_size"], VOCAB)
    assert target.windows == (None, None) and target.prefill_chunk == min(pipeline.DEFAULT_CHUNK, 128)
    assert manifest.drafter == pipeline.DEFAULT_DRAFTER and {d.name for d in manifest.drafters} == set(DRAFTERS)
    assert manifest.stop_ids == (1,) and manifest.engine == "onnxruntime-cpu"
    assert manifest.lineage.source == str(tiny_checkpoint) and manifest.lineage.fingerprint.startswith("sha256:")
    assert {"specexport", "torch", "onnxruntime"} <= set(manifest.tools)
    assert set(manifest.files) >= {*GRAPHS, "target.onnx.data", "tokenizer.json", "generation_config.json"}


def test_the_bundle_answers_as_the_model(tiny_bundle: Bundle, tiny_checkpoint: Path) -> None:
    expected = transformers_logits(tiny_checkpoint)
    for lowered in (True, False):
        worst = Deviation()
        worst.note(forward(OrtEngine(tiny_bundle.path, threads=1, lowered=lowered)), expected, "")
        assert worst.relative < 1e-5


def test_padding_rows_are_never_sampled(tiny_bundle: Bundle) -> None:
    """The test model's padding rows win almost everywhere, so the mask has something to do."""
    best = forward(OrtEngine(tiny_bundle.path, threads=1)).argmax(-1)
    assert (best >= VOCAB).mean() > 0.5
    for drafter in ("none", *DRAFTERS):
        session = Session(tiny_bundle, drafter=drafter, threads=1)
        for params in (SamplingParams(max_tokens=60), SamplingParams(max_tokens=60, temperature=2.0, logprobs=5)):
            result = session.generate("the quick", params)
            assert len(result.token_ids) > 0 and max(result.token_ids) < VOCAB
            for _, top in result.logprobs or []:
                assert all(token < VOCAB for token, _ in top)


def test_drafts_of_the_test_model_are_accepted(tiny_bundle: Bundle) -> None:
    """What the other tests lean on: its output repeats, so speculation is really exercised."""
    for drafter in DRAFTERS:
        result = Session(tiny_bundle, drafter=drafter, threads=1).generate("lazy", SamplingParams(max_tokens=100))
        assert result.statistics.tau > 1.2, drafter


def test_half_precision(tiny_checkpoint: Path, tiny_bundle: Bundle, tmp_path: Path) -> None:
    assert build(tiny_checkpoint, tmp_path / "b", "--precision", "fp16", "--activations", "fp16") == 0
    bundle = Bundle.load(tmp_path / "b", check="full")
    assert bundle.manifest.target.precision.activations == "fp16"
    for name in GRAPHS:
        onnx.checker.check_model(os.fspath(bundle.path / name))
        model = onnx.load(bundle.path / name, load_external_data=False)
        caches = [v for v in [*model.graph.input, *model.graph.output] if v.name.startswith(("past_", "present_"))]
        caches = [v for v in caches if v.name != "past"]
        assert len(caches) == 8
        assert {v.type.tensor_type.elem_type for v in caches} == {TensorProto.FLOAT16}
    full = forward(OrtEngine(tiny_bundle.path, threads=1))
    for lowered in (True, False):
        engine = OrtEngine(bundle.path, threads=1, lowered=lowered)
        worst = Deviation()
        logits = forward(engine)
        worst.note(logits, full, "")
        assert logits.dtype == np.float32 and 0 < worst.relative < 2e-2
        assert {cache.dtype for cache in engine.read_cache(4)} == {np.dtype(np.float16)}
    halves = (bundle.path / "target.onnx.data").stat().st_size
    assert halves < 0.6 * (tiny_bundle.path / "target.onnx.data").stat().st_size
    texts = {
        name: Session(bundle, drafter=name, threads=1).generate("a + b", SamplingParams(max_tokens=40)).token_ids
        for name in ("none", *DRAFTERS)
    }
    assert all(tokens == texts["none"] for tokens in texts.values())


def test_bfloat16_builds_and_the_cpu_says_that_it_cannot_run_it(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(tiny_checkpoint, tmp_path / "b", "--precision", "bf16", "--activations", "bf16") == 0
    for name in GRAPHS:
        onnx.checker.check_model(os.fspath(tmp_path / "b" / name))
    model = onnx.load(tmp_path / "b" / TARGET_FILE)  # with its data
    (embedding,) = (tensor for tensor in model.graph.initializer if tensor.name == "embedding")
    stored = torch.tensor(onnx.numpy_helper.to_array(embedding).view(np.int16)).view(torch.bfloat16)
    shard = next(
        path for path in tiny_checkpoint.glob("*.safetensors") if "model.embed_tokens.weight" in load_file(path)
    )
    assert torch.equal(stored, load_file(shard)["model.embed_tokens.weight"].bfloat16())
    capsys.readouterr()
    assert cli.main(["run", str(tmp_path / "b"), "hello"]) == 1
    message = failure(capsys)
    assert "onnxruntime" in message and "cannot load it" in message


def test_features_are_those_of_transformers(tiny_checkpoint: Path, tmp_path: Path) -> None:
    assert build(tiny_checkpoint, tmp_path / "b", "--features", "0,1,final") == 0
    bundle = Bundle.load(tmp_path / "b")
    assert bundle.manifest.target.features_size == 3 * LLAMA["hidden_size"]
    with torch.no_grad():
        states = load_transformers(tiny_checkpoint)(
            torch.from_numpy(TOKENS)[None], output_hidden_states=True
        ).hidden_states
    expected = torch.cat([states[0], states[1], states[2]], -1)[0].numpy()
    for lowered in (True, False):
        engine = OrtEngine(bundle.path, threads=1, lowered=lowered)
        assert engine.features_size == 3 * LLAMA["hidden_size"]
        forward(engine)
        worst = Deviation()
        worst.note(engine.features(), expected, "")
        assert worst.relative < 1e-5
    assert Session(bundle, threads=1).generate("x", SamplingParams(max_tokens=5)).token_ids


def test_untied_embeddings_and_an_old_pickle(tmp_path: Path) -> None:
    source = write_llama(tmp_path / "source", tie_word_embeddings=False, attention_bias=False)
    expected = transformers_logits(source)
    torch.save(load_file(source / "model.safetensors"), source / "pytorch_model.bin")
    (source / "model.safetensors").unlink()
    assert build(source, tmp_path / "b", "--drafter", "none") == 0
    bundle = Bundle.load(tmp_path / "b")
    assert bundle.manifest.drafter is None and bundle.manifest.drafters == ()
    worst = Deviation()
    worst.note(forward(OrtEngine(bundle.path, threads=1)), expected, "")
    assert worst.relative < 1e-5


def test_the_window(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = read_config(LLAMA)
    assert pipeline.window_of(config, None) == LLAMA["max_position_embeddings"]
    assert pipeline.window_of(config, 64) == 64
    assert pipeline.window_of(read_config(LLAMA | {"max_position_embeddings": 1 << 17}), None) == 4096
    with pytest.raises(UsageError, match="--window 257 is more than the model's 256 positions"):
        pipeline.window_of(config, 257)
    assert cli.main(["build", str(tiny_checkpoint), "-o", str(tmp_path / "b"), "--window", "300"]) == 2
    assert "--window 300" in failure(capsys)
    assert os.listdir(tmp_path) == []


def test_drafters_keep_their_order(tiny_checkpoint: Path, tmp_path: Path) -> None:
    options = ("--drafter", "ngram", "--drafter", "suffix", "--drafter", "ngram", "--prefill-chunk", "1000")
    assert build(tiny_checkpoint, tmp_path / "b", *options) == 0
    manifest = Bundle.load(tmp_path / "b").manifest
    assert [drafter.name for drafter in manifest.drafters] == ["ngram", "suffix"] and manifest.drafter == "ngram"
    assert manifest.target.prefill_chunk == 128


def test_json_of_run_and_inspect(tiny_bundle: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    answers = []
    for options in ([], ["--no-spec"], ["--drafter", "ngram", "--chat"]):
        command = ["run", str(tiny_bundle.path), "the quick", "--json", "--max-tokens", "30", "--threads", "1"]
        assert cli.main([*command, *options]) == 0
        answers.append(json.loads(capsys.readouterr().out))
        names = {"text", "token_ids", "tau", "acceptance_by_depth", "time_share", "bundle"}
        assert names <= set(answers[-1]) and set(answers[-1]["time_share"]) == {"draft", "verify", "host"}
        assert answers[-1]["bundle"] == str(tiny_bundle.path)
    fast, plain, chat = answers
    assert fast["token_ids"] == plain["token_ids"] != chat["token_ids"] and len(plain["token_ids"]) == 30
    assert plain["tau"] == 1 < fast["tau"]
    assert cli.main(["run", str(tiny_bundle.path), "the quick", "--max-tokens", "30", "--threads", "1"]) == 0
    assert capsys.readouterr().out == fast["text"] + "\n"
    assert cli.main(["inspect", str(tiny_bundle.path), "--json", "--full"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == {"bundle", "manifest", "derived"}
    assert facts["manifest"] == tiny_bundle.manifest.to_dict()
    assert facts["derived"]["cache_bytes"] == 2 * 2 * 2 * 128 * 16 * 4
    assert facts["derived"]["total_bytes"] == sum(f.bytes for f in tiny_bundle.manifest.files.values())
