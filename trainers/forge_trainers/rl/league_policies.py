"""A league in training: opponents for every group, and snapshots of the policy on disk."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from forge_agents import states
from forge_agents.policy import AnyPolicy, PolicyMapping, policies_by_name
from forge_agents.runtime.machine import visible_gpus
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.types import EpisodeGroup
from forge_trainers.records.run_folder import read_arrays, write_atomically
from forge_trainers.rl.policy_mapping import CollectGroup, RunPolicies, check_trainable
from forge_trainers.rl.snapshot_engine import SnapshotEngine
from forge_trainers.rl.tasks import Task
from forge_trainers.selfplay.league import (
    League,
    Match,
    draw_matches,
    evaluation_matches,
    margins_of,
    policy_agents,
    table,
)
from forge_trainers.selfplay.matchmaking import Standings, result_of

if TYPE_CHECKING:
    from forge_trainers.rl.config import GRPOConfig
    from forge_trainers.run.processes import Processes

_log = logging.getLogger(__name__)
_WARNED_SHARE = 0.1
"""Fraction of failed games of an opponent above which a warning names it."""


def policies_of(policies: PolicyMapping | League, config: GRPOConfig, folder: Path) -> RunPolicies:
    """Return the policies of a run, from the trainer's argument."""
    return LeaguePolicies(policies, config, folder) if isinstance(policies, League) else RunPolicies(policies)


