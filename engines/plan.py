"""The record beside a compiled plan: ``engines/<profile>/<graph>.plan.json`` of a bundle, read strictly.

A plan says nothing about itself that can be read without running it, and it is executable: whoever loads one compares
its record with the device, the module and the bundle first, and its digest (:func:`check_plan`) before deserialising.

    record = read_plan(folder, "target.onnx")
    check_plan(folder, record)
    profile = record.fit(T=5, R=5)            # the smallest profile that takes 5 nodes and 5 rows of logits
    shapes = {x.name: profile.shape(x) for x in record.inputs}
"""

# ruff: noqa: RUF009 - see specexport.runtime.records

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specexport.runtime.bundle import inside, sha256
from specexport.runtime.errors import BundleError, UsageError
from specexport.runtime.manifest import CAPABILITY, DTYPES, PRECISIONS, FileInfo
from specexport.runtime.records import (
    RecordError,
    choice,
    fail,
    flag,
    integer,
    number,
    parse_json,
    plain,
    read,
    read_record,
    record,
    sequence,
    table,
    text,
)
from specexport.runtime.replacing import replace_text

PLAN_SCHEMA = 1
#: Modules that compile plans.
MODULES = ("tensorrt", "tensorrt_rtx")
#: Endings of a plan, of its record and of its build log, beside each other.
PLAN_SUFFIX, RECORD_SUFFIX, LOG_SUFFIX = ".plan", ".plan.json", ".log"
#: Largest record that is read, in bytes.
MAX_RECORD_BYTES = 4 << 20
#: Element types of inputs and outputs.
KINDS = (*DTYPES, "int64", "int32", "int8", "fp8", "bool")

_DIM = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,15}")
_PLUGIN = re.compile(r"[A-Za-z0-9_]{0,64}::[A-Za-z0-9_]{1,64}:[0-9.]{1,16}")


