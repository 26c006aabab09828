"""Writing a bundle so that it exists whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from specexport.runtime.bundle import Bundle, check_files, inside, sha256, walk
from specexport.runtime.errors import BundleError, UsageError
from specexport.runtime.manifest import MANIFEST_NAME, FileInfo, Manifest
from specexport.runtime.replacing import NewDirectory, clear


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
        self._new = NewDirectory(self.destination)
        self.path = self._new.path

    def __enter__(self) -> Self:
        try:
            self.destination.parent.mkdir(parents=True, exist_ok=True)
            clear(self.destination)
            self._check_destination()
            self._new.__enter__()
        except OSError as error:
            raise UsageError(f"cannot write a bundle to {str(self.destination)!r}: {error.strerror}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._new.__exit__(kind, error, trace)

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
        self._check_destination()
        self._new.move()
        _sync(self.destination.parent)
        return Bundle(self.destination.resolve(), manifest)

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
