"""Who plays whom in a run: the seats as they were given, or a league's games.

In: tasks, a function that plays one group, the running engines. Out: groups. Waits for episodes, for weights that
travel to the opponents' engine, and for the learner's export of a snapshot, within the deadlines of the caller.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from zipfile import BadZipFile

import numpy as np

from forge_agents.envs.oracles import oracle_of
from forge_agents.models import resolve as models
from forge_agents.policy import (
    AnyPolicy,
    Oracle,
    Policy,
    PolicyMapping,
    candidate_policies,
    policies_by_name,
    resolve_policies,
    with_unique_names,
)
from forge_agents.rollout.players import PolicyEngine
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.types import EpisodeGroup
from forge_trainers.records.run_folder import read_arrays, write_atomically
from forge_trainers.rl.pipeline import window
from forge_trainers.rl.rewards import JudgedGroup
from forge_trainers.rl.tasks import Task, TaskSampler
from forge_trainers.selfplay.league import (
    League,
    Match,
    draw_matches,
    evaluation_matches,
    own_seats,
    results_of,
    table,
)
from forge_trainers.selfplay.matchmaking import Standings

if TYPE_CHECKING:
    from forge_agents.weights import Publisher, WeightStore, WeightStoreRef
    from forge_trainers.rl.config import GRPOConfig
    from forge_trainers.run.processes import Processes

PlayGroup: TypeAlias = Callable[[Task, PolicyMapping, Mapping[str, PolicyEngine]], Coroutine[Any, Any, EpisodeGroup]]
"""Plays one group of a task with these seats and engines."""


_COLDEST = 0.01
"""vLLM raises a lower temperature to it, and says so in its log alone."""


def check_trainable(models: Mapping[str, Policy], max_staleness: int = 0) -> None:
    """Raises ValueError where a policy that is to learn samples from a distribution that the learner cannot compute."""
    for name, policy in models.items():
        if not policy.trainable:
            continue
        sampling = policy.sampling
        if sampling.temperature == 0:
            raise ValueError(
                f"policy {name!r} samples with temperature=0, always the most probable token, so siblings would not "
                "differ and nothing could be learned; training needs a temperature above 0"
            )
        coldest = min(sampling.temperature, sampling.initial_temperature or sampling.temperature)
        if coldest < _COLDEST:
            raise ValueError(
                f"policy {name!r} samples with temperature={coldest}; vLLM samples no colder than {_COLDEST}, so the "
                f"learner would compute another distribution; training needs at least {_COLDEST}"
            )
        if sampling.logit_settings:
            given = ", ".join(f"{key}={value!r}" for key, value in sampling.logit_settings.items())
            raise ValueError(
                f"policy {name!r} samples with {given}; training needs the model's whole distribution, bent by the "
                "temperature alone. The learner computes each token's probability from all logits of its place, and "
                "knows neither which tokens the sampler left out there nor what it had counted so far: the gradient "
                "would be that of another distribution. Leave it out, or set trainable=False"
            )
        if sampling.initial_temperature is not None and window(max_staleness)[1]:
            raise ValueError(
                f"policy {name!r} moves its temperature, and with max_staleness={max_staleness} a batch may hold "
                "groups of two steps, at two temperatures; set max_staleness to 0 or 1, or remove initial_temperature"
            )
        if policy.constrain_actions:
            raise ValueError(
                f"policy {name!r} is trainable and constrains its actions; the sampler's log-probabilities would "
                "be those of the constrained distribution, which the learner does not compute: set trainable=False "
                "or constrain_actions=False"
            )


def seats_at(seats: PolicyMapping, step: int) -> PolicyMapping:
    """The seats as they sample in a step of training."""

    def at(policy: AnyPolicy) -> AnyPolicy:
        return replace(policy, sampling=policy.sampling.at_step(step)) if isinstance(policy, Policy) else policy

    if isinstance(seats, Mapping):
        return {agent: at(policy) for agent, policy in seats.items()}
    return at(seats) if isinstance(seats, AnyPolicy) else lambda agent, seed: at(seats(agent, seed))


def seating_of(seats: PolicyMapping | League, config: GRPOConfig, folder: Path) -> Seating:
    """Who sits where, of what a user gave the trainer."""
    return LeagueSeating(seats, config, folder) if isinstance(seats, League) else Seating(seats)


class Seating:
    """Decides who sits where, and hears what came of it: here, seats that stay as they are.

    Raises:
        ValueError: A policy that is to learn samples in a way that the learner cannot compute.
    """

    def __init__(self, seats: PolicyMapping) -> None:
        self._seats = seats = with_unique_names(seats)
        if isinstance(seats, Mapping):
            check_trainable({one.name: one for one in seats.values() if isinstance(one, Policy)})
        elif isinstance(seats, Policy):
            check_trainable({seats.name: seats})

    def declared(self, seats: Mapping[str, tuple[str, ...]], *, part: bool = False) -> dict[str, AnyPolicy]:
        """Every policy of the run by name; a model among them gets an engine.

        Args:
            seats: The seats of each environment of the run.
            part: Environments of which the run has others, too: policies may sit in seats that none of these has.
        """
        agents = dict.fromkeys(agent for each in seats.values() for agent in each)
        if part and isinstance(self._seats, Mapping):
            agents |= dict.fromkeys(self._seats)
        candidate_policies(self._seats, tuple(agents))  # refuses a function whose policies nobody can tell apart
        return policies_by_name(self._seats, tuple(agents))

    def seated(self, agents: Sequence[str], seed: int) -> Mapping[str, AnyPolicy]:
        """Who sits where in an episode."""
        return resolve_policies(self._of(agents), agents, seed)

    def roles(self, seats: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
        """By policy, the seats that it may sit in."""
        found: dict[str, list[str]] = {}
        for agents in seats.values():
            for agent, policies in candidate_policies(self._of(agents), agents).items():
                for name in {policy.name: None for policy in policies}:
                    if agent not in found.setdefault(name, []):
                        found[name].append(agent)
        return found

    def is_zero_sum_self_play(self, sampler: TaskSampler, trained: Collection[str]) -> bool:
        """Whether `trained` policies play all agents, and every game has several agents and the tag zero-sum.

        The mean reward of the trained policies is then the same however well they play.
        """
        zero_sum = all("zero-sum" in getattr(spec, "tags", ()) for spec in sampler.specs.values())
        several = all(len(agents) > 1 for agents in sampler.seats.values())
        return zero_sum and several and self.roles(sampler.seats).keys() <= set(trained)

    def check_oracles(self, sampler: TaskSampler, declared: Mapping[str, AnyPolicy]) -> None:
        """Raises ValueError where an oracle may sit in an environment that has none."""
        oracles = {name for name, policy in declared.items() if isinstance(policy, Oracle)}
        for env_id, agents in sampler.seats.items() if oracles else ():
            if oracles & self.roles({env_id: agents}).keys():
                oracle_of(sampler.specs[env_id], env_id)

    def settings(self) -> dict[str, Any]:
        """What config.yaml says of it beside the policies."""
        return {}

    async def play(
        self, tasks: Sequence[Task], group: PlayGroup, processes: Processes, *, step: int, resample: int
    ) -> list[EpisodeGroup]:
        """The groups of a step, or of its resample."""
        return await self.play_held_out(tasks, group, processes)

    async def play_held_out(self, tasks: Sequence[Task], group: PlayGroup, processes: Processes) -> list[EpisodeGroup]:
        """The groups of an evaluation."""
        return await all_or_first_error(group(task, self._of(task.agents), processes.policy_engines) for task in tasks)

    def measured(self, judged: Sequence[JudgedGroup]) -> Sequence[JudgedGroup]:
        """What the mean reward is taken over."""
        return judged

    async def record(self, step: int, judged: Sequence[JudgedGroup], processes: Processes) -> dict[str, float]:
        """Take note of a step that is over. Returns metrics."""
        return {}

    def _of(self, agents: Sequence[str]) -> PolicyMapping:
        """The policies of an environment's own seats."""
        return {agent: self._seats[agent] for agent in agents} if isinstance(self._seats, Mapping) else self._seats


