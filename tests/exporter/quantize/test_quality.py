"""``verify --quality``: figures against an independent computation, and the report they are written to."""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specexport.exporter import cli, report
from specexport.exporter.checkpoint import open_checkpoint
from specexport.exporter.config import read_config
from specexport.exporter.progress import Progress
from specexport.exporter.quantize import quality
from specexport.exporter.quantize.agreement import compare
from specexport.exporter.quantize.quality import check_build, measure
from specexport.exporter.quantize.sample import SAMPLE
from specexport.exporter.quantize.text import Window
from specexport.exporter.verify import load_transformers
from specexport.runtime.bundle import Bundle

QUIET = Progress(quiet=True)


@pytest.fixture
def copy(tiny_bundle: Bundle, tmp_path: Path) -> Path:
    """A bundle that may be damaged."""
    return Path(shutil.copytree(tiny_bundle.path, tmp_path / "copy"))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("def add(a, b):\n    return a + b\nthe quick brown dog jumps over 12, 13 lazy foxes\n" * 40)
    return path


def shift(bundle: Path, size: float) -> None:
    """Add noise to every weight in the data file."""
    data = bundle / "target.onnx.data"
    values = np.fromfile(data, np.float32)
    noise = np.random.default_rng(0).standard_normal(values.shape).astype(np.float32)
    (values + size * noise * (values != 0)).tofile(data)


def perplexity(checkpoint: Path, tokens: list[int], width: int, stride: int) -> float:
    """By Transformers, as its guide to fixed-length models has it: labels of the overlap are -100, losses weighted."""
    model: Any = load_transformers(checkpoint)
    total, count, done = 0.0, 0, 0
    for start in range(0, len(tokens), stride):
        stop = min(start + width, len(tokens))
        ids = torch.tensor([tokens[start:stop]])
        labels = ids.clone()
        labels[:, : ids.shape[1] - (stop - done)] = -100
        scored = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += float(model(ids, labels=labels).loss) * scored
        count, done = count + scored, stop
        if stop == len(tokens):
            break
    return float(np.exp(total / count))


@pytest.mark.parametrize("stride", [48, 20])
def test_perplexity_is_that_of_transformers(
    tiny_bundle: Bundle, tiny_checkpoint: Path, copy: Path, text: Path, stride: int
) -> None:
    found = measure(copy, text=text, tokens=300, window=48, stride=stride, checkpoint=tiny_checkpoint, progress=QUIET)
    tokens = tiny_bundle.tokenizer.encode(text.read_text())[:300]
    expected = perplexity(tiny_checkpoint, tokens, 48, stride)
    assert found.quality.perplexity == pytest.approx(expected, rel=1e-4)
    agreement = found.quality.agreement
    assert agreement is not None and agreement.reference_perplexity == pytest.approx(expected, rel=1e-4)
    assert abs(agreement.kl) < 1e-6 and agreement.top1 > 0.99
    assert found.quality.tokens == (299 if stride == 20 else 300 - 7)


