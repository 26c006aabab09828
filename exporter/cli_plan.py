"""The verbs that decide before running: ``profiles``, ``plan`` and ``tune``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specexport.exporter.cli import echo_json, threads_option
from specexport.exporter.cli_inspect import echo_columns, echo_table, size
from specexport.exporter.progress import Progress
from specexport.profiles.schema import load_profile, profile_names
from specexport.runtime.errors import UsageError
from specexport.runtime.manifest import PRECISIONS
from specexport.runtime.records import plain

if TYPE_CHECKING:
    from specexport.exporter.plan import Planned
    from specexport.profiles.planner import Sweep


@click.group
def profiles() -> None:
    """Show the devices that plans can be made for."""


@profiles.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print names and titles as JSON.")
def list_profiles(as_json: bool) -> None:
    """List the profiles that come with the package."""
    titles = {name: load_profile(name).title for name in profile_names()}
    echo_json({"profiles": titles}) if as_json else echo_table(titles)


@profiles.command
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print the whole profile as JSON.")
def show(name: str, as_json: bool) -> None:
    """Show profile NAME, or the one in a .yaml file, with what it extends filled in."""
    values: dict[str, Any] = plain(load_profile(name))
    if as_json:
        echo_json(values)
        return
    echo_table(dict(_lines({"title": values["title"]} | values)))


def _lines(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Keys and values in words; keys of a part are behind its own."""
    for key, value in values.items():
        if isinstance(value, dict) and any(isinstance(entry, dict) for entry in value.values()):
            yield from _lines(value, f"{prefix}{key}.")
            continue
        if isinstance(value, dict):
            value = ", ".join(
                f"{name} {entry:g}" if isinstance(entry, float) else f"{name} in {entry}"
                for name, entry in value.items()
            )
        elif isinstance(value, list):
            value = ("; " if key == "sources" else ", ").join(map(str, value))
        yield prefix + key, value


@click.command
@click.argument("source")
@click.option("--heads", metavar="HEADS", help="Heads that are not built yet: a directory or a hub id.")
@click.option("--profile", metavar="NAME|FILE", help="Device. [default: this machine as tuned, else its kind of CPU]")
@click.option("--alpha", type=click.FloatRange(0, 1), help="Chance that a draft is accepted.")
@click.option(
    "--calibration",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Measured acceptance to reckon with instead of the bundle's.",
)
@click.option("--batch", type=click.IntRange(1, 4096), default=1, show_default=True, help="Sequences at a time.")
@click.option("--context", type=click.IntRange(min=1), metavar="N", help="Cache rows in use. [default: 512]")
@click.option("--window", type=click.IntRange(min=8), metavar="S", help="Cache slots, for memory.")
@click.option("--precision", type=click.Choice(PRECISIONS), help="Of a model that is not built yet.")
@threads_option
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Write a chart (.png or .svg).")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(source: str, plot: Path | None, as_json: bool, **options: Any) -> None:
    """Say whether speculation pays for SOURCE (a bundle, a model or its config.json) on a device, and with what."""
    from specexport.exporter.plan import PlanOptions, plan_for

    if options["alpha"] is not None and options["calibration"] is not None:
        raise click.UsageError("--alpha and --calibration exclude each other")
    if plot is not None:
        from specexport.profiles.plot import check_plot, plot_plan

        check_plot(plot)
    planned = plan_for(source, PlanOptions(**options))
    if plot is not None:
        plot_plan(planned.plan, f"{Path(source).name} on {planned.profile.name}", plot)
    if as_json:
        echo_json(planned.to_dict())
    else:
        _echo_plan(planned)


