"""The record beside a plan: what it says of sizes, and that a hostile or stale one is refused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specexport.engines.plan import (
    PlanProfile,
    PlanRecord,
    TensorInfo,
    check_plan,
    check_sources,
    plan_graphs,
    read_plan,
    write_plan,
)
from specexport.runtime.errors import BundleError, UsageError
from specexport.runtime.manifest import FileInfo

PLAN = b"not a real plan"
CACHE = (1, 2, 64, 16)


def some_record(**changes: Any) -> PlanRecord:
    widths = [(1, 1), (4, 4), (32, 1)]
    values: dict[str, Any] = {
        "graph": "target.onnx",
        "plan": "target.plan",
        "bytes": len(PLAN),
        "sha256": hashlib.sha256(PLAN).hexdigest(),
        "sources": {"target.onnx": FileInfo(bytes=3, sha256="0" * 64)},
        "module": "tensorrt_rtx",
        "version": "1.7.1.116",
        "capabilities": ("8.6", "12.0"),
        "slots": 64,
        "inputs": (
            TensorInfo(name="tree", dtype="bool", shape=(1, "T", "T")),
            TensorInfo(name="past_k.0", dtype="fp16", shape=CACHE),
        ),
        "outputs": (
            TensorInfo(name="logits", dtype="fp32", shape=("R", 320)),
            TensorInfo(name="present_k.0", dtype="fp16", shape=CACHE),
        ),
        "aliases": {"present_k.0": "past_k.0"},
        "profiles": tuple(
            PlanProfile(index=index, dims={"T": nodes, "A": 3, "O": 3 + nodes, "R": rows})
            for index, (nodes, rows) in enumerate(widths)
        ),
        "plugins": (),
        "weights": "int4",
        "activations": "fp16",
        "layers": 1,
        "attention_fused": 1,
        "cache_tensors": 1,
        "cache_in_place": 1,
        "plain": False,
        "build_seconds": 1.5,
        "peak_rss_bytes": 1 << 20,
    }
    return PlanRecord(**values | changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "target.plan").write_bytes(PLAN)
    write_plan(tmp_path, some_record())
    return tmp_path


def test_what_is_written_is_read(folder: Path) -> None:
    assert plan_graphs(folder) == ["target.onnx"]
    record = read_plan(folder, "target.onnx")
    assert record == some_record() and record.fused
    assert check_plan(folder, record) == folder / "target.plan"
    assert not some_record(cache_in_place=0).fused


def test_sizes_of_a_profile() -> None:
    record = some_record()
    tree, cache = record.inputs
    profile = record.fit(T=3, R=2)
    assert profile.index == 1 and profile.shape(tree) == (1, 4, 4) and profile.shape(cache) == CACHE
    assert profile.shape(record.outputs[0]) == (4, 320)
    assert record.fit(T=5).index == 2 and record.fit().index == 0
    with pytest.raises(UsageError, match=r"no profile for T = 5, R = 5.*compile it with wider profiles"):
        record.fit(T=5, R=5)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("bytes", 0, "bytes is 0"),
        ("module", "tensorrt_llm", "module is 'tensorrt_llm', expected one of tensorrt, tensorrt_rtx"),
        ("plan", "../target.plan", "plan is '../target.plan'"),
        ("capabilities", ["8.6; rm"], "capabilities"),
        ("profiles", [], "indices 0, 1"),
        ("profiles", [{"index": 1, "dims": {"T": 1, "R": 1}}], "indices 0, 1"),
        ("profiles", [{"index": 0, "dims": {"T": 1}}], "a size of R"),
        ("aliases", {"logits": "past_k.0"}, "an input of the output's type and shape"),
        ("aliases", {"present_k.0": "nothing"}, "an input of the output's type and shape"),
        ("plugins", ["TreeAttention"], "plugins"),
        ("more", 1, "unknown key 'more'"),
    ],
)
def test_refusals(folder: Path, key: str, value: Any, message: str) -> None:
    path = folder / "target.plan.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(BundleError, match="compile the bundle again") as caught:
        read_plan(folder, "target.onnx")
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_record_of_another_plan(folder: Path) -> None:
    (folder / "draft.plan.json").write_bytes((folder / "target.plan.json").read_bytes())
    with pytest.raises(BundleError, match=r"draft.plan.json is the record of target.plan"):
        read_plan(folder, "draft.onnx")
    with pytest.raises(BundleError, match="missing"):
        read_plan(folder, "drafter.a.onnx")


def flip(plan: bytes) -> bytes:
    return bytes([plan[0] ^ 1]) + plan[1:]


@pytest.mark.parametrize(("damage", "words"), [(flip, "sha256"), (lambda plan: plan[:-1], "14 bytes")])
def test_a_damaged_plan(folder: Path, damage: Callable[[bytes], bytes], words: str) -> None:
    (folder / "target.plan").write_bytes(damage(PLAN))
    with pytest.raises(BundleError, match=words):
        check_plan(folder, read_plan(folder, "target.onnx"))


def test_a_plan_of_another_build() -> None:
    record = some_record()
    check_sources(record, {**record.sources, "other": FileInfo(bytes=1, sha256="1" * 64)})
    with pytest.raises(BundleError, match=r"target.plan was compiled from another target.onnx"):
        check_sources(record, {"target.onnx": FileInfo(bytes=3, sha256="1" * 64)})


def test_a_link_out_of_the_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "plan"
    elsewhere.write_bytes(PLAN)
    (folder / "target.plan").unlink()
    (folder / "target.plan").symlink_to(elsewhere)
    with pytest.raises(BundleError, match="link out"):
        check_plan(folder, read_plan(folder, "target.onnx"))
