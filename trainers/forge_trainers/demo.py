"""The demo: two agents learn a relay on the whole stack, next to a control run that must not learn."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from forge_agents import output
from forge_agents.files import user_path
from forge_agents.policy import Policy, Sampling
from forge_agents.runtime.hosts import Hosts
from forge_agents.runtime.interrupts import interrupted
from forge_agents.serving.config import EngineConfig
from forge_agents.settings import settings_class
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.records.plots import draw_curve, picture
from forge_trainers.rl.config import GRPOConfig
from forge_trainers.rl.evaluation import EvalResult
from forge_trainers.rl.trainer import GRPOTrainer

ENV_ID = "forge/Relay-v0"
ENV_ARGS: dict[str, Any] = {"max_number": 9, "tool": False}


@settings_class
@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """Settings of the demo. The defaults finish in minutes on two CPU cores."""

    model: str = "smollm2-135m-instruct"
    """Model of both agents."""
    steps: int = 15
    """Number of optimizer steps of the training run."""
    control_steps: int = 4
    """Number of steps of the control run with learning rate 0. 0 leaves it out."""
    episodes: int = 128
    """Number of held-out episodes, before and after training."""
    seed: int = 0
    """Random seed of both runs."""
    out_dir: str = ""
    """Folder of the runs. Empty (default): a new one in runs/."""
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(max_model_len=512))
    """Settings of the engine. With `enforce_eager` it needs no C compiler, starts sooner and samples slower."""
    mesh: Hosts = field(default_factory=Hosts)
    """Hosts of the processes."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A run: held-out rewards before and after, its metrics, and seconds of training."""

    before: EvalResult
    after: EvalResult
    rows: list[dict[str, Any]]
    train_s: float
    first_step_s: float | None = None
    """Seconds from the start of the demo to the end of the first step. None without a step."""

    @property
    def learned(self) -> bool:
        """Whether the reward doubled, or its distance to 1 halved, with intervals that do not overlap."""
        before, after = self.before, self.after
        clear = after.reward - after.ci > before.reward + before.ci
        return bool(clear and (after.reward >= 2 * before.reward or 1 - after.reward <= (1 - before.reward) / 2))

    @property
    def unmoved(self) -> bool:
        """Whether the difference of the rewards lies inside its confidence interval."""
        return bool(abs(self.after.reward - self.before.reward) <= np.hypot(self.before.ci, self.after.ci))


def demo(config: DemoConfig | None = None) -> bool:
    """Train, run the control, print the table, draw ``demo.png``. Returns whether only the team learned."""
    config = config or DemoConfig()
    console, began = output.console(), time.perf_counter()
    folder = user_path(config.out_dir or time.strftime("runs/demo-%Y%m%d-%H%M%S"))
    console.print(f"Two agents of {ENV_ID}, both played by {config.model}. All files are in {folder}")
    control = None
    try:
        first = GRPOTrainer(team(config.model), config=settings(config), out_dir=folder / "trained", mesh=config.mesh)
        with first:
            trained = _run(first, config, began, steps=config.steps)
            _save(trained, folder / "trained", "trained", config.seed)
            if config.control_steps:
                with first.fork(folder / "control", config=settings(config, lr=0.0)) as second:
                    # before, both are the same model on the same seeds
                    control = _run(second, config, began, steps=config.control_steps, before=trained.before)
                    _save(control, folder / "control", "control", config.seed)
    except KeyboardInterrupt:
        raise interrupted(f"stopped; {folder} has the episodes so far, and the next demo starts anew") from None
    console.print(_table(trained, control))
    picture = _plot(folder, trained, control)
    if trained.first_step_s is not None:
        console.print(f"the first step of training was done {trained.first_step_s:.0f} s after the demo began")
    good = trained.learned and (control is None or control.unmoved)
    console.print(
        f"plot   {picture}\nmodel  {folder / 'trained' / 'export'}\nread   {folder / 'trained' / 'episodes.jsonl'}"
    )
    console.print("the team learned" if good else "the team did NOT learn as it should. See the table", style="bold")
    return good


def settings(config: DemoConfig, lr: float | None = None) -> GRPOConfig:
    """The demo's training settings. `lr` overrides the learning rate."""
    learner = LearnerConfig(lr=2e-5, warmup_steps=2)
    return GRPOConfig(
        seed=config.seed,
        learner=learner if lr is None else replace(learner, lr=lr),
        engine=config.engine,
        checkpoint_every=20,
        max_resamples=0,  # so that the control collects as many episodes
    )


def team(model: str) -> Policy:
    """The policy of both agents."""
    return Policy(model, name="team", sampling=Sampling(temperature=1.0, max_tokens=16))


def _run(
    trainer: GRPOTrainer, config: DemoConfig, began: float, *, steps: int, before: EvalResult | None = None
) -> Outcome:
    held_out: dict[str, Any] = {"episodes": config.episodes, "env_args": ENV_ARGS}
    before = before or trainer.evaluate(ENV_ID, **held_out)
    started = time.perf_counter()
    result = trainer.fit(ENV_ID, steps=steps, env_args=ENV_ARGS)
    train_s = time.perf_counter() - started
    first_step_s = None if result.first_step_s is None else started - began + result.first_step_s
    return Outcome(before, trainer.evaluate(ENV_ID, **held_out), list(result.metrics), train_s, first_step_s)


def _save(run: Outcome, folder: Path, arm: str, seed: int) -> None:
    """Write the held-out rewards, with half-widths of their 95 % intervals, to ``result.json``."""
    before, after = ([result.reward, result.ci] for result in (run.before, run.after))
    result = {"arm": arm, "seed": seed, "before": before, "after": after, "seconds": run.train_s}
    (folder / "result.json").write_text(json.dumps(result))


def _table(trained: Outcome, control: Outcome | None) -> Table:
    table = Table(  # without lines it fits a terminal of 80 columns
        *("run", "before", "after", "ratio", "steps", "s", "verdict"),
        title="mean reward on held-out seeds, 95 %",
        caption=None if control is None else "control: learning rate 0",
        box=box.SIMPLE,
        pad_edge=False,
    )
    runs = [("trained", trained, "learned" if trained.learned else "did not learn")]
    if control is not None:
        runs.append(("control", control, "unmoved" if control.unmoved else "MOVED"))
    for name, run, verdict in runs:
        ratio = run.after.reward / run.before.reward if run.before.reward else float("inf")
        ends = (f"{result.reward:.3f} ± {result.ci:.3f}" for result in (run.before, run.after))
        table.add_row(name, *ends, f"{ratio:.1f}x", str(len(run.rows)), f"{run.train_s:.0f}", verdict)
    return table


def _plot(folder: Path, trained: Outcome, control: Outcome | None) -> Path:
    target = folder / "demo.png"
    with picture(target, xlabel="step", ylabel="mean reward", title=ENV_ID) as axes:
        for name, run in (("trained", trained), ("control, learning rate 0", control)):
            if run is None:
                continue
            draw_curve(axes, run.rows, "reward/mean", "reward/ci", label=f"{name}: training episodes")
            axes.errorbar(
                [-1, len(run.rows)],
                [run.before.reward, run.after.reward],
                yerr=[run.before.ci, run.after.ci],
                fmt="o",
                color=axes.lines[-1].get_color(),
                capsize=4,
                label=f"{name}: held-out seeds",
            )
    return target
