"""Train a tiny model for many steps and measure how much memory each process gains.

    python tests/perf/soak.py [--steps 2000] [--every 20] [--kind team] [--out FOLDER]

Prints MB per 1,000 steps for each role, and the time of a step by quarter of the run. Exit code 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from perf_common import MARK, kill_marked, markdown, read_lines, start_marked

from forge_agents.envs.env import Outcome, TurnEnv
from forge_agents.runtime.processes import MESH_VARIABLE, environment

ENV = "soak/Relay-v0"
KINDS = ("team", "league", "pair")
START_S = 3600.0
STEP_S = 120.0
GOALS = {"controller": 10.0, "children": 20.0}
"""Maximum growth in MB per 1,000 steps."""
MB = 1e6


class SoakRelay(TurnEnv):
    """Two agents in turn, with observations and answers of varied length.

    The reward is a hash of the answer, so that the policy does not converge and every step trains.
    """

    possible_agents = ("asker", "answerer")

    def __init__(self) -> None:
        super().__init__(max_turns=4)

    def setup(self, rng: np.random.Generator) -> None:
        self.question = "".join(map(chr, rng.integers(97, 123, rng.integers(3, 40))))
        self.decisions = int(rng.integers(1, 5))
        self.message = ""
        self.count = 0

    def instructions(self, agent: str) -> str:
        return "Write letters."

    def observe_text(self, agent: str) -> str:
        return self.message[:60] or self.question

    def act(self, agent: str, action: str) -> Outcome:
        self.message = action
        self.count += 1
        reward = zlib.crc32(action.encode()) / 2**32
        return Outcome(rewards=dict.fromkeys(self.possible_agents, reward), done=self.count == self.decisions)


def main() -> int:
    """Run the soak test and print its table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps (default: 2000)")
    parser.add_argument("--every", type=int, default=20, help="steps between samples of memory (default: 20)")
    parser.add_argument("--kind", choices=KINDS, default="team", help="one policy, a league, or a pair of policies")
    parser.add_argument("--out", type=Path, default=Path("runs/soak"), help="folder of samples and of the run")
    parser.add_argument("--table", action="store_true", help="only print the table of the samples in --out")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        train(options)
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run is ended as well
    if not options.table:
        options.out.mkdir(parents=True, exist_ok=True)
        measure(options)
    samples = read_lines(options.out / "samples.jsonl")
    slopes = slopes_by_role(samples)
    sys.stdout.write(table(slopes, step_times(options.out / "run")))
    children = sum(slope for role, slope in slopes.items() if role not in ("controller", "viewer"))
    reached = {"controller": slopes["controller"], "children": children}
    return int(any(reached[name] > GOALS[name] for name in GOALS))


# ---- the run


def train(options: argparse.Namespace) -> None:
    """Train in this process."""
    import forge_agents as fa
    from forge_agents.envs.registry import register
    from forge_agents.testing import tiny_model

    model = options.out / "model"
    if not model.exists():
        tiny_model(model)
    register(ENV, entry_point="soak:SoakRelay", max_turns=4, isolation="process", step_timeout_s=60.0)
    sampling = fa.Sampling(max_tokens=12)
    team = fa.Policy(str(model), name="team", sampling=sampling)
    policies: Any = team
    if options.kind == "league":
        policies = fa.League(team, snapshot_every=10, pool=3)
    if options.kind == "pair":
        policies = {"asker": team, "answerer": fa.Policy(str(model), name="rival", sampling=sampling)}
    config = fa.GRPOConfig(
        group_size=4,
        groups_per_step=2,
        max_resamples=0,
        checkpoint_every=50,
        eval_every=50,
        eval_episodes=4,
        learner=fa.LearnerConfig(lr=1e-4, threads=1, compute_dtype="float32"),
        engine=fa.EngineConfig(enforce_eager=True, kv_cache_gb=0.02, max_model_len=512, threads=1),
        max_logprob_gap=float("inf"),
        max_empty_steps=1000,
    )
    with fa.GRPOTrainer(policies, config=config, out_dir=options.out / "run") as trainer:
        trainer.fit(ENV, steps=options.steps)


# ---- the measure


def measure(options: argparse.Namespace) -> None:
    """Train in a child and write the memory of its processes to ``samples.jsonl``."""
    words = ("--steps", str(options.steps), "--kind", options.kind, "--out", str(options.out.absolute()))
    child, mark = start_marked(__file__, *words, log=options.out / "log")
    try:
        sample_all(child, mark, options)
    finally:
        if child.poll() is None:
            child.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(60)
        kill_marked(mark)


