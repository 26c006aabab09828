"""``specexport inspect`` on heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specexport.exporter import cli
from tests.exporter.heads.writers import TARGET_CONFIG, Random, every, llama_tensors
from tests.tiny import write_checkpoint

ALL = dict(every())


def test_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = write_checkpoint(tmp_path / "target", TARGET_CONFIG, llama_tensors(Random(0)))
    head = ALL["eagle3_speculators"].write(tmp_path / "head")
    assert cli.main(["inspect", str(head), "--target", str(target)]) == 0
    shown = capsys.readouterr()
    for words in (
        "entering layer 2, entering layer 4, entering layer 5",
        "normed together, reduced 48 -> 16",
        "embedding then hidden, side by side; normed: embedding and hidden state",
        "normed hidden state",
        "the output after the final norm",
        "final norm, then the head's lm_head",
        "20 of 48 rows, mapped to target ids",
        "org/target-8b",
        "layers.0.self_attn.q_proj.weight [24, 32]",
    ):
        assert words in shown.out, shown.out
    assert "warning: the head names org/target-8b as its target" in shown.err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "mtp_deepseek_v3",
            "4 heads of 10 over a latent of 7 + 4, width 16, 3 of 8 experts of 6 by sigmoid from the 2 best",
        ),
        ("mtp_deepseek_v3", "weights normalised and times 2.5, a shared one of 12"),
        ("mtp_deepseek_v3", "yarn, theta 500000, 4 of 10 dimensions, neighbouring pairs"),
        ("mtp_qwen3_next_moe", "3 of 8 experts of 6 by softmax, weights normalised, a shared one of 10 with a gate"),
        ("mtp_qwen3_next", "q and k norms, a gate on each head's output"),
        ("mtp_deepseek_chain", "3 layers, each drafting one depth from the one before"),
        ("mtp_deepseek_chain", "the head's, not scaled"),
    ],
)
def test_words_of_prediction_layers(name: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", str(ALL[name].write(tmp_path / "head"))]) == 0
    assert words in capsys.readouterr().out


@pytest.mark.parametrize("name", ALL)
def test_json(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ALL[name]
    head = tiny.write(tmp_path / "head")
    target = []
    if tiny.target is not None:
        write_checkpoint(tmp_path / "target", TARGET_CONFIG, llama_tensors(Random(0)))
        target = ["--target", str(tmp_path / "target")]
    assert cli.main(["inspect", str(head), *target, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["record"]["dialect"] == tiny.record.dialect
    assert set(facts["tensors"]) == set(tiny.canonical)
    assert facts["tensors"].keys() and all(part["source"] in tiny.tensors for part in facts["tensors"].values())
    assert facts["fingerprint"].startswith("sha256-headers:")
    assert set(facts["words"]) >= {"layout", "captures", "vocabulary", "made for"}


def test_refusals_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head = ALL["eagle3"].write(tmp_path / "head")
    assert cli.main(["inspect", str(head)]) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and "--target" in shown.err
