"""Training on given data: the common part of supervised fine-tuning and preference optimization."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self

import numpy as np

from forge_agents.errors import NotReadyError, RunFolderError
from forge_agents.files import user_path
from forge_agents.models import families
from forge_agents.models import resolve as models
from forge_agents.policy import Policy
from forge_agents.rollout.rendering import Renderer
from forge_agents.runtime import mesh, startup
from forge_agents.runtime.hosts import Hosts
from forge_agents.runtime.interrupts import Interrupt, LoopRunner
from forge_agents.settings import named_arguments
from forge_trainers.learner.client import Learner
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.learner.rates import Method, weak_rate, with_rate
from forge_trainers.offline.config import OfflineConfig
from forge_trainers.offline.data import Dataset, Gathered, T
from forge_trainers.records.description import describe
from forge_trainers.records.run_folder import (
    FitResult,
    RunFolder,
    check_begins,
    check_is_run,
    check_resumable,
    hashes_of_models,
    installed_packages,
    write_atomically,
)
from forge_trainers.records.trackers import check_installed
from forge_trainers.run.checkpoints import Checkpoints
from forge_trainers.run.console import Display
from forge_trainers.run.parts import Compute, check_models
from forge_trainers.run.placement import place_here
from forge_trainers.run.plan import rate_line
from forge_trainers.run.supervision import Stopwatch

if TYPE_CHECKING:
    from forge_agents.types import Reward

_log = logging.getLogger(__name__)
_NEEDS_SAMPLER = ("ratio_", "clip_fraction", "correction", "corrected_fraction", "logprob_gap")
"""Prefixes of learner metrics that are undefined without a sampler."""
_FIXED = ("method", "policy.lora", *(f"trainer.{name}" for name in ("batch_size", "eval_share", "seed")))
"""Settings that a resumed run must share with its checkpoint. The last three determine the order of rows."""


class OfflineTrainer(ABC, Generic[T]):
    """Trains a policy on given data.

    Args:
        policy: Model to train.
        config: User settings.
        out_dir: Run folder. If it holds a run, training continues from the newest checkpoint.
        hosts: Hosts of the learner. None: this host.

    The learner starts with the first call that needs it and stops with `close`, at the end of a ``with`` block or of
    the program.
    """

    config: OfflineConfig
    method: ClassVar[Method]
    """Training method. Determines the default learning rate and is shown on the console."""
    curves: ClassVar[Mapping[str, str]] = {"train/loss": "learned", "eval/loss": "held out"}
    """Curves of ``loss.png``: label by metric."""
    _gather: ClassVar[Callable[..., Gathered[Any]]]
    """Function that reads and tokenizes a data set, such as `forge_trainers.offline.data.read_pairs`."""

    def __init__(
        self, policy: Policy, config: OfflineConfig, out_dir: str | os.PathLike[str], hosts: Hosts | None
    ) -> None:
        if policy.learner is not None:
            raise ValueError(
                f"policy {policy.name!r} has learner={policy.learner}, which overrides settings of an fa.GRPOTrainer. "
                f"Set learner of the {type(config).__name__} instead"
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
        """Train until the run has done all optimizer steps, including those of earlier sessions in `out_dir`.

        Args:
            dataset: Path or iterable. The class of the trainer documents its rows.
            eval_dataset: Held-out data in the same format. None holds out ``config.eval_share`` of `dataset`.
            epochs: Number of passes over the data, each in a new order. The last step is filled from the next pass.
            steps: Number of optimizer steps. None: as many as `epochs` needs.
            reward: Reward that episodes are compared by. None: the environment's own reward, or the reward that the run
                was trained on if `dataset` is a run folder.

        Raises:
            ValueError: There is no data, or a row is malformed, has no answer or is too long. The message names it.
            RunFolderError: `out_dir` holds a run on other data.
            KeyboardInterrupt: Ctrl-C, after the step was finished and saved.
            SystemExit: SIGTERM, with status 143, after the step was finished and saved.
        """
        if epochs < 1 or (steps is not None and steps < 1):
            raise ValueError(f"epochs={epochs}, steps={steps} trains nothing. Set at least 1")
        if eval_dataset is not None and self.config.eval_share:
            raise ValueError(f"both eval_dataset and eval_share={self.config.eval_share} are set. Give one of them")
        data = self._read(dataset, reward)
        learned, held_out = split(data.items, self.config)
        held_out_digest = None
        if eval_dataset is not None:
            held_out_data = self._read(eval_dataset, reward)
            held_out, held_out_digest = list(held_out_data.items), held_out_data.digest
        counts = {"learned": len(learned), "held out": len(held_out)}
        contents = {item.content for item in learned}
        if held_out and (copies := sum(item.content in contents for item in held_out)):
            counts["held out and learned"] = copies
            _log.warning(
                "%d of %d held-out items are equal to training items, so eval/loss partly measures memorization. "
                "Remove the duplicates",
                copies,
                len(held_out),
            )
        data = dataclasses.replace(data, counts={**counts, **{k: n for k, n in data.counts.items() if k not in counts}})
        if self.config.eval_every and not held_out:
            raise ValueError(
                f"eval_every={self.config.eval_every} measures nothing, because nothing is held out. Give an "
                "eval_dataset or set eval_share"
            )
        total = steps or math.ceil(epochs * len(learned) / self.config.batch_size)
        described = {**self._settings(data, total, reward), "eval_dataset": held_out_digest}
        return self._loop.run(self._fit(described, data, (learned, held_out), total))

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

    # ---- implemented by subclasses

    @abstractmethod
    async def _learn(self, learner: Learner, items: Sequence[T]) -> dict[str, float]:
        """Do one optimizer step on `items`. Returns its metrics, including the learner's."""

    @abstractmethod
    async def _measure(self, learner: Learner, items: Sequence[T]) -> dict[str, float]:
        """Return metrics of held-out `items`, by their names after ``eval/``."""

    def _ready_for(self, items: Sequence[T]) -> bool:
        """Return whether `_look_at_start` has processed all of `items`."""
        del items
        return True

    async def _look_at_start(self, learner: Learner, items: Sequence[T]) -> None:
        """Process `items` with the weights of the start model, before a checkpoint is loaded."""

    # ---- the loop

    def _read(self, dataset: Dataset, reward: Reward | None) -> Gathered[T]:
        folder = models.resolve(self.policy.model)
        limits = (families.context_of(folder), self.config.max_sample_tokens)
        max_tokens = min((limit for limit in limits if limit), default=sys.maxsize)
        gathered: Gathered[T] = self._gather(
            dataset,
            Renderer.of(folder, thinking=self.policy.thinking),
            self.config,
            policy=self.policy.name,
            room=max_tokens,
            reward=reward,
            keep_reasoning=self.policy.keep_reasoning,
            only_newest=self.policy.context == "newest",
        )
        return gathered

    def _batches(self, items: Sequence[T]) -> Iterator[Sequence[T]]:
        size = self.config.batch_size
        return (items[start : start + size] for start in range(0, len(items), size))

    @property
    def _learning(self) -> dict[str, Any]:
        """Settings that determine which weights are trained."""
        return {
            "method": self.method,
            "policy": dataclasses.asdict(self.policy),
            "weights": hashes_of_models({self.policy.name: self.policy}),
        }

    def _check_resumable(self, settings: Mapping[str, Any]) -> None:
        """Before anything starts, check that `out_dir` is no other program's, and that a run in it can continue."""
        check_is_run(self.out_dir)
        if self._learner is None and self._checkpoints.any():
            check_resumable(self.out_dir, settings, [*_FIXED, f"weights.{self.policy.name}"])
            self._checkpoints.check_resumable([self.policy.name])

    def _settings(self, data: Gathered[T], steps: int, reward: Reward | None) -> dict[str, Any]:
        """Return the settings for config.yaml."""
        learner = dataclasses.replace(self.config.learner, lr=self._learner_plan().lr)
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
        self, described: Mapping[str, Any], data: Gathered[T], parts: tuple[list[T], list[T]], steps: int
    ) -> FitResult:
        self._check_resumable(described)
        if not (self._next_step or self._checkpoints.any()):
            check_begins(self.out_dir)
        check_installed(self.config.tracker)
        with startup.show() as say:
            self._checkpoints.check_room([(self.policy, self.config.learner)], say)
        with RunFolder(self.out_dir, described, tracker=self.config.tracker) as run:
            try:
                self._keep_digest(data.digest)
                with startup.show():
                    learner = await self._started([*parts[0], *parts[1]])
                return await self._session(run, learner, data, parts, steps)
            finally:
                await self._checkpoints.settle()

    async def _session(
        self, run: RunFolder, learner: Learner, data: Gathered[T], parts: tuple[list[T], list[T]], steps: int
    ) -> FitResult:
        """Train until the end of the run, on the first of `parts`. The second is held out."""
        config, (learned, held_out) = self.config, parts
        first = self._next_step
        await learner.set_total_steps(steps)
        run.rewind(first)
        run.keep_settings()
        with Display(self.method, steps, first) as display, Interrupt(display.say) as interrupt:
            settings = self._learner_plan()
            display.say(rate_line(settings, chosen=config.learner.lr is not None))
            if warning := weak_rate(settings, steps, self.method):
                display.say(warning)
            display.say("data: " + ", ".join(f"{number} {kind}" for kind, number in data.counts.items() if number))
            display.resumed(first, run.changed)
            for step in range(first, steps):
                watch = Stopwatch()
                rows = rows_of(step, len(learned), config)
                metrics = await self._learn(learner, [learned[row] for row in rows])
                watch.lap("learn")
                if waited_s := metrics["learner/save_wait_s"]:
                    watch.move(waited_s, source="learn", target="save")
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
            raise NotReadyError("nothing has been trained yet. Call fit first")
        await self._learner.export(folder, timeout_s=self.config.stage_timeout_s)
        return folder

    async def _started(self, items: Sequence[T]) -> Learner:
        """Return the running learner, with the weights of the run in `out_dir` if there is one."""
        if not self._ready_for(items):
            await self._stop()  # only a new learner has the start model
        if self._learner is None:
            self._check_resumable(self._learning)
            name, config = self.policy.name, self.config
            folder = models.resolve(self.policy.model)
            self._hosts.check_processes("learner", config.learner_procs, each=config.learner_procs)
            self.out_dir.mkdir(parents=True, exist_ok=True)
            settings, process = self._learner_plan(), f"{name}-learner"
            learner_mesh = Compute(
                name=process, policies=(name,), folder=folder, ranks=config.learner_procs, learner=settings
            )
            check_models([learner_mesh])
            meshes = [(process, "learner", config.learner_procs)]
            await mesh.launch_hosts(self._hosts, paths=(folder, self.out_dir), meshes=meshes)
            try:
                counted = dataclasses.replace(settings, max_sample_tokens=max(item.longest for item in items))
                _, placed = place_here([dataclasses.replace(learner_mesh, learner=counted)])
                plan = LearnerPlan.of(placed[process], max_sample_tokens=settings.max_sample_tokens)
                started = await Learner.start_together(
                    {name: plan},
                    name=process,
                    world_size=config.learner_procs,
                    heartbeat_timeout_s=config.heartbeat_timeout_s,
                    timeout_s=self._hosts.start_timeout_s,
                )
                self._learner = learner = started[name]
                await self._look_at_start(learner, items)
                self._next_step = await self._checkpoints.restore({name: learner})
            except BaseException:
                await self._stop()
                raise
        return self._learner

    def _learner_plan(self) -> LearnerPlan:
        """Return the resolved settings of the learner, with a learning rate."""
        plan = LearnerPlan.of(
            self.config.learner,
            model=str(models.resolve(self.policy.model)),
            lora=self.policy.lora,
            loss="sft",
            correction="none",
            seed=self.config.seed,
            dump_folder=str(self.out_dir / "learner" / self.policy.name),
            max_sample_tokens=self.config.max_sample_tokens,
        )
        return with_rate(plan, self.method)

    def _keep_digest(self, digest: str) -> None:
        """Check that a resumed run has the same data: the order of rows depends on it."""
        file = self.out_dir / "data.sha256"
        if self._checkpoints.any() and file.exists() and file.read_text(errors="replace") != digest:
            raise RunFolderError(
                f"{self.out_dir} holds a run on other data. Choose another out_dir, and the export of this run as the "
                "model to continue from"
            )
        write_atomically(file, digest)

    async def _stop(self) -> None:
        if self._learner is not None:
            learner, self._learner = self._learner, None
            await learner.stop()
        await mesh.end_hosts(self._hosts)


