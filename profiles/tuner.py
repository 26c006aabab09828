"""``tune``: measure a bundle on this machine, calibrate its drafters, search their trees, and store it all in it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from specexport.profiles.calibrate import Calibrated, calibrate
from specexport.profiles.cost import Tuned
from specexport.profiles.data_files import has_records, prompt_of, read_lines, read_records
from specexport.profiles.sizes import DraftSize, drafter_size
from specexport.profiles.timing import MIN_ROUNDS, WARM_UP, measure_curve
from specexport.profiles.tree_search import mean_step, search
from specexport.runtime.bundle import CHAT_TEMPLATE, Bundle
from specexport.runtime.device_profile import (
    TRUSTED_NOISE,
    DeviceProfile,
    TunedTree,
    fingerprint,
    profile_names,
    read_acceptance,
    read_profile,
    write_profile,
)
from specexport.runtime.drafters import NO_DRAFTER
from specexport.runtime.engine import TargetEngine, chains_only, find_engine
from specexport.runtime.errors import BundleError, UsageError
from specexport.runtime.machine import Machine, this_machine
from specexport.runtime.records import plain
from specexport.runtime.sampling import SamplingParams
from specexport.runtime.session import Session, find_drafter

#: T that are measured, as far as the window allows.
WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
#: Shares of the window that are measured, behind a short prompt.
USED_SHARES, SHORT = (1 / 16, 1 / 4, 1 / 2, 1.0), 64
#: Seconds that the cost curve may take, and the widest tree that is calibrated with.
BUDGET_S, CALIBRATION_NODES = 60.0, 16
#: Longest prompt, in tokens.
MAX_PROMPT = 1024
#: What the drafters are timed on when there are no prompts; too little to say how often they are right.
TEXTS = (
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "List the planets of the solar system, and for each planet list its name, its size and its distance.",
)
_TEXT_TOKENS = 32


class Stage(Protocol):
    """A running stage of work."""

    def advance(self, amount: int = 1) -> None: ...


class Stages(Protocol):
    """Where progress is reported to (``specexport.exporter.progress.Progress``)."""

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[Stage]: ...

    def log(self, message: str) -> None: ...


@dataclass(frozen=True, slots=True)
class TuneOptions:
    """What ``tune`` was asked for.

    Attributes:
        data: file of prompts, ``count`` of which, spread evenly, are answered with ``max_tokens`` tokens each.
        name: of the machine; None: by its CPU. engine: None: the bundle's.
    """

    data: Path | None = None
    count: int = 16
    max_tokens: int = 64
    temperature: float = 0.0
    name: str | None = None
    engine: str | None = None
    threads: int = 0


@dataclass(frozen=True, slots=True)
class TuneResult:
    """What was measured, where it was written, and how the machine differs from the last time (a line each)."""

    profile: DeviceProfile
    path: Path
    changes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """``tune --json``: times in seconds."""
        return {"path": str(self.path), "changes": list(self.changes), "profile": plain(self.profile)}


def tune_bundle(path: Path, options: TuneOptions, progress: Stages) -> TuneResult:
    """Measure the bundle at ``path`` and write ``profiles/<machine>.json`` into it; minutes.

    Raises:
        BundleError: it cannot be loaded. UsageError: a name, an engine or prompts that are no use.
    """
    bundle = Bundle.load(path)
    manifest = bundle.manifest
    texts = None if options.data is None else read_prompts(options.data, options.count)
    engine_name = options.engine or manifest.engine
    machine = this_machine(engine_name, options.threads)
    name = options.name or machine.slug
    changes = _changes(bundle, name, machine)
    for line in changes:
        progress.log(f"changed since {name} was measured: {line}")
    engine = find_engine(engine_name)(bundle.path, threads=options.threads)
    widths = [width for width in WIDTHS if width <= max(1, engine.slots // 4)]
    used = used_lengths(engine.slots, widths[-1])
    calls = len(widths) * len(used) * (MIN_ROUNDS + WARM_UP)
    with progress.stage("cost curve", calls) as stage:
        curve = measure_curve(engine, widths, used, budget_s=BUDGET_S, advance=stage.advance)
    if curve.noise > TRUSTED_NOISE:
        progress.log(
            f"warning: times vary by {curve.noise:.0%}, too much to be used: stop what else runs and tune again"
        )
    found = _run(bundle, engine, texts, options, progress)
    stored = read_acceptance(bundle)
    acceptance, measured_on = dict(found.acceptance), None
    if options.data is not None and texts is not None:
        measured_on = f"{len(texts)} prompts of {options.data.name}, temperature {options.temperature:g}"
    elif stored is not None:
        acceptance, measured_on = stored.drafters, stored.measured_on
    else:
        acceptance = {}
    untuned = DeviceProfile(
        fingerprint=fingerprint(bundle),
        machine=machine,
        chains=chains_only(manifest.target.precision, engine),
        cost=curve,
        host_s=found.host_s,
        drafts=dict(found.drafts),
        measured_on=measured_on,
        acceptance=acceptance,
        trees={},
        drafter=None,
        width=1,
    )
    with progress.stage("search trees"):
        profile = with_trees(untuned, [drafter_size(bundle, info) for info in manifest.drafters])
    return TuneResult(profile, write_profile(bundle, name, profile), tuple(changes))


def used_lengths(slots: int, widest: int) -> list[int]:
    """Used lengths to measure in a window of S ``slots``: a short prompt up to all that leaves room for a tree."""
    most = max(0, slots - widest)
    shares = {min(most, int(slots * share)) for share in USED_SHARES}
    return sorted({min(SHORT, most), *(length for length in shares if length > 2 * SHORT), most})


def with_trees(profile: DeviceProfile, drafts: Sequence[DraftSize]) -> DeviceProfile:
    """The profile with the best trees for its acceptance and costs, at a quarter of the window in use."""
    cost = Tuned(profile)
    used = profile.typical_used
    trees: dict[str, tuple[TunedTree, ...]] = {}
    best: tuple[float, str | None, int] = (1.0 / cost.step_s(1, used), None, 1)
    for draft in drafts:
        table = profile.acceptance.get(draft.name)
        if table is None or not table.acceptance:
            continue
        if profile.chains:
            draft, table = draft.as_chain(), table.as_chain()
        found = []
        for width in draft.widths(profile.cost.widths)[1:]:
            shape = search(
                table.acceptance,
                mean_step(lambda nodes: cost.step_s(nodes, used), table.proposed),
                lambda depth, draft=draft: cost.draft_s(draft, depth, used),  # type: ignore[misc]
                range(1, width + 1),
                max_depth=draft.depth,
                nodes=draft.nodes,
                copies=draft.copies,
            )
            found.append(TunedTree(width=width, paths=shape.paths, tau=shape.tau, seconds=shape.seconds))
            if shape.paths and shape.rate > best[0]:
                best = (shape.rate, draft.name, shape.nodes)
        trees[draft.name] = tuple(found)
    return replace(profile, trees=trees, drafter=best[1], width=best[2])


def read_prompts(path: Path, count: int) -> list[str]:
    """``count`` prompts spread evenly over a file: one a line, or JSON lines with ``prompt``, ``turns`` or
    ``question`` (the first turn counts); ``.gz`` is unpacked.

    Raises:
        UsageError: it cannot be read, or has no such lines.
    """
    if has_records(path):
        prompts = [prompt_of(record, where) for where, record in read_records(path)]
    else:
        prompts = [line for _, line in read_lines(path)]
    if not prompts:
        raise UsageError(f"{path} has no prompts: expected one a line")
    return prompts[:: max(1, len(prompts) // count)][:count]


def _changes(bundle: Bundle, name: str, machine: Machine) -> list[str]:
    if name not in profile_names(bundle):
        return []
    try:
        old = read_profile(bundle, name)
    except BundleError as error:
        return [str(error)]
    changes = old.machine.changes(machine)
    return changes if old.fingerprint == fingerprint(bundle) else [*changes, "the bundle: built anew"]


def _run(
    bundle: Bundle, engine: TargetEngine, texts: Sequence[str] | None, options: TuneOptions, progress: Stages
) -> Calibrated:
    """Run every drafter on the prompts, or on a few texts to time them."""
    manifest = bundle.manifest
    drafters = {}
    for info in manifest.drafters:
        drafter = find_drafter(bundle, info.name, engine)
        if drafter is not None:
            drafters[info.name] = drafter
    depths = {info.name: drafter_size(bundle, info).depth for info in manifest.drafters}
    max_tokens = options.max_tokens if texts is not None else _TEXT_TOKENS
    room = max(1, min(MAX_PROMPT, engine.slots - max_tokens))
    session = Session(bundle, drafter=NO_DRAFTER, engine=engine)
    chat = CHAT_TEMPLATE in manifest.files
    prompts = [session.encode(text, chat=chat)[:room] for text in texts or TEXTS]
    params = SamplingParams(max_tokens=min(max_tokens, engine.slots - room), temperature=options.temperature)
    nodes = min(CALIBRATION_NODES, max(2, engine.slots // 4))
    with progress.stage("run drafters", len(prompts) * (len(drafters) + 1)) as stage:
        return calibrate(manifest, engine, drafters, prompts, params, nodes=nodes, depths=depths, advance=stage.advance)
