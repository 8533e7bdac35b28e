"""Shared parts of environments: checks of settings, random choices, people, a database and a common end of episodes."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import numpy as np

from forge_agents.envs.env import Outcome

_FIRST = "Ada Bela Cora Dov Edda Finn Gala Hugo Ines Joel Kira Levi Mona Nils Olga Pavel Rosa Sven Tilda Yann"
_LAST = "Abel Berg Cole Dahl Engel Falk Grau Holm Iver Jung Krol Lund Moss Nagy Orban Park Quist Rask Stein Voss"
PEOPLE = [f"{first} {last}" for first in _FIRST.split() for last in _LAST.split()]
_T = TypeVar("_T")


def check_ranges(**settings: tuple[float, float, float | None]) -> None:
    """Raise ValueError unless each setting, ``name=(value, low, high)``, lies in its range. None: no upper bound."""
    for name, (value, low, high) in settings.items():
        if not low <= value or (high is not None and value > high):
            allowed = f"at least {low}" if high is None else f"{low} to {high}"
            raise ValueError(f"{name}={value} must be {allowed}")


def choose(rng: np.random.Generator, values: Sequence[_T]) -> _T:
    """Return one of `values`, uniformly."""
    return values[int(rng.integers(len(values)))]


def sample(rng: np.random.Generator, values: Sequence[_T], count: int) -> list[_T]:
    """Return `count` different entries of `values` in random order."""
    return [values[int(index)] for index in rng.choice(len(values), size=count, replace=False)]


def end_for_all(agents: Iterable[str], reward: float, facts: Mapping[str, Any]) -> Outcome:
    """Return the end of an episode with the same reward and infos for all agents."""
    return Outcome(rewards=dict.fromkeys(agents, reward), done=True, info=dict.fromkeys(agents, facts))


@dataclass(frozen=True, slots=True)
class Database:
    """An SQLite database stored as bytes, because connections cannot be copied or sent to a worker."""

    data: bytes

    @classmethod
    def of(cls, tables: Mapping[str, Iterable[Sequence[int | str | None]]]) -> Self:
        """Create a database from rows by table, where a table's key includes its columns: ``"orders(id, item)"``."""
        with closing(sqlite3.connect(":memory:")) as db:
            for head, rows in tables.items():
                db.execute(f"CREATE {'VIRTUAL ' * (' USING ' in head)}TABLE {head}")
                if values := list(rows):
                    name, blanks = head.partition("(")[0].split()[0], ", ".join("?" * len(values[0]))
                    db.executemany(f"INSERT INTO {name} VALUES ({blanks})", values)  # noqa: S608  # constant names
            db.commit()
            return cls(db.serialize())

    @contextmanager
    def opened(self) -> Iterator[sqlite3.Connection]:
        """Open a connection to a copy. Changes are lost."""
        with closing(sqlite3.connect(":memory:")) as db:
            db.deserialize(self.data)
            yield db

    def rows(self, query: str, *values: int | str) -> list[tuple[Any, ...]]:
        """Return the rows of a trusted query."""
        with self.opened() as db:
            return db.execute(query, values).fetchall()

    def after(self, statement: str, *values: int | str) -> Self:
        """Return the database after a trusted statement."""
        with self.opened() as db:
            db.execute(statement, values)
            db.commit()
            return type(self)(db.serialize())
