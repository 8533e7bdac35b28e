"""Collects episodes in groups: several episodes of one seed, any number of them at the same time."""

from __future__ import annotations

import asyncio
import traceback
import warnings
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias, TypeVar

from forge_agents.display import printable
from forge_agents.envs.env import forked
from forge_agents.errors import USER_ERRORS, ArgumentError
from forge_agents.policy import AnyPolicy, Oracle, PolicyMapping, Random, resolve_policies
from forge_agents.rollout.alternatives import Fork, ForkRule, Forks
from forge_agents.rollout.episode import FailureError, PlayableEnv, play, run_env_code
from forge_agents.rollout.policy_engine import PolicyEngine, sampling_seed
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.types import Alternatives, Episode, EpisodeError, EpisodeGroup

T = TypeVar("T")
_Alternative: TypeAlias = tuple[int, int, int, Episode]
"""Index of the episode, of the turn that was decided again, number of sampled tokens, and the alternative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Plays groups of episodes, any number at once.

    Every episode is an asyncio task on the caller's loop, and models answer in continuous batches, so thousands of
    concurrent episodes cost little more than their environments.
    """

    make_env: Callable[[], PlayableEnv]
    """Creates an environment for each episode."""
    env_id: str
    policies: PolicyMapping
    """A policy for all agents, a mapping from agent to policy, or a function ``(agent, seed) -> policy``."""
    engines: Mapping[str, PolicyEngine] = field(default_factory=dict)
    """Engines of the model policies, by policy name."""
    max_turns: int = 1000
    """Maximum number of decisions per episode."""
    retries: int = 1
    """Number of times that a failed episode is played again, each time in a new environment."""
    forks: ForkRule | None = None
    """Decisions from which each episode is played again, for `EpisodeGroup.alternatives`. None: no decisions."""
    _active: set[int] = field(default_factory=set, init=False, repr=False, compare=False)
    """Identities of the environments in use."""

    async def group(
        self, seed: int, size: int, *, limit: asyncio.Semaphore | None = None, rng_key: str | None = None
    ) -> EpisodeGroup:
        """Play `size` episodes with one seed and the same opponents.

        Args:
            seed: Seed of the environment.
            size: Number of episodes.
            limit: Bounds the number of concurrent episodes.
            rng_key: Unique key of the group. Samples of models then depend only on the key, the episode, the agent and
                the turn, so a resumed run samples the same tokens. None uses the engines' own random streams.

        Raises:
            ArgumentError: `make_env` returned an environment that is already in use.
        """
        if isinstance(limit, int):
            raise TypeError(f"limit={limit} is a number. Send asyncio.Semaphore({limit}), which other groups may share")
        if size < 1:
            raise ValueError(f"group of {size} episodes is empty. Ask for at least 1")
        limit = limit or asyncio.Semaphore(size)
        played = await all_or_first_error(
            self._episode(seed, index, limit, None if rng_key is None else f"{rng_key}/{index}")
            for index in range(size)
        )
        group = EpisodeGroup(env_id=self.env_id, seed=seed, episodes=tuple(episode for episode, _ in played))
        if self.forks is None:
            return group
        alternatives = [alternative for _, of_episode in played for alternative in of_episode]
        return replace(group, alternatives=self._collected(seed, alternatives))

    def _collected(self, seed: int, alternatives: Sequence[_Alternative]) -> Alternatives:
        ordered = sorted(alternatives, key=lambda each: each[:2])  # stable: samples stay in order
        episodes = tuple(episode for *_, episode in ordered)
        return Alternatives(
            decisions=tuple((index, turn) for index, turn, *_ in ordered),
            group=EpisodeGroup(env_id=self.env_id, seed=seed, episodes=episodes),
            tokens=sum(tokens for _, _, tokens, _ in ordered),
        )

    async def _episode(
        self, seed: int, index: int, limit: asyncio.Semaphore, rng_key: str | None
    ) -> tuple[Episode, list[_Alternative]]:
        """Play an episode and its alternatives, again if the episode fails."""
        attempt = 0
        while True:
            key = None if rng_key is None else f"{rng_key}/{attempt}"
            alternatives: list[_Alternative] = []
            if self.forks is None:
                async with limit:
                    episode = await self._attempt(seed, index, key)
            else:
                episode, alternatives = await self._forked(self.forks, seed, index, limit, key)
            if episode.error is None or attempt == self.retries:
                return episode, alternatives
            attempt += 1

    async def _forked(
        self, rule: ForkRule, seed: int, index: int, limit: asyncio.Semaphore, rng_key: str | None
    ) -> tuple[Episode, list[_Alternative]]:
        """Play an episode and, if it does not fail, its alternatives."""
        forks = Forks(rule, rng_key, close=self._close)
        try:
            async with limit:
                episode = await self._attempt(seed, index, rng_key, forks)
                if episode.error is not None:
                    return episode, []
                if forks.one_by_one:
                    return episode, [await job() for job in self._replays(forks, seed, index, rng_key)]
            jobs = self._replays(forks, seed, index, rng_key)
            return episode, await all_or_first_error(_within(limit, job) for job in jobs)
        finally:
            await forks.close()

    async def _attempt(self, seed: int, index: int, rng_key: str | None, forks: Forks | None = None) -> Episode:
        """Make an environment, play an episode in it, and close it."""
        try:
            env = await run_env_code("make", None, self.make_env)
        except FailureError as failure:
            error = failure.as_error()
            return Episode(env_id=self.env_id, seed=seed, trajectories={}, error=error, end_reason="error")
        if id(env) in self._active:
            raise ArgumentError(
                f"make_env of {self.env_id} returned one {type(env).__name__} for two episodes that are played at the "
                "same time, and they would share its state. Make a new one at each call"
            )
        self._active.add(id(env))
        try:
            return await play(
                env,
                resolve_policies(self.policies, env.possible_agents, seed),
                seed=seed,
                env_id=self.env_id,
                engines=self.engines,
                max_turns=self.max_turns,
                rng_key=rng_key,
                episode_index=index,
                forks=forks,
            )
        finally:
            try:
                await run_env_code("close", env, close, env, self.env_id)  # in a worker as slow as a step
            finally:
                self._active.discard(id(env))

    async def _close(self, env: PlayableEnv) -> None:
        await run_env_code("close", env, close, env, self.env_id)

    def _replays(
        self, forks: Forks, seed: int, index: int, rng_key: str | None
    ) -> list[Callable[[], Awaitable[_Alternative]]]:
        """Return a coroutine function for each alternative of an episode."""
        return [
            partial(self._replay, fork, f"{index}/{fork.turn}/{sample}", seed, index, rng_key)
            for fork in sorted(forks, key=lambda fork: fork.turn)
            for sample in range(forks.rule.samples)
        ]

    async def _replay(self, fork: Fork, name: str, seed: int, index: int, rng_key: str | None) -> _Alternative:
        """Play an alternative. Its failure is recorded."""
        env, error = None, fork.error
        if error is None:
            try:
                env = await run_env_code("fork", fork.env, forked, fork.env)
            except FailureError as failure:
                error = failure.as_error()
        if env is None:
            episode = Episode(env_id=self.env_id, seed=seed, trajectories={}, error=error, end_reason="error")
            return index, fork.turn, 0, episode
        policies = resolve_policies(self.policies, env.possible_agents, seed)
        try:
            episode = await play(
                env,
                {agent: _with_own_samples(policy) for agent, policy in policies.items()},
                seed=seed,
                env_id=self.env_id,
                engines=self.engines,
                max_turns=self.max_turns,
                rng_key=None if rng_key is None else f"{rng_key}/alternatives/{name}",
                episode_index=2**32 + sampling_seed(name),  # random players: no index of an episode
                fork=fork,
            )
        finally:
            await self._close(env)
        if episode.error is None and all(turn.index != fork.turn for turn in episode.turns):
            reason = f"a copy of {self.env_id} before turn {fork.turn} had ended. `forge-agents check` tests copies"
            episode = replace(episode, error=EpisodeError(where="fork", kind="RuntimeError", message=reason))
        return index, fork.turn, fork.num_sampled(episode), episode


