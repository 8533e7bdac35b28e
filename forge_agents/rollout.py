"""Play episodes: any PettingZoo environment, turn-based or simultaneous, whose observations and actions are text.

In: an environment, players, a seed. Out: an `Episode`, always, even when the environment breaks: a failed episode is
data. Waits for the players' decisions; a player that cannot answer any more (a dead or stalled engine, a spent budget)
raises.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

from pettingzoo import AECEnv, ParallelEnv

from forge_agents._text_game import hook
from forge_agents.errors import ActorDiedError, BudgetError, StallError
from forge_agents.players import ContextFullError, Decision, Player, Served, player_for
from forge_agents.policy import AnyPolicy, Seats, seat_policies
from forge_agents.types import Episode, EpisodeError, EpisodeGroup, Trajectory, Turn

T = TypeVar("T")
PlayableEnv: TypeAlias = "AECEnv[str, Any, Any] | ParallelEnv[str, Any, Any]"
EndReason: TypeAlias = Literal["terminated", "truncated", "turn_limit", "context", "error"]
Where = Literal["reset", "observe", "step", "policy", "reward"]


class _FailureError(Exception):
    """Carries an environment's or player's exception to the one place where it becomes data."""

    def __init__(self, where: Where, cause: BaseException) -> None:
        self.where, self.cause = where, cause


@dataclass(slots=True)
class _Draft:
    """A decision whose reward has not arrived in full."""

    index: int
    observation: str
    decision: Decision
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Seat:
    policy: str
    player: Player
    instructions: str
    drafts: list[_Draft] = field(default_factory=list)
    early_reward: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)

    def credit(self, reward: float, terminated: bool, truncated: bool, info: dict[str, Any]) -> None:
        """What the environment says of everything since this seat's last decision."""
        self.info = info
        if not self.drafts:
            self.early_reward += reward
            return
        draft = self.drafts[-1]
        draft.reward += reward
        draft.terminated, draft.truncated, draft.info = terminated, truncated, info


Sit: TypeAlias = Callable[[str], Awaitable[_Seat]]
"""The seat of an agent, taken when the agent is first met."""


async def play(
    env: PlayableEnv,
    policies: Mapping[str, AnyPolicy],
    *,
    seed: int,
    env_id: str = "",
    served: Mapping[str, Served] | None = None,
    max_turns: int = 1000,
    draw: str | None = None,
) -> Episode:
    """Play one episode to its end.

    Args:
        env: A PettingZoo environment; it is reset with `seed`. In a parallel one all live agents decide at once.
        policies: Who decides, by agent.
        served: Engines of the model policies, by policy name.
        max_turns: Decisions after which the episode is cut off, whatever the environment says; a round that has begun
            is played.
        draw: Names the episode, so that what models sample in it follows from the name and the turn; None samples
            from the engines' own streams of random numbers.

    Returns:
        The episode, with a trajectory for every agent that took part. If the environment or a scripted player raised,
        an endpoint failed or a person left, `error` says so and the turns so far are kept.

    Raises:
        ActorDiedError, StallError: An engine is gone or does not answer.
        BudgetError: An endpoint's budget is spent.
    """
    started = time.perf_counter()
    seats: dict[str, _Seat] = {}
    error: EpisodeError | None = None
    end: EndReason = "error"

    async def sit(agent: str) -> _Seat:
        if agent not in seats:
            tell = hook(env, "instructions") or _no_instructions
            instructions = str(await _guard("observe", env, tell, agent))
            player = player_for(
                policies[agent],
                agent=agent,
                episode_seed=seed,
                instructions=instructions,
                served=served or {},
                draw=draw,
            )
            seats[agent] = _Seat(policies[agent].name, player, instructions)
        return seats[agent]

    try:
        opening = await _guard("reset", env, env.reset, seed=seed)
        for agent in list(env.agents):
            await sit(agent)
        if isinstance(env, ParallelEnv):
            end = await _play_rounds(env, sit, opening, max_turns)
        else:
            end = await _play_turns(env, sit, max_turns)
    except _FailureError as failed:
        error = EpisodeError(
            where=failed.where,
            kind=type(failed.cause).__name__,
            message=str(failed.cause),
            trace="".join(traceback.format_exception(failed.cause)),
        )
    if end in ("turn_limit", "context"):
        _cut_off(seats.values())
    return Episode(
        env_id=env_id,
        seed=seed,
        trajectories={agent: _trajectory(agent, seat, env_id, seed) for agent, seat in seats.items()},
        error=error,
        end_reason=end,
        duration_s=time.perf_counter() - started,
    )


async def _play_turns(env: AECEnv[str, Any, Any], sit: Sit, max_turns: int) -> EndReason:
    """Step one agent after another until nobody is left."""
    index, truncated = 0, False
    while env.agents:
        agent = env.agent_selection
        observation, reward, terminated, cut, info = await _guard("observe", env, env.last)
        seat = await sit(agent)
        seat.credit(_finite(reward, agent), terminated, cut, _json_safe(info))
        truncated |= cut
        if terminated or cut:
            await _guard("step", env, env.step, None)
            continue
        if index >= max_turns:
            return "turn_limit"
        try:
            decision = await _decide(seat, str(observation), info)
        except ContextFullError:
            return "context"
        seat.drafts.append(_Draft(index, str(observation), decision))
        index += 1
        await _guard("step", env, env.step, decision.action)
        await asyncio.sleep(0)  # scripted players never yield; thousands of episodes share the loop
    return "truncated" if truncated else "terminated"


