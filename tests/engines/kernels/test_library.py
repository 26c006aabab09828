from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from specexport.engines.kernels import library
from specexport.engines.kernels.library import NAME, VARIABLE, kernels_library
from specexport.runtime.errors import UsageError


class Installed:
    """A distribution whose files are under ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def locate_file(self, path: str) -> Path:
        return self.root / path


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A package whose module is in ``tree/`` and which is installed in ``site/``, neither with a library."""
    places = {"tree": tmp_path / "tree", "site": tmp_path / "site" / "specexport" / "engines" / "kernels"}
    for place in places.values():
        place.mkdir(parents=True)
    monkeypatch.setattr(library, "__file__", str(places["tree"] / "library.py"))
    monkeypatch.setattr(library, "distribution", lambda name: Installed(tmp_path / "site"))
    monkeypatch.delenv(VARIABLE, raising=False)
    kernels_library.cache_clear()
    yield tmp_path
    kernels_library.cache_clear()


def made(folder: Path) -> Path:
    path = folder / NAME
    path.write_bytes(b"\x7fELF")
    return path


def test_none_where_nothing_was_built() -> None:
    assert kernels_library() is None


def test_none_where_nothing_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Installed:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(library, "distribution", missing)
    assert kernels_library() is None


def test_the_installed_one_serves_the_source_tree(tmp_path: Path) -> None:
    assert kernels_library() is None
    kernels_library.cache_clear()
    installed = made(tmp_path / "site" / "specexport" / "engines" / "kernels")
    assert kernels_library() == installed


def test_beside_the_module_comes_first(tmp_path: Path) -> None:
    made(tmp_path / "site" / "specexport" / "engines" / "kernels")
    beside = made(tmp_path / "tree")
    assert kernels_library() == beside


def test_the_variable_comes_before_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "tree")
    chosen = tmp_path / "mine.so"
    chosen.write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "mine.so")
    assert kernels_library() == chosen


def test_off_means_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "tree")
    monkeypatch.setenv(VARIABLE, "off")
    assert kernels_library() is None


@pytest.mark.parametrize("value", ["nowhere/kernels.so", ".", "on", "Off"])
def test_what_is_no_file_is_refused(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "tree")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, value)
    with pytest.raises(UsageError) as caught:
        kernels_library()
    message = str(caught.value)
    assert message.startswith(f"SPECEXPORT_KERNELS={value} is no file")
    assert message.endswith(f"give the path of a {NAME}, or off, or unset it")


def test_the_answer_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = made(tmp_path / "tree")
    assert kernels_library() == beside
    monkeypatch.setenv(VARIABLE, "off")
    assert kernels_library() == beside
