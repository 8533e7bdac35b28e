"""What is to be played: the players, the suite, who meets whom on which seeds, and what it may cost.

In: players, a suite, the YAML of `forge-agents bench`. Out: the episodes to play, in a fixed order. Waits for the
environments, which are made once to know their seats.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from pettingzoo import ParallelEnv

from forge_agents.bench.entrants import Player, called, named_players
from forge_agents.bench.fingerprints import code_of
from forge_agents.envs import registry
from forge_agents.envs.env import sides_of
from forge_agents.envs.seeds import BENCHMARKS_FROM
from forge_agents.envs.spec import AnyEnv
from forge_agents.policy import Endpoint, Sampling
from forge_agents.programs.program import Program
from forge_agents.rollout.rollout import PlayableEnv, inspect_env
from forge_agents.serving.config import EngineConfig
from forge_agents.settings import settings_class

Kind: TypeAlias = Literal["single", "cooperative", "competitive", "mixed"]
"""One seat; seats with one goal; seats against each other; something between."""
TEAMS: tuple[Kind, ...] = ("cooperative", "mixed")
"""Where players are partners."""
SuiteLike: TypeAlias = str | Sequence[str] | Mapping[str, Mapping[str, Any]]
"""A suite's name, an environment's id, several of both, or arguments by name or id. ``module:name`` imports the module
first."""


@settings_class
@dataclass(frozen=True, kw_only=True)
class BenchLimits:
    """What one call of `benchmark` may spend. What an earlier call has played costs nothing."""

    max_episodes: int | None = None
    """Episodes played; None sets no limit."""
    max_tokens: int | None = None
    """Tokens sampled, after which no episode is begun; None sets no limit."""
    max_cost: float | None = None
    """Currency units, at the prices of the endpoints, after which no episode is begun; None sets no limit."""
    max_seconds: float | None = None
    """Seconds after which no episode is begun; None sets no limit."""
    max_concurrent_episodes: int = 64
    """Episodes at once."""

    def __post_init__(self) -> None:
        for name in ("max_episodes", "max_tokens", "max_cost", "max_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} allows nothing; give a number above 0, or None for no limit")
        if self.max_concurrent_episodes < 1:
            raise ValueError(
                f"max_concurrent_episodes={self.max_concurrent_episodes}; at least 1 episode must be under way"
            )


@dataclass(frozen=True, kw_only=True)
class BenchSampling(Sampling):
    """How tokens are drawn: `Sampling`, its length the suite's where nothing is said."""

    max_tokens: int | None = None  # type: ignore[assignment]  # not known before the suite is
    """Most tokens of one response, at least 1; null: the suite's number, 64 of one environment."""

    def __post_init__(self) -> None:
        self.of_length(1)  # its checks

    def of_length(self, max_tokens: int) -> Sampling:
        """With `max_tokens` where nothing else was said."""
        most = max_tokens if self.max_tokens is None else self.max_tokens
        return Sampling(**{**vars(self), "max_tokens": most})


