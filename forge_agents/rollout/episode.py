"""Plays one episode of a PettingZoo environment, turn-based or parallel, whose observations and actions are text.

A failing environment or player does not raise: the `Episode` records the error. Only failures that concern the whole
run raise: a dead or stalled engine, or a spent budget.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

from pettingzoo import AECEnv, ParallelEnv

from forge_agents.envs.env import (
    CONVERSATION,
    as_json,
    forked,
    hook,
    listed_actions,
    may_be_silent,
    visible_action,
    writable,
)
from forge_agents.envs.foreign import by_agent, find_lost_reward
from forge_agents.errors import (
    USER_ERRORS,
    ActorDiedError,
    ArgumentError,
    BudgetError,
    MismatchError,
    MissingExtraError,
    StallError,
    UnknownIdError,
    did_you_mean,
)
from forge_agents.policy import AnyPolicy, Random
from forge_agents.rollout.alternatives import Fork, Forks
from forge_agents.rollout.conversation import ASK_FOR_NOTES, Branches
from forge_agents.rollout.players import (
    ContextFullError,
    Decision,
    Player,
    make_player,
)
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.runtime.watchdog import CONTROLLER
from forge_agents.types import MAX_REWARD, EndReason, Episode, EpisodeError, NewMessages, Trajectory, Turn, Where

PlayableEnv: TypeAlias = "AECEnv[str, Any, Any] | ParallelEnv[str, Any, Any]"

_CALLER_ERRORS = (ArgumentError, MissingExtraError, UnknownIdError)
"""Mistakes of the caller, with which no episode can be played. Such mistakes are raised and not recorded."""
_DECISION_FIELDS = [each.name for each in fields(Decision) if each.name in Turn.__dataclass_fields__]
_decision_values = attrgetter(*_DECISION_FIELDS)


def decision_fields(decision: Decision) -> dict[str, Any]:
    """The fields of a `Turn` that come from the player's decision."""
    return dict(zip(_DECISION_FIELDS, _decision_values(decision), strict=True))


class FailureError(Exception):
    """Carries an environment's or player's exception to the place where it is recorded."""

    def __init__(self, where: Where, cause: BaseException, agent: str = "") -> None:
        self.where, self.cause, self.agent = where, cause, agent

    def as_error(self) -> EpisodeError:
        """The record of the failure."""
        exception = traceback.TracebackException.from_exception(self.cause)  # works even if `str` of the cause raises
        trace = "".join(exception.format())
        kind = type(self.cause).__name__
        return EpisodeError(where=self.where, kind=kind, message=str(exception), trace=trace, agent=self.agent)


class _StepResult(NamedTuple):
    """Outcome of a step for one agent, with checked rewards and a JSON-safe info."""

    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    session_rewards: tuple[float, ...] | None

    @classmethod
    def of(cls, agent: str, reward: Any, terminated: Any, truncated: Any, info: Mapping[str, Any]) -> _StepResult:
        plain = {str(name): as_json(value) for name, value in info.items() if name != CONVERSATION}
        paid = (info.get(CONVERSATION) or {}).get("session_rewards")
        sessions = None if paid is None else tuple(_finite(each, agent) for each in paid)
        return cls(_finite(reward, agent), bool(terminated), bool(truncated), plain, sessions)


