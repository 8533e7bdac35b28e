"""Learning from given data: what supervised fine-tuning and preference optimisation have in common.

In: a data set. Out: better weights and a run folder. Waits for the learner, each time with a deadline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self

import numpy as np

from forge_agents.errors import ModelNotFoundError, NotReadyError, RunFolderError
from forge_agents.files import user_path
from forge_agents.models import resolve as models
from forge_agents.policy import Policy
from forge_agents.rollout.rendering import Renderer
from forge_agents.runtime import mesh, startup
from forge_agents.runtime.hosts import Hosts
from forge_agents.runtime.interrupts import Interrupt, LoopRunner
from forge_agents.settings import named_arguments
from forge_trainers.learner.client import Learner
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.rates import Method, weak_rate, with_rate
from forge_trainers.offline.config import OfflineConfig
from forge_trainers.offline.data import Dataset, Gathered, T
from forge_trainers.records.description import describe
from forge_trainers.records.run_folder import (
    FitResult,
    RunFolder,
    check_resumable,
    hashes_of_models,
    installed_packages,
)
from forge_trainers.records.trackers import check_installed
from forge_trainers.run.checkpoints import Checkpoints
from forge_trainers.run.console import Display
from forge_trainers.run.learner_settings import rate_line
from forge_trainers.run.placement import checked_parts, place_here
from forge_trainers.run.supervision import Stopwatch

if TYPE_CHECKING:
    from forge_agents.types import Reward

_ABOUT_A_SAMPLER = ("ratio_", "clip_fraction", "correction", "corrected_fraction", "logprob_gap")
"""Beginnings of the learner's metrics that mean nothing without a sampler."""
_FIXED = ("method", "policy.lora", *(f"trainer.{name}" for name in ("batch_size", "eval_share", "seed")))
"""Settings that a resumed run must share with its checkpoint: the last three decide which rows were learned."""


