"""Plan of a benchmark: settings, environments of the suite, and the episodes to play in a fixed order."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any, ClassVar, Literal, TypeAlias

from pydantic import StrictBool, StrictFloat, StrictInt

from forge_agents.bench.entrants import Player, named_players, short_names
from forge_agents.bench.fingerprints import code_of
from forge_agents.envs import registry
from forge_agents.envs.env import acts_together, sides_of
from forge_agents.envs.seeds import BENCHMARKS_FROM, draw_seeds
from forge_agents.envs.spec import AnyEnv, EnvSpec
from forge_agents.policy import Endpoint, Sampling
from forge_agents.programs.program import Program
from forge_agents.rollout.episode import PlayableEnv
from forge_agents.rollout.rollout import inspect_env
from forge_agents.serving.config import EngineConfig
from forge_agents.settings import MAX_COUNT, settings_class

Kind: TypeAlias = Literal["single", "cooperative", "competitive", "mixed"]
"""An agent, agents with one goal, opponents, or mixed motives."""
TEAMS: tuple[Kind, ...] = ("cooperative", "mixed")
"""Kinds in which players are partners."""
SuiteLike: TypeAlias = str | Sequence[str] | Mapping[str, Mapping[str, Any]]
"""A suite's name, an environment's id, several of both, or arguments by name or id. ``module:name`` imports
the module."""


@settings_class
@dataclass(frozen=True, kw_only=True)
class BenchLimits:
    """Limits of one call of `benchmark`. Episodes of earlier calls do not count."""

    max_episodes: int | None = None
    """Maximum number of episodes. None: no limit."""
    max_tokens: int | None = None
    """Number of sampled tokens after which no episode starts. None: no limit."""
    max_cost: float | None = None
    """Cost after which no episode starts, in the unit of the endpoints' prices. None: no limit."""
    max_seconds: float | None = None
    """Seconds after which no episode starts. None: no limit."""
    max_concurrent_episodes: int = 64
    """Maximum number of concurrent episodes. At least 1."""

    def __post_init__(self) -> None:
        for name in ("max_episodes", "max_tokens", "max_cost", "max_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be above 0, or None for no limit")
        if self.max_concurrent_episodes < 1:
            raise ValueError(f"max_concurrent_episodes={self.max_concurrent_episodes} must be at least 1")


@dataclass(frozen=True, kw_only=True)
class BenchSampling(Sampling):
    """`Sampling` whose maximum length may be left to the suite."""

    max_tokens: int | None = None  # type: ignore[assignment]  # not known before the suite is
    """Maximum number of tokens of a response, at least 1. null: the suite's value, or 64 for a single environment."""

    def __post_init__(self) -> None:
        self.of_length(1)  # runs the checks of Sampling

    def of_length(self, max_tokens: int) -> Sampling:
        """Return the sampling with `max_tokens` as the default length."""
        length = max_tokens if self.max_tokens is None else self.max_tokens
        return Sampling(**{**vars(self), "max_tokens": length})


@settings_class
@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """Settings of a benchmark."""

    players: dict[str, str | dict[str, str]] = field(default_factory=dict)
    """Players by name: random, human, oracle, package.module:function, http://host:port/v1#model, a run's folder or a
    model, or one of these for each agent."""
    cross_play: list[str] = field(default_factory=list)
    """More players in the same form, named after the ends of the texts. A command line may list several."""
    partners: list[str] = field(default_factory=list)
    """Names of players that only serve as partners of the others and do not meet each other. Empty: all."""
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    """OpenAI-compatible servers by name, with all settings of `Endpoint`. Endpoints are players, too."""
    suite: str | list[str] = "core-v1"
    """A suite's name or an environment's id, or several as a list or joined by +. module:NAME first imports the module
    that registers the id."""
    episodes: int | None = None
    """Number of seeds per environment and line-up. null: the suite's value, or 64 for a single environment."""
    seed: int | None = None
    """Seed that chooses the episodes' seeds. null: the suite's value, or 0 for a single environment."""
    swap_agents: bool | None = None
    """Whether two players exchange their agents. null: the suite's value, or true for a single environment."""
    samples: int = 1
    """Number of episodes per seed, for pass@k."""
    exploitability_samples: int = 0
    """Number of answers per model and information set from which exploitability is computed, in games such as Kuhn and
    Leduc poker. 0 disables it."""
    sampling: BenchSampling = field(default_factory=BenchSampling)
    """Sampling of `players`."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Settings of all engines."""
    limits: BenchLimits = field(default_factory=BenchLimits)
    """Limits of this call. A benchmark that reaches a limit continues when it is run again."""
    out_dir: str = "runs/bench"
    """Folder of episodes.jsonl and of the report, board.json."""
    json: str = ""
    """Another JSON file for the report. Empty: none."""
    html: str = ""
    """HTML file for the report. Empty: none."""
    markdown: str = ""
    """Markdown file for the report. Empty: none."""

    def __post_init__(self) -> None:
        both = self.players.keys() & self.endpoints.keys()
        if both:
            raise ValueError(f"{min(both)!r} names a player and an endpoint. Give each its own name")

    def entrants(self) -> dict[str, Player]:
        """Return all players by name, endpoints last. Raises ValueError if two players have one name."""
        sampling = self.sampling.of_length(registry.suite_defaults(suite_ids(self.suite)[0]).max_tokens)
        crossed = short_names(self.cross_play)
        for name in crossed.keys() & (self.players.keys() | self.endpoints.keys()):
            raise ValueError(
                f"{crossed[name]!r} of cross_play would be called {name!r}, as another player is. Give it another "
                f"name: --players.NAME {crossed[name]}"
            )
        return named_players({**self.players, **crossed, **self.endpoints}, sampling)


