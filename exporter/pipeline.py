"""``build``: from a checkpoint to a bundle, as one readable story."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import onnx_ir as ir

from specexport.engines.ort import DRAFT_FILE, TARGET_FILE, cpu_files
from specexport.exporter.checkpoint import Checkpoint, open_checkpoint
from specexport.exporter.config import TargetConfig, read_config
from specexport.exporter.graph_file import DTYPES, IR_DTYPES, state_bytes
from specexport.exporter.heads.base import Head
from specexport.exporter.heads.build import DraftOptions, check_draft, read_head, write_drafter
from specexport.exporter.heads.draft_model import DraftModel, read_draft_model, write_record
from specexport.exporter.heads.merged import target_view
from specexport.exporter.layers import Capture
from specexport.exporter.onnx import export_target, save_target
from specexport.exporter.passes import grouped_query
from specexport.exporter.progress import Progress
from specexport.exporter.tokenizer import TokenizerFiles, collect_tokenizer
from specexport.runtime.bundle import CHAT_TEMPLATE, GENERATION_CONFIG, TOKENIZER, Bundle
from specexport.runtime.bundle_writer import BundleWriter
from specexport.runtime.contract import CONTRACT_VERSION
from specexport.runtime.drafters import DRAFTERS, NO_DRAFTER
from specexport.runtime.errors import UsageError
from specexport.runtime.manifest import SCHEMA_VERSION, DrafterInfo, Lineage, Manifest, TargetInfo

#: Cache slots unless told otherwise; never more than the model was trained for.
DEFAULT_WINDOW = 4096
DEFAULT_CHUNK = 256
#: The drafter a bundle uses unless told otherwise.
DEFAULT_DRAFTER = "suffix"
#: Distributions whose versions a manifest records.
TOOLS = ("specexport", "torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "tokenizers")


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What ``build`` was asked for.

    Attributes:
        source: directory, hub id or GGUF file. output: directory to make. tokenizer: instead of the source's own.
        dtype: of weights and caches, a key of ``exporter.graph_file.DTYPES``.
        window: S, cache slots; None: :data:`DEFAULT_WINDOW` or the model's limit.
        prefill_chunk: most prompt tokens in one call.
        drafters: lookup drafters to offer, the first is the default; empty: all. ``none`` first: plain by default.
        features: residual-stream boundaries that the graph also outputs.
        heads: directory or hub id of speculative heads, whose drafter then is the default. draft: shape of its drafts.
        draft_model: directory, hub id or GGUF file of a smaller model to draft with, then the default unless there are
            heads. draft_revision, draft_tokenizer: of it.
    """

    source: str
    output: Path
    revision: str | None = None
    offline: bool = False
    tokenizer: Path | None = None
    dtype: str = "fp32"
    window: int | None = None
    prefill_chunk: int = DEFAULT_CHUNK
    drafters: tuple[str, ...] = ()
    features: tuple[Capture, ...] = ()
    overwrite: bool = False
    heads: str | None = None
    draft_model: str | None = None
    draft_revision: str | None = None
    draft_tokenizer: Path | None = None
    draft: DraftOptions = field(default_factory=DraftOptions)


@dataclass(frozen=True, slots=True)
class BuildResult:
    """A built bundle, seconds by stage, and the process's peak resident memory in bytes."""

    bundle: Bundle
    stages: dict[str, float]
    peak_rss_bytes: int


