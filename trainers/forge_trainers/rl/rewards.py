"""What played groups earned.

In: episode groups, a reward. Out: rewards by group, agent and sibling, and the metrics of a step. Waits for the reward,
in a thread, with a deadline.
"""

from __future__ import annotations

import itertools
import logging
import math
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from forge_agents.errors import ArgumentError
from forge_agents.runtime.mesh import with_deadline
from forge_agents.runtime.threads import in_thread
from forge_agents.types import EpisodeGroup, Reward, Trajectory, total_tokens
from forge_verifiers.core.verifier import (
    Assessment,
    Composable,
    EnvReward,
    declared_judges,
    load_nested,
    nested_state,
    reward_of,
)

if TYPE_CHECKING:
    from forge_trainers.run.placement import OwnEngine, OwnModel

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedGroup:
    """A group and what its agents earned."""

    group: EpisodeGroup
    rewards: Mapping[str, np.ndarray]
    """By agent: float32 ``[G]``, NaN where the reward abstained or the agent took no part in the sibling."""
    noise: Mapping[str, np.ndarray] | None = None
    """By agent: float32 ``[G]``, the standard deviation of each reward; None where the reward does not know it."""
    turns: Mapping[str, Sequence[np.ndarray]] | None = None
    """By agent and sibling: float32 ``[turns]``, NaN where the reward abstained; None where it scores no turns."""
    parts: Mapping[str, tuple[float, JudgedGroup]] | None = None
    """Weight and scores of each reward by name, where several are credited apart; `rewards` is then the weighted sum of
    those that did not abstain."""

    def episode_rewards(self, index: int) -> dict[str, float]:
        """Rewards of one sibling, by agent."""
        return {agent: float(rewards[index]) for agent, rewards in self.rewards.items()}

    def rewards_of(self, policies: Collection[str]) -> dict[str, np.ndarray]:
        """`rewards` of the agents that one of `policies` played in any sibling."""
        agents = {trajectory.agent for trajectory in self.group.trajectories if trajectory.policy in policies}
        return {agent: rewards for agent, rewards in self.rewards.items() if agent in agents}


def env_reward(trajectories: Sequence[Trajectory]) -> np.ndarray:
    """The environment's own total reward of each trajectory."""
    return np.array([trajectory.reward for trajectory in trajectories], dtype=np.float32)


