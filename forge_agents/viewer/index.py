"""An index of stored episodes: a page of a list of 100,000 in milliseconds, while the run goes on writing.

In: ``episodes.jsonl``, which grows, and which a resumed run rewrites. Out: pages, counts, single rows. Waits for the
disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import operator
import os
import re
import sqlite3
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

from forge_agents.episodes.stored import Digest, digest, whole_lines
from forge_agents.errors import RunFolderError
from forge_agents.files import cache_folder

FORMAT = 1
"""Of the index; raised whenever it holds something else, so that old ones are made anew."""
SORTS = {
    "newest": "n DESC",
    "oldest": "n",
    "highest reward": "reward DESC, n DESC",
    "lowest reward": "reward IS NULL, reward, n DESC",
    "most turns": "turns DESC, n DESC",
    "most tokens": "tokens DESC, n DESC",
    "slowest": "seconds DESC, n DESC",
}
"""SQL by the name that a person chooses."""
MOST_ROWS = 500
"""Of one page."""
_ALL = "1"
_APPLICATION = 0x466F7267
"""What SQLite notes in a database of ours."""
_KEPT_S = 30 * 24 * 3600.0
_BATCH_BYTES = 2_000_000
_SHOWN = [field.name for field in fields(Digest) if field.name != "text"]
_values = operator.attrgetter(*_SHOWN)
_TABLES = """
CREATE TABLE state (at INTEGER, line INTEGER, n INTEGER);
INSERT INTO state VALUES (0, 0, 0);
CREATE TABLE problems (line INTEGER, why TEXT);
CREATE TABLE episodes (n INTEGER PRIMARY KEY, start INTEGER, length INTEGER, crc INTEGER, step INTEGER, env TEXT,
    seed INTEGER, reward REAL, trained REAL, turns INTEGER, tokens INTEGER, seconds REAL, error TEXT, end TEXT,
    agents TEXT);