def test_damage_shows_and_the_report_keeps_both(
    copy: Path, tiny_bundle: Bundle, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report.write_report(copy, {"passed": True, "checks": []})
    shift(copy, 0.05)
    options = ["--quality", "--text", str(text), "--reference", str(tiny_bundle.path), "--tokens", "200"]
    assert cli.main(["verify", str(copy), "--json", *options]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {
        "window": 128,
        "stride": 128,
        "tokens": 198,
        "text": "text.txt",
    }.items() <= shown.items()
    assert shown["precision"].startswith("fp32, ") and shown["reference"].startswith("bundle (fp32, ")
    assert 0.001 < shown["kl"] < shown["kl_99"] and shown["top1"] < 1
    ratio = shown["perplexity"] / shown["reference_perplexity"]
    assert ratio != 1 and shown["perplexity_ratio"] == pytest.approx(ratio)
    stored = report.read_report(copy)
    assert stored["passed"] is True and stored["quality"] == {k: v for k, v in shown.items() if k != "bundle"}
    assert cli.main(["verify", str(copy), "--quality", "--text", str(text), "--tokens", "60"]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert lines["kl"] == "None" and float(lines["perplexity"]) > 1
    assert report.read_report(copy)["quality"]["reference"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--quality"], "name a file with --text"),
        (["--text", "T"], "--text is for --quality"),
        (["--context", "8"], "--context is for --quality"),
        (["--quality", "--text", "T", "--prompts", "T"], "--prompts is not for --quality"),
        (["--quality", "--text", "T", "--checkpoint", "T", "--reference", "T"], "exclude each other"),
        (["--quality", "--text", "T", "--context", "500"], "does not fit the bundle's 128 cache slots"),
        (["--quality", "--text", "T", "--context", "8", "--stride", "9"], "stride of 1 to 8"),
        (["--quality", "--text", "none"], "no such file"),
        (["--quality", "--text", "T", "--reference", "none"], "none"),
    ],
)
def test_what_does_not_fit_is_refused(
    copy: Path, text: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(text) if word == "T" else word for word in options]
    code = cli.main(["verify", str(copy), *words])
    error = capsys.readouterr().err
    assert code == 2 or "none" in options
    assert code and message in error and error.count("\n") == 1


def test_the_figures_of_two_known_distributions() -> None:
    """Logits of probabilities that were worked out by hand."""
    windows = [Window((0, 0, 1), 1)]
    p, q = np.log([[0.5, 0.25, 0.25], [0.2, 0.7, 0.1]]), np.log([[0.25, 0.5, 0.25], [0.2, 0.7, 0.1]])
    found = compare(windows, 2, iter([q.astype(np.float32) + 3]), iter([p.astype(np.float32) - 1]))
    assert found.tokens == 2 and found.perplexity == pytest.approx((0.25 * 0.7) ** -0.5)
    agreement = found.agreement
    assert agreement is not None and agreement.top1 == 0.5
    assert agreement.reference_perplexity == pytest.approx((0.5 * 0.7) ** -0.5)
    assert agreement.kl == pytest.approx((0.5 * np.log(2) + 0.25 * np.log(0.5)) / 2, rel=1e-5)


def test_logits_that_are_no_numbers_are_null_in_json() -> None:
    found = compare([Window((0, 0), 1)], 1, iter([np.full((1, 3), np.nan, np.float32)]), None)
    assert found.to_dict()["perplexity"] is None


def test_a_build_warns_of_a_bundle_that_lost_its_way(copy: Path, tiny_checkpoint: Path) -> None:
    source = open_checkpoint(str(tiny_checkpoint))
    config = read_config(source.config)
    said = io.StringIO()
    found = check_build(Bundle.load(copy), config, source.weights, Progress(stream=said))
    assert (
        found is not None
        and found.kl < 1e-6
        and "warning" not in said.getvalue()
        and "same first choice 100%" in said.getvalue()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quality, "SAMPLE", "")
        assert check_build(Bundle.load(copy), config, source.weights, Progress(stream=said)) is None
    assert "could not be measured: 0 tokens of text are too few" in said.getvalue()
    shift(copy, 1.0)
    check_build(Bundle.load(copy), config, source.weights, Progress(stream=said))
    assert "warning: the bundle agrees poorly" in said.getvalue() and "--calibrate" in said.getvalue()


def test_a_failed_write_leaves_the_old_report_and_nothing_else(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report.write_report(copy, {"passed": True})
    before = sorted(copy.iterdir())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        report.write_report(copy, {"passed": False})
    assert sorted(copy.iterdir()) == before and report.read_report(copy) == {"passed": True}


@pytest.mark.slow
@pytest.mark.e2e
def test_smollm2_against_transformers(smollm2_bundle: Bundle, smollm2_gguf: Path, tmp_path: Path) -> None:
    """The real model in fp32, in overlapping windows of prose; the report goes into a copy made of links."""
    copy = tmp_path / "bundle"
    shutil.copytree(smollm2_bundle.path, copy, copy_function=os.link if os.name == "posix" else shutil.copyfile)
    (copy / "report.json").unlink(missing_ok=True)
    text = tmp_path / "text.txt"
    text.write_text(SAMPLE)
    found = measure(copy, text=text, tokens=300, window=128, stride=64, checkpoint=smollm2_gguf, progress=QUIET)
    tokens = smollm2_bundle.tokenizer.encode(SAMPLE)[:300]
    assert found.quality.perplexity == pytest.approx(perplexity(smollm2_gguf, tokens, 128, 64), rel=1e-3)
    agreement = found.quality.agreement
    assert agreement is not None and abs(agreement.kl) < 1e-4 and agreement.top1 > 0.99