class LeaguePolicies(RunPolicies):
    """The policies of a league. Snapshots are in ``OUT_DIR/league``, the table in ``OUT_DIR/league.json``.

    All snapshots share one engine whose weights change, so two steps are never collected at the same time. With
    `max_staleness` a step is still collected during training.
    """

    def __init__(self, league: League, config: GRPOConfig, folder: Path) -> None:
        check_trainable({league.policy.name: league.policy})
        self._league, self._config, self._folder = league, config, folder
        self._snapshots = folder / "league"
        self.standings = Standings(
            anchors=[anchor.name for anchor in league.anchors], start=league.start, pool=league.pool
        )
        self._engine, self._engine_lock = SnapshotEngine(league, config, self._snapshots), asyncio.Lock()
        self._warned, self._games, self._failed = set[str](), Counter[str](), Counter[str]()

    def declared(self, agents: Mapping[str, tuple[str, ...]], *, partial: bool = False) -> dict[str, AnyPolicy]:
        """Return the policy, the policy that plays snapshots, and fixed opponents."""
        league, first = self._league, next(iter(agents.values()))
        if len(set(agents.values())) > 1:
            raise ValueError(f"environments of a league need the same agents, got {dict(agents)}")
        result: dict[str, AnyPolicy] = {}
        for player in (league.policy, league.served, *league.fixed):
            for name, policy in policies_by_name(player, first).items():
                if name in result:
                    raise ValueError(f"two policies of the league are called {name!r}. Give each its own name=")
                result[name] = policy
        return result

    def mapping(self, agents: Sequence[str], seed: int) -> Mapping[str, AnyPolicy]:
        """Return the policy for every agent."""
        return dict.fromkeys(agents, self._league.policy)

    def agents_by_policy(self, agents: Mapping[str, tuple[str, ...]]) -> dict[str, list[str]]:
        """Return all agents for every policy."""
        names = list(next(iter(agents.values())))
        return dict.fromkeys(self.declared(agents), names)

    def settings(self) -> dict[str, Any]:
        """Return the league's settings."""
        return {"league": self._league.settings()}

    async def collect(
        self,
        tasks: Sequence[Task],
        collect_group: CollectGroup,
        processes: Processes,
        *,
        step: int | None = None,
        resample: int = 0,
    ) -> list[EpisodeGroup]:
        """Collect groups against opponents of the step or of `evaluation_matches`."""
        league, agents = self._league, tasks[0].agents
        async with self._engine_lock:
            if step is not None:
                key = (self._config.seed, step, resample)
                # a resumed run collects late groups without the others of their step
                count = max(0 if resample else self._config.groups_per_step, 1 + max(task.number for task in tasks))
                drawn = draw_matches(self.standings, league, agents, count, key=key)
                matches = [drawn[task.number] for task in tasks]
            else:
                each, counts = evaluation_matches(league, agents, len(tasks)), Counter[str]()
                matches = []
                for task in tasks:  # counted by environment, so that an anchor meets every environment
                    matches.append(each[counts[task.env_id]])
                    counts[task.env_id] += 1
            return await self._collect(tasks, matches, collect_group, processes)

    def measured(self, groups: Sequence[EpisodeGroup]) -> Sequence[EpisodeGroup]:
        """Return the rewards of the policy against opponents: over all agents of a zero-sum game they are constant."""
        name = self._league.policy.name
        pairs = [(group, policy_agents(group, name)) for group in groups]
        return [replace(group, rewards={a: group.rewards[a] for a in agents}) for group, agents in pairs if agents]

    async def record(self, step: int, groups: Sequence[EpisodeGroup], processes: Processes) -> dict[str, float]:
        """Count the games, take a snapshot when it is due, and write the table. Returns metrics."""
        margins = margins_of(groups, self._league.policy.name)
        self.standings.record(margins)
        results = {
            name: [result_of(margin) for margin in each if not math.isnan(margin)] for name, each in margins.items()
        }
        for name, each in margins.items():
            self._games[name] += len(each)
            self._failed[name] += len(each) - len(results[name])
            if self._failed[name] > max(2, _WARNED_SHARE * self._games[name]) and name not in self._warned:
                self._warned.add(name)
                _log.warning(
                    "opponent %s failed in %d of %d games up to step %d. They count as won, and groups with such a "
                    "game are not trained on. See the errors in episodes.jsonl, and leave the opponent out if it "
                    "goes on",
                    name,
                    self._failed[name],
                    self._games[name],
                    step + 1,
                )
        if (step + 1) % self._league.snapshot_every == 0:
            await self._snapshot(processes)
        league_table = {"step": step + 1, **table(self.standings, self._league)}
        write_atomically(self._folder / "league.json", json.dumps(league_table, indent=2) + "\n")
        games = [score for scores in results.values() for score in scores]
        return {
            "league/win_rate": float(np.mean(games)) if games else float("nan"),
            "league/rating": self.standings.mu,
            "league/rating_sigma": self.standings.sigma,
            "league/opponents": float(len(self.standings.opponents)),
            "league/load_s": self._engine.take_load_s(),
            **{f"league/win_rate/{name}": float(np.mean(each)) for name, each in sorted(results.items()) if each},
        }

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return the standings, for a checkpoint."""
        return self.standings.state_dict()

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state_dict`. Raises ValueError if the weights of a snapshot are missing."""
        self.standings.load_state_dict(state)
        self._engine.forget()
        for opponent in self.standings.opponents:
            if opponent.version > 0 and opponent.name != self._league.snapshot_name(opponent.version):
                raise ValueError(f"the league's {opponent.name[:80]!r} is not a valid snapshot name")
            if opponent.version > 0 and not (weights := self._engine.weights_of(opponent.name)).exists():
                raise ValueError(f"snapshot {weights} of the league is missing")

    async def _collect(
        self, tasks: Sequence[Task], matches: Sequence[Match], collect_group: CollectGroup, processes: Processes
    ) -> list[EpisodeGroup]:
        """Play every match, as many snapshots at a time as the engine holds. Others play with the first ones."""
        policy = self._league.policy
        past = [self._league.frozen(opponent.name) for opponent in self.standings.opponents if opponent.version >= 0]
        players: dict[str, AnyPolicy] = {player.name: player for player in (policy, *self._league.fixed, *past)}
        snapshots = {rival.name: rival.version for rival in self.standings.opponents if rival.version >= 0}
        drawn = list(dict.fromkeys(match.opponent for match in matches if match.opponent in snapshots))
        batches = self._engine.batches(drawn) or [()]
        groups: dict[int, EpisodeGroup] = {}
        for batch in batches:
            served = await self._engine.serve({name: snapshots[name] for name in batch}, processes) if batch else {}
            engines = {**processes.policy_engines, **served}
            due = [
                (task, {agent: players[player] for agent, player in match.players(task.agents, policy.name).items()})
                for task, match in zip(tasks, matches, strict=True)
                if match.opponent in batch or (batch is batches[0] and match.opponent not in snapshots)
            ]
            finished = await all_or_first_error(collect_group(task, mapping, engines) for task, mapping in due)
            groups |= {task.number: group for (task, _), group in zip(due, finished, strict=True)}
        return [groups[task.number] for task in tasks]

    async def _snapshot(self, processes: Processes) -> None:
        """Add the current policy to the pool, unless its weights have not changed.

        Raises:
            ValueError: A snapshot is newer than the policy, as in a checkpoint with the league of another run.
        """
        learner, latest = processes.learners[self._league.policy.name], self.standings.latest
        if learner.version < latest.version:
            raise ValueError(
                f"snapshot {latest.name!r} of the league has version {latest.version}, but the policy only "
                f"{learner.version}, so the checkpoint holds the league of another run. Choose another checkpoint"
            )
        if learner.version == latest.version:
            return
        name = self._league.snapshot_name(learner.version)
        self._engine.forget(name)
        await learner.export(
            self._snapshots / name,
            dtype=self._config.learner_of(self._league.policy).dtype_on(cpu=not visible_gpus()),
            timeout_s=self._config.stage_timeout_s,
        )
        self.standings.add(name, learner.version)
        await asyncio.to_thread(self._delete_unused)

    def _delete_unused(self) -> None:
        """Delete snapshots that left the league and that no checkpoint names. Other folders stay."""
        used = {opponent.name for opponent in self.standings.opponents}
        try:
            for file in (self._folder / "checkpoints").glob("*/league.npz"):  # drafts, too
                used |= set(states.texts(read_arrays(file) or {}, "names", -1))
        except (OSError, ValueError, RuntimeError, BadZipFile):  # a file is being moved or is damaged: next time
            return
        snapshot = re.compile(rf"(\.unfinished-|\.replaced-)?{re.escape(self._league.policy.name)}-\d{{6,}}")
        for path in [*self._snapshots.iterdir()]:
            if path.name not in used and snapshot.fullmatch(path.name):
                _delete(path)


def _delete(snapshot: Path) -> None:
    """Delete a snapshot. After a kill meanwhile, the rest has another name, which the next call deletes.

    A part of a snapshot under its own name would be no exported model, so a resumed run could not replace it.
    """
    if not snapshot.name.startswith(".") and not snapshot.is_symlink():
        replaced = snapshot.with_name(f".replaced-{snapshot.name}")
        shutil.rmtree(replaced, ignore_errors=True)  # follows no links
        with contextlib.suppress(OSError):
            snapshot = snapshot.rename(replaced)
    shutil.rmtree(snapshot, ignore_errors=True)
