"""Where episodes come from: environments, their weights, and seeds that never repeat by accident.

In: what a user passes to ``fit``. Out: fresh environments and the groups of each step. Waits for nothing.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from forge_agents.envs import registry
from forge_agents.envs.seeds import HELD_OUT_FROM
from forge_agents.envs.spec import split_level
from forge_agents.errors import ArgumentError
from forge_agents.policy import PolicyMapping
from forge_agents.rollout.players import PolicyEngine
from forge_agents.rollout.rollout import Rollout, agents_of
from forge_agents.runtime.hosts import ENVS, Hosts
from forge_trainers.rl.curriculum import Curriculum, Practice
from forge_trainers.rl.rewards import JudgedGroup

if TYPE_CHECKING:
    from pettingzoo import AECEnv

EnvLike: TypeAlias = "str | Callable[[], AECEnv[str, Any, Any]] | Mapping[str, float] | Curriculum"
"""An id, an environment class or factory, weights by id, or a curriculum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One group to play."""

    env_id: str
    seed: int
    agents: tuple[str, ...]
    """The seats of its environment."""
    number: int
    """Its place among those that are played together."""


class TaskSampler:
    """Environments by id, and which of them each step plays.

    Args:
        env: What is played.
        env_args: Arguments of every environment.
        hosts: Of the run. If environments have hosts of their own, all play in worker processes, whatever they were
            registered with.
        practice: Where a curriculum has got to; None: at its beginning.

    Raises:
        UnknownIdError: No environment has the id.
        ValueError: Weights that are not positive, or an environment without id that is to be played elsewhere.
        ArgumentError: `env_args` change what a level is.
        TypeError: Neither an id, nor a class or factory, nor a mapping.
    """

    def __init__(
        self,
        env: EnvLike,
        env_args: Mapping[str, Any] | None = None,
        *,
        hosts: Hosts | None = None,
        practice: Practice | None = None,
    ) -> None:
        self.curriculum = env if isinstance(env, Curriculum) else None
        """What is practised; None where the shares of the environments are fixed."""
        self.factory = env if callable(env) else None
        """The environment's class or factory, where it was given without an id."""
        self.env_args = dict(env_args or {})
        """The user's arguments of every environment."""
        self._practice = practice or Practice()
        elsewhere = hosts is not None and ENVS in hosts.counts
        args = {**({"isolation": "process"} if elsewhere else {}), **(env_args or {})}
        weights: dict[str, float]
        if isinstance(env, Curriculum):
            weights = dict.fromkeys(env.env_ids, 1.0)
        elif isinstance(env, str):
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
        else:
            raise TypeError(f"fit takes an id, a class, a curriculum or {{id: weight}}, got {type(env).__name__}")
        if not weights or min(weights.values()) <= 0:
            raise ValueError(f"environment weights must be positive, got {weights}")
        self.env_ids = tuple(weights)
        self.weights = weights
        """Relative share of the groups, by environment."""
        self._shares = np.array(list(weights.values())) / sum(weights.values())
        self._makers: dict[str, Callable[[], AECEnv[str, Any, Any]]]
        self._max_turns: dict[str, int | None] = {}
        if callable(env):
            self._makers = {self.env_ids[0]: partial(env, **args)}
        else:
            for name in weights:
                _check_level(name, env_args or {})
            self._max_turns = {name: registry.spec(name).max_turns for name in weights}
            self._makers = {name: partial(registry.make, name, **args) for name in weights}
        self.max_reward: dict[str, float | None] = {}
        """The most that a seat can earn, where the environment says it."""
        self.asked_for: dict[str, str] = {}
        """Seats by the names under which a program asks for them."""
        self.make_s: dict[str, float] = {}
        """Seconds that making each environment took."""
        self.specs: dict[str, object] = {}
        """What each environment says that it was made with; None where it says nothing."""
        self._num_tasks: dict[str, int] = {}
        """Number of training tasks of environments that have a list of them."""
        self.isolated: set[str] = set()
        """Those that play in worker processes."""
        self.seats = {name: agents_of(partial(self._probe, name), name) for name in self.env_ids}

    def make(self, env_id: str) -> AECEnv[str, Any, Any]:
        """A fresh environment."""
        return self._makers[env_id]()

    def rollout(
        self, task: Task, seats: PolicyMapping, served: Mapping[str, PolicyEngine], *, max_turns: int = 64
    ) -> Rollout:
        """What plays siblings of `task`: ``await sampler.rollout(...).group(task.seed, size)``.

        Args:
            task: What is played.
            seats: Who decides.
            served: Engines of the model policies, by policy name.
            max_turns: Decisions after which an episode is cut off, where its environment sets no limit.
        """
        return Rollout(
            make_env=partial(self.make, task.env_id),
            env_id=task.env_id,
            policies=seats,
            engines=served,
            max_turns=self._max_turns.get(task.env_id) or max_turns,
        )

    def tasks(self, seed: int, step: int, count: int, *, resample: int = 0) -> list[Task]:
        """The groups of one step or resample: a function of the arguments, so a resumed run plays what it would have.

        In a curriculum also of what was recorded, which a checkpoint keeps.
        """
        rng = np.random.default_rng([seed, step, resample])
        shares = self._shares if self.curriculum is None else self._practice.shares(self.curriculum)
        picks = rng.choice(len(self.env_ids), size=count, p=shares)
        seeds = rng.choice(HELD_OUT_FROM, size=count)
        ids = [self.env_ids[pick] for pick in picks]
        drawn = [(env_id, int(own)) for env_id, own in zip(ids, seeds, strict=True)]
        if not resample:
            drawn = [
                (env_id, self._listed(env_id, seed, step * count + place) if env_id in self._num_tasks else own)
                for place, (env_id, own) in enumerate(drawn)
            ]
        if self.curriculum is not None:
            drawn = [self._practice.again(self.curriculum, rng) or new for new in drawn]
        return [self._task(env_id, own, number) for number, (env_id, own) in enumerate(drawn)]

    def _listed(self, env_id: str, seed: int, number: int) -> int:
        """The seed of a group of an environment with a list of tasks: consecutive groups go through the list."""
        count, most = self._num_tasks[env_id], HELD_OUT_FROM // 2
        begin = int(np.random.default_rng([seed, zlib.crc32(env_id.encode())]).integers(max(1, most // count))) * count
        return begin + number % most

    def record(
        self, judged: Sequence[JudgedGroup], trained: Collection[str], tops: Mapping[str, float | None]
    ) -> dict[str, float]:
        """Take note of the groups of a step; only a curriculum does.

        Args:
            judged: Its groups.
            trained: Policies that learn.
            tops: The most that can be earned, by environment; None where nobody says it.

        Returns:
            Metrics of the curriculum; see `forge_trainers.rl.curriculum.Practice.record`.
        """
        return {} if self.curriculum is None else self._practice.record(self.curriculum, judged, trained, tops)

    def held_out(self, count: int) -> list[Task]:
        """`count` tasks that training never sees, the same for every run."""
        return [self._task(self.env_ids[i % len(self.env_ids)], HELD_OUT_FROM + i, i) for i in range(count)]

    def _task(self, env_id: str, seed: int, number: int) -> Task:
        return Task(env_id=env_id, seed=seed, agents=self.seats[env_id], number=number)

    def _probe(self, name: str) -> AECEnv[str, Any, Any]:
        """A fresh environment; notes what it says it can pay."""
        started = time.perf_counter()
        env = self.make(name)
        self.make_s[name] = time.perf_counter() - started
        self.specs[name] = getattr(env, "spec", None)
        self.isolated |= {name} if getattr(env.spec, "isolation", "none") == "process" else set()
        # an environment in a worker process says no more than its settings before it is reset
        names = getattr(env, "models", None) or getattr(env.spec, "kwargs", {}).get("models")
        self.asked_for |= names if isinstance(names, Mapping) else {}
        listed = getattr(env, "num_training_tasks", None)
        self._num_tasks |= {name: listed} if type(listed) is int and listed > 0 else {}
        most = getattr(env, "max_reward", None)
        self.max_reward[name] = float(most) if isinstance(most, Real) else None  # others may mean something else
        return env


def _check_level(env_id: str, env_args: Mapping[str, Any]) -> None:
    """Raise where arguments of the user's would make a level something else."""
    bare, level = split_level(env_id)
    both = set(env_args) & set(registry.spec(bare).levels[level - 1]) if level else set()
    if both:
        raise ArgumentError(f"{', '.join(sorted(both))} of env_args is what level {level} of {bare} sets; leave it out")
