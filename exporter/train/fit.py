"""Whether a head still fits its target: acceptance counted on a bundle, kept in it, and compared later.

``calibrate`` counts; :mod:`specexport.runtime.acceptance_table` says what is stored. ``drift`` compares the acceptance
of now, by depth, with what was stored, and the target's fingerprint with the bundle's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specexport.exporter.checkpoint import open_checkpoint, read_text
from specexport.exporter.heads.merged import target_view
from specexport.exporter.progress import Progress
from specexport.profiles import calibrate as running
from specexport.profiles.sizes import drafter_size
from specexport.profiles.tuner import read_prompts
from specexport.runtime.acceptance_table import Acceptance, AcceptanceTable
from specexport.runtime.bundle import CHAT_TEMPLATE, Bundle
from specexport.runtime.device_profile import read_acceptance, write_acceptance
from specexport.runtime.engine import find_engine
from specexport.runtime.errors import UsageError
from specexport.runtime.sampling import SamplingParams
from specexport.runtime.session import Session, find_drafter

#: Least share of the recorded tau that still counts as fitting.
THRESHOLD = 0.9
#: Nodes of a tree, the root included, while acceptance is counted.
NODES = 16


@dataclass(frozen=True, slots=True)
class CountOptions:
    """How acceptance is counted: ``count`` prompts of ``data``, spread evenly, ``max_tokens`` of each answer."""

    data: Path
    count: int = 32
    max_tokens: int = 128
    temperature: float = 0.0
    drafters: tuple[str, ...] = ()
    threads: int = 0


def count(bundle: Bundle, options: CountOptions, progress: Progress) -> dict[str, AcceptanceTable]:
    """Acceptance tables of the bundle's drafters (or those that were named) on prompts.

    Raises:
        UsageError: prompts or drafters that are no use.
    """
    manifest = bundle.manifest
    engine = find_engine(manifest.engine)(bundle.path, threads=options.threads)
    infos = [info for info in manifest.drafters if not options.drafters or info.name in options.drafters]
    if missing := set(options.drafters) - {info.name for info in infos}:
        names = ", ".join(info.name for info in manifest.drafters) or "none"
        raise UsageError(f"no drafter {sorted(missing)[0]!r} in {bundle.path}: it has {names}")
    drafters = {
        info.name: drafter for info in infos if (drafter := find_drafter(bundle, info.name, engine)) is not None
    }
    session = Session(bundle, drafter="none", engine=engine)
    texts = read_prompts(options.data, options.count)
    prompts = [session.encode(text, chat=CHAT_TEMPLATE in manifest.files) for text in texts]
    prompts = [prompt for prompt in prompts if len(prompt) + options.max_tokens <= engine.slots]
    if not prompts:
        raise UsageError(
            f"{options.data}: no prompt fits {engine.slots} slots with {options.max_tokens} tokens after it"
        )
    with progress.stage("count acceptance", len(prompts) * (len(drafters) + 1)) as stage:
        found = running.calibrate(
            manifest,
            engine,
            drafters,
            prompts,
            SamplingParams(max_tokens=options.max_tokens, temperature=options.temperature),
            nodes=NODES,
            depths={info.name: drafter_size(bundle, info).depth for info in infos},
            advance=stage.advance,
        )
    return dict(found.acceptance)


def calibrate(bundle: Bundle, options: CountOptions, progress: Progress) -> tuple[Acceptance, Path]:
    """Count acceptance and put it into the bundle; drafters that were not asked for keep what they have."""
    tables = count(bundle, options, progress)
    stored = read_acceptance(bundle)
    measured = (
        f"{options.count} prompts of {options.data.name}, {options.max_tokens} tokens, temperature "
        f"{options.temperature:g}, {bundle.manifest.target.precision.activations}"
    )
    acceptance = Acceptance(measured_on=measured, drafters=tables)
    if stored is not None:
        acceptance = replace(acceptance, drafters={**stored.drafters, **tables})
    return acceptance, write_acceptance(bundle, acceptance)


def chance_by_depth(table: AcceptanceTable) -> list[float]:
    """Chance that some draft of each depth is right, given that the path so far is."""
    return [min(1.0, sum(row)) for row in table.acceptance]


def expected_tau(chances: Sequence[float]) -> float:
    """Tokens a target call: one, and what the drafts bring."""
    tau, path = 1.0, 1.0
    for chance in chances:
        path *= chance
        tau += path
    return tau


@dataclass(frozen=True, slots=True)
class Drift:
    """One drafter, then and now; ``tau`` is what acceptance by depth makes, over the depths that both know."""

    drafter: str
    recorded: float
    current: float
    by_depth: tuple[tuple[float, float], ...]

    @property
    def share(self) -> float:
        return self.current / self.recorded


@dataclass(frozen=True, slots=True)
class DriftReport:
    """``target_changed``: None where no target was named to compare."""

    drifts: tuple[Drift, ...]
    threshold: float
    measured_on: str
    target_changed: bool | None

    @property
    def fits(self) -> bool:
        return not self.target_changed and all(drift.share >= self.threshold for drift in self.drifts)

    def to_dict(self) -> dict[str, Any]:
        """``drift --json``."""
        return {
            "fits": self.fits,
            "threshold": self.threshold,
            "recorded_on": self.measured_on,
            "target_changed": self.target_changed,
            "drafters": {
                drift.drafter: {
                    "recorded_tau": drift.recorded,
                    "current_tau": drift.current,
                    "share": drift.share,
                    "by_depth": [list(pair) for pair in drift.by_depth],
                }
                for drift in self.drifts
            },
        }


def measure_drift(
    bundle: Bundle,
    progress: Progress,
    *,
    options: CountOptions | None = None,
    statistics: Path | None = None,
    target: str | None = None,
    baseline: Bundle | None = None,
    threshold: float = THRESHOLD,
) -> DriftReport:
    """Compare the acceptance of now with what was recorded.

    Args:
        options: count on prompts now. statistics: or take a run's, as ``run --json`` writes them (one object, a list
            of them, or JSON lines). target: checkpoint whose fingerprint is compared with the bundle's.
        baseline: the bundle that has the record, such as that of the target before it was fine-tuned; None: this one.

    Raises:
        UsageError: nothing recorded, nothing to compare, or a file that holds no statistics.
    """
    recorded = bundle if baseline is None else baseline
    stored = read_acceptance(recorded)
    if stored is None:
        raise UsageError(
            f"{recorded.path} records no acceptance: run specexport train calibrate {recorded.path} --data D"
        )
    drifts: list[Drift] = []
    if options is not None or statistics is not None:
        if statistics is not None:
            current = read_statistics(statistics)
        else:
            assert options is not None
            names = options.drafters or tuple(stored.drafters)
            counted = count(bundle, replace(options, drafters=names), progress)
            current = {name: chance_by_depth(table) for name, table in counted.items()}
        for name in sorted(current.keys() & stored.drafters.keys()):
            pairs = tuple(zip(chance_by_depth(stored.drafters[name]), current[name], strict=False))
            then, now = (expected_tau([pair[side] for pair in pairs]) for side in (0, 1))
            drifts.append(Drift(name, then, now, pairs))
        if not drifts:
            raise UsageError(
                f"drafters {', '.join(sorted(current)) or 'none'} were run, {', '.join(sorted(stored.drafters))} are "
                "recorded: nothing to compare"
            )
    changed = None
    if target is not None:
        with progress.stage("fingerprint target"):
            changed = target_view(open_checkpoint(target)).fingerprint() != bundle.manifest.lineage.fingerprint
    if not drifts and changed is None:
        raise UsageError("nothing to compare: name --data, --statistics or --target")
    return DriftReport(tuple(drifts), threshold, stored.measured_on, changed)


def read_statistics(path: Path) -> dict[str, list[float]]:
    """Acceptance by depth of each drafter in a file of runs, weighted by what they decided.

    Raises:
        UsageError: no such statistics in it.
    """
    document = read_text(path)
    try:
        whole = json.loads(document)
        runs = whole if isinstance(whole, list) else [whole]
    except ValueError:
        try:
            runs = [json.loads(line) for line in document.splitlines() if line.strip()]
        except ValueError:
            raise UsageError(f"{path}: neither JSON nor JSON lines; give what run --json prints") from None
    sums: dict[str, list[list[int]]] = {}
    for run in runs:
        try:
            name, tried, hits = run["drafter"], run["proposed_by_depth"], run["accepted_by_depth"]
            mine = sums.setdefault(name, [])
            for depth, pair in enumerate(zip(tried, hits, strict=True)):
                if depth == len(mine):
                    mine.append([0, 0])
                mine[depth] = [mine[depth][0] + int(pair[0]), mine[depth][1] + int(pair[1])]
        except (KeyError, TypeError, ValueError):
            raise UsageError(
                f"{path}: a run lacks drafter, proposed_by_depth or accepted_by_depth; give what run --json prints"
            ) from None
    return {name: [hits / tried for tried, hits in mine if tried] for name, mine in sums.items()}
