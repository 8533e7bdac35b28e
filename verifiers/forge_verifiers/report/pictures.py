"""SVG figures of an ensemble's report. Axes: m verifiers, n trajectories, B bins."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forge_agents.display import printable

Floats = NDArray[np.float64]
_DARK, _GRAY, _BAD, _BLUE = "#1f2933", "#9aa5b1", "#c2410c", "#2f5d9b"
_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": _GRAY,
    "axes.grid": True,
    "axes.labelcolor": _DARK,
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
    "text.parse_math": False,  # names may contain dollar signs
}
MAX_SHOWN = 40
"""Maximum number of verifiers on the page. The time to draw the correlation grows with the square of their number."""
_MAX_CELLS = 14
"""Maximum number of verifiers for which the correlation map shows numbers."""


def correlation_figure(names: Sequence[str], families: Sequence[str | None], correlation: Floats) -> bytes:
    """Heat map of the correlation [m, m] of the verifiers' scores, ordered by family. Shows at most 40 verifiers."""
    shown = names[:MAX_SHOWN]
    order = sorted(range(len(shown)), key=lambda k: (families[k] is None, families[k] or "", k))
    ordered, titles = correlation[np.ix_(order, order)], [labels(shown)[k] for k in order]
    side = 0.6 + 0.42 * len(shown)
    with _figure(max(9.0, side + 4.0), side) as (figure, save):
        axes = figure.subplots()
        axes.grid(visible=False)
        image = axes.imshow(ordered, cmap="RdBu_r", vmin=-1, vmax=1)
        ticks = np.arange(len(shown))
        axes.set_xticks(ticks, [title.split("  ")[0] for title in titles])
        axes.set_yticks(ticks, titles)
        if len(shown) < len(names):
            axes.set_title(f"The first {len(shown)} of {len(names)} verifiers")
        for i, j in np.ndindex(ordered.shape) if len(shown) <= _MAX_CELLS else ():
            if not np.isnan(ordered[i, j]):
                color = "white" if abs(ordered[i, j]) > 0.6 else _DARK
                axes.text(j, i, f"{ordered[i, j]:.2f}", ha="center", va="center", color=color, fontsize=7.5)
        figure.colorbar(image, ax=axes, shrink=0.8, label="correlation")
        return save()


def calibration_figure(predicted: Floats, observed: Floats, half_width: Floats, posterior: Floats) -> bytes:
    """Observed against predicted correctness [B], NaN if unknown, and a histogram of the predictions [n]."""
    with _figure(9.0, 4.0) as (figure, save):
        left, right = figure.subplots(1, 2)
        left.plot((0, 1), (0, 1), color=_GRAY, linestyle="--", linewidth=1, label="perfectly calibrated")
        if np.isfinite(observed).any():
            left.errorbar(predicted, observed, half_width, marker="o", color=_BLUE, capsize=2, label="observed")
        else:
            left.text(0.5, 0.4, "no labels and too few\nverifiers for a check", ha="center", color=_BAD)
        left.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel="predicted P(correct)", ylabel="fraction correct")
        left.legend(loc="upper left")
        right.hist(posterior, bins=np.linspace(0, 1, 21).tolist(), color=_BLUE)
        right.set(xlim=(0, 1), xlabel="predicted P(correct)", ylabel="trajectories")
        return save()


def labels(names: Sequence[str]) -> list[str]:
    """Labels of the verifiers: the number in the table and a shortened name, with a box for missing glyphs."""
    glyphs, short = _glyphs(), [printable(name, 28) for name in names]
    drawable = ["".join(c if ord(c) in glyphs else "\N{WHITE SQUARE}" for c in name) for name in short]
    return [f"{k}  {name}" for k, name in enumerate(drawable, 1)]


@contextmanager
def _figure(width: float, height: float) -> Iterator[tuple[Any, Callable[[], bytes]]]:
    """An empty figure, size in inches, and a function that returns it as SVG. Without pyplot, no figure stays open."""
    from matplotlib import rc_context, rcdefaults, rcParams
    from matplotlib.figure import Figure

    with rc_context():
        rcdefaults()  # a matplotlibrc of the current folder may be a stranger's
        rcParams.update(_STYLE)
        figure = Figure(figsize=(width, height), layout="constrained")

        def save() -> bytes:
            out = io.BytesIO()
            figure.savefig(out, format="svg", metadata={"Date": None})
            return out.getvalue()

        yield figure, save


@lru_cache(maxsize=1)
def _glyphs() -> frozenset[int]:
    """Code points of the figures' font."""
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())
