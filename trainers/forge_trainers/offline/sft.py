"""Supervised fine-tuning of one policy: `SFTTrainer.fit`.

In: conversations or episodes. Out: better weights and a run folder. Waits for the learner, each time with a deadline.
"""

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
    """How well the answers of a data set are predicted."""

    loss: float
    """Mean negative log-probability of a token, in natural units."""
    perplexity: float
    """Its exponential."""
    tokens: int
    """Tokens of answers that were measured."""


class SFTTrainer(OfflineTrainer[Demonstration]):
    """Teaches a policy to answer as in given conversations or episodes.

    `forge_trainers.offline.data.Dataset` says which.

    Args:
        policy: The model that learns.
        config: Settings.
        out_dir: The run's folder. Where it holds a run already, training continues from its newest checkpoint.
        mesh: Where the learner runs; None: on this host.
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
        """How well the current weights predict the answers in `dataset`; nothing is learned.

        Args:
            dataset: As in `fit`; `too_long`, `min_reward` and `best_per_group` of the settings hold here, too.
            reward: What episodes are filtered by.
        """
        return self._loop.run(self._evaluate(self._read(dataset, reward).items))

    async def _learn(self, learner: Learner, items: Sequence[Demonstration]) -> dict[str, float]:
        found = await learner.train_step(packed(items), timeout_s=self.config.stage_timeout_s)
        return {"train/loss": float(found["loss"]), **learner_metrics(found, self.config)}

    async def _measure(self, learner: Learner, items: Sequence[Demonstration]) -> dict[str, float]:
        found = await self._predicted(learner, items)
        return {"loss": found.loss, "perplexity": found.perplexity}

    async def _evaluate(self, items: Sequence[Demonstration]) -> SFTEval:
        return await self._predicted(await self._started(items), items)

    async def _predicted(self, learner: Learner, items: Sequence[Demonstration]) -> SFTEval:
        total, tokens = 0.0, 0
        for some in self._batches(items):
            batch = packed(some)
            logprobs_T = await learner.logprobs(batch, timeout_s=self.config.stage_timeout_s)
            total -= float(logprobs_T.double().sum())
            tokens += int(batch["tokens"]["loss_mask"].sum())
        return SFTEval(loss=total / tokens, perplexity=_perplexity(total / tokens), tokens=tokens)


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
