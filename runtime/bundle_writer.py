"""Writing a bundle so that it exists whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from specexport.runtime.bundle import Bundle, check_files, inside, sha256, walk
from specexport.runtime.errors import BundleError, UsageError
from specexport.runtime.manifest import MANIFEST_NAME, FileInfo, Manifest


class BundleWriter:
    """Collects a bundle in a hidden directory beside ``destination``; :meth:`finish` moves it into place.

    Use as a context manager. Leaving without ``finish``, by an exception or Ctrl-C too, removes what was written. Large
    files can be written straight into :attr:`path`.

    Args:
        destination: directory to make. overwrite: replace a bundle (nothing else) that is there.

    Raises:
        UsageError: on entering, something is in the way.
    """

    def __init__(self, destination: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.destination = Path(destination).absolute()
        self.overwrite = overwrite
        self.path = self._beside("tmp")

    def __enter__(self) -> Self:
        self._check_destination()
        try:
            self.destination.parent.mkdir(parents=True, exist_ok=True)
            self.path.mkdir()
        except OSError as error:
            raise UsageError(f"cannot write a bundle to {str(self.destination)!r}: {error.strerror}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def add_file(self, name: str, content: str | bytes | Path) -> Path:
        """Write text (as UTF-8), bytes, or a copy of the file at a path as ``name``; returns where it lies."""
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, target)
        else:
            target.write_bytes(content.encode() if isinstance(content, str) else content)
        return target

    def finish(self, manifest: Manifest) -> Bundle:
        """Hash what was written, check it as a reader would, force it to disk and move it into place.

        Args:
            manifest: everything but ``files``, which is replaced.

        Raises:
            BundleError: the result would not load. UsageError: something appeared at the destination meanwhile.
        """
        root = self.path.resolve()
        files = {}
        for name in walk(root, root):
            path = inside(root, name)
            files[name] = FileInfo(bytes=path.stat().st_size, sha256=sha256(path))
        manifest = Manifest.from_dict(replace(manifest, files=files).to_dict())
        check_files(root, manifest, "fast")
        self.add_file(MANIFEST_NAME, json.dumps(manifest.to_dict(), indent=2, allow_nan=False) + "\n")
        for name in [*files, MANIFEST_NAME]:
            _sync(self.path / name)
        for folder, _, _ in os.walk(self.path):
            _sync(Path(folder))
        self._move()
        return Bundle(self.destination.resolve(), manifest)

    def _move(self) -> None:
        self._check_destination()
        old = self._beside("old")
        if self.destination.exists():
            self.destination.rename(old)
        try:
            self.path.rename(self.destination)
        except BaseException:
            if old.exists():
                old.rename(self.destination)
            raise
        _sync(self.destination.parent)
        shutil.rmtree(old, ignore_errors=True)

    def _check_destination(self) -> None:
        shown = repr(str(self.destination))
        if self.destination.is_symlink():
            raise UsageError(f"{shown} is a link: name the directory it points to")
        if not self.destination.exists():
            return
        if not self.overwrite:
            raise UsageError(f"{shown} exists: choose another output or allow it to be replaced with --overwrite")
        if not self.destination.is_dir() or not (
            (self.destination / MANIFEST_NAME).is_file() or not any(self.destination.iterdir())
        ):
            raise UsageError(f"{shown} is not a bundle, so it is not replaced: choose another output")

    def _beside(self, kind: str) -> Path:
        return self.destination.with_name(f".{self.destination.name}.{kind}-{secrets.token_hex(4)}")


def replace_text(path: Path, content: str) -> None:
    """Write a text file whole or not at all; what a full disk or an interrupt leaves half done is removed."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        temporary.write_text(content, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Force a file or directory to disk (directories only where the system can)."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError as error:
        if path.is_dir():
            return
        raise BundleError(f"cannot write {str(path)!r}: {error.strerror}") from None
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
