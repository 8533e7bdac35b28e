"""Who plays what against whom.

In: players, a suite, seeds. Out: the episodes to play, in a fixed order. Waits for the environments that must be made
once to know their seats.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from forge_agents.envs import registry
from forge_agents.envs.spec import AnyEnv
from forge_agents.rollout.rollout import seats_of

Kind: TypeAlias = Literal["single", "cooperative", "competitive", "mixed"]
"""One seat; seats with one goal; seats against each other; something between."""
SuiteLike: TypeAlias = str | Sequence[str] | Mapping[str, Mapping[str, Any]]
"""A suite's name, one id, several ids, or arguments by id."""

SEEDS_FROM = 3 * 2**30
"""Seeds of benchmarks lie from here to 2**32: training draws below 2**31, and trainers' own evaluations start there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One environment of a suite, as it is played."""

    id: str
    seats: tuple[str, ...]
    kind: Kind
    max_turns: int | None
    kwargs: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Arguments of the environment that differ from what its id stands for."""
    code: str = ""
    """Hash of the environment's source and library."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind={self.kind!r} of {self.id}; choose one of {', '.join(get_args(Kind))}")

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

    Raises:
        UnknownIdError: No such suite or environment; the message names near ones.
        ValueError: No ids, or an id twice.
    """
    if isinstance(suite, str):
        ids: Sequence[str] = (suite,) if "/" in suite else registry.suite(suite)
    else:
        ids = tuple(suite)
    found = [registry.spec(id_).id for id_ in ids]
    if not found or len(set(found)) < len(found):
        raise ValueError(f"a suite needs one or more different ids, got {list(ids)}")
    arguments = suite if isinstance(suite, Mapping) else {}
    name = suite if isinstance(suite, str) and "/" not in suite else "+".join(found)
    return name, {id_: dict(arguments.get(asked, {})) for asked, id_ in zip(ids, found, strict=True)}


def worlds_of(arguments: Mapping[str, Mapping[str, Any]]) -> list[World]:
    """The environments, each made once to know its seats."""
    from forge_agents.bench.fingerprints import code_of

    worlds = []
    for id_, kwargs in arguments.items():
        seats = seats_of(functools.partial(registry.make, id_, **kwargs), id_)
        spec = registry.spec(id_)
        worlds.append(
            World(
                id=id_,
                seats=seats,
                kind=_kind(seats, spec.tags),
                max_turns=spec.max_turns,
                kwargs=dict(kwargs),
                code=code_of(spec),
            )
        )
    return worlds


def seeds_of(seed: int, episodes: int) -> list[int]:
    """The episodes' seeds, the same for every player and environment; fewer episodes take the first of them."""
    rng = np.random.default_rng([seed, 0xBE7C4])
    found: dict[int, None] = {}
    while len(found) < episodes:
        found.setdefault(SEEDS_FROM + int(rng.integers(2**30)))
    return list(found)


def lineups(players: Sequence[str], seats: Sequence[str], *, swap_seats: bool = True) -> list[dict[str, str]]:
    """Who sits where: each player alone in all seats, and each pair of players, one of them in one seat of all.

    Args:
        players: Names.
        seats: All seats.
        swap_seats: Each of a pair takes each seat against the other in all the rest. Otherwise the one that is named
            first takes the first seat, and that is all.
    """
    alone = [dict.fromkeys(seats, player) for player in players]
    if len(seats) == 1:
        return alone
    found = alone
    for first, second in itertools.combinations(players, 2):
        pairs = [(first, second), (second, first)] if swap_seats else [(first, second)]
        for one, other in pairs:
            for seat in seats if swap_seats else seats[:1]:
                lineup = {s: one if s == seat else other for s in seats}
                if lineup not in found:  # in a game of two, one here is the other there
                    found.append(lineup)
    return found


def matches(
    worlds: Sequence[World], players: Sequence[str], seeds: Sequence[int], *, samples: int, swap_seats: bool
) -> Iterator[Match]:
    """All episodes, seed by seed, so that a benchmark that is stopped has played the same seeds everywhere."""
    plans = [(world, lineups(players, world.seats, swap_seats=swap_seats)) for world in worlds]
    for seed in seeds:
        for world, plan in plans:
            for lineup in plan:
                for sample in range(samples):
                    yield Match(world=world, lineup=lineup, seed=seed, sample=sample)


def _kind(seats: Sequence[str], tags: Sequence[str]) -> Kind:
    if len(seats) == 1:
        return "single"
    if "cooperative" in tags:
        return "cooperative"
    return "mixed" if "mixed-motive" in tags else "competitive"