def build(options: BuildOptions, progress: Progress) -> BuildResult:
    """Build a bundle.

    Raises:
        UsageError: an option that does not fit the model, or an output that is in the way.
        CheckpointError: the source is not fully understood.
    """
    with BundleWriter(options.output, overwrite=options.overwrite) as writer:
        with progress.stage("read checkpoint"):
            opened = open_checkpoint(options.source, revision=options.revision, offline=options.offline)
            checkpoint = target_view(opened)
            config = read_config(checkpoint.config)
            slots = window_of(config, options.window)
            tokenizer = collect_tokenizer(checkpoint, options.tokenizer)
            head = _read_head(options, config, tokenizer, progress)
            captures = options.features if head is None else head.record.captures
            _check_captures(config, captures)
            draft = _read_draft_model(options, slots, tokenizer, progress)
        _write_target(writer.path / TARGET_FILE, checkpoint, config, slots, options.dtype, captures, progress)
        drafters = [DrafterInfo(name=name, kind=name, options={}, graph=None, tree=None) for name in lookups(options)]
        if draft is not None:
            graph = writer.path / DRAFT_FILE
            _write_target(graph, draft.checkpoint, draft.config, draft.slots, options.dtype, (), progress, "draft ")
            with progress.stage("fingerprint draft"):
                drafters.insert(0, write_record(draft, graph, options.draft.depth, options.dtype))
        if head is not None:
            with progress.stage("export heads"):
                dtype = DTYPES[options.dtype]
                info = write_drafter(
                    head, writer.path, options.draft, dtype=dtype, slots=slots, valid_vocab=tokenizer.vocab_size
                )
                drafters.insert(0, info)
        with progress.stage("fingerprint"):
            lineage = Lineage(
                source=checkpoint.source,
                revision=options.revision,
                fingerprint=checkpoint.fingerprint(),
                head_fingerprint=None if head is None else head.fingerprint(),
            )
        with progress.stage("finish bundle"):
            _write_texts(writer, tokenizer)
            info_of_target = _target_info(options, config, slots, tokenizer, len(captures) * config.hidden_size)
            bundle = writer.finish(_manifest(options, info_of_target, drafters, lineage, tokenizer))
    return BuildResult(bundle, dict(progress.seconds), peak_rss_bytes())


def _read_head(
    options: BuildOptions, config: TargetConfig, tokenizer: TokenizerFiles, progress: Progress
) -> Head | None:
    """The heads that were asked for, checked against the target and the draft options."""
    if options.heads is None:
        if options.draft.tree is not None:
            raise UsageError("--tree shapes the drafts of heads: name them with --heads, or leave it out")
        return None
    if options.features:
        raise UsageError("--features and --heads exclude each other: the heads decide which features they read")
    head, warnings = read_head(options.heads, config, options.source, tokenizer.tokenizer_json, offline=options.offline)
    for warning in warnings:
        progress.log(f"warning: {warning}")
    check_draft(head, options.draft)
    return head


def _read_draft_model(
    options: BuildOptions, slots: int, tokenizer: TokenizerFiles, progress: Progress
) -> DraftModel | None:
    """The draft model that was asked for, compared with the target."""
    if options.draft_model is None:
        if options.draft_revision is not None or options.draft_tokenizer is not None:
            raise UsageError("--draft-revision and --draft-tokenizer are of a draft model: name it with --draft-model")
        return None
    draft = read_draft_model(
        options.draft_model,
        tokenizer.tokenizer_json,
        slots=slots,
        depth=options.draft.depth,
        revision=options.draft_revision,
        tokenizer=options.draft_tokenizer,
        offline=options.offline,
    )
    for warning in draft.warnings:
        progress.log(f"warning: {warning}")
    return draft


def lookups(options: BuildOptions) -> list[str]:
    """Lookup drafters to offer, the default first."""
    names = options.drafters or (DEFAULT_DRAFTER, *DRAFTERS)
    return [name for name in dict.fromkeys(names) if name != NO_DRAFTER]


def window_of(config: TargetConfig, window: int | None) -> int:
    """S for a model.

    Raises:
        UsageError: more slots than the model has positions.
    """
    if window is None:
        return min(DEFAULT_WINDOW, config.max_position_embeddings)
    if window > config.max_position_embeddings:
        raise UsageError(
            f"--window {window} is more than the model's {config.max_position_embeddings} positions: lower it, or edit "
            "the rope scaling and max_position_embeddings of its config.json if you know it extends that far"
        )
    return window