@dataclass(slots=True)
class _Agent:
    """An agent of an episode: its player, and its turns so far as fields of `Turn`, which a later reward completes."""

    name: str
    policy: AnyPolicy
    player: Player
    instructions: str
    tools: Sequence[Mapping[str, Any]] | None
    watch: Callable[[Turn], object] | None
    drafts: list[dict[str, Any]] = field(default_factory=list)
    """Fields of the turns so far. The reward of the last one is not yet complete."""
    initial_reward: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    session_rewards: tuple[float, ...] | None = None
    branches: Branches = field(default_factory=Branches)
    without_legal_actions: bool = False
    """Whether it decided at random at least once without a list of legal actions."""
    refusal: Any = None
    """What the environment called illegal in the last decision, if the agent's info had no such entry before."""
    may_be_silent: bool = False
    """Whether the environment judges an empty answer if the context is full. Otherwise the episode ends."""

    async def decide(self, observation: str, info: Mapping[str, Any]) -> Decision:
        """Ask the player. Its failure is recorded, except for a dead engine, wrong weights or a spent budget.

        A player whose context is full gives an empty answer if the environment judges it (`may_be_silent`). Otherwise
        it could end each game that it is about to lose.
        """
        if info.get(CONVERSATION) and getattr(self.policy, "context", None) == "newest":
            raise ValueError(
                f"policy {self.policy.name!r} has context='newest', but a program or a side conversation of the "
                "environment chooses the messages that its model reads. Remove context="
            )
        try:
            decision = await self.player.decide(
                observation, info if self.refusal is None else {"illegal": self.refusal, **info}
            )
            return decision.published((info.get(CONVERSATION) or {}).get("tools", self.tools))
        except ContextFullError:
            if not self.may_be_silent:
                raise
            return Decision(action="", finish_reason="context")
        except StallError as stall:
            if stall.who != CONTROLLER:
                raise
            raise FailureError("policy", stall, self.name) from stall  # the watchdog interrupted a script
        except (FailureError, ActorDiedError, BudgetError, MismatchError, MissingExtraError):
            raise
        except (Exception, SystemExit) as cause:  # players are user code: any failure concerns only the episode
            raise FailureError("policy", cause, self.name) from cause

    def add_decision(self, index: int, observation: str, info: Mapping[str, Any], decision: Decision) -> None:
        """Begin a turn, whose `index` is its place among the turns of all agents."""
        conversation = decision.conversation or info.get(CONVERSATION)
        self.without_legal_actions |= isinstance(self.policy, Random) and not listed_actions(info)
        try:
            branch, after = self.branches.place(conversation)
            messages = None if conversation is None else _new_messages(observation, conversation)
        except (ValueError, KeyError, TypeError) as cause:
            raise FailureError("observe", cause) from cause
        common: dict[str, Any] = {"agent": self.name, "policy": self.policy.name, "index": index, "reward": 0.0}
        values, notes = decision_fields(decision), decision.notes
        if notes is not None:
            values["notes"] = Turn(**common, observation=ASK_FOR_NOTES, **decision_fields(notes))
        forked_from = None if after is None else self.drafts[after]["index"]
        session = 0 if conversation is None else conversation.get("session", 0)
        place = {"branch": branch, "session": session, "forked_from": forked_from, "new_messages": messages}
        self.drafts.append({**common, "observation": observation, **place, **values})
        if self.watch is not None:
            self.watch(Turn(**self.drafts[-1]))

    def add_reward(self, reward: float) -> None:
        """Add to the reward of the last decision, or to the initial reward if there was no decision."""
        if self.drafts:
            self.drafts[-1]["reward"] += reward
        else:
            self.initial_reward += reward

    def record(self, result: _StepResult) -> None:
        """Add the result of a step to the last turn."""
        self.add_reward(result.reward)
        # an environment may clear all infos in each step, before the agent's next turn
        refused = {} if self.refusal is None else {"illegal": as_json(self.refusal)}
        self.info, self.session_rewards = refused | result.info, result.session_rewards
        if self.drafts:
            self.drafts[-1] |= {"terminated": result.terminated, "truncated": result.truncated, "info": self.info}

    def copy(self) -> _Agent:
        """Return a copy of the turns so far. The copy shares the player."""
        return replace(self, drafts=[dict(draft) for draft in self.drafts], branches=copy.deepcopy(self.branches))

    def resume(self, other: _Agent, state: Any) -> None:
        """Continue the turns of `other`, whose player had `state`."""
        copied = other.copy()
        self.drafts, self.branches, self.initial_reward = copied.drafts, copied.branches, other.initial_reward
        self.info, self.session_rewards = other.info, other.session_rewards
        self.without_legal_actions, self.refusal = other.without_legal_actions, other.refusal
        self.player.resume(state)

    def trajectory(self, env_id: str, seed: int) -> Trajectory:
        return Trajectory(
            agent=self.name,
            policy=self.policy.name,
            turns=tuple(Turn(**draft) for draft in self.drafts),
            initial_reward=self.initial_reward,
            instructions=self.instructions,
            env_id=env_id,
            seed=seed,
            info=self.info,
            session_rewards=self.session_rewards,
        )


