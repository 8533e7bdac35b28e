"""Metrics of a training step: rewards with confidence intervals, groups, tokens and times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from forge_agents.types import Episode, EpisodeGroup, total_tokens
from forge_trainers.rl.counterfactual import alternatives_metrics
from forge_trainers.rl.rewards import env_reward
from forge_trainers.rl.samples import StepSamples
from forge_trainers.rl.scoring import score_groups

if TYPE_CHECKING:
    from forge_trainers.rl.plan import RunPlan
    from forge_trainers.run.processes import Processes


async def step_metrics(
    plan: RunPlan,
    groups: Sequence[EpisodeGroup],
    samples: StepSamples,
    *,
    processes: Processes,
    times: Mapping[str, float],
) -> dict[str, float]:
    """Return the metrics of a step: rewards, groups, tokens, memory and times."""
    measured, learners = plan.policies.measured, processes.learners
    metrics = summarize(measured(groups), learners)
    if not plan.uses_env_reward:
        scored = await score_groups(groups, env_reward, timeout_s=plan.config.stage_timeout_s)
        metrics["env_reward/mean"] = summarize(measured(scored), learners)["reward/mean"]
    metrics |= group_spread(groups, plan.config.groups_per_step, learners) | samples.metrics(learners)
    metrics |= await processes.engines_memory()
    if plan.forks is not None:
        metrics |= alternatives_metrics(groups)
    return metrics | dict(times) | rates(groups, times["time/step_s"])


def summarize(groups: Sequence[EpisodeGroup], trained: Collection[str] = ()) -> dict[str, float]:
    """Compute reward metrics of scored groups, without failed episodes and abstentions.

    ``reward/mean`` is the mean over episodes of the mean over agents of `trained` policies (of all, if empty), and
    ``reward/ci`` the half-width of its 95 % confidence interval for a sample of seeds. ``reward/NAME`` and
    ``reward_ci/NAME`` are the same by agent and by trained policy. A policy takes precedence over an agent of its name,
    and the mean and its interval over an agent or a policy called "mean" or "ci".
    """
    episodes = rewards_by(groups, "episode", trained).values()
    mean, half_width = mean_and_ci(
        [float(np.mean(values)) for values, _ in episodes], [number for _, (number, *_) in episodes]
    )
    named = {**rewards_by(groups, "agent"), **(rewards_by(groups, "policy", trained) if trained else {})}
    means = {name: mean_and_ci(*rewards) for name, rewards in named.items()}
    overall = {"reward/mean": mean, "reward/ci": half_width}
    by_name = {f"reward/{name}": value for name, (value, _) in means.items()}
    widths = {f"reward_ci/{name}": width for name, (_, width) in means.items()}
    return overall | by_name | widths | overall  # first, and not replaced by a policy called "mean"


def rewards_by(
    groups: Sequence[EpisodeGroup], by: Literal["agent", "policy", "episode"], trained: Collection[str] = ()
) -> dict[str, tuple[list[float], list[int]]]:
    """Collect rewards by agent, policy or episode, of `trained` policies if given, each with the index of its group."""
    rewards: dict[str, tuple[list[float], list[int]]] = {}
    for number, group in enumerate(groups):
        for index, episode in enumerate(group.episodes):
            for agent, reward in {} if episode.error is not None else group.episode_rewards(index).items():
                if np.isnan(reward):
                    continue
                policy = episode.trajectories[agent].policy
                if not trained or policy in trained:
                    key = {"agent": agent, "policy": policy, "episode": f"{number}/{index}"}[by]
                    values, indices = rewards.setdefault(key, ([], []))
                    values.append(reward)
                    indices.append(number)
    return rewards


def group_spread(groups: Sequence[EpisodeGroup], groups_per_step: int, trained: Collection[str]) -> dict[str, float]:
    """Return ``groups/resampled``, the number of groups added by dynamic sampling, and ``groups/reward_std``.

    The latter is the mean over groups and agents of `trained` policies of the standard deviation of rewards, NaN if all
    failed or abstained.
    """
    spreads = []
    for group in groups:
        learning = {trajectory.agent for trajectory in group.trajectories if trajectory.policy in trained}
        rewards = [group.rewards[agent] for agent in sorted(learning)] if not group.failed else []
        spreads += [float(np.nanstd(values)) for values in rewards if not np.isnan(values).all()]
    spread = float(np.mean(spreads)) if spreads else float("nan")
    return {"groups/reward_std": spread, "groups/resampled": float(len(groups) - groups_per_step)}


def rates(groups: Sequence[EpisodeGroup], seconds: float) -> dict[str, float]:
    """Return ``tokens``, ``tokens_per_s`` and ``turns`` of a step that took `seconds`.

    Alternatives of episodes count in ``tokens_per_s`` only.

    Per turn of a model: mean ``response_tokens``, mean ``reasoning_tokens`` among them, and fraction ``cut_off``. Per
    episode: fractions ``out_of_context`` and ``program_failed``. ``failed/NAME`` is the number of episodes that
    failures of player NAME ended.
    """
    turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
    of_models = [turn for turn in turns if turn.prompt_ids]  # the tokens of other players are unknown
    episodes = [episode for group in groups for episode in group.episodes]
    tokens = total_tokens(turns)
    again = sum(group.alternatives.tokens for group in groups if group.alternatives is not None)
    return {
        "tokens": float(tokens),
        "tokens_per_s": (tokens + again) / seconds,
        "turns": float(len(turns)),
        "response_tokens": float(np.mean([len(turn.response_ids) for turn in of_models])) if of_models else 0.0,
        "reasoning_tokens": float(np.mean([turn.reasoning_tokens for turn in of_models])) if of_models else 0.0,
        "out_of_context": float(np.mean([each.out_of_context for each in episodes])) if episodes else 0.0,
        "program_failed": float(np.mean([bool(e.program_error) for e in episodes])) if episodes else 0.0,
        "cut_off": float(np.mean([turn.finish_reason == "length" for turn in of_models])) if of_models else 0.0,
        **(failed_by("failed", episodes) if any(group.failed for group in groups) else {}),
    }


def failed_by(name: str, episodes: Sequence[Episode]) -> dict[str, float]:
    """Return ``name/PLAYER``: the number of episodes that failures of a player ended."""
    players = Counter(episode.failed_policy for episode in episodes)
    return {f"{name}/{player}": float(number) for player, number in sorted(players.items()) if player}


def mean_and_ci(values: Sequence[float], groups: Sequence[int] | None = None) -> tuple[float, float]:
    """Compute a mean and the half-width of its 95 % confidence interval (Student's t), or NaN without values.

    Values of one group share a seed, so they are not independent: each group's deviation counts once (the
    cluster-robust variance of a mean, Liang and Zeger 1986). With one group the half-width is infinite. Without
    `groups`, each value is its own group.
    """
    from scipy.special import stdtrit  # Student's t quantiles; scipy.stats takes half a second to load

    if not len(values):
        return float("nan"), float("nan")
    mean = float(np.mean(values))
    _, index = np.unique(range(len(values)) if groups is None else groups, return_inverse=True)
    deviations = np.bincount(index, weights=np.asarray(values, np.float64) - mean)
    if (num := len(deviations)) == 1:
        return mean, float("inf")
    spread = np.sqrt(num / (num - 1) * np.square(deviations).sum()) / len(values)
    return mean, float(stdtrit(num - 1, 0.975) * spread)
