"""Supervised fine-tuning of one policy: `SFTTrainer.fit`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_agents.bench.fingerprints import with_content
from forge_agents.display import visible
from forge_agents.errors import RunFolderError
from forge_agents.files import check_plain_files
from forge_agents.http_body import bounded_json
from forge_agents.policy import Policy
from forge_agents.runtime.hosts import Hosts
from forge_agents.settings import named_arguments
from forge_trainers.learner.client import Learner
from forge_trainers.offline.config import SFTConfig, WarmStart
from forge_trainers.offline.data import Dataset, Demonstration, packed, read_demonstrations
from forge_trainers.offline.trainer import OfflineTrainer, learner_metrics
from forge_trainers.records.run_folder import hashes_of_models, write_atomically
from forge_trainers.records.trackers import leaves

if TYPE_CHECKING:
    from forge_agents.types import Reward

_WARM_START = "warm-start.json"
"""File with the settings of a finished warm start."""
_DECIDES = (
    "batch_size",
    "learner",
    "too_long",
    "max_sample_tokens",
    "eval_share",
    "seed",
    "min_reward",
    "best_per_group",
)
"""Settings of `SFTConfig` on which the weights depend."""


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


def _warm_start_settings(name: str, policy: Policy, plan: WarmStart, agents: Sequence[str]) -> dict[str, Any]:
    """Return the settings on which the weights of a warm start depend, by dotted key."""
    data = with_content(plan.data)
    settings = asdict(plan) | {"data": data[-1] if isinstance(data, list) else data, "agents": agents}
    del settings["eval_data"]
    settings["trainer"] = {key: value for key, value in settings["trainer"].items() if key in _DECIDES}
    model = hashes_of_models({name: policy}).get(name, policy.model)
    lora = None if policy.lora is None else asdict(policy.lora)
    chosen = {"model": model, "lora": lora, "thinking": policy.thinking, "keep_reasoning": policy.keep_reasoning}
    chosen |= {"context": "newest"} if policy.context == "newest" else {}  # the other values do not affect the data
    facts = {"warm_start": {name: settings}, "policies": {name: chosen}}
    return json.loads(json.dumps(dict(leaves(facts)), default=str))  # type: ignore[no-any-return]


def keep_warm_start(folder: Path, name: str, policy: Policy, plan: WarmStart, agents: Sequence[str]) -> None:
    """Record the settings of a finished warm start in its folder."""
    settings = _warm_start_settings(name, policy, plan, agents)
    write_atomically(folder / _WARM_START, json.dumps(settings, indent=2) + "\n")


def check_warm_start(folder: Path, name: str, policy: Policy, plan: WarmStart, agents: Sequence[str]) -> None:
    """Raise RunFolderError if the finished warm start in `folder` has other settings. Older ones have no record."""
    check_plain_files(folder)
    try:
        before = bounded_json((folder / _WARM_START).read_bytes())
    except (OSError, ValueError, RecursionError):
        return
    now = _warm_start_settings(name, policy, plan, agents)
    before = before if isinstance(before, dict) else {}
    if key := next((key for key in {**now, **before} if before.get(key) != now.get(key)), ""):
        raise RunFolderError(
            visible(
                f"{key:.200} was {before.get(key)!s:.80} in the warm start in {folder} and is {now.get(key)!s:.80} in "
                "this call. The warm start is done, so the change has no effect: set it back, or choose another out_dir"
            )
        )
