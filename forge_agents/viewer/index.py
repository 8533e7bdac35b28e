"""Index of stored episodes: pages of a list of 100,000 in milliseconds, also while a run writes.

``episodes.jsonl`` grows, and a resumed run rewrites it.
"""

from __future__ import annotations

import json
import operator
import os
import re
import sqlite3
import threading
import weakref
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any

from forge_agents.episodes.stored import Digest, digest, whole_lines
from forge_agents.errors import RunFolderError
from forge_agents.files import open_plain

SORTS = {
    "newest": "n DESC",
    "oldest": "n",
    "highest reward": "reward DESC, n DESC",
    "lowest reward": "reward IS NULL, reward, n DESC",
    "highest trained reward": "trained DESC, n DESC",
    "most turns": "turns DESC, n DESC",
    "most tokens": "tokens DESC, n DESC",
    "slowest": "seconds DESC, n DESC",
}
"""SQL by the name that the page shows."""
MAX_ROWS = 500
"""Maximum number of rows of a page."""
_MAX_PROBLEMS = 1000
"""Maximum number of unreadable lines that are stored."""
_MAX_ENVS = 1000
_ALL = "1"
_BATCH_BYTES = 2_000_000
_SHOWN = [field.name for field in fields(Digest) if field.name != "text"]
_values = operator.attrgetter(*_SHOWN)
_TABLES = """
CREATE TABLE episodes (n INTEGER PRIMARY KEY, start INTEGER, length INTEGER, crc INTEGER, step INTEGER, env TEXT,
    seed INTEGER, reward REAL, trained REAL, turns INTEGER, tokens INTEGER, seconds REAL, error TEXT, end TEXT,
    agents TEXT);
CREATE INDEX by_env ON episodes (env, n);
CREATE INDEX by_step ON episodes (step, n);
CREATE INDEX by_reward ON episodes (reward, n);
CREATE INDEX by_low_reward ON episodes (reward IS NULL, reward, n DESC);
CREATE INDEX by_trained ON episodes (trained, n);
CREATE INDEX by_turns ON episodes (turns, n);
CREATE INDEX by_tokens ON episodes (tokens, n);
CREATE INDEX by_seconds ON episodes (seconds, n);
CREATE INDEX by_error ON episodes (error, n) WHERE error != '';
CREATE VIRTUAL TABLE words USING fts5 (text, content='', tokenize='unicode61');
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """Filter, order and range of episodes."""

    text: str = ""
    """Words that must all occur, the last one as a prefix. Words in double quotes form a phrase."""
    env: str = ""
    """Environment id. Empty: any."""
    error: str = ""
    """Error as in `Digest.error`, ``none`` or ``any error``. Empty: any."""
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
            raise ValueError(f"sort={self.sort!r}. Known are {', '.join(SORTS)}")
        if self.offset < 0 or not 0 <= self.limit <= MAX_ROWS:
            raise ValueError(f"offset={self.offset}, limit={self.limit}; offset >= 0 and limit 0 to {MAX_ROWS}")


class EpisodeIndex:
    """SQLite index of the episodes in one file.

    The database is a private temporary file: run folders may come from a stranger, so nothing is written there and no
    database in them is read.

    Args:
        log: ``episodes.jsonl``, which may not exist yet.
    """

    def __init__(self, log: Path) -> None:
        self.log = log
        self._updating = threading.Lock()
        self._using = threading.Lock()
        self._start_anew()

    def _start_anew(self) -> None:
        # The empty name makes SQLite create a file that it deletes when the connection is closed.
        self._database = sqlite3.connect("", check_same_thread=False)
        self._close = weakref.finalize(self, self._database.close)
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.executescript(_TABLES)
        self._at = self._line = self._n = 0  # bytes, lines and episodes that are indexed
        self._problems: list[str] = []

    def update(self, stop: threading.Event | None = None) -> int:
        """Index new lines, or the whole file if it was rewritten. Returns the number of indexed episodes.

        Args:
            stop: Ends indexing after the current batch.
        """
        total = 0
        with self._updating:
            try:
                file = open_plain(self.log)
            except FileNotFoundError:
                return 0
            with file:
                if not self._continues(file):
                    with self._using:
                        self._close()
                        self._start_anew()
                while (count := self._index_batch(file)) is not None:
                    total += count
                    if stop is not None and stop.is_set():
                        break
        return total

    def status(self) -> dict[str, Any]:
        """Return ``episodes``, ``bytes`` of the file, ``indexed`` bytes, and ``problems`` (unreadable lines)."""
        size = self.log.stat().st_size if self.log.exists() else 0
        with self._using:
            at, n, all_problems = self._at, self._n, list(self._problems)
        problems = all_problems[:5]
        if more := len(all_problems) - len(problems):
            at_least = "at least " * (len(all_problems) >= _MAX_PROBLEMS)
            problems.append(f"... and {at_least}{more} more lines")
        return {"episodes": n, "bytes": size, "indexed": min(at, size), "problems": problems}

    def find(self, query: Query) -> dict[str, Any]:
        """Return ``total``, the number of matches, and ``rows``, the requested range."""
        where, values = _conditions(query)
        columns, offset = ", ".join(_SHOWN), query.offset
        with self._opened() as db:
            total = db.execute(f"SELECT count(*) FROM episodes WHERE {where}", values).fetchone()[0]  # noqa: S608
            if where == _ALL and query.sort in ("newest", "oldest"):  # numbers have no gaps, so no row must be skipped
                where = f"n <= {total - offset}" if query.sort == "newest" else f"n > {offset}"
                offset = 0
            result = db.execute(
                f"SELECT n, {columns} FROM episodes WHERE {where} "  # noqa: S608  # constants; values are bound
                f"ORDER BY {SORTS[query.sort]} LIMIT ? OFFSET ?",
                (*values, query.limit, offset),
            )
            rows = [dict(zip(("n", *_SHOWN), row, strict=True)) for row in result]
        return {"total": total, "rows": [{**row, "agents": json.loads(row["agents"])} for row in rows]}

    def facets(self) -> dict[str, Any]:
        """Return ``envs`` and ``errors`` as [name, episodes], the most frequent first."""
        with self._opened() as db:
            envs = db.execute(
                "SELECT env, count(*) c FROM episodes GROUP BY env ORDER BY c DESC, env LIMIT ?", (_MAX_ENVS,)
            ).fetchall()
            errors = db.execute(
                "SELECT error, count(*) c FROM episodes WHERE error != '' GROUP BY error ORDER BY c DESC LIMIT 50"
            ).fetchall()
        return {"envs": envs, "errors": errors}

    def row(self, n: int) -> dict[str, Any]:
        """Return row `n` of the file.

        Raises:
            KeyError: There is no such episode.
            RunFolderError: The file was rewritten after it was indexed.
        """
        with self._opened() as db:
            position = db.execute("SELECT start, length, crc FROM episodes WHERE n = ?", (n,)).fetchone()
        if position is None:
            raise KeyError(f"there is no episode {n}")
        start, length, crc = position
        with open_plain(self.log) as file:
            file.seek(start)
            line = file.read(length)
        if zlib.crc32(line) != crc:
            raise RunFolderError(f"{self.log} was rewritten, as a resumed run does. Reload in a second")
        row: dict[str, Any] = json.loads(line)
        return row

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """Give one thread the database, in a transaction that is committed at the end."""
        try:
            with self._using, self._database:
                yield self._database
        except sqlite3.DatabaseError as cause:
            raise RunFolderError(f"the index of {self.log} failed ({cause}). It is a temporary file") from cause

    def _continues(self, file: IO[bytes]) -> bool:
        """Return whether the file still begins with the indexed lines, judged by its size and the last indexed line."""
        if os.fstat(file.fileno()).st_size < self._at:
            return False
        with self._opened() as db:
            last = db.execute("SELECT start, length, crc FROM episodes WHERE n = ?", (self._n,)).fetchone()
        if last is None:
            return True
        file.seek(last[0])
        return bool(zlib.crc32(file.read(last[1])) == last[2])

    def _index_batch(self, file: IO[bytes]) -> int | None:
        """Index some complete lines. Returns the number of episodes, or None if there are no new lines."""
        at, line, n = self._at, self._line, self._n
        file.seek(at)
        episodes, words, problems = [], [], []
        for raw, row, damage in whole_lines(file, _BATCH_BYTES):
            problem = damage
            if not damage and raw.strip():
                try:
                    summary = digest(row)
                except (ValueError, RecursionError) as cause:
                    problem = f"it is {cause}. Another version may have written it"
                else:
                    n += 1
                    words.append((n, summary.text))
                    episodes.append((n, at, len(raw), zlib.crc32(raw), *_values(summary)))
            if problem:
                problems.append(f"line {line + 1} of {self.log.name} is left out: {problem}")
            line += raw.endswith(b"\n")
            at += len(raw)
        if at == self._at:
            return None
        marks = ", ".join("?" * (4 + len(_SHOWN)))
        with self._opened() as db:
            db.executemany(
                f"INSERT INTO episodes (n, start, length, crc, {', '.join(_SHOWN)}) VALUES ({marks})",  # noqa: S608
                episodes,
            )
            db.executemany("INSERT INTO words (rowid, text) VALUES (?, ?)", words)
            db.commit()
            self._problems = [*self._problems, *problems][:_MAX_PROBLEMS]
            self._at, self._line, self._n = at, line, n
        return len(episodes)


def _conditions(query: Query) -> tuple[str, list[Any]]:
    """Return an SQL condition and its values."""
    errors = {"none": "error = ''", "any error": "error != ''"}
    filters: list[tuple[str, Any]] = [
        ("n IN (SELECT rowid FROM words WHERE words MATCH ?)", _match(query.text) or None),
        ("env = ?", query.env or None),
        ("error = ?", None if query.error in errors else query.error or None),
        ("reward >= ?", query.reward_from),
        ("reward <= ?", query.reward_to),
        ("step >= ?", query.step_from),
        ("step <= ?", query.step_to),
    ]
    active = [(sql, value) for sql, value in filters if value is not None]
    parts = [sql for sql, _ in active] + ([errors[query.error]] if query.error in errors else [])
    return " AND ".join(parts) or _ALL, [value for _, value in active]


def _match(text: str) -> str:
    """Return an FTS5 expression. Every word is quoted, so that none is an operator."""
    parts = [quoted or bare for quoted, bare in re.findall(r'"([^"]+)"|([^\s"]+)', text)]
    words = [f'"{word}"' for word in parts if re.search(r"\w", word)]
    if words and not text.rstrip().endswith('"'):
        words[-1] += "*"
    return " AND ".join(words)
