"""`benchmark`: plays a suite and reports.

In: players and a suite. Out: a `Report`; every episode is kept in the log as soon as it has ended. Waits for engines,
endpoints and people, each with its own deadline.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import hashlib
import itertools
import os
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeVar

from forge_agents.bench.costs import cost_of, priced
from forge_agents.bench.entrants import named_players
from forge_agents.bench.exploits import Exploits, ModelExploits, known_exploits
from forge_agents.bench.fingerprints import digest, player_facts, provenance
from forge_agents.bench.limits import BenchLimits
from forge_agents.bench.progress import Progress
from forge_agents.bench.records import EpisodeLog, Record, tokens_of
from forge_agents.bench.report import Report
from forge_agents.bench.schedule import Match, SuiteLike, World, matches, seeds_of, suite_ids, worlds_of
from forge_agents.envs import registry
from forge_agents.envs.registry import SuiteDefaults
from forge_agents.errors import BudgetError
from forge_agents.policy import AnyPolicy, Human, Policy, Random, Sampling
from forge_agents.rollout.players import Generator, Served
from forge_agents.rollout.rollout import Rollout
from forge_agents.runtime.waits import all_or_first_error
from forge_agents.serving.config import EngineConfig
from forge_agents.types import Completion, Episode

T = TypeVar("T")
_HOPELESS = 32
"""Failed episodes of one player in a row after which no more is begun: an endpoint is down, or a function broken."""


def benchmark(
    players: Mapping[str, AnyPolicy | str],
    suite: SuiteLike = "core-v1",
    *,
    episodes: int | None = None,
    seed: int | None = None,
    swap_seats: bool | None = None,
    samples: int = 1,
    exploitability_samples: int = 0,
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
        players: By name: a policy of any kind, or words as `forge_agents.bench.entrants.read_player` takes them.
        suite: A suite's name, an environment's id, several ids, or arguments by id. It says what is None below, and how
            much models in words may write; ids mean what `SuiteDefaults` has by default.
        episodes: Seeds for every environment and line-up.
        seed: Chooses the episodes' seeds; none is a seed that training draws.
        swap_seats: Each of a pair takes each seat. Otherwise the one named first takes the first seat.
        samples: Episodes of each seed, for pass@k.
        exploitability_samples: Answers of each model at every information set of games such as Kuhn and Leduc poker,
            from which its exploitability is computed; 0 leaves it out. They count in no limit. Models that may only
            write legal actions are asked for their exact probabilities instead.
        limits: What may be spent; past it the report is incomplete and says so.
        engine: Settings of the engines that serve models; the models are filled in.
        out_dir: Folder of ``episodes.jsonl``. Several benchmarks may use it, one after the other.
        progress: Show a progress bar in a terminal.

    Returns:
        The report; `Report.complete` says whether all was played.

    Raises:
        UnknownIdError: No such suite or environment.
        ValueError, TypeError: Players or numbers that make no sense.
        RunFolderError: `out_dir` cannot be used, or another benchmark writes there.
        ActorDiedError, StallError: An engine is gone. What was played is kept: call again to go on.
    """
    suite_name, arguments = suite_ids(suite)
    own = registry.suite_defaults(suite_name)
    settings = _settings(
        suite_name,
        own,
        {"episodes": episodes, "seed": seed, "swap_seats": swap_seats},
        {"samples": samples, "exploitability_samples": exploitability_samples},
    )
    named = named_players(players, Sampling(max_tokens=own.max_tokens))
    limits, engine = limits or BenchLimits(), engine or EngineConfig()
    if any(isinstance(player, Human) for player in named.values()):  # one terminal, and no bar across it
        limits, progress = replace(limits, max_live_episodes=1), False
    plan = _Plan(
        players=named,
        facts={name: player_facts(player, engine) for name, player in named.items()},
        worlds=worlds_of(arguments),
        settings=settings,
    )
    _check_prices(limits, plan.facts)
    with EpisodeLog(out_dir) as log, Progress(plan.total, shown=progress) as shown:
        exploits = plan.model_exploits(out_dir)
        run = _Run(plan=plan, log=log, exploits=exploits, limits=limits, shown=shown, engine=engine)
        try:
            _run_to_end(run.play())
        except KeyboardInterrupt:
            raise KeyboardInterrupt(f"stopped; {log.path} keeps what was played: run it again to go on") from None
        return plan.report(
            log,
            exploits=exploits.found(),
            stopped=run.stopped,
            played=run.played,
            seconds=time.monotonic() - run.started,
            play_seconds=run.play_seconds,
        )


