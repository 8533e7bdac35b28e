"""`benchmark`: plays a suite and reports.

In: players and a suite. Out: a `Report`; every episode is kept in the log as soon as it has ended. Waits for engines,
endpoints and people, each with its own deadline.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich import progress as bars
from rich.console import Console

import forge_agents
from forge_agents.bench.code import described
from forge_agents.bench.entrants import Player, PlayerLike, check_agents, named_players, policies_of, policy_at
from forge_agents.bench.exploitability import Exploitability
from forge_agents.bench.fingerprints import digest, player_facts, provenance, with_content
from forge_agents.bench.plan import (
    BenchLimits,
    Match,
    SuiteLike,
    matches,
    suite_ids,
    worlds_of,
)
from forge_agents.bench.records import RECORD_FORMAT, EpisodeLog, Record, cost_of, facts_at, priced, tokens_of
from forge_agents.bench.report import Report
from forge_agents.envs import registry
from forge_agents.envs.spec import EnvSpec
from forge_agents.errors import BudgetError, ModelNotFoundError, did_you_mean
from forge_agents.models.resolve import resolve
from forge_agents.policy import KEYWORDS, Human, Oracle, Policy, Random, Sampling
from forge_agents.rollout.players import PolicyEngine
from forge_agents.rollout.rollout import Rollout
from forge_agents.runtime import startup
from forge_agents.runtime.interrupts import LoopRunner
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.serving.config import EngineConfig
from forge_agents.types import Episode

BOARD = "board.json"
"""The report's name in the folder."""
_HOPELESS = 32
"""Failed episodes of one player in a row after which no more is begun: an endpoint is down, or a function broken."""


