"""The verb that makes plans: ``compile``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specexport.engines.tensorrt_module import BACKENDS
from specexport.exporter.cli import echo_json
from specexport.exporter.cli_inspect import echo_columns, size
from specexport.exporter.doctor import require_export
from specexport.exporter.progress import Progress
from specexport.runtime.manifest import CAPABILITY

if TYPE_CHECKING:
    from specexport.exporter.compile import CompileResult


def capability(value: str) -> str:
    """A compute capability such as 8.9."""
    if not CAPABILITY.fullmatch(value):
        raise click.BadParameter(f"{value!r} is no compute capability such as 8.9")
    return value


@click.command
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--profile", required=True, metavar="NAME|FILE", help="Device to compile for: see 'profiles list'.")
@click.option("--backend", type=click.Choice(list(BACKENDS)), help="Instead of the profile's.")
@click.option(
    "--capability",
    "capabilities",
    type=capability,
    multiple=True,
    metavar="X.Y",
    help="Compute capability; repeat for several in one plan (TensorRT-RTX). [default: the profile's]",
)
@click.option("--plugin", is_flag=True, help="Attend with the TreeAttention plugin; running then needs its library.")
@click.option(
    "--allow-fallback", is_flag=True, help="Warn, do not fail, where attention is not fused or a cache is copied."
)
@click.option("--json", "as_json", is_flag=True, help="Print what was compiled as JSON.")
def compile(as_json: bool, **options: Any) -> None:
    """Compile the graphs of BUNDLE to TensorRT plans in engines/<profile>; TensorRT-RTX needs no GPU for that."""
    require_export("compile")
    from specexport.exporter.compile import CompileOptions, compile_bundle, describe

    result = compile_bundle(CompileOptions(**options), Progress())
    if as_json:
        echo_json({"engines": str(result.folder), "graphs": describe(result)})
    else:
        echo_plans(result)


def echo_plans(result: CompileResult) -> None:
    """A line for each plan."""
    lines = [("plan", "size", "profiles", "fused", "in place", "seconds", "peak memory")]
    for record in result.plans:
        lines.append(
            (
                str(result.folder / record.plan),
                size(record.bytes),
                str(len(record.profiles)),
                f"{record.attention_fused}/{record.layers}",
                f"{record.cache_in_place}/{record.cache_tensors}",
                f"{record.build_seconds:.0f}",
                size(record.peak_rss_bytes),
            )
        )
    echo_columns(lines)
