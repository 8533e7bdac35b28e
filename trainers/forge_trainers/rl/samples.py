"""From scored groups to the learners' batches: advantages of every turn, then token-exact training samples."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from forge_agents.errors import DivergedError
from forge_agents.types import EpisodeBatch, EpisodeGroup, Trajectory, total_tokens
from forge_trainers.rl.counterfactual import check_collected, scored_alternatives
from forge_trainers.rl.credit import Baselines, Credit, Scored

if TYPE_CHECKING:
    from forge_trainers.batch.packing import Sample

_log = logging.getLogger(__name__)

_MAX_BALANCE = 10.0
"""Largest factor of ``Credit(balance_roles=True)``. Its inverse is the smallest."""
MAX_BAD_LOGPROBS = 0.01
"""Maximum fraction of a policy's sampled tokens in a step with a NaN, infinite or positive log-probability."""


def compute_advantages(
    groups: Sequence[EpisodeGroup], credit: Credit, trained: Collection[str], baselines: Baselines | None = None
) -> list[EpisodeGroup]:
    """Compute the advantages of every turn of the trained policies.

    GRPO (arXiv 2402.03300): ``A_i = (r_i - mean(r)) / std(r)`` over the episodes of a group, per agent. Sessions with
    rewards of their own are compared with all sessions of the agent in the group's episodes. A group with a
    failed episode has no advantages: the remaining episodes would be compared with a biased baseline. If a reward
    abstained (NaN), only its trajectory is left out, and of a `MultiReward` only that part.

    Groups that have advantages keep them if `credit` compares trajectories within groups only. Other rules depend on
    all groups of the step, so everything is computed from `groups` as they are.

    Args:
        groups: Scored groups.
        credit: Baseline and scale.
        trained: Policies that learn.
        baselines: Running means for ``Credit(baseline="rae")``, updated in place.

    Returns:
        The groups in order, with `advantages`.

    Raises:
        ArgumentError: `credit` needs alternatives, and the groups have none, or sessions with rewards of their own.
    """
    if credit.is_per_group and len(groups) != 1:
        return [g for group in groups for g in compute_advantages([group], credit, trained, baselines)]
    if credit.is_per_group and groups[0].advantages is not None:
        return [*groups]
    if credit.baseline == "counterfactual":
        check_collected(groups)
    totals: dict[tuple[int, str, int], np.ndarray] = {}
    for weight, rows, scored in _scored_parts(groups, trained):
        for row, advantages in zip(rows, credit.assign(scored, baselines), strict=True):
            if advantages is not None:
                all_turns = groups[row.group].episodes[row.episode].trajectories[row.agent].turns
                key = row.group, row.agent, row.episode
                total = totals.setdefault(key, np.zeros(len(all_turns), np.float32))
                # GDPO (arXiv 2601.05242): each reward is compared separately, and the advantages are added.
                total[list(row.turns)] += weight * advantages
    if credit.balance_roles:
        _balance_roles(groups, totals)
    return [
        replace(
            group,
            advantages={
                agent: [totals.get((number, agent, index)) for index in range(len(group.episodes))]
                for agent in group.rewards
            },
        )
        for number, group in enumerate(groups)
    ]


def _balance_roles(groups: Sequence[EpisodeGroup], totals: Mapping[tuple[int, str, int], np.ndarray]) -> None:
    """Scale advantages in place, so that all roles of a policy in an environment have the same mass.

    `totals` has the advantages by group, agent and episode. See `Credit.balance_roles`.
    """
    masses: dict[tuple[str, str], dict[str, float]] = {}  # by environment and policy, then by agent
    roles: dict[tuple[int, str, int], dict[str, float]] = {}  # the masses that a trajectory is balanced with
    for (number, agent, index), row in totals.items():
        trajectory = groups[number].episodes[index].trajectories[agent]
        of_policy = masses.setdefault((groups[number].env_id, trajectory.policy), {})
        roles[number, agent, index] = of_policy
        if mass := float(np.abs(row) @ np.array([total_tokens([turn]) for turn in trajectory.turns], np.float64)):
            of_policy[agent] = of_policy.get(agent, 0.0) + mass
    for key, row in totals.items():
        of_policy, agent = roles[key], key[1]
        if agent in of_policy:
            mean = sum(of_policy.values()) / len(of_policy)
            row[:] *= np.clip(mean / of_policy[agent], 1 / _MAX_BALANCE, _MAX_BALANCE)