def benchmark(
    players: Mapping[str, PlayerLike],
    suite: SuiteLike = "core-v1",
    *,
    episodes: int | None = None,
    seed: int | None = None,
    swap_seats: bool | None = None,
    samples: int = 1,
    exploitability_samples: int = 0,
    partners: Sequence[str] = (),
    limits: BenchLimits | None = None,
    engine: EngineConfig | None = None,
    out_dir: str | os.PathLike[str] = "runs/bench",
    progress: bool = True,
) -> Report:
    """Play a suite with every player and report, with the uncertainty of every number.

    Every player gets the same seeds. In games of several seats each player sits in all seats, and each pair of players
    meets: one of them in one seat, the other in the rest. The same arguments give the same report; a benchmark that
    was stopped or killed goes on where it was when it is called again, because episodes are kept in `out_dir` by what
    decides how they go: environment, players' weights or code, sampling, seed, version of this package.

    Args:
        players: By name: a policy of any kind, words as `forge_agents.bench.entrants.read_player` takes them, or a
            mapping from agent to one of both, which plays as one team.
        suite: A suite's name, an environment's id, several of both in one list, or their arguments by name or id. It
            says what is None below, and how much models in words may write; ids mean what `SuiteDefaults` has by
            default, several what `suite_defaults` says of them.
        episodes: Seeds for every environment and line-up.
        seed: Chooses the episodes' seeds; none is a seed that training draws.
        swap_seats: Each of a pair takes each seat. Otherwise the one named first takes the first seat.
        samples: Episodes of each seed, for pass@k.
        exploitability_samples: Answers of each model at every information set of games such as Kuhn and Leduc poker,
            from which its exploitability is computed; 0 leaves it out. They count in no limit. Models that may only
            write legal actions are asked for their exact probabilities instead.
        partners: Names of those of the players that the others are measured with in games that are not all against
            each other, such as players that they were never trained with. They do not meet each other. Empty: every
            player is measured with all the others.
        limits: What may be spent; past it the report is incomplete and says so.
        engine: Settings of the engines that serve models; the models are filled in.
        out_dir: Folder of ``episodes.jsonl``, which several benchmarks may use, one after the other, and of
            ``board.json``, the report of the last of them.
        progress: Show a progress bar in a terminal.

    Raises:
        UnknownIdError: No such suite or environment.
        ValueError, TypeError: Players or numbers that make no sense, or an oracle where an environment has none.
        RunFolderError: `out_dir` cannot be used, or another benchmark writes there.
        ActorDiedError, StallError: An engine is gone. What was played is kept: call again to go on.
    """
    suite_name, arguments = suite_ids(suite)
    own = registry.suite_defaults(suite_name)
    asked = {"episodes": episodes, "seed": seed, "swap_seats": swap_seats}
    settings: dict[str, Any] = {
        "suite": suite_name,
        **{name: getattr(own, name) if value is None else value for name, value in asked.items()},
        "samples": samples,
        "exploitability_samples": exploitability_samples,
    }
    for name, least in (("episodes", 1), ("samples", 1), ("seed", 0), ("exploitability_samples", 0)):
        if settings[name] < least:
            raise ValueError(f"{name}={settings[name]} must be at least {least}")
    if partners:
        partners = settings["partners"] = _partners(partners, players)
    if suite_name in registry.list_suites():
        settings["suite_defaults"] = asdict(own)
    named = named_players(players, Sampling(max_tokens=own.max_tokens))
    limits, engine = limits or BenchLimits(), engine or EngineConfig()
    everyone = [policy for player in named.values() for policy in policies_of(player)]
    if human := any(isinstance(policy, Human) for policy in everyone):  # one terminal, and no bar across it
        limits = replace(limits, max_concurrent_episodes=1)
    specs = [registry.spec(id_) for id_ in arguments]
    facts = {name: _facts(player, engine, specs, players[name]) for name, player in named.items()}
    worlds = worlds_of(arguments)
    check_agents(named, {world.id: world.seats for world in worlds})
    due = matches(
        worlds, tuple(named), settings["seed"], settings["episodes"],
        samples=samples, swap_seats=settings["swap_seats"], partners=partners,
    )  # fmt: skip
    plan = {_key(match, facts): match for match in due}
    if limits.max_cost is not None and not any(map(priced, facts.values())):
        raise ValueError(
            f"max_cost={limits.max_cost} and no player has a price; set price_in and price_out of the endpoints"
        )
    prints = {name: known["fingerprint"] for name, known in facts.items()}
    with EpisodeLog(out_dir) as log, _Bar(len(plan), shown=progress, across=not human) as bar:
        searched = Exploitability(out_dir, worlds, named, prints, samples=exploitability_samples)
        run = _Run(
            players=named, facts=facts, plan=plan, log=log, searched=searched, limits=limits, bar=bar, engine=engine
        )
        kept = f"stopped; {log.path} keeps what was played: run it again to go on"
        with contextlib.closing(LoopRunner(status=lambda: kept)) as loop:
            loop.run(run.play())
        timing = run.timing()
        report = Report(
            settings=settings,
            worlds=tuple(worlds),
            players=facts,
            provenance=provenance(),
            records=run.records(),
            planned=len(plan),
            stopped=run.stopped,
            exploitability=searched.found(),
            timing=timing,
        )
        report.save(log.path.with_name(BOARD))
        return report


def _partners(partners: Sequence[str], players: Mapping[str, object]) -> list[str]:
    """The names, checked. Raises ValueError where one is nobody's, or nobody is left to be measured."""
    named = [partners] if isinstance(partners, str) else list(partners)
    for name in named:
        if name not in players:
            near = did_you_mean(name, players)
            raise ValueError(f"partners names {name!r}, the players are {', '.join(players)}.{near}")
    if not set(players) - set(named):
        raise ValueError("partners names all players, so nobody is left to be measured with them; add another player")
    return named


def _facts(
    player: Player, engine: EngineConfig, specs: Sequence[EnvSpec], given: PlayerLike
) -> dict[str, Any]:
    """What decides how a player plays.

    Raises:
        ModelNotFoundError: There is no such model; the message names a player in words that is near.
        ValueError: An oracle in an environment that has none.
    """
    try:
        return player_facts(player, engine, specs)
    except ModelNotFoundError as error:
        near = did_you_mean(given, KEYWORDS) if isinstance(given, str) else ""
        raise ModelNotFoundError(f"player {player.name!r}: {error}{near}") from None


