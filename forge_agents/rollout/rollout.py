"""Play episodes: any PettingZoo environment, turn-based or simultaneous, whose observations and actions are text.

In: an environment, players, a seed. Out: an `Episode`, always, even when the environment breaks: a failed episode is
data. Waits for the players' decisions; a player that cannot answer any more (a dead or stalled engine, a spent budget)
raises.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
import traceback
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias, TypeVar

from pettingzoo import AECEnv, ParallelEnv

from forge_agents.envs.env import CONVERSATION, as_json, hook, writable
from forge_agents.envs.foreign import find_lost_reward
from forge_agents.envs.reasoning import visible_action
from forge_agents.errors import (
    ActorDiedError,
    ArgumentError,
    BudgetError,
    MissingExtraError,
    StallError,
    UnknownIdError,
    did_you_mean,
)
from forge_agents.policy import AnyPolicy, PolicyMapping, Random, resolve_policies
from forge_agents.rollout.conversation import ASK_FOR_NOTES, Branches
from forge_agents.rollout.players import ContextFullError, Decision, Player, PolicyEngine, make_player
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.types import EndReason, Episode, EpisodeError, EpisodeGroup, NewMessages, Trajectory, Turn, Where

T = TypeVar("T")
PlayableEnv: TypeAlias = "AECEnv[str, Any, Any] | ParallelEnv[str, Any, Any]"

_MISTAKES = (ArgumentError, MissingExtraError, UnknownIdError)
"""What a caller got wrong: no episode can be played, so these are nobody's data."""
_DECIDED = [each.name for each in fields(Decision) if each.name in Turn.__dataclass_fields__]
"""The part of a turn that the player says."""
_decided_of = attrgetter(*_DECIDED)


class _FailureError(Exception):
    """Carries an environment's or player's exception to the one place where it becomes data."""

    def __init__(self, where: Where, cause: BaseException) -> None:
        self.where, self.cause = where, cause

    def as_error(self) -> EpisodeError:
        told = traceback.TracebackException.from_exception(self.cause)  # its text, even where `str` of it raises
        kind = type(self.cause).__name__
        return EpisodeError(where=self.where, kind=kind, message=str(told), trace="".join(told.format()))


@dataclass(slots=True)
class _Draft:
    """A decision whose reward has not arrived in full."""

    index: int
    observation: str
    decision: Decision
    branch: int
    forked_from: int | None
    new_messages: NewMessages | None
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class _StepResult(NamedTuple):
    """What the environment says to an agent of everything since its last decision."""

    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]

    @classmethod
    def of(cls, agent: str, reward: Any, terminated: Any, truncated: Any, info: Mapping[str, Any]) -> _StepResult:
        plain = {str(name): as_json(value) for name, value in info.items() if name != CONVERSATION}
        return cls(_finite(reward, agent), bool(terminated), bool(truncated), plain)


