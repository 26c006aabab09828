"""The verbs that only look: ``inspect`` and ``doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from specexport.exporter.cli import echo_json


def size(count: int | None) -> str:
    """Bytes for people."""
    if count is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count = count / 1024  # type: ignore[assignment]
    return f"{count:.1f} GiB"


def echo_table(rows: dict[str, Any]) -> None:
    """Aligned ``name  value`` lines; what a terminal could take as a command is escaped."""
    width = max(map(len, rows), default=0)
    for name, value in rows.items():
        text = str(value)
        click.echo(f"{name:<{width}}  {text if text.isprintable() else repr(text)}".rstrip())


def echo_columns(lines: Sequence[Sequence[str]], align: str = "<") -> None:
    """Lines of as many cells, in aligned columns; ``align`` as in format strings."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        click.echo("  ".join(f"{cell:{align}{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())


@click.command
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--full", is_flag=True, help="Also hash every file.")
@click.option("--target", "paired", metavar="SOURCE", help="For heads: the target to read and check them with.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def inspect(bundle: Path, full: bool, paired: str | None, as_json: bool) -> None:
    """Show what a bundle or its engines hold, what a checkpoint is, or what heads (a hub id: with --target) are."""
    if paired is None and (plans := _plans(bundle)):
        _inspect_plans(*plans, full, as_json)
        return
    if paired is None and _is_checkpoint(bundle):
        _inspect_checkpoint(str(bundle), as_json)
        return
    if paired is not None or _holds_heads(bundle):
        _inspect_head(str(bundle), paired, as_json)
        return
    from specexport.exporter.inspect import agreement_words, describe, precision_words
    from specexport.runtime.bundle import Bundle

    facts = describe(Bundle.load(bundle, check="full" if full else "fast"))
    if as_json:
        echo_json(facts)
        return
    manifest, derived = facts["manifest"], facts["derived"]
    target, lineage = manifest["target"], manifest["lineage"]
    windows = sorted({window for window in target["windows"] if window is not None})
    echo_table(
        {
            "bundle": facts["bundle"],
            "target": f"{target['architecture']}, {target['layers']} layers, {precision_words(target['precision'])}",
            "heads": f"{target['kv_heads']} kv heads of {target['head_dim']}, hidden size {target['hidden_size']}",
            "vocabulary": f"{target['valid_vocab']} of {target['vocab_size']} rows",
            "window": f"{target['slots']} slots, prefill in chunks of {target['prefill_chunk']}",
            "sliding windows": ", ".join(map(str, windows)) or "none",
            "cache": size(derived["cache_bytes"]),
            "engine": manifest["engine"],
            "drafters": ", ".join(drafter["name"] for drafter in manifest["drafters"]) or "none",
            "default drafter": manifest["drafter"] or "none",
            **{
                drafter["name"]: _draft_model(drafter) for drafter in manifest["drafters"] if drafter["kind"] == "model"
            },
            **{
                f"{drafter['name']}, held out": agreement_words(drafter["agreement"])
                for drafter in manifest["drafters"]
                if drafter["agreement"]
            },
            "chat template": "yes" if derived["chat_template"] else "no",
            "source": lineage["source"] + (f" @ {lineage['revision']}" if lineage["revision"] else ""),
            "fingerprint": lineage["fingerprint"],
            "verified": {None: "no report", True: "passed", False: "FAILED"}[derived["verified"]],
            "written by": ", ".join(f"{name} {version}" for name, version in manifest["tools"].items()),
            "command": derived["command"],
            "total": size(derived["total_bytes"]),
        }
    )
    click.echo()
    echo_table({name: size(file["bytes"]) for name, file in manifest["files"].items()})


def _plans(path: Path) -> tuple[Path, list[str]] | None:
    """The folder, and the graphs, of plans that ``path`` names: a folder of them, a plan, or its record."""
    from specexport.engines.plan import PLAN_SUFFIX, RECORD_SUFFIX, plan_graphs

    if path.is_dir():
        return (path, graphs) if (graphs := plan_graphs(path)) else None
    for suffix in (RECORD_SUFFIX, PLAN_SUFFIX):
        if path.name.endswith(suffix):
            return path.parent, [path.name.removesuffix(suffix) + ".onnx"]
    return None


def _inspect_plans(folder: Path, graphs: list[str], full: bool, as_json: bool) -> None:
    from specexport.engines.plan import check_plan, read_plan
    from specexport.runtime.records import plain

    records = [read_plan(folder, graph) for graph in graphs]
    for record in records if full else ():
        check_plan(folder, record)
    if as_json:
        echo_json({"engines": str(folder), "graphs": [plain(record) for record in records]})
        return
    for number, record in enumerate(records):
        if number:
            click.echo()
        sizes = [" ".join(f"{name}={value}" for name, value in p.dims.items()) or "fixed" for p in record.profiles]
        echo_table(
            {
                "plan": folder / record.plan,
                "compiled from": record.graph,
                "by": f"{record.module} {record.version}, {record.build_seconds:.0f} s",
                "runs on": f"capability {', '.join(record.capabilities)}",
                "size": size(record.bytes),
                "peak memory": f"{size(record.peak_rss_bytes)} when compiled",
                "precision": f"{record.weights} weights, {record.activations} activations",
                "attention": f"{record.attention_fused} of {record.layers} layers fused",
                "caches": f"{record.cache_in_place} of {record.cache_tensors} updated in place, {record.slots} slots",
                "plugins": ", ".join(record.plugins) or "none",
                **{f"profile {index}": text for index, text in enumerate(sizes)},
            }
        )


def _draft_model(drafter: dict[str, Any]) -> str:
    """What a bundle says about its draft model; none of it was checked yet."""
    options = drafter["options"]
    ids = "ids matched by text" if options.get("vocabulary") else "the target's ids"
    return (
        f"draft model {options.get('source')} ({options.get('architecture')}), drafts of {options.get('depth')}, "
        f"{options.get('slots')} slots, {ids}, {options.get('fingerprint')}"
    )


def _holds_heads(path: Path) -> bool:
    """Whether ``path`` holds weights and no bundle; without the export packages only bundles are known."""
    if (path / "manifest.json").exists() or not path.exists():
        return False
    try:
        from specexport.exporter.heads.files import looks_like_head
    except ModuleNotFoundError:
        return False
    return looks_like_head(path)


def _is_checkpoint(path: Path) -> bool:
    """Whether ``path`` is a GGUF file or holds a model that is no head and has none inside."""
    if path.suffix == ".gguf" and path.is_file():
        return True
    if not _holds_heads(path) or not (path / "config.json").exists():
        return False
    from specexport.exporter.heads.detect import holds_head
    from specexport.exporter.heads.files import open_files

    return not holds_head(open_files(str(path)).weights.names())


def _inspect_checkpoint(source: str, as_json: bool) -> None:
    from specexport.exporter.checkpoint import open_checkpoint
    from specexport.exporter.inspect import describe_checkpoint

    facts = describe_checkpoint(open_checkpoint(source))
    if as_json:
        echo_json(facts)
        return
    config, matrices = facts["config"], facts["matrices"]
    echo_table(
        {
            "checkpoint": facts["checkpoint"],
            "target": f"{config['architecture']}, {len(config['layers'])} layers, hidden size {config['hidden_size']}",
            "heads": f"{config['num_heads']} ({config['num_kv_heads']} kv) of {config['head_dim']}",
            "vocabulary": f"{config['vocab_size']} rows",
            "positions": config["max_position_embeddings"],
            "quantization": facts["quantization"] or "none",
            "matrices": f"{matrices['quantized']} of {matrices['all']} quantised",
            "fingerprint": facts["fingerprint"],
        }
    )
    for note in facts["notes"]:
        click.echo(f"note: {note if note.isprintable() else repr(note)}", err=True)


def _inspect_head(source: str, target: str | None, as_json: bool) -> None:
    from specexport.exporter.checkpoint import open_checkpoint
    from specexport.exporter.config import read_config
    from specexport.exporter.heads.detect import open_head
    from specexport.exporter.heads.merged import target_view
    from specexport.exporter.heads.pairing import check_pair
    from specexport.exporter.inspect import describe_head
    from specexport.exporter.tokenizer import collect_tokenizer

    warnings: list[str] = []
    if target is None:
        head = open_head(source)
    else:
        checkpoint = target_view(open_checkpoint(target))
        config = read_config(checkpoint.config)
        head = open_head(source, target=config)
        mine, theirs = head.tokenizer(), None
        if mine is not None:
            theirs = collect_tokenizer(checkpoint).tokenizer_json
        warnings = check_pair(head.record, config, mine, theirs, target_source=target)
    facts = describe_head(head, warnings)
    if as_json:
        echo_json(facts)
        return
    echo_table({"head": facts["head"], **facts["words"], "fingerprint": facts["fingerprint"]})
    click.echo()
    echo_table({name: f"{part['source']} {list(part['shape'])}" for name, part in facts["tensors"].items()})
    for warning in facts["warnings"]:
        click.echo(f"warning: {warning if warning.isprintable() else repr(warning)}", err=True)


@click.command
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def doctor(as_json: bool) -> int:
    """Show what this machine can do, what is missing and how to get it; exit 1 when bundles cannot run."""
    from specexport.exporter.demo import cache_directory
    from specexport.exporter.doctor import examine

    report = examine(cache_directory())
    if as_json:
        echo_json(report)
    else:
        cpu, memory, kernels = report["cpu"], report["memory"], report["kernels"]
        echo_table(
            {
                "specexport": report["specexport"],
                "python": "{version} ({executable})".format(**report["python"]),
                "platform": "{system} {release} {machine}".format(**report["platform"]),
                "cpu": f"{cpu['model']}, {cpu['physical_cores']} cores, {cpu['logical_cores']} threads",
                "cpu features": " ".join(cpu["features"]) or "none known",
                "memory": f"{size(memory['total'])}, {size(memory['available'])} available",
                "disk": f"{size(report['disk']['free'])} free at {report['disk']['cache']}",
                "providers": ", ".join(report["providers"]) or "none",
                "engines": ", ".join(f"{n}{'' if ok else ' (unusable)'}" for n, ok in report["engines"].items()),
                "kernels": kernels["library"] or f"none; to get them: {kernels['fix']}",
            }
        )
        click.echo()
        echo_table({name: found or "missing" for name, found in report["packages"].items()})
        click.echo()
        echo_table({f"can {verb}": "yes" if possible else "no" for verb, possible in report["can"].items()})
        for gap in report["missing"]:
            click.echo(f"to {gap['for']}: {gap['command']}  (missing: {', '.join(gap['packages'])})")
    return 0 if report["can"]["run"] else 1