def _key(match: Match, facts: Mapping[str, Mapping[str, Any]]) -> str:
    """Hash of all that decides how an episode goes."""
    world = match.world
    given = {name: with_content(value) for name, value in world.kwargs.items()}
    kwargs = {n: v if isinstance(v, int | float | str | None) else described(v) for n, v in given.items()}
    return digest(
        {
            "env": world.id,
            "kwargs": kwargs,
            "max_turns": world.max_turns,
            "code": world.code,
            "lineup": {seat: [name, facts[name]["fingerprint"]] for seat, name in match.lineup.items()},
            "seed": match.seed,
            "sample": match.sample,
            "version": forge_agents.__version__,
            "record": RECORD_FORMAT,
        }
    )


@dataclass(slots=True, kw_only=True)
class _Run:
    """A benchmark under way."""

    players: Mapping[str, Player]
    facts: Mapping[str, dict[str, Any]]
    plan: Mapping[str, Match]
    """By key, in the order in which they are played."""
    log: EpisodeLog
    searched: Exploitability
    limits: BenchLimits
    bar: _Bar
    engine: EngineConfig
    started: float = field(default_factory=time.monotonic)
    begun: int = 0
    played: int = 0
    play_seconds: float = 0.0
    tokens: int = 0
    cost: float = 0.0
    failed_in_a_row: Counter[str] = field(default_factory=Counter)
    stopped: str = ""

    async def play(self) -> None:
        """Play what is not in the log yet, until it is done or a limit is met; then search what can be searched."""
        queue = deque((key, match) for key, match in self.plan.items() if key not in self.log.done)
        self.bar.start_at(len(self.plan) - len(queue), unreadable=self.log.unreadable)
        needed = {name for _, match in queue for name in match.lineup.values()} | self.searched.due
        if not needed:
            return
        everyone = {name: policies_of(player) for name, player in self.players.items()}
        models = {p.name: p for name in everyone if name in needed for p in everyone[name] if isinstance(p, Policy)}
        engine = _unnamed(self.engine, [policy for policies in everyone.values() for policy in policies])
        async with contextlib.AsyncExitStack() as stack:
            with self.bar.starts():
                served = await stack.enter_async_context(_fleet(models, engine))
            begun = time.monotonic()
            lanes = min(self.limits.max_concurrent_episodes, len(queue))
            await all_or_first_error(self._lane(queue, served) for _ in range(lanes))
            self.play_seconds = time.monotonic() - begun
            if not self.stopped:
                await self.searched.measure(served)

    def records(self) -> tuple[Record, ...]:
        """What is known of the plan, in its order, whichever call played it."""
        known = self.log.failed | self.log.done
        return tuple(known[key] for key in self.plan if key in known)

    def timing(self) -> dict[str, Any]:
        """What differs from run to run."""
        records = self.records()
        return {
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": round(time.monotonic() - self.started, 3),
            "play_seconds": round(self.play_seconds, 3),
            "played": self.played,
            "reused": len(records) - self.played,
            "episode_seconds": round(sum(record.seconds for record in records), 3),
        }

    async def _lane(self, queue: deque[tuple[str, Match]], served: Mapping[str, PolicyEngine]) -> None:
        """One episode after another."""
        while queue and not self.stopped:
            self.stopped = self._limit_met()
            if self.stopped:
                return
            key, match = queue.popleft()
            self.begun += 1
            try:
                episode = await self._episode(match, served)
            except BudgetError as spent:
                self.stopped = str(spent)
                return
            record = Record.of(
                episode, key=key, sample=match.sample, lineup=match.lineup, together=match.world.together
            )
            self.log.add(record)
            self.played += 1
            for agent, trajectory in episode.trajectories.items():  # of a failed episode, too: it was spent
                read, sampled = tokens_of(trajectory)
                self.tokens += sampled
                self.cost += cost_of(facts_at(self.facts[match.lineup[agent]], agent), read, sampled)
            self.bar.step(self.tokens, failed=bool(record.error))
            for name in set(record.lineup.values()):
                self.failed_in_a_row[name] = self.failed_in_a_row[name] + 1 if record.error else 0
                if self.failed_in_a_row[name] >= _HOPELESS and not self.stopped:
                    self.stopped = f"{_HOPELESS} episodes of {name} in a row failed, the last with {record.error}"

    async def _episode(self, match: Match, served: Mapping[str, PolicyEngine]) -> Episode:
        seats = {seat: policy_at(self.players[name], seat) for seat, name in match.lineup.items()}
        for seat, player in seats.items():
            if isinstance(player, Random | Oracle):  # it draws anew in each sample of a seed
                seats[seat] = replace(player, seed=player.seed + 1_000_003 * match.sample)
        rollout = Rollout(
            make_env=match.world.make,
            env_id=match.world.id,
            policies=seats,
            engines=served,
            max_turns=match.world.max_turns or 1000,
        )
        # models' draws follow from the episode alone: the same whatever else the engine does, and of nobody else
        draw = f"{match.world.id}/{match.seed}/{match.sample}/{'/'.join(match.lineup.values())}"
        return (await rollout.group(match.seed, 1, rng_key=draw)).episodes[0]

    def _limit_met(self) -> str:
        """Which limit forbids to begin another episode; empty where none does."""
        spent = {
            "max_episodes": self.begun,
            "max_tokens": self.tokens,
            "max_cost": self.cost,
            "max_seconds": time.monotonic() - self.started,
        }
        for name, value in spent.items():
            most = getattr(self.limits, name)
            if most is not None and value >= most:
                return f"{name}={most} was reached"
        return ""


