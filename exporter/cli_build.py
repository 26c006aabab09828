"""The verbs that make and check bundles: ``build`` and ``verify``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specexport.engines.tensorrt_module import BACKENDS
from specexport.exporter.cli import echo_json, threads_option
from specexport.exporter.cli_compile import echo_plans
from specexport.exporter.cli_inspect import echo_table, size
from specexport.exporter.doctor import require_export
from specexport.exporter.heads.trees import TREES, read_tree
from specexport.exporter.progress import Progress
from specexport.runtime.drafters import DRAFTERS, NO_DRAFTER
from specexport.runtime.manifest import DTYPES, PRECISIONS

if TYPE_CHECKING:
    from specexport.exporter.compile import CompileOptions

#: ``NAME:VALUE``.
_DRAFTER_VALUE = re.compile(r"([a-z0-9][a-z0-9_-]{0,63}):(.+)")


def feature_list(value: str) -> tuple[int | str, ...]:
    """Comma-separated boundaries of the residual stream: a layer's number, or ``final``."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() or part == "final" for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of layers such as 2,15,27 or 8,final")
    return tuple(part if part == "final" else int(part) for part in parts)


class PerDrafter(click.ParamType[tuple[str | None, Any]]):
    """``VALUE`` for all drafters or ``NAME:VALUE`` for one: (name or None, value)."""

    def __init__(self, inner: click.ParamType[Any] | Callable[[str], Any]) -> None:
        self._inner = click.types.convert_type(inner)
        self.name = self._inner.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str | None, Any]:
        """See :class:`click.ParamType`."""
        named = _DRAFTER_VALUE.fullmatch(value)
        name, rest = named.groups() if named else (None, value)
        return name, self._inner.convert(rest, param, ctx)


