"""The pictures of an ensemble's report.

In: numbers. Out: SVG images as bytes. Waits for nothing. Axes: m verifiers, n trajectories, B bins, T steps.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_agents.display import printable

Floats = NDArray[np.float64]
_INK, _QUIET, _GOOD, _BAD, _FIRST = "#1f2933", "#9aa5b1", "#0b7a75", "#c2410c", "#2f5d9b"
_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": _QUIET,
    "axes.grid": True,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "svg.hashsalt": "forge",
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
}
_MOST_CELLS = 14
"""Verifiers up to which the correlation map has room for numbers."""


def accuracy_figure(
    names: Sequence[str],
    tpr: Floats,
    fpr: Floats,
    weight: Floats,
    *,
    errors: Mapping[str, Floats] = MappingProxyType({}),
    reverse: NDArray[np.bool_] | None = None,
) -> bytes:
    """False and true positive rate [m] of each verifier as two ends of a bar, its weight [m] next to them.

    Args:
        names: [m].
        tpr: [m].
        fpr: [m].
        weight: [m].
        errors: Standard errors [m] by "tpr" and "fpr"; 1.96 of them are drawn each way.
        reverse: [m] which verifiers are worse than chance beyond doubt, drawn in red; none by default.
    """
    reverse = np.zeros(len(names), bool) if reverse is None else reverse
    y = np.arange(len(names))
    with _figure(9.0, 1.3 + 0.34 * len(names)) as (figure, save):
        left, right = figure.subplots(1, 2, sharey=True, width_ratios=(3, 1))
        left.hlines(y, fpr, tpr, colors=np.where(reverse, _BAD, _QUIET), linewidth=3, zorder=1)
        for place, rate, color in ((-0.14, errors.get("fpr"), _BAD), (0.14, errors.get("tpr"), _GOOD)):
            if rate is not None:
                middle = fpr if place < 0 else tpr
                ends = np.clip([middle - 1.96 * rate, middle + 1.96 * rate], 0.0, 1.0)
                left.hlines(y + place, *ends, colors=color, linewidth=1, zorder=1)
        left.scatter(fpr, y, color="white", edgecolor=_BAD, linewidth=1.6, s=42, label="says yes when wrong (FPR)")
        left.scatter(tpr, y, color=_GOOD, s=46, label="says yes when correct (TPR)")
        left.set(xlim=(-0.03, 1.03), xlabel="rate", yticks=y, yticklabels=labels(names), ylim=(len(names) - 0.4, -0.6))
        figure.legend(*left.get_legend_handles_labels(), loc="outside upper left", ncols=2)
        right.barh(y, np.nan_to_num(weight), color=_FIRST, height=0.55)
        right.set(xlabel="weight", xlim=(0, max(1.0, float(np.nan_to_num(weight).max(initial=0)))))
        right.tick_params(labelleft=False)
        return save()


def correlation_figure(names: Sequence[str], families: Sequence[str | None], correlation: Floats) -> bytes:
    """Correlation [m, m] of the verifiers' scores as a map; families lie side by side."""
    order = sorted(range(len(names)), key=lambda k: (families[k] is None, families[k] or "", k))
    shown, titles = correlation[np.ix_(order, order)], [labels(names)[k] for k in order]
    side = 0.6 + 0.42 * len(names)
    with _figure(max(9.0, side + 4.0), side) as (figure, save):
        axes = figure.subplots()
        axes.grid(visible=False)
        image = axes.imshow(shown, cmap="RdBu_r", vmin=-1, vmax=1)
        ticks = np.arange(len(names))
        axes.set_xticks(ticks, [title.split("  ")[0] for title in titles])
        axes.set_yticks(ticks, titles)
        for i, j in np.ndindex(shown.shape) if len(names) <= _MOST_CELLS else ():
            if not np.isnan(shown[i, j]):
                colour = "white" if abs(shown[i, j]) > 0.6 else _INK
                axes.text(j, i, f"{shown[i, j]:.2f}", ha="center", va="center", color=colour, fontsize=7.5)
        figure.colorbar(image, ax=axes, shrink=0.8, label="correlation")
        return save()