@dataclass(slots=True)
class _Seat:
    agent: str
    policy: str
    player: Player
    instructions: str
    tools: Sequence[Mapping[str, Any]] = ()
    watch: Callable[[Turn], object] | None = None
    drafts: list[_Draft] = field(default_factory=list)
    initial_reward: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    branches: Branches = field(default_factory=Branches)
    unlisted: bool = False
    """Whether the agent decided without a list of legal actions."""

    def draft(self, index: int, observation: str, info: Mapping[str, Any], decision: Decision) -> None:
        told = info.get(CONVERSATION)
        self.unlisted |= not info.get("legal_actions")
        try:
            branch, after = self.branches.place(told)
            heard_now = None if told is None else _heard(observation, told)
        except (ValueError, KeyError, TypeError) as cause:
            raise _FailureError("observe", cause) from cause
        forked_from = None if after is None else self.drafts[after].index
        self.drafts.append(_Draft(index, observation, decision, branch, forked_from, heard_now))
        if self.watch is not None:
            self.watch(self.turn(self.drafts[-1]))

    def turn(self, draft: _Draft) -> Turn:
        said: dict[str, Any] = {"agent": self.agent, "policy": self.policy, "index": draft.index}
        decided, notes = decision_fields(draft.decision), draft.decision.notes
        if notes is not None:
            decided["notes"] = Turn(**said, observation=ASK_FOR_NOTES, reward=0.0, **decision_fields(notes))
        return Turn(
            **said,
            observation=draft.observation,
            branch=draft.branch,
            forked_from=draft.forked_from,
            new_messages=draft.new_messages,
            reward=draft.reward,
            terminated=draft.terminated,
            truncated=draft.truncated,
            info=draft.info,
            **decided,
        )

    def add_reward(self, reward: float) -> None:
        """To the last decision, or to the trajectory where there was none yet."""
        if self.drafts:
            self.drafts[-1].reward += reward
        else:
            self.initial_reward += reward

    def record(self, result: _StepResult) -> None:
        self.add_reward(result.reward)
        self.info = result.info
        if self.drafts:
            draft = self.drafts[-1]
            draft.terminated, draft.truncated, draft.info = result.terminated, result.truncated, result.info


SeatOf: TypeAlias = Callable[[str], Awaitable[_Seat]]
"""The seat of an agent, taken when the agent is first met."""


async def play(
    env: PlayableEnv,
    policies: Mapping[str, AnyPolicy],
    *,
    seed: int,
    env_id: str = "",
    engines: Mapping[str, PolicyEngine] | None = None,
    max_turns: int = 1000,
    rng_key: str | None = None,
    episode_index: int = 0,
    watch: Callable[[Turn], object] | None = None,
) -> Episode:
    """Play one episode to its end.

    Args:
        env: A PettingZoo environment; it is reset with `seed`. In a parallel one all live agents decide at once.
        engines: Engines of the model policies, by policy name.
        max_turns: Decisions after which the episode is cut off, whatever the environment says; a round that has begun
            is played.
        rng_key: Names the episode, so that what models sample in it follows from the name and the turn; None samples
            from the engines' own streams of random numbers.
        episode_index: Its place in its group, from 0.
        watch: Told each turn as it is decided, before the environment hears of it: rewards and infos come later.

    Returns:
        The episode, with a trajectory for every agent that took part. If the environment or a scripted player raised,
        an endpoint failed or a person left, `error` says so and the turns so far are kept.

    Raises:
        ActorDiedError, StallError: An engine is gone or does not answer.
        BudgetError: An endpoint's budget is spent.
        ValueError: A model has no engine, or the environment no oracle.
    """
    started = time.perf_counter()
    seats: dict[str, _Seat] = {}
    error: EpisodeError | None = None
    end: EndReason = "error"

    async def seat_of(agent: str) -> _Seat:
        if agent not in seats:
            if agent not in policies and agent not in env.possible_agents:
                seen = f"{agent!r} takes part and is not in possible_agents={list(env.possible_agents)}"
                raise _FailureError("step", ValueError(seen + did_you_mean(str(agent), policies)))
            instructions, tools = await _guard("observe", env, _told, env, agent)

            async def compact(left_out: Sequence[tuple[str, str]]) -> str:
                return str(await _guard("observe", env, _compact, env, agent, left_out))

            player = make_player(
                policies[agent],
                agent=agent,
                episode_seed=seed,
                instructions=instructions,
                engines=engines or {},
                tools=tools,
                rng_key=rng_key,
                episode_index=episode_index,
                compact=compact,
                spec=getattr(env, "spec", None),
            )
            seats[agent] = _Seat(agent, policies[agent].name, player, instructions, tools, watch)
        return seats[agent]

    try:
        opening, agents = await _guard("reset", env, lambda: (env.reset(seed=seed), list(env.agents)))
        for agent in agents:
            await seat_of(agent)
        if isinstance(env, ParallelEnv):
            end = await _play_rounds(env, seat_of, opening, max_turns)
        else:
            end = await _play_turns(env, seat_of, max_turns)
    except _FailureError as failed:
        error = failed.as_error()
    if end in ("turn_limit", "context"):
        for seat in seats.values():
            if seat.drafts and not seat.drafts[-1].terminated:
                seat.drafts[-1].truncated = True
    _warn_of_illegal_text([seat for seat in seats.values() if isinstance(policies[seat.agent], Random)], env_id)
    return Episode(
        env_id=env_id,
        seed=seed,
        trajectories={agent: _trajectory(agent, seat, env_id, seed) for agent, seat in seats.items()},
        error=error,
        end_reason=end,
        duration_s=time.perf_counter() - started,
    )


