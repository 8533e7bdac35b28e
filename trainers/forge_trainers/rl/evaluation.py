"""How held-out episodes are scored, and what an evaluation returns."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from forge_agents.types import Episode, EpisodeGroup, Reward
from forge_trainers.rl.endings import acting
from forge_trainers.rl.rewards import (
    EnvTurnReward,
    JudgedGroup,
    env_reward,
    held_by,
    mean_and_ci,
    rewards_by,
    summarise,
)
from forge_trainers.run.checkpoints import ProcessRandomness, Stateful
from forge_verifiers.core.functions import name_of


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Reward on held-out seeds."""

    reward: float
    """Mean over episodes of the mean over the agents of trainable policies; over all agents where there is none. By the
    reward of the run, unless `GRPOTrainer.evaluate` was given another one. NaN where no trainable policy had a turn."""
    ci: float
    """Half-width of the 95 % confidence interval of `reward`."""
    by_agent: dict[str, float]
    by_policy: dict[str, float]
    """Of trainable policies. NaN of one that never had a turn."""
    episodes: Sequence[Episode] = dataclasses.field(repr=False)  # a page each
    failed: int
    """Episodes that ended in an error; they count in no mean."""
    abstained: int = 0
    """Other episodes in which the reward was NaN for an agent that counts; that agent counts in no mean."""
    by_env: dict[str, float] = dataclasses.field(default_factory=dict)
    """`reward` of each environment or level by its id. NaN where none of its episodes counts."""
    env_reward: float = math.nan
    """The environment's own reward of the same episodes and agents, whatever `reward` is."""
    env_ci: float = math.nan
    """Half-width of the 95 % confidence interval of `env_reward`."""
    scored_by: str = "environment"
    """Name of the reward that `reward` is the mean of; "environment" where it is the environment's own."""


def is_env_reward(reward: Reward) -> bool:
    """Whether a reward is the environment's own total reward."""
    return reward is env_reward or isinstance(reward, EnvTurnReward)


def reward_name(reward: Reward) -> str:
    """The name of a reward as users read it."""
    return "environment" if is_env_reward(reward) else str(getattr(reward, "name", None) or name_of(reward))


def policies_without_turns(played: Sequence[Episode], policies: Collection[str]) -> list[str]:
    """Those of `policies` that sampled no token in any of the episodes; none where nothing was played."""
    return [name for name in policies if played and not any(acting(episode, [name]) for episode in played)]


def compares_groups(reward: Any) -> bool:
    """Whether a part of `reward` compares the episodes of a group, such as `SelfConsistency`.

    An ensemble counts by its verifiers: by itself it scores an episode alone.
    """
    parts = [part for part in held_by(reward) if not hasattr(part, "verifiers")]
    leaves = (part for part in parts if not callable(getattr(part, "parts", None)))
    return any(getattr(part, "sees_groups", False) for part in leaves)


@contextmanager
def unchanged(reward: Any) -> Iterator[None]:
    """Score without a trace: what `reward` has learned and the process's random state are as before at the end.

    An ensemble does not learn inside. One that has learned nothing yet does, from what is scored, and forgets it.
    """
    fitted = [part for part in held_by(reward) if getattr(part, "learning", False) and getattr(part, "version", 0)]
    randomness = ProcessRandomness()
    drawn = randomness.state_dict()
    state = None
    if isinstance(reward, Stateful):
        state = {name: np.array(value) for name, value in reward.state_dict().items()}
    for ensemble in fitted:
        ensemble.learning = False
    try:
        yield
    finally:
        for ensemble in fitted:
            ensemble.learning = True
        if state is not None:
            reward.load_state_dict(state)
        randomness.load_state_dict(drawn)


def eval_result(
    groups: Sequence[EpisodeGroup],
    scored: Sequence[JudgedGroup],
    paid: Sequence[JudgedGroup],
    trained: Collection[str],
    *,
    idle: Collection[str] = (),
    scored_by: str,
) -> EvalResult:
    """Means of an evaluation.

    Args:
        groups: All that was played.
        scored: The groups that count, with the measured reward.
        paid: The same groups with the environment's own reward.
        trained: Policies whose agents count; none counts all agents.
        idle: Those of them that had no turn, so that their rewards say nothing of them.
        scored_by: Name of the measured reward.
    """
    unmeasured = bool(idle) and set(idle) == set(trained)
    summary, by_policy = summarise(scored, trained), rewards_by(scored, "policy")
    env = summarise(paid, trained)
    by_env: dict[str, list[JudgedGroup]] = {}
    for item in scored:
        by_env.setdefault(item.group.env_id, []).append(item)
    return EvalResult(
        reward=math.nan if unmeasured else summary["reward/mean"],
        ci=summary["reward/ci"],
        by_agent={agent: mean_and_ci(*rewards)[0] for agent, rewards in rewards_by(scored, "agent").items()},
        by_policy={
            name: math.nan if name in idle else mean_and_ci(*rewards)[0]
            for name, rewards in by_policy.items()
            if name in trained
        },
        episodes=tuple(episode for group in groups for episode in group.episodes),
        failed=sum(len(group.failed) for group in groups),
        abstained=_num_abstained(scored, trained),
        by_env={env_id: summarise(own, trained)["reward/mean"] for env_id, own in by_env.items()},
        env_reward=math.nan if unmeasured else env["reward/mean"],
        env_ci=env["reward/ci"],
        scored_by=scored_by,
    )


def eval_metrics(result: EvalResult) -> dict[str, float]:
    """``eval/reward`` and the like; ``eval/env_reward`` as well if another reward is measured."""
    metrics = {"eval/reward": result.reward, "eval/ci": result.ci, "eval/failed": float(result.failed)}
    if result.scored_by != "environment":
        metrics |= {"eval/env_reward": result.env_reward, "eval/env_ci": result.env_ci}
        metrics |= {"eval/abstained": float(result.abstained)}
    metrics |= {f"eval/reward/{name}": reward for name, reward in result.by_policy.items()}
    if len(result.by_env) > 1:
        metrics |= {f"eval/env/{env_id}": reward for env_id, reward in result.by_env.items()}
    return metrics


def _num_abstained(scored: Sequence[JudgedGroup], trained: Collection[str]) -> int:
    def counts(episode: Episode, rewards: Mapping[str, float]) -> bool:
        return any(
            np.isnan(reward) and (not trained or episode.trajectories[agent].policy in trained)
            for agent, reward in rewards.items()
            if agent in episode.trajectories
        )

    return sum(
        episode.error is None and counts(episode, item.episode_rewards(at))
        for item in scored
        for at, episode in enumerate(item.group.episodes)
    )