class _Agents(dict[str, _Agent]):
    """The agents of one episode, each created when it is first met."""

    def __init__(
        self,
        env: PlayableEnv,
        policies: Mapping[str, AnyPolicy],
        watch: Callable[[Turn], object] | None,
        options: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self._env, self._policies, self._watch, self._options = env, policies, watch, options

    async def get_or_create(self, name: str) -> _Agent:
        """Return an agent. Its player is made when it is first met, as instructions and tools may differ by episode."""
        if name in self:
            return self[name]
        env, policies = self._env, self._policies
        if name not in policies and name not in env.possible_agents:
            problem = f"{name!r} takes part and is not in possible_agents={list(env.possible_agents)}"
            raise FailureError("step", ValueError(problem + did_you_mean(str(name), policies)))
        instructions, tools = await run_env_code("observe", env, _instructions_and_tools, env, name)

        async def compact(turns: Sequence[tuple[str, str]]) -> str:
            return str(await run_env_code("observe", env, _compact, env, name, turns))

        spec = getattr(env, "spec", None)
        player = make_player(
            policies[name],
            agent=name,
            instructions=instructions,
            tools=tools,
            compact=compact,
            spec=spec,
            **self._options,
        )
        agent = _Agent(name, policies[name], player, instructions, tools, self._watch, may_be_silent=may_be_silent(env))
        self[name] = agent
        return self[name]

    async def record(self, results: Mapping[str, _StepResult], other_rewards: Mapping[str, float]) -> None:
        """Record the results of a step, and rewards of agents that have left before or join now."""
        for name, result in results.items():
            (await self.get_or_create(name)).record(result)
        for name, reward in other_rewards.items():
            (await self.get_or_create(name)).add_reward(reward)

    def copies(self) -> dict[str, tuple[_Agent, Any]]:
        """Return the state of all agents, for `resume`."""
        return {name: (agent.copy(), agent.player.state()) for name, agent in self.items()}

    async def resume(self, copies: Mapping[str, tuple[_Agent, Any]]) -> None:
        """Continue as agents whose state was copied, with new players."""
        for name, (agent, state) in copies.items():
            (await self.get_or_create(name)).resume(agent, state)


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
    forks: Forks | None = None,
    fork: Fork | None = None,
) -> Episode:
    """Play one episode to its end.

    Args:
        env: A PettingZoo environment, to be reset with `seed`. In a parallel one all live agents decide at once.
        policies: Policy of each agent.
        seed: Seed of the environment.
        env_id: Id of the environment, for the record.
        engines: Engines of the model policies, by policy name.
        max_turns: Maximum number of decisions. A round that has begun is finished.
        rng_key: Unique key of the episode. Samples of models then depend only on the key, the agent and the turn, so a
            resumed run repeats them. None uses the engines' own random streams.
        episode_index: Index of the episode in its group, from 0.
        watch: Called with each turn when it is decided, before its reward and info are known.
        forks: Receives copies of the episode before the decisions that its rule chooses.
        fork: Fork of an episode to continue, with `env` as a copy of its environment. None resets `env`.

    Returns:
        The episode, with a trajectory for every agent that took part. If the environment or a scripted player raised,
        an endpoint failed or a person left, `error` says so, and the turns so far are kept.

    Raises:
        ActorDiedError, StallError: An engine has died or does not answer.
        BudgetError: An endpoint's budget is spent.
        ValueError: A model has no engine, or the environment has no oracle.
    """
    start = time.perf_counter()
    options = {"episode_seed": seed, "engines": engines or {}, "rng_key": rng_key, "episode_index": episode_index}
    agents = _Agents(env, policies, watch, options)
    error: EpisodeError | None = None
    end: EndReason = "error"
    try:
        opening = None
        if fork is None:
            opening, names = await run_env_code("reset", env, lambda: (env.reset(seed=seed), list(env.agents)))
            for name in names:
                await agents.get_or_create(name)
        else:
            await agents.resume(fork.agents)
        if isinstance(env, ParallelEnv):
            end = await _play_rounds(env, agents, opening, max_turns, forks=forks, fork=fork)
        else:
            end = await _play_turns(env, agents, max_turns, forks=forks, fork=fork)
    except FailureError as failure:
        error = failure.as_error()
    if end in ("turn_limit", "context"):
        for agent in agents.values():
            if agent.drafts and not agent.drafts[-1].get("terminated"):
                agent.drafts[-1]["truncated"] = True
    _warn_of_illegal_text(agents.values(), env_id)
    return Episode(
        env_id=env_id,
        seed=seed,
        trajectories={name: agent.trajectory(env_id, seed) for name, agent in agents.items()},
        error=error,
        end_reason=end,
        duration_s=time.perf_counter() - start,
    )