# ---- episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteEnv:
    """An environment of a suite with its arguments."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    id: str
    seats: tuple[str, ...]
    kind: Kind
    max_turns: StrictInt | None
    sides: tuple[tuple[str, ...], ...] = ()
    """Groups of agents that belong to one player. Empty: every agent is a side."""
    together: StrictBool = False
    """Whether all agents decide at the same time."""
    zero_sum: StrictBool = False
    """Whether it is registered as a zero-sum game. For others, the observed rewards decide."""
    max_reward: StrictFloat | None = None
    """Maximum reward of an agent in an episode. None if the environment does not define it."""
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Arguments that override those of the id."""
    code: str = ""
    """Hash of the environment's source and library version."""

    def __post_init__(self) -> None:
        sides = tuple(map(tuple, self.sides)) or tuple((seat,) for seat in self.seats)
        if sorted(itertools.chain(*sides)) != sorted(self.seats):
            raise ValueError(
                f"sides of {self.id} are {sides}. Each of its agents, {', '.join(self.seats)}, belongs to one side"
            )
        object.__setattr__(self, "sides", sides)

    def make(self) -> AnyEnv:
        """Return a new environment."""
        return registry.make(self.id, **self.kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A planned episode."""

    environment: SuiteEnv
    lineup: Mapping[str, str] = field(hash=False)
    """Player by agent."""
    seed: int
    sample: int
    """Index among the episodes of this seed and line-up."""

    @property
    def played(self) -> tuple[str, int, int, tuple[tuple[str, str], ...]]:
        """`Record.played` of its record."""
        return self.environment.id, self.seed, self.sample, tuple(sorted(self.lineup.items()))


def suite_ids(suite: SuiteLike) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return the suite's name and the environments' arguments by id, in order.

    Several names and ids are joined by ``+``. The joined name is valid as well. An environment of several suites is
    played once, with the arguments of its own id if that is listed.

    Raises:
        UnknownIdError: A suite or environment is unknown. The message names similar ones.
        ValueError: No names or ids, or one twice.
    """
    is_suite = isinstance(suite, str) and suite in registry.list_suites()
    words = list(suite) if not isinstance(suite, str) else [suite] if is_suite else suite.split("+")
    names = [registry.spec(name).id if "/" in name else registry.suite_name(name) for name in words]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"a suite needs one or more different ids or suites, got {words}")
    arguments_of = suite if isinstance(suite, Mapping) else {}
    arguments: dict[str, dict[str, Any]] = {}
    for word, name in zip(words, names, strict=True):
        for id_ in (name,) if "/" in name else registry.suite(name):
            if id_ not in arguments or id_ == name:
                arguments[id_] = dict(arguments_of.get(word, {}))
    return "+".join(names), arguments


def suite_envs(arguments: Mapping[str, Mapping[str, Any]]) -> list[SuiteEnv]:
    """Return the environments, made once each to read their agents."""
    return [
        inspect_env(partial(registry.make, id_, **kwargs), id_, partial(_suite_env, registry.spec(id_), kwargs))
        for id_, kwargs in arguments.items()
    ]


def _suite_env(spec: EnvSpec, kwargs: Mapping[str, Any], env: PlayableEnv) -> SuiteEnv:
    seats, sides, max_reward = tuple(env.possible_agents), sides_of(env), getattr(env, "max_reward", None)
    if max(map(len, sides), default=1) > 1 and {**spec.kwargs, **kwargs}.get("role_shuffle"):
        raise ValueError(
            f"role_shuffle reassigns the agents of {spec.id}, whose sides are {sides}. Leave it out: a benchmark lets "
            "each player take each side"
        )
    return SuiteEnv(
        id=spec.id,
        seats=seats,
        kind=_kind(seats, spec.tags, program=isinstance(env.unwrapped, Program)),
        max_turns=spec.max_turns,
        sides=sides,
        together=acts_together(env),
        zero_sum="zero-sum" in spec.tags,
        max_reward=float(max_reward) if isinstance(max_reward, Real) else None,
        kwargs=dict(kwargs),
        code=code_of(spec),
    )


