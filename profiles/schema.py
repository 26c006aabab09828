"""Profiles: what a device can do, in ``<device>.yaml``, read strictly.

A profile pins the static shapes of an engine (windows S, widths T, prefill chunk) and gives the figures that costs and
memory are predicted from. ``extends`` names a profile that it changes: mappings are merged key by key, anything else is
replaced. Every file names the public source of its figures.
"""

# ruff: noqa: RUF009 - see specexport.runtime.records

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from specexport.runtime.errors import UsageError
from specexport.runtime.manifest import CAPABILITY, PRECISIONS
from specexport.runtime.records import (
    NAME,
    RecordError,
    choice,
    fail,
    integer,
    number,
    optional,
    read,
    read_record,
    record,
    sequence,
    table,
    text,
)

BACKENDS = ("onnxruntime-cpu", "onnxruntime-cuda", "tensorrt", "tensorrt-rtx")
#: Largest profile that is read, in bytes, and longest chain of ``extends``.
MAX_BYTES, MAX_EXTENDS = 1 << 16, 8
_SUFFIXES = (".yaml", ".yml")


class ProfileError(UsageError):
    """A profile that does not exist or is not one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """How much of the stated rates real kernels reach.

    Attributes:
        bandwidth, compute: share of memory bandwidth and of the arithmetic rate that matrix products reach.
        compute_in: the latter for products computed in some precisions, where it is another.
        attention: share of what matrix products reach that attention over the cache does.
        overlap: exponent p of ``time = (memory^p + compute^p)^(1/p)``: 1 where reading and computing take turns, large
            where they overlap perfectly.
    """

    bandwidth: float = read(number(0.01, 1))
    compute: float = read(number(0.01, 1))
    compute_in: dict[str, float] | None = read(
        optional(table(choice(*PRECISIONS), number(0.01, 1), len(PRECISIONS))), None
    )
    attention: float = read(number(0.01, 1))
    overlap: float = read(number(1, 64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """How fast a device reads and computes with one kind of kernels.

    Attributes:
        bandwidth_gb_s: peak of the memory, in 1e9 bytes a second.
        arithmetic_tops: peak dense rates in 1e12 operations a second by precision, a multiply-add counting two.
        computes_in: precision that products are computed in, by that of the weights, where it is another one.
        call_us, layer_us: time of an empty call, and of launching the kernels of a layer, in microseconds.
    """

    bandwidth_gb_s: float = read(number(1e-3, 1e6))
    arithmetic_tops: dict[str, float] = read(table(choice(*PRECISIONS), number(1e-6, 1e6), len(PRECISIONS)))
    computes_in: dict[str, str] = read(table(choice(*PRECISIONS), choice(*PRECISIONS), len(PRECISIONS)))
    call_us: float = read(number(0, 1e6))
    layer_us: float = read(number(0, 1e6))
    efficiency: Efficiency = read(record(Efficiency))

    def compute_precision(self, weights: str) -> str:
        """What products with weights of a precision are computed in."""
        return self.computes_in.get(weights, weights)

    def rate(self, weights: str) -> float:
        """Peak operations a second with weights of a precision.

        Raises:
            ProfileError: the device has no rate for it.
        """
        computed = self.compute_precision(weights)
        if computed not in self.arithmetic_tops:
            raise ProfileError(
                f"the profile has no rate for {computed}: the device computes in {', '.join(self.arithmetic_tops)}"
            )
        return self.arithmetic_tops[computed] * 1e12

    def reached(self, weights: str) -> float:
        """Operations a second that products with weights of a precision reach.

        Raises:
            ProfileError: see :meth:`rate`.
        """
        share = self.efficiency
        return self.rate(weights) * (share.compute_in or {}).get(self.compute_precision(weights), share.compute)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile(Rates):
    """One device, with the rates of the engine's own kernels.

    Attributes:
        title: the device in words: card, board, cores. sources: where the figures are from.
        compute_capability: of CUDA devices, such as ``8.7``.
        memory_gib, usable: device memory, and the share of it that a model may take (boards share it with the system).
        threads: for CPUs, how many threads the rates are for.
        kernels: rates of graphs that our own kernels run (``engines/kernels``), which multiply with int8 and int4
            codes and attend to a cache in fp32; None where there are no such kernels.
        precision: to build with by default. windows: S. widths: T, the root included. prefill_chunk: prompt tokens.
    """

    title: str = read(text(200))
    backend: str = read(choice(*BACKENDS))
    compute_capability: str | None = read(optional(text(8, CAPABILITY)), None)
    memory_gib: float = read(number(1e-3, 1 << 16))
    usable: float = read(number(0.05, 1))
    threads: int | None = read(optional(integer(1, 1024)), None)
    kernels: Rates | None = read(optional(record(Rates)), None)
    precision: str = read(choice(*PRECISIONS))
    windows: tuple[int, ...] = read(sequence(integer(8, 1 << 24), 64))
    widths: tuple[int, ...] = read(sequence(integer(1, 4096), 64))
    prefill_chunk: int = read(integer(1, 1 << 20))
    sources: tuple[str, ...] = read(sequence(text(500), 32))
    name: str = field(default="", metadata={"read": text(64)})

    def __post_init__(self) -> None:
        if not self.windows or list(self.windows) != sorted(set(self.windows)):
            raise fail("windows", list(self.windows), "numbers of slots, ascending")
        if not self.widths or list(self.widths) != sorted(set(self.widths)) or self.widths[0] != 1:
            raise fail("widths", list(self.widths), "numbers of nodes from 1 on, ascending")
        if not self.sources:
            raise fail("sources", [], "at least one public source of the figures")
        self._check("", self, (self.precision, *self.computes_in))
        if self.kernels is not None:
            self._check("kernels.", self.kernels, ("fp32", "int8", "int4"))

    def _check(self, prefix: str, rates: Rates, needed: tuple[str, ...]) -> None:
        for weights in needed:
            if rates.compute_precision(weights) not in rates.arithmetic_tops:
                raise fail(
                    f"{prefix}arithmetic_tops",
                    sorted(rates.arithmetic_tops),
                    f"the rate of {rates.compute_precision(weights)}, which {weights} weights are computed in",
                )

    def rates(self, kernels: bool) -> Rates:
        """Those of graphs that our own kernels run, if they do; else the engine's."""
        return self.kernels if kernels and self.kernels is not None else self

    @property
    def memory_bytes(self) -> int:
        """Bytes that a model may take."""
        return int(self.memory_gib * self.usable * (1 << 30))


