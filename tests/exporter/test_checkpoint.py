"""Opening checkpoints: formats, links, and hostile or damaged files."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from specexport.exporter.checkpoint import open_checkpoint
from specexport.exporter.shards import read_header
from specexport.runtime.errors import CheckpointError
from tests.tiny import write_checkpoint

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8}


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "c": torch.randn(2, 2, 2).to(torch.float16),
        "d": torch.arange(4),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }


def assert_holds(weights: Any, tensors: dict[str, torch.Tensor]) -> None:
    assert set(weights.names()) == set(tensors)
    for name, tensor in tensors.items():
        read = weights.read(name)
        assert weights.shape(name) == tuple(tensor.shape) and read.dtype == tensor.dtype
        assert torch.equal(read, tensor)


@pytest.mark.parametrize("shards", [1, 3])
def test_safetensors(tmp_path: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path, CONFIG, tensors, shards)))
    assert checkpoint.kind == "hf" and checkpoint.config == CONFIG
    assert_holds(checkpoint.weights, tensors)
    with pytest.raises(CheckpointError, match="no tensor nothing"):
        checkpoint.weights.read("nothing")


@pytest.mark.parametrize("indexed", [False, True])
def test_pickles(tmp_path: Path, tensors: dict[str, torch.Tensor], indexed: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    if indexed:
        names = list(tensors)
        weight_map = {name: f"pytorch_model-{i % 2}.bin" for i, name in enumerate(names)}
        for file in set(weight_map.values()):
            torch.save({n: tensors[n] for n in names if weight_map[n] == file}, tmp_path / file)
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    else:
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert_holds(open_checkpoint(str(tmp_path)).weights, tensors)


def test_safetensors_win_over_pickles(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_checkpoint(tmp_path, CONFIG, tensors)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert_holds(open_checkpoint(str(tmp_path)).weights, tensors)


class Attack:
    """Pickles to a call, as a malicious checkpoint would."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


