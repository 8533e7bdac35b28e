"""One step of learning: every policy learns from its lessons, and guards watch.

In: lessons and learners. Out: metrics; where a guard stops the run, the batch in a file. Waits for the learners, with a
deadline.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_agents.errors import DivergedError, ForgeError, MismatchError
from forge_agents.runtime.waits import all_or_first_error
from forge_agents.types import EpisodeBatch
from forge_trainers.records.run_folder import dump_batch
from forge_trainers.rl.config import GRPOConfig
from forge_trainers.rl.rewards import Lessons

if TYPE_CHECKING:
    from forge_trainers.learner.client import Learner


async def learn(
    lessons: Lessons, learners: Mapping[str, Learner], config: GRPOConfig, *, step: int, folder: Path
) -> dict[str, float]:
    """One optimiser step of every policy that has something to learn.

    Args:
        lessons: What there is to learn.
        learners: By policy name.
        config: How long to wait, and what guards allow.
        step: Number of the step, for errors and files.
        folder: Where a batch goes that a guard stops at.

    Returns:
        Metrics: ``groups/...``, ``dropped/...``, ``staleness/...`` and each learner's.

    Raises:
        DivergedError: A loss or gradient, or too many of the sampler's log-probabilities, are not finite.
        MismatchError: Sampler and learner differ too much.
    """
    from forge_trainers.batch.packing import pack

    for name, share in lessons.bad_logprobs.items():
        check_bad_logprobs(name, share, config.max_bad_logprobs)
    batches = {name: pack(samples) for name, samples in lessons.samples.items()}
    ages = {name: staleness(batch, learners[name].version) for name, batch in batches.items()}
    metrics = {**_fates(lessons), **_histogram(ages, config.max_staleness)}
    results = await all_or_first_error(
        _learn_one(learners[name], name, batch, config, step=step, folder=folder) for name, batch in batches.items()
    )
    for name, result in zip(batches, results, strict=True):
        if max(ages[name]) == 0:  # older samples differ by what was learned since
            try:
                check_gap(name, result["logprob_gap_mean"], config.max_logprob_gap)
            except MismatchError as error:
                raise _with_batch(error, name, batches[name], config, step=step, folder=folder) from None
        prefix = "learner" if len(learners) == 1 else f"learner/{name}"
        metrics |= {f"{prefix}/{key}": float(value) for key, value in result.items()}
        if name in lessons.shares:
            metrics[f"{prefix}/denominator_share"] = lessons.shares[name]
    return metrics


def check_gap(name: str, gap: float, limit: float) -> None:
    """Raise MismatchError where the mean |logprob difference| of sampler and learner is above `limit` or no number."""
    if not gap <= limit:
        raise MismatchError(
            f"sampler and learner of {name} differ by {gap:.3g} per token on average, more than max_logprob_gap="
            f"{limit}; check that the engine serves this model with these weights and that temperature and dtype agree"
        )


def check_bad_logprobs(name: str, share: float, limit: float) -> None:
    """Raise DivergedError where more than `limit` of the sampled tokens have no log-probability."""
    if share > limit:
        raise DivergedError(
            f"the sampler of {name} gave no log-probability (NaN, infinite or positive) for {share:.2%} of a step's "
            f"tokens, more than max_bad_logprobs={limit:.2%}; its weights or its numbers overflow: look at "
            "learner/grad_norm of the steps before, lower lr, or set engine.dtype='float32'"
        )


def staleness(batch: EpisodeBatch, version: int) -> dict[int, int]:
    """Loss tokens by how many versions they are older than the learner's `version`.

    Raises:
        ValueError: A token is newer than the learner, or nobody said which weights sampled it.
    """
    tokens = batch["tokens"]
    versions, counts = np.unique(tokens["versions"][tokens["loss_mask"]].numpy(), return_counts=True)
    if versions[0] < 0 or versions[-1] > version:
        raise ValueError(
            f"tokens of weight versions {versions[0]} to {versions[-1]} reached a learner at version {version}; engine "
            "and learner count differently"
        )
    return {version - int(sampled): int(count) for sampled, count in zip(versions, counts, strict=True)}


async def _learn_one(
    learner: Learner, name: str, batch: EpisodeBatch, config: GRPOConfig, *, step: int, folder: Path
) -> dict[str, float]:
    try:
        return await learner.train_step(batch, timeout_s=config.stage_timeout_s)
    except FloatingPointError as cause:
        error = DivergedError(f"policy {name}: {cause}")
        raise _with_batch(error, name, batch, config, step=step, folder=folder) from cause


def _with_batch(
    error: ForgeError, name: str, batch: EpisodeBatch, config: GRPOConfig, *, step: int, folder: Path
) -> ForgeError:
    """The same error, which also says where the batch is and how to go on."""
    file = folder / "failed-batches" / f"step-{step:06d}-{name}.safetensors"
    facts: dict[str, Any] = {"step": step, "policy": name, "error": str(error), "learner": asdict(config.learner)}
    try:
        where = f"The batch is in {dump_batch(batch, file, json.loads(json.dumps(facts, default=str)))}"
    except OSError as cause:
        where = f"The batch could not be written to {file} ({cause})"
    return type(error)(f"{error}. {where}; the checkpoints are as they were, and the next run goes on from the newest")


def _fates(lessons: Lessons) -> dict[str, float]:
    counts = lessons.counts
    judged = counts["used"] + counts["flat"]
    return {
        **{f"groups/{fate}": float(count) for fate, count in counts.items()},
        "groups/flat_share": counts["flat"] / judged if judged else float("nan"),
        "dropped/too_long": float(lessons.too_long),
        "dropped/bad_logprobs": max(lessons.bad_logprobs.values(), default=0.0),
    }


def _histogram(ages: Mapping[str, Mapping[int, int]], bound: int) -> dict[str, float]:
    """Loss tokens of all policies by age, and the age of the oldest.

    Raises:
        AssertionError: One is older than the loop allows.
    """
    for name, own in ages.items():
        if max(own) > bound:
            raise AssertionError(f"a sample of {name} is {max(own)} versions old; the loop allows {bound}")
    counts = {age: sum(own.get(age, 0) for own in ages.values()) for age in range(bound + 1)}
    return {
        "staleness/max": float(max((age for own in ages.values() for age in own), default=0)),
        **{f"staleness/{age}": float(count) for age, count in counts.items()},
    }
