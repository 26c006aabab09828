"""The verb that compares plain and speculative decoding: ``bench``."""

from __future__ import annotations

from pathlib import Path

import click

from specexport.exporter.bench.suites import DATA_VARIABLE, SUITES
from specexport.exporter.cli import echo_json, threads_option
from specexport.exporter.cli_inspect import echo_columns
from specexport.exporter.progress import Progress


@click.command
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--suite", required=True, metavar="NAME|FILE", help=f"Prompts: {', '.join(SUITES)}, or a file of JSON lines."
)
@click.option(
    "--data",
    type=click.Path(path_type=Path, file_okay=False),
    envvar=DATA_VARIABLE,
    show_envvar=True,
    help="Folder with the named suites.",
)
@click.option("--task", "tasks", multiple=True, help="Only this task of the suite; repeat for more. [default: all]")
@click.option("--count", type=click.IntRange(min=1), help="Prompts of each task. [default: all]")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="NAME",
    help="auto, or fixed:NAME of a drafter; repeat for more. [default: what the bundle runs by default]",
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True, help="Length of an answer.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=click.FloatRange(0, 1), default=1.0, show_default=True)
@click.option("--repetitions", type=click.IntRange(min=1), default=1, show_default=True, help="Answers to each prompt.")
@click.option("--nodes", type=click.IntRange(min=1), help="Widest tree, the root included. [default: the drafter's]")
@click.option("--engine", help="Engine to run on. [default: the bundle's]")
@threads_option
@click.option("--plot", "picture", type=click.Path(path_type=Path, dir_okay=False), help="Draw PNG or SVG here.")
@click.option("--output", "-o", type=click.Path(path_type=Path, dir_okay=False), help="Write the JSON record here.")
@click.option("--json", "as_json", is_flag=True, help="Print the record instead of the table.")
def bench(
    bundle: Path,
    suite: str,
    data: Path | None,
    tasks: tuple[str, ...],
    count: int | None,
    policies: tuple[str, ...],
    max_tokens: int,
    temperature: float,
    top_p: float,
    repetitions: int,
    nodes: int | None,
    engine: str | None,
    threads: int,
    picture: Path | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Measure BUNDLE on a suite: plain and speculative interleaved, prompt by prompt. Fails if a token differs.

    speedup is end to end, prefill included: the median over answers. decode leaves the prefill out. first is the time
    to the first token, p50 and p99 the time of a token after it.
    """
    import json

    from specexport.exporter.bench import measure, report
    from specexport.exporter.bench.suites import read_suite, suite_path
    from specexport.runtime.auto import AUTO, default_policy
    from specexport.runtime.bundle import Bundle
    from specexport.runtime.drafters import NO_DRAFTER
    from specexport.runtime.engine import find_engine
    from specexport.runtime.errors import UsageError
    from specexport.runtime.machine import peak_rss_bytes

    if picture is not None:
        from specexport.profiles.plot import check_plot

        check_plot(picture)
    path = suite_path(suite, data)
    prompts = read_suite(path, tasks, count)
    opened = Bundle.load(bundle)
    engine_name = engine or opened.manifest.engine
    default = default_policy(opened, engine_name, threads)
    names = tuple(dict.fromkeys(map(_drafter, policies))) or (AUTO if default == NO_DRAFTER else default,)
    target = find_engine(engine_name)(opened.path, threads=threads)
    settings = measure.Settings(names, max_tokens, temperature, top_p, repetitions, nodes, threads)
    progress = Progress()
    with progress.stage("bench", len(prompts) * repetitions) as stage:
        samples = list(measure.measure(opened, target, prompts, settings, stage.advance))
    if not samples:
        raise UsageError(
            f"every prompt leaves less than {max_tokens} of the bundle's {opened.manifest.target.slots} cache slots: "
            "lower --max-tokens or build with a larger --window"
        )
    context = {
        "suite": str(path),
        "engine": engine_name,
        "prompts": len(prompts),
        "left_out": len(prompts) - len({sample.prompt for sample in samples}),
        "peak_rss_bytes": peak_rss_bytes(),
    }
    record = report.report(opened, settings, samples, context)
    if output is not None:
        output.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    if picture is not None:
        report.plot(record, picture)
    if as_json:
        echo_json(record)
    else:
        echo_columns(report.rows(record), ">")
        if context["left_out"]:
            click.echo(f"{context['left_out']} prompts leave no room for the answer and were left out", err=True)
    differing = [name for name in names if not record["policies"][name]["overall"]["tokens_identical"]]
    return 1 if differing else 0


def _drafter(policy: str) -> str:
    """What ``Session`` calls a policy."""
    kind, _, name = policy.partition(":")
    if policy != "auto" and (kind != "fixed" or not name):
        raise click.UsageError(f"--policy {policy}: expected auto or fixed:NAME, NAME a drafter of the bundle")
    return name or policy