@settings_class
@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """One benchmark."""

    players: dict[str, str | dict[str, str]] = field(default_factory=dict)
    """By name: random, human, oracle, package.module:function, http://host:port/v1#model, a run's folder or a model; or
    one of these for each agent."""
    cross_play: list[str] = field(default_factory=list)
    """More players in the same words, called by the ends of these; several can follow on a command line."""
    partners: list[str] = field(default_factory=list)
    """Names of those of the players that the others are to work with, and that do not meet each other; empty: all."""
    endpoints: dict[str, Endpoint] = field(default_factory=dict)
    """OpenAI-compatible servers by name, with all that can be set: the variable that holds the key, requests at once,
    deadlines, budgets. They play beside `players`, each with its own `sampling`."""
    suite: str | list[str] = "core-v1"
    """A suite's name or an environment's id; several as a list, or with + between them. module:NAME imports the module
    first, which registers it."""
    episodes: int | None = None
    """Seeds for every environment and line-up; null: the suite's number, 64 of one environment."""
    seed: int | None = None
    """Chooses the episodes' seeds; null: the suite's, 0 of one environment."""
    swap_seats: bool | None = None
    """Each of two players takes each seat; null: as the suite says, true of one environment."""
    samples: int = 1
    """Episodes of each seed, for pass@k."""
    exploitability_samples: int = 0
    """Answers of each model at every information set of games such as Kuhn and Leduc poker, for its exploitability; 0
    leaves it out."""
    sampling: BenchSampling = field(default_factory=BenchSampling)
    """Of all that `players` names."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Serves all models."""
    limits: BenchLimits = field(default_factory=BenchLimits)
    """What may be spent; a benchmark that meets a limit goes on when it is run again."""
    out_dir: str = "runs/bench"
    """Folder of episodes.jsonl and board.json, the report."""
    json: str = ""
    """Another file of the report; none by default."""
    html: str = ""
    """File of the report as a page; none by default."""
    markdown: str = ""
    """File of the report as Markdown; none by default."""

    def __post_init__(self) -> None:
        both = self.players.keys() & self.endpoints.keys()
        if both:
            raise ValueError(f"{min(both)!r} names a player and an endpoint; give each its own name")

    def entrants(self) -> dict[str, Player]:
        """All players by name, the endpoints last. Raises ValueError as `named_players`, or for two of one name."""
        sampling = self.sampling.of_length(registry.suite_defaults(suite_ids(self.suite)[0]).max_tokens)
        crossed = called(self.cross_play)
        for name in crossed.keys() & (self.players.keys() | self.endpoints.keys()):
            raise ValueError(
                f"{crossed[name]!r} of cross_play would be called {name!r}, as another player is; give it a name of "
                f"its own: --players.NAME {crossed[name]}"
            )
        return named_players({**self.players, **crossed, **self.endpoints}, sampling)