def sample_all(child: subprocess.Popen[bytes], mark: str, options: argparse.Namespace) -> None:
    """Sample every `options.every` steps until the child has ended. The viewer starts with the first sample."""
    metrics, due, deadline = Metrics(options.out / "run" / "metrics.jsonl"), options.every, time.monotonic() + START_S
    with (options.out / "samples.jsonl").open("w") as file, contextlib.ExitStack() as stack:
        watching = 0
        while child.poll() is None:
            time.sleep(0.2)
            if time.monotonic() > deadline:
                raise TimeoutError(f"step {due} is late. See {options.out / 'log'}")
            if (step := metrics.count()) < due:
                continue
            watching = watching or stack.enter_context(viewer(options.out / "run", mark))
            file.write(json.dumps({"step": step, "mb": memory(child.pid, watching)}) + "\n")
            file.flush()
            due = (step // options.every + 1) * options.every
            deadline = time.monotonic() + options.every * STEP_S


class Metrics:
    """Counts the lines of a growing file."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._count = path, 0, 0

    def count(self) -> int:
        """Number of complete lines so far."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
            self._count += new.count(b"\n")
            self._offset += len(new)
        return self._count


def memory(controller: int, watching: int) -> dict[str, float]:
    """Unique memory (USS) in MB by role, summed over the role's processes."""
    totals: dict[str, float] = defaultdict(float)
    with contextlib.suppress(psutil.Error):
        totals["viewer"] = psutil.Process(watching).memory_full_info().uss / MB
        totals["controller"] = psutil.Process(controller).memory_full_info().uss / MB
        for process in psutil.Process(controller).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                totals[role(environment(process.pid))] += process.memory_full_info().uss / MB
    return {name: round(value, 3) for name, value in totals.items()}


def role(variables: Mapping[str, str]) -> str:
    """The role of a child, from the name of its mesh."""
    mesh = variables.get(MESH_VARIABLE, "")
    if not mesh:
        return "other"
    name = mesh.rpartition("-")[0]
    if name.startswith("env-worker"):
        return "environment workers"
    if name.endswith("-learner"):
        return "learners"
    return "weight store" if name == "weights" else "engines"


@contextlib.contextmanager
def viewer(run: Path, mark: str) -> Iterator[int]:
    """A viewer of the run, whose page is asked for news every two seconds. Gives its process id."""
    code = f"from forge_agents import viewer; viewer.serve_page([{str(run)!r}], port=0)"
    variables = {**os.environ, MARK: mark, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=variables, text=True) as server:
        over = threading.Event()
        asking = threading.Thread(target=ask_viewer, args=(server, over), daemon=True)
        asking.start()
        try:
            yield server.pid
        finally:
            over.set()
            server.kill()
            asking.join(30)


def ask_viewer(server: subprocess.Popen[str], over: threading.Event) -> None:
    """Load what an open page loads until `over` is set."""
    assert server.stdout is not None
    address = next((word for line in server.stdout for word in line.split() if word.startswith("http")), "")
    while address and not over.wait(2.0):
        with contextlib.suppress(OSError):
            for path in ("api/runs", "api/runs/0/metrics", "api/runs/0/episodes"):
                urllib.request.urlopen(address + path, timeout=10).read()


# ---- the table


def slope(steps: Sequence[float], values: Sequence[float]) -> float:
    """Theil-Sen estimate per 1,000 steps: the median slope of all pairs, which single jumps do not move."""
    x, y = np.asarray(steps, float), np.asarray(values, float)
    first, second = np.triu_indices(len(x), k=1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first])) * 1000)


def slopes_by_role(samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Growth in MB per 1,000 steps over the last two thirds of the run."""
    later = [sample for sample in samples if sample["step"] >= samples[-1]["step"] / 3]
    roles = sorted({name for sample in later for name in sample["mb"]})
    steps = [sample["step"] for sample in later]
    return {name: slope(steps, [sample["mb"].get(name, 0.0) for sample in later]) for name in roles}


def step_times(run: Path) -> list[float]:
    """Median seconds of a step, by quarter of the run."""
    times = [row["time/step_s"] for row in read_lines(run / "metrics.jsonl")]
    quarter = max(1, len(times) // 4)
    return [statistics.median(times[start : start + quarter]) for start in range(0, 4 * quarter, quarter)]


def table(slopes: Mapping[str, float], times: Sequence[float]) -> str:
    """Markdown."""
    rows = markdown(("role", "MB per 1,000 steps"), ((name, f"{value:.1f}") for name, value in slopes.items()))
    return f"{rows}\nMedian seconds of a step by quarter: {', '.join(f'{value:.2f}' for value in times)}\n"


if __name__ == "__main__":
    raise SystemExit(main())