class LeagueSeating(Seating):
    """A league. Snapshots lie in ``OUT_DIR/league``, the table in ``OUT_DIR/league.json``.

    Snapshots take turns in one engine, so two steps never play at the same time; with `max_staleness` a step still
    plays while the learner works.

    Args:
        league: What the user declared.
        config: Settings of the run.
        folder: The run's folder.
    """

    def __init__(self, league: League, config: GRPOConfig, folder: Path) -> None:
        check_trainable({league.policy.name: league.policy})
        self._league, self._config, self._folder = league, config, folder
        self._snapshots = folder / "league"
        self.standings = Standings(
            anchors=[anchor.name for anchor in league.anchors], start=league.start, pool=league.pool
        )
        self._one_at_a_time = asyncio.Lock()
        self._publisher: Publisher | None = None
        self._packing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshots")
        """Where snapshots are copied: this process answers its engines and learners meanwhile."""
        self._store: WeightStoreRef | None = None
        """Where the snapshot in the engine came from: another store, in place of one that died, knows nothing of it."""
        self._loaded, self._loads = league.start, 0  # the engine starts with the start model
        self._load_s = 0.0

    def declared(self, seats: Mapping[str, tuple[str, ...]], *, part: bool = False) -> dict[str, AnyPolicy]:
        """The policy, its fixed opponents, and the engine that snapshots take turns in."""
        league, agents = self._league, next(iter(seats.values()))
        if len(set(seats.values())) > 1:
            raise ValueError(f"environments of a league need the same seats, got {dict(seats)}")
        found: dict[str, AnyPolicy] = {}
        for player in (league.policy, league.frozen(league.engine), *league.fixed):
            for name, policy in policies_by_name(player, agents).items():
                if name in found:
                    raise ValueError(f"two policies of the league are called {name!r}; give each its own name=")
                found[name] = policy
        return found

    def seated(self, agents: Sequence[str], seed: int) -> Mapping[str, AnyPolicy]:
        """The policy, everywhere."""
        return dict.fromkeys(agents, self._league.policy)

    def roles(self, seats: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
        """Everybody may sit everywhere."""
        agents = list(next(iter(seats.values())))
        return dict.fromkeys(self.declared(seats), agents)

    def settings(self) -> dict[str, Any]:
        """The league."""
        return {"league": self._league.settings()}

    async def play(
        self, tasks: Sequence[Task], group: PlayGroup, processes: Processes, *, step: int, resample: int
    ) -> list[EpisodeGroup]:
        """Opponents are drawn for the step, groups of one snapshot after those of another."""
        async with self._one_at_a_time:
            key = (self._config.seed, step, resample)
            matches = draw_matches(self.standings, self._league, tasks[0].agents, len(tasks), key=key)
            return await self._play(tasks, matches, group, processes)

    async def play_held_out(self, tasks: Sequence[Task], group: PlayGroup, processes: Processes) -> list[EpisodeGroup]:
        """Games against `evaluation_matches`' opponents, all of them in every environment."""
        each = evaluation_matches(self._league, tasks[0].agents, len(tasks))
        met: Counter[str] = Counter()
        matches = []
        for task in tasks:  # counted by environment: in step with its turns, an anchor would meet only one of two
            matches.append(each[met[task.env_id]])
            met[task.env_id] += 1
        async with self._one_at_a_time:
            return await self._play(tasks, matches, group, processes)

    def measured(self, judged: Sequence[JudgedGroup]) -> Sequence[JudgedGroup]:
        """The policy's seats against opponents: the rewards of all seats of a zero-sum game tell nothing."""
        name = self._league.policy.name
        own = [(item, own_seats(item.group, name)) for item in judged]
        return [replace(item, rewards={agent: item.rewards[agent] for agent in seats}) for item, seats in own if seats]

    async def record(self, step: int, judged: Sequence[JudgedGroup], processes: Processes) -> dict[str, float]:
        """Count the games, take a snapshot when it is due, write the table."""
        results = results_of((item.group for item in judged), self._league.policy.name)
        self.standings.record(results)
        if (step + 1) % self._league.snapshot_every == 0:
            await self._snapshot(step, processes)
        league_table = {"step": step + 1, **table(self.standings, self._league)}
        write_atomically(self._folder / "league.json", json.dumps(league_table, indent=2) + "\n")
        games = [score for scores in results.values() for score in scores]
        load_s, self._load_s = self._load_s, 0.0
        return {
            "league/win_rate": float(np.mean(games)) if games else float("nan"),
            "league/rating": self.standings.mu,
            "league/rating_sigma": self.standings.sigma,
            "league/opponents": float(len(self.standings.opponents)),
            "league/load_s": load_s,
            **{f"league/win_rate/{name}": float(np.mean(scores)) for name, scores in sorted(results.items())},
        }

    def state_dict(self) -> dict[str, np.ndarray]:
        """The standings, for a checkpoint."""
        return self.standings.state_dict()

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state_dict`.

        Raises:
            ValueError: A snapshot's weights are gone, or it is another league's.
        """
        self.standings.load_state_dict(state)
        self._loaded = ""
        for one in self.standings.opponents:
            if Path(one.name).name != one.name:
                raise ValueError(f"the league's {one.name[:80]!r} is no name of a snapshot")
            if one.version > 0 and not (self._snapshots / one.name).is_dir():
                raise ValueError(f"snapshot {self._snapshots / one.name} of the league is missing")

    async def _play(
        self, tasks: Sequence[Task], matches: Sequence[Match], group: PlayGroup, processes: Processes
    ) -> list[EpisodeGroup]:
        """Play every match, snapshot by snapshot, with the first also what needs none. Groups come in tasks' order."""
        policy = self._league.policy
        past = [self._league.frozen(one.name) for one in self.standings.opponents if one.version >= 0]
        players: dict[str, AnyPolicy] = {player.name: player for player in (policy, *self._league.fixed, *past)}
        snapshots = {one.name: one.version for one in self.standings.opponents if one.version >= 0}
        turns = list(dict.fromkeys(match.opponent for match in matches if match.opponent in snapshots)) or [""]
        turns.sort(key=lambda name: name != self._loaded)  # the one that sits in the engine already goes first
        played: dict[int, EpisodeGroup] = {}
        for name in turns:
            served = dict(processes.policy_engines)
            if name:
                await processes.with_store(partial(self._load, name, snapshots[name], processes))
                served[name] = served[self._league.engine]
            due = [
                (task, {agent: players[who] for agent, who in match.players(task.agents, policy.name).items()})
                for task, match in zip(tasks, matches, strict=True)
                if match.opponent == name or (name == turns[0] and match.opponent not in snapshots)
            ]
            groups = await all_or_first_error(group(task, seats, served) for task, seats in due)
            played |= {task.number: found for (task, _), found in zip(due, groups, strict=True)}
        return [played[task.number] for task in tasks]

    async def _load(self, name: str, version: int, processes: Processes, by: WeightStore) -> None:
        """Put a snapshot's weights into the opponents' engine."""
        store = by.ref
        if name == self._loaded and self._store in (None, store):
            return
        import torch

        started = time.perf_counter()
        folder = self._snapshots / name if version else models.resolve(self._league.policy.model)
        if self._publisher is None or self._store != store:
            dtype = getattr(torch, self._config.learner_of(self._league.policy).compute_dtype)
            self._publisher = store.publisher(self._league.engine, dtype=dtype, thread=self._packing)
            self._store = store
        tensors = await asyncio.to_thread(_read, folder)
        self._loaded = ""  # whoever breaks off here leaves it unknown
        self._loads += 1  # a version of its own: after a restart other weights may have the snapshot's name
        await self._publisher.publish(self._loads, tensors)
        await processes.engines[self._league.engine].load_weights(self._loads, timeout_s=self._config.stage_timeout_s)
        self._loaded = name
        self._load_s += time.perf_counter() - started

    async def _snapshot(self, step: int, processes: Processes) -> None:
        """Add the policy as it is, unless it has not changed."""
        learner = processes.learners[self._league.policy.name]
        if learner.version <= self.standings.latest.version:
            return
        name = self._league.snapshot_name(learner.version)
        self._loaded = "" if name == self._loaded else self._loaded
        await learner.export(
            self._snapshots / name,
            dtype=self._config.learner_of(self._league.policy).compute_dtype,
            timeout_s=self._config.stage_timeout_s,
        )
        self.standings.add(name, learner.version)
        await asyncio.to_thread(self._sweep)

    def _sweep(self) -> None:
        """Delete snapshots that have left the league and that no checkpoint names. Other folders stay."""
        named = {one.name for one in self.standings.opponents}
        try:
            for file in (self._folder / "checkpoints").glob("*/league.npz"):  # drafts, too
                named |= set((read_arrays(file) or {})["names"].tolist())
        except (OSError, ValueError, KeyError, BadZipFile):  # one is being moved or is damaged: next time
            return
        snapshot = re.compile(rf"(\.unfinished-|\.replaced-)?{re.escape(self._league.policy.name)}-\d{{6,}}")
        for path in self._snapshots.iterdir():
            if path.name not in named and snapshot.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)  # deletes no links, and nothing through them


def _read(folder: Path) -> dict[str, Any]:
    """All tensors of a model folder, by their Hugging Face names."""
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors
