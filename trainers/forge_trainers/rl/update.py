"""What a step learns: credit, pack, train.

In: judged groups, the credit rule, learners. Out: samples by policy, their batches, metrics; where a guard stops the
run, the batch in a file. Waits for the learners, with a deadline.
"""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from forge_agents.errors import DivergedError, ForgeError, MismatchError
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.types import EpisodeBatch, Trajectory
from forge_trainers.records.run_folder import dump_batch
from forge_trainers.rl.config import GRPOConfig
from forge_trainers.rl.credit import Baselines, Credit, Scored
from forge_trainers.rl.rewards import JudgedGroup

if TYPE_CHECKING:
    from forge_trainers.batch.packing import Sample
    from forge_trainers.learner.client import Learner
    from forge_trainers.learner.config import LearnerConfig

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """What a step learns from, and what became of the rest."""

    samples: Mapping[str, Sequence[Sample]]
    """Training samples by policy name; policies without any are absent."""
    counts: Mapping[str, int]
    """Groups by fate: ``used``, ``failed`` (an episode kept failing), ``abstained`` (rewards were NaN, so that no
    trained agent had rewards to compare), ``too_long`` (no sample that teaches something fits the learner), ``flat``
    (no trained trajectory differed from those it is compared with by more than the noise)."""
    advantages: Mapping[tuple[int, int], Mapping[str, Sequence[float]]]
    """By group and sibling, then by agent: one number per turn. Trajectories that teach nothing are absent."""
    abstained: int = 0
    """Trained trajectories without a reward: it was NaN, of every part where there are several."""
    too_long: int = 0
    """Samples that were dropped because the learner has no room for them. Their rewards count in their siblings'
    baselines all the same, as in DAPO's overlong filtering (arXiv 2503.14476, section 3.4)."""
    bad_logprobs: Mapping[str, float] = field(default_factory=dict)
    """By policy: share of the sampled tokens that are masked because their log-probability is none."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """By policy: share of the loss normalization that `samples` make up; their advantages are multiplied with it."""

    def metrics(self, learners: Collection[str]) -> dict[str, float]:
        """``groups/FATE``, ``dropped/...`` and each learner's ``normalization_fraction``."""
        judged = self.counts["used"] + self.counts["zero_variance"]
        return {
            **{f"groups/{fate}": float(count) for fate, count in self.counts.items()},
            "groups/zero_variance_fraction": self.counts["zero_variance"] / judged if judged else float("nan"),
            "dropped/abstained": float(self.abstained),
            "dropped/too_long": float(self.too_long),
            "dropped/bad_logprobs": max(self.bad_logprobs.values(), default=0.0),
            **{f"{_prefix(name, learners)}/normalization_fraction": share for name, share in self.shares.items()},
        }


def credit_groups(
    judged: Sequence[JudgedGroup],
    credit: Credit,
    trainable: Collection[str],
    baselines: Baselines | None = None,
    *,
    room: Mapping[str, int] | None = None,
    size_of: Callable[[Trajectory], int] | None = None,
) -> StepSamples:
    """Turn rewards into advantages and cut trajectories into samples.

    A group with a failed episode is dropped whole: the episodes that remain would be compared against a biased
    baseline. A reward that abstained (NaN) leaves out its own trajectory only, and one part of several only itself. The
    other trajectories of the group, and the other parts, are compared without it.

    Args:
        judged: All groups of the step.
        credit: Who is compared with whom.
        trainable: Policies that learn.
        baselines: Running means that `credit` may keep, brought up to date.
        room: Tokens of the longest sample that each policy's learner takes; a policy that is absent has no limit.
        size_of: What a trajectory adds to the loss normalization, where those that teach nothing count, too. A
            learner divides by what it gets, so samples are made smaller instead. None: only what teaches counts.

    Raises:
        TypeError: `trainable` is one text, and not several names.
    """
    from forge_trainers.batch.packing import samples_from

    _check_names(judged, trainable)
    counts: Counter[str] = Counter(used=0, failed=0, abstained=0, too_long=0, zero_variance=0)
    rows, columns, silent = _rows_of(judged, trainable)
    assigned: list[tuple[float, dict[int, np.ndarray]]] = []  # weight, and the advantages of rows, of each part
    for weight, scored in columns.values():
        found = credit.assign([*scored.values()], baselines)
        assigned.append((weight, {at: own for at, own in zip(scored, found, strict=True) if own is not None}))
    samples: dict[str, list[Sample]] = {}
    sampled: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    sizes: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}  # of what teaches, and of what does not
    used: set[int] = set()
    overlong: list[int] = []
    learned: dict[tuple[int, int], dict[str, Sequence[float]]] = {}
    for at, (number, sibling, trajectory) in enumerate(rows):
        # GDPO (arXiv 2601.05242): each reward is compared with its own kind, and the advantages are added.
        known = [weight * part[at] for weight, part in assigned if at in part]
        advantages = np.sum(known, axis=0).tolist() if known else []
        cut = samples_from(trajectory, advantages, group=number, number=at) if known else []
        limit = (room or {}).get(trajectory.policy, math.inf)
        overlong += [number for sample in cut if len(sample.token_ids) > limit]
        bad[trajectory.policy] += sum(sample.bad_logprobs for sample in cut)
        sampled[trajectory.policy] += sum(int(sample.loss_mask.sum()) + sample.bad_logprobs for sample in cut)
        if kept := [sample for sample in cut if len(sample.token_ids) <= limit and sample.loss_mask.any()]:
            samples.setdefault(trajectory.policy, []).extend(kept)
            learned.setdefault((number, sibling), {})[trajectory.agent] = advantages
            used.add(number)
        if size_of is not None and (kept or not known):  # what is dropped for its length counts nowhere
            sizes[bool(known)][trajectory.policy] += size_of(trajectory)
    # A mean over all that was sampled is the learner's mean over what teaches, times the share of the latter.
    shares = {name: taught / (taught + sizes[False][name]) for name, taught in sizes[True].items() if taught}
    failed = {number for number, item in enumerate(judged) if item.group.failed}
    lost = {*overlong} - used
    unheard = silent.groups - failed - used - lost
    flat = len(judged) - len(failed) - len(used) - len(lost) - len(unheard)
    counts.update(used=len(used), failed=len(failed), abstained=len(unheard), too_long=len(lost), zero_variance=flat)
    for name, share in shares.items():
        if share < 1.0:
            samples[name] = [replace(sample, advantage=share * sample.advantages) for sample in samples[name]]
    return StepSamples(
        samples=samples,
        counts=dict(counts),
        advantages=learned,
        abstained=silent.trajectories,
        too_long=len(overlong),
        bad_logprobs={name: bad[name] / number for name, number in sampled.items() if number},
        shares=shares,
    )


@dataclass(frozen=True, slots=True)
class _Silent:
    """What abstentions cost."""

    groups: frozenset[int]
    """Groups in which no agent, and no part of the reward, has two rewards to compare because some are NaN."""
    trajectories: int
    """Trained trajectories without any reward."""


_Rows: TypeAlias = list[tuple[int, int, Trajectory]]
"""Group, sibling, trajectory."""
_Columns: TypeAlias = dict[str, tuple[float, dict[int, Scored]]]
"""By part of the reward, its weight and what rows earned; "" where the reward has no parts."""


def _rows_of(judged: Sequence[JudgedGroup], trainable: Collection[str]) -> tuple[_Rows, _Columns, _Silent]:
    """The trained trajectories that have a reward, and what each part of it says of them."""
    rows: _Rows = []
    columns: _Columns = {}
    unheard, num_silent = set(), 0
    for number, item in enumerate(judged):
        if item.group.failed:
            continue
        parts = item.parts or {"": (1.0, item)}
        abstained, comparable = False, False
        for agent in item.rewards_of(trainable):
            present = [agent in episode.trajectories for episode in item.group.episodes]
            known = {name: ~np.isnan(part.rewards[agent]) & present for name, (_, part) in parts.items()}
            some = np.any([*known.values()], axis=0)
            num_silent += int((present & ~some).sum())
            abstained |= any(not heard.all() for heard in known.values())
            comparable |= any(heard.sum() > 1 for heard in known.values())
            for at in np.flatnonzero(some).tolist():
                for name, (weight, part) in parts.items():
                    if known[name][at]:
                        _, scored = columns.setdefault(name, (weight, {}))
                        scored[len(rows)] = _scored(part, agent, at, number, name)
                rows.append((number, at, item.group.episodes[at].trajectories[agent]))
        if abstained and not comparable:
            unheard.add(number)
    return rows, columns, _Silent(frozenset(unheard), num_silent)


