"""The verbs that make heads and watch them: ``train`` and ``drift``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from specexport.exporter.cli import echo_json, threads_option
from specexport.exporter.cli_inspect import echo_table
from specexport.exporter.doctor import require_export
from specexport.exporter.progress import Progress
from specexport.runtime.manifest import DTYPES

_METHODS = {
    "eagle3": "EAGLE-3: a small decoder on three of the target's states, trained on its own drafts.",
    "eagle1": "EAGLE-1: a small decoder on the target's last state.",
    "medusa": "Medusa: independent heads on the target's last state.",
}
#: ``train.heads.LM_HEADS``, which needs torch.
MEDUSA_LAYOUTS = ("medusa-legacy", "medusa", "vllm")
_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.group
def train() -> None:
    """Train speculative heads for your own target, from texts or from what it writes itself."""


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that all methods share."""
    for option in reversed(
        (
            click.option("--target", required=True, metavar="MODEL", help="Directory, hub id or GGUF file."),
            click.option(
                "--data",
                type=_FILE,
                multiple=True,
                help="Texts, chats or prompts: .jsonl with messages, prompt or text, or plain paragraphs; .gz too.",
            ),
            click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="Directory to make."),
            click.option("--field", "prompt_field", default="prompt", show_default=True, help="Prompts in the data."),
            click.option(
                "--self-prompts", type=click.IntRange(0), metavar="N", help="Prompts that the target makes up."
            ),
            click.option("--openers", type=_FILE, help="How made-up prompts may begin, one a line."),
            click.option("--max-answer", type=click.IntRange(4), metavar="N", help="Tokens. [default: 160]"),
            click.option("--max-prompt", type=click.IntRange(4), metavar="N", help="Tokens. [default: 1024]"),
            click.option("--sampled", type=click.FloatRange(0, 1), help="Share of sampled answers. [default: 0.2]"),
            click.option("--temperature", type=click.FloatRange(0, 10), help="Of those. [default: 0.8]"),
            click.option("--visits", type=click.IntRange(1), help="Rows to learn, repeats counted. [default: 1000000]"),
            click.option("--batch", type=click.IntRange(1), help="Rows of a step. [default: 384]"),
            click.option("--micro", type=click.IntRange(1), help="Rows at once; saves memory. [default: 1024]"),
            click.option("--optimiser", type=click.Choice(("adamw", "muon")), help="Of matrices. [default: adamw]"),
            click.option("--matrix-lr", type=float, help="Learning rate of matrices. [default: 0.002]"),
            click.option("--lr", type=float, help="Of norms and biases. [default: 0.001]"),
            click.option("--seed", type=click.IntRange(0), default=0, show_default=True),
            click.option("--init", metavar="HEADS", help="A head to go on from, such as one of an older target."),
            click.option("--work", type=click.Path(path_type=Path), help="Cache of data. [default: OUTPUT.work]"),
            click.option("--precision", type=click.Choice(("bf16", "fp32")), default="bf16", show_default=True),
            click.option("--dtype", type=click.Choice(DTYPES), default="fp16", show_default=True, help="Of the files."),
            click.option("--device", default="cpu", show_default=True, help="cpu or cuda."),
            click.option("--tokenizer", type=click.Path(path_type=Path), help="Where to take the tokenizer from."),
            click.option("--revision", help="Branch, tag or commit of a hub model."),
            click.option("--offline", is_flag=True, help="Use only what the hub cache already has."),
            threads_option,
            click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON."),
        )
    ):
        command = option(command)
    return command


def _run(method: str, as_json: bool, threads: int, **options: Any) -> None:
    require_export("train")
    import torch

    from specexport.exporter.train.heads import Shape
    from specexport.exporter.train.make import MakeOptions
    from specexport.exporter.train.prompts import Openers
    from specexport.exporter.train.run import RunOptions
    from specexport.exporter.train.run import train as run
    from specexport.exporter.train.trainer import TrainOptions

    if threads:
        torch.set_num_threads(threads)
    chosen = {name: value for name, value in options.items() if value is not None}
    seed, precision = chosen.pop("seed"), chosen.pop("precision")

    def take(*names: str) -> dict[str, Any]:
        return {name: chosen.pop(name) for name in names if name in chosen}

    if openers := chosen.pop("openers", None):
        texts = openers.read_text(encoding="utf-8").splitlines()
        chosen["openers"] = Openers(tuple(line for line in texts if line.strip()))
    make = take("self_prompts", "max_answer", "max_prompt", "sampled", "temperature", "openers")
    fitting = take("visits", "batch", "micro", "optimiser", "matrix_lr", "lr", "head_lr", "steps")
    shape = Shape(**take("intermediate", "heads", "layers"))
    if method == "medusa":
        fitting["steps"] = fitting["first_steps"] = shape.heads
    elif method == "eagle1":
        fitting["steps"] = fitting["first_steps"] = 1
    figures = run(
        RunOptions(
            method=method,
            make=MakeOptions(seed=seed, **make),
            train=TrainOptions(seed=seed, dtype={"bf16": "bfloat16", "fp32": "float32"}[precision], **fitting),
            shape=shape,
            **chosen,
        ),
        Progress(),
    )
    if as_json:
        echo_json(figures)
    else:
        held = figures["held_out"]
        echo_table(
            {
                "head": chosen["output"],
                "data": f"{figures['sequences']} sequences, {figures['rows']} rows, {figures['visits']} visits",
                "held out": f"expected tau {held['tau']:.2f}, agreement "
                + " ".join(f"{share:.2f}" for share in held["agreement"]),
            }
        )