# ---- episodes


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One environment of a suite, as it is played."""

    id: str
    seats: tuple[str, ...]
    kind: Kind
    max_turns: int | None
    sides: tuple[tuple[str, ...], ...] = ()
    """Seats that one player holds together against another; each by itself where nothing is said."""
    together: bool = False
    """Whether all seats decide at the same time."""
    zero_sum: bool = False
    """Whether it was registered as a zero-sum game. Of others the rewards that were paid tell."""
    max_reward: float | None = None
    """The most that a seat can earn in an episode; None where the environment does not say."""
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Arguments of the environment that differ from what its id stands for."""
    code: str = ""
    """Hash of the environment's source and library."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind={self.kind!r} of {self.id}; choose one of {', '.join(get_args(Kind))}")
        sides = tuple(map(tuple, self.sides)) or tuple((seat,) for seat in self.seats)
        if sorted(itertools.chain(*sides)) != sorted(self.seats):
            raise ValueError(
                f"sides of {self.id} are {sides}; each of its seats, {', '.join(self.seats)}, belongs to one side"
            )
        object.__setattr__(self, "sides", sides)

    def make(self) -> AnyEnv:
        """A fresh environment."""
        return registry.make(self.id, **self.kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """One episode to play."""

    world: World
    lineup: Mapping[str, str] = field(hash=False)
    """Player by seat."""
    seed: int
    sample: int
    """0 for the first episode of this seed and line-up, and so on."""


def suite_ids(suite: SuiteLike) -> tuple[str, dict[str, dict[str, Any]]]:
    """The suite's name and the arguments by id, in the suite's order.

    Of several, names and ids stand with ``+`` between them; together they are a name that is understood, too. An
    environment that several of them hold is there once, with the arguments of its own id where it is among them.

    Raises:
        UnknownIdError: No such suite or environment; the message names near ones.
        ValueError: No names or ids, or one twice.
    """
    whole = isinstance(suite, str) and suite in registry.list_suites()
    asked = list(suite) if not isinstance(suite, str) else [suite] if whole else suite.split("+")
    names = [registry.spec(name).id if "/" in name else registry.suite_name(name) for name in asked]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"a suite needs one or more different ids or suites, got {asked}")
    given = suite if isinstance(suite, Mapping) else {}
    found: dict[str, dict[str, Any]] = {}
    for word, name in zip(asked, names, strict=True):
        for id_ in (name,) if "/" in name else registry.suite(name):
            if id_ not in found or id_ == name:
                found[id_] = dict(given.get(word, {}))
    return "+".join(names), found


def worlds_of(arguments: Mapping[str, Mapping[str, Any]]) -> list[World]:
    """The environments, each made once to know its seats."""
    worlds = []
    for id_, kwargs in arguments.items():
        spec = registry.spec(id_)
        make = functools.partial(registry.make, id_, **kwargs)
        seats, sides, together, program, most = inspect_env(make, id_, _shape)
        if max(map(len, sides), default=1) > 1 and {**spec.kwargs, **kwargs}.get("role_shuffle"):
            raise ValueError(
                f"role_shuffle deals the seats of {id_} anew, whose sides are {sides}: leave it out, a benchmark gives "
                "each player each side"
            )
        worlds.append(
            World(
                id=id_,
                seats=seats,
                kind=_kind(seats, spec.tags, program=program),
                max_turns=spec.max_turns,
                sides=sides,
                together=together,
                zero_sum="zero-sum" in spec.tags,
                max_reward=most,
                kwargs=dict(kwargs),
                code=code_of(spec),
            )
        )
    return worlds


def _kind(seats: Sequence[str], tags: Sequence[str], *, program: bool) -> Kind:
    """What seats are to each other: what the tags say, else partners in a program and rivals elsewhere."""
    if len(seats) == 1:
        return "single"
    if "cooperative" in tags:
        return "cooperative"
    if "mixed-motive" in tags:
        return "mixed"
    rivals = not program or "zero-sum" in tags or "competitive" in tags
    return "competitive" if rivals else "cooperative"


def _shape(env: PlayableEnv) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...], bool, bool, float | None]:
    """Agents, sides, whether all decide at once, whether it is a program, and the largest reward."""
    most = getattr(env, "max_reward", None)
    return (
        tuple(env.possible_agents),
        sides_of(env),
        isinstance(env, ParallelEnv),
        isinstance(env.unwrapped, Program),
        float(most) if isinstance(most, Real) else None,
    )


def seeds_of(seed: int, episodes: int, env_id: str = "") -> list[int]:
    """The episodes' seeds, the same for every player; fewer episodes take the first of them.

    Environments have the same ones, but levels of one game each their own: the same deal at four levels is one deal.
    """
    level = env_id.partition("@")[2]
    rng = np.random.default_rng([seed, 0xBE7C4, *([int(level)] if level else [])])
    found: dict[int, None] = {}
    while len(found) < episodes:
        found.setdefault(BENCHMARKS_FROM + int(rng.integers(2**30)))
    return list(found)


def lineups(
    players: Sequence[str], sides: Sequence[Sequence[str]], *, swap_seats: bool = True, partners: Sequence[str] = ()
) -> list[dict[str, str]]:
    """Who sits where: each player alone in all seats, and each pair of players, one of them in one side of all.

    Args:
        sides: Of seats, mostly of one each.
        swap_seats: Each of a pair takes each side against the other in all the rest. Otherwise the one that is named
            first takes the first side, and that is all.
        partners: Those of the players that do not meet each other.
    """
    seats = list(itertools.chain(*sides))
    found = [dict.fromkeys(seats, player) for player in players]
    for first, second in itertools.combinations(players, 2) if len(sides) > 1 else ():
        if first in partners and second in partners:
            continue
        pairs = [(first, second), (second, first)] if swap_seats else [(first, second)]
        for one, other in pairs:
            for side in sides if swap_seats else sides[:1]:
                lineup = {seat: one if seat in side else other for seat in seats}
                if lineup not in found:  # in a game of two, one here is the other there
                    found.append(lineup)
    return found


def matches(
    worlds: Sequence[World],
    players: Sequence[str],
    seed: int,
    episodes: int,
    *,
    samples: int,
    swap_seats: bool,
    partners: Sequence[str] = (),
) -> Iterator[Match]:
    """All episodes, seed by seed, so that a benchmark that is stopped has played the same seeds everywhere."""
    met = [
        (world, lineup)
        for world in worlds
        for lineup in lineups(
            players, world.sides, swap_seats=swap_seats, partners=partners if world.kind in TEAMS else ()
        )
    ]
    seeds = {world.id: seeds_of(seed, episodes, world.id) for world in worlds}
    for place, (world, lineup), sample in itertools.product(range(episodes), met, range(samples)):
        yield Match(world=world, lineup=lineup, seed=seeds[world.id][place], sample=sample)
