"""`benchmark`: plays a suite and reports. Every episode is stored as soon as it ends."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich import progress as bars

import forge_agents
from forge_agents import output
from forge_agents.bench.code import described
from forge_agents.bench.entrants import Player, PlayerLike, check_agents, named_players, policies_of, policy_at
from forge_agents.bench.exploitability import Exploitability
from forge_agents.bench.fingerprints import digest, player_facts, provenance, with_content
from forge_agents.bench.plan import (
    BenchLimits,
    Match,
    SuiteEnv,
    SuiteLike,
    check_planned,
    matches,
    suite_envs,
    suite_ids,
)
from forge_agents.bench.records import (
    RECORD_FORMAT,
    EpisodeLog,
    Record,
    cost_of,
    facts_at,
    left_by,
    not_written,
    priced,
    tokens_of,
)
from forge_agents.bench.report import Report
from forge_agents.bench.sections import public_arguments
from forge_agents.envs import registry
from forge_agents.envs.spec import EnvSpec
from forge_agents.errors import BudgetError, ModelNotFoundError, did_you_mean
from forge_agents.policy import KEYWORDS, Human, Oracle, Policy, Random, Sampling
from forge_agents.rollout.policy_engine import PolicyEngine
from forge_agents.rollout.rollout import Rollout
from forge_agents.runtime import startup
from forge_agents.runtime.interrupts import LoopRunner
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.runtime.watchdog import Watchdog
from forge_agents.serving.config import EngineConfig
from forge_agents.settings import MAX_COUNT, named_arguments
from forge_agents.types import Episode

BOARD = "board.json"
"""File name of the report."""
_OUTAGE = re.compile(r"Stall|Died|Connect|Timeout|OSError")
"""Kinds of failures of an environment that another try may not have. Others are played again only in another call."""
_MAX_CONSECUTIVE_FAILURES = 32
"""Consecutive failures of one player after which no episode starts: its endpoint is down, or its function broken."""


@named_arguments
def benchmark(
    players: Mapping[str, PlayerLike],
    suite: SuiteLike = "core-v1",
    *,
    episodes: int | None = None,
    seed: int | None = None,
    swap_agents: bool | None = None,
    samples: int = 1,
    exploitability_samples: int = 0,
    partners: Sequence[str] = (),
    limits: BenchLimits | None = None,
    engine: EngineConfig | None = None,
    out_dir: str | os.PathLike[str] = "runs/bench",
    progress: bool = True,
) -> Report:
    """Play a suite with every player, and report results with their uncertainty.

    Every player gets the same seeds. With several agents, each player acts for all of them, and each pair of players
    meets: one acts for one side, the other for the rest. The same arguments give the same report. A benchmark that was
    stopped or killed continues when it is called again: `out_dir` keeps episodes under a hash of everything that
    determines them (environment, weights or code of the players, sampling, seed, version of this package).

    Args:
        players: Players by name: a policy, text as `forge_agents.bench.entrants.read_player` takes it, or a team as a
            mapping from agent to one of both.
        suite: A suite's name, an environment's id, a list of several, or arguments by name or id. The suite defines the
            values that are None below and `max_tokens` of models given as text. See `SuiteDefaults`.
        episodes: Number of seeds per environment and line-up.
        seed: Seed that chooses the episodes' seeds. Training seeds are never chosen.
        swap_agents: Whether both players of a pair take each side. Otherwise the first one takes the first side.
        samples: Number of episodes per seed, for pass@k.
        exploitability_samples: Number of answers per model and information set, in games such as Kuhn and Leduc poker,
            from which exploitability is computed. 0 disables it. Answers count toward no limit. For models with
            constrained actions, exact probabilities are used instead.
        partners: Names of players that the others are measured with in cooperative and mixed games, such as players
            that they were not trained with. Partners do not meet each other. Empty: all players are partners.
        limits: Limits of this call. If one is reached, the report is incomplete and says so.
        engine: Settings of the engines of all models.
        out_dir: Folder of ``episodes.jsonl`` and of the last report, ``board.json``. Consecutive benchmarks can share
            the episodes.
        progress: Whether to show a progress bar in a terminal.

    Raises:
        UnknownIdError: A suite or environment is unknown.
        ValueError, TypeError: A player or number is invalid, or an environment has no oracle.
        ForgeError: Exploitability cannot be computed with the sampling of a player.
        RunFolderError: `out_dir` cannot be used, or another benchmark writes there.
        ActorDiedError, StallError: An engine is lost. Episodes are kept: call again to continue.
    """
    suite_name, arguments = suite_ids(suite)
    defaults = registry.suite_defaults(suite_name)
    chosen = {"episodes": episodes, "seed": seed, "swap_agents": swap_agents}
    settings = _settings(suite_name, chosen, samples=samples, exploitability_samples=exploitability_samples)
    if partners:
        settings["partners"] = _partner_names(partners, players)
    named = named_players(players, Sampling(max_tokens=defaults.max_tokens))
    limits, engine = limits or BenchLimits(), engine or EngineConfig()
    specs = [registry.spec(id_) for id_ in arguments]
    facts = {name: _facts(player, engine, specs, players[name]) for name, player in named.items()}
    environments = suite_envs(arguments)
    check_agents(named, {environment.id: environment.seats for environment in environments})
    env_facts = {environment.id: _environment_facts(environment) for environment in environments}
    check_planned(environments, tuple(facts), settings)
    plan = {_key(match, facts, env_facts): match for match in matches(environments, tuple(facts), settings)}
    if limits.max_cost is not None and not any(map(priced, facts.values())):
        raise ValueError(
            f"max_cost={limits.max_cost} and no player has a price. Set price_in and price_out of the endpoints"
        )
    human = any(isinstance(policy, Human) for player in named.values() for policy in policies_of(player))
    if human:  # people share one terminal, without a progress bar
        limits = replace(limits, max_concurrent_episodes=1)
    with EpisodeLog(out_dir) as log, _Bar(len(plan), shown=progress, interactive=human) as bar:
        search = Exploitability(out_dir, environments, named, facts, samples=exploitability_samples)
        run = _Run(players=named, facts=facts, plan=plan, log=log, search=search, limits=limits, bar=bar, engine=engine)
        status = f"stopped; {log.path} keeps what was played: run it again to continue"
        with contextlib.closing(LoopRunner(status=lambda: status)) as loop:
            loop.run(run.play())
        report = run.report(settings, environments)
        _save(report, log.path.with_name(BOARD))
        return report


def _save(report: Report, file: Path) -> None:
    try:
        report.save(file)
    except OSError as cause:
        raise not_written(file, cause) from cause


def _settings(suite: str, chosen: Mapping[str, Any], **others: int) -> dict[str, Any]:
    """Return the settings, with the suite's where `chosen` has None. Raises ValueError if a number is too small."""
    defaults = registry.suite_defaults(suite)
    values = {name: getattr(defaults, name) if value is None else value for name, value in chosen.items()}
    settings = {"suite": suite, **values, **others}
    for name, least in (("episodes", 1), ("samples", 1), ("seed", 0), ("exploitability_samples", 0)):
        if settings[name] < least:
            raise ValueError(f"{name}={settings[name]} must be at least {least}")
        if name != "seed" and settings[name] > MAX_COUNT:
            raise ValueError(f"{name}={settings[name]} must be at most {MAX_COUNT}")
    return settings | ({"suite_defaults": asdict(defaults)} if suite in registry.list_suites() else {})


