"""Supervised fine-tuning of one policy: `SFTTrainer.fit`.

In: conversations or episodes. Out: better weights and a run folder. Waits for the learner, each time with a deadline.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_agents import models
from forge_agents.errors import RunFolderError
from forge_agents.policy import Policy
from forge_agents.rendering import Renderer
from forge_trainers.demonstrations import Dataset, Demonstration, Demonstrations, read_demonstrations
from forge_trainers.display import Display
from forge_trainers.experiment import Checkpoints
from forge_trainers.imitation import SFT_LOSS
from forge_trainers.learner import Learner
from forge_trainers.loop import Interrupt, LoopRunner, Stopwatch
from forge_trainers.run_folder import RunFolder
from forge_trainers.sft_config import SFTConfig
from forge_trainers.trainer import FitResult

if TYPE_CHECKING:
    from forge_trainers.config import RunConfig
    from forge_trainers.judging import Reward

_ABOUT_A_SAMPLER = ("ratio_mean", "clip_fraction", "correction", "corrected_fraction", "logprob_gap")
"""Beginnings of the learner's metrics that mean nothing here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTEval:
    """How well the answers of a data set are predicted."""

    loss: float
    """Mean negative log-probability of a token, in natural units."""
    perplexity: float
    """Its exponential."""
    tokens: int
    """Tokens of answers that were measured."""


class SFTTrainer:
    """Teaches a policy to answer as in given conversations or episodes.

    Args:
        policy: The model that learns.
        config: Settings.
        out_dir: The run's folder. Where it holds a run already, training continues from its newest checkpoint.

    The learner starts with the first call that needs it and stops with `close`, at the end of a ``with`` block or of
    the program.
    """

    def __init__(
        self, policy: Policy, config: SFTConfig | None = None, out_dir: str | os.PathLike[str] = "runs/sft"
    ) -> None:
        if not isinstance(policy, Policy):
            raise TypeError(f"policy must be an fa.Policy, got {type(policy).__name__}; write fa.Policy('model')")
        self.policy, self.config, self.out_dir = policy, config or SFTConfig(), Path(out_dir)
        self._loop = LoopRunner(self._stop)
        self._learner: Learner | None = None
        self._checkpoints = Checkpoints(self.out_dir / "checkpoints", keep=self.config.keep_checkpoints)
        self._next_step = 0

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
            dataset: Conversations or episodes; see `forge_trainers.demonstrations.Dataset`.
            eval_dataset: The same, measured and never learned; None takes ``config.eval_share`` of `dataset`.
            epochs: Times that every conversation is learned, in an order of its own each time. What the last step has
                room for is filled from the next order.
            steps: Optimiser steps; None takes as many as `epochs` needs.
            reward: What episodes are filtered by; None is the environment's own reward, and in a run's folder the
                reward that the run trained on.

        Raises:
            ValueError: Nothing to learn, or a row that is malformed, has no answer or is too long; it is named.
            RunFolderError: `out_dir` holds a run on other data.
            KeyboardInterrupt: Ctrl-C; the step was finished and saved before.
        """
        if epochs < 1 or (steps is not None and steps < 1):
            raise ValueError(f"epochs={epochs}, steps={steps} trains nothing; set at least 1")
        if eval_dataset is not None and self.config.eval_share:
            raise ValueError(
                f"there is an eval_dataset, and eval_share={self.config.eval_share} would hold out more; give one"
            )
        data = self._read(dataset, reward)
        learned, held_out = _split(data.items, self.config)
        if eval_dataset is not None:
            held_out = list(self._read(eval_dataset, reward).items)
        wanted = steps or math.ceil(epochs * len(learned) / self.config.batch_size)
        return self._loop.run(self._fit(data, learned, held_out, wanted))

    def evaluate(self, dataset: Dataset, *, reward: Reward | None = None) -> SFTEval:
        """How well the current weights predict the answers in `dataset`; nothing is learned.

        Args:
            dataset: See `fit`; `too_long`, `min_reward` and `best_per_group` of the settings hold here, too.
            reward: What episodes are filtered by.
        """
        return self._loop.run(self._evaluate(self._read(dataset, reward).items))

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Export the trained weights in Hugging Face format."""
        return self._loop.run(self._export(Path(folder)))

    def close(self) -> None:
        """Stop the learner."""
        self._loop.close()

    def __enter__(self) -> SFTTrainer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self, dataset: Dataset, reward: Reward | None) -> Demonstrations:
        folder = models.resolve(self.policy.model)
        context = json.loads((folder / "config.json").read_text()).get("max_position_embeddings", math.inf)
        room = min(context, self.config.learner.max_tokens_per_microbatch)
        return read_demonstrations(
            dataset, Renderer.of(folder), self.config, policy=self.policy.name, room=room, reward=reward
        )

    async def _fit(
        self, data: Demonstrations, learned: Sequence[Demonstration], held_out: Sequence[Demonstration], steps: int
    ) -> FitResult:
        from forge_trainers.packing import pack

        config = self.config
        run = RunFolder(self.out_dir, self._settings(data, len(held_out)))
        try:
            self._keep_digest(data.digest)
            learner = await self._started()
            first = self._next_step
            run.rewind(first)
            with Display("sft", steps, first) as display, Interrupt(display.say) as interrupt:
                display.say("data: " + ", ".join(f"{number} {why}" for why, number in data.counts.items()))
                for step in range(first, steps):
                    watch = Stopwatch()
                    rows = _rows_of(step, len(learned), config)
                    batch = pack([learned[row].sample() for row in rows])
                    found = await learner.train_step(batch, timeout_s=config.stage_timeout_s)
                    watch.lap("learn")
                    self._next_step = step + 1
                    last = step + 1 == steps
                    metrics = _metrics(found) | {"epoch": (step + 1) * config.batch_size / len(learned)}
                    if held_out and (last or (config.eval_every and (step + 1) % config.eval_every == 0)):
                        measured = await self._evaluate(held_out)
                        metrics |= {"eval/loss": measured.loss, "eval/perplexity": measured.perplexity}
                        watch.lap("eval")
                    metrics |= watch.times
                    run.log(step, metrics)
                    display.step(step, metrics)
                    if (step + 1) % config.checkpoint_every == 0 or last or interrupt.asked:
                        await self._checkpoints.save(step + 1, {self.policy.name: learner})
                    if interrupt.asked:
                        raise KeyboardInterrupt(f"stopped after step {step + 1}; run it again to continue")
            export = await self._export(self.out_dir / "export")
            curve = run.plot("loss", {"train/loss": "learned", "eval/loss": "held out"})
            return FitResult(
                steps=max(first, steps), metrics=run.metrics(), out_dir=self.out_dir, export=export, curve=curve
            )
        finally:
            run.close()

    async def _evaluate(self, items: Sequence[Demonstration]) -> SFTEval:
        from forge_trainers.packing import pack

        learner = await self._started()
        total, tokens = 0.0, 0
        for start in range(0, len(items), self.config.batch_size):
            batch = pack([item.sample() for item in items[start : start + self.config.batch_size]])
            logprobs_T = await learner.logprobs(batch, timeout_s=self.config.stage_timeout_s)
            total -= float(logprobs_T.double().sum())
            tokens += int(batch["tokens"]["loss_mask"].sum())
        return SFTEval(loss=total / tokens, perplexity=_perplexity(total / tokens), tokens=tokens)

    async def _export(self, folder: Path) -> Path:
        if self._learner is None:
            raise RuntimeError("nothing has been trained yet; call fit first")
        await self._learner.export(folder, timeout_s=self.config.stage_timeout_s)
        return folder

    async def _started(self) -> Learner:
        """The running learner; where `out_dir` holds a run, with its weights."""
        if self._learner is None:
            name, config = self.policy.name, self.config
            settings = dataclasses.replace(
                config.learner,
                model=str(models.resolve(self.policy.model)),
                loss=SFT_LOSS,
                correction="none",
                temperature=1.0,
                seed=config.seed,
                dump_folder=str(self.out_dir / "learner" / name),
            )
            learner = await Learner.start(
                settings, name=f"{name}-learner", world_size=config.learner_procs, timeout_s=config.start_timeout_s
            )
            try:
                self._next_step = await self._checkpoints.restore({name: learner})
            except BaseException:
                await learner.stop()
                raise
            self._learner = learner
        return self._learner

    def _keep_digest(self, digest: str) -> None:
        """A run is continued on the data it began with: the order of rows depends on them."""
        file = self.out_dir / "data.sha256"
        if self._checkpoints.any() and file.exists() and file.read_text() != digest:
            raise RunFolderError(
                f"{self.out_dir} holds a run on other data; choose another out_dir, with the export of this one as the "
                "model to go on from"
            )
        file.write_text(digest)

    def _settings(self, data: Demonstrations, held_out: int) -> dict[str, Any]:
        return {
            "policy": dataclasses.asdict(self.policy),
            "data": {**data.counts, "held out": held_out},
            "trainer": dataclasses.asdict(self.config),
        }

    async def _stop(self) -> None:
        if self._learner is not None:
            learner, self._learner = self._learner, None
            await learner.stop()


