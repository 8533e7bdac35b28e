"""Collects episodes in groups: several episodes of one seed, any number of them at the same time."""

from __future__ import annotations

import asyncio
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from forge_agents.display import printable
from forge_agents.errors import ArgumentError
from forge_agents.policy import PolicyMapping, resolve_policies
from forge_agents.rollout.episode import FailureError, PlayableEnv, play, run_env_code
from forge_agents.rollout.players import PolicyEngine
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.types import Episode, EpisodeGroup

T = TypeVar("T")


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
    """One policy for all agents, a mapping from agent to policy, or a function ``(agent, seed) -> policy``."""
    engines: Mapping[str, PolicyEngine] = field(default_factory=dict)
    """Engines of the model policies, by policy name."""
    max_turns: int = 1000
    """Maximum number of decisions per episode."""
    retries: int = 1
    """Number of times that a failed episode is played again, each time in a new environment."""
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
        episodes = await all_or_first_error(
            self._episode(seed, limit, index, None if rng_key is None else f"{rng_key}/{index}")
            for index in range(size)
        )
        return EpisodeGroup(env_id=self.env_id, seed=seed, episodes=tuple(episodes))

    async def _episode(self, seed: int, limit: asyncio.Semaphore, index: int, rng_key: str | None) -> Episode:
        async with limit:
            attempt = 0
            while True:
                episode = await self._attempt(seed, index, None if rng_key is None else f"{rng_key}/{attempt}")
                if episode.error is None or attempt == self.retries:
                    return episode
                attempt += 1

    async def _attempt(self, seed: int, index: int, rng_key: str | None) -> Episode:
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
            )
        finally:
            off_loop = getattr(env, "off_loop", None)  # closing a worker's environment may take as long as a step
            try:
                await off_loop("close", close, env, self.env_id) if off_loop else close(env, self.env_id)
            finally:
                self._active.discard(id(env))


def agents_of(make_env: Callable[[], PlayableEnv], env_id: str) -> tuple[str, ...]:
    """The possible agents of an environment. See `inspect_env`."""
    return inspect_env(make_env, env_id, lambda env: tuple(env.possible_agents))


def inspect_env(
    make_env: Callable[[], PlayableEnv], env_id: str, read: Callable[[PlayableEnv], T], *, tries: int = 2
) -> T:
    """Create an environment, return the result of `read` on it, and close it.

    Raises:
        Exception: The error of the last of `tries` attempts.
    """
    try:
        env = make_env()
        result = read(env)
    except Exception:
        if tries <= 1:
            raise
        return inspect_env(make_env, env_id, read, tries=tries - 1)
    close(env, env_id)
    return result


def close(env: PlayableEnv, env_id: str) -> None:
    """Close an environment. A failure is only a warning, because the episode is complete without it."""
    try:
        env.close()
    except (Exception, SystemExit) as error:  # noqa: BLE001  # environments are user code
        exception = traceback.TracebackException.from_exception(error)
        frame, text = exception.stack[-1], printable(str(exception))
        warnings.warn(  # shown once if it is always the same
            f"{env_id}: close() raised {type(error).__name__}: {text} ({frame.filename}:{frame.lineno}). The "
            "episode counts, but what the environment held may be left over",
            RuntimeWarning,
            stacklevel=2,
        )
