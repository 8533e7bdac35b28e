"""Rerun recipes as written, three seeds each with a control, and compare the results with their expected intervals.

    python recipes/run.py [tables relay ...] [--seeds 0 1 2] [--out runs/recipes] [--update MACHINE]

Each recipe's folder has a `recipe.yaml` with its commands and, for each arm, the interval in which the measure
of every seed should end (`after`) and by how much it should change (`gain`). Finished commands are not repeated, so an
interrupted call continues where it stopped. Models and checkpoints, some 6 GB, are removed after each seed. The exit
code is 1 if a result lies outside its interval or is missing. `--update` writes the results into `recipes/results.json`
and into the tables of the recipes' pages, and draws their curves.
"""

import argparse
import datetime as dt
import json
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from forge_trainers.records.plots import draw_arms

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "recipes" / "results.json"
TABLE = re.compile(r"(?<=<!-- results -->\n).*?(?=<!-- end of results -->)", re.DOTALL)
"""The generated part of a page."""
TIMEOUT_S = 3 * 3600
"""Limit of one command, which trains one seed."""
MODEL_BYTES = 10_000_000
"""Larger files are models, checkpoints and optimizer states."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What `recipe.yaml` says."""

    name: str
    commands: list[str]
    """Shell-like commands with the placeholders `{seed}` and `{out}`."""
    expect: dict[str, dict[str, list[float]]]
    """Intervals `after` and `gain` by arm, both ends included."""
    measure: str = "reward on held-out seeds"
    """The measured quantity."""

    @classmethod
    def load(cls, folder: Path) -> "Recipe":
        """The recipe in this folder."""
        return cls(name=folder.name, **yaml.safe_load((folder / "recipe.yaml").read_text()))

    @classmethod
    def load_all(cls) -> "list[Recipe]":
        """All recipes, by name."""
        return [cls.load(path.parent) for path in sorted(Path(__file__).parent.glob("*/recipe.yaml"))]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One arm of one seed, compared with its intervals."""

    recipe: str
    arm: str
    seed: int
    before: float | None
    after: float | None
    problem: str
    """Empty if the result lies inside its intervals."""


def run(recipe: Recipe, seed: int, out: Path, console: Console) -> None:
    """Run the recipe's commands that have not finished yet; their output goes to log files."""
    out.mkdir(parents=True, exist_ok=True)
    for number, command in enumerate(recipe.commands):
        finished = out / f"command-{number}.json"
        if finished.exists() and json.loads(finished.read_text()) == command:
            continue
        console.print(f"{recipe.name}, seed {seed}: {command}")
        words = shlex.split(command.format(seed=seed, out=out))
        program = Path(sys.executable).with_name(words[0]) if words[0] != "python" else sys.executable
        start = time.monotonic()
        with (out / f"command-{number}.log").open("a") as log:
            code = subprocess.run(
                [program, *words[1:]], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=TIMEOUT_S, check=False
            ).returncode
        console.print(f"  exit code {code} after {time.monotonic() - start:.0f} s, output in {log.name}")
        if code:
            return
        finished.write_text(json.dumps(command))
    for path in out.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size > MODEL_BYTES:
            path.unlink()


def compare(recipe: Recipe, seed: int, out: Path) -> list[Row]:
    """Each arm's result of this seed next to its intervals."""
    results = [json.loads(path.read_text()) for path in sorted(out.rglob("result.json"))]
    by_arm = {result["arm"]: result for result in results if result["seed"] == seed}
    rows = []
    for arm, intervals in recipe.expect.items():
        result = by_arm.get(arm)
        before, after = ((result or {}).get(when, [None])[0] for when in ("before", "after"))
        values = {"after": after, "gain": None if None in (before, after) else after - before}
        problems = ["no result"] if result is None else []
        for name, (low, high) in intervals.items() if result else ():
            value = values[name]
            if value is None or not low - 1e-9 <= value <= high + 1e-9:
                problems.append(f"{name} {value if value is None else round(value, 3)} outside [{low}, {high}]")
        rows.append(
            Row(recipe=recipe.name, arm=arm, seed=seed, before=before, after=after, problem="; ".join(problems))
        )
    return rows


def table(rows: list[Row]) -> Table:
    """The comparison as it is printed."""
    table = Table("recipe", "arm", "seed", "before", "after", "holds", title="before and after training")
    for row in rows:
        values = ("-" if value is None else f"{value:.3f}" for value in (row.before, row.after))
        table.add_row(row.recipe, row.arm, str(row.seed), *values, row.problem or "yes")
    return table


def update(rows: list[Row], out: Path, machine: str) -> None:
    """Record every measured row, then make the tables and pictures anew from all records."""
    records = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    measured = [row for row in rows if row.after is not None]
    replaced = {(row.recipe, row.arm, row.seed) for row in measured}
    records = [record for record in records if (record["recipe"], record["arm"], record["seed"]) not in replaced]
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    for row in measured:
        values = {"before": row.before, "after": row.after, "holds": not row.problem, "date": date, "machine": machine}
        records.append({"recipe": row.recipe, "arm": row.arm, "seed": row.seed, **values})
    records.sort(key=lambda record: (record["recipe"], record["arm"], record["seed"]))
    RESULTS.write_text(json.dumps(records, indent=1) + "\n")
    for name in {row.recipe for row in measured}:
        draw(name, out)
        page = ROOT / "recipes" / name / "README.md"
        page.write_text(TABLE.sub(lambda _, name=name: results_of(name, records), page.read_text()))
    index = ROOT / "recipes" / "README.md"
    index.write_text(TABLE.sub(lambda _: overview(records), index.read_text()))


