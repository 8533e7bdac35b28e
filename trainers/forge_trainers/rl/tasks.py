"""Environments, seeds and random generators: what each step collects, so that a resumed run repeats it."""

from __future__ import annotations

import math
import random
import time
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from forge_agents.envs import registry
from forge_agents.envs.env import can_fork
from forge_agents.envs.seeds import HELD_OUT_FROM
from forge_agents.envs.spec import split_level
from forge_agents.errors import ArgumentError
from forge_agents.policy import PolicyMapping
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.rollout.rollout import Rollout, agents_of
from forge_agents.runtime.hosts import ENVS, Hosts
from forge_agents.types import EpisodeGroup
from forge_trainers.rl.curriculum import Curriculum, EnvSeed, Progress

if TYPE_CHECKING:
    from pettingzoo import AECEnv

_STATE_WORDS = 624
"""Number of words in the state of NumPy's global generator."""
EnvLike: TypeAlias = "str | Callable[[], AECEnv[str, Any, Any]] | Mapping[str, float] | Curriculum"
"""An id, an environment class or factory, weights by id, or a curriculum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A group to collect."""

    env_id: str
    seed: int
    agents: tuple[str, ...]
    """The agents of the environment."""
    number: int
    """Index among the groups that are collected together."""


class TaskSampler:
    """Samples an environment and a seed for every group.

    Args:
        env: An id, a class or factory, weights by id, or a curriculum.
        env_args: Arguments of every environment.
        hosts: Hosts of the run. If environments have hosts of their own, all run in worker processes, whatever their
            registered isolation.
        progress: Progress of a curriculum. None starts at the beginning.

    Raises:
        UnknownIdError: No environment has the id.
        ValueError: A weight is not positive, or an environment without an id would run on another host.
        ArgumentError: `env_args` change an argument that a level sets.
        TypeError: `env` is neither an id, nor a class or factory, nor a mapping, nor a curriculum.
    """

    def __init__(
        self,
        env: EnvLike,
        env_args: Mapping[str, Any] | None = None,
        *,
        hosts: Hosts | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.curriculum = env if isinstance(env, Curriculum) else None
        """None if the shares of the environments are fixed."""
        self.factory = env if callable(env) else None
        """The environment's class or factory, if it has no id."""
        self.env_args = dict(env_args or {})
        """The user's arguments of every environment."""
        self._progress = progress or Progress()
        remote = hosts is not None and ENVS in hosts.counts
        args = {**({"isolation": "process"} if remote else {}), **(env_args or {})}
        self.weights = _weights_of(env, remote=remote)
        """Relative share of the groups, by environment."""
        self.env_ids = tuple(self.weights)
        self._shares = np.array(list(self.weights.values())) / sum(self.weights.values())
        self._makers: dict[str, Callable[[], AECEnv[str, Any, Any]]]
        self._max_turns: dict[str, int | None] = {}
        if callable(env):
            self._makers = {self.env_ids[0]: partial(env, **args)}
        else:
            for name in self.weights:
                _check_level(name, env_args or {})
            self._max_turns = {name: registry.spec(name).max_turns for name in self.weights}
            self._makers = {name: partial(registry.make, name, **args) for name in self.weights}
        self.max_reward: dict[str, float | None] = {}
        """Maximum reward of an agent, by environment. None if the environment does not declare it."""
        self.agents_by_model_name: dict[str, str] = {}
        """Agents by the model names that a program uses for them."""
        self.make_s: dict[str, float] = {}
        """Seconds to construct each environment."""
        self.specs: dict[str, object] = {}
        """Spec of each environment. None if it has none."""
        self._num_tasks: dict[str, int] = {}
        """Number of training tasks of environments that have a list of tasks."""
        self._counted: dict[tuple[int, int], tuple[int, Counter[str]]] = {}
        """By seed and number of groups per step: the last step of `_earlier_groups`, and its result."""
        self.isolated: set[str] = set()
        """Environments that run in worker processes."""
        self.not_forkable: set[str] = set()
        """Environments whose class has no method `fork`."""
        self.agents = {name: agents_of(partial(self._probe, name), name) for name in self.env_ids}
        """Agents of each environment."""

    def make(self, env_id: str) -> AECEnv[str, Any, Any]:
        """Return a new environment."""
        return self._makers[env_id]()

    def rollout(
        self, task: Task, policies: PolicyMapping, engines: Mapping[str, PolicyEngine], *, max_turns: int = 64
    ) -> Rollout:
        """Return the rollout of `task`: ``await sampler.rollout(...).group(task.seed, size)`` collects a group.

        `engines` are those of the model policies, by policy name. `max_turns` bounds the decisions per episode if the
        environment sets no limit.
        """
        return Rollout(
            make_env=self._makers[task.env_id],
            env_id=task.env_id,
            policies=policies,
            engines=engines,
            max_turns=self._max_turns.get(task.env_id) or max_turns,
        )

    def tasks(self, seed: int, step: int, count: int, *, resample: int = 0) -> list[Task]:
        """Return the tasks of a step or of a resampling round.

        The result depends only on the arguments, and in a curriculum on the progress that a checkpoint keeps, so a
        resumed run collects the same groups.
        """
        trained = None if resample or self.curriculum is None else self._progress.trained_tasks(step)
        if trained is not None and len(trained) == count and all(env_id in self.agents for env_id, _ in trained):
            pairs = trained  # a resumed run collects the late groups of its last step
        else:
            pairs = self._sample_pairs(seed, step, count, resample)
        return [
            Task(env_id=env_id, seed=env_seed, agents=self.agents[env_id], number=number)
            for number, (env_id, env_seed) in enumerate(pairs)
        ]

    def _sample_pairs(self, seed: int, step: int, count: int, resample: int) -> list[EnvSeed]:
        """Return environment and seed of each group: new ones, of a list of tasks the next, or replays of a curriculum.

        Resampling rounds draw from a list at random, because the next tasks are those of the next step.
        """
        rng = np.random.default_rng([seed, step, resample])
        shares = self._shares if self.curriculum is None else self._progress.shares(self.curriculum)
        picks = rng.choice(len(self.env_ids), size=count, p=shares)
        env_seeds = rng.choice(HELD_OUT_FROM, size=count)
        replays: list[EnvSeed | None] = [None] * count
        if self.curriculum is not None:
            replays = [self._progress.replayed(self.curriculum, rng) for _ in range(count)]
        follows_lists = bool(self._num_tasks) and not resample
        earlier = self._earlier_groups(seed, step, count) if follows_lists else Counter[str]()
        pairs, new = list[EnvSeed](), Counter[str]()
        for pick, env_seed, replay in zip(picks, env_seeds.tolist(), replays, strict=True):
            if replay is not None:
                pairs.append(replay)
                continue
            env_id = self.env_ids[pick]
            is_listed = follows_lists and env_id in self._num_tasks
            pairs.append((env_id, self._listed_seed(env_id, seed, earlier[env_id]) if is_listed else env_seed))
            earlier[env_id] += 1
            new[env_id] += 1
        if self.curriculum is not None and not resample:
            self._progress.sampled(step, pairs, new)
        return pairs

    def _earlier_groups(self, seed: int, step: int, count: int) -> Counter[str]:
        """Return the number of groups of each environment in all earlier steps."""
        if self.curriculum is not None:  # its shares of earlier steps are unknown
            return self._progress.collected_before(step)
        until, counted = self._counted.get((seed, count), (0, Counter()))
        if until > step:
            until, counted = 0, Counter()
        for earlier in range(until, step):
            rng = np.random.default_rng([seed, earlier, 0])  # as in `_sample_pairs`
            picks = rng.choice(len(self.env_ids), size=count, p=self._shares)
            counted.update(self.env_ids[pick] for pick in picks)
        self._counted = {(seed, count): (step, counted)}
        return counted.copy()

    def _listed_seed(self, env_id: str, seed: int, number: int) -> int:
        """Return the seed of a group in an environment with a list of tasks: consecutive groups follow the list."""
        count, most = self._num_tasks[env_id], HELD_OUT_FROM // 2
        begin = int(np.random.default_rng([seed, zlib.crc32(env_id.encode())]).integers(max(1, most // count))) * count
        return begin + number % most

    def record(
        self, groups: Sequence[EpisodeGroup], trained: Collection[str], max_rewards: Mapping[str, float | None]
    ) -> dict[str, float]:
        """Update the progress of a curriculum with the groups of a step. Returns metrics of `Progress.record`."""
        return {} if self.curriculum is None else self._progress.record(self.curriculum, groups, trained, max_rewards)

    def held_out(self, count: int) -> list[Task]:
        """Return `count` tasks that training never uses, the same for every run.

        Environments take turns. One with a list of tasks has consecutive seeds, so that no task is left out.
        """
        result = []
        for number in range(count):
            round_number, place = divmod(number, len(self.env_ids))
            env_id = self.env_ids[place]
            seed = HELD_OUT_FROM + (round_number if env_id in self._num_tasks else number)
            result.append(Task(env_id=env_id, seed=seed, agents=self.agents[env_id], number=number))
        return result

    def _probe(self, name: str) -> AECEnv[str, Any, Any]:
        """Make an environment, and record what it declares."""
        started = time.perf_counter()
        env = self.make(name)
        self.make_s[name] = time.perf_counter() - started
        self.specs[name] = getattr(env, "spec", None)
        self.not_forkable |= set() if can_fork(env) else {name}
        self.isolated |= {name} if getattr(self.specs[name], "isolation", "none") == "process" else set()
        # an environment in a worker process has only its settings before it is reset
        models = getattr(env, "models", None) or getattr(self.specs[name], "kwargs", {}).get("models")
        self.agents_by_model_name |= models if isinstance(models, Mapping) else {}
        num_tasks = getattr(env, "num_training_tasks", None)
        self._num_tasks |= {name: num_tasks} if type(num_tasks) is int and num_tasks > 0 else {}
        most = getattr(env, "max_reward", None)
        self.max_reward[name] = float(most) if isinstance(most, Real) else None  # other types have another meaning
        return env


def _weights_of(env: EnvLike, *, remote: bool) -> dict[str, float]:
    """Return the relative share of each environment, by id."""
    weights: dict[str, float]
    if isinstance(env, Curriculum):
        weights = dict.fromkeys(env.env_ids, 1.0)
    elif isinstance(env, str):
        weights = {env: 1.0}
    elif isinstance(env, Mapping):
        weights = dict(env)
    elif callable(env):
        weights = {getattr(env, "__name__", type(env).__name__): 1.0}
        if remote:
            raise ValueError(
                f"the mesh has hosts for envs, which cannot make {next(iter(weights))} without an id. Register it in a "
                "module and pass the id, or remove envs from the mesh"
            )
    else:
        raise TypeError(
            f"an environment to train on is an id, a class, a curriculum or {{id: weight}}, got an object of the class "
            f"{type(env).__name__}. Each episode makes an environment of its own, so pass the class or its id"
        )
    check_weights(weights)
    return {name: float(weight) for name, weight in weights.items()}


def check_weights(weights: Mapping[str, Any]) -> None:
    """Raise ValueError if there is no environment, or a weight is not a positive, finite number."""
    numbers = (isinstance(weight, Real) and not isinstance(weight, bool) for weight in weights.values())
    if not weights or not all(numbers) or not all(name and 0 < weight < math.inf for name, weight in weights.items()):
        raise ValueError(f"environments need names and positive, finite weights, got {dict(weights)}")


def _check_level(env_id: str, env_args: Mapping[str, Any]) -> None:
    """Raise ArgumentError if a user's argument is one that a level sets."""
    name, level = split_level(env_id)
    both = set(env_args) & set(registry.spec(name).levels[level - 1]) if level else set()
    if both:
        raise ArgumentError(f"env_args: level {level} of {name} sets {', '.join(sorted(both))}. Remove it")


class ProcessRandomness:
    """Random state of Python and NumPy in this process, for environments and rewards that use it."""

    def __init__(self) -> None:
        self._settled: dict[str, np.ndarray] | None = None

    def settle(self) -> None:
        """Record the state after a training step. A resumed run continues from it."""
        self._settled = self._state()

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the states of both generators after the last training step."""
        return self._state() if self._settled is None else self._settled

    def _state(self) -> dict[str, np.ndarray]:
        _, words, normal = random.getstate()
        _, keys, place, has_normal, cached = np.random.get_state()  # noqa: NPY002  # the global state
        return {
            "python": np.array(words, dtype=np.uint64),
            "python_normal": np.array(math.nan if normal is None else normal),
            "numpy": np.asarray(keys),
            "numpy_place": np.array([place, has_normal]),
            "numpy_normal": np.array(cached),
        }

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state_dict`.

        Raises ValueError for a state of NumPy that would read outside of its memory, and for a state of zeros, from
        which both generators draw only zeros, so that ``numpy.random.normal`` never returns.
        """
        self._settled = None
        normal = float(state["python_normal"])
        words = tuple(int(word) for word in state["python"])
        keys, cached = state["numpy"], float(state["numpy_normal"])
        place, has_normal = (int(value) for value in state["numpy_place"])
        numbers_fit = 0 <= place <= _STATE_WORDS and has_normal in (0, 1) and math.isfinite(cached)
        if not numbers_fit or keys.shape != (_STATE_WORDS,) or keys.dtype != np.uint32:  # NumPy checks less
            raise ValueError(f"NumPy's random state is damaged: {keys.dtype} {keys.shape}, {place}, {has_normal}")
        if _is_zero(keys.tolist()) or _is_zero(words[:-1]) or math.isinf(normal):
            raise ValueError("a random state is damaged: its generator would draw the same number forever")
        random.setstate((3, words, None if math.isnan(normal) else normal))
        np.random.set_state(("MT19937", keys, place, has_normal, cached))  # noqa: NPY002


def _is_zero(words: Sequence[int]) -> bool:
    """Return whether a Mersenne Twister stays in this state, whose first word counts with its highest bit only."""
    return not (words[0] & 1 << 31 or any(word & 0xFFFFFFFF for word in words[1:])) if words else True