def _warn_of_illegal_text(seats: Sequence[_Seat], env_id: str) -> None:
    """Warn where the random text of random players, for want of a list of legal actions, was illegal."""
    for seat in seats:
        forfeits = seat.info.get("forfeits")
        forfeited = isinstance(forfeits, (list, tuple)) and seat.agent in forfeits
        if seat.unlisted and (forfeited or any(draft.info.get("illegal") for draft in seat.drafts)):
            warnings.warn(  # shown once per environment
                f"{env_id or 'the environment'} does not always list legal actions, so fa.Random() writes random "
                f"letters there, which are illegal{' and forfeit the game' if forfeited else ''}. Use another player, "
                "such as fa.Scripted(...), or let legal_actions() of the environment list them",
                RuntimeWarning,
                stacklevel=2,
            )


async def _play_turns(env: AECEnv[str, Any, Any], seat_of: SeatOf, max_turns: int) -> EndReason:
    """Step one agent after another until nobody is left, or the episode is cut off; then everybody is paid."""
    index, truncated = 0, False
    reported: dict[str, float] = {}
    end: EndReason | None = None
    tell = await _guard("observe", env, hook, env, "about_answer")
    try:
        while (seen := await _guard("observe", env, _observe, env, reported)) is not None:
            agent, observation, result, info = seen
            seat = await seat_of(agent)
            seat.record(result)
            truncated |= result.truncated
            if result.terminated or result.truncated:
                await _record_all(seat_of, await _guard("step", env, _step, env, None, reported))
                continue
            if index >= max_turns:
                end = "turn_limit"
                break
            try:
                decision = await _decide(seat, observation, info)
            except ContextFullError:
                end = "context"
                break
            seat.draft(index, observation, info, decision)
            index += 1
            owed = await _guard("step", env, _step, env, decision, reported, tell)
            await _record_all(seat_of, owed)
            await asyncio.sleep(0)  # scripted players never yield; thousands of episodes share the loop
    except _FailureError:
        with contextlib.suppress(_FailureError):  # the first failure is the episode's
            await _record_rest(env, seat_of, reported)
        raise
    await _record_rest(env, seat_of, reported)
    return end or ("truncated" if truncated else "terminated")


def _observe(
    env: AECEnv[str, Any, Any], reported: dict[str, float]
) -> tuple[str, str, _StepResult, Mapping[str, Any]] | None:
    """Whose turn it is, what it sees and what its last step came to; None when nobody is left.

    Args:
        reported: Accounts as they stood when their agents were last reported on, of those that nobody paid into since.
    """
    if not env.agents:
        return None
    agent = env.agent_selection
    observation, reward, terminated, truncated, info = env.last()
    result = _StepResult.of(agent, 0.0 if agent in reported else reward, terminated, truncated, info)
    reported.setdefault(agent, result.reward)
    return agent, writable(str(observation)), result, info


