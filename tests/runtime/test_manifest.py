from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from specexport.runtime.errors import BundleError
from specexport.runtime.manifest import SCHEMA_VERSION, Manifest, bundle_path

Data = dict[str, Any]


def test_round_trip(manifest_dict: Data) -> None:
    manifest_dict["files"] = {"engines/a/plan.bin": {"bytes": 3, "sha256": "0" * 64}}
    manifest = Manifest.from_json(json.dumps(manifest_dict))
    assert manifest.to_dict() == manifest_dict
    assert Manifest.from_dict(manifest.to_dict()) == manifest
    assert manifest.target.windows == (None, 8)
    assert manifest.drafters[0].options == {"memory": 4096, "strict": True}


def test_agreement_has_at_most_a_number_a_depth_and_may_be_missing(manifest_dict: Data) -> None:
    graph = {"drafter.eagle3.onnx": {"bytes": 3, "sha256": "0" * 64}}
    head = {"name": "eagle3", "kind": "eagle3", "options": {"depth": 2}, "graph": "drafter.eagle3.onnx", "tree": None}
    manifest_dict |= {"files": graph, "drafters": [head]} | {"drafter": "eagle3"}
    assert Manifest.from_dict(manifest_dict).drafters[0].agreement == ()
    head["agreement"] = [0.6, 1]
    assert Manifest.from_dict(manifest_dict).drafters[0].agreement == (0.6, 1.0)
    head["agreement"] = [0.6, 0.5, 0.4]
    with pytest.raises(BundleError, match=r"eagle3.agreement is .*, expected at most 2 numbers"):
        Manifest.from_dict(manifest_dict)


def _set(*path: str | int, value: Any) -> Callable[[Data], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


def _pop(*path: str) -> Callable[[Data], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


REFUSED: dict[str, tuple[Callable[[Data], None], str]] = {
    "unknown key": (_set("colour", value=1), "unknown key 'colour'"),
    "unknown nested key": (_set("target", "colour", value=1), "unknown key target.'colour'"),
    "missing key": (_pop("engine"), "missing key engine"),
    "missing nested key": (_pop("lineage", "source"), "missing key lineage.source"),
    "wrong type": (_set("target", "layers", value="2"), "target.layers is '2'"),
    "bool for integer": (_set("target", "layers", value=True), "target.layers is True"),
    "float for integer": (_set("target", "layers", value=2.0), "target.layers is 2.0"),
    "negative": (_set("target", "slots", value=-1), "target.slots is -1"),
    "huge": (_set("target", "slots", value=10**30), "target.slots"),
    "section not an object": (_set("target", value=[]), "target is \\[\\]"),
    "unknown format": (_set("target", "precision", "weights", value="int3"), "one of fp32, fp16, bf16, int8"),
    "not a flag": (_set("target", "precision", "exact", value=1), "true or false"),
    "windows disagree with layers": (_set("target", "windows", value=[None]), "each of 2 layers"),
    "valid_vocab above vocab_size": (_set("target", "valid_vocab", value=33), "at most target.vocab_size"),
    "prefill chunk above slots": (_set("target", "prefill_chunk", value=65), "at most target.slots"),
    "stop id outside the vocabulary": (_set("stop_ids", value=[30]), "ids below target.valid_vocab, 30"),
    "stop ids not a list": (_set("stop_ids", value=2), "stop_ids is 2"),
    "too many stop ids": (_set("stop_ids", value=[1] * 5000), "at most 4096"),
    "control characters": (_set("lineage", "source", value="a\x1b[2J"), "printable"),
    "lone surrogate": (_set("lineage", "source", value="\ud800"), "printable"),
    "long text": (_set("tools", "specexport", value="1" * 1000), "at most 128"),
    "unknown default drafter": (_set("drafter", value="medusa"), "null or one of suffix"),
    "drafter names collide": (
        _set("drafters", value=[{"name": "a", "kind": "a", "options": {}, "graph": None, "tree": None}] * 2),
        "different names",
    ),
    "odd engine name": (_set("engine", value="../x"), "engine is '../x'"),
    "agreement of a lookup": (
        _set("drafters", 0, "agreement", value=[0.5]),
        "agreement is \\[0.5\\], expected at",
    ),
    "agreement above 1": (_set("drafters", 0, "agreement", value=[1.5]), "agreement\\[0\\] is 1.5, expected a number"),
    "agreement not a number": (_set("drafters", 0, "agreement", value=[True]), "agreement\\[0\\] is True"),
    "infinite agreement": (_set("drafters", 0, "agreement", value=[float("inf")]), "agreement\\[0\\] is inf"),
    "nested drafter option": (_set("drafters", 0, "options", "memory", value={}), "options.memory"),
    "infinite drafter option": (_set("drafters", 0, "options", "memory", value=float("inf")), "options.memory"),
    "bad hash": (_set("files", "a.onnx", value={"bytes": 1, "sha256": "0" * 63}), "sha256"),
    "negative size": (_set("files", "a.onnx", value={"bytes": -1, "sha256": "0" * 64}), "bytes is -1"),
    "files differ in case only": (
        _set("files", value={name: {"bytes": 1, "sha256": "0" * 64} for name in ("a", "A")}),
        "more than case",
    ),
    "lists itself": (_set("files", "manifest.json", value={"bytes": 1, "sha256": "0" * 64}), "but the manifest"),
    "schema not a number": (_set("schema", value="1"), "schema is '1'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses(case: str, manifest_dict: Data) -> None:
    change, message = REFUSED[case]
    data = copy.deepcopy(manifest_dict)
    change(data)
    with pytest.raises(BundleError, match=message) as caught:
        Manifest.from_dict(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "version", "message"),
    [
        ("schema", SCHEMA_VERSION + 1, r"schema 2 written by specexport 9\.1 is too new: .* reads 1"),
        ("schema", 0, r"schema 0 written by specexport 9\.1 is too old: .* reads 1"),
        ("contract", 2, "contract 2 .* too new"),
        ("contract", 0, "contract 0 .* too old"),
    ],
)
def test_other_versions_are_named_before_anything_else(
    key: str, version: int, message: str, manifest_dict: Data
) -> None:
    manifest_dict |= {key: version, "tools": {"specexport": "9.1"}, "key of that version": 1}
    with pytest.raises(BundleError, match=message):
        Manifest.from_dict(manifest_dict)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"schema": 1, "schema": 1}', '{"schema": NaN}', "[" * 100_000, b"\xff\xfe", "1" * 10_000],
    ids=["empty", "cut", "list", "null", "duplicate key", "nan", "deep", "not utf-8", "long number"],
)
def test_refuses_bad_json(text: str | bytes) -> None:
    with pytest.raises(BundleError, match=r"manifest\.json"):
        Manifest.from_json(text)


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "..",
        "../x",
        "a/../b",
        "./a",
        "a//b",
        "a/",
        "C:/x",
        "C:x",
        "a\\b",
        "\\\\server\\x",
        "a\0b",
        "a\nb",
        "a b",
        "é",
        "a.",
        "x" * 300,
        7,
    ],
)
def test_path_must_stay_inside(path: object) -> None:
    with pytest.raises(BundleError, match="inside the bundle"):
        bundle_path(path)


@pytest.mark.parametrize("path", ["target.onnx.data", "engines/orin-8gb/plan_1.bin", ".hidden", "a..b"])
def test_plain_paths_are_accepted(path: str) -> None:
    assert bundle_path(path) == path