def warm_started(run: RunConfig) -> RunConfig:
    """Fine-tune the policies that `run` wants warm, each in a folder of its own below ``out_dir/warm-start``.

    A folder whose export is there is used as it is.

    Returns:
        `run` with those policies on the models that came out.
    """
    warm = dict(run.policies)
    for name, plan in run.warm_start.items():
        folder = Path(run.out_dir) / "warm-start" / name
        export = folder / "export"
        if not export.exists():  # it appears when complete
            with SFTTrainer(warm[name], plan.trainer, folder) as trainer:
                trainer.fit(plan.data, eval_dataset=plan.eval_data, epochs=plan.epochs, steps=plan.steps)
        warm[name] = dataclasses.replace(warm[name], model=str(export.absolute()))
    return dataclasses.replace(run, policies=warm)


def _split(items: Sequence[Demonstration], config: SFTConfig) -> tuple[list[Demonstration], list[Demonstration]]:
    """What is learned and what is held out, chosen by the seed."""
    count = round(config.eval_share * len(items))
    if config.eval_share and not 0 < count < len(items):
        raise ValueError(
            f"eval_share={config.eval_share} of {len(items)} conversations is {count}; both parts need at least 1"
        )
    held_out = set(np.random.default_rng([config.seed, 1]).permutation(len(items))[:count].tolist())
    return (
        [item for number, item in enumerate(items) if number not in held_out],
        [item for number, item in enumerate(items) if number in held_out],
    )


def _rows_of(step: int, rows: int, config: SFTConfig) -> list[int]:
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


def _metrics(found: Mapping[str, float]) -> dict[str, float]:
    plain = ("loss", "tokens", "loss_tokens", "tokens_per_s", "step_s")
    return {
        "train/loss": found["loss"],
        **{name: found[name] for name in ("tokens", "loss_tokens", "tokens_per_s")},
        **{
            f"learner/{name}": float(value)
            for name, value in found.items()
            if name not in plain and not name.startswith(_ABOUT_A_SAMPLER)
        },
    }


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
