"""The manifest of a bundle: frozen records, read strictly from ``manifest.json``.

Everything here may come from a stranger, so every number, string and list has a bound, unknown keys are refused, and
no value is converted silently. Bounds are generous: they stop absurd allocations, they do not describe real models.
"""

# ruff: noqa: RUF009 - the calls in dataclass defaults only build fields, once, with immutable readers

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from specexport.runtime.contract import CONTRACT_VERSION
from specexport.runtime.errors import BundleError

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
#: Largest manifest that is read, in bytes.
MAX_MANIFEST_BYTES = 4 << 20
DTYPES = ("fp32", "fp16", "bf16")

_COMPONENT = re.compile(r"[A-Za-z0-9._+@=-]{1,128}")
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

#: Checks a JSON value found at a dotted place and returns what the record stores.
Reader = Callable[[Any, str], Any]
_Record = TypeVar("_Record")


def _fail(where: str, value: Any, expected: str) -> BundleError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return BundleError(f"{MANIFEST_NAME}: {where} is {shown}, expected {expected}")


def _read(reader: Reader) -> Any:
    """A dataclass field that is read with ``reader``."""
    return field(metadata={"read": reader})


def _integer(low: int, high: int) -> Reader:
    def read(value: Any, where: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise _fail(where, value, f"an integer from {low} to {high}")
        return value

    return read


def _text(limit: int = 512, pattern: re.Pattern[str] | None = None, printable: bool = True) -> Reader:
    def read(value: Any, where: str) -> str:
        if not isinstance(value, str) or len(value) > limit:
            raise _fail(where, value, f"a string of at most {limit} characters")
        if pattern is not None and not pattern.fullmatch(value):
            raise _fail(where, value, f"a match of {pattern.pattern}")
        if printable and not value.isprintable():
            raise _fail(where, value, "printable characters only")
        return value

    return read


def _choice(*values: str) -> Reader:
    def read(value: Any, where: str) -> str:
        if value not in values:
            raise _fail(where, value, f"one of {', '.join(values)}")
        return str(value)

    return read


def _optional(reader: Reader) -> Reader:
    return lambda value, where: None if value is None else reader(value, where)


def _list(reader: Reader, limit: int) -> Reader:
    def read(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) > limit:
            raise _fail(where, value, f"a list of at most {limit} entries")
        return tuple(reader(entry, f"{where}[{index}]") for index, entry in enumerate(value))

    return read


def _table(key: Reader, reader: Reader, limit: int) -> Reader:
    def read(value: Any, where: str) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) > limit:
            raise _fail(where, value, f"an object of at most {limit} entries")
        return {key(name, f"{where} key"): reader(entry, f"{where}.{name}") for name, entry in value.items()}

    return read


def _record(cls: type[Any]) -> Reader:
    return lambda value, where: read_record(cls, value, where)