async def _within(limit: asyncio.Semaphore, job: Callable[[], Awaitable[T]]) -> T:
    async with limit:
        return await job()


def _with_own_samples(policy: AnyPolicy) -> AnyPolicy:
    """Return a policy whose random choices in an alternative differ from those in other episodes."""
    return replace(policy, shared=False) if isinstance(policy, Random | Oracle) else policy


def agents_of(make_env: Callable[[], PlayableEnv], env_id: str) -> tuple[str, ...]:
    """The possible agents of an environment. See `inspect_env`."""
    return inspect_env(make_env, env_id, lambda env: tuple(env.possible_agents))


def inspect_env(make_env: Callable[[], PlayableEnv], env_id: str, read: Callable[[PlayableEnv], T]) -> T:
    """Create an environment, return the result of `read` on it, and close it. If this fails, it is tried again once."""

    def attempt() -> T:
        env = make_env()
        try:
            return read(env)
        finally:
            close(env, env_id)

    try:
        return attempt()
    except Exception:  # noqa: BLE001  # environments are user code
        return attempt()


def close(env: PlayableEnv, env_id: str) -> None:
    """Close an environment. A failure is only a warning, because the episode is complete without it."""
    try:
        env.close()
    except USER_ERRORS as error:  # environments are user code
        exception = traceback.TracebackException.from_exception(error)
        frame, text = exception.stack[-1], printable(str(exception))
        warnings.warn(  # shown once if it is always the same
            f"{env_id}: close() raised {type(error).__name__}: {text} ({frame.filename}:{frame.lineno}). The "
            "episode counts, but what the environment held may be left over",
            RuntimeWarning,
            stacklevel=2,
        )
