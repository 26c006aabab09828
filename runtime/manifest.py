"""The manifest of a bundle: frozen records, read strictly from ``manifest.json``.

Everything here may come from a stranger, so it is read by :mod:`specexport.runtime.records`. Bounds are generous: they
stop absurd allocations, they do not describe real models.
"""

# ruff: noqa: RUF009 - the calls in dataclass defaults only build fields, once, with immutable readers

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from specexport.runtime.contract import CONTRACT_VERSION
from specexport.runtime.errors import BundleError
from specexport.runtime.records import (
    NAME,
    RecordError,
    choice,
    fail,
    flag,
    integer,
    number,
    optional,
    parse_json,
    plain,
    read,
    read_record,
    record,
    sequence,
    table,
    text,
)

SCHEMA_VERSION = 1
MANIFEST_NAME = "manifest.json"
#: Largest manifest that is read, in bytes.
MAX_MANIFEST_BYTES = 4 << 20
DTYPES = ("fp32", "fp16", "bf16")
#: Formats of weights.
PRECISIONS = (*DTYPES, "int8", "int4", "fp8", "nvfp4")
#: Those that only GPUs multiply with.
GPU_FORMATS = ("fp8", "nvfp4")
#: A compute capability of a device, such as 8.9.
CAPABILITY = re.compile(r"\d{1,2}\.\d")

_COMPONENT = re.compile(r"[A-Za-z0-9._+@=-]{1,128}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def _fail(where: str, value: Any, expected: str) -> BundleError:
    return BundleError(f"{MANIFEST_NAME}: {fail(where, value, expected)}")


def _option(value: Any, where: str) -> Any:
    """A drafter option: a scalar."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return integer(-(1 << 53), 1 << 53)(value, where)
    if isinstance(value, float) and math.isfinite(value):
        return value
    return text()(value, where)


def bundle_path(value: Any, where: str = "path") -> str:
    """Check a path inside a bundle: relative, ``/`` between plain ASCII components, the same file on every system.

    Raises:
        BundleError: absolute, a drive letter, a backslash, ``.`` or ``..``, a NUL or another odd character.
    """
    parts = value.split("/") if isinstance(value, str) and len(value) <= 240 else []
    if not parts or not all(_COMPONENT.fullmatch(part) and not part.endswith(".") for part in parts):
        raise _fail(where, value, "a relative path inside the bundle: letters, digits and ._+@=- between slashes")
    return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionInfo:
    """How a graph's numbers are stored.

    Attributes:
        weights: the layers' matrices. lm_head, embedding: those tables, the same where they are one.
        block: inputs that share a scale of the layers' matrices, 0 for a row. activations: of caches too.
        exact: on the CPU a row of logits does not depend on how many rows a call has.
    """

    weights: str = read(choice(*PRECISIONS))
    lm_head: str = read(choice(*PRECISIONS))
    embedding: str = read(choice(*PRECISIONS))
    block: int = read(integer(0, 1 << 20))
    activations: str = read(choice(*DTYPES))
    exact: bool = read(flag)

    @property
    def quantized(self) -> bool:
        """Whether a matrix product has codes, whose kernels may round the activations to 8 bits."""
        return not {self.weights, self.lm_head} <= {*DTYPES}


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

    architecture: str = read(text(64, NAME))
    layers: int = read(integer(1, 4096))
    kv_heads: int = read(integer(1, 4096))
    head_dim: int = read(integer(1, 8192))
    hidden_size: int = read(integer(1, 1 << 20))
    vocab_size: int = read(integer(1, 1 << 24))
    valid_vocab: int = read(integer(1, 1 << 24))
    slots: int = read(integer(1, 1 << 24))
    precision: PrecisionInfo = read(record(PrecisionInfo))
    prefill_chunk: int = read(integer(1, 1 << 20))
    features_size: int = read(integer(0, 1 << 22))
    windows: tuple[int | None, ...] = read(sequence(optional(integer(1, 1 << 31)), 4096))


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterInfo:
    """A drafter the bundle offers.

    Attributes:
        name: here. kind: what implements it. options: settings of that kind.
        graph: file of its graph, None for a lookup drafter.
        tree: rank paths of a static tree, None for a dynamic one or none.
        agreement: share of held-out tokens that its first choice was right on when it was trained, by depth from the
            first, given that the path so far is right; empty where nobody said.
    """

    name: str = read(text(64, NAME))
    kind: str = read(text(64, NAME))
    options: dict[str, bool | int | float | str | None] = read(table(text(64, NAME), _option, 64))
    graph: str | None = read(optional(bundle_path))
    tree: tuple[tuple[int, ...], ...] | None = read(optional(sequence(sequence(integer(0, 4095), 64), 4096)))
    agreement: tuple[float, ...] = read(sequence(number(0, 1), 64), ())

    @property
    def depth(self) -> int:
        """Depth of its deepest draft; 0 for a lookup, which has none of its own."""
        found = self.options.get("depth", self.options.get("heads"))
        return 0 if self.graph is None or type(found) is not int else found


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Where the weights came from: what the user named, its revision, fingerprints of target and, by name, heads.

    That of a draft model is among its options.
    """

    source: str = read(text(4096))
    revision: str | None = read(optional(text(256)))
    fingerprint: str = read(text(256))
    heads: dict[str, str] = read(table(text(64, NAME), text(256), 64))


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """Size in bytes and SHA-256 (lower-case hex) of a file."""

    bytes: int = read(integer(0, 1 << 44))
    sha256: str = read(text(64, _SHA256))


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything a bundle says about itself.

    Attributes:
        tools: versions of what wrote it, by distribution name. command: the command line.
        engine: entry point of the engine to use unless told otherwise. drafter: name of the drafter to use unless told
            otherwise (None: plain decoding). stop_ids: token ids that end a generation.
        files: what the bundle consists of, by path relative to it; the manifest itself is not in the list.
    """

    schema: int = read(integer(SCHEMA_VERSION, SCHEMA_VERSION))
    contract: int = read(integer(CONTRACT_VERSION, CONTRACT_VERSION))
    tools: dict[str, str] = read(table(text(64), text(128), 64))
    command: tuple[str, ...] = read(sequence(text(1 << 16, printable=False), 4096))
    target: TargetInfo = read(record(TargetInfo))
    engine: str = read(text(64, NAME))
    drafters: tuple[DrafterInfo, ...] = read(sequence(record(DrafterInfo), 64))
    drafter: str | None = read(optional(text(64, NAME)))
    stop_ids: tuple[int, ...] = read(sequence(integer(0, 1 << 24), 4096))
    lineage: Lineage = read(record(Lineage))
    files: dict[str, FileInfo] = read(table(bundle_path, record(FileInfo), 4096))

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
        try:
            manifest = read_record(Manifest, value)
        except RecordError as error:
            raise BundleError(f"{MANIFEST_NAME}: {error}: build the bundle again") from None
        manifest._check()
        return manifest

    @staticmethod
    def from_json(document: str | bytes) -> Manifest:
        """Parse and read; duplicate keys, NaN and absurd nesting are refused too."""
        try:
            value = parse_json(document)
        except RecordError as error:
            raise BundleError(f"{MANIFEST_NAME} is {error}: the bundle is damaged") from None
        return Manifest.from_dict(value)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object; ``from_dict`` of it is equal to this manifest."""
        value: dict[str, Any] = plain(self)
        return value

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
            if len(drafter.agreement) > drafter.depth:
                expected = f"at most {drafter.depth} numbers, one for each depth that it drafts"
                raise _fail(f"drafters.{drafter.name}.agreement", list(drafter.agreement), expected)
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
