"""``build``: from a checkpoint to a bundle, as one readable story."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from specexport.engines.ort import DRAFT_FILE, TARGET_FILE
from specexport.exporter.checkpoint import Checkpoint, open_checkpoint
from specexport.exporter.config import TargetConfig, read_config
from specexport.exporter.graph_file import state_bytes
from specexport.exporter.heads.base import Head
from specexport.exporter.heads.build import (
    DraftOptions,
    check_draft,
    precision_warnings,
    read_heads,
    union,
    write_drafter,
)
from specexport.exporter.heads.draft_model import DraftModel, read_draft_model, write_record
from specexport.exporter.heads.merged import target_view
from specexport.exporter.layers import Capture
from specexport.exporter.lower import lower_drafter, lower_target
from specexport.exporter.onnx import export_target, save_target
from specexport.exporter.passes import grouped_query
from specexport.exporter.passes.matmul_nbits import Packed
from specexport.exporter.progress import Progress
from specexport.exporter.quantize.calibrate import calibrated_plan
from specexport.exporter.quantize.choice import PrecisionOptions, resolve
from specexport.exporter.quantize.plan import FLOATS, Plan
from specexport.exporter.quantize.quality import check_build
from specexport.exporter.tokenizer import TokenizerFiles, collect_tokenizer
from specexport.runtime.bundle import CHAT_TEMPLATE, GENERATION_CONFIG, TOKENIZER, Bundle
from specexport.runtime.bundle_writer import BundleWriter
from specexport.runtime.contract import CONTRACT_VERSION
from specexport.runtime.drafters import DRAFTERS, NO_DRAFTER
from specexport.runtime.drafters.model import ModelDrafter
from specexport.runtime.errors import UsageError
from specexport.runtime.machine import peak_rss_bytes
from specexport.runtime.manifest import (
    GPU_FORMATS,
    SCHEMA_VERSION,
    DrafterInfo,
    Lineage,
    Manifest,
    PrecisionInfo,
    TargetInfo,
)

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
        precision: of weights and activations. drafter_precision: of the matrices of heads and of a draft model; None:
            the target's.
        calibrate: text that the layers' integer codes are fitted to (GPTQ), calibration_tokens of it; None: rounded to
            nearest. check: compare a quantised target with the checkpoint on a short text.
        window: S, cache slots; None: :data:`DEFAULT_WINDOW` or the model's limit.
        prefill_chunk: most prompt tokens in one call.
        drafters: lookup drafters to offer, the first is the default; empty: all. ``none`` first: plain by default.
        features: residual-stream boundaries that the graph also outputs.
        heads: directories or hub ids of speculative heads, or ``NAME=HEADS``; the first is the default drafter.
        draft: shape of their drafts. named_drafts: of those heads, or the draft model, that have another.
        draft_model: directory, hub id or GGUF file of a smaller model to draft with, then the default unless there are
            heads. draft_revision, draft_tokenizer: of it.
    """

    source: str
    output: Path
    revision: str | None = None
    offline: bool = False
    tokenizer: Path | None = None
    precision: PrecisionOptions = field(default_factory=PrecisionOptions)
    drafter_precision: str | None = None
    calibrate: Path | None = None
    calibration_tokens: int | None = None
    check: bool = True
    window: int | None = None
    prefill_chunk: int = DEFAULT_CHUNK
    drafters: tuple[str, ...] = ()
    features: tuple[Capture, ...] = ()
    overwrite: bool = False
    heads: tuple[str, ...] = ()
    draft_model: str | None = None
    draft_revision: str | None = None
    draft_tokenizer: Path | None = None
    draft: DraftOptions = field(default_factory=DraftOptions)
    named_drafts: Mapping[str, DraftOptions] = field(default_factory=dict)

    def drafting(self) -> PrecisionOptions:
        """Precision of heads and of a draft model: the target's activations, block size and formats unless named.

        Beside a target in fp32 they have 8 bits: a draft takes a third of the time, and of what it proposes the target
        decides either way.
        """
        own = self.drafter_precision or ("int8" if self.precision.precision == "fp32" else None)
        if own is None:
            return self.precision
        block = self.precision.block_size if own == self.precision.precision else None
        return PrecisionOptions(
            own, block_size=block, activations=self.precision.activations, exact=self.precision.exact
        )

    def draft_of(self, name: str) -> DraftOptions:
        """Shape of the drafts of one drafter."""
        return self.named_drafts.get(name, self.draft)


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
            for note in checkpoint.notes:
                progress.log(f"note: {note}")
            config = read_config(checkpoint.config)
            slots = window_of(config, options.window)
            tokenizer = collect_tokenizer(checkpoint, options.tokenizer)
            heads = _read_heads(options, config, tokenizer, progress)
            captures = union(heads) if heads else options.features
            _check_captures(config, captures)
            draft = _read_draft_model(options, slots, tokenizer, progress)
            plan, precision = resolve(options.precision, tied=config.tie_word_embeddings)
            text = (options.calibrate, options.calibration_tokens)
            plan = calibrated_plan(plan, text, config, checkpoint.weights, slots, tokenizer)
            drafting = options.drafting()
            for warning in precision_warnings(heads, precision.weights):
                progress.log(f"warning: {warning}")
        packed = _write_target(
            writer.path / TARGET_FILE, checkpoint, config, slots, plan, precision, captures, progress
        )
        drafters = [DrafterInfo(name=name, kind=name, options={}, graph=None, tree=None) for name in lookups(options)]
        if draft is not None:
            graph = writer.path / DRAFT_FILE
            draft_plan, draft_precision = resolve(drafting, tied=draft.config.tie_word_embeddings)
            # What a draft model computes is a guess, whatever the width.
            guess = replace(draft_precision, exact=False)
            _write_target(graph, draft.checkpoint, draft.config, draft.slots, draft_plan, guess, (), progress, "draft ")
            with progress.stage("fingerprint draft"):
                depth = options.draft_of(ModelDrafter.kind).depth
                drafters.insert(0, write_record(draft, graph, depth, precision.activations))
        for place, (name, head) in enumerate(heads.items()):
            with progress.stage("export heads" if len(heads) == 1 else f"export heads {name}"):
                info = write_drafter(
                    name,
                    head,
                    writer.path,
                    options.draft_of(name),
                    dtype=FLOATS[precision.activations],
                    slots=slots,
                    valid_vocab=tokenizer.vocab_size,
                    offered=captures,
                    plan=resolve(drafting, tied=False)[0],
                )
                if not {precision.lm_head, precision.embedding, drafting.precision} & {*GPU_FORMATS}:
                    lower_drafter(writer.path / str(info.graph), packed)
                drafters.insert(place, info)
        with progress.stage("fingerprint"):
            lineage = Lineage(
                source=checkpoint.source,
                revision=options.revision,
                fingerprint=checkpoint.fingerprint(),
                heads={name: head.fingerprint() for name, head in heads.items()},
            )
        with progress.stage("finish bundle"):
            _write_texts(writer, tokenizer)
            info_of_target = _target_info(
                options, config, slots, precision, tokenizer, len(captures) * config.hidden_size
            )
            bundle = writer.finish(_manifest(options, info_of_target, drafters, lineage, tokenizer))
    if options.check and {precision.weights, precision.lm_head} & {"int4", "int8"} and packed is not None:
        with progress.stage("check agreement"):
            check_build(bundle, config, checkpoint.weights, progress)
    return BuildResult(bundle, dict(progress.seconds), peak_rss_bytes())