async def _play_rounds(
    env: ParallelEnv[str, Any, Any], sit: Sit, opening: tuple[Mapping[str, Any], Mapping[str, Any]], max_turns: int
) -> EndReason:
    """Step all live agents together, each deciding while the others do, until nobody is left."""
    index, truncated = 0, False
    observations, infos = opening
    while env.agents:
        if index >= max_turns:
            return "turn_limit"
        seats = {agent: await sit(agent) for agent in env.agents}
        asked = {agent: str(observations[agent]) for agent in seats}
        try:
            decided = await all_or_first_error(_decide(seats[a], asked[a], infos.get(a, {})) for a in seats)
        except ContextFullError:
            return "context"
        decisions = dict(zip(seats, decided, strict=True))
        for agent, seat in seats.items():
            seat.drafts.append(_Draft(index, asked[agent], decisions[agent]))
            index += 1
        actions = {agent: decision.action for agent, decision in decisions.items()}
        observations, rewards, terminated, cut, infos = await _guard("step", env, env.step, actions)
        for agent, seat in seats.items():
            reward = _finite(rewards.get(agent, 0.0), agent)
            seat.credit(reward, terminated[agent], cut[agent], _json_safe(infos.get(agent, {})))
        truncated |= any(cut.values())
        await asyncio.sleep(0)  # scripted players never yield; thousands of episodes share the loop
    return "truncated" if truncated else "terminated"


def _cut_off(seats: Iterable[_Seat]) -> None:
    for seat in seats:
        if seat.drafts and not seat.drafts[-1].terminated:
            seat.drafts[-1].truncated = True


async def _decide(seat: _Seat, observation: str, info: Mapping[str, Any]) -> Decision:
    """A player's decision; its failure becomes data, a dead engine or a spent budget does not."""
    try:
        return await seat.player.decide(observation, info)
    except (ContextFullError, ActorDiedError, BudgetError, StallError):
        raise
    except Exception as cause:  # a player is user code: any failure is the episode's, not the run's
        raise _FailureError("policy", cause) from cause


async def _guard(where: Where, env: PlayableEnv, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run environment code, beside the loop where it lives in a worker process; its failure becomes data."""
    try:
        off_loop = getattr(env, "off_loop", None)
        return call(*args, **kwargs) if off_loop is None else await off_loop(call, *args, **kwargs)
    except Exception as cause:  # environments are user code: any failure is the episode's, not the run's
        raise _FailureError(where, cause) from cause


def _finite(reward: Any, agent: str) -> float:
    value = float(reward)
    if not math.isfinite(value):
        raise _FailureError("reward", ValueError(f"{agent!r} was rewarded with {value}; rewards must be finite"))
    return value


def _no_instructions(agent: str) -> str:
    return ""


def _json_safe(info: Mapping[str, Any]) -> dict[str, Any]:
    return dict(json.loads(json.dumps(dict(info), default=str))) if info else {}


def _trajectory(agent: str, seat: _Seat, env_id: str, seed: int) -> Trajectory:
    turns = []
    for draft in seat.drafts:
        done = draft.decision.completion
        turns.append(
            Turn(
                agent=agent,
                index=draft.index,
                observation=draft.observation,
                action=draft.decision.action,
                reward=draft.reward,
                terminated=draft.terminated,
                truncated=draft.truncated,
                policy=seat.policy,
                prompt_ids=draft.decision.prompt_ids,
                response_ids=done.token_ids if done else (),
                logprobs=done.logprobs if done else (),
                versions=done.versions if done else (),
                finish_reason=done.finish_reason if done else draft.decision.finish_reason,
                generate_s=draft.decision.generate_s,
                usage=draft.decision.usage,
                info=draft.info,
            )
        )
    return Trajectory(
        agent=agent,
        policy=seat.policy,
        turns=tuple(turns),
        early_reward=seat.early_reward,
        instructions=seat.instructions,
        env_id=env_id,
        seed=seed,
        info=seat.info,
    )


async def all_or_first_error(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; at the first exception the rest is cancelled, awaited, and that exception raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Plays groups of siblings, any number at once.

    Every episode is one asyncio task on the caller's loop; models answer in continuous batches, so thousands of live
    episodes cost little more than their environments.
    """

    make_env: Callable[[], PlayableEnv]
    """A fresh environment per episode."""
    env_id: str
    seats: Seats
    served: Mapping[str, Served] = field(default_factory=dict)
    max_turns: int = 1000
    retries: int = 1
    """How often a failed episode is played again, each time in a fresh environment."""

    async def group(
        self, seed: int, size: int, *, limit: asyncio.Semaphore | None = None, draw: str | None = None
    ) -> EpisodeGroup:
        """Play `size` siblings with one seed and the same opponents.

        Args:
            limit: Bounds how many episodes live at once.
            draw: Names the group, so that what models sample follows from the name, the sibling and the turn and not
                from what engines did before; None samples from the engines' own streams of random numbers.
        """
        if size < 1:
            raise ValueError(f"group of {size} episodes is empty; ask for at least 1")
        limit = limit or asyncio.Semaphore(size)
        episodes = await all_or_first_error(
            self._episode(seed, limit, None if draw is None else f"{draw}/{sibling}") for sibling in range(size)
        )
        return EpisodeGroup(env_id=self.env_id, seed=seed, episodes=tuple(episodes))

    async def _episode(self, seed: int, limit: asyncio.Semaphore, draw: str | None) -> Episode:
        async with limit:
            for attempt in range(self.retries + 1):
                env = None
                try:
                    env = self.make_env()
                    policies = seat_policies(self.seats, env.possible_agents, seed)
                    episode = await play(
                        env,
                        policies,
                        seed=seed,
                        env_id=self.env_id,
                        served=self.served,
                        max_turns=self.max_turns,
                        draw=None if draw is None else f"{draw}/{attempt}",
                    )
                finally:
                    if env is not None:
                        env.close()
                if episode.error is None or attempt == self.retries:
                    return episode
        raise AssertionError("unreachable: the last attempt returns")