class OfflineTrainer(ABC, Generic[T]):
    """Teaches a policy from given data.

    Args:
        policy: The model that learns.
        config: Settings.
        out_dir: The run's folder. Where it holds a run already, training continues from its newest checkpoint.
        hosts: Where the learner runs; None: on this host.

    The learner starts with the first call that needs it and stops with `close`, at the end of a ``with`` block or of
    the program.
    """

    config: OfflineConfig
    method: ClassVar[Method]
    """Training method, which the default learning rate depends on and the live display shows."""
    curves: ClassVar[Mapping[str, str]] = {"train/loss": "learned", "eval/loss": "held out"}
    """What ``loss.png`` shows."""
    _gather: ClassVar[Callable[..., Gathered[Any]]]
    """Reads and tokenises a data set, as `forge_trainers.offline.data.read_pairs`."""

    def __init__(
        self, policy: Policy, config: OfflineConfig, out_dir: str | os.PathLike[str], hosts: Hosts | None
    ) -> None:
        if not isinstance(policy, Policy):
            raise TypeError(f"policy must be an fa.Policy, got {type(policy).__name__}; write fa.Policy('model')")
        if policy.learner is not None:
            raise ValueError(
                f"policy {policy.name!r} has learner={policy.learner}, which overrides settings of an fa.GRPOTrainer; "
                f"set learner of the {type(config).__name__} instead"
            )
        self.policy, self.out_dir = policy, user_path(out_dir)
        self.config, self._hosts = config, hosts or Hosts()
        self._learner: Learner | None = None
        self._checkpoints = Checkpoints(
            self.out_dir / "checkpoints", keep=config.keep_checkpoints, timeout_s=config.stage_timeout_s
        )
        self._loop = LoopRunner(self._stop, self._checkpoints.standing)
        self._next_step = 0

    @named_arguments
    def fit(
        self,
        dataset: Dataset,
        *,
        eval_dataset: Dataset | None = None,
        epochs: int = 1,
        steps: int | None = None,
        reward: Reward | None = None,
    ) -> FitResult:
        """Train until the run has done its optimiser steps, earlier sessions in `out_dir` included.

        Args:
            dataset: A path or an iterable; the trainer says of what.
            eval_dataset: The same, measured and never learned; None takes ``config.eval_share`` of `dataset`.
            epochs: Times that everything is learned, in an order of its own each time. What the last step has
                room for is filled from the next order.
            steps: Optimiser steps; None takes as many as `epochs` needs.
            reward: What episodes are compared by; None is the environment's own reward, and in a run's folder the
                reward that the run trained on.

        Raises:
            ValueError: Nothing to learn, or a row that is malformed, has no answer or is too long; it is named.
            RunFolderError: `out_dir` holds a run on other data.
            KeyboardInterrupt: Ctrl-C; the step was finished and saved before.
            SystemExit: SIGTERM, with status 143; the same.
        """
        if epochs < 1 or (steps is not None and steps < 1):
            raise ValueError(f"epochs={epochs}, steps={steps} trains nothing; set at least 1")
        if eval_dataset is not None and self.config.eval_share:
            raise ValueError(
                f"there is an eval_dataset, and eval_share={self.config.eval_share} would hold out more; give one"
            )
        data = self._read(dataset, reward)
        learned, held_out = split(data.items, self.config)
        if eval_dataset is not None:
            held_out = list(self._read(eval_dataset, reward).items)
        counts = {"learned": len(learned), "held out": len(held_out)}
        data = dataclasses.replace(data, counts={**counts, **{k: n for k, n in data.counts.items() if k not in counts}})
        if self.config.eval_every and not held_out:
            raise ValueError(
                f"eval_every={self.config.eval_every} measures nothing, because nothing is held out; give an "
                "eval_dataset or set eval_share"
            )
        wanted = steps or math.ceil(epochs * len(learned) / self.config.batch_size)
        described = self._settings(data, wanted, reward)
        return self._loop.run(self._fit(described, data, learned, held_out, wanted))

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Export the trained weights in Hugging Face format."""
        return self._loop.run(self._export(user_path(folder)))

    def close(self) -> None:
        """Stop the learner."""
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- what a kind of trainer says

    @abstractmethod
    async def _learn(self, learner: Learner, items: Sequence[T]) -> dict[str, float]:
        """One optimiser step on `items`. Returns its metrics, the learner's among them."""

    @abstractmethod
    async def _measure(self, learner: Learner, items: Sequence[T]) -> dict[str, float]:
        """Metrics of held-out `items`, by their names after ``eval/``."""

    def _ready_for(self, items: Sequence[T]) -> bool:
        """Whether `_look_at_start` has seen all of `items`."""
        del items
        return True

    async def _look_at_start(self, learner: Learner, items: Sequence[T]) -> None:
        """Called with the start model's weights, before those of a checkpoint are loaded."""

    # ---- the loop

    def _read(self, dataset: Dataset, reward: Reward | None) -> Gathered[T]:
        folder = models.resolve(self.policy.model)
        limits = (models.context_of(folder), self.config.learner.max_sample_tokens)
        room = min((limit for limit in limits if limit), default=sys.maxsize)
        found: Gathered[T] = self._gather(
            dataset,
            Renderer.of(folder, thinking=self.policy.thinking),
            self.config,
            policy=self.policy.name,
            room=room,
            reward=reward,
            keep_reasoning=self.policy.keep_reasoning,
        )
        return found

    def _batches(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        size = self.config.batch_size
        return (items[start : start + size] for start in range(0, len(items), size))

    @property
    def _learning(self) -> dict[str, Any]:
        """The part of the settings that says which weights learn."""
        return {
            "method": self.method,
            "policy": dataclasses.asdict(self.policy),
            "weights": hashes_of_models({self.policy.name: self.policy}),
        }

    def _check_resumable(self, settings: Mapping[str, Any]) -> None:
        """Refuse what the run in `out_dir` cannot go on with, before anything starts."""
        if self._learner is None and self._checkpoints.any():
            check_resumable(self.out_dir, settings, [*_FIXED, f"weights.{self.policy.name}"])
            self._checkpoints.check_resumable([self.policy.name])

    def _settings(self, data: Gathered[T], steps: int, reward: Reward | None) -> dict[str, Any]:
        """What config.yaml says of the run."""
        learner = dataclasses.replace(self.config.learner, lr=self._learner_settings().lr)
        return {
            **self._learning,
            "data": dict(data.counts),
            "reward": None if reward is None else describe(reward),
            "steps": steps,
            "trainer": dataclasses.asdict(dataclasses.replace(self.config, learner=learner)),
            "mesh": describe(dataclasses.asdict(self._hosts)),
            "packages": installed_packages(),
        }

    async def _fit(
        self,
        described: Mapping[str, Any],
        data: Gathered[T],
        learned: Sequence[T],
        held_out: Sequence[T],
        steps: int,
    ) -> FitResult:
        config = self.config
        self._check_resumable(described)
        check_installed(config.tracker)
        with startup.show() as say:
            self._checkpoints.check_room([(self.policy, config.learner)], say)
        with RunFolder(self.out_dir, described, tracker=config.tracker) as run:
            try:
                self._keep_digest(data.digest)
                return await self._session(run, data.counts, learned, held_out, steps)
            finally:
                await self._checkpoints.settle()

    async def _session(
        self, run: RunFolder, counts: Mapping[str, int], learned: Sequence[T], held_out: Sequence[T], steps: int
    ) -> FitResult:
        """Train to the end of the run."""
        config = self.config
        with startup.show():
            learner = await self._started([*learned, *held_out])
        first = self._next_step
        await learner.set_total_steps(steps)
        run.rewind(first)
        run.keep_settings()
        with Display(self.method, steps, first) as display, Interrupt(display.say) as interrupt:
            settings = self._learner_settings()
            display.say(rate_line(settings, chosen=config.learner.lr is not None))
            if warning := weak_rate(settings, steps, self.method):
                display.say(warning)
            display.say("data: " + ", ".join(f"{number} {why}" for why, number in counts.items() if number))
            if first and run.changed:
                display.say(f"settings have changed: {run.changed}; config.previous.yaml has the old ones")
            for step in range(first, steps):
                watch = Stopwatch()
                rows = rows_of(step, len(learned), config)
                metrics = await self._learn(learner, [learned[row] for row in rows])
                watch.lap("learn")
                if waited_s := metrics["learner/save_wait_s"]:
                    watch.part("save", "learn", waited_s)
                self._next_step = step + 1
                last = step + 1 == steps
                metrics["epoch"] = (step + 1) * config.batch_size / len(learned)
                if held_out and (last or (config.eval_every and (step + 1) % config.eval_every == 0)):
                    measured = await self._measure(learner, held_out)
                    metrics |= {f"eval/{name}": value for name, value in measured.items()}
                    watch.lap("eval")
                metrics |= watch.times
                run.log(step + 1, metrics)
                display.step(step, metrics)
                ending = interrupt.requested or last
                if ending or (step + 1) % config.checkpoint_every == 0:
                    await self._checkpoints.start(step + 1, {self.policy.name: learner})
                if ending:
                    await self._checkpoints.finish()
                    interrupt.stop_if_requested(step + 1, self.out_dir)
        export = await self._export(self.out_dir / "export")
        curve = run.plot("loss", self.curves)
        return FitResult(
            steps=max(first, steps), metrics=run.metrics(), out_dir=self.out_dir, export=export, curve=curve
        )

    async def _export(self, folder: Path) -> Path:
        if self._learner is None:
            raise NotReadyError("nothing has been trained yet; call fit first")
        await self._learner.export(folder, timeout_s=self.config.stage_timeout_s)
        return folder

    async def _started(self, items: Sequence[T]) -> Learner:
        """The running learner; where `out_dir` holds a run, with its weights."""
        if not self._ready_for(items):
            await self._stop()  # only a fresh learner holds the start model
        if self._learner is None:
            self._check_resumable(self._learning)
            name, config = self.policy.name, self.config
            folder = models.resolve(self.policy.model)
            self._hosts.check_processes("learner", config.learner_procs, each=config.learner_procs)
            self.out_dir.mkdir(parents=True, exist_ok=True)
            meshes = [(f"{name}-learner", "learner", config.learner_procs)]
            settings = dataclasses.replace(
                self._learner_settings(),
                model=str(folder),
                loss="sft",
                correction="none",
                temperature=1.0,
                lora=self.policy.lora,
                seed=config.seed,
                dump_folder=str(self.out_dir / "learner" / name),
            )
            with contextlib.suppress(ModelNotFoundError):
                checked_parts({}, {name: (settings, 1)}, ranks=config.learner_procs)
            await mesh.launch_hosts(self._hosts, paths=(folder, self.out_dir), meshes=meshes)
            try:
                counted = dataclasses.replace(settings, max_sample_tokens=max(item.longest for item in items))
                _, placed = place_here({}, {f"{name}-learner": (counted, 1)}, ranks=config.learner_procs)
                self._learner = learner = await Learner.start(
                    dataclasses.replace(placed[f"{name}-learner"], max_sample_tokens=settings.max_sample_tokens),
                    name=f"{name}-learner",
                    world_size=config.learner_procs,
                    heartbeat_timeout_s=config.heartbeat_timeout_s,
                    timeout_s=config.start_timeout_s,
                )
                await self._look_at_start(learner, items)
                self._next_step = await self._checkpoints.restore({name: learner})
            except BaseException:
                await self._stop()
                raise
        return self._learner

    def _learner_settings(self) -> LearnerConfig:
        """Settings of the learner for this policy, with a learning rate."""
        model = str(models.resolve(self.policy.model))
        return with_rate(dataclasses.replace(self.config.learner, model=model, lora=self.policy.lora), self.method)

    def _keep_digest(self, digest: str) -> None:
        """A run is continued on the data it began with: the order of rows depends on them."""
        file = self.out_dir / "data.sha256"
        if self._checkpoints.any() and file.exists() and file.read_text() != digest:
            raise RunFolderError(
                f"{self.out_dir} holds a run on other data; choose another out_dir, with the export of this one as the "
                "model to go on from"
            )
        file.write_text(digest)

    async def _stop(self) -> None:
        if self._learner is not None:
            learner, self._learner = self._learner, None
            await learner.stop()
        await mesh.end_hosts(self._hosts)


def split(items: Sequence[T], config: OfflineConfig) -> tuple[list[T], list[T]]:
    """What is learned and what is held out, chosen by the seed."""
    count = round(config.eval_share * len(items))
    if config.eval_share and not 0 < count < len(items):
        raise ValueError(
            f"eval_share={config.eval_share} of {len(items)} items is {count}; both parts need at least 1"
        )
    held_out = set(np.random.default_rng([config.seed, 1]).permutation(len(items))[:count].tolist())
    return (
        [item for number, item in enumerate(items) if number not in held_out],
        [item for number, item in enumerate(items) if number in held_out],
    )


def rows_of(step: int, rows: int, config: OfflineConfig) -> list[int]:
    """The rows of one step: a function of the seed and the step alone, so a resumed run learns what it would have.

    Epochs follow each other without a gap, each in an order of its own.
    """
    first = step * config.batch_size
    wanted = range(first, first + config.batch_size)
    orders = {
        epoch: np.random.default_rng([config.seed, 0, epoch]).permutation(rows)
        for epoch in range(wanted[0] // rows, wanted[-1] // rows + 1)
    }
    return [int(orders[at // rows][at % rows]) for at in wanted]


def learner_metrics(found: Mapping[str, float], config: OfflineConfig) -> dict[str, float]:
    """What the learner says of a step that has no sampler; its loss is left to the caller."""
    plain = ("tokens", "loss_tokens", "tokens_per_s")
    hidden = ("loss", "step_s", *plain, *(() if config.learner.kl_coef else ("kl",)))
    return {name: float(found[name]) for name in plain} | {
        f"learner/{name}": float(value)
        for name, value in found.items()
        if name not in hidden and not name.startswith(_ABOUT_A_SAMPLER)
    }