@train.command(help=_METHODS["eagle3"])
@_common
@click.option("--steps", type=click.IntRange(1, 16), help="Unrolled draft steps. [default: 4]")
@click.option("--draft-vocab", type=click.IntRange(1), metavar="N", help="Tokens it can draft. [default: 16384]")
@click.option("--head-lr", type=float, help="Learning rate of its lm_head. [default: 0, the target's rows stay]")
@click.option("--share-lm-head", is_flag=True, help="Leave the target's rows out of the file: for specexport only.")
@click.option("--intermediate", type=click.IntRange(1), metavar="N", help="Width of its MLP. [default: the target's]")
def eagle3(**options: Any) -> None:
    _run("eagle3", **options)


@train.command(help=_METHODS["eagle1"])
@_common
@click.option("--intermediate", type=click.IntRange(1), metavar="N", help="Width of its MLP. [default: the target's]")
def eagle1(**options: Any) -> None:
    _run("eagle1", **options)


@train.command(help=_METHODS["medusa"])
@_common
@click.option("--heads", type=click.IntRange(1, 16), default=4, show_default=True)
@click.option("--layers", type=click.IntRange(1, 8), default=1, show_default=True, help="Residual blocks of a head.")
@click.option("--draft-vocab", type=click.IntRange(1), metavar="N", help="Tokens its loss always has. [default: 16384]")
@click.option(
    "--layout",
    type=click.Choice(MEDUSA_LAYOUTS),
    default=MEDUSA_LAYOUTS[0],
    show_default=True,
    help="Of the files: without an lm_head (small), a copy in every head, or one for vLLM.",
)
def medusa(**options: Any) -> None:
    _run("medusa", **options)


def _counting(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(
        (
            click.option("--drafter", "drafters", multiple=True, help="Only these. [default: all]"),
            click.option("--count", type=click.IntRange(1), default=32, show_default=True, help="Prompts to use."),
            click.option("--max-tokens", type=click.IntRange(2), default=128, show_default=True, help="Of an answer."),
            click.option("--temperature", type=click.FloatRange(0, 10), default=0.0, show_default=True),
            threads_option,
            click.option("--json", "as_json", is_flag=True, help="Print the result as JSON."),
        )
    ):
        command = option(command)
    return command


@train.command
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--data", type=_FILE, required=True, help="Prompts: one a line, or JSON lines (.jsonl, .gz).")
@_counting
def calibrate(bundle: Path, as_json: bool, **options: Any) -> None:
    """Count how often BUNDLE's drafts come true, by depth and rank, and store it in the bundle."""
    from specexport.exporter.train import fit
    from specexport.runtime.bundle import Bundle
    from specexport.runtime.records import plain

    found, path = fit.calibrate(Bundle.load(bundle), fit.CountOptions(**options), Progress())
    if as_json:
        echo_json({"path": str(path), **plain(found)})
        return
    rows = {
        name: f"tau {fit.expected_tau(fit.chance_by_depth(table)):.2f}, best draft "
        + " ".join(f"{share:.2f}" for share in table.top1)
        for name, table in found.drafters.items()
    }
    echo_table({"stored": path, **rows})


@click.command
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--data", type=_FILE, help="Prompts to run now.")
@click.option("--statistics", type=_FILE, help="Or what run --json printed (one run, a list, or JSON lines).")
@click.option("--target", metavar="MODEL", help="Checkpoint to compare with the one the bundle was built from.")
@click.option("--baseline", type=click.Path(path_type=Path), help="Bundle whose record counts (the old target's).")
@click.option("--threshold", type=click.FloatRange(0, 1), default=0.9, show_default=True, help="Of the recorded tau.")
@_counting
def drift(
    bundle: Path,
    data: Path | None,
    statistics: Path | None,
    target: str | None,
    baseline: Path | None,
    threshold: float,
    as_json: bool,
    **options: Any,
) -> int:
    """Compare how often BUNDLE's drafts come true now with what it recorded; exit 1 when a head no longer fits."""
    from specexport.exporter.train import fit
    from specexport.runtime.bundle import Bundle

    if data is not None and statistics is not None:
        raise click.UsageError("--data and --statistics exclude each other")
    report = fit.measure_drift(
        Bundle.load(bundle),
        Progress(),
        options=None if data is None else fit.CountOptions(data=data, **options),
        statistics=statistics,
        target=target,
        baseline=None if baseline is None else Bundle.load(baseline),
        threshold=threshold,
    )
    if as_json:
        echo_json(report.to_dict())
        return 0 if report.fits else 1
    for one in report.drifts:
        click.echo(
            f"{'fits' if one.share >= threshold else 'DRIFTED':<8} {one.drafter}: tau {one.current:.2f}, recorded "
            f"{one.recorded:.2f} ({one.share:.0%}, limit {threshold:.0%})"
        )
    if report.target_changed is not None:
        click.echo("CHANGED  target: not the one of the bundle" if report.target_changed else "same     target")
    if not report.fits:
        click.echo("train again with: specexport train METHOD --init HEADS")
    return 0 if report.fits else 1
