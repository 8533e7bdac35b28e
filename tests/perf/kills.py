"""Kill a training run at random moments, resume it, and compare it bit by bit with one that was left alone.

python tests/perf/kills.py [--runs 20] [--steps 6] [--out TABLE.md]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf_common import kill_marked, markdown, read_lines, start_marked

from forge_agents.serving.config import EnginePlan

DEADLINE_S = 1800.0
ORPHANS_AFTER_S = 10.0
_CLOCKS = ("time/", "idle/", "tokens_per_s", "mfu", "peak_rss_bytes")
"""Prefixes of metrics that differ between runs, as do names that end in ``_s`` or have it before a slash."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A run that was killed, resumed and compared."""

    mode: str
    """Target of the kill: ``group`` or ``controller``."""
    at: str
    """When: steps logged, and seconds after."""
    orphans: int
    """Processes alive 10 s after the kill."""
    resumed_from: int
    """Step of the checkpoint that the resumed run began with."""
    differing: tuple[str, ...]
    """Metrics by step, and files of the last checkpoint, that are not bit-equal."""


def main() -> int:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--runs", type=int, default=20, help="Runs to kill. Every other one loses only its controller.")
    parser.add_argument("--steps", type=int, default=6, help="Optimiser steps of a run.")
    parser.add_argument("--seed", type=int, default=0, help="Of the moments.")
    parser.add_argument("--out", type=Path, help="Write the table there as well.")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = kills(Path(folder), runs=arguments.runs, steps=arguments.steps, seed=arguments.seed)
    text = table(outcomes)
    sys.stdout.write(text)
    if arguments.out:
        arguments.out.write_text(text)
    return 1 if any(outcome.differing or outcome.orphans for outcome in outcomes) else 0