def _check_names(judged: Sequence[JudgedGroup], trainable: Collection[str]) -> None:
    if isinstance(trainable, str):
        raise TypeError(f"trainable={trainable!r} is one text; give a collection of names, {{{trainable!r}}}")
    playing = {trajectory.policy for item in judged for trajectory in item.group.trajectories}
    if playing and playing.isdisjoint(trainable):
        _log.warning(
            "none of the policies that learn (%s) plays in these %d groups, only %s; all of them count as flat",
            ", ".join(sorted(trainable)),
            len(judged),
            ", ".join(sorted(playing)),
        )


def _scored(item: JudgedGroup, agent: str, at: int, number: int, part: str) -> Scored:
    """What an agent earned in one episode of a group, of one part of the reward."""
    turns = item.group.episodes[at].trajectories[agent].turns
    return Scored(
        seed=number,
        role="/".join(filter(None, (item.group.env_id, agent, part))),
        reward=float(item.rewards[agent][at]),
        response_tokens=[len(turn.response_ids) for turn in turns],
        turns=None if item.turns is None else item.turns[agent][at],
        noise=None if item.noise is None else float(item.noise[agent][at]),
    )


def pack_samples(samples: StepSamples, *, max_bad_logprobs: float) -> dict[str, EpisodeBatch]:
    """A batch for each policy that has something to learn.

    Raises:
        DivergedError: Of more than a share of `max_bad_logprobs` of a policy's tokens the sampler gave no probability.
    """
    for name, share in samples.bad_logprobs.items():
        if share > max_bad_logprobs:
            raise DivergedError(
                f"the sampler of {name} gave no log-probability (NaN, infinite or positive) for {share:.2%} of a "
                f"step's tokens, more than max_bad_logprobs={max_bad_logprobs:.2%}; its weights or its numbers "
                "overflow: look at learner/grad_norm of the steps before, lower lr, or set engine.dtype='float32'"
            )
    from forge_trainers.batch.packing import pack

    return {name: pack(own) for name, own in samples.samples.items()}


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
    """Train every policy that has a batch on it. A batch, or a minibatch, whose loss is not finite is skipped.

    Args:
        batches: By policy name.
        learners: By policy name.
        config: How long to wait, and what guards allow.
        step: Number of the step, from 1, for errors and files.
        folder: Where a batch goes that a guard stops at.
        temperatures: At which they were sampled, by policy name; those of the learners' settings where absent.
        skipped: Number of consecutive steps before this one in which each policy skipped something; updated in place.

    Returns:
        Metrics: ``staleness/...`` and each learner's.

    Raises:
        DivergedError: A loss or gradient is not finite in more than `max_skipped_steps` consecutive steps.
        MismatchError: Sampler and learner differ too much.
        ValueError, AssertionError: A sample is newer than its learner, or older than the loop allows.
    """
    ages = {name: staleness(batch, learners[name].version) for name, batch in batches.items()}
    metrics = _staleness_metrics(ages, config.max_staleness)
    guards = _Guards(batches, learners, config, step=step, folder=folder)
    guards.skipped = Counter() if skipped is None else skipped

    async def one(name: str) -> dict[str, float]:
        try:
            result = await learners[name].train_step(
                batches[name], temperature=(temperatures or {}).get(name), timeout_s=config.stage_timeout_s
            )
        except FloatingPointError as cause:
            guards.skip(name, f"step {step} is", str(cause), cause)
            return {"skipped": 1.0}
        if count := int(result.get("skipped_minibatches", 0)):
            whole = count + int(result["optimizer_steps"])
            why = f"loss or gradient is not finite in {count} of {whole} minibatches; lower lr or max_grad_norm"
            guards.skip(name, f"{count} of {whole} minibatches of step {step} are", why)
        else:
            guards.skipped[name] = 0
        return {**result, "skipped": 0.0}

    results = await all_or_first_error(map(one, batches))
    for name, result in zip(batches, results, strict=True):
        if max(ages[name]) == 0 and not result["skipped"]:  # older samples differ by what was learned since
            try:
                check_gap(name, result["logprob_gap_mean"], config.max_logprob_gap)
            except MismatchError as error:
                raise guards.ending(error, name) from None
        metrics |= {f"{_prefix(name, learners)}/{key}": float(value) for key, value in result.items()}
    return metrics