CREATE INDEX by_env ON episodes (env, n);
CREATE INDEX by_step ON episodes (step, n);
CREATE INDEX by_reward ON episodes (reward, n);
CREATE INDEX by_low_reward ON episodes (reward IS NULL, reward, n DESC);
CREATE INDEX by_turns ON episodes (turns, n);
CREATE INDEX by_tokens ON episodes (tokens, n);
CREATE INDEX by_seconds ON episodes (seconds, n);
CREATE INDEX by_error ON episodes (error, n) WHERE error != '';
CREATE VIRTUAL TABLE words USING fts5 (text, content='', tokenize='unicode61');
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Which episodes, in which order, which part of them."""

    text: str = ""
    """Words that all occur, the last as a beginning; words in double quotes must follow each other."""
    env: str = ""
    """Empty: any."""
    error: str = ""
    """Empty: any; ``none``; ``any error``; or one as `Digest.error` has it."""
    reward_from: float | None = None
    reward_to: float | None = None
    step_from: int | None = None
    step_to: int | None = None
    sort: str = "newest"
    """One of `SORTS`."""
    offset: int = 0
    limit: int = 50

    def __post_init__(self) -> None:
        if self.sort not in SORTS:
            raise ValueError(f"sort={self.sort!r}; known are {', '.join(SORTS)}")
        if self.offset < 0 or not 0 <= self.limit <= MOST_ROWS:
            raise ValueError(f"offset={self.offset}, limit={self.limit}; offset >= 0 and limit 0 to {MOST_ROWS}")


class EpisodeIndex:
    """The episodes of one file, found through SQLite.

    The index lies in the cache folder: folders of runs may be a stranger's, and nothing is written there, nor is a
    database read that lies there. It can be deleted at any time; one that nobody has opened for a month is.

    Args:
        log: ``episodes.jsonl``; it may be missing so far.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        folder = cache_folder() / "viewer"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.file = folder / f"{hashlib.sha256(str(log.absolute()).encode()).hexdigest()[:24]}.index"
        if self.file.exists():
            os.utime(self.file)
        for file in folder.glob("*.index*"):
            with contextlib.suppress(OSError):  # another viewer was first
                if file.stat().st_mtime < time.time() - _KEPT_S:
                    file.unlink()
        self._writing = threading.Lock()

    def update(self, stop: threading.Event | None = None) -> int:
        """Index what the file has gained, or all of it where it was rewritten. Returns how many episodes it took in.

        Args:
            stop: Ends the work after the batch under way.
        """
        taken = 0
        with self._writing, self._opened() as db:
            try:
                file = self.log.open("rb")
            except FileNotFoundError:
                return 0
            with file:
                if not _continues(db, file):
                    _start_anew(db)
                while (found := _take_batch(db, file)) is not None:
                    taken += found
                    if stop is not None and stop.is_set():
                        break
        return taken

    def status(self) -> dict[str, Any]:
        """``episodes``, ``bytes`` in the file, ``indexed`` of them, ``problems``: lines that are no episodes."""
        size = self.log.stat().st_size if self.log.exists() else 0
        with self._opened() as db:
            at, n = db.execute("SELECT at, n FROM state").fetchone()
            wrong = db.execute("SELECT count(*) FROM problems").fetchone()[0]
            first = db.execute("SELECT line, why FROM problems ORDER BY line LIMIT 5").fetchall()
        problems = [f"line {line} of {self.log.name} is left out: {why}" for line, why in first]
        if wrong > len(first):
            problems.append(f"... and {wrong - len(first)} more lines")
        return {"episodes": n, "bytes": size, "indexed": min(at, size), "problems": problems}

    def find(self, query: Query) -> dict[str, Any]:
        """``total`` matches and ``rows``, the part that was asked for."""
        where, values = _conditions(query)
        columns, offset = ", ".join(_SHOWN), query.offset
        with self._opened() as db:
            total = db.execute(f"SELECT count(*) FROM episodes WHERE {where}", values).fetchone()[0]  # noqa: S608
            if where == _ALL and query.sort in ("newest", "oldest"):  # numbers have no gaps: no row need be passed over
                where = f"n <= {total - offset}" if query.sort == "newest" else f"n > {offset}"
                offset = 0
            found = db.execute(
                f"SELECT n, {columns} FROM episodes WHERE {where} "  # noqa: S608  # our own words; values are bound
                f"ORDER BY {SORTS[query.sort]} LIMIT ? OFFSET ?",
                (*values, query.limit, offset),
            )
            rows = [dict(zip(("n", *_SHOWN), row, strict=True)) for row in found]
        return {"total": total, "rows": [{**row, "agents": json.loads(row["agents"])} for row in rows]}

    def facets(self) -> dict[str, Any]:
        """``envs`` and ``errors``: [name, episodes], most first."""
        with self._opened() as db:
            envs = db.execute("SELECT env, count(*) c FROM episodes GROUP BY env ORDER BY c DESC, env").fetchall()
            errors = db.execute(
                "SELECT error, count(*) c FROM episodes WHERE error != '' GROUP BY error ORDER BY c DESC LIMIT 50"
            ).fetchall()
        return {"envs": envs, "errors": errors}

    def row(self, n: int) -> dict[str, Any]:
        """Row `n` as the file has it.

        Raises:
            KeyError: There is no such episode.
            RunFolderError: The file has been rewritten since it was indexed.
        """
        with self._opened() as db:
            place = db.execute("SELECT start, length, crc FROM episodes WHERE n = ?", (n,)).fetchone()
        if place is None:
            raise KeyError(f"there is no episode {n}")
        start, length, crc = place
        with self.log.open("rb") as file:
            file.seek(start)
            line = file.read(length)
        if zlib.crc32(line) != crc:
            raise RunFolderError(f"{self.log} has been rewritten, as a resumed run does; wait a second and look again")
        found: dict[str, Any] = json.loads(line)
        return found

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """A connection to an index of this format, in a transaction that is committed at the end."""
        try:
            with closing(self._connection()) as db, db:
                yield db
        except sqlite3.DatabaseError as cause:
            raise RunFolderError(f"the index {self.file} cannot be used ({cause}); delete it and look again") from cause

    def _connection(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.file, timeout=30.0)
        db.execute("PRAGMA journal_mode = WAL")  # readers never wait for the indexing
        db.execute("PRAGMA synchronous = OFF")  # it can be made anew
        if db.execute("PRAGMA user_version").fetchone()[0] != FORMAT:
            owner = db.execute("PRAGMA application_id").fetchone()[0]
            if owner != _APPLICATION and db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise sqlite3.DatabaseError("it is a database of another program")
            _start_anew(db)
        return db


