"""Counterfactual credit: alternatives of single decisions, from the checks before a run to the records of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from forge_agents.envs.env import forked, hook
from forge_agents.errors import ArgumentError, PreflightError
from forge_agents.policy import AnyPolicy, Human
from forge_agents.rollout.alternatives import ForkRule
from forge_agents.types import EpisodeGroup, Reward, Trajectory
from forge_trainers.rl.credit import Credit, Scored
from forge_trainers.rl.rewards import compares_groups, reward_name

_SETTING = "credit.baseline='counterfactual'"


def fork_rule(
    credit: Credit,
    trained: Collection[str],
    *,
    players: Mapping[str, AnyPolicy],
    not_forkable: Collection[str],
    reward: Reward,
) -> ForkRule | None:
    """Return the rule by which a run plays alternatives, or None if its credit needs none.

    Raises:
        ArgumentError: An environment cannot be copied, a person plays, or the reward compares episodes.
    """
    if credit.baseline != "counterfactual":
        return None
    other = "Choose another baseline, such as 'leave_one_out'"
    if not_forkable:
        raise ArgumentError(
            f"{_SETTING} plays from copies of the environment, and {', '.join(sorted(not_forkable))} has no method "
            f"fork. Derive it from fa.TurnEnv or fa.ParallelTurnEnv, or define fork(self). {other}"
        )
    if people := [name for name, player in players.items() if isinstance(player, Human)]:
        raise ArgumentError(
            f"{_SETTING} plays the rest of an episode several times, and {people[0]} is a person. Choose another "
            f"player. {other}"
        )
    if compares_groups(reward):
        raise ArgumentError(
            f"{_SETTING} scores alternatives of an episode, and the reward {reward_name(reward)} compares the "
            f"episodes of a group, which alternatives would change. Choose a reward that scores each episode. {other}"
        )
    return ForkRule(samples=credit.samples, decisions=credit.decisions, policies=frozenset(trained))


def try_fork(make: Callable[[], Any], env_id: str, seed: int) -> None:
    """Copy an environment once. Raises PreflightError if that fails, or if copies would share a server of tools."""
    with contextlib.closing(make()) as env:
        env.reset(seed=seed)
        try:
            forked(env).close()
        except Exception as cause:
            raise PreflightError(
                f"{env_id} cannot be copied ({type(cause).__name__}: {cause}), and {_SETTING} plays from copies. "
                f"`forge-agents check {env_id}` names the attribute"
            ) from cause
        tools = hook(env, "tools")
        for agent in env.possible_agents if callable(tools) else ():
            for tool in tools(agent):
                if getattr(getattr(tool, "fn", None), "__module__", "") == "forge_agents.tools.mcp":
                    raise PreflightError(
                        f"{env_id} has the tool {tool.name} of an MCP server. Copies of an episode would share the "
                        f"state of the server, and {_SETTING} plays from copies. Choose another baseline"
                    )


def check_collected(groups: Sequence[EpisodeGroup]) -> None:
    """Raise ArgumentError if groups have no alternatives, or sessions with rewards of their own."""
    for group in groups:
        if group.alternatives is None:
            raise ArgumentError(
                f"{_SETTING} needs alternatives, and a group of {group.env_id} has none. Collect it with "
                "Rollout(forks=forge_agents.rollout.alternatives.ForkRule(...))"
            )
        if group.session_rewards:
            raise ArgumentError(
                f"{_SETTING} compares whole episodes, and sessions of {group.env_id} have rewards of their own. Reward "
                "the whole episode, or choose another baseline"
            )


async def score_with_alternatives(
    groups: Sequence[EpisodeGroup], score: Callable[[Sequence[EpisodeGroup]], Awaitable[list[EpisodeGroup]]]
) -> list[EpisodeGroup]:
    """Score groups and their alternatives in one call of the reward."""
    plain = [replace(group, alternatives=None) for group in groups]
    with_alternatives = [group.alternatives for group in groups if group.alternatives is not None]
    scored = await score([*plain, *(each.group for each in with_alternatives)])
    rest = iter(scored[len(groups) :])
    return [
        each
        if group.alternatives is None
        else replace(each, alternatives=replace(group.alternatives, group=next(rest)))
        for group, each in zip(groups, scored[: len(groups)], strict=True)
    ]


def scored_alternatives(group: EpisodeGroup, part: str, agent: str, index: int) -> dict[int, list[Scored]]:
    """Return the alternatives of an agent's turns in an episode, scored by a part of the reward.

    A turn is left out if one of its alternatives failed, because the mean of the others may be biased, or if the reward
    abstained on all of them.
    """
    assert group.alternatives is not None
    again = group.alternatives.group
    rewards = (again.parts[part][1] if again.parts else again).rewards.get(agent)
    positions = {turn.index: t for t, turn in enumerate(group.episodes[index].trajectories[agent].turns)}
    result: dict[int, list[Scored]] = {}
    failed = set[int]()
    for number, (episode, turn) in enumerate(group.alternatives.decisions):
        if episode != index or turn not in positions:
            continue
        if again.episodes[number].error is not None:
            failed.add(positions[turn])
        elif rewards is not None and not np.isnan(rewards[number]):
            trajectory: Trajectory = again.episodes[number].trajectories[agent]
            tokens = [len(each.response_ids) for each in trajectory.turns]
            scored = Scored(group=0, role=agent, reward=float(rewards[number]), response_tokens=tokens)
            result.setdefault(positions[turn], []).append(scored)
    return {t: scored for t, scored in result.items() if t not in failed}


def alternatives_metrics(groups: Sequence[EpisodeGroup]) -> dict[str, float]:
    """Return ``credit/tokens``, sampled for alternatives, and numbers of alternatives: all, and failed ones."""
    played = [group.alternatives for group in groups if group.alternatives is not None]
    return {
        "credit/tokens": float(sum(each.tokens for each in played)),
        "credit/alternatives": float(sum(len(each.decisions) for each in played)),
        "credit/failed": float(sum(len(each.group.failed) for each in played)),
    }


def recorded(group: EpisodeGroup, index: int) -> list[dict[str, Any]]:
    """Return the alternatives of an episode for ``episodes.jsonl``: turn, and rewards by agent or the error."""
    if group.alternatives is None:
        return []
    again = group.alternatives.group
    rows = []
    for number, (episode, turn) in enumerate(group.alternatives.decisions):
        if episode == index:
            error = again.episodes[number].error
            rewards = {} if error is not None else again.episode_rewards(number)
            rows.append({"turn": turn, "rewards": rewards, "error": None if error is None else error.kind})
    return rows