def _staleness_metrics(ages: Mapping[str, Mapping[int, int]], most: int) -> dict[str, float]:
    """``staleness/max`` and ``staleness/AGE``. Raises AssertionError where a sample is older than `most` versions."""
    for name, own in ages.items():
        if max(own) > most:
            raise AssertionError(f"a sample of {name} is {max(own)} versions old; the loop allows {most}")
    metrics = {"staleness/max": float(max((age for own in ages.values() for age in own), default=0))}
    for age in range(most + 1):
        metrics[f"staleness/{age}"] = float(sum(own.get(age, 0) for own in ages.values()))
    return metrics


class _Guards:
    """Decides whether a step that fails is skipped or ends the run, and saves its batch in both cases."""

    skipped: Counter[str]

    def __init__(
        self,
        batches: Mapping[str, EpisodeBatch],
        learners: Mapping[str, Learner],
        config: GRPOConfig,
        *,
        step: int,
        folder: Path,
    ) -> None:
        self._batches, self._learners, self._config = batches, learners, config
        self._step, self._folder = step, folder

    def skip(self, name: str, what: str, why: str, cause: FloatingPointError | None = None) -> None:
        """Count what was skipped with a warning. Raises DivergedError after `max_skipped_steps` steps in a row."""
        self.skipped[name] += 1
        error, most = DivergedError(f"policy {name}: {why}"), self._config.max_skipped_steps
        if self.skipped[name] > most:
            raise self.ending(error, name) from cause
        _log.warning("%s skipped, and max_skipped_steps=%d: %s", what, most, self._kept(error, name))

    def ending(self, error: DivergedError | MismatchError, name: str) -> DivergedError | MismatchError:
        """`error`, with where the batch is and how the run goes on."""
        said = self._kept(error, name)
        return type(error)(f"{said}; the checkpoints are as they were, and the next run goes on from the newest")

    def _kept(self, error: ForgeError, name: str) -> str:
        learner = self._learners[name].config
        return f"{error}. {_keep(error, name, self._batches[name], learner, step=self._step, folder=self._folder)}"


def _prefix(name: str, learners: Collection[str]) -> str:
    return "learner" if len(learners) == 1 else f"learner/{name}"


def check_gap(name: str, gap: float, limit: float) -> None:
    """Raise MismatchError where the mean |logprob difference| of sampler and learner is above `limit` or no number."""
    if not gap <= limit:
        raise MismatchError(
            f"sampler and learner of {name} differ by {gap:.3g} per token on average, more than max_logprob_gap="
            f"{limit}; check that the engine serves this model with these weights and that temperature and dtype agree"
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


def _keep(
    error: ForgeError, name: str, batch: EpisodeBatch, learner: LearnerConfig, *, step: int, folder: Path
) -> str:
    """Write the batch that `error` is about, and say where it is."""
    file = folder / "failed-batches" / f"step-{step:06d}-{name}.safetensors"
    facts: dict[str, Any] = {"step": step, "policy": name, "error": str(error), "learner": asdict(learner)}
    try:
        return f"The batch is in {dump_batch(batch, file, json.loads(json.dumps(facts, default=str)))}"
    except OSError as cause:
        return f"The batch could not be written to {file} ({cause})"
