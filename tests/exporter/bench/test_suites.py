"""Prompt files in, prompts out; what is not a prompt file is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from specexport.exporter.bench.suites import DATA_VARIABLE, SUITES, read_suite, suite_path
from specexport.runtime.errors import UsageError


def write(path: Path, *records: object) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def test_every_public_format(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl.gz",
        {"question_id": 1, "category": "writing", "turns": ["one", "two"]},
        {"category": "rag", "turns": ["three"]},
        {"task_id": "HumanEval/0", "prompt": "def f"},
        {"question": "how many", "answer": "5", "task": "maths"},
    )
    found = [(prompt.task, prompt.text) for prompt in read_suite(path)]
    assert found == [("mt_bench", "one"), ("rag", "three"), ("all", "def f"), ("maths", "how many")]
    assert [prompt.text for prompt in read_suite(path, ("rag", "maths"))] == ["three", "how many"]


def test_a_count_is_spread_over_each_task(tmp_path: Path) -> None:
    records = [{"prompt": str(number), "task": "ab"[number % 2]} for number in range(20)]
    path = write(tmp_path / "a.jsonl", *records)
    assert [prompt.text for prompt in read_suite(path, count=3)] == ["0", "6", "12", "1", "7", "13"]
    assert len(read_suite(path, count=50)) == 20


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "x"}\n', 'line 1: expected "turns", "prompt" or "question", got the keys text'),
        (b'{"turns": []}\n', "line 1"),
        (b"\n[1]\n", "line 2"),
        (b"{", "line 1: not JSON"),
        (b"\xff\xfe", "cannot be read"),
        (b"", "no prompts"),
        (b"[" * 100_000, "not JSON"),
    ],
)
def test_what_is_no_prompt_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_suite(path)
    (tmp_path / "b.gz").write_bytes(content or b"x")
    with pytest.raises(UsageError, match="cannot be read"):
        read_suite(tmp_path / "b.gz")


def test_names_are_looked_up_in_the_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    with pytest.raises(UsageError, match=DATA_VARIABLE):
        suite_path("gsm8k", None)
    with pytest.raises(UsageError, match="is not there"):
        suite_path("gsm8k", tmp_path)
    path = tmp_path / SUITES["gsm8k"]
    path.parent.mkdir()
    write(path, {"question": "x"})
    assert suite_path("gsm8k", tmp_path) == path
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert suite_path("gsm8k", None) == path and suite_path(str(path), None) == path
    with pytest.raises(UsageError, match="spec-bench"):
        suite_path("mt-bench", tmp_path)


def test_an_unknown_task_names_the_known(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", {"prompt": "x", "task": "rag"})
    with pytest.raises(UsageError, match=r"--task qa: a\.jsonl has rag"):
        read_suite(path, ("qa",))