@click.command
@click.argument("source")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Directory to make.")
@click.option("--revision", help="Branch, tag or commit of a hub model.")
@click.option("--offline", is_flag=True, help="Use only what the hub cache already has.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Directory or file to take the tokenizer from.")
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    help="Of the layers' weights; fp8 and nvfp4 are for GPUs. [default: fp32]",
)
@click.option(
    "--lm-head", type=click.Choice(PRECISIONS), help="Of the output table. [default: int8 where weights have 4 bits]"
)
@click.option("--embedding", type=click.Choice(PRECISIONS), help="Of the input table. [default: as --lm-head]")
@click.option(
    "--drafter-precision",
    type=click.Choice(PRECISIONS),
    help="Of heads and draft model. [default: as --precision, int8 beside fp32]",
)
@click.option(
    "--block-size",
    type=click.Choice([0, 16, 32, 64, 128, 256]),
    help="Weights that share a scale, 0: a row. [default: int8 0, int4 32]",
)
@click.option(
    "--calibrate",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Fit int4 or int8 codes to this text (GPTQ), plain or gzip. [default: round to nearest]",
)
@click.option("--calibration-tokens", type=click.IntRange(min=1), metavar="N", help="Of it, at most. [default: 8192]")
@click.option(
    "--check/--no-check", default=True, help="Compare int4 and int8 weights with the checkpoint on a short text."
)
@click.option("--asymmetric", is_flag=True, help="int4 and int8 codes with zero points; TensorRT takes none.")
@click.option(
    "--activations",
    type=click.Choice(DTYPES),
    help="Between the products, and caches; onnxruntime-cpu cannot run bf16. [default: fp32, fp16 for GPU weights]",
)
@click.option(
    "--exact/--no-exact",
    default=True,
    show_default=True,
    help="On the CPU compute rows so that they do not depend on the number of drafts.",
)
@click.option(
    "--window",
    type=click.IntRange(min=8),
    metavar="S",
    help="Cache slots: most tokens of prompt and output. [default: 4096, or the model's limit if that is less]",
)
@click.option("--prefill-chunk", type=click.IntRange(min=1), metavar="N", help="Most prompt tokens in one call.")
@click.option(
    "--drafter",
    "drafters",
    type=click.Choice([NO_DRAFTER, *DRAFTERS]),
    multiple=True,
    help="Drafter to offer; repeat for more, the first is used unless told otherwise. [default: all]",
)
@click.option(
    "--features",
    type=feature_list,
    metavar="L,L,..",
    help="States that the graph also outputs: what enters layer L, or final.",
)
@click.option(
    "--heads",
    metavar="[NAME=]HEADS",
    multiple=True,
    help="Speculative heads to draft with: a directory or a hub id; repeat for more, the first is the default.",
)
@click.option("--draft-model", metavar="MODEL", help="Model to draft with: a directory, a hub id or a GGUF file.")
@click.option("--draft-revision", help="Branch, tag or commit of a hub draft model.")
@click.option("--draft-tokenizer", type=click.Path(path_type=Path), help="As --tokenizer, for the draft model.")
@click.option(
    "--tree",
    type=PerDrafter(read_tree),
    multiple=True,
    metavar="NAME|FILE",
    help=f"Static tree of drafts: {', '.join(TREES)}, or a JSON list of rank paths. [default: grown each step]",
)
@click.option(
    "--draft-depth",
    "depth",
    type=PerDrafter(click.IntRange(1, 32)),
    multiple=True,
    help="Deepest draft of recurrent heads or a draft model. [default: 5]",
)
@click.option(
    "--draft-topk",
    "topk",
    type=PerDrafter(click.IntRange(1, 64)),
    multiple=True,
    help="Candidates of each draft. [default: 8]",
)
@click.option(
    "--draft-nodes",
    "nodes",
    type=PerDrafter(click.IntRange(1, 256)),
    multiple=True,
    help="Drafted nodes of a tree. [default: 15]",
)
@click.option(
    "--backend", type=click.Choice(list(BACKENDS)), help="Also compile plans, as 'compile' does. [default: --profile's]"
)
@click.option("--profile", metavar="NAME|FILE", help="Device to compile for; also gives the default precision.")
@click.option("--overwrite", is_flag=True, help="Replace a bundle that is already there.")
@threads_option
@click.option("--json", "as_json", is_flag=True, help="Print path, stage times and peak memory as JSON.")
def build(as_json: bool, threads: int, backend: str | None, profile: str | None, **options: Any) -> None:
    """Export SOURCE (a directory, a hub id or a GGUF file) to a self-contained bundle.

    --tree and --draft-... are for all heads and the draft model; NAME:VALUE is for one of them, such as
    --draft-depth medusa-2:4.
    """
    require_export("build")
    from specexport.exporter import pipeline
    from specexport.exporter.heads.build import DraftOptions
    from specexport.exporter.quantize.choice import PrecisionOptions

    if threads:
        import torch

        torch.set_num_threads(threads)
    chosen = {name: value for name, value in options.items() if value is not None}
    plans = None if backend is None and profile is None else _plans(chosen, backend, profile)
    names = ("precision", "lm_head", "embedding", "block_size", "activations", "exact")
    formats = {name: chosen.pop(name) for name in names if name in chosen}
    precision = PrecisionOptions(**formats, symmetric=not chosen.pop("asymmetric"))
    shapes: dict[str | None, dict[str, Any]] = {None: {}}
    for option in ("tree", "depth", "topk", "nodes"):
        for drafter, value in chosen.pop(option):
            shapes.setdefault(drafter, {})[option] = value
    draft = DraftOptions(**shapes[None])
    named = {drafter: replace(draft, **shape) for drafter, shape in shapes.items() if drafter is not None}
    request = pipeline.BuildOptions(**chosen, precision=precision, draft=draft, named_drafts=named)
    result = pipeline.build(request, Progress())
    facts = {"bundle": str(result.bundle.path), "stages": result.stages, "peak_rss_bytes": result.peak_rss_bytes}
    if not as_json:
        echo_table({"bundle": result.bundle.path, "peak memory": size(result.peak_rss_bytes)})
    if plans is not None:
        from specexport.exporter.compile import compile_bundle, describe

        compiled = compile_bundle(plans, Progress())
        facts |= {"engines": str(compiled.folder), "graphs": describe(compiled)}
        if not as_json:
            echo_plans(compiled)
    if as_json:
        echo_json(facts)


def _plans(chosen: dict[str, Any], backend: str | None, profile: str | None) -> CompileOptions:
    """What to compile after a build, checked before it; its defaults go into ``chosen``."""
    from specexport.engines.tensorrt_module import open_compiler
    from specexport.exporter.compile import CompileOptions
    from specexport.profiles.schema import load_profile

    if profile is None:
        raise click.UsageError(f"--backend {backend} needs --profile: see 'specexport profiles list'")
    device = load_profile(profile)
    open_compiler(backend or device.backend)
    chosen.setdefault("precision", device.precision)
    if chosen["precision"] not in DTYPES:
        chosen.setdefault("activations", "fp16")
    return CompileOptions(chosen["output"], profile, backend)


