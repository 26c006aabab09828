"""``profiles/<machine>.json`` of a bundle: what ``tune`` measured on a machine, for whoever chooses what to draft.

The file is added on a device, so the manifest need not list it; it is read as strictly as the manifest.
"""

# ruff: noqa: RUF009 - see specexport.runtime.records

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from specexport.runtime.acceptance_table import ACCEPTANCE_FILE, Acceptance, AcceptanceTable
from specexport.runtime.bundle import Bundle, inside, sha256
from specexport.runtime.cost_curve import CostCurve
from specexport.runtime.errors import BundleError, UsageError
from specexport.runtime.machine import Machine
from specexport.runtime.manifest import MANIFEST_NAME, FileInfo
from specexport.runtime.records import (
    NAME,
    RecordError,
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
from specexport.runtime.replacing import replace_text

PROFILE_SCHEMA = 1
PROFILES = "profiles"
#: Largest profile that is read, in bytes.
MAX_PROFILE_BYTES = 1 << 20
#: Noise of a cost curve (see :class:`CostCurve`) above which a session had rather learn its costs.
TRUSTED_NOISE = 0.25
_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCost:
    """Time of one proposal, with what the drafter learns from a step.

    Attributes:
        seconds: median. depth: tokens deep that it drafted, where each costs a call (a draft model); 0: the time does
            not depend on it. row_s: time of each token that it has to catch up with, beyond those of the last step.
    """

    seconds: float = read(number(0, 3600))
    depth: int = read(integer(0, 64), 0)
    row_s: float = read(number(0, 3600), 0.0)

    def at(self, depth: int) -> float:
        """Seconds of a proposal ``depth`` deep."""
        return self.seconds * depth / self.depth if self.depth else self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TunedTree:
    """The best tree of a drafter under a width, by its measured acceptance and the cost curve.

    Attributes:
        width: most nodes, the root included. paths: rank paths of its nodes (fewer than ``width`` where more would not
            pay). tau: expected tokens a step. seconds: expected time of a step, drafting and host included.
    """

    width: int = read(integer(1, 4096))
    paths: tuple[tuple[int, ...], ...] = read(sequence(sequence(integer(0, 4095), 64), 4096))
    tau: float = read(number(0, 4096))
    seconds: float = read(number(0, 3600))


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """What was measured on one machine.

    Attributes:
        fingerprint: of the bundle that was measured (:func:`fingerprint`). chains: no branching tree was verified (see
            :func:`~specexport.runtime.engine.chains_only`).
        cost: time of a target call at batch 1. host_s: time of a step outside target and drafter.
        drafts: time of a proposal, by drafter. acceptance: tables, by drafter, with ``measured_on`` in words (None: not
            calibrated). trees: by drafter, one for each width.
        drafter, width: the best choice for that acceptance; None and 1: plain decoding.
    """

    schema: int = read(integer(PROFILE_SCHEMA, PROFILE_SCHEMA), PROFILE_SCHEMA)
    fingerprint: str = read(text(256))
    machine: Machine = read(record(Machine))
    chains: bool = read(flag, False)
    cost: CostCurve = read(record(CostCurve))
    host_s: float = read(number(0, 3600))
    drafts: dict[str, DraftCost] = read(table(text(64, NAME), record(DraftCost), 64))
    measured_on: str | None = read(optional(text(512)))
    acceptance: dict[str, AcceptanceTable] = read(table(text(64, NAME), record(AcceptanceTable), 64))
    trees: dict[str, tuple[TunedTree, ...]] = read(table(text(64, NAME), sequence(record(TunedTree), 256), 64))
    drafter: str | None = read(optional(text(64, NAME)))
    width: int = read(integer(1, 4096))

    @property
    def typical_used(self) -> int:
        """Cache rows in use that trees are searched for: the middle of the measured lengths."""
        return self.cost.used[len(self.cost.used) // 2]


class MeasuredCosts:
    """The :class:`specexport.runtime.costs.Costs` of a tuned machine: fixed, so that choices follow tokens alone."""

    def __init__(self, profile: DeviceProfile) -> None:
        self._profile = profile
        self._unknown = max((cost.seconds for cost in profile.drafts.values()), default=0.0)

    def step_s(self, nodes: int, used: int) -> float:
        """A target call and what the host does around it."""
        return self._profile.cost.step_s(nodes, used) + self._profile.host_s

    def draft_s(self, name: str, behind: int = 0) -> float:
        """One proposal (of a draft model: one token); of a drafter that was not measured the dearest that was."""
        cost = self._profile.drafts.get(name)
        return self._unknown if cost is None else cost.at(1) + behind * cost.row_s

    def observe_step(self, nodes: int, used: int, seconds: float) -> None:
        """Nothing to learn."""

    def observe_draft(self, name: str, seconds: float, behind: int = 0) -> None:
        """Nothing to learn."""


def fingerprint(bundle: Bundle) -> str:
    """What a measurement of a bundle is worth for: its weights and graphs, by the hashes of the manifest."""
    files = bundle.manifest.files
    names = sorted(name for name in files if ".onnx" in name and "/" not in name)
    joined = json.dumps([[name, files[name].sha256] for name in names])
    return f"sha256:{hashlib.sha256(joined.encode()).hexdigest()}"


def profile_names(bundle: Bundle) -> list[str]:
    """Names of the machines that a bundle has a profile of."""
    found = sorted(path.stem for path in (bundle.path / PROFILES).glob("*.json"))
    return [name for name in found if NAME.fullmatch(name) and f"{PROFILES}/{name}.json" != ACCEPTANCE_FILE]


def read_profile(bundle: Bundle, name: str) -> DeviceProfile:
    """The profile of a machine by name.

    Raises:
        BundleError: missing, damaged, hostile or of another version.
        UsageError: not a name.
    """
    return _read(bundle, _file(name), DeviceProfile, "specexport tune")


def find_profile(bundle: Bundle, machine: Machine) -> DeviceProfile | None:
    """The profile that was measured on this very machine and these very graphs, if there is one.

    A file that cannot be read is passed over: a stale profile must not stop a session. So is one that was measured
    while the machine was busy.
    """
    for name in profile_names(bundle):
        try:
            profile = read_profile(bundle, name)
        except BundleError:
            continue
        if profile.cost.noise > TRUSTED_NOISE:
            continue
        if profile.machine == machine and profile.fingerprint == fingerprint(bundle):
            return profile
    return None


def read_acceptance(bundle: Bundle) -> Acceptance | None:
    """The acceptance tables of a bundle, None where it has none.

    Raises:
        BundleError: damaged, hostile or of another version.
    """
    if not (bundle.path / ACCEPTANCE_FILE).exists():
        return None
    return _read(bundle, ACCEPTANCE_FILE, Acceptance, "specexport train calibrate")


def write_profile(bundle: Bundle, name: str, profile: DeviceProfile) -> Path:
    """Put a profile into a bundle, whole or not at all; returns where.

    Raises:
        UsageError: not a name. OSError: the bundle cannot be written to.
    """
    return _write(bundle, _file(name), profile)


def write_acceptance(bundle: Bundle, acceptance: Acceptance) -> Path:
    """Put acceptance tables into a bundle, whole or not at all; returns where."""
    return _write(bundle, ACCEPTANCE_FILE, acceptance)


def _file(name: str) -> str:
    file = f"{PROFILES}/{name}.json"
    if not NAME.fullmatch(name) or file == ACCEPTANCE_FILE:
        raise UsageError(f"profile name {name!r}: expected small letters, digits, - and _, such as cpu-laptop")
    return file


def _read(bundle: Bundle, file: str, cls: type[_Record], command: str) -> _Record:
    path = inside(bundle.path, file)
    with path.open("rb") as stream:
        content = stream.read(MAX_PROFILE_BYTES + 1)
    if len(content) > MAX_PROFILE_BYTES:
        raise BundleError(f"{file} has more than {MAX_PROFILE_BYTES} bytes: remove it")
    try:
        return read_record(cls, parse_json(content))
    except RecordError as error:
        raise BundleError(f"{file}: {error}; make it again with {command!r}") from None


def _write(bundle: Bundle, file: str, value: Any) -> Path:
    path = bundle.path / file
    path.parent.mkdir(exist_ok=True)
    replace_text(path, json.dumps(plain(value), allow_nan=False) + "\n")
    if file in bundle.manifest.files:  # built in: the manifest must go on telling the truth
        info = FileInfo(bytes=path.stat().st_size, sha256=sha256(path))
        manifest = replace(bundle.manifest, files=bundle.manifest.files | {file: info})
        replace_text(bundle.path / MANIFEST_NAME, json.dumps(manifest.to_dict(), indent=2, allow_nan=False) + "\n")
    return path
