"""How good label-free combiners are where the truth is known, as a table.

    python tests/perf/measure_combiners.py                        # the regimes of the tests
    python tests/perf/measure_combiners.py --regimes file.py      # REGIMES of another file: {name: seed -> (s, g, y)}

Writes Markdown to stdout: Brier score, and the correlation of P(correct) with the truth among siblings.
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
        "silence tells": regimes.silent_truth,
        "models against a judge": regimes.outvoted,
        "pairs, two camps": test_bounds.pairs,
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
    """Mean correlation of p with the truth within groups that hold both; NaN where none does."""
    order = np.argsort(groups, kind="stable")
    found = []
    for rows in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        if 0 < y[rows].sum() < len(rows):
            found += [np.corrcoef(p[rows], y[rows])[0, 1] if p[rows].std() > 1e-12 else 0.0]
    return float(np.mean(found)) if found else float("nan")


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regimes", type=Path, help="a Python file with REGIMES")
    args = parser.parse_args()
    from forge_verifiers import combiners

    def say(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    regimes = own() if args.regimes is None else of_file(args.regimes)
    say("| regime | " + " | ".join(KINDS) + " |\n|---|" + "---|" * len(KINDS))
    totals: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    took, rows = 0.0, 0
    for name, make in regimes.items():
        cells = []
        for kind in KINDS:
            found = []
            for seed in SEEDS:
                s, g, y = make(seed)
                began = time.process_time()
                p = combiners.get(kind).fit_predict(s, g)
                if kind == "default" and len(y) >= 1000:
                    took, rows = took + time.process_time() - began, rows + len(y)
                found.append((float(np.mean((p - y) ** 2)), pointing(y, p, g)))
            brier, points = (float(np.mean(column)) for column in zip(*found, strict=True))
            totals[kind].append((brier, points))
            cells.append(f"{brier:.3f} / {'-' if np.isnan(points) else f'{points:.3f}'}")
        say(f"| {name} | " + " | ".join(cells) + " |")
    means = [f"{np.mean(b):.3f} / {np.nanmean(a):.3f}" for b, a in (zip(*totals[k], strict=True) for k in KINDS)]
    say("| **mean** | " + " | ".join(means) + " |")
    say(f"\nThe default takes {1e6 * took / max(rows, 1):.0f} ms of CPU per 1,000 rows, fit and prediction.")


if __name__ == "__main__":
    main()
