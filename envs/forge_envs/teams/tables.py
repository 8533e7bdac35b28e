"""Tables: an analyst queries a database and proposes an answer, and a reviewer approves or returns it."""

from __future__ import annotations

import itertools
import re
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from forge_agents.envs.env import Outcome
from forge_agents.tools import Tool, ToolFormat, ToolResult, tool
from forge_agents.tools.env import ToolEnv
from forge_envs.shared import Database, check_ranges, choose, end_for_all

NAMES, TOWNS, GOODS, MONTHS = (
    words.split()
    for words in (
        "Abel Berg Cole Dahl Engel Falk Grau Holm Jung Krol Lund Moss Nagy Orban Park Quist Rask Stein Voss Wolf",
        "Ulm Bern Graz Lyon Oslo Turin Porto Delft",
        "bell boat chair clock drum flute kite lamp map rope",
        "January February March April May June",
    )
)
SCHEMA = (
    "customers(id, name, town)",
    "products(id, name, price)",
    "orders(id, customer, product, pieces, month)",
)
_ROWS = 10
"""Maximum number of rows shown."""
_STEPS, _SLICE, _QUERY_S = 1_000_000, 1_000, 2.0
"""Maximum number of SQLite virtual-machine instructions per query (16 ms of a cross join), number of instructions
between checks, and maximum seconds, because one instruction may read a long text."""
ALL = "orders JOIN customers ON customers.id = orders.customer JOIN products ON products.id = orders.product"
"""All orders with customer and product, ``{all}`` in queries."""
MOST = " ORDER BY most DESC LIMIT 2"
"""End of a query for a maximum, ``{most}`` in queries. The second row reveals ties."""
# Questions by level, with the query that answers each.
QUESTIONS: tuple[tuple[tuple[str, str], ...], ...] = (
    (
        ("What is the price of {good}?", "SELECT price FROM products WHERE name = '{good}'"),
        ("In which town does {name} live?", "SELECT town FROM customers WHERE name = '{name}'"),
    ),
    (
        ("How many orders are of {month}?", "SELECT COUNT(*) FROM orders WHERE month = '{month}'"),
        ("How many customers live in {town}?", "SELECT COUNT(*) FROM customers WHERE town = '{town}'"),
    ),
    (
        ("How many pieces were ordered in {month}?", "SELECT SUM(pieces) FROM orders WHERE month = '{month}'"),
        (
            "In which month were most pieces ordered?",
            "SELECT month, SUM(pieces) AS most FROM orders GROUP BY month{most}",
        ),
    ),
    (
        ("How many pieces of {good} were ordered?", "SELECT SUM(pieces) FROM {all} WHERE products.name = '{good}'"),
        ("How many orders came from {town}?", "SELECT COUNT(*) FROM {all} WHERE town = '{town}'"),
    ),
    (
        (
            "Of which product were most pieces ordered?",
            "SELECT products.name, SUM(pieces) AS most FROM {all} GROUP BY products.id{most}",
        ),
        (
            "How much money did {name} spend?",
            "SELECT SUM(pieces * price) FROM {all} WHERE customers.name = '{name}'",
        ),
    ),
    (
        (
            "How much money did customers from {town} spend in {month}?",
            "SELECT SUM(pieces * price) FROM {all} WHERE town = '{town}' AND month = '{month}'",
        ),
        (
            "Which customer from {town} spent most money?",
            "SELECT customers.name, SUM(pieces * price) AS most FROM {all} WHERE town = '{town}' "  # noqa: ISC004
            "GROUP BY customers.id{most}",
        ),
    ),
)
_MAX_BYTES = 500
"""Maximum size of a text or row in a query. Sorting a million rows of 10 KB would write gigabytes to the disk."""
_FUNCTIONS = frozenset(
    ("count", "sum", "total", "avg", "min", "max", "abs", "round", "length", "lower", "upper", "coalesce", "like")
)
"""SQL functions that a query may call. None of them creates large values from small ones."""
_VERDICT = re.compile(r"\bAPPROVE\b", re.IGNORECASE)
_WORD = re.compile(r"\w+")
_NUMBER = re.compile(
    r"(?:(?<![\w.)])-)?(?<![\w.,])(?:\d{1,3}(?:,\d{3}){1,4}|\d{1,15})(?:\.\d{1,15})?(?!\w|,\d)", re.ASCII
)


