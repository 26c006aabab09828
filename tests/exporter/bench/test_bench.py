"""``bench`` on a tiny bundle, and its figures on samples whose answer is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specexport.exporter.bench.measure import PLAIN, Sample, summarise
from specexport.exporter.cli import main
from specexport.runtime.bundle import Bundle


def sample(policy: str, prompt: int, seconds: float, tokens: int = 10, calls: int = 9) -> Sample:
    return Sample(
        prompt=prompt,
        task="rag",
        policy=policy,
        repetition=0,
        prompt_tokens=5,
        tokens=tokens,
        seconds=seconds,
        first_token_s=0.5,
        decode_s=seconds - 0.5,
        target_calls=calls,
        host_share=0.1,
        accepted=[2, 1],
        proposed=[4, 2],
        tree_sizes={1: calls},
        token_s=[0.1] * 8 + [0.9],
    )


def test_figures() -> None:
    samples = [sample(PLAIN, 0, 4.5), sample("suffix", 0, 2.5, calls=3), sample(PLAIN, 1, 3.0)]
    samples.append(replace(sample("suffix", 1, 3.0, calls=6), identical=False))
    figures = summarise(samples, "suffix")
    assert figures["speedup"] == pytest.approx((4.5 / 2.5 + 1) / 2)
    assert figures["speedup_quartiles"] == pytest.approx([1.2, 1.6])
    assert figures["decode_speedup"] == pytest.approx((2 + 1) / 2)
    assert figures["plain_tokens_per_second"] == pytest.approx(20 / 7.5)
    assert figures["speculative_tokens_per_second"] == pytest.approx(20 / 5.5)
    assert figures["tau"] == pytest.approx(18 / 9)
    assert figures["acceptance_by_depth"] == [0.5, 0.5]
    assert figures["tree_sizes"] == {"1": 9}
    assert figures["token_p50_s"] == pytest.approx(0.1) and figures["token_p99_s"] > 0.8
    assert not figures["tokens_identical"] and figures["identical_answers"] == 1


def test_the_verb(tiny_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": text, "task": task} for text, task in (("a b a b a b", "one"), ("c d c", "two"), ("a", "two"))]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["bench", str(tiny_bundle.path), "--suite", str(prompts), "--max-tokens", "12", "--threads", "1"]
    policies = ["--policy", "auto", "--policy", "fixed:suffix"]
    output = tmp_path / "record.json"
    assert main([*arguments, *policies, "--repetitions", "2", "--output", str(output)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert len(table) == 1 + 3 * 3 and table[-1].split()[:3] == ["all", "suffix", "6"]
    record = json.loads(output.read_text())
    assert record["policies"].keys() == {"plain", "auto", "suffix"}
    for found in record["policies"].values():
        assert found["overall"]["tokens_identical"] and found["tasks"].keys() == {"one", "two"}
    assert record["policies"]["plain"]["overall"]["speedup"] == 1.0
    assert len(record["samples"]) == 3 * 3 * 2 and record["settings"]["left_out"] == 0
    assert main([*arguments, "--json", "--count", "1", "--task", "one"]) == 0
    assert len(json.loads(capsys.readouterr().out)["policies"]) == 2


@pytest.mark.parametrize(
    ("extra", "code", "message"),
    [
        (["--policy", "suffix"], 2, "fixed:NAME"),
        (["--policy", "fixed:"], 2, "fixed:NAME"),
        (["--policy", "fixed:nothing"], 2, "unknown drafter 'nothing'"),
        (["--task", "rag"], 2, "--task rag"),
        (["--plot", "x.pdf"], 2, ".png"),
        (["--max-tokens", "100000"], 2, "cache slots"),
    ],
)
def test_errors_are_one_line(
    tiny_bundle: Bundle, tmp_path: Path, extra: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a b"}\n')
    assert main(["bench", str(tiny_bundle.path), "--suite", str(prompts), *extra]) == code
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_plots(tiny_bundle: Bundle, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra of that name")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a b a b a b"}\n')
    picture = tmp_path / "plot.svg"
    arguments = ["--suite", str(prompts), "--max-tokens", "8", "--plot", str(picture)]
    assert main(["bench", str(tiny_bundle.path), *arguments]) == 0
    assert picture.read_text().lstrip().startswith("<?xml")
