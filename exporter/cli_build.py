"""The verbs that make and check bundles: ``build`` and ``verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from specexport.exporter.cli import echo_json, threads_option
from specexport.exporter.cli_inspect import echo_table, size
from specexport.exporter.doctor import require_export
from specexport.exporter.heads.trees import TREES, read_tree
from specexport.exporter.progress import Progress
from specexport.runtime.drafters import DRAFTERS, NO_DRAFTER
from specexport.runtime.manifest import DTYPES


def feature_list(value: str) -> tuple[int | str, ...]:
    """Comma-separated boundaries of the residual stream: a layer's number, or ``final``."""
    parts = [part.strip() for part in value.split(",")]
    if not all(part.isdecimal() or part == "final" for part in parts):
        raise click.BadParameter(f"{value!r} is not a list of layers such as 2,15,27 or 8,final")
    return tuple(part if part == "final" else int(part) for part in parts)


@click.command
@click.argument("source")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Directory to make.")
@click.option("--revision", help="Branch, tag or commit of a hub model.")
@click.option("--offline", is_flag=True, help="Use only what the hub cache already has.")
@click.option("--tokenizer", type=click.Path(path_type=Path), help="Directory or file to take the tokenizer from.")
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="fp32",
    show_default=True,
    help="Of weights and cache; onnxruntime-cpu cannot run bf16.",
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
@click.option("--heads", metavar="HEADS", help="Speculative heads to draft with: a directory or a hub id.")
@click.option("--draft-model", metavar="MODEL", help="Model to draft with: a directory, a hub id or a GGUF file.")
@click.option("--draft-revision", help="Branch, tag or commit of a hub draft model.")
@click.option("--draft-tokenizer", type=click.Path(path_type=Path), help="As --tokenizer, for the draft model.")
@click.option(
    "--tree",
    type=read_tree,
    metavar="NAME|FILE",
    help=f"Static tree of drafts: {', '.join(TREES)}, or a JSON list of rank paths. [default: grown each step]",
)
@click.option(
    "--draft-depth",
    "depth",
    type=click.IntRange(1, 32),
    help="Deepest draft of recurrent heads or a draft model. [default: 5]",
)
@click.option("--draft-topk", "topk", type=click.IntRange(1, 64), help="Candidates of each draft. [default: 8]")
@click.option("--draft-nodes", "nodes", type=click.IntRange(1, 256), help="Drafted nodes of a tree. [default: 15]")
@click.option("--overwrite", is_flag=True, help="Replace a bundle that is already there.")
@threads_option
@click.option("--json", "as_json", is_flag=True, help="Print path, stage times and peak memory as JSON.")
def build(as_json: bool, threads: int, **options: Any) -> None:
    """Export SOURCE (a directory, a hub id or a GGUF file) to a self-contained bundle."""
    require_export("build")
    from specexport.exporter import pipeline
    from specexport.exporter.heads.build import DraftOptions

    if threads:
        import torch

        torch.set_num_threads(threads)
    chosen = {name: value for name, value in options.items() if value is not None}
    draft = {name: chosen.pop(name) for name in ("tree", "depth", "topk", "nodes") if name in chosen}
    result = pipeline.build(pipeline.BuildOptions(**chosen, draft=DraftOptions(**draft)), Progress())
    if as_json:
        echo_json({"bundle": str(result.bundle.path), "stages": result.stages, "peak_rss_bytes": result.peak_rss_bytes})
    else:
        echo_table({"bundle": result.bundle.path, "peak memory": size(result.peak_rss_bytes)})


@click.command
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path, exists=True),
    help="What the bundle was built from: also compare with Transformers.",
)
@click.option("--prompts", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="One prompt a line.")
@click.option("--engine", help="Engine to run on. [default: the bundle's]")
@threads_option
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def verify(as_json: bool, **options: Any) -> int:
    """Check a bundle's logits and tokens against a recompute, write report.json; exit 1 when a check fails."""
    if options["checkpoint"]:
        require_export("verify --checkpoint")
    from specexport.exporter import verify as verification

    report = verification.verify(**options, progress=Progress())
    if as_json:
        echo_json(report.to_dict())
    else:
        for check in report.checks:
            click.echo(
                f"{'passed' if check.passed else 'FAILED'}  {check.name}: {check.figure:g} (limit {check.limit:g})"
            )
        click.echo("passed" if report.passed else "FAILED")
    return 0 if report.passed else 1