def split(items: Sequence[T], config: OfflineConfig) -> tuple[list[T], list[T]]:
    """Split items into a training and a held-out part by the seed."""
    count = round(config.eval_share * len(items))
    if config.eval_share and not 0 < count < len(items):
        raise ValueError(f"eval_share={config.eval_share} of {len(items)} items is {count}. Both parts need at least 1")
    held_out = set(np.random.default_rng([config.seed, 1]).permutation(len(items))[:count].tolist())
    return (
        [item for number, item in enumerate(items) if number not in held_out],
        [item for number, item in enumerate(items) if number in held_out],
    )


def rows_of(step: int, rows: int, config: OfflineConfig) -> list[int]:
    """Return the rows of one step, a function of seed and step alone, so that a resumed run trains on the same rows.

    Epochs follow each other without a gap, each in a different order.
    """
    first = step * config.batch_size
    positions = range(first, first + config.batch_size)
    orders = {
        epoch: np.random.default_rng([config.seed, 0, epoch]).permutation(rows)
        for epoch in range(positions[0] // rows, positions[-1] // rows + 1)
    }
    return [int(orders[at // rows][at % rows]) for at in positions]


def learner_metrics(metrics: Mapping[str, float], config: OfflineConfig) -> dict[str, float]:
    """Return the learner's metrics of a step without a sampler and without its loss."""
    plain = ("tokens", "loss_tokens", "tokens_per_s")
    hidden = ("loss", "step_s", *plain, *(() if config.learner.kl_coef else ("kl",)))
    return {name: float(metrics[name]) for name in plain} | {
        f"learner/{name}": float(value)
        for name, value in metrics.items()
        if name not in hidden and not name.startswith(_NEEDS_SAMPLER)
    }
