"""What worlds of teams share: names, draws, a database that is a value, and an end that is the same for all.

In: a generator; rows; a reward. Out: some of the names; a database in bytes; an outcome. Waits for nothing.
"""

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


def one(rng: np.random.Generator, values: Sequence[_T]) -> _T:
    """One of `values`, each as likely."""
    return values[int(rng.integers(len(values)))]


def some(rng: np.random.Generator, values: Sequence[_T], count: int) -> list[_T]:
    """`count` of `values` in a drawn order, each at most once."""
    return [values[int(place)] for place in rng.choice(len(values), size=count, replace=False)]


def ended(seats: Iterable[str], reward: float, facts: Mapping[str, Any]) -> Outcome:
    """The end of an episode: all get one reward, and read the same facts in their infos."""
    return Outcome(rewards=dict.fromkeys(seats, reward), done=True, info=dict.fromkeys(seats, facts))


@dataclass(frozen=True, slots=True)
class Database:
    """An SQLite database held as bytes: a connection could not be copied or sent to a worker."""

    data: bytes

    @classmethod
    def of(cls, tables: Mapping[str, Iterable[Sequence[int | str | None]]]) -> Self:
        """Make one of rows by table, which is named with its columns: ``"orders(id, item)"``."""
        with closing(sqlite3.connect(":memory:")) as db:
            for head, rows in tables.items():
                db.execute(f"CREATE {'VIRTUAL ' * (' USING ' in head)}TABLE {head}")
                if filled := list(rows):
                    name, blanks = head.partition("(")[0].split()[0], ", ".join("?" * len(filled[0]))
                    db.executemany(f"INSERT INTO {name} VALUES ({blanks})", filled)  # noqa: S608  # our own words
            db.commit()
            return cls(db.serialize())

    @contextmanager
    def opened(self) -> Iterator[sqlite3.Connection]:
        """A connection to a copy; what is changed there is lost."""
        with closing(sqlite3.connect(":memory:")) as db:
            db.deserialize(self.data)
            yield db

    def rows(self, query: str, *values: int | str) -> list[tuple[Any, ...]]:
        """What a query of ours finds."""
        with self.opened() as db:
            return db.execute(query, values).fetchall()

    def after(self, statement: str, *values: int | str) -> Self:
        """The database in which a statement of ours was carried out."""
        with self.opened() as db:
            db.execute(statement, values)
            db.commit()
            return type(self)(db.serialize())
