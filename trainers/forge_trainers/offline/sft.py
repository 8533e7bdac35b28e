"""Supervised fine-tuning of one policy: `SFTTrainer.fit`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forge_agents.policy import Policy
from forge_agents.runtime.hosts import Hosts
from forge_agents.settings import named_arguments
from forge_trainers.learner.client import Learner
from forge_trainers.offline.config import SFTConfig
from forge_trainers.offline.data import Dataset, Demonstration, packed, read_demonstrations
from forge_trainers.offline.trainer import OfflineTrainer, learner_metrics

if TYPE_CHECKING:
    from forge_agents.types import Reward


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTEval:
    """Prediction quality on the answers of a data set."""

    loss: float
    """Mean negative log-probability per token, in nats."""
    perplexity: float
    """Exponential of the loss."""
    tokens: int
    """Number of tokens of answers."""


class SFTTrainer(OfflineTrainer[Demonstration]):
    """Trains a policy to answer as in given conversations or episodes, see `forge_trainers.offline.data.Dataset`.

    Args:
        policy: Model to train.
        config: User settings.
        out_dir: Run folder. If it holds a run, training continues from the newest checkpoint.
        mesh: Hosts of the learner. None: this host.
    """

    config: SFTConfig
    method = "sft"
    _gather = staticmethod(read_demonstrations)

    @named_arguments
    def __init__(
        self,
        policy: Policy,
        config: SFTConfig | None = None,
        out_dir: str | os.PathLike[str] = "runs/sft",
        mesh: Hosts | None = None,
    ) -> None:
        super().__init__(policy, config or SFTConfig(), out_dir, mesh)

    def evaluate(self, dataset: Dataset, *, reward: Reward | None = None) -> SFTEval:
        """Measure how well the current weights predict the answers in `dataset`, without training.

        Args:
            dataset: As in `fit`. `too_long`, `min_reward` and `best_per_group` of the settings apply here as well.
            reward: Reward that episodes are filtered by.
        """
        return self._loop.run(self._evaluate(self._read(dataset, reward).items))

    async def _learn(self, learner: Learner, items: Sequence[Demonstration]) -> dict[str, float]:
        metrics = await learner.train_step(packed(items), timeout_s=self.config.stage_timeout_s)
        return {"train/loss": float(metrics["loss"]), **learner_metrics(metrics, self.config)}

    async def _measure(self, learner: Learner, items: Sequence[Demonstration]) -> dict[str, float]:
        result = await self._predict(learner, items)
        return {"loss": result.loss, "perplexity": result.perplexity}

    async def _evaluate(self, items: Sequence[Demonstration]) -> SFTEval:
        return await self._predict(await self._started(items), items)

    async def _predict(self, learner: Learner, items: Sequence[Demonstration]) -> SFTEval:
        total, tokens = 0.0, 0
        for part in self._batches(items):
            batch = packed(part)
            logprobs_T = await learner.logprobs(batch, timeout_s=self.config.stage_timeout_s)
            total -= float(logprobs_T.double().sum())
            tokens += int(batch["tokens"]["loss_mask"].sum())
        return SFTEval(loss=total / tokens, perplexity=_perplexity(total / tokens), tokens=tokens)


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
