from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto

from specexport.runtime.bundle import Bundle, Check
from specexport.runtime.bundle_writer import BundleWriter
from specexport.runtime.errors import BundleError, UsageError
from specexport.runtime.manifest import Manifest
from tests.runtime.graphs import DATA, PLACES, external, model


@pytest.fixture
def write(tmp_path: Path, manifest_dict: dict[str, Any]) -> Callable[..., Bundle]:
    """Write a small bundle at ``tmp_path / "bundle"``; keyword ``graph`` replaces target.onnx."""

    def write(graph: bytes | None = None, overwrite: bool = False, **files: str) -> Bundle:
        with BundleWriter(tmp_path / "bundle", overwrite=overwrite) as writer:
            writer.add_file("target.onnx", graph if graph is not None else model(external(offset=0, length=16)))
            writer.add_file(DATA, bytes(range(32)))
            writer.add_file("tokenizer.json", "{}")
            for name, text in files.items():
                writer.add_file(name.replace("__", "."), text)
            return writer.finish(Manifest.from_dict(manifest_dict))

    return write


@pytest.fixture
def bundle(write: Callable[..., Bundle]) -> Path:
    """Path of a small valid bundle."""
    return write(chat_template__jinja="{{ x }}", generation_config__json='{"top_k": 5}').path


