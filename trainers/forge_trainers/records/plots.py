"""Figures of runs: metrics with confidence intervals, or arms of an experiment over seeds."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


@contextlib.contextmanager
def picture(target: Path, *, size: tuple[float, float] = (8, 4.5), **labels: str) -> Iterator[Any]:
    """Yield axes that are written to `target` at the end of the block. `labels` are those of ``Axes.set``.

    A ``matplotlibrc`` has no effect, because that of the current folder may be a stranger's. A dollar sign is text.
    """
    from matplotlib import rc_context, rcdefaults, rcParams
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state
    from matplotlib.ticker import MaxNLocator

    with rc_context():
        rcdefaults()
        rcParams["text.parse_math"] = False
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        yield axes
        axes.set(**labels)
        if labels.get("xlabel") == "step":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if axes.get_legend_handles_labels()[0]:  # without data there is no legend
            axes.legend()
        axes.grid(alpha=0.3)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target, dpi=120)


def draw_curve(
    axes: Any, rows: Sequence[Mapping[str, Any]], value: str, half_width: str, *, label: str, marker: str = ""
) -> None:
    """Draw column `value` of `rows` over their step, shaded by plus and minus `half_width`.

    Values that are no finite numbers count as missing: the rows may be a stranger's. The shade has a gap there.
    """
    points = [(row["step"], mean, _finite(row.get(half_width))) for row in rows for mean in [_finite(row.get(value))]]
    steps, means, widths = np.array(points, np.float64).reshape(-1, 3).T
    known = ~np.isnan(means)
    if not known.any():
        return
    steps, means, widths = steps[known], means[known], widths[known]
    axes.plot(steps, means, label=label, marker=marker)
    axes.fill_between(steps, means - widths, means + widths, alpha=0.2)


def _finite(value: Any) -> float:
    """Return a number as a float, or NaN for anything else."""
    try:
        number = float(value) if isinstance(value, int | float) else math.nan
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


def draw_arms(
    arms: Mapping[str, Sequence[Sequence[tuple[float, float]]]],
    target: Path,
    *,
    title: str,
    value: str,
    over: str = "step",
    level: tuple[str, float] | None = None,
) -> None:
    """Write a figure of an experiment: thin lines are seeds, thick lines are means of arms.

    Args:
        arms: By label, one curve per seed: pairs (step, value), of the same length.
        target: File of the figure. The suffix sets the format.
        title: Title of the figure.
        value: Label of the vertical axis.
        over: Label of the horizontal axis.
        level: Label and value of a dashed reference line.
    """
    with picture(target, xlabel=over, ylabel=value, title=title) as axes:
        for number, (label, curves) in enumerate(arms.items()):
            seeds = np.array(curves)
            for curve in seeds:
                axes.plot(*curve.T, color=f"C{number}", alpha=0.3, linewidth=1)
            axes.plot(*seeds.mean(axis=0).T, color=f"C{number}", label=label, marker="o")
        if level is not None:
            axes.axhline(level[1], color="grey", linestyle="--", label=level[0])
