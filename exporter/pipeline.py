"""``build``: from a checkpoint to a bundle, as one readable story."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import onnx_ir as ir

from specexport.engines.ort import CPU_COMMIT_FILE, CPU_TARGET_FILE, TARGET_FILE
from specexport.exporter.checkpoint import Checkpoint, open_checkpoint
from specexport.exporter.config import TargetConfig, read_config
from specexport.exporter.graph_file import DTYPES, IR_DTYPES, state_bytes
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
            checkpoint = open_checkpoint(options.source, revision=options.revision, offline=options.offline)
            config = read_config(checkpoint.config)
            slots = window_of(config, options.window)
            tokenizer = collect_tokenizer(checkpoint, options.tokenizer)
        with progress.stage("trace graph"):
            _check_captures(config, options.features)
            model, target = export_target(config, slots, DTYPES[options.dtype], options.features)
        with progress.stage("write weights", state_bytes(target)) as stage:
            save_target(model, target, checkpoint.weights, writer.path / TARGET_FILE, stage.advance)
        with progress.stage("lower for CPU"):
            write_lowered(writer.path, config, slots, options.dtype)
        with progress.stage("fingerprint"):
            fingerprint = checkpoint.fingerprint()
        with progress.stage("finish bundle"):
            _write_texts(writer, tokenizer)
            bundle = writer.finish(_manifest(options, checkpoint, fingerprint, config, slots, tokenizer))
    return BuildResult(bundle, dict(progress.seconds), peak_rss_bytes())


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


def write_lowered(folder: Path, config: TargetConfig, slots: int, dtype: str) -> None:
    """Write the CPU lowering of ``folder/target.onnx`` beside it; the weights are shared, not copied."""
    model = grouped_query.lower(ir.load(folder / TARGET_FILE), slots)
    ir.save(model, folder / CPU_TARGET_FILE)
    commit = grouped_query.commit_model(
        config.num_layers, config.num_kv_heads, config.head_dim, slots, IR_DTYPES[dtype]
    )
    ir.save(commit, folder / CPU_COMMIT_FILE)


def _write_texts(writer: BundleWriter, tokenizer: TokenizerFiles) -> None:
    writer.add_file(TOKENIZER, tokenizer.tokenizer_json)
    writer.add_file("tokenizer_config.json", _json(tokenizer.tokenizer_config))
    if tokenizer.chat_template is not None:
        writer.add_file(CHAT_TEMPLATE, tokenizer.chat_template)
    writer.add_file(GENERATION_CONFIG, _json(tokenizer.generation_config))


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _manifest(
    options: BuildOptions,
    checkpoint: Checkpoint,
    fingerprint: str,
    config: TargetConfig,
    slots: int,
    tokenizer: TokenizerFiles,
) -> Manifest:
    names = options.drafters or (DEFAULT_DRAFTER, *(name for name in DRAFTERS if name != DEFAULT_DRAFTER))
    offered = [name for name in dict.fromkeys(names) if name != NO_DRAFTER]
    return Manifest(
        schema=SCHEMA_VERSION,
        contract=CONTRACT_VERSION,
        tools=tool_versions(),
        command=tuple(["specexport", *sys.argv[1:]]),
        target=TargetInfo(
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
            features_size=len(options.features) * config.hidden_size,
            windows=tuple(layer.window for layer in config.layers),
        ),
        engine="onnxruntime-cpu",
        drafters=tuple(DrafterInfo(name=name, kind=name, options={}, graph=None, tree=None) for name in offered),
        drafter=names[0] if names[0] != NO_DRAFTER else None,
        stop_ids=tokenizer.stop_ids,
        lineage=Lineage(
            source=checkpoint.source, revision=options.revision, fingerprint=fingerprint, head_fingerprint=None
        ),
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