def profile_names() -> list[str]:
    """The profiles that come with the package."""
    return sorted(path.name.removesuffix(".yaml") for path in _folder().iterdir() if path.name.endswith(".yaml"))


def load_profile(name: str) -> Profile:
    """A profile of the package by name, or one of the user's by path (with a ``.yaml`` suffix).

    Raises:
        ProfileError: no such profile, or a file that is not one; the message names the key.
    """
    values = _merged(name, Path(), ())
    try:
        return read_record(Profile, {**values, "name": Path(name).stem})
    except RecordError as error:
        raise ProfileError(f"profile {name}: {error}") from None


def _folder() -> Any:
    return files("specexport.profiles")


def _merged(name: str, beside: Path, chain: tuple[str, ...]) -> dict[str, Any]:
    """Values of a profile over those of what it extends. ``beside``: folder that a relative path starts from."""
    if name.endswith(_SUFFIXES):
        path = beside / Path(name).expanduser()
        key, folder = str(path.resolve()), path.parent
    else:
        path, key, folder = _folder() / f"{name}.yaml", name, Path()
        if not NAME.fullmatch(name) or not path.is_file():
            raise ProfileError(
                f"no profile {name!r}: expected one of {', '.join(profile_names())}, or the path of a .yaml file"
            )
    if key in chain or len(chain) >= MAX_EXTENDS:
        raise ProfileError(f"profile {name}: extends itself, or more than {MAX_EXTENDS} profiles deep")
    values = _parse(path, name)
    if "name" in values:
        raise ProfileError(f"profile {name}: unknown key 'name': a profile is called what its file is called")
    parent = values.pop("extends", None)
    if parent is None:
        return values
    if not isinstance(parent, str):
        raise ProfileError(f"profile {name}: {fail('extends', parent, 'the name or path of a profile')}")
    return _overlay(_merged(parent, folder, (*chain, key)), values)


def _overlay(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _overlay(merged[key], value) if both else value
    return merged


def _parse(path: Any, name: str) -> dict[str, Any]:
    from specexport.profiles.strict_yaml import StrictYamlError, parse_yaml

    try:
        with path.open("rb") as stream:
            content: bytes = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ProfileError(f"profile {name}: {error.strerror}") from None
    if len(content) > MAX_BYTES:
        raise ProfileError(f"profile {name} has more than {MAX_BYTES} bytes, expected a few lines")
    try:
        values = parse_yaml(content)
    except StrictYamlError as error:
        raise ProfileError(f"profile {name} is not valid YAML: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ProfileError(f"profile {name}: expected keys and values")
    return values