def kills(folder: Path, *, runs: int, steps: int, seed: int = 0) -> list[Outcome]:
    """Train once undisturbed and `runs` times with a kill, in `folder`. The first kill hits a fork of the whole run."""
    from forge_agents.models.tiny import tiny_model

    model = tiny_model(folder / "model")
    whole, log, outs = folder / "whole", folder / "log.txt", [folder / f"run-{number}" for number in range(runs)]
    begun = time.perf_counter()
    process = _start([whole, outs[0]], model, steps, log)
    _wait_for_rows(outs[0], 0, process, log)
    _say(f"undisturbed: {time.perf_counter() - begun:.0f} s")
    expected, rng = _result(whole), random.Random(seed)
    step_s = [float(row["time/step_s"]) for row in read_lines(whole / "metrics.jsonl")]
    outcomes = []
    for number, out in enumerate(outs):
        mode = ("group", "controller")[number % 2]
        rows, after_s = rng.randrange(steps), rng.uniform(0, 1.5 * max(step_s[1:]))
        process = _start([out], model, steps, log) if number else process
        _wait_for_rows(out, rows, process, log)
        time.sleep(after_s)
        orphans = _kill(process, mode)
        saved = [int(mark.parent.name.removeprefix("step-")) for mark in out.glob("checkpoints/step-*/experiment.json")]
        _finish(_start([out], model, steps, log), log)
        outcomes.append(
            Outcome(
                mode=mode,
                at=f"{rows} steps + {after_s:.2f} s",
                orphans=orphans,
                resumed_from=max(saved, default=0),
                differing=tuple(_differing(expected, _result(out))),
            )
        )
        _say(f"{number + 1}/{runs}: {outcomes[-1]}")
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown."""
    titles = ("run", "killed", "after", "resumed from step", "processes left after 10 s", "not bit-equal")
    return markdown(
        titles,
        (
            (number, item.mode, item.at, item.resumed_from, item.orphans, ", ".join(item.differing[:3]) or "nothing")
            for number, item in enumerate(outcomes, 1)
        ),
    )


def train(outs: Sequence[Path], model: Path, steps: int) -> None:
    """Runs on one engine, as they are killed: two seats, verifiers that learn, a baseline, a warm-up, evaluations."""
    import numpy as np
    from fault_worlds import Letters

    import forge_agents as fa

    config = fa.GRPOConfig(
        group_size=4,
        groups_per_step=2,
        max_resamples=0,
        checkpoint_every=2,
        eval_every=3,
        eval_episodes=4,
        seed=1,
        credit=fa.Credit(baseline="rae", scale="none"),
        learner=fa.LearnerConfig(lr=3e-3, warmup_steps=4, threads=1, compute_dtype="float32"),
        # requests one at a time, none on what another left: sums in another order are other numbers
        engine=EnginePlan.of(
            fa.EngineConfig(enforce_eager=True, kv_cache_gb=0.05, max_model_len=128, threads=1, max_num_seqs=1),
            prefix_caching=False,
        ),
    )
    team = fa.Policy(str(model), name="team", sampling=fa.Sampling(max_tokens=6))
    short = fa.Rule(lambda t: 1.0 / (1 + len(t.turns[-1].action)), name="short")
    trainer = None
    with contextlib.ExitStack() as stack:
        for out in outs:
            random.seed(0)  # checkpoints hold these states too, so that they must begin alike
            np.random.seed(0)  # noqa: NPY002
            reward = fa.Ensemble([fa.Rule(lambda t: t.reward, name="share"), short, fa.EnvReward()])
            if trainer is None:
                trainer = fa.GRPOTrainer(team, reward=reward, config=config, out_dir=out)
            else:
                trainer = trainer.fork(out, reward=reward)
            stack.enter_context(trainer).fit(Letters, steps=steps)


_Run = tuple[subprocess.Popen[bytes], str]
"""The process of a run and its mark."""


def _start(outs: Sequence[Path], model: Path, steps: int, log: Path) -> _Run:
    return start_marked(__file__, str(model), str(steps), *map(str, outs), log=log, OMP_NUM_THREADS="1")


def _finish(run: _Run, log: Path) -> None:
    try:
        code = run[0].wait(DEADLINE_S)
    except BaseException:
        _kill(run, "group")
        raise
    if code:
        raise RuntimeError(f"a run ended with code {code}:\n{log.read_text(errors='replace')[-3000:]}")


def _wait_for_rows(out: Path, count: int, run: _Run, log: Path) -> None:
    """Wait until that many steps are logged, or with 0, until the run's folder exists."""
    file, deadline = out / ("metrics.jsonl" if count else "config.yaml"), time.monotonic() + DEADLINE_S
    while not file.exists() or (count and len(file.read_text().splitlines()) < count):
        if run[0].poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no {count} steps:\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(0.01)


def _kill(run: _Run, mode: str) -> int:
    """End a run. Returns how many of its processes were alive 10 s later. These are then killed."""
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if mode == "group" else os.kill)(run[0].pid, signal.SIGKILL)
    run[0].wait()
    return len(kill_marked(run[1], grace_s=ORPHANS_AFTER_S))


def _result(out: Path) -> dict[str, Any]:
    """Values that must not depend on kills: metrics by step, sizes and checksums of the last checkpoint's arrays."""
    rows = [(row["step"], name, value) for row in read_lines(out / "metrics.jsonl") for name, value in row.items()]
    result = {f"step {step}: {name}": value for step, name, value in rows if not _is_clock(name)}
    last = max(out.glob("checkpoints/step-*/experiment.json"))
    files: Mapping[str, Any] = json.loads(last.read_text())["files"]
    arrays = {name: value for name, value in files.items() if name.endswith((".distcp", ".npz"))}
    if not any(name.endswith(".distcp") for name in arrays):
        raise RuntimeError(f"{last.parent} holds no weights")
    return result | arrays


def _is_clock(name: str) -> bool:
    return name.endswith("_s") or any(clock in name for clock in _CLOCKS)


def _differing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[str]:
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name, "absent") != found.get(name, "absent"):
            yield f"{name}: {expected.get(name, 'absent')} became {found.get(name, 'absent')}"


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        train([*map(Path, sys.argv[4:])], Path(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(main())