class _Bar(bars.Progress):
    """Episodes done, tokens, failures and the time left, in a terminal; nothing elsewhere."""

    def __init__(self, total: int, *, shown: bool, across: bool) -> None:
        console = Console(stderr=True)
        super().__init__(
            bars.SpinnerColumn(),
            bars.TextColumn("[bold]bench"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.fields[facts]}"),
            console=console,
            disable=not (shown and across and console.is_terminal),
        )
        self._shown, self._across, self._failed = shown, across, 0
        self._bench = self.add_task("bench", total=total, facts="")

    def starts(self) -> contextlib.AbstractContextManager[object]:
        """Shows engines that start: above the bar, or by themselves where there is none."""
        if not self._shown:
            return contextlib.nullcontext()
        return startup.show(None if self.disable else self._line)

    def _line(self, text: str) -> None:
        self.print(text, markup=False, highlight=False, soft_wrap=True)

    def start_at(self, done: int, *, unreadable: int) -> None:
        """`done` episodes are known already; `unreadable` lines of the log were dropped."""
        self.update(self._bench, completed=done)
        if done and self._shown and self._across:
            self.print(f"{done} episodes were played before and are not repeated")
        if unreadable and self._shown and self._across:
            self.print(f"{unreadable} lines of the log could not be read; their episodes are played again")

    def step(self, tokens: int, *, failed: bool) -> None:
        """One more episode has ended."""
        self._failed += failed
        facts = f"{tokens:,} tokens" + (f", {self._failed} failed" if self._failed else "")
        self.update(self._bench, advance=1, facts=facts)


def _unnamed(config: EngineConfig, players: Iterable[object]) -> EngineConfig:
    """`config` without a model, which any of the `players` may have: engines start for those that are left to play.

    Raises:
        ValueError: None of them has it.
    """
    if not config.model:
        return config
    from forge_agents.serving.fleet import check_policy_models

    check_policy_models(config, [resolve(player.model) for player in players if isinstance(player, Policy)])
    return replace(config, model="")


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