@click.command
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, exists=True),
    help="What the bundle was built from: also compare with Transformers.",
)
@click.option("--prompts", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="One prompt a line.")
@click.option("--engine", help="Engine to run on. [default: the bundle's]")
@click.option(
    "--backend", metavar="ENGINE", help="Instead compare this engine's outputs with the exported graph's, call by call."
)
@click.option(
    "--layers",
    is_flag=True,
    help="Of --backend: also every tensor inside; name the first that is off. Not of plans, which show none.",
)
@click.option(
    "--quality", is_flag=True, help="Instead measure perplexity, and agreement with --checkpoint or --reference."
)
@click.option("--text", type=click.Path(path_type=Path), metavar="FILE", help="Of --quality: text, plain or gzip.")
@click.option("--reference", type=click.Path(path_type=Path), metavar="BUNDLE", help="Of --quality: compare with it.")
@click.option("--tokens", type=click.IntRange(min=2), metavar="N", help="Of --quality: tokens of the text, at most.")
@click.option("--context", "window", type=click.IntRange(min=2), metavar="N", help="Of --quality: tokens a window.")
@click.option("--stride", type=click.IntRange(min=1), metavar="N", help="Of --quality: tokens from window to window.")
@threads_option
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def verify(as_json: bool, quality: bool, backend: str | None, layers: bool, **options: Any) -> int:
    """Check a bundle's logits and tokens against a recompute, write report.json; exit 1 when a check fails.

    With --quality, measure instead how good the model still is: report.json keeps both. With --backend, find where an
    engine departs from the exported graph on onnxruntime-cpu.
    """
    if backend is not None:
        if quality or any(value for name, value in options.items() if name not in ("bundle", "threads")):
            raise click.UsageError("--backend goes with --layers, --threads and --json alone")
        return _backend(as_json, options["bundle"], backend, options["threads"], layers)
    if layers:
        raise click.UsageError("--layers is for --backend: add it")
    if options["checkpoint"]:
        require_export("verify --checkpoint")
    measured = {name: options.pop(name) for name in ("text", "reference", "tokens", "window", "stride")}
    measured = {name: value for name, value in measured.items() if value is not None}
    if quality:
        if options.pop("prompts") is not None:
            raise click.UsageError("--prompts is not for --quality: name a --text")
        return _quality(as_json, options | measured)
    if measured:
        option = "context" if "window" in measured else min(measured)
        raise click.UsageError(f"--{option} is for --quality: add it")
    from specexport.exporter import verify as verification

    report = verification.verify(**options, progress=Progress())
    if as_json:
        echo_json(report.to_dict())
    else:
        for check in report.checks:
            click.echo(
                f"{'passed' if check.passed else 'FAILED'}  {check.name}: {check.figure:g} (limit {check.limit:g})"
                + (f"; {check.remark}" if check.passed and check.remark else "")
            )
        click.echo("passed" if report.passed else "FAILED")
    return 0 if report.passed else 1


def _quality(as_json: bool, options: dict[str, Any]) -> int:
    from specexport.exporter.quantize.quality import measure

    report = measure(**{"text": None} | options, progress=Progress()).to_dict()
    if as_json:
        echo_json(report)
    else:
        echo_table({name: f"{value:.5g}" if isinstance(value, float) else value for name, value in report.items()})
    return 0


def _backend(as_json: bool, bundle: Path, backend: str, threads: int, layers: bool) -> int:
    if layers:
        require_export("verify --layers")
    from specexport.exporter.backend_check import compare

    found = compare(bundle, backend, threads=threads, layers=layers, progress=Progress())
    if as_json:
        echo_json(found.to_dict())
        return 0 if found.passed else 1
    for name, worst in found.outputs.items():
        verdict = "passed" if worst.relative <= found.limit else "FAILED"
        click.echo(f"{verdict}  {name}: {worst.relative:g} (limit {found.limit:g}), most in {worst.where}")
    if found.first is not None:
        off = found.layers[found.first].relative
        click.echo(f"FAILED  first tensor that is off: {found.first} of {found.operators[found.first]}, by {off:g}")
    elif layers:
        click.echo(f"passed  {len(found.layers)} tensors inside")
    click.echo("passed" if found.passed else "FAILED")
    return 0 if found.passed else 1
