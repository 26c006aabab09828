"""What ``plan`` plans for: a bundle, a checkpoint or a config alone, with what is known of its drafters."""

from __future__ import annotations

import platform
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specexport.engines.kernels.library import kernels_library
from specexport.engines.ort import grows_trees, runs_kernels
from specexport.exporter.config import TargetConfig, read_config
from specexport.profiles import acceptance
from specexport.profiles.acceptance import Expectation
from specexport.profiles.cost import CostModel, Roofline, Tuned
from specexport.profiles.memory import plan_memory
from specexport.profiles.planner import Candidate, Plan, Workload, make_plan
from specexport.profiles.schema import Profile, load_profile
from specexport.profiles.sizes import (
    CACHE_BITS,
    PRECISION_BITS,
    DraftSize,
    ModelSize,
    bundle_size,
    decoder_size,
    drafter_size,
    lookup_size,
)
from specexport.runtime.acceptance_table import Acceptance, AcceptanceTable
from specexport.runtime.bundle import TARGET_GRAPH, Bundle
from specexport.runtime.device_profile import (
    DeviceProfile,
    find_profile,
    fingerprint,
    profile_names,
    read_acceptance,
    read_profile,
)
from specexport.runtime.engine import chains_only
from specexport.runtime.errors import CheckpointError, UsageError
from specexport.runtime.machine import this_machine
from specexport.runtime.manifest import DTYPES, MANIFEST_NAME
from specexport.runtime.records import RecordError, parse_json, read_record

if TYPE_CHECKING:
    from specexport.exporter.heads.base import Head

#: Largest config and acceptance file that is read, in bytes.
MAX_BYTES = 4 << 20
#: Cache rows in use that a plan reckons with unless told otherwise, and slots of a window.
DEFAULT_CONTEXT, DEFAULT_WINDOW = 512, 4096
#: The engine that has kernels of our own, and the weights that they multiply with.
CPU_BACKEND, CODES = "onnxruntime-cpu", ("int8", "int4")
#: Shape of the drafts of heads that are not built yet: as ``build`` makes them unless told otherwise.
HEAD_DEPTH, HEAD_RANKS, HEAD_NODES = 5, 8, 15


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan and what it is for."""

    source: str
    profile: Profile
    size: ModelSize
    plan: Plan

    def to_dict(self) -> dict[str, Any]:
        """``plan --json``."""
        model = {
            "layers": self.size.layers,
            "weight_bytes": self.size.weight_bytes,
            "precision": self.size.precision,
            "cache": self.size.cache,
        }
        return {"source": self.source, "profile": self.profile.name, "model": model, **self.plan.to_dict()}


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What ``plan`` was asked for.

    Attributes:
        profile: name or path; None: what was tuned on this machine, else the CPU's.
        heads: directory or hub id of heads that are not in a bundle. alpha: chance of a draft. calibration: file.
        context: cache rows in use. window: S, for memory. precision: of weights that are not built yet.
        threads: of a CPU.
    """

    profile: str | None = None
    heads: str | None = None
    alpha: float | None = None
    calibration: Path | None = None
    batch: int = 1
    context: int | None = None
    window: int | None = None
    precision: str | None = None
    threads: int = 0