class EnvTurnReward:
    """The environment's own reward, turn by turn; what arrives before an agent's first turn is in the total alone."""

    name = "env_turn_reward"

    def __call__(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """Total rewards, float32 ``[n]``."""
        return env_reward(trajectories)

    def assess(self, trajectories: Sequence[Trajectory]) -> Assessment:
        """Total rewards and those of every turn, of any range."""
        turns = [np.array([turn.reward for turn in t.turns], np.float32) for t in trajectories]
        return Assessment(scores=env_reward(trajectories), turns=turns)


class MultiReward:
    """Rewards whose advantages are added, each found among its own kind (GDPO, arXiv 2601.05242).

    Summing the rewards first makes (format 1, answer 0) indistinguishable from (format 0, answer 1), and the reward
    that varies most drowns the others. Departure: the paper normalizes the sum of advantages once more, over the batch.

    A reward that abstains (NaN or None) leaves out only itself: the trajectory learns from the other rewards, and the
    trajectories that have this reward are compared with each other. The total is the weighted sum of those that did not
    abstain, and NaN where all did.

    Args:
        rewards: By name; trajectories to float ``[n]`` or with ``assess``, as `forge_trainers.rl.rewards` takes them.
        weights: Of the advantages and in the total reward, finite; 1 where none is named.
    """

    name = "columns"

    def __init__(
        self, rewards: Mapping[str, Callable[[Sequence[Trajectory]], Any]], weights: Mapping[str, float] | None = None
    ) -> None:
        if not rewards or not isinstance(rewards, Mapping):
            raise ValueError(
                f"MultiReward got no reward by name but {reprlib.repr(rewards)}; give a dict of at least one"
            )
        if nested := [name for name, reward in rewards.items() if isinstance(reward, MultiReward)]:
            raise ValueError(
                f"reward {nested[0]!r} of MultiReward is MultiReward, too; give all rewards to one of them"
            )
        if not all(name in rewards and _is_weight(weight) for name, weight in (weights or {}).items()):
            raise ValueError(f"weights={weights} must be finite numbers of the rewards {', '.join(rewards)} only")
        self._rewards = {name: reward_of(reward) for name, reward in rewards.items()}
        self.weights = {name: float((weights or {}).get(name, 1.0)) for name in rewards}
        """By name, in order."""

    def parts(self) -> Mapping[str, Any]:
        """The rewards by name."""
        return self._rewards

    def __call__(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """Weighted sums, float32 ``[n]``, of the rewards that did not abstain; NaN where all did.

        Raises:
            TypeError, ValueError: A reward returned something that is not one number per trajectory.
        """
        scores = {name: asked(reward, trajectories, name).scores for name, reward in self._rewards.items()}
        return _total([(self.weights[name], own) for name, own in scores.items()])

    def state_dict(self) -> dict[str, np.ndarray]:
        """What the rewards have learned, under ``name/``."""
        return nested_state(self._rewards)  # type: ignore[arg-type]  # any reward may have a state

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state_dict`."""
        load_nested(self._rewards, state, owner=self.name)  # type: ignore[arg-type]  # as above


def _is_weight(value: Any) -> bool:
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def parts_of(reward: Any) -> Iterator[tuple[Any, bool]]:
    """What a reward of ours asks in the end, each with whether an ensemble asks it; anything else is its own part."""
    if isinstance(reward, MultiReward):
        yield from itertools.chain.from_iterable(map(parts_of, reward.parts().values()))
        return
    panel = getattr(reward, "verifiers", ()) if isinstance(reward, Composable) else ()
    held = getattr(reward, "parts", None) if isinstance(reward, Composable) else None
    if panel:
        yield from ((part, True) for own in panel for part, _ in parts_of(own))
    elif callable(held):
        yield from itertools.chain.from_iterable(map(parts_of, held().values()))
    else:
        yield reward, False


def held_by(reward: Any) -> Iterator[Any]:
    """A reward and all that it holds: parts of sums and `MultiReward`, and verifiers of ensembles."""
    yield reward
    parts = getattr(reward, "parts", None) if isinstance(reward, MultiReward | Composable) else None
    held = [*parts().values()] if callable(parts) else []
    held += getattr(reward, "verifiers", ()) if isinstance(reward, Composable) else ()
    for part in held:
        yield from held_by(part)


def check_env_rewards(reward: Any, max_rewards: Mapping[str, float | None]) -> None:
    """Refuse an `EnvReward` whose range is known to be too small before anything is played.

    Args:
        reward: A run's reward.
        max_rewards: The most that an agent can earn, by environment; None where the environment does not say it.

    Raises:
        ArgumentError: An environment pays more than the range holds.
    """
    for part, _ in parts_of(reward):
        for env_id, most in max_rewards.items():
            if isinstance(part, EnvReward) and not part.clip and most is not None and most > part.high + 1e-9:
                raise ArgumentError(f"{env_id}: {part.range_error(part.low, most)}")


def engines_of(reward: Any) -> list[OwnEngine]:
    """Engines that verifiers of a reward start by themselves, each once: judges', which a run places beside its own."""
    return _owned(reward, "own_engine")


def models_of(reward: Any) -> list[OwnModel]:
    """Models that verifiers of a reward load into this process, each once."""
    return _owned(reward, "own_model")


def _owned(reward: Any, what: str) -> list[Any]:
    """What its verifiers have, those among them that a function of somebody's own names; see `declared_judges`."""
    found: dict[int, Any] = {}
    left, seen = [part for part, _ in parts_of(reward)], set[int]()
    while left:
        part = left.pop(0)
        if id(part) in seen:
            continue
        seen.add(id(part))
        if (own := getattr(part, what, None)) is not None:
            found[id(own)] = own
        left += [inner for judge in declared_judges(part) for inner, _ in parts_of(judge)]
    return [*found.values()]


async def judge(
    groups: Sequence[EpisodeGroup], reward: Reward | None = None, *, timeout_s: float = 1800.0
) -> list[JudgedGroup]:
    """Score every trajectory of `groups` in one call of `reward`, or one of each reward in `MultiReward`.

    Args:
        groups: Played, failed episodes and all.
        reward: Asked in a thread, so that it may block; None: the environment's own. What it raises comes back with a
            note of its name.
        timeout_s: Its deadline.

    Returns:
        The groups in order, each with float32 ``[G]`` rewards by agent.

    Raises:
        StallError: The reward did not return in time.
        ArgumentError: It is nothing that can be called, a class, or does not say what it takes.
        TypeError, ValueError: It returned something that is not one number per trajectory.
    """
    reward = env_reward if reward is None else reward_of(reward)
    if isinstance(reward, MultiReward):
        found = {name: await judge(groups, part, timeout_s=timeout_s) for name, part in reward.parts().items()}
        return [
            _joined({name: (reward.weights[name], items[at]) for name, items in found.items()})
            for at in range(len(groups))
        ]
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    name = str(getattr(reward, "name", None) or getattr(reward, "__name__", type(reward).__name__))
    assessed = await with_deadline(
        in_thread(asked, reward, trajectories, name, name=f"reward {name}"),
        timeout_s,
        who=f"reward {name}",
        what="scoring",
    )
    # The last row, -1, stands for an agent that did not come to take part in a sibling.
    scores = np.append(assessed.scores, np.float32(np.nan))
    noise = None if assessed.noise is None else np.append(assessed.noise, np.float32(np.nan))
    turns = None if assessed.turns is None else [*assessed.turns, np.empty(0, np.float32)]
    judged, start = [], 0
    for group in groups:
        rows: dict[str, list[int]] = {}  # by agent and sibling
        for sibling, episode in enumerate(group.episodes):
            for agent in episode.trajectories:
                rows.setdefault(agent, [-1] * len(group.episodes))[sibling] = start
                start += 1
        judged.append(
            JudgedGroup(
                group=group,
                rewards={agent: scores[own] for agent, own in rows.items()},
                noise=None if noise is None else {agent: noise[own] for agent, own in rows.items()},
                turns=None if turns is None else {agent: [turns[at] for at in own] for agent, own in rows.items()},
            )
        )
    return judged


def _joined(parts: Mapping[str, tuple[float, JudgedGroup]]) -> JudgedGroup:
    """One group with the weighted sum of its rewards."""
    first = next(iter(parts.values()))[1]
    totals = {
        agent: _total([(weight, item.rewards[agent]) for weight, item in parts.values()]) for agent in first.rewards
    }
    return JudgedGroup(group=first.group, rewards=totals, parts=parts)


def _total(parts: Sequence[tuple[float, np.ndarray]]) -> np.ndarray:
    """Weighted sum float32 ``[n]`` of the scores that are not NaN; NaN where all are."""
    scores = np.stack([weight * np.asarray(own, np.float32) for weight, own in parts])
    return np.where(np.isnan(scores).all(axis=0), np.nan, np.nansum(scores, axis=0)).astype(np.float32)


def asked(reward: Reward, trajectories: Sequence[Trajectory], name: str) -> Assessment:
    """What `reward` says, held to the contract.

    Raises:
        TypeError, ValueError: It returned something that is not one number per trajectory.
    """
    if not trajectories:
        return Assessment(scores=np.empty(0, np.float32))
    assess = getattr(reward, "assess", None)
    try:
        found = assess(trajectories) if callable(assess) else Assessment(scores=reward(trajectories))
    except Exception as error:
        error.add_note(f"reward {name} raised this when it was asked about {len(trajectories)} trajectories")
        raise
    noise = None if found.noise is None else np.asarray(found.noise, np.float32)
    turns = None if found.turns is None else [_finite(own) for own in found.turns]
    if failed := getattr(found, "failed", None):
        some, why = f"{len(failed)} of {len(trajectories)} trajectories", next(iter(failed.values()))
        _log.warning("reward %s fails on %s, which have no reward and count in dropped/abstained: %s", name, some, why)
    if turns is not None and [len(own) for own in turns] != [len(t.turns) for t in trajectories]:
        raise ValueError(f"reward {name} scored other turns than it was shown; return one score per turn")
    return Assessment(scores=_checked(found.scores, trajectories, name), noise=noise, turns=turns)


def _checked(returned: Any, trajectories: Sequence[Trajectory], name: str) -> np.ndarray:
    try:
        scores = _finite(returned)
        said = f"shape {scores.shape}"
    except (TypeError, ValueError):
        scores, said = np.empty(0), reprlib.repr(returned)
    if scores.shape != (len(trajectories),):
        raise ValueError(
            f"reward {name} returned {said} for {len(trajectories)} trajectories; return one number each"
        ) from None
    if lost := int(np.isnan(scores).sum() - np.isnan(np.asarray(returned, np.float64)).sum()):
        _log.warning(
            "reward %s returned %d infinite scores; they count as abstentions, in dropped/abstained. Return finite "
            "numbers, or NaN to abstain",
            name,
            lost,
        )
    return scores


def _finite(values: Any) -> np.ndarray:
    """float32, NaN in the place of infinities: one score that overflows costs its trajectory, not the run."""
    with np.errstate(over="ignore"):
        found = np.asarray(values, np.float32)
    return np.where(np.isinf(found), np.float32(np.nan), found)


def summarise(judged: Sequence[JudgedGroup], trained: Collection[str] = ()) -> dict[str, float]:
    """Reward metrics of a step; failed episodes and abstentions are left out.

    Args:
        judged: Groups.
        trained: Policies whose seats count; none counts all seats.

    Returns:
        ``reward/mean`` over episodes of the mean over the seats of trained policies, its 95 % half-width ``reward/ci``
        as of a sample of seeds, and by agent and by trained policy ``reward/NAME`` and ``reward_ci/NAME``; the policy's
        where both have one name.
    """
    episodes = rewards_by(judged, "episode", trained).values()
    mean, half_width = mean_and_ci([float(np.mean(own)) for own, _ in episodes], [group for _, (group, *_) in episodes])
    named = {**rewards_by(judged, "agent"), **(rewards_by(judged, "policy", trained) if trained else {})}
    found = {name: mean_and_ci(*own) for name, own in named.items()}
    return {
        "reward/mean": mean,
        "reward/ci": half_width,
        **{f"reward/{name}": own for name, (own, _) in found.items()},
        **{f"reward_ci/{name}": width for name, (_, width) in found.items()},
    }


def rewards_by(
    judged: Sequence[JudgedGroup], what: Literal["agent", "policy", "episode"], trained: Collection[str] = ()
) -> dict[str, tuple[list[float], list[int]]]:
    """Rewards by agent, policy or episode, of trained policies or of all, each with the number of its group.

    Failures and abstentions are left out.
    """
    found: dict[str, tuple[list[float], list[int]]] = {}
    for number, item in enumerate(judged):
        for index, episode in enumerate(item.group.episodes):
            for agent, reward in {} if episode.error is not None else item.episode_rewards(index).items():
                if np.isnan(reward):
                    continue
                policy = episode.trajectories[agent].policy
                if not trained or policy in trained:
                    key = {"agent": agent, "policy": policy, "episode": f"{number}/{index}"}[what]
                    rewards, groups = found.setdefault(key, ([], []))
                    rewards.append(reward)
                    groups.append(number)
    return found


def group_spread(judged: Sequence[JudgedGroup], wanted: int) -> dict[str, float]:
    """How much siblings differ: what there is to learn from.

    Args:
        judged: Groups of a step, its max_resamples included.
        wanted: Groups of a step without max_resamples.

    Returns:
        ``groups/resampled``, how many more were played because others taught nothing;
        ``groups/reward_std``, the mean over groups and agents of the standard deviation of the rewards that are not
        NaN; NaN where every group failed or abstained.
    """
    spreads = [
        float(np.nanstd(rewards))
        for item in judged
        for rewards in item.rewards.values()
        if not item.group.failed and not np.isnan(rewards).all()
    ]
    spread = float(np.mean(spreads)) if spreads else float("nan")
    return {"groups/reward_std": spread, "groups/resampled": float(len(judged) - wanted)}


def rates(groups: Sequence[EpisodeGroup], seconds: float) -> dict[str, float]:
    """Tokens and turns of a step that took `seconds`.

    Returns:
        ``tokens``, ``tokens_per_s``, ``turns``; over turns the mean ``response_tokens``, the mean ``reasoning_tokens``
        among them, and the share ``cut_off``; of episodes the shares ``out_of_context`` and ``program_failed``.
    """
    turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
    episodes = [episode for group in groups for episode in group.episodes]
    tokens = total_tokens(turns)
    return {
        "tokens": float(tokens),
        "tokens_per_s": tokens / seconds,
        "turns": float(len(turns)),
        "response_tokens": float(np.mean([len(turn.response_ids) for turn in turns])) if turns else 0.0,
        "reasoning_tokens": float(np.mean([turn.reasoning_tokens for turn in turns])) if turns else 0.0,
        "out_of_context": float(np.mean([e.end_reason == "context" for e in episodes])) if episodes else 0.0,
        "program_failed": float(np.mean([bool(e.program_error) for e in episodes])) if episodes else 0.0,
        "cut_off": float(np.mean([turn.finish_reason == "length" for turn in turns])) if turns else 0.0,
    }


def mean_and_ci(values: Sequence[float], groups: Sequence[int] | None = None) -> tuple[float, float]:
    """Mean and the half-width of its 95 % confidence interval, by Student's t.

    Values of one group share a seed and are no evidence apart: each group's deviation counts as one (the
    cluster-robust variance of a mean, Liang and Zeger 1986).

    Args:
        values: What the mean is of. Without any both results are NaN.
        groups: The group of each; None: each is its own. With one group the half-width is infinite.
    """
    from scipy.special import stdtrit  # Student's t quantiles; scipy.stats takes half a second to load

    if not len(values):
        return float("nan"), float("nan")
    mean = float(np.mean(values))
    _, place = np.unique(range(len(values)) if groups is None else groups, return_inverse=True)
    deviations = np.bincount(place, weights=np.asarray(values, np.float64) - mean)
    if (num := len(deviations)) == 1:
        return mean, float("inf")
    spread = np.sqrt(num / (num - 1) * np.square(deviations).sum()) / len(values)
    return mean, float(stdtrit(num - 1, 0.975) * spread)