def test_pickle_cannot_run_code(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": Attack(marker)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="not a safe PyTorch archive"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Attack(marker)))
    with pytest.raises(CheckpointError, match="not a safe PyTorch archive"):
        open_checkpoint(str(tmp_path))
    assert not marker.exists()


def test_pickle_of_an_expanded_tensor(tmp_path: Path) -> None:
    """A few bytes that claim to be a terabyte are refused before any copy."""
    (tmp_path / "config.json").write_text("{}")
    torch.save({"a": torch.zeros(1).expand(1 << 38)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="plain tensors"):
        open_checkpoint(str(tmp_path))


def test_fingerprint(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    one = open_checkpoint(str(write_checkpoint(tmp_path / "one", CONFIG, tensors)))
    many = open_checkpoint(str(write_checkpoint(tmp_path / "many", CONFIG, tensors, 2)))
    assert one.fingerprint() == many.fingerprint() and one.fingerprint().startswith("sha256:")
    assert one.fingerprint(fast=True) != many.fingerprint(fast=True)
    assert one.fingerprint(fast=True).startswith("sha256-headers:")
    changed = {**tensors, "a": tensors["a"] + 1}
    other = open_checkpoint(str(write_checkpoint(tmp_path / "other", CONFIG, changed)))
    assert other.fingerprint() != one.fingerprint()
    assert other.fingerprint(fast=True) == one.fingerprint(fast=True)
    config = open_checkpoint(str(write_checkpoint(tmp_path / "config", {**CONFIG, "vocab_size": 9}, tensors)))
    assert config.fingerprint() != one.fingerprint() and config.fingerprint(fast=True) != one.fingerprint(fast=True)
    pieces: list[int] = []
    one.fingerprint(advance=pieces.append)
    assert sum(pieces) == sum(t.nbytes for t in tensors.values())


def hub_cache(root: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """The layout of huggingface_hub: a snapshot of links into blobs."""
    blobs, snapshot = root / "models--o--n" / "blobs", root / "models--o--n" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in sorted(write_checkpoint(root / "plain", CONFIG, tensors, 2).iterdir()):
        blob = blobs / f"blob{len(list(blobs.iterdir()))}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def test_hub_cache_links(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    snapshot = hub_cache(tmp_path, tensors)
    assert_holds(open_checkpoint(str(snapshot)).weights, tensors)
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    (snapshot / "tokenizer_config.json").symlink_to(secret)
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        open_checkpoint(str(snapshot)).json("tokenizer_config.json")


def test_link_out_of_a_plain_directory(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    directory = write_checkpoint(tmp_path / "checkpoint", CONFIG, tensors)
    (directory / "model.safetensors").rename(tmp_path / "elsewhere")
    (directory / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        open_checkpoint(str(directory))


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "C:\\x", "C:x", "a\\b", "", "a/../../x"])
def test_shard_paths(tmp_path: Path, shard: str) -> None:
    write_checkpoint(tmp_path, CONFIG, {"a": torch.zeros(1)})
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError, match="not a plain file name"):
        open_checkpoint(str(tmp_path))


def test_index_must_agree(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    write_checkpoint(tmp_path, CONFIG, tensors, 2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    missing = {name: file for name, file in index["weight_map"].items() if name != "a"}
    for weight_map, message in (
        (missing, "a is in the file but not in the index"),
        ({**index["weight_map"], "ghost": index["weight_map"]["a"]}, "ghost is in the index but not in the file"),
        ({**index["weight_map"], "ghost": "model-9.safetensors"}, "shard model-9.safetensors is missing"),
        ({"a": 3}, "weight_map must name"),
    ):
        path.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=message):
            open_checkpoint(str(tmp_path))


def safetensors_file(path: Path, header: str | bytes, data: bytes = b"", length: int | None = None) -> Path:
    raw = header.encode() if isinstance(header, str) else header
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (1,), offsets: Any = (0, 4)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": entry(shape=[2])}, bytes(4), "needs 8 bytes"),
        ({"a": entry(shape=[1 << 62, 1 << 62])}, bytes(4), "needs"),
        ({"a": entry(shape=[-1])}, bytes(4), "bad shape"),
        ({"a": entry(shape=[True])}, bytes(4), "bad shape"),
        ({"a": entry(shape="x")}, bytes(4), "bad shape"),
        ({"a": entry(dtype="F8_E8M0")}, bytes(4), "dtype 'F8_E8M0'"),
        ({"a": entry(dtype=["F32"])}, bytes(4), "dtype"),
        ({"a": entry(offsets=[4, 8])}, bytes(8), "gap or an overlap"),
        ({"a": entry(), "b": entry()}, bytes(4), "gap or an overlap"),
        ({"a": entry(shape=[2], offsets=[0, 8]), "b": entry(offsets=[4, 8])}, bytes(8), "gap or an overlap"),
        ({"a": entry()}, bytes(3), "end at byte"),
        ({"a": entry()}, bytes(5), "end at byte"),
        ({"a": {**entry(), "more": 1}}, bytes(4), "exactly dtype"),
        ({"a": 3}, b"", "exactly dtype"),
        ([], b"", "expected a JSON object"),
        ('{"a": 1, "a": 2}', b"", "appears twice"),
        ("[" * 100_000, b"", "not valid JSON"),
        (b"\xff\xfe{}", b"", "not valid JSON"),
    ],
)
def test_hostile_headers(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    text = header if isinstance(header, (str, bytes)) else json.dumps(header)
    with pytest.raises(CheckpointError, match=message):
        read_header(safetensors_file(tmp_path / "x.safetensors", text, data))


@pytest.mark.parametrize("length", [0, 1, 100, 1 << 40, (1 << 64) - 1])
def test_header_length(tmp_path: Path, length: int) -> None:
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_header(safetensors_file(tmp_path / "x.safetensors", "{}", length=length))
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        read_header(tmp_path / "short")


def test_file_that_shrinks(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_checkpoint(tmp_path, CONFIG, {"a": torch.zeros(64)})))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="truncated, 8 bytes are missing"):
        checkpoint.weights.read("a")


def test_sources_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(source: str, message: str, **options: Any) -> None:
        with pytest.raises(CheckpointError, match=message) as caught:
            open_checkpoint(source, **options)
        assert "\n" not in str(caught.value)

    refused(str(tmp_path / "nothing" / "at" / "all"), "not a hub id")
    refused(str(tmp_path), "no config.json")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    refused(str(tmp_path), r"pass .*x\.gguf itself")
    refused(str(tmp_path / "x.gguf"), "--revision v2 is for hub ids", revision="v2")
    (tmp_path / "weights.bin").write_bytes(b"")
    refused(str(tmp_path / "weights.bin"), "expected a directory")
    (tmp_path / "config.json").write_text("{}")
    refused(str(tmp_path), "no model.safetensors")
    refused(str(tmp_path), "--revision main is for hub ids", revision="main")
    (tmp_path / "config.json").write_text("[]")
    refused(str(tmp_path), "expected a JSON object")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    refused("nobody/nothing", "not in the local hub cache", offline=True)


def test_hub_id_offline(tmp_path: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id is found in the cache, by branch, without the network."""
    hub_cache(tmp_path, tensors)
    refs = tmp_path / "models--o--n" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub._snapshot_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    checkpoint = open_checkpoint("o/n", offline=True)
    assert checkpoint.source == "o/n" and checkpoint.directory.name == "abc"
    assert_holds(checkpoint.weights, tensors)
    with pytest.raises(CheckpointError, match="o/n at v9: not in the local hub cache"):
        open_checkpoint("o/n", revision="v9", offline=True)