def edit(bundle: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest as an attacker would."""
    data = json.loads((bundle / "manifest.json").read_text())
    change(data)
    (bundle / "manifest.json").write_text(json.dumps(data))


def replace_graph(bundle: Path, content: bytes) -> None:
    (bundle / "target.onnx").write_bytes(content)
    edit(bundle, lambda data: data["files"]["target.onnx"].update(bytes=len(content)))


@pytest.mark.parametrize("check", ["fast", "full"])
def test_loads_what_was_written(bundle: Path, check: Check) -> None:
    loaded = Bundle.load(bundle, check=check)
    assert loaded.path == bundle
    assert set(loaded.manifest.files) == {
        *("target.onnx", DATA, "tokenizer.json", "chat_template.jinja", "generation_config.json")
    }
    assert loaded.chat_template == "{{ x }}"
    assert loaded.generation_config == {"top_k": 5}
    assert loaded.file("target.onnx") == bundle / "target.onnx"


def test_optional_files(write: Callable[..., Bundle]) -> None:
    loaded = write()
    assert loaded.chat_template is None
    assert loaded.generation_config == {}
    with pytest.raises(BundleError, match=r"has no drafter\.onnx"):
        loaded.file("drafter.onnx")


def test_additions_on_a_device_need_not_be_listed(bundle: Path) -> None:
    for name in ("profiles/orin.json", "engines/orin/plan.bin", "report.json", "README.md", ".gitattributes"):
        (bundle / name).parent.mkdir(parents=True, exist_ok=True)
        (bundle / name).write_text("x")
    Bundle.load(bundle, check="full")


@pytest.mark.parametrize("name", ["engines/cpu/target.onnx", "engines/target.onnx", "engines/a/b/x.onnx"])
def test_engine_graphs_are_scanned_though_not_listed(name: str, bundle: Path) -> None:
    (bundle / name).parent.mkdir(parents=True, exist_ok=True)
    (bundle / name).write_bytes(model(external("/etc/passwd")))
    with pytest.raises(BundleError, match="keeps tensors in '/etc/passwd'"):
        Bundle.load(bundle)
    (bundle / name).unlink()
    (bundle / name).symlink_to("/etc/passwd")
    with pytest.raises(BundleError, match=f"{name} is a link out"):
        Bundle.load(bundle)


def test_engine_graphs_may_share_the_weights(bundle: Path, write: Callable[..., Bundle]) -> None:
    graph = bundle / "engines/cpu/target.onnx"
    graph.parent.mkdir(parents=True)
    graph.write_bytes(model(external(offset=0, length=32)))
    Bundle.load(bundle)
    graph.write_bytes(model(external(offset=0, length=33)))
    with pytest.raises(BundleError, match="ends at byte 33"):
        Bundle.load(bundle)


def test_what_a_build_puts_below_engines_is_listed(tmp_path: Path, manifest_dict: dict[str, Any]) -> None:
    with BundleWriter(tmp_path / "bundle") as writer:
        for name in ("target.onnx", "engines/cpu/target.onnx"):
            writer.add_file(name, model(external(offset=0)))
        writer.add_file(DATA, b"1234")
        writer.add_file("tokenizer.json", "{}")
        written = writer.finish(Manifest.from_dict(manifest_dict))
    assert "engines/cpu/target.onnx" in written.manifest.files
    (written.path / "engines/cpu/target.onnx").unlink()
    with pytest.raises(BundleError, match=r"engines/cpu/target\.onnx is missing"):
        Bundle.load(written.path)


def _link_out(bundle: Path, name: str) -> None:
    outside = bundle.parent / "outside"
    outside.write_bytes((bundle / name).read_bytes())
    (bundle / name).unlink()
    (bundle / name).symlink_to(outside)


def _list_file(bundle: Path, name: str, real: Path | None = None) -> None:
    size = real.stat().st_size if real else 0
    edit(bundle, lambda data: data["files"].update({name: {"bytes": size, "sha256": "0" * 64}}))


def _folder_link_out(bundle: Path) -> None:
    outside = bundle.parent / "folder"
    outside.mkdir()
    (outside / "x.bin").write_bytes(b"x")
    (bundle / "sub").symlink_to(outside)
    _list_file(bundle, "sub/x.bin", outside / "x.bin")


def _engine_folder_links_out(bundle: Path) -> None:
    (bundle / "engines").mkdir()
    (bundle / "engines/cpu").symlink_to(bundle.parent)


def _fifo(bundle: Path) -> None:
    (bundle / DATA).unlink()
    os.mkfifo(bundle / DATA)


def _truncate(bundle: Path, name: str) -> None:
    (bundle / name).write_bytes((bundle / name).read_bytes()[:-1])


ATTACKS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda b: (b / "manifest.json").unlink(), "manifest.json is missing"),
    "oversized manifest": (lambda b: (b / "manifest.json").write_bytes(b" " * (5 << 20)), "expected at most"),
    "manifest links out": (lambda b: _link_out(b, "manifest.json"), "manifest.json is a link out"),
    "missing file": (lambda b: (b / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "truncated data": (lambda b: _truncate(b, DATA), f"{DATA} has 31 bytes, expected 32"),
    "truncated graph": (lambda b: _truncate(b, "target.onnx"), "target.onnx has"),
    "appended data": (lambda b: (b / DATA).write_bytes(b"\0" * 33), "33 bytes, expected 32"),
    "file is a directory": (lambda b: [(b / DATA).unlink(), (b / DATA).mkdir()], "not a regular file"),
    "file is a pipe": (_fifo, "not a regular file"),
    "file links out": (lambda b: _link_out(b, DATA), f"{DATA} is a link out"),
    "folder links out": (_folder_link_out, "sub/x.bin is a link out"),
    "link in a circle": (lambda b: [(b / DATA).unlink(), (b / DATA).symlink_to(DATA)], f"{DATA} is missing"),
    "absolute path": (lambda b: _list_file(b, "/etc/passwd"), "inside the bundle"),
    "parent path": (lambda b: _list_file(b, "../outside"), "inside the bundle"),
    "drive letter": (lambda b: _list_file(b, "C:/outside"), "inside the bundle"),
    "backslashes": (lambda b: _list_file(b, "..\\outside"), "inside the bundle"),
    "nul": (lambda b: _list_file(b, "target.onnx\0.txt"), "inside the bundle"),
    "unlisted file": (lambda b: (b / "extra.onnx").write_bytes(b"x"), "extra.onnx is not in manifest.json"),
    "unlisted folder link": (lambda b: (b / "sub").symlink_to(b.parent), "sub is not in manifest.json"),
    "engine folder links out": (_engine_folder_links_out, "engines/cpu is a link out"),
    "engines link out": (lambda b: (b / "engines").symlink_to(b.parent), "engines is a link out"),
    "target not listed": (lambda b: edit(b, lambda d: d["files"].pop("target.onnx")), "lists no target.onnx"),
    "schema too new": (lambda b: edit(b, lambda d: d.update(schema=2)), "too new"),
    "schema too old": (lambda b: edit(b, lambda d: d.update(schema=0)), "too old"),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_refuses_a_tampered_directory(attack: str, bundle: Path) -> None:
    change, message = ATTACKS[attack]
    change(bundle)
    with pytest.raises(BundleError, match=message):
        Bundle.load(bundle)


def test_an_unreadable_file_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bundle / DATA).chmod(0)
    allowed = os.access
    # To root every file is readable.
    monkeypatch.setattr(os, "access", lambda path, mode: os.stat(path).st_mode & 0o444 != 0 and allowed(path, mode))
    with pytest.raises(BundleError, match=f"{DATA} in the bundle .* cannot be read"):
        Bundle.load(bundle)


def test_only_the_full_check_reads_the_data(bundle: Path) -> None:
    (bundle / DATA).write_bytes(b"\0" * 32)
    Bundle.load(bundle, check="fast")
    with pytest.raises(BundleError, match=f"{DATA} has sha256"):
        Bundle.load(bundle, check="full")


@pytest.mark.parametrize("path", ["nothing-here", "file"])
def test_refuses_what_is_not_a_directory(path: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match="no bundle at"):
        Bundle.load(tmp_path / path)


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 100_000, "\udcff"])
def test_generation_config_must_be_an_object(text: str, write: Callable[..., Bundle]) -> None:
    loaded = write(generation_config__json="{}")
    (loaded.path / "generation_config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BundleError, match=r"generation_config\.json"):
        _ = loaded.generation_config


@pytest.mark.parametrize("place", PLACES)
def test_refuses_external_data_outside_wherever_it_is(place: str, bundle: Path) -> None:
    replace_graph(bundle, PLACES[place]())
    with pytest.raises(BundleError, match=r"keeps tensors in '[ab]'"):
        Bundle.load(bundle)


@pytest.mark.parametrize(
    "location",
    ["/etc/passwd", "../outside", "./" + DATA, "sub/../" + DATA, "C:\\x", "", DATA + "\0", "*/_ORT_MEM_ADDR_/*", "new"],
)
def test_external_data_must_be_a_listed_file(location: str, bundle: Path) -> None:
    replace_graph(bundle, model(external(location)))
    with pytest.raises(BundleError, match=r"keeps tensors in .* expected a file beside it"):
        Bundle.load(bundle)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (external(offset=20, length=16), "ends at byte 36 of target.onnx.data, which has 32"),
        (external(offset=33), "ends at byte 33"),
        (external(offset=0, length=10**17), "ends at byte 1000000"),
        (external(offset=-1), "at offset '-1'"),
        (external(offset="0x10"), "at offset '0x10'"),
        (external(length="٣"), "of length"),
        (external(offset=10**30), "at offset '1000"),
        (external(None, offset=0), "external data with keys offset"),
        (external(None), "external data with keys none"),
        (external(basepath="/etc"), "external data with keys location, basepath"),
    ],
)
def test_external_data_must_lie_within_the_file(tensor: TensorProto, message: str, bundle: Path) -> None:
    replace_graph(bundle, model(tensor))
    with pytest.raises(BundleError, match=message):
        Bundle.load(bundle)


def left_over(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failed_write_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    with pytest.raises(error), BundleWriter(tmp_path / "bundle") as writer:
        writer.add_file("target.onnx", b"x")
        raise error
    assert left_over(tmp_path) == []


def test_what_would_not_load_is_not_written(write: Callable[..., Bundle], tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="keeps tensors"):
        write(graph=model(external("/etc/passwd")))
    assert left_over(tmp_path) == []


def test_an_interrupted_hash_leaves_nothing(
    write: Callable[..., Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(path: Path) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("specexport.runtime.bundle_writer.sha256", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write()
    assert left_over(tmp_path) == []


def test_refuses_to_overwrite_unless_told(bundle: Path, write: Callable[..., Bundle]) -> None:
    with pytest.raises(UsageError, match="exists"):
        write()
    write(overwrite=True, chat_template__jinja="new")
    assert Bundle.load(bundle, check="full").chat_template == "new"
    assert left_over(bundle.parent) == ["bundle"]


def test_a_failed_move_restores_the_old_bundle(
    bundle: Path, write: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if ".tmp-" in self.name:
            raise OSError("disk on fire")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="on fire"):
        write(overwrite=True, chat_template__jinja="new")
    assert Bundle.load(bundle, check="full").chat_template == "{{ x }}"
    assert left_over(bundle.parent) == ["bundle"]


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_never_replaces_what_is_not_a_bundle(kind: str, tmp_path: Path, write: Callable[..., Bundle]) -> None:
    destination = tmp_path / "bundle"
    (tmp_path / "elsewhere").mkdir()
    if kind == "folder":
        destination.mkdir()
        (destination / "thesis.tex").write_text("x")
    elif kind == "file":
        destination.write_text("x")
    else:
        destination.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"not a bundle|is a link"):
        write(overwrite=True)
    assert left_over(tmp_path) == ["bundle", "elsewhere"]


def test_files_have_ordinary_permissions(bundle: Path) -> None:
    plain = bundle.parent / "plain"
    plain.mkdir()
    assert bundle.stat().st_mode == plain.stat().st_mode