def calibration_figure(predicted: Floats, observed: Floats, half_width: Floats, posterior: Floats) -> bytes:
    """Predicted against observed correctness [B], NaN where not known, and how often each probability is given."""
    with _figure(9.0, 4.0) as (figure, save):
        left, right = figure.subplots(1, 2)
        left.plot((0, 1), (0, 1), color=_QUIET, linestyle="--", linewidth=1, label="perfectly calibrated")
        if np.isfinite(observed).any():
            left.errorbar(predicted, observed, half_width, marker="o", color=_FIRST, capsize=2, label="observed")
        else:
            left.text(0.5, 0.4, "no labels and too few\nverifiers for a check", ha="center", color=_BAD)
        left.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel="predicted P(correct)", ylabel="share correct")
        left.legend(loc="upper left")
        right.hist(posterior, bins=np.linspace(0, 1, 21).tolist(), color=_FIRST)
        right.set(xlim=(0, 1), xlabel="predicted P(correct)", ylabel="trajectories")
        return save()


def drift_figure(
    steps: Sequence[int],
    names: Sequence[str],
    series: Mapping[str, Floats],
    *,
    effective_number: Sequence[float],
    reward: Sequence[float],
    share_correct: Sequence[float],
) -> bytes:
    """How weights, rates, the ensemble's size and the reward moved over T steps.

    Args:
        steps: [T].
        names: [m].
        series: "weight", "accuracy", "tpr" and "fpr" of each verifier, [m, T].
        effective_number: [T] how many independent verifiers all are worth.
        reward: [T] mean reward.
        share_correct: [T] as the combiner estimates it.
    """
    from matplotlib import colormaps

    palette = colormaps["tab10" if len(names) <= 10 else "tab20"]
    with _figure(9.0, 8.2 + 0.17 * len(names)) as (figure, save):
        panels = figure.subplots(3, 2, sharex=True)
        titles = {"weight": "weight", "accuracy": "estimated accuracy", "tpr": "TPR", "fpr": "FPR"}
        for axes, (key, title) in zip(panels.flat[:4], titles.items(), strict=True):
            for k, name in enumerate(labels(names)):
                axes.plot(steps, series[key][k], color=palette(k % palette.N), linewidth=1.4, label=name)
            axes.set(title=title, ylim=(-0.03, 1.03))
        size, paid = panels[2]
        size.plot(steps, effective_number, color=_INK)
        size.set(title="effective number of verifiers", ylim=(0, None), xlabel="step")
        paid.plot(steps, reward, color=_GOOD, label="mean reward of the step")
        paid.plot(steps, share_correct, color=_QUIET, label="estimated share correct")
        paid.set(title="reward", xlabel="step")
        paid.legend(loc="best", fontsize=8)
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower left", ncols=3, fontsize=8)
        return save()


def labels(names: Sequence[str]) -> list[str]:
    """What the pictures call the verifiers: a number, as in the table, and as much of the name as fits."""
    known, short = _glyphs(), [printable(name, 28) for name in names]
    return [f"{k}  " + "".join(c if ord(c) in known else "\N{WHITE SQUARE}" for c in n) for k, n in enumerate(short, 1)]


@contextmanager
def _figure(width: float, height: float) -> Iterator[tuple[Any, Callable[[], bytes]]]:
    """An empty figure in inches, and what writes it; without pyplot, so no window system and no figure left open."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")

        def save() -> bytes:
            out = io.BytesIO()
            figure.savefig(out, format="svg", metadata={"Date": None})
            return out.getvalue()

        yield figure, save


@lru_cache(maxsize=1)
def _glyphs() -> frozenset[int]:
    """The characters that the pictures' font can draw."""
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())
