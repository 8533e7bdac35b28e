"""An optimizer step of every learner, and the checks that skip a bad batch or end the run."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_agents.errors import DivergedError, MismatchError
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.types import EpisodeBatch
from forge_trainers.records.run_folder import dump_batch
from forge_trainers.rl.config import GRPOConfig
from forge_trainers.rl.samples import prefix

if TYPE_CHECKING:
    from forge_trainers.learner.client import Learner

_log = logging.getLogger(__name__)
_MAX_SKIPPED_STEPS = 1
"""Maximum number of consecutive steps in which a policy skips its batch, or minibatches of it."""


async def train(
    batches: Mapping[str, EpisodeBatch],
    learners: Mapping[str, Learner],
    config: GRPOConfig,
    *,
    step: int,
    folder: Path,
    temperatures: Mapping[str, float] | None = None,
    skipped: Counter[str] | None = None,
) -> dict[str, float]:
    """Train every policy on its batch. Batches and minibatches with a non-finite loss or gradient are skipped.

    Args:
        batches: By policy.
        learners: By policy.
        config: Timeouts, and the limits of the checks.
        step: Number of the step, from 1, for errors and files.
        folder: The run's folder. Failed batches are saved to ``failed-batches`` inside.
        temperatures: Sampling temperature by policy. Default: the temperatures of the learners' settings.
        skipped: Number of consecutive earlier steps in which each policy skipped something, updated in place.

    Returns:
        Metrics: ``staleness/max``, ``staleness/AGE``, and those of each learner.

    Raises:
        DivergedError: The loss or gradient is not finite in two consecutive steps.
        MismatchError: The log-probabilities of sampler and learner differ too much.
        ValueError, AssertionError: A sample is newer than its learner, or older than `max_staleness`.
    """
    skipped = Counter() if skipped is None else skipped
    ages = {name: staleness(batch, learners[name].version) for name, batch in batches.items()}
    metrics = _staleness_metrics(ages, config.max_staleness)

    def saved(name: str, error: Exception) -> str:
        return _save_batch(batches[name], error, {"step": step, "policy": name}, learners[name], folder)

    async def train_policy(name: str) -> dict[str, float]:
        cause: FloatingPointError | None = None
        try:
            result = await learners[name].train_step(
                batches[name], temperature=(temperatures or {}).get(name), timeout_s=config.stage_timeout_s
            )
        except FloatingPointError as error:
            cause, result = error, {}
        skipped[name] = skipped[name] + 1 if cause is not None or result.get("skipped_minibatches") else 0
        if skipped[name]:
            subject, reason = _skipped_part(result, cause, step)
            message = saved(name, DivergedError(f"policy {name}: {reason}"))
            if skipped[name] > _MAX_SKIPPED_STEPS:
                raise DivergedError(
                    f"{message}. The checkpoints are unchanged, and the next run continues from the newest"
                ) from cause
            _log.warning("%s skipped, and another such step ends the run: %s", subject, message)
        return {**result, "skipped": float(cause is not None)}

    results = await all_or_first_error(map(train_policy, batches))
    for name, result in zip(batches, results, strict=True):
        if max(ages[name]) == 0 and not result["skipped"]:  # older samples differ because of training in between
            try:
                check_gap(name, result["logprob_gap_mean"], config.max_logprob_gap)
            except MismatchError as error:
                raise MismatchError(
                    f"{saved(name, error)}. The checkpoints are unchanged, and the next run continues from the newest"
                ) from None
        metrics |= {f"{prefix(name, learners)}/{key}": float(value) for key, value in result.items()}
    return metrics


def _skipped_part(result: Mapping[str, Any], cause: FloatingPointError | None, step: int) -> tuple[str, str]:
    """Return the skipped part of a step, and the reason."""
    if cause is not None:
        return f"step {step} is", str(cause)
    count = int(result["skipped_minibatches"])
    part = f"{count} of {count + int(result['optimizer_steps'])} minibatches"
    return f"{part} of step {step} are", f"loss or gradient is not finite in {part}. Lower lr or max_grad_norm"


def staleness(batch: EpisodeBatch, version: int) -> dict[int, int]:
    """Count the loss tokens of a batch by policy lag: the learner's `version` minus the version that sampled them.

    Raises ValueError if a token is newer than the learner, or its version is unknown.
    """
    tokens = batch["tokens"]
    versions, counts = np.unique(tokens["versions"][tokens["loss_mask"]].numpy(), return_counts=True)
    if versions[0] < 0 or versions[-1] > version:
        raise ValueError(
            f"tokens of weight versions {versions[0]} to {versions[-1]} reached a learner at version {version}. Engine "
            "and learner count differently"
        )
    return {version - int(sampled): int(count) for sampled, count in zip(versions, counts, strict=True)}


def _staleness_metrics(ages: Mapping[str, Mapping[int, int]], max_staleness: int) -> dict[str, float]:
    """Return ``staleness/max`` and ``staleness/AGE``. Raises AssertionError if a sample exceeds the maximum lag."""
    for name, counts in ages.items():
        if max(counts) > max_staleness:
            raise AssertionError(f"a sample of {name} is {max(counts)} versions old. The loop allows {max_staleness}")
    metrics = {"staleness/max": float(max((age for counts in ages.values() for age in counts), default=0))}
    for age in range(max_staleness + 1):
        metrics[f"staleness/{age}"] = float(sum(counts.get(age, 0) for counts in ages.values()))
    return metrics


def check_gap(name: str, gap: float, limit: float) -> None:
    """Raise MismatchError if the mean difference of the log-probabilities of sampler and learner exceeds `limit`."""
    if not gap <= limit:
        raise MismatchError(
            f"sampler and learner of {name} differ by {gap:.3g} per token on average, more than max_logprob_gap="
            f"{limit}. Check that the engine serves this model with these weights and that temperature and dtype agree"
        )


def _save_batch(batch: EpisodeBatch, error: Exception, facts: dict[str, Any], learner: Learner, folder: Path) -> str:
    """Write a failed batch to a file. Returns the error message with the path."""
    file = folder / "failed-batches" / f"step-{facts['step']:06d}-{facts['policy']}.safetensors"
    facts = {**facts, "error": str(error), "learner": asdict(learner.config)}
    try:
        dump_batch(batch, file, json.loads(json.dumps(facts, default=str)))
    except OSError as cause:
        return f"{error}. The batch could not be written to {file} ({cause})"
    return f"{error}. The batch is in {file}"