def results_of(name: str, records: list[dict[str, Any]]) -> str:
    """The table of one recipe's page: a row for each arm, a column for each seed."""
    mine = [record for record in records if record["recipe"] == name]
    seeds = sorted({record["seed"] for record in mine})
    recipe = Recipe.load(ROOT / "recipes" / name)
    lines = ["| arm | " + " | ".join(f"seed {seed}" for seed in seeds) + " | expected at the end |"]
    lines.append("|---" * (len(seeds) + 2) + "|")
    for arm, intervals in recipe.expect.items():
        cells = {record["seed"]: record for record in mine if record["arm"] == arm}
        values = [_change(cells[seed]) if seed in cells else "not run" for seed in seeds]
        lines.append(f"| {arm} | " + " | ".join([*values, _expected(intervals)]) + " |")
    measured = sorted({f"{record['date']}, {record['machine']}" for record in mine})
    lines += ["", f"{recipe.measure.capitalize()} before and after training. Measured {'; '.join(measured)}."]
    if (ROOT / "docs" / "results" / f"{name}.png").exists():
        lines += ["", f"![{recipe.measure} by step](../../docs/results/{name}.png)"]
    return "\n".join(lines) + "\n"


def overview(records: list[dict[str, Any]]) -> str:
    """The table of all recipes: the first arm's mean over its seeds."""
    lines = ["| recipe | before | after | seeds | control |", "|---|---|---|---|---|"]
    for recipe in Recipe.load_all():
        arm = next(iter(recipe.expect))
        first = [r for r in records if (r["recipe"], r["arm"]) == (recipe.name, arm)]
        controls = [r for r in records if r["recipe"] == recipe.name and r["arm"] in ("control", f"{arm}-control")]
        link = f"[{recipe.name}]({recipe.name}/README.md)"
        if not first:
            lines.append(f"| {link} | not run on the present code | | | |")
            continue
        means = [_mean([record[when] for record in first]) for when in ("before", "after")]
        ends = " to ".join(_mean([record[when] for record in controls]) for when in ("before", "after"))
        lines.append(f"| {link} | {means[0]} | {means[1]} | {len(first)} | {ends if controls else 'none'} |")
    return "\n".join(lines) + "\n"


def _expected(intervals: dict[str, list[float]]) -> str:
    if "after" in intervals:
        return "{} to {}".format(*intervals["after"])
    return "a change of {} to {}".format(*intervals["gain"])


def _change(record: dict[str, Any]) -> str:
    return f"{_mean([record['before']])} to {_mean([record['after']])}" + ("" if record["holds"] else " (outside)")


def _mean(values: list[float | None]) -> str:
    return "-" if not values or None in values else f"{sum(v for v in values if v is not None) / len(values):.3f}"


def draw(name: str, out: Path) -> None:
    """The recipe's measure by step, a curve for each seed and arm, to ``docs/results/NAME.png``."""
    curves: dict[str, list[Any]] = {}
    for path in sorted((out / name).rglob("result.json")):
        result = json.loads(path.read_text())
        if len(result.get("curve", ())) > 1:
            curves.setdefault(result["arm"], []).append([point[:2] for point in result["curve"]])
    if curves:
        measure = Recipe.load(ROOT / "recipes" / name).measure
        draw_arms(curves, ROOT / "docs" / "results" / f"{name}.png", title=name, value=measure)


def main(words: list[str] | None = None) -> int:
    """Run, compare, print and record."""
    recipes = {recipe.name: recipe for recipe in Recipe.load_all()}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"of {', '.join(recipes)}; default: all")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/recipes"), help="folder of all runs, logs and results")
    parser.add_argument("--update", metavar="MACHINE", help="record the results in the pages, as of this machine")
    parser.add_argument("--compare-only", action="store_true", help="start nothing; compare what has finished")
    options = parser.parse_args(words)
    if unknown := [name for name in options.recipes if name not in recipes]:
        parser.error(f"no recipe {unknown[0]!r}; the recipes are {', '.join(recipes)}")
    console, rows = Console(), []
    for name in options.recipes or recipes:
        for seed in options.seeds:
            out = options.out.absolute() / name / f"seed-{seed}"
            if not options.compare_only:
                run(recipes[name], seed, out, console)
            rows += compare(recipes[name], seed, out)
    console.print(table(rows))
    (options.out / "results.json").write_text(json.dumps([vars(row) for row in rows], indent=1))
    if options.update:
        update(rows, options.out.absolute(), options.update)
    return int(any(row.problem for row in rows))


if __name__ == "__main__":
    sys.exit(main())
