"""The verbs that decode: ``run`` and ``demo``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from specexport.exporter.cli import echo_json, threads_option
from specexport.exporter.progress import Progress
from specexport.runtime.rules import DEFAULT_RULE, RULES

#: Sampling options: field of SamplingParams, type, help. Unset ones are the model's own defaults.
SAMPLING: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "0 is greedy."),
    ("top_k", int, "Tokens kept, 0 for all."),
    ("top_p", float, "Probability mass kept."),
    ("min_p", float, "Least probability kept, relative to the best token's."),
    ("repetition_penalty", float, "Over prompt and output; 1 is off."),
    ("presence_penalty", float, "Over the output; 0 is off."),
    ("frequency_penalty", float, "Over the output; 0 is off."),
    ("seed", int, "Same seed, same tokens, with or without speculation."),
    ("logprobs", int, "Also report this many best tokens (with --json)."),
    ("min_tokens", int, "No stop before this many tokens."),
    ("max_tokens", int, "Most tokens of the output."),
)


def sampling_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add an option for each field of :data:`SAMPLING`."""
    for name, kind, text in reversed(SAMPLING):
        function = click.option(f"--{name.replace('_', '-')}", name, type=kind, help=text)(function)
    return function


def token_bias(value: str) -> tuple[int, float]:
    """``ID=BIAS``."""
    try:
        token, bias = value.split("=")
        return int(token), float(bias)
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a token id and its bias, such as 42=-5") from None


@click.command
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--chat", is_flag=True, help="Send the prompt through the model's chat template.")
@click.option("--no-spec", is_flag=True, help="Plain decoding; the tokens are the same.")
@click.option("--drafter", help="Drafter, or auto. [default: auto where it has to decide, else the bundle's]")
@click.option(
    "--acceptance",
    type=click.Choice(list(RULES)),
    default=DEFAULT_RULE,
    show_default=True,
    help="How drafts are judged: match gives plain decoding's tokens, rejection its distribution; typical is lossy.",
)
@sampling_options
@click.option(
    "--logit-bias",
    type=token_bias,
    metavar="ID=BIAS",
    multiple=True,
    help="Added to the logit of a token; repeat for more.",
)
@click.option("--stop", multiple=True, help="Text that ends the output; repeat for more.")
@click.option("--engine", help="Engine to run on. [default: the bundle's]")
@threads_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end instead of text as it comes.")
def run(
    bundle: Path,
    prompt: str | None,
    chat: bool,
    no_spec: bool,
    drafter: str | None,
    acceptance: str,
    stop: tuple[str, ...],
    engine: str | None,
    threads: int,
    as_json: bool,
    logit_bias: tuple[tuple[int, float], ...],
    **sampling: Any,
) -> None:
    """Answer PROMPT, or standard input, from a bundle."""
    if no_spec and drafter not in (None, "none"):
        raise click.UsageError("--no-spec and --drafter exclude each other")
    from specexport.exporter.demo import run_record
    from specexport.runtime.auto import default_policy
    from specexport.runtime.bundle import Bundle
    from specexport.runtime.rules import DEFAULT_RULE
    from specexport.runtime.session import Session, default_params

    text = _standard_input() if prompt is None else prompt
    opened = Bundle.load(bundle)
    params = default_params(opened.generation_config, logit_bias=dict(logit_bias) or None, **sampling)
    if no_spec:
        drafter = "none"
    elif drafter is None and acceptance == DEFAULT_RULE:  # other rules cannot judge every drafter
        drafter = default_policy(opened, engine or opened.manifest.engine, threads)
    session = Session(opened, drafter=drafter, engine=engine, threads=threads, acceptance=acceptance)
    result = None
    for chunk in session.stream(text, params, stop=stop, chat=chat):
        result = chunk.result
        if not as_json:
            click.echo(chunk.text, nl=False)  # flushes
    assert result is not None
    if as_json:
        echo_json(run_record(opened, result))
        return
    click.echo()
    figures = result.statistics
    if figures.lossy:
        click.echo(f"note: {figures.acceptance} acceptance is lossy: this is not the model's own output", err=True)
    if figures.drafter != "none" and not session.width_exact:
        click.echo("note: this engine rounds by the width of a call: tokens may differ from plain decoding", err=True)
    if sys.stderr.isatty():
        click.echo(
            f"[{figures.tokens} tokens, {figures.tokens_per_second:.1f} tokens/s, tau {figures.tau:.2f}, "
            f"drafter {figures.drafter}, {result.finish_reason}]",
            err=True,
        )


def _standard_input() -> str:
    if sys.stdin is None:  # closed by whoever started us
        return ""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"the prompt on standard input is not UTF-8 (byte {error.start})") from None


@click.command
@click.option("--prompt", help="What to ask. [default: a question with something to predict in its answer]")
@click.option("--cache", type=click.Path(path_type=Path, file_okay=False), help="Where to keep model and bundle.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Length of the answer.")
@click.option("--heads/--no-heads", default=True, help="Build the trained heads in.  [default: heads]")
@threads_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def demo(prompt: str | None, cache: Path | None, max_tokens: int, heads: bool, threads: int, as_json: bool) -> int:
    """Fetch a small model, build a bundle, and answer a prompt twice: plain and speculative."""
    from specexport.exporter.demo import PROMPT, compare, demo_bundle
    from specexport.exporter.doctor import require_export

    require_export("demo")
    progress = Progress()
    prompt = PROMPT if prompt is None else prompt
    result = compare(demo_bundle(progress, cache, heads), prompt, max_tokens, threads, progress)
    if as_json:
        echo_json(result.to_dict())
    else:
        plain, fast = result.plain.statistics, result.speculative.statistics
        click.echo(f"prompt: {prompt}\n\n{result.speculative.text}\n")
        click.echo(f"plain        {plain.tokens_per_second:7.1f} tokens/s")
        click.echo(
            f"speculative  {fast.tokens_per_second:7.1f} tokens/s  "
            f"({fast.tokens_per_second / max(plain.tokens_per_second, 1e-9):.2f}x, tau {fast.tau:.2f}, {fast.drafter})"
        )
        verdict = "identical" if result.tokens_identical else "DIFFERENT"
        click.echo(f"tokens       {verdict}, {fast.tokens} of them\nbundle       {result.bundle.path}")
    return 0 if result.tokens_identical else 1
