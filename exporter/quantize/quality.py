"""``verify --quality``: how good the target of a bundle is on a text, and how close to the unquantised model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnxruntime

from specexport.exporter.inspect import precision_words
from specexport.exporter.progress import Progress, Stage
from specexport.exporter.quantize.agreement import (
    DEFAULT_TOKENS,
    DEFAULT_WINDOW,
    Agreement,
    Quality,
    Rows,
    compare,
    engine_rows,
    rows_at_once,
)
from specexport.exporter.quantize.sample import SAMPLE
from specexport.exporter.quantize.text import Window, cut, prefix_of, read_tokens
from specexport.exporter.report import QUALITY, read_report, write_report
from specexport.runtime.bundle import Bundle
from specexport.runtime.engine import find_engine
from specexport.runtime.errors import SpecExportError, UsageError

if TYPE_CHECKING:
    from specexport.exporter.config import TargetConfig
    from specexport.exporter.weights import WeightSource

#: Worse than this, a build warns: mean divergence in nats, and share of equal first choices.
POOR_KL = 0.25
POOR_TOP1 = 0.75
#: Tokens of :data:`~specexport.exporter.quantize.sample.SAMPLE` that a build looks at, at most.
SAMPLE_TOKENS = 192


@dataclass(frozen=True, slots=True)
class QualityReport:
    """What was measured, on what, and how.

    Attributes:
        text: name of the file. window, stride: tokens. precision: of the bundle's target.
        reference: what the agreement is with, None without.
    """

    bundle: Path
    engine: str
    precision: str
    text: str
    window: int
    stride: int
    reference: str | None
    quality: Quality

    def to_dict(self) -> dict[str, Any]:
        """Stable JSON."""
        return {
            "bundle": str(self.bundle),
            "engine": self.engine,
            "onnxruntime": onnxruntime.__version__,
            "precision": self.precision,
            "text": self.text,
            "window": self.window,
            "stride": self.stride,
            "reference": self.reference,
            **self.quality.to_dict(),
        }


def measure(
    bundle: Path,
    *,
    text: Path | None,
    checkpoint: Path | None = None,
    reference: Path | None = None,
    engine: str | None = None,
    threads: int = 0,
    tokens: int = DEFAULT_TOKENS,
    window: int | None = None,
    stride: int | None = None,
    progress: Progress,
) -> QualityReport:
    """Measure the target of a bundle on a text, and write the result into its ``report.json``.

    Args:
        text: file to measure on, plain or gzip.
        checkpoint: to compare with, in float32. reference: bundle to compare with instead.
        tokens: of the text, at most. window, stride: see :func:`specexport.exporter.quantize.text.cut`; None: the
            smaller of :data:`DEFAULT_WINDOW` and the bundle's slots, without overlap.

    Raises:
        UsageError: a text, window or reference that is no use. BundleError: a bundle cannot be loaded.
    """
    if text is None:
        raise UsageError(
            "--quality needs a text to measure on: name a file with --text, such as wikitext-2's test part"
        )
    if checkpoint is not None and reference is not None:
        raise UsageError("--checkpoint and --reference exclude each other: compare with one of them")
    opened = Bundle.load(bundle)
    target, prefix = opened.manifest.target, prefix_of(opened.tokenizer)
    width = min(DEFAULT_WINDOW, target.slots) if window is None else window
    if width > target.slots:
        raise UsageError(f"a window of {width} tokens does not fit the bundle's {target.slots} cache slots")
    step = width - len(prefix) if stride is None else stride
    windows = cut(read_tokens(text, opened.tokenizer, tokens), prefix, width=width, stride=step)
    rows = rows_at_once(target.vocab_size, target.prefill_chunk)
    against = name = None
    if checkpoint is not None:
        against, name = _checkpoint_rows(checkpoint, opened, windows, rows, progress), f"{checkpoint.name} (fp32)"
    elif reference is not None:
        against, name = _bundle_rows(reference, opened, threads, windows, rows)
    used = engine or opened.manifest.engine
    loaded = find_engine(used)(opened.path, threads=threads)
    with progress.stage("quality", sum(window.scored for window in windows)) as stage:
        quality = compare(windows, rows, _advancing(engine_rows(loaded, windows, rows), stage), against)
    report = QualityReport(opened.path, used, _precision(opened), text.name, width, step, name, quality)
    record = report.to_dict()
    del record["bundle"]
    write_report(opened.path, read_report(opened.path) | {QUALITY: record})
    return report


def _precision(bundle: Bundle) -> str:
    return precision_words(asdict(bundle.manifest.target.precision))


def _advancing(rows: Iterator[Rows], stage: Stage) -> Iterator[Rows]:
    for found in rows:
        yield found
        stage.advance(len(found))


def _checkpoint_rows(
    checkpoint: Path, bundle: Bundle, windows: Sequence[Window], rows: int, progress: Progress
) -> Iterator[Rows]:
    """Logits of a checkpoint in float32, as :func:`engine_rows` gives them."""
    from specexport.exporter.checkpoint import open_checkpoint
    from specexport.exporter.config import read_config
    from specexport.exporter.heads.merged import target_view

    source = target_view(open_checkpoint(str(checkpoint)))
    config = read_config(source.config)
    _same_vocabulary(config.vocab_size, str(checkpoint), bundle)
    return module_rows(config, source.weights, bundle.manifest.target.slots, windows, rows, progress)


def module_rows(
    config: TargetConfig,
    weights: WeightSource,
    slots: int,
    windows: Sequence[Window],
    rows: int,
    progress: Progress,
) -> Iterator[Rows]:
    """Logits of the float32 module of a checkpoint, as :func:`engine_rows` gives them; one block in memory at a time.

    Args:
        slots: S of the bundle.
    """
    from specexport.exporter.quantize.layerwise import Layerwise, logits

    with progress.stage("reference", config.num_layers) as stage:
        run = Layerwise(config, weights, slots, [window.tokens for window in windows])
        for _, block in run.blocks():
            run.advance(block)
            stage.advance()
        head = run.finish()
    return logits(run, head, windows, rows)


def _bundle_rows(
    reference: Path, bundle: Bundle, threads: int, windows: Sequence[Window], rows: int
) -> tuple[Iterator[Rows], str]:
    """Logits of another bundle, and what it is called."""
    other = Bundle.load(reference)
    target = other.manifest.target
    _same_vocabulary(target.vocab_size, str(reference), bundle)
    if (longest := max(len(window.tokens) for window in windows)) > target.slots:
        raise UsageError(f"a window of {longest} tokens does not fit the {target.slots} cache slots of {reference}")
    engine = find_engine(other.manifest.engine)(other.path, threads=threads)
    return engine_rows(engine, windows, rows), f"{other.path.name} ({_precision(other)})"


def _same_vocabulary(size: int, name: str, bundle: Bundle) -> None:
    own = bundle.manifest.target.vocab_size
    if size != own:
        raise UsageError(
            f"{name} has a vocabulary of {size}, the bundle of {own}: compare with what the bundle was built from"
        )


def check_build(bundle: Bundle, config: TargetConfig, weights: WeightSource, progress: Progress) -> Agreement | None:
    """A quick look at a new bundle: its agreement with the checkpoint on a few hundred tokens of prose and code.

    Logs it, and a warning when it is poor by :data:`POOR_KL` or :data:`POOR_TOP1`, or cannot be measured (the bundle
    is there all the same).
    """
    try:
        found = _agreement(bundle, config, weights)
    except SpecExportError as error:
        progress.log(f"warning: the agreement with the checkpoint could not be measured: {error}")
        return None
    said = f"KL {found.kl:.3f} nats, same first choice {found.top1:.0%}"
    if found.kl <= POOR_KL and found.top1 >= POOR_TOP1:
        progress.log(f"agreement with the checkpoint on a short text: {said}")
    else:
        progress.log(
            f"warning: the bundle agrees poorly with its checkpoint ({said}; expected at most {POOR_KL:g} and at least "
            f"{POOR_TOP1:.0%}): use --calibrate, a smaller block or more bits; verify --quality measures it on a text"
        )
    return found


def _agreement(bundle: Bundle, config: TargetConfig, weights: WeightSource) -> Agreement:
    target, prefix = bundle.manifest.target, prefix_of(bundle.tokenizer)
    tokens = bundle.tokenizer.encode(SAMPLE, add_special=False)
    width = min(SAMPLE_TOKENS, target.slots)
    windows = cut(tokens[: width - len(prefix)], prefix, width=width, stride=width - len(prefix))
    rows = rows_at_once(target.vocab_size, target.prefill_chunk)
    against = module_rows(config, weights, target.slots, windows, rows, Progress(quiet=True))
    engine = find_engine(bundle.manifest.engine)(bundle.path)
    found = compare(windows, rows, engine_rows(engine, windows, rows), against).agreement
    assert found is not None  # there is a reference
    return found