def _settings(
    suite: str, own: SuiteDefaults, asked: Mapping[str, int | None], more: Mapping[str, int]
) -> dict[str, Any]:
    """Those of the report: what is asked, or else what the suite says; of a registered suite also that."""
    found: dict[str, Any] = {n: getattr(own, n) if value is None else value for n, value in asked.items()} | dict(more)
    for name, least in (("episodes", 1), ("samples", 1), ("seed", 0), ("exploitability_samples", 0)):
        if found[name] < least:
            raise ValueError(f"{name}={found[name]} must be at least {least}")
    named = {"suite_defaults": asdict(own)} if suite in registry.list_suites() else {}
    return {"suite": suite, **found, **named}


def _check_prices(limits: BenchLimits, facts: Mapping[str, Mapping[str, Any]]) -> None:
    if limits.max_cost is not None and not any(map(priced, facts.values())):
        raise ValueError(
            f"max_cost={limits.max_cost} and no player has a price; set price_in and price_out of the endpoints"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What is to be played."""

    players: Mapping[str, AnyPolicy]
    facts: Mapping[str, dict[str, Any]]
    worlds: Sequence[World]
    settings: Mapping[str, Any]

    def matches(self) -> Iterator[Match]:
        s = self.settings
        seeds = seeds_of(s["seed"], s["episodes"])
        return matches(self.worlds, tuple(self.players), seeds, samples=s["samples"], swap_seats=s["swap_seats"])

    @property
    def total(self) -> int:
        return sum(1 for _ in self.matches())

    def key(self, match: Match) -> str:
        """Hash of all that decides how an episode goes."""
        import forge_agents

        return digest(
            {
                "env": match.world.id,
                "kwargs": _plain(match.world.kwargs),
                "max_turns": match.world.max_turns,
                "code": match.world.code,
                "lineup": {seat: [name, self.facts[name]["fingerprint"]] for seat, name in match.lineup.items()},
                "seed": match.seed,
                "sample": match.sample,
                "version": forge_agents.__version__,
            }
        )

    def models(self, names: Set[str]) -> dict[str, Policy]:
        """Those of `names` that need an engine."""
        return {name: p for name, p in self.players.items() if isinstance(p, Policy) and name in names}

    def model_exploits(self, folder: str | os.PathLike[str]) -> ModelExploits:
        prints = {name: facts["fingerprint"] for name, facts in self.facts.items()}
        samples = self.settings["exploitability_samples"]
        return ModelExploits(folder, self.worlds, self.models(self.players.keys()), prints, samples=samples)

    def report(
        self, log: EpisodeLog, *, exploits: Exploits, stopped: str, played: int, seconds: float, play_seconds: float
    ) -> Report:
        keys = [self.key(match) for match in self.matches()]
        known = log.failed | log.done
        records = tuple(known[key] for key in keys if key in known)
        return Report(
            settings=dict(self.settings),
            worlds=tuple(self.worlds),
            players=dict(self.facts),
            provenance=provenance(),
            records=records,
            planned=len(keys),
            stopped=stopped,
            exploitability=self._all_exploits(exploits),
            timing={
                "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "seconds": round(seconds, 3),
                "play_seconds": round(play_seconds, 3),
                "played": played,
                "reused": len(records) - played,
                "episode_seconds": round(sum(record.seconds for record in records), 3),
            },
        )

    def _all_exploits(self, of_models: Exploits) -> Exploits:
        """Of all players, in their order."""
        known = known_exploits(self.worlds, self.players)
        found = {world.id: known.get(world.id, {}) | of_models.get(world.id, {}) for world in self.worlds}
        return {env: {name: row[name] for name in self.players if name in row} for env, row in found.items() if row}


@dataclass(slots=True, kw_only=True)
class _Run:
    """A benchmark under way."""

    plan: _Plan
    log: EpisodeLog
    exploits: ModelExploits
    limits: BenchLimits
    shown: Progress
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
        """Play what is not in the log yet, until it is done or a limit is met; then exploit what is left."""
        todo = [match for match in self.plan.matches() if self.plan.key(match) not in self.log.done]
        self.shown.start_at(self.plan.total - len(todo), unreadable=self.log.unreadable)
        needed = {name for match in todo for name in match.lineup.values()} | self.exploits.due
        if not needed:
            return
        async with _fleet(self.plan.models(needed), self.engine) as served:
            begun = time.monotonic()
            queue = deque(todo)
            lanes = min(self.limits.max_live_episodes, len(todo))
            await all_or_first_error(self._lane(queue, served) for _ in range(lanes))
            self.play_seconds = time.monotonic() - begun
            if not self.stopped:
                await self.exploits.measure(served)

    async def _lane(self, queue: deque[Match], served: Mapping[str, Served]) -> None:
        """One episode after another."""
        while queue and not self.stopped:
            self.stopped = self._limit_met()
            if self.stopped:
                return
            match = queue.popleft()
            self.begun += 1
            try:
                episode = await _episode(match, self.plan.players, served)
            except BudgetError as spent:
                self.stopped = str(spent)
                return
            record = Record.of(episode, key=self.plan.key(match), sample=match.sample, lineup=match.lineup)
            self.log.add(record)
            self.played += 1
            self._count(episode, match)
            self.shown.step(self.played, self.tokens, failed=bool(record.error))
            self._watch(record)

    def _count(self, episode: Episode, match: Match) -> None:
        """What an episode spent, a failed one included."""
        for agent, trajectory in episode.trajectories.items():
            read, sampled = tokens_of(trajectory)
            self.tokens += sampled
            self.cost += cost_of(self.plan.facts[match.lineup[agent]], read, sampled)

    def _watch(self, record: Record) -> None:
        """Stop when a player's episodes fail one after another."""
        for name in set(record.lineup.values()):
            self.failed_in_a_row[name] = self.failed_in_a_row[name] + 1 if record.error else 0
            if self.failed_in_a_row[name] >= _HOPELESS and not self.stopped:
                self.stopped = f"{_HOPELESS} episodes of {name} in a row failed, the last with {record.error}"

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


async def _episode(match: Match, players: Mapping[str, AnyPolicy], served: Mapping[str, Served]) -> Episode:
    sampled = {name: _sampled(players[name], match.sample) for name in match.lineup.values()}
    where = f"{match.world.id}/{match.seed}/{match.sample}"
    own = {
        name: Served(_Seeded(served[name].engine, f"{where}/{name}"), served[name].renderer)
        for name in sampled
        if name in served
    }
    rollout = Rollout(
        make_env=match.world.make,
        env_id=match.world.id,
        seats={seat: sampled[name] for seat, name in match.lineup.items()},
        served=own,
        max_turns=match.world.max_turns or 1000,
    )
    return (await rollout.group(match.seed, 1)).episodes[0]


def _sampled(player: AnyPolicy, sample: int) -> AnyPolicy:
    """A random player draws anew in each sample of a seed."""
    return replace(player, seed=player.seed + 1_000_003 * sample) if isinstance(player, Random) else player


class _Seeded:
    """An engine whose draws in one episode follow from the episode alone, whatever else the engine does.

    Args:
        engine: What answers.
        key: Names the episode and the player.
    """

    def __init__(self, engine: Generator, key: str) -> None:
        self._engine, self._key, self._count = engine, key, itertools.count()

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and response together."""
        return self._engine.max_model_len

    async def generate(
        self,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        *,
        choices: Sequence[str] = (),
        seed: int | None = None,
    ) -> Completion:
        """As the engine's; a request without a seed gets one of its own."""
        text = f"{self._key}/{next(self._count)}"
        own = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
        engine: Any = self._engine
        seed = own if seed is None else seed
        done: Completion = await engine.generate(prompt_ids, sampling, choices=choices, seed=seed)
        return done


@contextlib.asynccontextmanager
async def _fleet(models: Mapping[str, Policy], config: EngineConfig) -> AsyncIterator[Mapping[str, Served]]:
    if not models:
        yield {}
        return
    from forge_agents.serving.fleet import Fleet

    fleet = await Fleet.start(models, config)
    try:
        yield fleet.served
    finally:
        await fleet.stop()


def _run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; inside a running loop, as in a notebook, in a thread of its own, which Ctrl-C ends too."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    running: concurrent.futures.Future[Callable[[], object]] = concurrent.futures.Future()

    async def inside() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
        running.set_result(lambda: loop.call_soon_threadsafe(task.cancel))
        return await task

    with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="forge-bench") as pool:
        done = pool.submit(asyncio.run, inside())
        try:
            return done.result()
        except KeyboardInterrupt:
            running.result()()
            raise


def _plain(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value if isinstance(value, int | float | str | None) else repr(value) for name, value in kwargs.items()
    }