def _partner_names(partners: Sequence[str], players: Mapping[str, object]) -> list[str]:
    """Return the names. Raises ValueError if one is unknown, or if every player is a partner."""
    names = [partners] if isinstance(partners, str) else list(partners)
    for name in names:
        if name not in players:
            hint = did_you_mean(name, players)
            raise ValueError(f"partners names {name!r}, the players are {', '.join(players)}.{hint}")
    if not set(players) - set(names):
        raise ValueError("partners names all players, so no player is left to measure with them. Add another player")
    return names


def _facts(player: Player, engine: EngineConfig, specs: Sequence[EnvSpec], original: PlayerLike) -> dict[str, Any]:
    """Return `player_facts`. An error about a missing model also suggests a similar short form of a player."""
    try:
        return player_facts(player, engine, specs)
    except ModelNotFoundError as error:
        hint = did_you_mean(original, KEYWORDS) if isinstance(original, str) else ""
        raise ModelNotFoundError(f"player {player.name!r}: {error}{hint}") from None


def _environment_facts(env: SuiteEnv) -> dict[str, Any]:
    kwargs = {}
    for name, value in env.kwargs.items():
        content = with_content(value)
        is_plain = isinstance(content, int | str | None) or (isinstance(content, float) and math.isfinite(content))
        kwargs[name] = content if is_plain else described(content)
    return {"env": env.id, "kwargs": kwargs, "max_turns": env.max_turns, "code": env.code}