def _scored_parts(
    groups: Sequence[EpisodeGroup], trained: Collection[str]
) -> list[tuple[float, list[_ScoredTrajectory], list[Scored]]]:
    """Return for each part of the reward: its weight, the trajectories that it scored, and their scores for `Credit`.

    A reward that is no `MultiReward` is one part.
    """
    parts: dict[str, tuple[float, list[_ScoredTrajectory], list[Scored]]] = {}
    for number, group in enumerate(groups):
        for name, (weight, part) in (group.parts or {"": (1.0, group)}).items():
            for item in _scored_trajectories([part], trained)[0]:
                _, rows, scored = parts.setdefault(name, (weight, [], []))
                rows.append(item._replace(group=number))
                agent, index = item.agent, item.episode
                scores = Scored(
                    group=number,
                    role="/".join(filter(None, (part.env_id, agent, name))),
                    reward=item.reward,
                    response_tokens=[len(turn.response_ids) for turn in item.trajectory.turns],
                    turns=None if part.turn_rewards is None else part.turn_rewards[agent][index][list(item.turns)],
                    noise=None if part.noise is None else float(part.noise[agent][index]),
                    alternatives=scored_alternatives(group, name, agent, index) if group.alternatives else {},
                )
                scored.append(scores)
    return [*parts.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    """The training samples of a step, and counts of everything that was left out."""

    samples: Mapping[str, Sequence[Sample]]
    """Training samples by policy. A policy without samples is absent."""
    counts: Mapping[str, int]
    """Number of groups by outcome: ``used``; ``failed`` (an episode failed); ``abstained`` (rewards are NaN, so no
    trained agent has two rewards to compare); ``too_long`` (no informative sample fits the learner);
    ``zero_variance`` (the rewards of trained agents do not differ by more than the noise)."""
    advantages: Mapping[tuple[int, int], Mapping[str, Sequence[float]]]
    """By group and episode, then by agent: one number per turn. Trajectories without samples, or with samples for the
    divergence and the entropy bonus only, are absent."""
    used: Mapping[str, int] = field(default_factory=dict)
    """By policy: number of groups with `advantages`."""
    abstained: int = 0
    """Number of trained trajectories without a reward."""
    too_long: int = 0
    """Number of samples that were dropped because they are longer than the learner accepts. Their rewards still count
    in the baselines, as in DAPO's overlong filtering (arXiv 2503.14476, section 3.4)."""
    bad_logprobs: Mapping[str, float] = field(default_factory=dict)
    """By policy: fraction of sampled tokens that are masked because their log-probability is invalid."""
    fractions: Mapping[str, float] = field(default_factory=dict)
    """By policy: fraction of the loss normalization that `samples` make up. Their advantages are multiplied by it."""

    def metrics(self, learners: Collection[str]) -> dict[str, float]:
        """Return ``groups/OUTCOME``, ``dropped/...`` and each learner's ``normalization_fraction``.

        With several learners, ``groups/used/POLICY`` is the number of groups with an advantage of the policy.
        """
        compared = self.counts["used"] + self.counts["zero_variance"]
        several = learners if len(learners) > 1 else ()
        return {
            **{f"groups/{outcome}": float(count) for outcome, count in self.counts.items()},
            **{f"groups/used/{name}": float(self.used.get(name, 0)) for name in several},
            "groups/zero_variance_fraction": self.counts["zero_variance"] / compared if compared else float("nan"),
            "dropped/abstained": float(self.abstained),
            "dropped/too_long": float(self.too_long),
            "dropped/bad_logprobs": max(self.bad_logprobs.values(), default=0.0),
            **{f"{prefix(name, learners)}/normalization_fraction": x for name, x in self.fractions.items()},
        }


def prefix(name: str, learners: Collection[str]) -> str:
    """Return the prefix of a learner's metrics: its policy is named only if there are several."""
    return "learner" if len(learners) == 1 else f"learner/{name}"


def make_samples(
    groups: Sequence[EpisodeGroup],
    trained: Collection[str],
    *,
    max_tokens: Mapping[str, int] | None = None,
    size_of: Callable[[Trajectory], int] | None = None,
    keep: Collection[str] = (),
) -> StepSamples:
    """Cut the trajectories of trained policies into training samples.

    Args:
        groups: Groups with `advantages`.
        trained: Policies that learn.
        max_tokens: Number of tokens of the longest sample that each policy's learner accepts. No limit if absent.
        size_of: Contribution of a trajectory to the loss normalization if zero-variance trajectories count as well.
            A learner divides by the size of its batch, so the advantages are scaled down instead. None counts used
            trajectories only.
        keep: Policies whose zero-variance trajectories are kept with advantage 0, for the divergence and the entropy
            bonus of the loss. Without them a policy that became deterministic would no longer be pulled back.
    """
    from forge_trainers.batch.packing import samples_from

    samples: dict[str, list[Sample]] = {}
    tokens: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    batch_sizes: Counter[str] = Counter()  # contributions to the loss normalization: of trajectories in the batch
    left_out_sizes: Counter[str] = Counter()  # and of zero-variance trajectories that are not in it
    used: dict[str, set[int]] = {}  # groups by policy
    too_long: list[int] = []  # group of each sample
    advantages: dict[tuple[int, int], dict[str, Sequence[float]]] = {}
    rows, abstained = _scored_trajectories(groups, trained)
    for number, row in enumerate(rows):
        trajectory, policy = row.trajectory, row.trajectory.policy
        of_all_turns = (groups[row.group].advantages or {})[row.agent][row.episode]
        per_turn = None if of_all_turns is None else of_all_turns[list(row.turns)]
        if per_turn is None and policy in keep:
            per_turn = np.zeros(len(row.turns), np.float32)
        cut = [] if per_turn is None else samples_from(trajectory, per_turn.tolist(), group=row.group, number=number)
        limit = (max_tokens or {}).get(policy, math.inf)
        too_long += [row.group for sample in cut if len(sample.token_ids) > limit and of_all_turns is not None]
        bad[policy] += sum(sample.bad_logprobs for sample in cut)
        tokens[policy] += sum(int(sample.loss_mask.sum()) + sample.bad_logprobs for sample in cut)
        accepted = [sample for sample in cut if len(sample.token_ids) <= limit and sample.loss_mask.any()]
        if accepted:
            samples.setdefault(policy, []).extend(accepted)
            if of_all_turns is not None:
                advantages.setdefault((row.group, row.episode), {})[row.agent] = of_all_turns.tolist()
                used.setdefault(policy, set()).add(row.group)
        if size_of is not None and (accepted or per_turn is None):  # samples dropped for their length count nowhere
            part = trajectory if len(accepted) == len(cut) else _learned_part(trajectory, accepted)
            (left_out_sizes if per_turn is None else batch_sizes)[policy] += size_of(part)
    # The mean over all sampled tokens is the learner's mean over those in the batch, times the fraction of the latter.
    fractions = {name: size / (size + left_out_sizes[name]) for name, size in batch_sizes.items() if size}
    for name, fraction in fractions.items():
        if fraction < 1.0:
            samples[name] = [replace(sample, advantage=fraction * sample.advantages) for sample in samples[name]]
    return StepSamples(
        samples=samples,
        counts=_outcomes(groups, trained, set().union(*used.values()), set(too_long)),
        advantages=advantages,
        used={name: len(numbers) for name, numbers in used.items()},
        abstained=abstained,
        too_long=len(too_long),
        bad_logprobs={name: bad[name] / number for name, number in tokens.items() if number},
        fractions=fractions,
    )


class _ScoredTrajectory(NamedTuple):
    """A trajectory with a reward, or the part of one that belongs to a session with its own reward."""

    group: int
    agent: str
    episode: int
    """Index of the episode in the group."""
    turns: tuple[int, ...]
    """Positions of its turns in the whole trajectory."""
    trajectory: Trajectory
    reward: float


def _scored_trajectories(
    groups: Sequence[EpisodeGroup], trained: Collection[str]
) -> tuple[list[_ScoredTrajectory], int]:
    """Return the trained trajectories with a reward, and the number of those without."""
    scored, abstained = [], 0
    for number, group in enumerate(groups):
        for agent, rewards in {} if group.failed else group.rewards_of(trained).items():
            for index, episode in enumerate(group.episodes):
                if (whole := episode.trajectories.get(agent)) is None:
                    continue
                abstained += bool(np.isnan(rewards[index]))
                if whole.session_rewards is None:
                    parts = [(tuple(range(len(whole.turns))), whole, float(rewards[index]))]
                else:
                    positions = [
                        tuple(at for at, turn in enumerate(whole.turns) if turn.session == session)
                        for session in range(len(whole.session_rewards))
                    ]
                    rewards_n = group.session_rewards[agent][index].tolist()
                    parts = [*zip(positions, whole.sessions, rewards_n, strict=True)]
                scored += [_ScoredTrajectory(number, agent, index, *each) for each in parts if not np.isnan(each[2])]
    return scored, abstained


def _learned_part(trajectory: Trajectory, samples: Sequence[Sample]) -> Trajectory:
    """Return the trajectory with the turns that have a token in the loss of `samples`."""
    numbers = {t for sample in samples if sample.turns is not None for t in sample.turns[sample.loss_mask].tolist()}
    return replace(trajectory, turns=tuple(trajectory.turns[t] for t in sorted(numbers)))


def _outcomes(
    groups: Sequence[EpisodeGroup], trained: Collection[str], used: set[int], too_long: set[int]
) -> dict[str, int]:
    """Count groups by outcome. See `StepSamples.counts`."""
    counts = dict.fromkeys(("used", "failed", "abstained", "too_long", "zero_variance"), 0)
    for number, group in enumerate(groups):
        if group.failed:
            outcome = "failed"
        elif number in used:
            outcome = "used"
        elif number in too_long:
            outcome = "too_long"
        else:
            outcome = "abstained" if _abstained(group, trained) else "zero_variance"
        counts[outcome] += 1
    return counts


def _abstained(group: EpisodeGroup, trained: Collection[str]) -> bool:
    """Return whether no agent has two rewards of one part to compare, because some are NaN."""
    missing, comparable = False, False
    for agent in group.rewards_of(trained):
        present = np.array([agent in episode.trajectories for episode in group.episodes])
        for _, part in (group.parts or {"": (1.0, group)}).values():
            scored = ~np.isnan(part.rewards[agent]) & present
            missing |= not scored.all()
            comparable |= bool(scored.sum() > 1)
    return missing and not comparable


def credit_groups(
    groups: Sequence[EpisodeGroup],
    credit: Credit,
    trained: Collection[str],
    baselines: Baselines | None = None,
    *,
    max_tokens: Mapping[str, int] | None = None,
    size_of: Callable[[Trajectory], int] | None = None,
) -> StepSamples:
    """Turn scored groups into training samples: `compute_advantages`, then `make_samples`.

    Raises:
        TypeError: `trained` is a single string instead of a collection of names.
    """
    check_trained(groups, trained)
    return make_samples(
        compute_advantages(groups, credit, trained, baselines), trained, max_tokens=max_tokens, size_of=size_of
    )


def check_trained(groups: Sequence[EpisodeGroup], trained: Collection[str]) -> None:
    """Warn if no trained policy plays in `groups`. Raises TypeError if `trained` is a single string."""
    if isinstance(trained, str):
        raise TypeError(f"trained={trained!r} is a string. Pass a collection of names, {{{trained!r}}}")
    playing = {trajectory.policy for group in groups for trajectory in group.trajectories}
    if playing and playing.isdisjoint(trained):
        _log.warning(
            "none of the trained policies (%s) plays in these %d groups, only %s. All of them count as zero-variance",
            ", ".join(sorted(trained)),
            len(groups),
            ", ".join(sorted(playing)),
        )


def pack_samples(samples: StepSamples, *, max_bad_logprobs: float = MAX_BAD_LOGPROBS) -> dict[str, EpisodeBatch]:
    """Pack the samples of each policy into a batch.

    Raises DivergedError if over a fraction `max_bad_logprobs` of a policy's tokens has invalid log-probabilities.
    """
    for name, share in samples.bad_logprobs.items():
        if share > max_bad_logprobs:
            raise DivergedError(
                f"the sampler of {name} gave invalid log-probabilities (NaN, infinite or positive) for {share:.2%} of "
                f"a step's tokens, more than {max_bad_logprobs:.2%}. Its weights or activations "
                "overflow: check learner/grad_norm of earlier steps, lower lr, or set engine.dtype='float32'"
            )
    from forge_trainers.batch.packing import pack

    return {name: pack(policy_samples) for name, policy_samples in samples.samples.items()}