class Tables(ToolEnv):
    """Cooperative game of two agents.

    ``analyst`` reads a question and the schema, and queries the tables in SQLite's SQL. Any other text is a proposal.
    ``reviewer`` reads the question, the proposal, and the analyst's last query with its result, and may also query. A
    text with the word APPROVE ends the game. Any other text returns to the analyst as a remark, at most `revisions`
    times. The proposal after the last remark is final. Tables and question are generated for every episode.

    The agents get 1 if the final proposal is correct, else 0. Case, punctuation, markup and spaces are ignored. The
    last word counts, or the last number if the answer is a number (1,202 and 1202.0 equal 1202). The whole proposal
    counts, even parts cut for the reviewer. At the end infos contain ``question``, ``query`` (reference query),
    ``answer``, ``given``, ``correct`` and ``remarks``.

    Args:
        level: Kind of question, 1 to 6: a cell, a count, a sum or maximum, the same over several tables, a maximum over
            several tables, spending in a town.
        orders: Number of rows of the largest table, 10 to 500.
        revisions: Maximum number of remarks. At least 0.
        max_calls: Maximum number of queries of an agent between two other texts.
        max_message_chars: Maximum length of proposals and remarks as the other reads them. Longer ones are cut.
        tool_format: As in `ToolEnv`.
    """

    possible_agents = ("analyst", "reviewer")
    max_reward = 1.0

    def __init__(
        self,
        *,
        level: int = 1,
        orders: int = 40,
        revisions: int = 1,
        max_calls: int = 4,
        max_message_chars: int = 200,
        tool_format: ToolFormat = "plain",
    ) -> None:
        super().__init__(tool_format=tool_format, max_calls=max_calls)
        check_ranges(level=(level, 1, len(QUESTIONS)), orders=(orders, 10, 500), revisions=(revisions, 0, None))
        check_ranges(max_message_chars=(max_message_chars, 1, None))
        self._level, self._orders, self._revisions = level, orders, revisions
        self._max_message_chars = max_message_chars

    # ---- the tables

    def setup(self, rng: np.random.Generator) -> None:
        while True:  # until the question has a unique answer
            self._draw(rng)
            question, query = choose(rng, QUESTIONS[self._level - 1])
            blanks = {"name": NAMES, "town": TOWNS, "good": GOODS, "month": MONTHS}
            drawn = {blank: choose(rng, values) for blank, values in blanks.items()}
            self.question, self.query = question.format(**drawn), query.format(**drawn, all=ALL, most=MOST)
            if (answer := self._unique_answer()) is not None:
                break
        self.answer = answer
        self.proposal: str | None = None
        self._proposed = ""
        self.remarks: list[str] = []
        self.shown, self._query = "(nothing was asked)", ""

    def _draw(self, rng: np.random.Generator) -> None:
        customers = [(id_, name, choose(rng, TOWNS)) for id_, name in enumerate(NAMES, 1)]
        products = [(id_, good, int(rng.integers(2, 60))) for id_, good in enumerate(GOODS, 1)]
        buyers = rng.integers(1, len(NAMES) + 1, self._orders).tolist()
        goods = rng.integers(1, len(GOODS) + 1, self._orders).tolist()
        pieces = rng.integers(1, 10, self._orders).tolist()
        orders = [
            (id_, buyer, good, count, choose(rng, MONTHS))
            for id_, (buyer, good, count) in enumerate(zip(buyers, goods, pieces, strict=True), 1)
        ]
        self.database = Database.of(dict(zip(SCHEMA, (customers, products, orders), strict=True)))

    def _unique_answer(self) -> str | None:
        """Return the answer, or None if there is none or a tie."""
        rows = self.database.rows(self.query)
        tied = len(rows) == 2 and rows[0][1] == rows[1][1]
        return None if not rows or rows[0][0] is None or tied else str(rows[0][0])

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        """Open the tables read-only, with limits."""
        with self.database.opened() as db:
            db.set_authorizer(_allowed)
            db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_BYTES)
            db.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 100)
            steps, deadline = itertools.count(_SLICE, _SLICE), time.monotonic() + _QUERY_S
            db.set_progress_handler(lambda: next(steps) >= _STEPS or time.monotonic() > deadline, _SLICE)
            yield db

    # ---- tools

    @tool(waits=True)
    def sql(self, query: str) -> str:
        """Query the tables.

        Args:
            query: One SELECT in SQLite's SQL.
        """
        self._query = query
        with self._opened() as db:
            try:
                rows = db.execute(query).fetchmany(_ROWS + 1)
            except (sqlite3.Error, sqlite3.Warning, OverflowError) as error:
                raise ValueError(f"the query fails: {error}") from None
        lines = [" | ".join(map(_cell, row)) for row in rows[:_ROWS]]
        return "\n".join((*lines, *(["(and more rows)"] * (len(rows) > _ROWS)))) or "(no rows)"

    def tools(self, agent: str) -> Sequence[Tool]:
        return [self.sql]

    def after_calls(self, agent: str, results: Sequence[ToolResult]) -> Outcome:
        if agent == "analyst":
            self.shown = f"Query: {self._query[:400] or '(none)'}\nResult: {results[-1].content}"
        self._query = ""
        return Outcome()

    # ---- texts and rules

    def instructions(self, agent: str) -> str:
        role = {
            "analyst": "Answer the question from the tables: query them, then write the answer alone.",
            "reviewer": "You review an answer. Write APPROVE if it is right; otherwise write what is wrong with it.",
        }[agent]
        return f"{role}\nTables: {'; '.join(SCHEMA)}\n\n{self.tool_help(agent)}"

    def observe_text(self, agent: str) -> str:
        if agent == "reviewer":
            return f"Question: {self.question}\n{self.shown}\nAnswer: {self.proposal or '(none yet)'}"
        return f"{self.question}\nRemark: {self.remarks[-1]}" if self.remarks else self.question

    def act(self, agent: str, action: str) -> Outcome:
        message = " ".join(action.split())[: self._max_message_chars]
        if agent == "analyst":
            self.proposal, self._proposed = message, action
            final = len(self.remarks) == self._revisions > 0
            return self._end() if final else Outcome(next="reviewer")
        if _VERDICT.search(action) or not self._revisions:
            return self._end()
        self.remarks.append(message)
        return Outcome(next="analyst")

    def _end(self) -> Outcome:
        value, correct = _evaluate(self._proposed, self.answer)
        facts = {
            "question": self.question, "query": self.query, "answer": self.answer, "given": value,
            "correct": correct, "remarks": len(self.remarks),
        }  # fmt: skip
        return end_for_all(self.possible_agents, float(correct), facts)


def _evaluate(proposal: str, answer: str) -> tuple[str, bool]:
    """Return the last number (if the answer is one) or word of a proposal, and whether it is correct."""
    numeric = _NUMBER.fullmatch(answer) is not None
    text = re.sub(r"(?<=\d)[\u00a0\u202f\u2009](?=\d{3})", ",", proposal)  # spaces as thousands separators
    candidates = (_NUMBER if numeric else _WORD).findall(re.sub(r"[*_`]", " ", text))
    if not candidates:
        return "", False
    value = str(candidates[-1]).replace(",", "")
    return value, float(value) == float(answer) if numeric else value.casefold() == answer.casefold()


def _allowed(action: int, _: str | None, name: str | None, *__: str | None) -> int:
    """SQLite's authorizer: allow reading the tables and calling harmless functions."""
    reads = action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ)
    calls = action == sqlite3.SQLITE_FUNCTION and str(name).casefold() in _FUNCTIONS
    return sqlite3.SQLITE_OK if reads or calls else sqlite3.SQLITE_DENY


def _cell(value: object) -> str:
    return "NULL" if value is None else f"{value:g}" if isinstance(value, float) else str(value)[:80]