def plan_for(source: str, options: PlanOptions) -> Planned:
    """Plan for ``source``.

    Raises:
        UsageError: options that do not fit it. BundleError, CheckpointError: it cannot be read.
    """
    path = Path(source).expanduser()
    bundle = Bundle.load(path) if (path / MANIFEST_NAME).is_file() else None
    tuned, profile = _profile(bundle, options)
    notes: list[str] = []
    if bundle is not None:
        if options.heads is not None or options.precision is not None:
            raise UsageError("--heads and --precision are for models that are not built yet: a bundle has its own")
        size, drafts = sizes_here(bundle)
        slots = bundle.manifest.target.slots
    else:
        precision = options.precision or profile.precision
        size, drafts = _not_built(source, options.heads, precision)
        slots = min(DEFAULT_WINDOW, size.positions)
        notes.append(f"weights in {precision}, not built yet")
    on_cpu = profile.backend == CPU_BACKEND
    if not on_cpu:
        size, drafts = replace(size, kernels=False), [replace(draft, kernels=False, grown=False) for draft in drafts]
    elif bundle is None and size.precision in CODES:
        size = replace(size, cache="fp32")  # what builds have it in for this engine
    if tuned is not None:
        chains = tuned.chains
    elif bundle is not None:
        chains = chains_only(bundle.manifest.target.precision) and not size.kernels
    else:
        chains = on_cpu and size.precision not in DTYPES and not size.kernels  # what builds promise by default
    if tuned is None and on_cpu and size.precision in CODES:
        notes.append(_about_kernels(bundle, size.kernels, chains))
    if chains:
        drafts = [draft.as_chain() for draft in drafts]
    slots = _within("--window", options.window, slots, size.positions)
    used = _within("--context", options.context, min(DEFAULT_CONTEXT, slots // 2), slots)
    cost: CostModel = Roofline(profile, size, options.threads or None)
    if tuned is not None:
        cost = Tuned(tuned, Roofline(profile, size, options.threads or None))
    else:
        notes.append(f"times are a roofline of {profile.title}; 'specexport tune BUNDLE' there measures them")
    tables, where = _tables(bundle, tuned, options.calibration)
    candidates = [Candidate(draft, _expected(draft, options, tables, where)) for draft in drafts]
    widths = profile.widths if tuned is None else tuned.cost.widths
    plan = make_plan(
        cost,
        candidates,
        Workload(options.batch, used),
        plan_memory(profile, size, drafts, slots, batch=options.batch),
        widths=widths,
        contexts=[value for value in (256, 1024, 4096, 16384, 65536) if value < slots] + [slots],
        assumptions=notes,
    )
    return Planned(source, profile, size, plan)


def _not_built(source: str, heads: str | None, precision: str) -> tuple[ModelSize, list[DraftSize]]:
    """A model with its weights in ``precision``, and drafters as builds have them: beside fp32 heads are in 8 bits.

    What our own kernels multiply with they are taken to run, where they are installed.
    """
    config = config_of(source)
    size, drafts = config_size(config, precision), [lookup_size("suffix"), lookup_size("recycling")]
    if heads is not None:
        drafts.insert(0, _head_size(heads, config, "int8" if precision == "fp32" else precision))
    if kernels_library() is not None:
        size = replace(size, kernels=precision in CODES)
        drafts = [replace(draft, kernels=draft.steps > 0 and draft.precision in CODES) for draft in drafts]
    return size, drafts


def sizes_here(bundle: Bundle) -> tuple[ModelSize, list[DraftSize]]:
    """The target of a bundle and its drafters, each on our own kernels where this machine's CPU runs it on them."""
    runs = bundle.manifest.engine == CPU_BACKEND
    size = replace(bundle_size(bundle), kernels=runs and runs_kernels(bundle.path, TARGET_GRAPH))
    drafts = []
    for info in bundle.manifest.drafters:
        size_here = drafter_size(bundle, info)
        if runs and info.graph is not None:
            kernels, grown = runs_kernels(bundle.path, info.graph), grows_trees(bundle.path, info.graph)
            size_here = replace(size_here, kernels=kernels, grown=grown)
        drafts.append(size_here)
    return size, drafts


def _about_kernels(bundle: Bundle | None, kernels: bool, chains: bool) -> str:
    """What is assumed of our own kernels for a quantised target that nobody measured."""
    trees = "chains only are verified" if chains else "trees are verified"
    if kernels:
        return f"the CPU kernels run it, as they are installed here; {trees}"
    if bundle is not None and kernels_library() is not None:
        return f"the CPU kernels do not run it: it has no graph for them, which building it again may give; {trees}"
    return f"the CPU kernels do not run it: they are not installed here, or switched off; {trees}"


def _within(option: str, value: int | None, default: int, most: int) -> int:
    if value is not None and not 1 <= value <= most:
        raise UsageError(f"{option} is {value}, expected 1 to {most}")
    return default if value is None else value


def _profile(bundle: Bundle | None, options: PlanOptions) -> tuple[DeviceProfile | None, Profile]:
    """What was measured, and the profile whose figures stand for the rest."""
    cpu = "cpu-arm64" if platform.machine().lower() in ("arm64", "aarch64") else "cpu-x86"
    name = options.profile
    if bundle is None or (name is not None and name not in profile_names(bundle)):
        return None, load_profile(cpu if name is None else name)
    if name is None:
        return find_profile(bundle, this_machine(bundle.manifest.engine, options.threads)), load_profile(cpu)
    tuned = read_profile(bundle, name)
    if tuned.fingerprint != fingerprint(bundle):
        raise UsageError(f"profile {name} was measured on another build of this bundle: run 'specexport tune' again")
    return tuned, load_profile(cpu)


def config_of(source: str) -> TargetConfig:
    """The config of a model: a ``config.json``, a directory that has one, a GGUF file or a hub id.

    Raises:
        CheckpointError: there is none, or it is not understood.
    """
    path = Path(source).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if file.suffix != ".json" or not file.is_file():
        from specexport.exporter.checkpoint import open_checkpoint
        from specexport.exporter.heads.merged import target_view

        return read_config(target_view(open_checkpoint(source)).config)
    try:
        raw = _json(file)
    except RecordError as error:
        raise CheckpointError(f"{file}: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{file}: expected a JSON object")
    try:
        return read_config(raw)
    except CheckpointError:
        try:
            from specexport.exporter.heads.merged import target_config
        except ModuleNotFoundError:
            pass
        else:
            if (without := target_config(raw)) != raw:  # a target with heads of its own
                return read_config(without)
        raise


def config_size(config: TargetConfig, precision: str) -> ModelSize:
    """What a config says of a model's size, with its weights in ``precision``."""
    return decoder_size(
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        windows=[layer.window for layer in config.layers],
        tied=config.tie_word_embeddings,
        precision=precision,
        cache=precision if precision in CACHE_BITS else "fp16",
        positions=config.max_position_embeddings,
    )


def _head_size(source: str, config: TargetConfig, precision: str) -> DraftSize:
    from specexport.exporter.doctor import require_export

    require_export("plan --heads")
    from specexport.exporter.heads.detect import open_head

    return head_size(open_head(source, target=config), config, precision)


def head_size(head: Head, config: TargetConfig, precision: str) -> DraftSize:
    """Heads that are not built yet, drafting ``HEAD_DEPTH`` tokens where they can go on."""
    record, weights = head.record, head.weights
    shapes = [weights.shape(name) for name in weights.names()]
    own = sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
    bits = PRECISION_BITS[precision]
    if record.method == "medusa":
        shared = config.vocab_size * config.hidden_size if record.lm_head == "target" else 0
        elements, read, depth, ranks = own + shared * record.num_heads, own + shared, record.num_heads, HEAD_RANKS
        rows, layers = 0, record.num_heads
    else:
        blocks = record.blocks
        table = record.vocab_size * record.embedding_size if record.embedding == "head" else 0
        shared = record.draft_vocab_size * config.hidden_size if record.lm_head == "target" else 0
        elements = read = own - table + shared
        depth, ranks, layers = HEAD_DEPTH, HEAD_RANKS, blocks.num_layers
        rows = 2 * blocks.num_layers * blocks.num_kv_heads * blocks.head_dim * 2
    return DraftSize(
        name=record.method,
        kind=record.method,
        steps=1 if record.method == "medusa" else depth,
        depth=depth,
        ranks=ranks,
        nodes=0 if record.method == "medusa" else HEAD_NODES,
        elements=elements,
        weight_bytes=int(read * bits / 8),
        stored_bytes=int(own * bits / 8),
        cache_row_bytes=rows,
        layers=layers,
        precision=precision,
        agreement=head.agreement(),
    )


def _tables(
    bundle: Bundle | None, tuned: DeviceProfile | None, file: Path | None
) -> tuple[dict[str, AcceptanceTable], str]:
    """Measured acceptance by drafter, and what it was measured on: a file that is named, the tuned profile, the
    bundle's own."""
    if file is not None:
        try:
            found = read_record(Acceptance, _json(file))
        except RecordError as error:
            raise UsageError(f"{file}: {error}; 'specexport tune' and 'train calibrate' write such files") from None
        return found.drafters, f"{file}: {found.measured_on}"
    if tuned is not None and tuned.acceptance:
        return tuned.acceptance, f"measured on {tuned.measured_on}"
    stored = None if bundle is None else read_acceptance(bundle)
    return ({}, "") if stored is None else (stored.drafters, f"measured on {stored.measured_on}")


def _expected(draft: DraftSize, options: PlanOptions, tables: dict[str, AcceptanceTable], where: str) -> Expectation:
    if options.alpha is not None:
        return acceptance.given(options.alpha, draft)
    table = tables.get(draft.name)
    if table is None or not table.acceptance:
        return acceptance.assumed(draft)
    return acceptance.measured(table.as_chain() if draft.ranks == 1 else table, where)


def _json(file: Path) -> Any:
    """A JSON file of bounded size."""
    with file.open("rb") as stream:
        content = stream.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise RecordError(f"more than {MAX_BYTES} bytes")
    return parse_json(content)