def _step(
    env: AECEnv[str, Any, Any], decision: Decision | None, reported: dict[str, float], tell: Any = None
) -> dict[str, _StepResult]:
    """Play; an account is emptied when its agent acts, in PettingZoo's conversion of parallel ones after the round.

    Args:
        decision: Of the agent whose turn it is; None where it only leaves.
        tell: The environment's hook ``about_answer``, or what is no function where it has none.

    Returns:
        What those are owed who are not in any more, and so have no turn to hear it: who left in this step, however it
        did, and who left before and is paid all the same.
    """
    before, acting = list(env.agents), env.agent_selection
    if decision is not None and callable(tell):
        tell(acting, decision.about())
    accounts = dict(env._cumulative_rewards)
    env.step(None if decision is None else _delivered(env, decision))
    if decision is not None and (why := find_lost_reward(env, acting, accounts)):
        raise _FailureError("reward", ValueError(why))
    for agent in list(reported):
        if env.rewards.get(agent) or env._cumulative_rewards.get(agent) != reported[agent]:
            del reported[agent]
    owed = {agent: reward for agent, reward in env.rewards.items() if reward and agent not in before}
    for agent in before:
        if agent not in env.agents and not (decision is None and agent == acting) and agent not in reported:
            owed[agent] = env._cumulative_rewards.get(agent, 0.0)
    return {
        agent: _StepResult.of(
            agent, reward, env.terminations.get(agent, True), env.truncations.get(agent), env.infos.get(agent, {})
        )
        for agent, reward in owed.items()
        if agent not in env.agents
    }


async def _record_all(seat_of: SeatOf, owed: Mapping[str, _StepResult]) -> None:
    for agent, result in owed.items():
        (await seat_of(agent)).record(result)


async def _record_rest(env: AECEnv[str, Any, Any], seat_of: SeatOf, reported: Mapping[str, float]) -> None:
    """Record what everybody who is still in would have been told at its next turn."""

    def owed() -> dict[str, _StepResult]:
        return {
            agent: _StepResult.of(
                agent,
                0.0 if agent in reported else env._cumulative_rewards[agent],
                env.terminations[agent],
                env.truncations[agent],
                env.infos[agent],
            )
            for agent in env.agents
        }

    await _record_all(seat_of, await _guard("reward", env, owed))


async def _play_rounds(
    env: ParallelEnv[str, Any, Any],
    seat_of: SeatOf,
    opening: tuple[Mapping[str, Any], Mapping[str, Any]],
    max_turns: int,
) -> EndReason:
    """Step all live agents together, each deciding while the others do, until nobody is left."""
    index, truncated = 0, False
    seen = await _guard("reset", env, lambda: _views(env, *opening))
    while seen:
        if index >= max_turns:
            return "turn_limit"
        seats = {agent: await seat_of(agent) for agent in seen}
        try:
            decided = await all_or_first_error(_decide(seats[agent], *view) for agent, view in seen.items())
        except ContextFullError:
            return "context"
        decisions = dict(zip(seats, decided, strict=True))
        for agent, seat in seats.items():
            observation, info = seen[agent]
            seat.draft(index, observation, info, decisions[agent])
            index += 1
        results, others, seen = await _guard("step", env, _round, env, decisions)
        for agent, seat in seats.items():
            seat.record(results[agent])
            truncated |= results[agent].truncated
        for agent, reward in others.items():
            (await seat_of(agent)).add_reward(reward)
        await asyncio.sleep(0)  # scripted players never yield; thousands of episodes share the loop
    return "truncated" if truncated else "terminated"


Views: TypeAlias = dict[str, tuple[str, Mapping[str, Any]]]
"""Of those who decide next: what each sees, and its info."""


def _views(env: ParallelEnv[str, Any, Any], observations: Mapping[str, Any], infos: Mapping[str, Any]) -> Views:
    return {agent: (writable(str(observations[agent])), infos.get(agent, {})) for agent in env.agents}


def _round(
    env: ParallelEnv[str, Any, Any], decisions: Mapping[str, Decision]
) -> tuple[dict[str, _StepResult], dict[str, float], Views]:
    """What those who acted are told, what others earn (who left earlier, or join now), and who decides next."""
    actions = {agent: _delivered(env, decision) for agent, decision in decisions.items()}
    observations, rewards, terminated, truncated, infos = env.step(actions)
    results = {
        agent: _StepResult.of(
            agent, rewards.get(agent, 0.0), terminated[agent], truncated[agent], infos.get(agent, {})
        )
        for agent in actions
    }
    others = {agent: _finite(reward, agent) for agent, reward in rewards.items() if agent not in actions}
    return results, others, _views(env, observations, infos)


