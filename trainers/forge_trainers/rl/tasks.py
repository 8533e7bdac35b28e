"""Where episodes come from: environments, their weights, and seeds that never repeat by accident.

In: what a user passes to ``fit``. Out: fresh environments and the groups of each step. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from forge_agents.envs import registry
from forge_agents.rollout.rollout import seats_of
from forge_agents.runtime.hosts import ENVS, Hosts

if TYPE_CHECKING:
    from pettingzoo import AECEnv

EnvLike: TypeAlias = "str | Callable[[], AECEnv[str, Any, Any]] | Mapping[str, float]"
"""An id, an environment class or factory, or weights by id."""

HELD_OUT_FROM = 2**31
"""Training seeds lie below, held-out seeds from here on: they never meet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One group to play."""

    env_id: str
    seed: int
    agents: tuple[str, ...]
    """The seats of its environment."""
    number: int
    """Its place among those that are played together."""


class Source:
    """Environments by id, and which of them each step plays.

    Args:
        env: What is played.
        env_args: Arguments of every environment.
        hosts: Of the run. If environments have hosts of their own, all play in worker processes, whatever they were
            registered with.

    Raises:
        UnknownIdError: No environment has the id.
        ValueError: Weights that are not positive, or an environment without id that is to be played elsewhere.
        TypeError: Neither an id, nor a class or factory, nor a mapping.
    """

    def __init__(self, env: EnvLike, env_args: Mapping[str, Any] | None = None, *, hosts: Hosts | None = None) -> None:
        elsewhere = hosts is not None and ENVS in hosts.counts
        self._args: dict[str, Any] = {"isolation": "process"} if elsewhere else {}
        self._args |= env_args or {}
        self._makers: dict[str, Callable[[], AECEnv[str, Any, Any]]] = {}
        self.max_turns: dict[str, int | None] = {}
        weights: dict[str, float]
        if isinstance(env, str):
            weights = {env: 1.0}
        elif isinstance(env, Mapping):
            weights = {name: float(weight) for name, weight in env.items()}
        elif callable(env):
            weights = {getattr(env, "__name__", type(env).__name__): 1.0}
            if elsewhere:
                raise ValueError(
                    f"the mesh has hosts for envs, and they cannot make {next(iter(weights))} without an id; register "
                    "it in a module and pass the id, or take envs out of the mesh"
                )
            self._makers = {next(iter(weights)): lambda: env(**self._args)}
        else:
            raise TypeError(f"fit takes an environment id, class or {{id: weight}}, got {type(env).__name__}")
        if not weights or min(weights.values()) <= 0:
            raise ValueError(f"environment weights must be positive, got {weights}")
        for name in weights:
            if name not in self._makers:
                self._makers[name] = self._maker(name)
        self.env_ids = tuple(weights)
        self._shares = np.array(list(weights.values())) / sum(weights.values())
        self.max_reward: dict[str, float | None] = {}
        """The most that a seat can earn, where the environment says it."""
        self.seats = {name: seats_of(self._asked(name), name) for name in self.env_ids}

    def make(self, env_id: str) -> AECEnv[str, Any, Any]:
        """A fresh environment."""
        return self._makers[env_id]()

    def tasks(self, seed: int, step: int, count: int, *, refill: int = 0) -> list[Task]:
        """The groups of one step or refill: a function of the arguments, so a resumed run plays what it would have."""
        rng = np.random.default_rng([seed, step, refill])
        picks = rng.choice(len(self.env_ids), size=count, p=self._shares)
        seeds = rng.choice(HELD_OUT_FROM, size=count)
        drawn = zip(picks, seeds, strict=True)
        return [self._task(int(pick), int(s), number) for number, (pick, s) in enumerate(drawn)]

    def held_out(self, count: int) -> list[Task]:
        """`count` tasks that training never sees, the same for every run."""
        return [self._task(i % len(self.env_ids), HELD_OUT_FROM + i, i) for i in range(count)]

    def _task(self, place: int, seed: int, number: int) -> Task:
        env_id = self.env_ids[place]
        return Task(env_id=env_id, seed=seed, agents=self.seats[env_id], number=number)

    def _maker(self, name: str) -> Callable[[], AECEnv[str, Any, Any]]:
        self.max_turns[name] = registry.spec(name).max_turns
        return lambda: registry.make(name, **self._args)

    def _asked(self, name: str) -> Callable[[], AECEnv[str, Any, Any]]:
        """Makes an environment and notes what it says it can pay."""

        def make() -> AECEnv[str, Any, Any]:
            env = self.make(name)
            most = getattr(env, "max_reward", None)
            self.max_reward[name] = float(most) if isinstance(most, Real) else None  # others may mean something else
            return env

        return make