def _option(value: Any, where: str) -> Any:
    """A drafter option: a scalar."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return _integer(-(1 << 53), 1 << 53)(value, where)
    if isinstance(value, float) and math.isfinite(value):
        return value
    return _text()(value, where)


def bundle_path(value: Any, where: str = "path") -> str:
    """Check a path inside a bundle: relative, ``/`` between plain ASCII components, the same file on every system.

    Raises:
        BundleError: absolute, a drive letter, a backslash, ``.`` or ``..``, a NUL or another odd character.
    """
    parts = value.split("/") if isinstance(value, str) and len(value) <= 240 else []
    if not parts or not all(_COMPONENT.fullmatch(part) and not part.endswith(".") for part in parts):
        raise _fail(where, value, "a relative path inside the bundle: letters, digits and ._+@=- between slashes")
    return str(value)


def read_record(cls: type[_Record], value: Any, where: str) -> _Record:
    """An instance of the dataclass ``cls`` from a JSON object that has exactly its fields."""
    if not isinstance(value, dict):
        raise _fail(where, value, "an object")
    known = {entry.name: entry.metadata["read"] for entry in fields(cls)}  # type: ignore[arg-type]
    prefix = "" if where == "manifest" else f"{where}."
    if unknown := sorted(value.keys() - known.keys()):
        raise BundleError(f"{MANIFEST_NAME}: unknown key {prefix}{unknown[0]!r}, expected {', '.join(known)}")
    if missing := sorted(known.keys() - value.keys()):
        raise BundleError(f"{MANIFEST_NAME}: missing key {prefix}{missing[0]}: the file is damaged, build it again")
    return cls(**{name: reader(value[name], prefix + name) for name, reader in known.items()})


def _plain(value: Any) -> Any:
    """JSON form of a record or of anything it holds."""
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {entry.name: _plain(getattr(value, entry.name)) for entry in fields(value)}
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetInfo:
    """Dimensions of the target graph.

    Attributes:
        vocab_size: V, width of a row of logits (padding included). valid_vocab: ids the tokenizer can decode; ids
            from there to V are never sampled.
        slots: S, cache rows. prefill_chunk: most prompt tokens in one call.
        features_size: F, 0 when the graph has no ``features`` output.
        windows: sliding window of each layer in tokens, None for full attention.
    """

    architecture: str = _read(_text(64, _NAME))
    layers: int = _read(_integer(1, 4096))
    kv_heads: int = _read(_integer(1, 4096))
    head_dim: int = _read(_integer(1, 8192))
    hidden_size: int = _read(_integer(1, 1 << 20))
    vocab_size: int = _read(_integer(1, 1 << 24))
    valid_vocab: int = _read(_integer(1, 1 << 24))
    slots: int = _read(_integer(1, 1 << 24))
    dtype: str = _read(_choice(*DTYPES))
    prefill_chunk: int = _read(_integer(1, 1 << 20))
    features_size: int = _read(_integer(0, 1 << 22))
    windows: tuple[int | None, ...] = _read(_list(_optional(_integer(1, 1 << 31)), 4096))


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterInfo:
    """A drafter the bundle offers.

    Attributes:
        name: here. kind: what implements it. options: settings of that kind.
        graph: file of its graph, None for a lookup drafter.
        tree: rank paths of a static tree, None for a dynamic one or none.
    """

    name: str = _read(_text(64, _NAME))
    kind: str = _read(_text(64, _NAME))
    options: dict[str, bool | int | float | str | None] = _read(_table(_text(64, _NAME), _option, 64))
    graph: str | None = _read(_optional(bundle_path))
    tree: tuple[tuple[int, ...], ...] | None = _read(_optional(_list(_list(_integer(0, 4095), 64), 4096)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Where the weights came from: what the user named, its revision, and fingerprints of the target and the head."""

    source: str = _read(_text(4096))
    revision: str | None = _read(_optional(_text(256)))
    fingerprint: str = _read(_text(256))
    head_fingerprint: str | None = _read(_optional(_text(256)))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """Size in bytes and SHA-256 (lower-case hex) of a file."""

    bytes: int = _read(_integer(0, 1 << 44))
    sha256: str = _read(_text(64, _SHA256))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything a bundle says about itself.

    Attributes:
        tools: versions of what wrote it, by distribution name. command: the command line.
        engine: entry point of the engine to use unless told otherwise. drafter: name of the drafter to use unless told
            otherwise (None: plain decoding). stop_ids: token ids that end a generation.
        files: what the bundle consists of, by path relative to it; the manifest itself is not in the list.
    """

    schema: int = _read(_integer(SCHEMA_VERSION, SCHEMA_VERSION))
    contract: int = _read(_integer(CONTRACT_VERSION, CONTRACT_VERSION))
    tools: dict[str, str] = _read(_table(_text(64), _text(128), 64))
    command: tuple[str, ...] = _read(_list(_text(1 << 16, printable=False), 4096))
    target: TargetInfo = _read(_record(TargetInfo))
    engine: str = _read(_text(64, _NAME))
    drafters: tuple[DrafterInfo, ...] = _read(_list(_record(DrafterInfo), 64))
    drafter: str | None = _read(_optional(_text(64, _NAME)))
    stop_ids: tuple[int, ...] = _read(_list(_integer(0, 1 << 24), 4096))
    lineage: Lineage = _read(_record(Lineage))
    files: dict[str, FileInfo] = _read(_table(bundle_path, _record(FileInfo), 4096))

    @staticmethod
    def from_dict(value: Any) -> Manifest:
        """Read the JSON object of a manifest.

        Raises:
            BundleError: another schema or contract version, an unknown or missing key, a value of the wrong type or
                out of bounds, or values that contradict each other.
        """
        if not isinstance(value, dict):
            raise _fail("it", value, "an object")
        _check_version("schema", value, SCHEMA_VERSION)
        _check_version("contract", value, CONTRACT_VERSION)
        manifest = read_record(Manifest, value, "manifest")
        manifest._check()
        return manifest

    @staticmethod
    def from_json(text: str | bytes) -> Manifest:
        """Parse and read; duplicate keys, NaN and absurd nesting are refused too."""
        try:
            value = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise BundleError(f"{MANIFEST_NAME} is not valid JSON ({error}): the bundle is damaged") from None
        return Manifest.from_dict(value)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object; ``from_dict`` of it is equal to this manifest."""
        plain: dict[str, Any] = _plain(self)
        return plain

    def _check(self) -> None:
        """Agreements between fields."""
        target = self.target
        if target.valid_vocab > target.vocab_size:
            raise _fail("target.valid_vocab", target.valid_vocab, f"at most target.vocab_size, {target.vocab_size}")
        if target.prefill_chunk > target.slots:
            raise _fail("target.prefill_chunk", target.prefill_chunk, f"at most target.slots, {target.slots}")
        if len(target.windows) != target.layers:
            raise _fail("target.windows", len(target.windows), f"one entry for each of {target.layers} layers")
        if late := [token for token in self.stop_ids if token >= target.valid_vocab]:
            raise _fail("stop_ids", late[0], f"ids below target.valid_vocab, {target.valid_vocab}")
        names = [drafter.name for drafter in self.drafters]
        if len(set(names)) != len(names):
            raise _fail("drafters", names, "different names")
        for drafter in self.drafters:
            if drafter.graph is not None and drafter.graph not in self.files:
                raise _fail(f"drafters.{drafter.name}.graph", drafter.graph, "a file that the manifest lists")
        if self.drafter is not None and self.drafter not in names:
            raise _fail("drafter", self.drafter, f"null or one of {', '.join(names) or 'no drafters'}")
        if len({path.lower() for path in self.files}) != len(self.files):
            raise _fail("files", sorted(self.files), "paths that differ in more than case")
        if MANIFEST_NAME in self.files:
            raise _fail("files", MANIFEST_NAME, "every file but the manifest itself")


def _check_version(key: str, value: dict[str, Any], ours: int) -> None:
    """Refuse another version before its unknown keys cause a less helpful error."""
    theirs = value.get(key)
    if type(theirs) is not int or theirs < 0:
        raise _fail(key, theirs, f"the integer {ours}")
    tools = value.get("tools")
    writer = tools.get("specexport") if isinstance(tools, dict) else None
    by = f" written by specexport {writer}" if isinstance(writer, str) and _COMPONENT.fullmatch(writer) else ""
    if theirs > ours:
        raise BundleError(f"bundle {key} {theirs}{by} is too new: this specexport reads {ours}, so upgrade specexport")
    if theirs < ours:
        raise BundleError(f"bundle {key} {theirs}{by} is too old: this specexport reads {ours}, so build it again")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key occurs twice")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")