async def run_env_code(
    where: Where, env: PlayableEnv | None, call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Run code of an environment, in a worker if it has one.

    Raises:
        FailureError: The code failed.
    """
    off_loop = None
    try:
        off_loop = getattr(env, "off_loop", None)
        return call(*args, **kwargs) if off_loop is None else await off_loop(where, call, *args, **kwargs)
    except FailureError:
        raise
    except USER_ERRORS as cause:  # environments are user code: any failure concerns only the episode
        if off_loop is not None and isinstance(cause, asyncio.CancelledError | GeneratorExit):
            raise  # the episode was canceled
        if where == "make" and isinstance(cause, _CALLER_ERRORS):
            raise
        raise FailureError(where, cause) from cause


async def _fork(forks: Forks, env: PlayableEnv, decision: Decision, **state: Any) -> None:
    """Copy the episode before `decision`, if the rule chooses it. `state` are fields of `Fork`."""
    if (place := forks.place(decision)) is None:
        return
    try:
        fork = Fork(**state, env=await run_env_code("fork", env, forked, env))
    except FailureError as failure:
        fork = Fork(**state, error=failure.as_error())
    await forks.put(place, fork)


# ---- turn-based environments


async def _play_turns(
    env: AECEnv[str, Any, Any], agents: _Agents, max_turns: int, *, forks: Forks | None, fork: Fork | None
) -> EndReason:
    """Step one agent after another until none is left or the episode is cut off, then pay all agents."""
    index, truncated = (0, False) if fork is None else (fork.start, fork.truncated)
    reported: dict[str, float] = {} if fork is None else dict(fork.reported)
    end: EndReason | None = None
    about_answer = await run_env_code("observe", env, hook, env, "about_answer")
    try:
        while (view := await run_env_code("observe", env, _observe, env, reported)) is not None:
            name, observation, result, info = view
            agent = await agents.get_or_create(name)
            agent.record(result)
            truncated |= result.truncated
            if result.terminated or result.truncated:
                results, other_rewards, _ = await run_env_code("step", env, _step, env, None, reported)
                await agents.record(results, other_rewards)
                continue
            if index >= max_turns:
                end = "turn_limit"
                break
            before = agents.copies() if forks is not None and agent.policy.name in forks.rule.policies else None
            try:
                decision = await agent.decide(observation, info)
            except ContextFullError:
                end = "context"
                break
            if forks is not None and before is not None:
                state = {"turn": index, "start": index, "truncated": truncated, "reported": dict(reported)}
                await _fork(forks, env, decision, agents=before, **state)
            agent.add_decision(index, observation, info, decision)
            index += 1
            results, other_rewards, agent.refusal = await run_env_code(
                "step", env, _step, env, decision, reported, about_answer
            )
            await agents.record(results, other_rewards)
            await asyncio.sleep(0)  # scripted players never yield, and thousands of episodes share the loop
    except FailureError:
        with contextlib.suppress(FailureError):  # the first failure is the episode's
            await _record_rest(env, agents, reported)
        raise
    await _record_rest(env, agents, reported)
    return end or ("truncated" if truncated else "terminated")


def _observe(
    env: AECEnv[str, Any, Any], reported: dict[str, float]
) -> tuple[str, str, _StepResult, Mapping[str, Any]] | None:
    """The agent whose turn it is, its observation and the result of its last step, or None if no agent is left.

    `reported` are cumulative rewards that were reported to their agents and have not changed since.
    """
    if not env.agents:
        return None
    agent = env.agent_selection
    try:
        observation, reward, terminated, truncated, info = env.last()
    except KeyError as error:
        if agent in env.agents:
            raise
        raise ValueError(f"agent_selection is {agent!r}, which has left. The agents are {env.agents}") from error
    result = _StepResult.of(agent, 0.0 if agent in reported else reward, terminated, truncated, info)
    reported.setdefault(agent, result.reward)
    text = "" if terminated or truncated else _text(observation, f"the observation of {agent!r}")
    return agent, text, result, info


def _step(
    env: AECEnv[str, Any, Any], decision: Decision | None, reported: dict[str, float], about_answer: Any = None
) -> tuple[dict[str, _StepResult], dict[str, float], Any]:
    """Step the environment. Without a decision the agent only leaves.

    A cumulative reward is reset when its agent acts, or in PettingZoo's conversion of parallel environments after the
    round. Returns the results of agents that left in this step without a turn to receive them, rewards of agents that
    left earlier, and a new ``"illegal"`` of the acting agent.
    """
    before, acting = list(env.agents), env.agent_selection
    was_illegal = env.infos.get(acting, {}).get("illegal")
    if decision is not None and callable(about_answer):
        about_answer(acting, decision.about())
    accounts = dict(env._cumulative_rewards)
    env.step(None if decision is None else _delivered_text(env, decision))
    stays = decision is None and acting in env.agents and env.agent_selection == acting
    if stays and (env.terminations[acting] or env.truncations[acting]):
        raise ValueError(
            f"{acting!r} has ended and step(None) did not remove it from agents. Begin step() with: if "
            "self.terminations[agent] or self.truncations[agent]: return self._was_dead_step(action)"
        )
    if decision is not None and (reason := find_lost_reward(env, acting, accounts)):
        raise FailureError("reward", ValueError(reason))
    for agent in list(reported):
        if env.rewards.get(agent) or env._cumulative_rewards.get(agent) != reported[agent]:
            del reported[agent]
    paid = {agent: reward for agent, reward in env.rewards.items() if reward and agent not in before}
    other_rewards = {agent: _finite(reward, agent) for agent, reward in paid.items() if agent not in env.agents}
    excluded = {*env.agents, *reported}  # they have a turn left, or their last reward
    excluded |= {acting} if decision is None else set()
    results = {
        agent: _StepResult.of(
            agent,
            env._cumulative_rewards.get(agent, 0.0),
            env.terminations.get(agent, True),
            env.truncations.get(agent),
            env.infos.get(agent, {}),
        )
        for agent in before
        if agent not in excluded
    }
    return results, other_rewards, None if was_illegal else env.infos.get(acting, {}).get("illegal") or None


async def _record_rest(env: AECEnv[str, Any, Any], agents: _Agents, reported: Mapping[str, float]) -> None:
    """Record for all remaining agents what they would have received at their next turn."""

    def results() -> dict[str, _StepResult]:
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

    await agents.record(await run_env_code("reward", env, results), {})


# ---- parallel environments

_Views: TypeAlias = dict[str, tuple[str, Mapping[str, Any]]]
"""Observation and info of each agent that decides next."""


async def _play_rounds(
    env: ParallelEnv[str, Any, Any],
    agents: _Agents,
    opening: tuple[Mapping[str, Any], Mapping[str, Any]] | None,
    max_turns: int,
    *,
    forks: Forks | None,
    fork: Fork | None,
) -> EndReason:
    """Step all live agents together, each deciding while the others do, until none is left."""
    index, truncated = (0, False) if fork is None else (fork.start, fork.truncated)
    same: Mapping[str, Decision] = {}
    if fork is not None:
        views, same = dict(fork.views), fork.decisions
    else:
        views = await run_env_code("reset", env, lambda: _views(env, *by_agent("reset", opening)))
    last_turns = {name: agent.drafts[-1] for name, agent in agents.items() if agent.drafts}
    ended = {name for name, last in last_turns.items() if last.get("terminated") or last.get("truncated")}
    while views:
        if index >= max_turns:
            return "turn_limit"
        deciding = {name: await agents.get_or_create(name) for name in views}
        before = None if forks is None else agents.copies()
        asked = [name for name in views if name not in same]
        try:
            answers = await all_or_first_error(deciding[name].decide(*views[name]) for name in asked)
        except ContextFullError:
            return "context"
        new = dict(zip(asked, answers, strict=True))
        decisions = {name: new[name] if name in new else same[name] for name in deciding}
        if forks is not None and before is not None:
            state = {"start": index, "truncated": truncated, "views": views}
            await _fork_round(forks, env, agents, before=before, decisions=decisions, state=state)
        same = {}
        for name, agent in deciding.items():
            observation, info = views[name]
            agent.add_decision(index, observation, info, decisions[name])
            index += 1
        results, other_rewards, views = await run_env_code("step", env, _round, env, decisions, ended)
        await agents.record(results, other_rewards)
        truncated |= any(result.truncated for result in results.values())
        await asyncio.sleep(0)  # scripted players never yield, and thousands of episodes share the loop
    return "truncated" if truncated else "terminated"


async def _fork_round(
    forks: Forks,
    env: ParallelEnv[str, Any, Any],
    agents: _Agents,
    *,
    before: Mapping[str, tuple[_Agent, Any]],
    decisions: Mapping[str, Decision],
    state: Mapping[str, Any],
) -> None:
    """Copy the episode for each chosen decision of a round. The others of the round have decided in the copy."""
    after = agents.copies()
    for place, (name, decision) in enumerate(decisions.items()):
        if agents[name].policy.name in forks.rule.policies:
            others = {other: each for other, each in decisions.items() if other != name}
            copies = {**after, name: before[name]}
            turn = state["start"] + place
            await _fork(forks, env, decision, turn=turn, agents=copies, decisions=others, **state)


def _views(
    env: ParallelEnv[str, Any, Any],
    observations: Mapping[str, Any],
    infos: Mapping[str, Any],
    *,
    ended: Collection[str] = (),
) -> _Views:
    live = [agent for agent in env.agents if agent not in ended]
    if missing := [agent for agent in live if agent not in observations]:
        raise ValueError(f"{missing[0]!r} takes part but has no observation. Return one for each agent")
    texts = {agent: _text(observations[agent], f"the observation of {agent!r}") for agent in live}
    return {agent: (text, infos.get(agent) or {}) for agent, text in texts.items()}


def _round(
    env: ParallelEnv[str, Any, Any], decisions: Mapping[str, Decision], ended: set[str]
) -> tuple[dict[str, _StepResult], dict[str, float], _Views]:
    """Results of the agents that acted, rewards of others (left earlier, or joining now), and the next views.

    Adds the agents that end to `ended`. An environment may keep them in its `agents`.
    """
    actions = {agent: _delivered_text(env, decision) for agent, decision in decisions.items()}
    observations, rewards, terminated, truncated, infos = by_agent("step", env.step(actions))
    results = {
        agent: _StepResult.of(
            agent,
            rewards.get(agent, 0.0),
            terminated.get(agent) or (agent not in env.agents and not truncated.get(agent)),
            truncated.get(agent),
            infos.get(agent) or {},
        )
        for agent in actions
    }
    ended |= {agent for agent, result in results.items() if result.terminated or result.truncated}
    other_rewards = {agent: _finite(reward, agent) for agent, reward in rewards.items() if agent not in actions}
    return results, other_rewards, _views(env, observations, infos, ended=ended)


# ---- helpers


def _finite(reward: Any, agent: str) -> float:
    """Return a reward as a float. Raises FailureError unless it is finite and at most `MAX_REWARD`."""
    try:
        value = float(reward)
    except (TypeError, ValueError, OverflowError):
        value = math.nan
    if not abs(value) <= MAX_REWARD:
        problem = f"{agent!r} was rewarded with {reward!r}. Rewards must be finite and at most {MAX_REWARD:g}"
        raise FailureError("reward", ValueError(problem))
    return value


def _text(value: object, subject: str) -> str:
    """Return a text of the environment without lone surrogates. Raises TypeError for other types."""
    if not isinstance(value, str):
        raise TypeError(f"{subject} is {type(value).__name__}, not text. Return a string. fa.wrap adapts array games")
    return writable(value)


def _delivered_text(env: PlayableEnv, decision: Decision) -> str:
    """Return the action that the environment gets: with the reasoning only if its class asks for that."""
    return visible_action(env, decision.reasoning, decision.action) if decision.reasoning else decision.action


def _instructions_and_tools(env: PlayableEnv, agent: str) -> tuple[str, Sequence[Mapping[str, Any]] | None]:
    instructions, schemas = hook(env, "instructions"), hook(env, "tool_schemas")
    text = "" if instructions is None else _text(instructions(agent), f"the result of instructions({agent!r})")
    return text, None if schemas is None else tuple(schemas(agent))


def _compact(env: PlayableEnv, agent: str, turns: Sequence[tuple[str, str]]) -> str:
    compact = hook(env, "compact")
    return "" if compact is None else writable(str(compact(agent, turns) or ""))


def _new_messages(observation: str, conversation: Mapping[str, Any]) -> NewMessages:
    messages = tuple((str(each["role"]), writable(str(each["content"]))) for each in conversation["messages"])
    same = bool(observation) and messages == (("user", observation),)
    return NewMessages(messages=() if same else messages, only_results=bool(conversation.get("only_results")))


def _warn_of_illegal_text(agents: Iterable[_Agent], env_id: str) -> None:
    """Warn if the random text of random players without a list of legal actions was illegal."""
    for agent in agents:
        if not agent.without_legal_actions:
            continue
        forfeits = agent.info.get("forfeits")
        forfeited = isinstance(forfeits, (list, tuple)) and agent.name in forfeits
        if forfeited or any(draft.get("info", {}).get("illegal") for draft in agent.drafts):
            warnings.warn(  # shown once per environment
                f"{env_id or 'the environment'} does not always list legal actions, so fa.Random() writes random "
                f"letters there, which are illegal{' and forfeit the game' if forfeited else ''}. Use another player, "
                "such as fa.Scripted(...), or let legal_actions() of the environment list them",
                RuntimeWarning,
                stacklevel=2,
            )