def _echo_plan(planned: Planned) -> None:
    found, model, memory = planned.plan, planned.size, planned.plan.memory
    echo_table(
        {
            "model": f"{planned.source}: {model.layers} layers, {size(model.weight_bytes)} read a step, "
            f"{model.precision} weights",
            "device": planned.profile.title,
            "times": f"{found.cost}, within {found.error:.0%}",
            "workload": f"batch {found.workload.batch}, {found.workload.used} cache rows in use",
            "verdict": f"{found.verdict}: {found.reason}",
        }
    )
    if found.estimates:
        click.echo()
        _echo_columns(
            ["drafter", "speedup", "tau", "tree", "step", "best chain", "c", "pays from"],
            [
                [
                    each.drafter,
                    f"{each.speedup:.2f} ({each.low:.2f}-{each.high:.2f})",
                    f"{each.tau:.2f}",
                    f"{each.shape.nodes} nodes, {each.shape.depth} deep" if each.shape.paths else "none",
                    f"{1e3 * each.step_s:.2f} ms",
                    f"K={each.best_k} ({each.chain_speedup:.2f})",
                    f"{each.cost:.3f}",
                    "never" if each.break_even_alpha is None else f"alpha {each.break_even_alpha:.2f}",
                ]
                for each in found.estimates
            ],
        )
        click.echo()
        if found.chains:
            _echo_columns(
                ["chain K", *map(str, range(1, len(found.chains) + 1))],
                [["speedup", *(f"{value:.2f}" for value in found.chains)]],
            )
        for name, sweep in (("batch", found.batches), ("context", found.contexts)):
            if sweep is not None:
                _echo_sweep(name, sweep)
    click.echo()
    largest = f"largest window {memory.largest_slots}" if memory.largest_slots else "no window fits"
    echo_table(
        {
            "memory": f"{size(memory.total)} of {size(memory.available)} at {memory.slots} slots, {largest}",
            "of which": f"weights {size(memory.weights)}, caches {size(memory.caches)}, "
            f"drafters {size(memory.drafters)}, work {size(memory.workspace)}, process {size(memory.process)}",
        }
    )
    for note in found.assumptions:
        click.echo(f"assumed: {note}")


def _echo_sweep(name: str, sweep: Sweep) -> None:
    _echo_columns(
        [name, *map(str, sweep.values)],
        [
            ["this tree", *(f"{value:.2f}" for value in sweep.fixed)],
            ["best tree", *(f"{value:.2f}" for value in sweep.best)],
        ],
    )


def _echo_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    echo_columns([head, *rows])
    click.echo()


@click.command
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Prompts to calibrate acceptance with: one a line, or JSON lines (.jsonl, .gz).",
)
@click.option("--count", type=click.IntRange(1, 10000), default=16, show_default=True, help="Prompts to use.")
@click.option("--max-tokens", type=click.IntRange(1, 4096), default=64, show_default=True, help="Of each answer.")
@click.option("--temperature", type=click.FloatRange(0, 10), default=0.0, show_default=True, help="Of calibration.")
@click.option("--name", help="What to call this machine. [default: by its CPU]")
@click.option("--engine", help="Engine to measure. [default: the bundle's]")
@threads_option
@click.option("--json", "as_json", is_flag=True, help="Print what was measured as JSON.")
def tune(bundle: Path, as_json: bool, **options: Any) -> None:
    """Measure what BUNDLE costs on this machine, calibrate its drafters, and store both in it."""
    from specexport.profiles.tuner import TuneOptions, tune_bundle

    if options["data"] is None and options["temperature"]:
        raise UsageError("--temperature is for calibration: name prompts with --data")
    progress = Progress()
    tuned = tune_bundle(bundle, TuneOptions(**options), progress)
    if as_json:
        echo_json(tuned.to_dict())
        return
    cost = tuned.profile.cost
    _echo_columns(
        ["used \\ T", *map(str, cost.widths)],
        [
            [str(used), *(f"{1e3 * value:.1f}" for value in row)]
            for used, row in zip(cost.used, cost.seconds, strict=True)
        ],
    )
    echo_table(
        {
            "noise": f"{cost.noise:.1%} of a median, at most",
            "host": f"{1e3 * tuned.profile.host_s:.2f} ms a step",
            **{f"draft {name}": f"{1e3 * draft.seconds:.2f} ms" for name, draft in tuned.profile.drafts.items()},
            "best": f"{tuned.profile.drafter or 'plain decoding'}, {tuned.profile.width} nodes",
            "written to": tuned.path,
        }
    )
