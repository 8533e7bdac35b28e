"""Curves of runs: one run's with its interval, or arms of an experiment with their seeds.

In: numbers by step. Out: lines on axes, pictures. Waits for the disk only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


@contextlib.contextmanager
def picture(target: Path, *, size: tuple[float, float] = (8, 4.5), **labels: str) -> Iterator[Any]:
    """Axes to draw on, written to `target` at the end of the block; `labels` as in matplotlib's ``Axes.set``."""
    from matplotlib.figure import Figure  # without pyplot: no window system, no global state

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    yield axes
    axes.set(**labels)
    if axes.get_legend_handles_labels()[0]:  # nothing was drawn where nothing is known, such as no reward
        axes.legend()
    axes.grid(alpha=0.3)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=120)


def draw_curve(
    axes: Any, rows: Sequence[Mapping[str, Any]], value: str, half_width: str, *, label: str, marker: str = ""
) -> None:
    """Draw column `value` of `rows` over their step, shaded by plus and minus `half_width`."""
    points = [(row["step"], row[value], row.get(half_width) or 0.0) for row in rows if row.get(value) is not None]
    if not points:
        return
    steps, means, widths = np.array(points, np.float64).T
    axes.plot(steps, means, label=label, marker=marker)
    axes.fill_between(steps, means - widths, means + widths, alpha=0.2)


def draw_arms(
    arms: Mapping[str, Sequence[Sequence[tuple[float, float]]]],
    target: Path,
    *,
    title: str,
    value: str,
    over: str = "step",
    level: tuple[str, float] | None = None,
) -> None:
    """Write a picture of an experiment: thin lines are seeds, a thick one is the mean of an arm.

    Args:
        arms: By label one curve a seed, of as many pairs (step, value).
        target: A file whose ending names the format.
        title: Above the picture.
        value: What the curves measure.
        over: What the first number of a pair is.
        level: A value to compare with, named and drawn as a dashed line.
    """
    with picture(target, xlabel=over, ylabel=value, title=title) as axes:
        for number, (label, curves) in enumerate(arms.items()):
            seeds = np.array(curves)
            for curve in seeds:
                axes.plot(*curve.T, color=f"C{number}", alpha=0.3, linewidth=1)
            axes.plot(*seeds.mean(axis=0).T, color=f"C{number}", label=label, marker="o")
        if level is not None:
            axes.axhline(level[1], color="grey", linestyle="--", label=level[0])
