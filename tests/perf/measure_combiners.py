"""Table of the accuracy of label-free combiners on data with known truth.

    python tests/perf/measure_combiners.py                        # the regimes of the tests
    python tests/perf/measure_combiners.py --regimes file.py      # REGIMES of another file: {name: seed -> (s, g, y)}
    python tests/perf/measure_combiners.py --copies               # the grid of copied verifiers, 270 cells

Writes Markdown to stdout: Brier score, and the correlation of P(correct) with the truth among responses to one prompt;
for the grid the area under the ROC curve (AUC).
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("default", "mean", "dawid-skene", "weaver")
SEEDS = (0, 1, 2)


def own() -> dict[str, Callable[[int], Any]]:
    """The regimes of the tests, those of every kind first."""
    sys.path.insert(0, str(ROOT / "tests/verifiers"))
    from combiners import regimes, test_bounds

    named: dict[str, Callable[[int], Any]] = {
        "independent": regimes.votes,
        "independent, 5 % right": lambda seed: regimes.votes(seed, pi=0.05),
        "independent, 50 rows": lambda seed: regimes.votes(seed, n=50),
        "clusters of copies": regimes.clones,
        "graded, prompts liked": regimes.graded,
        "abstentions tell": regimes.silent_truth,
        "models against a judge": regimes.outvoted,
        "pairs, two clusters": test_bounds.pairs,
    }
    return {**named, **test_bounds.REGIMES}


def of_file(path: Path) -> dict[str, Callable[[int], Any]]:
    """``REGIMES`` of a Python file."""
    spec = importlib.util.spec_from_file_location("regimes_file", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["regimes_file"] = module
    spec.loader.exec_module(module)
    return dict(module.REGIMES)


def pointing(y: np.ndarray, p: np.ndarray, groups: np.ndarray) -> float:
    """Mean correlation of p with the truth within groups that hold both classes, or NaN without any."""
    order = np.argsort(groups, kind="stable")
    result = []
    for rows in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        if 0 < y[rows].sum() < len(rows):
            result += [np.corrcoef(p[rows], y[rows])[0, 1] if p[rows].std() > 1e-12 else 0.0]
    return float(np.mean(result)) if result else float("nan")


def crowd_kit(votes: np.ndarray) -> np.ndarray:
    """P(correct) of crowd-kit's Dawid-Skene from complete 0/1 votes [n, m]."""
    from crowdkit.aggregation import DawidSkene
    from pandas import DataFrame

    rows = [(i, k, int(vote)) for i, row in enumerate(votes) for k, vote in enumerate(row)]
    model = DawidSkene(n_iter=100).fit(DataFrame(rows, columns=["task", "worker", "label"]))
    return np.asarray(model.probas_.sort_index()[1], float)


def copies() -> None:
    """Prints how near each combiner comes to the best peer on the grid of copied verifiers, by their accuracy."""
    sys.path.insert(0, str(ROOT / "tests/verifiers"))
    from combiners import copies as grid
    from combiners.regimes import auroc

    cells = list(grid.grid())
    results = []
    for cell in cells:
        s, _, y = cell.make()
        results.append({**grid.areas(cell), "crowd-kit": auroc(y, crowd_kit(s))})
    names = list(results[0])
    best = np.array([max(area for name, area in each.items() if name != "default") for each in results])
    say("| copied verifier right in | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for quality in grid.QUALITIES:
        rows = [k for k, cell in enumerate(cells) if cell.quality == quality]
        means = [f"{np.mean([results[k][name] for k in rows]):.3f}" for name in names]
        say(f"| {quality:.0%} | " + " | ".join(means) + " |")
    areas = {name: np.array([each[name] for each in results]) for name in names}
    inverted = {name: int(((areas[name] < 0.5) & (areas["mean"] >= 0.5)).sum()) for name in names}
    for title, cell_of in (
        ("mean", lambda name: f"{areas[name].mean():.3f}"),
        (f"within {grid.NEAR} of the best peer", lambda name: f"{np.mean(areas[name] >= best - grid.NEAR):.1%}"),
        ("worst cell, below the best peer", lambda name: f"{(best - areas[name]).max():.3f}"),
        ("inverted where the mean is not", lambda name: f"{inverted[name]}"),
    ):
        say(f"| **{title}** | " + " | ".join(map(cell_of, names)) + " |")


def say(line: str) -> None:
    """Prints one line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regimes", type=Path, help="a Python file with REGIMES")
    parser.add_argument("--copies", action="store_true", help="the grid of copied verifiers")
    args = parser.parse_args()
    if args.copies:
        copies()
        return
    from forge_verifiers import combiners

    regimes = own() if args.regimes is None else of_file(args.regimes)
    say("| regime | " + " | ".join(KINDS) + " |\n|---|" + "---|" * len(KINDS))
    totals: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    took, rows = 0.0, 0
    for name, make in regimes.items():
        cells = []
        for kind in KINDS:
            result = []
            for seed in SEEDS:
                s, g, y = make(seed)
                began = time.process_time()
                p = combiners.get(kind).fit_predict(s, g)
                if kind == "default" and len(y) >= 1000:
                    took, rows = took + time.process_time() - began, rows + len(y)
                result.append((float(np.mean((p - y) ** 2)), pointing(y, p, g)))
            brier, points = (float(np.mean(column)) for column in zip(*result, strict=True))
            totals[kind].append((brier, points))
            cells.append(f"{brier:.3f} / {'-' if np.isnan(points) else f'{points:.3f}'}")
        say(f"| {name} | " + " | ".join(cells) + " |")
    means = [f"{np.mean(b):.3f} / {np.nanmean(a):.3f}" for b, a in (zip(*totals[k], strict=True) for k in KINDS)]
    say("| **mean** | " + " | ".join(means) + " |")
    say(f"\nThe default takes {1e6 * took / max(rows, 1):.0f} ms of CPU per 1,000 rows, fit and prediction.")


if __name__ == "__main__":
    main()