def _start_anew(db: sqlite3.Connection) -> None:
    db.execute("BEGIN IMMEDIATE")
    names = db.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'words\\_%' ESCAPE '\\'")
    for (name,) in names.fetchall():
        db.execute(f"DROP TABLE IF EXISTS {name}")
    for statement in _TABLES.split(";"):
        db.execute(statement)
    db.execute(f"PRAGMA application_id = {_APPLICATION}")
    db.execute(f"PRAGMA user_version = {FORMAT}")
    db.commit()


def _continues(db: sqlite3.Connection, file: IO[bytes]) -> bool:
    """Whether the file still begins with what was indexed: its size, and the last line that was taken in."""
    (at,) = db.execute("SELECT at FROM state").fetchone()
    last = db.execute("SELECT start, length, crc FROM episodes ORDER BY n DESC LIMIT 1").fetchone()
    if os.fstat(file.fileno()).st_size < at:
        return False
    if last is None:
        return True
    file.seek(last[0])
    return bool(zlib.crc32(file.read(last[1])) == last[2])


def _take_batch(db: sqlite3.Connection, file: IO[bytes]) -> int | None:
    """Take in some more whole lines; None where there are none."""
    db.execute("BEGIN IMMEDIATE")  # another viewer may index the same file
    first: tuple[int, int, int] = db.execute("SELECT at, line, n FROM state").fetchone()
    at, line, n = first
    file.seek(at)
    episodes, words, problems = [], [], []
    for raw, row, wrong in whole_lines(file, _BATCH_BYTES):
        if wrong:
            problems.append((line + 1, wrong))
        elif raw.strip():
            try:
                found = digest(row)
            except (ValueError, RecursionError) as cause:
                problems.append((line + 1, f"it is {cause}; another version may have written it"))
            else:
                n += 1
                words.append((n, found.text))
                episodes.append((n, at, len(raw), zlib.crc32(raw), *_values(found)))
        line += raw.endswith(b"\n")
        at += len(raw)
    if at == first[0]:
        db.rollback()
        return None
    places = ", ".join("?" * (4 + len(_SHOWN)))
    db.executemany(f"INSERT INTO episodes (n, start, length, crc, {', '.join(_SHOWN)}) VALUES ({places})", episodes)  # noqa: S608
    db.executemany("INSERT INTO words (rowid, text) VALUES (?, ?)", words)
    db.executemany("INSERT INTO problems VALUES (?, ?)", problems)
    db.execute("UPDATE state SET at = ?, line = ?, n = ?", (at, line, n))
    db.commit()
    return n - first[2]


def _conditions(query: Query) -> tuple[str, list[Any]]:
    """SQL and its values."""
    errors = {"none": "error = ''", "any error": "error != ''"}
    wanted: list[tuple[str, Any]] = [
        ("n IN (SELECT rowid FROM words WHERE words MATCH ?)", _match(query.text) or None),
        ("env = ?", query.env or None),
        ("error = ?", None if query.error in errors else query.error or None),
        ("reward >= ?", query.reward_from),
        ("reward <= ?", query.reward_to),
        ("step >= ?", query.step_from),
        ("step <= ?", query.step_to),
    ]
    asked = [(sql, value) for sql, value in wanted if value is not None]
    parts = [sql for sql, _ in asked] + ([errors[query.error]] if query.error in errors else [])
    return " AND ".join(parts) or _ALL, [value for _, value in asked]


def _match(text: str) -> str:
    """An FTS5 expression; every word is quoted, so that none is an operator."""
    found = [quoted or bare for quoted, bare in re.findall(r'"([^"]+)"|([^\s"]+)', text)]
    words = [f'"{word}"' for word in found if re.search(r"\w", word)]
    if words and not text.rstrip().endswith('"'):
        words[-1] += "*"
    return " AND ".join(words)
