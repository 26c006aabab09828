"""A bundle: one directory with everything a device needs, checked before anything in it is used.

Files the manifest lists are the bundle. Other files are refused, except what is added on a device (``profiles/``,
``engines/``, ``report.json``) or by people and hubs (``README.md``, ``LICENSE``, names that start with a dot). Who
reads those checks them; here no link may lead out, and ONNX graphs below ``engines/`` are scanned, listed or not.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specexport.runtime.errors import BundleError
from specexport.runtime.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES, Manifest, bundle_path
from specexport.runtime.onnx_scan import external_data

if TYPE_CHECKING:
    from specexport.runtime.tokenizer import Tokenizer

Check = Literal["fast", "full"]

TARGET_GRAPH = "target.onnx"
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"
REPORT = "report.json"
#: Files that every bundle lists.
REQUIRED = (TARGET_GRAPH, TOKENIZER)
#: Compiled plans and lowered graphs, by device or engine.
ENGINES = "engines"
#: Top-level names that need not be listed (see the module docstring).
UNLISTED = ("profiles", ENGINES, REPORT, "README.md", "LICENSE")
#: Largest text file (template, generation config) that is read, in bytes.
MAX_TEXT_BYTES = 1 << 20


@dataclass(frozen=True)
class Bundle:
    """An open, checked bundle. Make one with :meth:`load`.

    Attributes:
        path: absolute directory. manifest: what it says about itself.
    """

    path: Path
    manifest: Manifest

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, check: Check = "fast") -> Bundle:
        """Open a bundle and check that it is whole and stays inside its directory.

        The check sees the files as they are now: a directory that someone else can write to is not a safe bundle.

        Args:
            check: ``fast`` compares sizes and scans graph headers; ``full`` also hashes every file.

        Raises:
            BundleError: anything missing, truncated, changed, unlisted, outside the directory, or of another schema.
        """
        root = Path(path)
        if not root.is_dir():
            raise BundleError(f"no bundle at {str(root)!r}: expected a directory that 'specexport build' made")
        root = root.resolve()
        manifest = Manifest.from_json(_read_small(root, MANIFEST_NAME, MAX_MANIFEST_BYTES))
        check_files(root, manifest, check)
        return cls(root, manifest)

    def file(self, name: str) -> Path:
        """Absolute path of a listed file.

        Raises:
            BundleError: the bundle has no such file.
        """
        if name not in self.manifest.files:
            raise BundleError(f"the bundle {str(self.path)!r} has no {name}")
        return self.path / name

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, loaded on first use."""
        from specexport.runtime.tokenizer import Tokenizer

        return Tokenizer.from_directory(self.path)

    @cached_property
    def chat_template(self) -> str | None:
        """Text of the Jinja chat template, None when the model has none."""
        return self._text(CHAT_TEMPLATE)

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The model's own generation defaults; empty when it has none."""
        text = self._text(GENERATION_CONFIG)
        try:
            value = json.loads(text) if text is not None else {}
        except (ValueError, RecursionError) as error:
            raise BundleError(f"{GENERATION_CONFIG} is not valid JSON ({error}): build the bundle again") from None
        if not isinstance(value, dict):
            raise BundleError(f"{GENERATION_CONFIG} holds a {type(value).__name__}, expected an object")
        return value

    def _text(self, name: str) -> str | None:
        if name not in self.manifest.files:
            return None
        try:
            return _read_small(self.path, name, MAX_TEXT_BYTES).decode()
        except UnicodeDecodeError:
            raise BundleError(f"{name} is not UTF-8: build the bundle again") from None


def inside(root: Path, name: str) -> Path:
    """Absolute path of the regular file ``name`` of the bundle at ``root`` (itself resolved).

    Raises:
        BundleError: the name or a link leads out of the bundle, or there is no regular file.
    """
    path = root / bundle_path(name)
    try:
        real = path.resolve(strict=True)
        regular = stat.S_ISREG(real.stat().st_mode)
    except (OSError, RuntimeError):
        raise BundleError(f"{name} is missing from the bundle {str(root)!r}: copy or build it again") from None
    if not real.is_relative_to(root):
        raise BundleError(f"{name} is a link out of the bundle {str(root)!r}: copy it with its links followed (cp -rL)")
    if not regular:
        raise BundleError(f"{name} in the bundle {str(root)!r} is not a regular file")
    if not os.access(real, os.R_OK):
        raise BundleError(f"{name} in the bundle {str(root)!r} cannot be read: change its permissions")
    return path


def sha256(path: Path) -> str:
    """Lower-case hex digest of a file, read in small blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_files(root: Path, manifest: Manifest, check: Check) -> None:
    """Compare the directory ``root`` (resolved) with its manifest, as :meth:`Bundle.load` describes."""
    for name in REQUIRED:
        if name not in manifest.files:
            raise BundleError(f"{MANIFEST_NAME} lists no {name}: the bundle is incomplete, build it again")
    for name, info in manifest.files.items():
        path = inside(root, name)
        if (size := path.stat().st_size) != info.bytes:
            raise BundleError(f"{name} has {size} bytes, expected {info.bytes}: it is damaged, copy or build it again")
    for name in walk(root, root):
        if name == MANIFEST_NAME or name in manifest.files:
            continue
        if _may_be_unlisted(name):
            if (root / name).is_symlink():
                inside(root, name)
        else:
            raise BundleError(f"{name} is not in {MANIFEST_NAME}: remove it from the bundle {str(root)!r}")
    graphs = {name for name in [*manifest.files, *walk(root / ENGINES, root)] if name.endswith(".onnx")}
    for name in sorted(graphs):
        _check_graph(root, name, manifest)
    if check == "full":
        for name, info in manifest.files.items():
            if (digest := sha256(root / name)) != info.sha256:
                raise BundleError(f"{name} has sha256 {digest}, expected {info.sha256}: copy or build the bundle again")


def walk(folder: Path, root: Path) -> Iterator[str]:
    """Every file below ``folder``, by its path relative to ``root`` with ``/``; a link counts as a file."""
    for at, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(at) / name).is_symlink()]
        yield from ((Path(at) / name).relative_to(root).as_posix() for name in sorted(files + links))


def _may_be_unlisted(name: str) -> bool:
    first = name.split("/", 1)[0]
    return first in UNLISTED or first.startswith(".")


def _check_graph(root: Path, name: str, manifest: Manifest) -> None:
    """Every external tensor of a graph must lie within a listed file beside it (an engine's graph: or at the top)."""
    folder = name.rpartition("/")[0]
    for data in external_data(inside(root, name)):
        places = [f"{folder}/{data.location}" if folder else data.location]
        if folder.startswith(f"{ENGINES}/"):
            places.append(data.location)
        sizes = [manifest.files[place].bytes for place in places if place in manifest.files]
        if "/" in data.location or not sizes:
            raise BundleError(
                f"{name} keeps tensors in {data.location[:80]!r}, expected a file beside it that {MANIFEST_NAME} lists"
            )
        end = data.offset + (data.length or 0)
        if end > min(sizes):
            raise BundleError(
                f"{name} has a tensor that ends at byte {end} of {data.location}, which has {min(sizes)}: "
                "build the bundle again"
            )


def _read_small(root: Path, name: str, limit: int) -> bytes:
    path = inside(root, name)
    if (size := path.stat().st_size) > limit:
        raise BundleError(f"{name} has {size} bytes, expected at most {limit}")
    with path.open("rb") as file:
        return file.read(limit)
