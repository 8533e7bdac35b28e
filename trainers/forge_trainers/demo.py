"""The demo: two agents learn a relay on the whole stack, beside a control that must not learn.

In: nothing but a seed. Out: a table, a plot, and whether the team learned. Waits for both runs.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

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
    """The demo's knobs; the defaults finish in minutes on two CPU cores."""

    model: str = "smollm2-135m-instruct"
    """The team's model."""
    steps: int = 15
    """Optimiser steps of the training run."""
    control_steps: int = 4
    """Steps of the control run, whose learning rate is 0, so that more of them show nothing more; 0 leaves it out."""
    episodes: int = 128
    """Held-out seeds before and after."""
    seed: int = 0
    """Of the whole experiment."""
    out_dir: str = ""
    """Folder of the runs; empty makes a new one under runs/."""
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(max_model_len=512))
    """With `enforce_eager` nothing is compiled: it needs no C compiler, starts sooner and samples slower."""
    mesh: Hosts = field(default_factory=Hosts)
    """Where processes run."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run: held-out reward before and after, its metrics, its seconds of training."""

    before: EvalResult
    after: EvalResult
    rows: list[dict[str, Any]]
    train_s: float
    first_step_s: float | None = None
    """From the demo's beginning until the first step was done, starts and evaluation included; None where none was."""

    @property
    def learned(self) -> bool:
        """Twice the reward, or half of what it missed of 1, with intervals that do not overlap."""
        before, after = self.before, self.after
        clear = after.reward - after.ci > before.reward + before.ci
        return bool(clear and (after.reward >= 2 * before.reward or 1 - after.reward <= (1 - before.reward) / 2))

    @property
    def unmoved(self) -> bool:
        """The reward afterwards lies inside the interval of the difference that chance makes."""
        return bool(abs(self.after.reward - self.before.reward) <= np.hypot(self.before.ci, self.after.ci))


def demo(config: DemoConfig | None = None) -> bool:
    """Train, run the control, print the table, draw ``demo.png``. Returns whether only the team learned."""
    config = config or DemoConfig()
    console, began = Console(), time.perf_counter()
    folder = user_path(config.out_dir or time.strftime("runs/demo-%Y%m%d-%H%M%S"))
    console.print(f"Two seats of {ENV_ID}, both played by {config.model}; everything goes to {folder}")
    control = None
    try:
        first = GRPOTrainer(
            team(config.model), config=settings(config), out_dir=folder / "trained", mesh=config.mesh
        )
        with first:
            trained = _run(first, config, began, steps=config.steps)
            _save(trained, folder / "trained", "trained", config.seed)
            if config.control_steps:
                with first.fork(folder / "control", config=settings(config, lr=0.0)) as second:
                    # before, both are the same model on the same seeds
                    control = _run(second, config, began, steps=config.control_steps, before=trained.before)
                    _save(control, folder / "control", "control", config.seed)
    except KeyboardInterrupt:
        raise interrupted(f"stopped; {folder} holds what was played, and another demo begins anew") from None
    console.print(_table(trained, control))
    picture = _plot(folder, trained, control)
    if trained.first_step_s is not None:
        console.print(f"the first step of training was done {trained.first_step_s:.0f} s after the demo began")
    good = trained.learned and (control is None or control.unmoved)
    console.print(
        f"plot   {picture}\nmodel  {folder / 'trained' / 'export'}\nread   {folder / 'trained' / 'episodes.jsonl'}"
    )
    console.print("the team learned" if good else "the team did NOT learn as it should; see the table", style="bold")
    return good


def settings(config: DemoConfig, lr: float | None = None) -> GRPOConfig:
    """The demo's training settings; `lr` overrides the learning rate."""
    learner = LearnerConfig(lr=2e-5, warmup_steps=2)
    return GRPOConfig(
        seed=config.seed,
        learner=learner if lr is None else replace(learner, lr=lr),
        engine=config.engine,
        checkpoint_every=20,
        max_resamples=0,  # the control plays as much
    )


def team(model: str) -> Policy:
    """The policy of both seats."""
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
    """Write the held-out rewards with half the width of their 95 % intervals to ``result.json``."""
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