def _read_heads(
    options: BuildOptions, config: TargetConfig, tokenizer: TokenizerFiles, progress: Progress
) -> dict[str, Head]:
    """The heads that were asked for, by name, checked against the target and the draft options."""
    if not options.heads and options.draft.tree is not None:
        raise UsageError("--tree shapes the drafts of heads: name them with --heads, or leave it out")
    if options.heads and options.features:
        raise UsageError("--features and --heads exclude each other: the heads decide which features they read")
    heads, warnings = read_heads(
        options.heads, config, options.source, tokenizer.tokenizer_json, offline=options.offline
    )
    for warning in warnings:
        progress.log(f"warning: {warning}")
    names = [*heads, *([ModelDrafter.kind] if options.draft_model is not None else [])]
    for name in options.named_drafts:
        if name not in names:
            known = ", ".join(names) or "none"
            raise UsageError(f"draft options for {name!r}: no such heads or draft model, there are {known}")
    for name, head in heads.items():
        check_draft(head, options.draft_of(name))
    return heads


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
        depth=options.draft_of(ModelDrafter.kind).depth,
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
    plan: Plan,
    precision: PrecisionInfo,
    captures: tuple[Capture, ...],
    progress: Progress,
    label: str = "",
) -> Packed | None:
    """Export a target (or draft model) to ``graph``, its data and its lowering.

    Args:
        precision: as its manifest says; ``exact`` decides the lowering. label: what stage names call it.

    Returns:
        Matrices that the lowering laid out, for drafters that share them; None without lowering.
    """
    activations = precision.activations
    with progress.stage(f"trace {label}graph"):
        model, target = export_target(config, slots, FLOATS[activations], captures, checkpoint.weights)
    with progress.stage(f"write {label}weights", state_bytes(target)) as stage:
        save_target(model, target, checkpoint.weights, graph, stage.advance, plan)
    if gpu := sorted({precision.weights, precision.lm_head, precision.embedding} & {*GPU_FORMATS}):
        progress.log(f"{label}weights in {gpu[0]} run on GPUs only: there is no lowering for the CPU")
        return None
    with progress.stage(f"lower {label}for CPU"):
        packed = lower_target(graph.parent, config, slots, activations, graph.name, exact=precision.exact)
        if packed is None:
            progress.log(
                f"warning: heads of width {config.head_dim} have no fast attention on the CPU (it takes multiples "
                f"of {grouped_query.HEAD_DIM_MULTIPLE}): a step reads all {slots} cache slots there"
            )
    return packed


def _write_texts(writer: BundleWriter, tokenizer: TokenizerFiles) -> None:
    writer.add_file(TOKENIZER, tokenizer.tokenizer_json)
    writer.add_file("tokenizer_config.json", _json(tokenizer.tokenizer_config))
    if tokenizer.chat_template is not None:
        writer.add_file(CHAT_TEMPLATE, tokenizer.chat_template)
    writer.add_file(GENERATION_CONFIG, _json(tokenizer.generation_config))


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _target_info(
    options: BuildOptions,
    config: TargetConfig,
    slots: int,
    precision: PrecisionInfo,
    tokenizer: TokenizerFiles,
    features_size: int,
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
        precision=precision,
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
    weightless = not options.heads and options.draft_model is None
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
