"""Opening a checkpoint: a Hugging Face directory, a hub id, or a GGUF file, behind one record."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from specexport.exporter.quantize.detect import open_weights
from specexport.exporter.shards import StoredWeights, member, open_shards, read_json
from specexport.runtime.errors import CheckpointError

if TYPE_CHECKING:
    from specexport.exporter.gguf_file import GgufFile

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
#: Names of weights on the hub, best first.
WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
_TEXT_LIMIT = 256 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A target model as it lies on disk.

    Attributes:
        source: what the user named.
        directory: the Hugging Face directory, or the one the GGUF file is in.
        kind: ``hf`` or ``gguf``.
        config: the raw ``config.json``; for GGUF one made from its metadata. ``read_config`` reads it.
        weights: every tensor, by Hugging Face name.
        gguf: the parsed GGUF file, None for ``hf``.
        quantization: how it is quantised, in words; None if it is not. ``weights`` then is a ``QuantizedSource``.
        notes: what a user should know of that, one line each.
    """

    source: str
    directory: Path
    kind: Literal["hf", "gguf"]
    config: dict[str, Any]
    weights: StoredWeights
    gguf: GgufFile | None = None
    quantization: str | None = None
    notes: tuple[str, ...] = ()

    def file(self, name: str) -> Path | None:
        """A tokenizer or generation file beside the weights; None if missing, and always for GGUF, whose directory
        may hold other models' files.

        Raises:
            CheckpointError: the file links out of the checkpoint.
        """
        return None if self.kind == "gguf" else member(self.directory, name)

    def json(self, name: str) -> dict[str, Any] | None:
        """The JSON object in :meth:`file`, None if missing. Raises CheckpointError if it is not one."""
        return None if self.kind == "gguf" else side_file(self.directory, name)

    def text(self, name: str) -> str | None:
        """:meth:`file` as UTF-8 text, None if missing. Raises CheckpointError if it is not."""
        path = self.file(name)
        return None if path is None else read_text(path)

    def fingerprint(self, *, fast: bool = False, advance: Callable[[int], object] = lambda _: None) -> str:
        """What this checkpoint is: the config and every tensor.

        Args:
            fast: hash file sizes and headers (names, dtypes, shapes, offsets) instead of contents. It tells models
                apart, not fine-tunes of one model.
            advance: called with the number of bytes hashed.

        Returns:
            ``sha256:<hex>`` over the canonical config and, sorted by name, each tensor's name, stored dtype, shape and
            content: the same however the tensors are sharded. ``sha256-headers:<hex>`` if ``fast``.
        """
        total = hashlib.sha256(json.dumps(self.config, sort_keys=True, ensure_ascii=True).encode())
        if fast:
            for header in self.weights.headers():
                total.update(hashlib.sha256(header).digest())
            return f"sha256-headers:{total.hexdigest()}"
        for name in sorted(self.weights.names()):
            dtype, pieces = self.weights.stored(name)
            content = hashlib.sha256()
            for piece in pieces:
                content.update(piece)
                advance(len(piece))
            record = [name, dtype, list(self.weights.shape(name)), content.hexdigest()]
            total.update(json.dumps(record).encode())
        return f"sha256:{total.hexdigest()}"


def open_checkpoint(
    source: str, *, revision: str | None = None, offline: bool = False, option: str = "--revision"
) -> Checkpoint:
    """Open a local directory, a ``.gguf`` file or a hub id.

    Args:
        revision: branch, tag or commit on the hub. option: what the user gave it with.
        offline: use the hub cache only, as HF_HUB_OFFLINE=1 does.

    Raises:
        CheckpointError: nothing there, no such repository, or files that are damaged, incomplete or hostile.
    """
    path = Path(source).expanduser()
    if revision is not None and path.exists():
        raise CheckpointError(f"{source} is a local path; {option} {revision} is for hub ids")
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{source}: expected a directory, a .gguf file or a hub id such as org/name")
        return _open_gguf(source, path)
    if not path.is_dir():
        if not HUB_ID.fullmatch(source):
            raise CheckpointError(f"{source}: no such directory or .gguf file, and not a hub id such as org/name")
        path = download(source, revision, offline)
    config = member(path, "config.json")
    if config is None:
        hint = next((f"; pass {found} itself" for found in sorted(path.glob("*.gguf"))), "")
        raise CheckpointError(f"{path}: no config.json, so not a Hugging Face checkpoint{hint}")
    opened = open_weights(read_json(config), partial(side_file, path), partial(open_shards, path))
    return Checkpoint(
        source, path, "hf", opened.config, opened.weights, quantization=opened.quantization, notes=opened.notes
    )


def side_file(directory: Path, name: str) -> dict[str, Any] | None:
    """A JSON file of a checkpoint directory, None if there is none. Raises CheckpointError if it is not one."""
    path = member(directory, name)
    return None if path is None else read_json(path)


def read_text(path: Path) -> str:
    """A text file of bounded size. Raises CheckpointError if it is larger, or not UTF-8."""
    if path.stat().st_size > _TEXT_LIMIT:
        raise CheckpointError(f"{path}: more than {_TEXT_LIMIT} bytes")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 ({error.reason} at byte {error.start})") from None


def _open_gguf(source: str, path: Path) -> Checkpoint:
    from specexport.exporter.gguf import GgufSource, hf_config
    from specexport.exporter.gguf_file import read_gguf
    from specexport.exporter.quantize.gguf_blocks import describe
    from specexport.exporter.quantize.stored import FLOATS

    file = read_gguf(path)
    config = hf_config(file)
    types = Counter(tensor.type_name for tensor in file.tensors.values() if tensor.type_name not in FLOATS)
    words = describe(types) if types else None
    return Checkpoint(source, path.parent, "gguf", config, GgufSource(file, config), file, words)


def download(source: str, revision: str | None, offline: bool, weights: tuple[str, ...] = WEIGHTS) -> Path:
    """Snapshot of a hub repository: its JSON files, templates, and the first of the ``weights`` patterns it has.

    Raises:
        CheckpointError: no such repository or revision, no access, or no network.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    def fetch(*patterns: str) -> Path:
        return Path(
            snapshot_download(source, revision=revision, local_files_only=offline, allow_patterns=list(patterns))
        )

    where = source if revision is None else f"{source} at {revision}"
    try:
        for pattern in weights:
            path = fetch("*.json", "*.jinja", pattern)
            if any(path.glob(pattern)):
                break
    except GatedRepoError:
        raise CheckpointError(f"{where}: gated; accept its terms on the hub, then run: hf auth login") from None
    except RevisionNotFoundError:
        raise CheckpointError(f"{source}: no revision {revision} on the hub") from None
    except RepositoryNotFoundError:
        raise CheckpointError(f"{source}: no such repository on the hub (or it is private: hf auth login)") from None
    except LocalEntryNotFoundError:
        raise CheckpointError(
            f"{where}: not in the local hub cache, and the hub is offline or out of reach; pass a local directory"
        ) from None
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:160]
        raise CheckpointError(f"{where}: cannot be fetched from the hub ({reason})") from None
    return path