def _key(match: Match, facts: Mapping[str, Mapping[str, Any]], env_facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the hash of everything that determines an episode."""
    return digest(
        {
            **env_facts[match.environment.id],
            "lineup": {agent: [name, facts[name]["fingerprint"]] for agent, name in match.lineup.items()},
            "seed": match.seed,
            "sample": match.sample,
            "version": forge_agents.__version__,
            "record": RECORD_FORMAT,
        }
    )


@dataclass(slots=True, kw_only=True)
class _Run:
    """A running benchmark."""

    players: Mapping[str, Player]
    facts: Mapping[str, dict[str, Any]]
    plan: Mapping[str, Match]
    """Episodes by key, in order."""
    log: EpisodeLog
    search: Exploitability
    limits: BenchLimits
    bar: _Bar
    engine: EngineConfig
    start: float = field(default_factory=time.monotonic)
    started: int = 0
    """Number of episodes that started."""
    played: int = 0
    play_seconds: float = 0.0
    tokens: int = 0
    """Number of sampled tokens, also in failed episodes."""
    cost: float = 0.0
    consecutive_failures: Counter[str] = field(default_factory=Counter)
    stopped: str = ""
    """Reason to start no more episodes."""

    async def play(self) -> None:
        """Play the missing episodes until all are done or a limit is reached, then measure exploitability."""
        self.log.drop_others(self.plan)
        queue = deque((key, match) for key, match in self.plan.items() if key not in self.log.done)
        self.bar.start_at(len(self.plan) - len(queue), unreadable=self.log.unreadable)
        needed = {name for _, match in queue for name in match.lineup.values()} | self.search.due
        if not needed:
            return
        policies = {name: policies_of(player) for name, player in self.players.items()}
        models = {p.name: p for name in policies if name in needed for p in policies[name] if isinstance(p, Policy)}
        async with contextlib.AsyncExitStack() as stack:
            with self.bar.startup():
                engines = await stack.enter_async_context(_fleet(models, self.engine))
            start = time.monotonic()
            workers = min(self.limits.max_concurrent_episodes, len(queue))
            with Watchdog():
                await all_or_first_error(self._worker(queue, engines) for _ in range(workers))
            self.play_seconds = time.monotonic() - start
            if not self.stopped:
                await self.search.measure(engines)

    def report(self, settings: Mapping[str, Any], environments: Sequence[SuiteEnv]) -> Report:
        """Return the report of all episodes so far, in the order of the plan, including those of earlier calls."""
        by_key = self.log.failed | self.log.done
        records = tuple(by_key[key] for key in self.plan if key in by_key)
        return Report(
            settings=settings,
            environments=tuple(replace(env, kwargs=public_arguments(env.kwargs)) for env in environments),
            players=self.facts,
            provenance=provenance(),
            records=records,
            planned=len(self.plan),
            stopped=self.stopped,
            exploitability=self.search.results(),
            timing={
                "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "seconds": round(time.monotonic() - self.start, 3),
                "play_seconds": round(self.play_seconds, 3),
                "played": self.played,
                "reused": len(records) - self.played,
                "episode_seconds": round(sum(record.seconds for record in records), 3),
            },
        )

    async def _worker(self, queue: deque[tuple[str, Match]], engines: Mapping[str, PolicyEngine]) -> None:
        """Play one episode after another."""
        while queue and not self.stopped:
            self.stopped = self._reached_limit()
            if self.stopped:
                return
            key, match = queue.popleft()
            self.started += 1
            try:
                episode = await self._episode(match, engines)
            except BudgetError as error:
                self.stopped = str(error)
                return
            record = Record.of(
                episode, key=key, sample=match.sample, lineup=match.lineup, together=match.environment.together
            )
            self.log.add(record)
            self._count(episode, match, record)

    def _count(self, episode: Episode, match: Match, record: Record) -> None:
        self.played += 1
        for agent, trajectory in episode.trajectories.items():
            prompt_tokens, sampled = tokens_of(trajectory)
            self.tokens += sampled
            self.cost += cost_of(facts_at(self.facts[match.lineup[agent]], agent), prompt_tokens, sampled)
        self.bar.step(self.tokens, failed=bool(record.error))
        for name in {record.fault} if record.fault else set(record.lineup.values()):
            self.consecutive_failures[name] = self.consecutive_failures[name] + 1 if record.error else 0
            failures = self.consecutive_failures[name]
            if failures >= _MAX_CONSECUTIVE_FAILURES and not self.stopped:
                self.stopped = f"{failures} episodes of {name} in a row failed, the last with {record.error}"

    async def _episode(self, match: Match, engines: Mapping[str, PolicyEngine]) -> Episode:
        policies = {agent: policy_at(self.players[name], agent) for agent, name in match.lineup.items()}
        for agent, policy in policies.items():
            if isinstance(policy, Random | Oracle):  # their draws differ between samples of a seed
                policies[agent] = replace(policy, seed=policy.seed + 1_000_003 * match.sample)
        rollout = Rollout(
            make_env=match.environment.make,
            env_id=match.environment.id,
            policies=policies,
            engines=engines,
            max_turns=match.environment.max_turns or 1000,
            retries=0,
        )
        # sampling depends on the episode alone, not on what else the engine does
        key = f"{match.environment.id}/{match.seed}/{match.sample}/{'/'.join(match.lineup.values())}"
        episode = (await rollout.group(match.seed, 1, rng_key=key)).episodes[0]
        if (error := episode.error) is None:
            return episode
        is_outage = not error.agent and _OUTAGE.search(error.kind)
        if not is_outage and left_by(episode, together=match.environment.together):
            return episode
        return (await rollout.group(match.seed, 1, rng_key=f"{key}/again")).episodes[0]

    def _reached_limit(self) -> str:
        """Return the limit that forbids another episode. Empty if there is none."""
        spent = {
            "max_episodes": self.started,
            "max_tokens": self.tokens,
            "max_cost": self.cost,
            "max_seconds": time.monotonic() - self.start,
        }
        for name, value in spent.items():
            limit = getattr(self.limits, name)
            if limit is not None and value >= limit:
                return f"{name}={limit} was reached"
        return ""


class _Bar(bars.Progress):
    """Progress bar with episodes, tokens, failures and the remaining time. Only in a terminal."""

    def __init__(self, total: int, *, shown: bool, interactive: bool) -> None:
        console = output.console(stderr=True, quiet=not shown or interactive)
        super().__init__(
            bars.SpinnerColumn(),
            bars.TextColumn("[bold]bench"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.fields[facts]}"),
            console=console,
            disable=console.quiet or not console.is_terminal,
        )
        self._shown, self._failed = shown, 0
        self._bench = self.add_task("bench", total=total, facts="")

    def startup(self) -> contextlib.AbstractContextManager[object]:
        """Show the startup of engines, above the bar if there is one."""
        if not self._shown:
            return contextlib.nullcontext()
        plain = functools.partial(self.print, markup=False, highlight=False, soft_wrap=True)
        return startup.show(None if self.disable else plain)

    def start_at(self, done: int, *, unreadable: int) -> None:
        """Show how many episodes are done already, and how many lines of the log were dropped."""
        self.update(self._bench, completed=done)
        if done:
            self.print(f"{done} episodes were played before and are not repeated")
        if unreadable:
            self.print(f"{unreadable} lines of the log could not be read. Their episodes are played again")

    def step(self, tokens: int, *, failed: bool) -> None:
        """Count one finished episode."""
        self._failed += failed
        facts = f"{tokens:,} tokens" + (f", {self._failed} failed" if self._failed else "")
        self.update(self._bench, advance=1, facts=facts)


@contextlib.asynccontextmanager
async def _fleet(models: Mapping[str, Policy], config: EngineConfig) -> AsyncIterator[Mapping[str, PolicyEngine]]:
    if not models:
        yield {}
        return
    from forge_agents.serving.fleet import Fleet

    fleet = await Fleet.start(models, config)
    try:
        yield fleet.policy_engines
    finally:
        await fleet.stop()
