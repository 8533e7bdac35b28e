"""Accuracy of `forge-agents simulate`: runs on this machine, some fitted, the others predicted.

    python tests/perf/measure_simulate.py [--model MODEL] [--steps 6] [--runs FOLDER] [--out TABLE.md]

Needs a machine that does nothing else. Runs that FOLDER already holds are not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from perf_common import kill_marked

MARK = "FORGE_AGENTS_SIMULATE"
"""Environment variable by which every process of a run is found."""
DEADLINE_S = 1200.0
WITHIN, WANTED = 0.15, 6
SKIP = 1
"""First steps that do not count: memory is new and caches are cold."""
STAGES = ("collect", "score", "learn", "sync")
IDLE = ("engines", "learner")
COMPARED = ("collect", "learn", "sync")
"""Columns of the table: predicted for measured seconds."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One run."""

    name: str
    groups: int
    size: int
    tokens: int
    """`max_tokens` of a response."""
    staleness: int = 0
    microbatch: int = 2048
    replicas: int = 1
    threads: int | None = None
    """Threads of each engine and of the learner. None: all cores."""
    fitted: bool = False

    @property
    def folder(self) -> str:
        """Folder of its run."""
        return self.name.replace(" ", "-")

    def settings(self, model: str, out: Path, steps: int) -> dict[str, Any]:
        """As ``forge-agents train`` reads them."""
        engine = {"max_model_len": 512, "enforce_eager": True, "replicas": self.replicas, "threads": self.threads}
        return {
            "env": "forge/AlphabetSort-v0",
            "env_args": {"num_names": 3, "num_added": 1, "turns": 2},
            "policies": {"sorter": {"model": model, "sampling": {"temperature": 1.0, "max_tokens": self.tokens}}},
            "steps": steps,
            "out_dir": str(out),
            "trainer": {
                "group_size": self.size,
                "groups_per_step": self.groups,
                "max_staleness": self.staleness,
                "keep_episodes": self.groups * self.size,
                "checkpoint_every": 1000,
                "engine": engine,
                "learner": {"max_tokens_per_microbatch": self.microbatch, "threads": self.threads},
            },
        }


CONFIGURATIONS = (
    Configuration(name="large", groups=5, size=8, tokens=32, microbatch=1024, fitted=True),
    Configuration(name="small", groups=2, size=6, tokens=16, microbatch=512, threads=1, fitted=True),
    Configuration(name="ahead", groups=3, size=6, tokens=24, staleness=1, threads=1, fitted=True),
    Configuration(name="small passes", groups=4, size=6, tokens=24, microbatch=384, fitted=True),
    Configuration(name="more groups", groups=8, size=4, tokens=16),
    Configuration(name="larger groups", groups=2, size=16, tokens=24),
    Configuration(name="long answers", groups=3, size=6, tokens=48),
    Configuration(name="one thread", groups=4, size=6, tokens=32, threads=1),
    Configuration(name="one step ahead", groups=4, size=8, tokens=16, staleness=1, threads=1),
    Configuration(name="two steps ahead", groups=5, size=4, tokens=32, staleness=2, threads=1),
    Configuration(name="two replicas", groups=4, size=8, tokens=24, replicas=2, threads=1),
)
"""Four are fitted: of several sizes, positions of a pass and threads; in one of them engine and learner overlap."""


