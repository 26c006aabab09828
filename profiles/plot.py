"""The chart of a plan: speedup by batch and by context. matplotlib is an extra and imported when a chart is wanted."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from specexport.profiles.planner import Plan, Sweep
from specexport.runtime.errors import SpecExportError, UsageError

SUFFIXES = (".png", ".svg")
_INK, _MUTED, _FIRST, _SECOND = "#1a1a1a", "#8a8a8a", "#1f5fa8", "#d2762b"


class MissingPlot(SpecExportError):
    """matplotlib is not installed."""


def check_plot(path: Path) -> None:
    """Refuse what cannot be drawn before anything is computed.

    Raises:
        UsageError: another suffix than .png or .svg. MissingPlot: no matplotlib.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {path}: expected a name that ends in {' or '.join(SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise MissingPlot("--plot needs matplotlib: pip install 'specexport[plot]'")


def plot_plan(plan: Plan, title: str, path: Path) -> None:
    """Write the chart of a plan."""
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [(name, sweep) for name, sweep in (("batch", plan.batches), ("context", plan.contexts)) if sweep]
    figure = Figure(figsize=(4.4 * max(1, len(panels)), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    best = plan.best
    method = f"{best.drafter}, {best.shape.nodes} nodes" if best and best.shape.paths else "plain decoding"
    figure.suptitle(f"{title}: {plan.verdict}", fontsize=10, color=_INK)
    for place, (name, sweep) in enumerate(panels, 1):
        _panel(figure.add_subplot(1, len(panels), place), name, sweep, method, plan.error, legend=place == 1)
    figure.savefig(path, dpi=160)


def _panel(axes: Any, name: str, sweep: Sweep, method: str, error: float, *, legend: bool) -> None:
    values = range(len(sweep.values))
    low, high = ([value * (1 + sign * error) for value in sweep.fixed] for sign in (-1, 1))
    axes.fill_between(values, low, high, color=_FIRST, alpha=0.12, linewidth=0)
    axes.plot(values, sweep.fixed, color=_FIRST, marker="o", markersize=3.5, linewidth=1.6, label=method)
    axes.plot(values, sweep.best, color=_SECOND, marker="o", markersize=3.5, linewidth=1.6, label="best tree for each")
    axes.axhline(1.0, color=_MUTED, linewidth=1, linestyle="--")
    axes.set_xticks(values, [str(value) for value in sweep.values], fontsize=8)
    axes.tick_params(axis="y", labelsize=8)
    axes.set_xlabel({"batch": "sequences at a time", "context": "cache rows in use"}[name], fontsize=9)
    axes.set_ylabel("speedup over plain decoding", fontsize=9)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if legend:
        axes.legend(fontsize=8, frameon=False, loc="lower left")