async def _decide(seat: _Seat, observation: str, info: Mapping[str, Any]) -> Decision:
    """A player's decision; its failure becomes data, a dead engine or a spent budget does not."""
    try:
        decision = await seat.player(observation, info)
        return decision.published((info.get(CONVERSATION) or {}).get("tools", seat.tools))
    except (_FailureError, ContextFullError, ActorDiedError, BudgetError, MissingExtraError, StallError):
        raise
    except Exception as cause:  # a player is user code: any failure is the episode's, not the run's
        raise _FailureError("policy", cause) from cause


async def _guard(where: Where, env: PlayableEnv | None, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run environment code, beside the loop where the environment says so; its failure becomes data."""
    try:
        off_loop = getattr(env, "off_loop", None)
        return call(*args, **kwargs) if off_loop is None else await off_loop(where, call, *args, **kwargs)
    except _FailureError:
        raise
    except (Exception, SystemExit) as cause:  # environments are user code: any failure is the episode's, not the run's
        if where == "make" and isinstance(cause, _MISTAKES):
            raise
        raise _FailureError(where, cause) from cause


def _finite(reward: Any, agent: str) -> float:
    try:
        value = float(reward)
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value):
        raise _FailureError("reward", ValueError(f"{agent!r} was rewarded with {reward!r}; rewards must be finite"))
    return value


def _told(env: PlayableEnv, agent: str) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """A seat's instructions, and the schemas of its tools."""
    tell, offer = hook(env, "instructions"), hook(env, "tool_schemas")
    return "" if tell is None else writable(str(tell(agent))), () if offer is None else tuple(offer(agent))


def _compact(env: PlayableEnv, agent: str, left_out: Sequence[tuple[str, str]]) -> str:
    tell = hook(env, "compact")
    return "" if tell is None else writable(str(tell(agent, left_out) or ""))


def _delivered(env: Any, decision: Decision) -> str:
    """Return what the environment gets of a decision."""
    return visible_action(env, decision.reasoning, decision.action) if decision.reasoning else decision.action


def _heard(observation: str, told: Mapping[str, Any]) -> NewMessages:
    """What a conversation goes on with, as the environment says it."""
    messages = tuple((str(each["role"]), writable(str(each["content"]))) for each in told["messages"])
    alone = bool(observation) and messages == (("user", observation),)
    return NewMessages(messages=() if alone else messages, only_results=bool(told.get("only_results")))


def decision_fields(decision: Decision) -> dict[str, Any]:
    """The fields of a `Turn` that come from the player's decision."""
    return dict(zip(_DECIDED, _decided_of(decision), strict=True))


def _trajectory(agent: str, seat: _Seat, env_id: str, seed: int) -> Trajectory:
    return Trajectory(
        agent=agent,
        policy=seat.policy,
        turns=tuple(map(seat.turn, seat.drafts)),
        initial_reward=seat.initial_reward,
        instructions=seat.instructions,
        env_id=env_id,
        seed=seed,
        info=seat.info,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Plays groups of siblings, any number at once.

    Every episode is one asyncio task on the caller's loop; models answer in continuous batches, so thousands of live
    episodes cost little more than their environments.
    """

    make_env: Callable[[], PlayableEnv]
    """A fresh environment per episode."""
    env_id: str
    policies: PolicyMapping
    engines: Mapping[str, PolicyEngine] = field(default_factory=dict)
    max_turns: int = 1000
    retries: int = 1
    """How often a failed episode is played again, each time in a fresh environment."""
    _live: set[int] = field(default_factory=set, init=False, repr=False, compare=False)
    """Identities of the environments in play."""

    async def group(
        self, seed: int, size: int, *, limit: asyncio.Semaphore | None = None, rng_key: str | None = None
    ) -> EpisodeGroup:
        """Play `size` siblings with one seed and the same opponents.

        Args:
            limit: Bounds how many episodes live at once.
            rng_key: Names the group, so that what models sample follows from the name, the episode and the turn and not
                from what engines did before; None samples from the engines' own streams of random numbers.

        Raises:
            ArgumentError: `make_env` returned an environment that is in play already.
        """
        if isinstance(limit, int):
            raise TypeError(f"limit={limit} is a number; send asyncio.Semaphore({limit}), which other groups may share")
        if size < 1:
            raise ValueError(f"group of {size} episodes is empty; ask for at least 1")
        limit = limit or asyncio.Semaphore(size)
        episodes = await all_or_first_error(
            self._episode(seed, limit, episode_index, None if rng_key is None else f"{rng_key}/{episode_index}")
            for episode_index in range(size)
        )
        return EpisodeGroup(env_id=self.env_id, seed=seed, episodes=tuple(episodes))

    async def _episode(self, seed: int, limit: asyncio.Semaphore, episode_index: int, rng_key: str | None) -> Episode:
        async with limit:
            attempt = 0
            while True:
                episode = await self._attempt(seed, episode_index, None if rng_key is None else f"{rng_key}/{attempt}")
                if episode.error is None or attempt == self.retries:
                    return episode
                attempt += 1

    async def _attempt(self, seed: int, episode_index: int, rng_key: str | None) -> Episode:
        try:
            env = await _guard("make", None, self.make_env)
        except _FailureError as failed:
            error = failed.as_error()
            return Episode(env_id=self.env_id, seed=seed, trajectories={}, error=error, end_reason="error")
        if id(env) in self._live:
            raise ArgumentError(
                f"make_env of {self.env_id} returned one {type(env).__name__} for two episodes that are played at the "
                "same time, and they would share its state; make a new one at each call"
            )
        self._live.add(id(env))
        try:
            return await play(
                env,
                resolve_policies(self.policies, env.possible_agents, seed),
                seed=seed,
                env_id=self.env_id,
                engines=self.engines,
                max_turns=self.max_turns,
                rng_key=rng_key,
                episode_index=episode_index,
            )
        finally:
            beside = getattr(env, "off_loop", None)  # closing a worker's environment may take as long as a step
            try:
                await beside("close", close, env, self.env_id) if beside else close(env, self.env_id)
            finally:
                self._live.discard(id(env))


def agents_of(make_env: Callable[[], PlayableEnv], env_id: str) -> tuple[str, ...]:
    """The possible agents of an environment, which is made, and closed, to ask it.

    Raises:
        Exception: What its constructor raised each time.
    """
    return inspect_env(make_env, env_id, lambda env: tuple(env.possible_agents))


def inspect_env(
    make_env: Callable[[], PlayableEnv], env_id: str, read: Callable[[PlayableEnv], T], *, tries: int = 2
) -> T:
    """What `read` finds in an environment, which is made, and closed, for that.

    Raises:
        Exception: What its constructor raised each time.
    """
    try:
        env = make_env()
        found = read(env)
    except Exception:
        if tries <= 1:
            raise
        return inspect_env(make_env, env_id, read, tries=tries - 1)
    close(env, env_id)
    return found


def close(env: PlayableEnv, env_id: str) -> None:
    """Close an environment; a failure is a warning, because what was played is whole without it."""
    try:
        env.close()
    except (Exception, SystemExit) as error:  # noqa: BLE001  # environments are user code
        told = traceback.TracebackException.from_exception(error)
        at = told.stack[-1]
        warnings.warn(  # shown once where it is always the same
            f"{env_id}: close() raised {type(error).__name__}: {told} ({at.filename}:{at.lineno}); the episode counts, "
            "but what the environment held may be left over",
            RuntimeWarning,
            stacklevel=2,
        )