def main() -> int:
    """Measure, fit, predict."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="built-in name, hub id or folder")
    parser.add_argument("--steps", type=int, default=6, help="optimiser steps of a run")
    parser.add_argument("--runs", type=Path, help="folder of the runs; existing runs are reused")
    parser.add_argument("--out", type=Path, help="write the table there as well")
    arguments = parser.parse_args()
    if arguments.steps < SKIP + 2:
        parser.error(f"--steps {arguments.steps}: at least {SKIP + 2}, of which the first {SKIP} do not count")
    with tempfile.TemporaryDirectory(prefix="forge-simulate-") as scratch:
        folder = arguments.runs or Path(scratch)
        for number, one in enumerate(CONFIGURATIONS, 1):
            began = time.perf_counter()
            _train(one, folder, arguments.model, arguments.steps)
            sys.stderr.write(f"{number}/{len(CONFIGURATIONS)} {one.name}: {time.perf_counter() - began:.0f} s\n")
        rows = compare(folder)
    text = table(rows)
    sys.stdout.write(text)
    if arguments.out:
        arguments.out.write_text(text)
    return 0 if sum(row["within"] for row in rows if not row["fitted"]) >= WANTED else 1


def _train(one: Configuration, folder: Path, model: str, steps: int) -> None:
    """Run a configuration, unless its folder holds it."""
    out = folder / one.folder
    done = out / "metrics.jsonl"
    if done.is_file() and len(done.read_text().splitlines()) >= steps:
        return
    folder.mkdir(parents=True, exist_ok=True)
    config = out.with_suffix(".yaml")
    config.write_text(yaml.safe_dump(one.settings(model, out, steps)))
    mark = secrets.token_hex(8)
    try:
        with out.with_suffix(".log").open("wb") as log:
            subprocess.run(
                [sys.executable, "-m", "forge_agents.cli.main", "train", str(config)],
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                timeout=DEADLINE_S,
                env={**os.environ, MARK: mark},
            )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        tail = out.with_suffix(".log").read_text(errors="replace")[-3000:]
        raise SystemExit(f"{one.name}: {error}\n{tail}") from None
    finally:
        kill_marked(MARK, mark)


def compare(folder: Path) -> list[dict[str, Any]]:
    """Fit the stage times to some configurations, and predict all."""
    from forge_trainers.forecast.measured import measure, read_run
    from forge_trainers.forecast.model import step_times

    runs = {one: read_run(folder / one.folder, skip=SKIP) for one in CONFIGURATIONS}
    result = measure([run for one, run in runs.items() if one.fitted])
    sys.stderr.write(json.dumps(dataclasses.asdict(result.stages)) + "\n")
    rows = []
    for one, run in runs.items():
        times = step_times(run.plan, result.stages, result.workload)
        measured = {stage: float(np.mean([row[f"time/{stage}_s"] for row in run.rows])) for stage in STAGES}
        ratio = times.step_s / run.step_s
        busy_s = {"engines": times.collect_s, "learner": times.learn_s + times.publish_s}
        rows.append(
            {
                "configuration": one,
                "fitted": one.fitted,
                "measured_s": run.step_s,
                "spread_s": float(np.std([row["time/step_s"] for row in run.rows], ddof=1)),
                "predicted_s": times.step_s,
                "ratio": ratio,
                "within": abs(ratio - 1) <= WITHIN,
                "stages": {stage: (getattr(times, f"{stage}_s"), measured[stage]) for stage in STAGES},
                "idle": {
                    part: (max(0.0, 1 - seconds / times.step_s), _measured_idle(run.rows, part))
                    for part, seconds in busy_s.items()
                },
            }
        )
    return rows


def _measured_idle(rows: Sequence[Mapping[str, Any]], part: str) -> float:
    """Share of the measured steps."""
    return float(np.average([row[f"idle/{part}"] for row in rows], weights=[row["time/step_s"] for row in rows]))


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    columns = ("configuration", "groups x siblings, tokens", "ahead", "replicas", "pass", "threads", "measured s",
               "predicted s", "ratio", *COMPARED, *(f"{part} idle" for part in IDLE))  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        one = row["configuration"]
        stages = [f"{row['stages'][stage][0]:.2f} for {row['stages'][stage][1]:.2f}" for stage in COMPARED]
        stages += [f"{row['idle'][part][0]:.0%} for {row['idle'][part][1]:.0%}" for part in IDLE]
        lines.append(
            f"| {one.name}{' (fitted)' if one.fitted else ''} | {one.groups} x {one.size}, {one.tokens} | "
            f"{one.staleness} | {one.replicas} | {one.microbatch} | {one.threads or 'all'} | "
            f"{row['measured_s']:.2f} ± {row['spread_s']:.2f} | {row['predicted_s']:.2f} | {row['ratio']:.2f} | "
            + " | ".join(stages)
            + " |"
        )
    others = [row for row in rows if not row["fitted"]]
    close = sum(row["within"] for row in others)
    lines += ["", f"{close} of {len(others)} configurations that were not fitted are within {WITHIN:.0%}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