def _kind(seats: Sequence[str], tags: Sequence[str], *, program: bool) -> Kind:
    """Return the kind that the tags define. By default agents are partners in a program and opponents elsewhere."""
    if len(seats) == 1:
        return "single"
    if "cooperative" in tags:
        return "cooperative"
    if "mixed-motive" in tags:
        return "mixed"
    rivals = not program or "zero-sum" in tags or "competitive" in tags
    return "competitive" if rivals else "cooperative"


def seeds_of(seed: int, episodes: int, env_id: str = "") -> list[int]:
    """Return the episodes' seeds, the same for every player. Fewer episodes use the first of them.

    All environments share the seeds, but levels of one game have different ones, because the same deal at four levels
    would be one deal.
    """
    level = env_id.partition("@")[2]
    key = [seed, 0xBE7C4, *([int(level)] if level else [])]
    return draw_seeds(key, episodes, first=BENCHMARKS_FROM, size=2**30)


def lineups(
    players: Sequence[str], sides: Sequence[Sequence[str]], *, swap_agents: bool = True, partners: Sequence[str] = ()
) -> list[dict[str, str]]:
    """Return the line-ups (players by agent): each player alone, and each pair with one of them in one side.

    Args:
        sides: Groups of agents, mostly of one agent each.
        swap_agents: Each player of a pair takes each side, and the other one the rest. Otherwise only the player that
            is listed first takes the first side.
        partners: Players that do not meet each other.
    """
    agents = list(itertools.chain(*sides))
    result = [dict.fromkeys(agents, player) for player in players]
    for first, second in itertools.combinations(players, 2) if len(sides) > 1 else ():
        if first in partners and second in partners:
            continue
        # with two sides, both orders of a pair give the same line-ups
        orders = [(first, second), (second, first)] if swap_agents and len(sides) > 2 else [(first, second)]
        result += [
            {agent: player if agent in side else other for agent in agents}
            for player, other in orders
            for side in (sides if swap_agents else sides[:1])
        ]
    return result


def lineups_of(
    environment: SuiteEnv, players: Sequence[str], settings: Mapping[str, Any]
) -> Sequence[Mapping[str, str]]:
    """Return the line-ups of a benchmark in one of its environments."""
    partners = settings.get("partners", ()) if environment.kind in TEAMS else ()
    return lineups(players, environment.sides, swap_agents=settings["swap_agents"], partners=partners)


def is_planned(lineup: Mapping[str, str], environment: SuiteEnv, settings: Mapping[str, Any]) -> bool:
    """Return whether `lineups_of` plans a line-up for its players, given in either order."""
    agents_of: dict[str, set[str]] = {}
    for agent, name in lineup.items():
        agents_of.setdefault(name, set()).add(agent)
    if lineup.keys() != {*environment.seats} or len(agents_of) > 2:
        return False
    if len(agents_of) == 2 and environment.kind in TEAMS and {*agents_of} <= {*settings.get("partners", ())}:
        return False
    sides = environment.sides if settings["swap_agents"] else environment.sides[:1]
    return len(agents_of) == 1 or any(agents_of[lineup[side[0]]] == {*side} for side in sides if side)


def check_planned(environments: Sequence[SuiteEnv], players: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Raise ValueError if a benchmark plans too many episodes to list them."""
    count = sum(len(lineups_of(environment, players, settings)) for environment in environments)
    if (planned := count * settings["episodes"] * settings["samples"]) > MAX_COUNT:
        raise ValueError(
            f"episodes={settings['episodes']} times samples={settings['samples']} times {count} line-ups must be at "
            f"most {MAX_COUNT} episodes, got {planned}"
        )


def matches(environments: Sequence[SuiteEnv], players: Sequence[str], settings: Mapping[str, Any]) -> Iterator[Match]:
    """Yield all episodes seed by seed, so that a stopped benchmark has played the same seeds everywhere."""
    environment_lineups = [
        (environment, lineup) for environment in environments for lineup in lineups_of(environment, players, settings)
    ]
    episodes, samples = range(settings["episodes"]), range(settings["samples"])
    seeds = {env.id: seeds_of(settings["seed"], settings["episodes"], env.id) for env in environments}
    for index, (environment, lineup), sample in itertools.product(episodes, environment_lineups, samples):
        yield Match(environment=environment, lineup=lineup, seed=seeds[environment.id][index], sample=sample)