def _check_captures(config: TargetConfig, captures: tuple[Capture, ...]) -> None:
    for capture in captures:
        if isinstance(capture, int) and not 0 <= capture <= config.num_layers:
            raise UsageError(f"--features {capture}: the model has boundaries 0 to {config.num_layers}")


def _write_target(
    graph: Path,
    checkpoint: Checkpoint,
    config: TargetConfig,
    slots: int,
    dtype: str,
    captures: tuple[Capture, ...],
    progress: Progress,
    label: str = "",
) -> None:
    """Export a target (or draft model) to ``graph``, its data and its lowering; ``label`` goes before stage names."""
    with progress.stage(f"trace {label}graph"):
        model, target = export_target(config, slots, DTYPES[dtype], captures, checkpoint.weights)
    with progress.stage(f"write {label}weights", state_bytes(target)) as stage:
        save_target(model, target, checkpoint.weights, graph, stage.advance)
    with progress.stage(f"lower {label}for CPU"):
        if not write_lowered(graph.parent, config, slots, dtype, graph.name):
            progress.log(
                f"warning: heads of width {config.head_dim} have no fast attention on the CPU (it takes multiples "
                f"of {grouped_query.HEAD_DIM_MULTIPLE}): a step reads all {slots} cache slots there"
            )


def write_lowered(folder: Path, config: TargetConfig, slots: int, dtype: str, graph: str = TARGET_FILE) -> bool:
    """Write the CPU lowering of ``folder/graph`` beside it; the weights are shared, not copied.

    Returns:
        False where the model's head width has no such lowering: the CPU then runs the exported graph.
    """
    if config.head_dim % grouped_query.HEAD_DIM_MULTIPLE:
        return False
    lowered_file, commit_file = cpu_files(graph)
    model = grouped_query.lower(ir.load(folder / graph), slots)
    ir.save(model, folder / lowered_file)
    commit = grouped_query.commit_model(
        config.num_layers, config.num_kv_heads, config.head_dim, slots, IR_DTYPES[dtype]
    )
    ir.save(commit, folder / commit_file)
    return True


def _write_texts(writer: BundleWriter, tokenizer: TokenizerFiles) -> None:
    writer.add_file(TOKENIZER, tokenizer.tokenizer_json)
    writer.add_file("tokenizer_config.json", _json(tokenizer.tokenizer_config))
    if tokenizer.chat_template is not None:
        writer.add_file(CHAT_TEMPLATE, tokenizer.chat_template)
    writer.add_file(GENERATION_CONFIG, _json(tokenizer.generation_config))


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _target_info(
    options: BuildOptions, config: TargetConfig, slots: int, tokenizer: TokenizerFiles, features_size: int
) -> TargetInfo:
    return TargetInfo(
        architecture=config.architecture,
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        valid_vocab=tokenizer.vocab_size,
        slots=slots,
        dtype=options.dtype,
        prefill_chunk=min(options.prefill_chunk, slots),
        features_size=features_size,
        windows=tuple(layer.window for layer in config.layers),
    )


def _manifest(
    options: BuildOptions,
    target: TargetInfo,
    drafters: list[DrafterInfo],
    lineage: Lineage,
    tokenizer: TokenizerFiles,
) -> Manifest:
    weightless = options.heads is None and options.draft_model is None
    plain = not drafters or (weightless and options.drafters[:1] == (NO_DRAFTER,))
    return Manifest(
        schema=SCHEMA_VERSION,
        contract=CONTRACT_VERSION,
        tools=tool_versions(),
        command=tuple(["specexport", *sys.argv[1:]]),
        target=target,
        engine="onnxruntime-cpu",
        drafters=tuple(drafters),
        drafter=None if plain else drafters[0].name,
        stop_ids=tokenizer.stop_ids,
        lineage=lineage,
        files={},
    )


def tool_versions() -> dict[str, str]:
    """Versions of :data:`TOOLS`, as far as they are installed."""
    versions = {}
    for name in TOOLS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def peak_rss_bytes() -> int:
    """Peak resident memory of this process."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