#: A file name, never a path.
_file = text(128, re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*"))


def _dimension(value: Any, where: str) -> int | str:
    size: int | str = (text(16, _DIM) if isinstance(value, str) else integer(0, 1 << 31))(value, where)
    return size


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """An input or output: ``shape`` has numbers, and names of dimensions that each profile pins (T, A, O, R)."""

    name: str = read(text(128))
    dtype: str = read(choice(*KINDS))
    shape: tuple[int | str, ...] = read(sequence(_dimension, 8))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanProfile:
    """One optimisation profile: ``index`` in the plan, and what it pins each dimension to.

    A target's: T nodes, A rows to commit, O = A + T, R rows of logits (1 in the profile for prompts). A recurrent
    head's: A tokens. A graph without such dimensions has one profile that pins nothing.
    """

    index: int = read(integer(0, 255))
    dims: dict[str, int] = read(table(text(16, _DIM), integer(0, 1 << 24), 16))

    def shape(self, tensor: TensorInfo) -> tuple[int, ...]:
        """Shape of an input or output under this profile."""
        return tuple(self.dims[size] if isinstance(size, str) else size for size in tensor.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """What a plan is, was made from and needs.

    Attributes:
        graph: file of the bundle it was compiled from. plan: its file, beside the record; bytes, sha256: of it.
        sources: the graph's file and those that hold its tensors, as they were.
        module, version: what compiled it; TensorRT plans load with that version only. capabilities: such as ``8.6``,
            of the devices it runs on.
        slots: S, rows of each cache; 0 without caches. inputs, outputs: in graph order. aliases: output -> input whose
            memory it must be bound to.
        profiles: in order of their index.
        plugins: ``namespace::Name:version`` of those it needs.
        weights, activations: formats.
        layers: attention layers of the graph. attention_fused: of them, those compiled to the fused kernel or plugin.
        cache_tensors: caches. cache_in_place: of them, those updated without a copy.
        plain: compiled without fused operators, as plain products and a softmax (older TensorRT).
        build_seconds: of compiling. peak_rss_bytes: of the process that compiled.
    """

    schema: int = read(integer(PLAN_SCHEMA, PLAN_SCHEMA), PLAN_SCHEMA)
    graph: str = read(_file)
    plan: str = read(_file)
    bytes: int = read(integer(1, 1 << 44))
    sha256: str = read(text(64, re.compile(r"[0-9a-f]{64}")))
    sources: dict[str, FileInfo] = read(table(_file, record(FileInfo), 16))
    module: str = read(choice(*MODULES))
    version: str = read(text(32, re.compile(r"[0-9][0-9A-Za-z.+-]*")))
    capabilities: tuple[str, ...] = read(sequence(text(8, CAPABILITY), 16))
    slots: int = read(integer(0, 1 << 24))
    inputs: tuple[TensorInfo, ...] = read(sequence(record(TensorInfo), 1 << 14))
    outputs: tuple[TensorInfo, ...] = read(sequence(record(TensorInfo), 1 << 14))
    aliases: dict[str, str] = read(table(text(128), text(128), 1 << 14))
    profiles: tuple[PlanProfile, ...] = read(sequence(record(PlanProfile), 256))
    plugins: tuple[str, ...] = read(sequence(text(160, _PLUGIN), 16))
    weights: str = read(choice(*PRECISIONS))
    activations: str = read(choice(*DTYPES))
    layers: int = read(integer(0, 4096))
    attention_fused: int = read(integer(0, 4096))
    cache_tensors: int = read(integer(0, 8192))
    cache_in_place: int = read(integer(0, 8192))
    plain: bool = read(flag)
    build_seconds: float = read(number(0, 1e6))
    peak_rss_bytes: int = read(integer(0, 1 << 44))

    def __post_init__(self) -> None:
        if [profile.index for profile in self.profiles] != list(range(len(self.profiles))) or not self.profiles:
            raise fail("profiles", [profile.index for profile in self.profiles], "indices 0, 1, .. in order")
        named = {size for x in (*self.inputs, *self.outputs) for size in x.shape if isinstance(size, str)}
        for profile in self.profiles:
            if missing := sorted(named - profile.dims.keys()):
                raise fail(f"profiles[{profile.index}].dims", sorted(profile.dims), f"a size of {missing[0]}")
        inputs, outputs = ({x.name: x for x in group} for group in (self.inputs, self.outputs))
        if len(inputs) != len(self.inputs) or len(outputs) != len(self.outputs):
            raise fail("inputs or outputs", len(inputs), "different names")
        for output, source in self.aliases.items():
            new, old = outputs.get(output), inputs.get(source)
            if new is None or old is None or (new.dtype, new.shape) != (old.dtype, old.shape):
                raise fail(f"aliases.{output}", source, "an input of the output's type and shape")

    def fit(self, **least: int) -> PlanProfile:
        """The smallest profile whose dimensions are at least these, such as ``fit(T=5, R=5)``.

        Raises:
            UsageError: no profile is that large.
        """
        fitting = [p for p in self.profiles if all(p.dims.get(name, 0) >= size for name, size in least.items())]
        if not fitting:
            asked = ", ".join(f"{name} = {size}" for name, size in least.items())
            held = "; ".join(", ".join(f"{name} {size}" for name, size in p.dims.items()) for p in self.profiles)
            raise UsageError(f"{self.plan} has no profile for {asked}, only {held}: compile it with wider profiles")
        return min(fitting, key=lambda p: (sum(p.dims.values()), p.index))

    @property
    def fused(self) -> bool:
        """Whether every attention and every cache update compiled to what is meant for them."""
        return (self.attention_fused, self.cache_in_place) == (self.layers, self.cache_tensors)


def plan_names(graph: str) -> tuple[str, str, str]:
    """File names of the plan of a graph, its record and its build log: ``target.plan``, ..."""
    stem = graph.removesuffix(".onnx")
    return stem + PLAN_SUFFIX, stem + RECORD_SUFFIX, stem + LOG_SUFFIX


def plan_graphs(folder: Path) -> list[str]:
    """Graphs that a folder has plans of, by the file of the graph: ``target.onnx``, ..."""
    return sorted(path.name.removesuffix(RECORD_SUFFIX) + ".onnx" for path in folder.glob(f"*{RECORD_SUFFIX}"))


def read_plan(folder: Path, graph: str) -> PlanRecord:
    """The record of the plan of ``graph`` in ``folder`` (``bundle/engines/<profile>``).

    Raises:
        BundleError: missing, damaged, hostile or of another version.
    """
    name = plan_names(graph)[1]
    path = inside(folder.resolve(), name)
    with path.open("rb") as stream:
        content = stream.read(MAX_RECORD_BYTES + 1)
    if len(content) > MAX_RECORD_BYTES:
        raise BundleError(f"{name} has more than {MAX_RECORD_BYTES} bytes: compile the bundle again")
    try:
        found = read_record(PlanRecord, parse_json(content))
    except RecordError as error:
        raise BundleError(f"{name}: {error}; compile the bundle again") from None
    if (found.graph, found.plan) != (graph, plan_names(graph)[0]):
        raise BundleError(f"{name} is the record of {found.plan}, from {found.graph}: compile the bundle again")
    return found


def write_plan(folder: Path, found: PlanRecord) -> Path:
    """Put a record beside its plan, whole or not at all; returns where."""
    path = folder / plan_names(found.graph)[1]
    replace_text(path, json.dumps(plain(found), indent=1, allow_nan=False) + "\n")
    return path


def check_plan(folder: Path, found: PlanRecord) -> Path:
    """Compare a plan with its record, byte for byte; returns where it lies.

    Raises:
        BundleError: missing, of another size or digest: it must not be deserialised.
    """
    path = inside(folder.resolve(), found.plan)
    if (size := path.stat().st_size) != found.bytes:
        raise BundleError(f"{found.plan} has {size} bytes, its record says {found.bytes}: compile the bundle again")
    if (digest := sha256(path)) != found.sha256:
        raise BundleError(f"{found.plan} has sha256 {digest}, its record says {found.sha256}: compile the bundle again")
    return path


def check_sources(found: PlanRecord, files: dict[str, FileInfo]) -> None:
    """Compare what a plan was compiled from with the files that a bundle's manifest lists.

    Raises:
        BundleError: the bundle was built again since.
    """
    stale: Iterable[str] = (name for name, info in found.sources.items() if files.get(name) != info)
    if (name := next(iter(stale), None)) is not None:
        raise BundleError(f"{found.plan} was compiled from another {name} than the bundle's: compile it again")
