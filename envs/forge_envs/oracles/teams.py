"""Oracles of small environments in `forge_envs.teams`."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Mapping
from typing import Any

from forge_agents.envs.oracles import ActionFunction
from forge_agents.tools import ToolCall, render_tool_call
from forge_envs.oracles.script import Script, read
from forge_envs.teams import relay, tables, treasure_hunt


class Relay(Script):
    """The asker calls the calculator, or computes the result itself if there is none. Both repeat the number."""

    called = False

    def asker(self, seen: str) -> str:
        """Return a call, then its result."""
        if self.called:
            return self.answerer(seen)
        self.called = True
        a, sign, b = re.findall(r"(\d+)\s*([-+*])\s*(\d+)", seen)[-1]  # questions may follow examples
        if not self.settings["tool"]:
            return str(relay.OPERATORS[sign](int(a), int(b)))
        call = ToolCall(name="calculator", arguments={"expression": f"{a} {sign} {b}"})
        return render_tool_call(call, self.settings["tool_format"])

    def answerer(self, seen: str) -> str:
        """Return the last number."""
        numbers = re.findall(r"-?\d+", seen)
        return str(numbers[-1]) if numbers else "I was told no number."


class TreasureHunt(Script):
    """Writes its half of the map. From the second round on both know the whole map and walk the same shortest path."""

    partner_rows: tuple[str, ...] = ()

    def answer(self, seen: str) -> str:
        rows = seen.partition("\nPartner: ")[0].split("\n")
        received = read(r"Partner: (.*)", seen).partition(" ")[0].split("/")
        if [len(row) for row in received] == [len(row) for row in rows]:
            self.partner_rows = tuple(received)
        elif not self.partner_rows:
            self.partner_rows = tuple("?" * len(row) for row in rows)
        whole = [
            [sign if sign != "?" else other.replace("T", ".") for sign, other in zip(*pair, strict=True)]
            for pair in zip(rows, self.partner_rows, strict=True)
        ]
        return f"{'/'.join(rows)} go {_first_step(whole)}"


def _first_step(rows: list[list[str]]) -> str:
    """Return the first step of a shortest path from T to X that avoids rocks. East if X is unknown or out of reach."""
    signs = {(r, c): sign for r, row in enumerate(rows) for c, sign in enumerate(row)}
    start = next(square for square, sign in signs.items() if sign == "T")
    queue, seen = deque([(start, "")]), {start}
    while queue:
        (row, column), first = queue.popleft()
        if signs[row, column] == "X":
            return first
        for name, (down, across) in treasure_hunt.DIRECTIONS.items():
            ahead = (row + down, column + across)
            if signs.get(ahead, "#") != "#" and ahead not in seen:
                seen.add(ahead)
                queue.append((ahead, first or name))
    return "east"


class Tables(Script):
    """The analyst writes the query of the question, and the reviewer repeats it and compares the results."""

    def answer(self, seen: str) -> str:
        question = seen.removeprefix("Question: ").partition("\n")[0]
        if question.endswith("?"):
            self.proposed = seen.rpartition("Answer: ")[2]
            query = self.query(question)
            return self.call("sql", query=query) if query else "no idea"
        value = re.split(r"[|\n]", seen.partition(": ")[2] or seen)[0].strip()
        if self.agent == "analyst":
            return value
        return "APPROVE" if value == self.proposed else f"It is {value}."

    def query(self, question: str) -> str:
        """Return the query of a question."""
        return query_for(question)


def query_for(question: str, levels: int = len(tables.QUESTIONS)) -> str:
    """Return the query of a question, empty if it has no form of the first `levels`."""
    for form, query in (pair for level in tables.QUESTIONS[:levels] for pair in level):
        pattern = re.escape(form).replace(r"\{", "(?P<").replace(r"\}", r">\w+)")
        if match := re.fullmatch(pattern, question):
            return query.format(**match.groupdict(), all=tables.ALL, most=tables.MOST)
    return ""


_LAKE = re.compile(r"Seasons left: (\d+). The lake has (\d+) fish and holds (\d+) \((\d+) seats\)")


class DiningPhilosophers(Script):
    """Philosophers that are not neighbors eat in turn: each takes its left fork, then its right one."""

    def answer(self, seen: str) -> str:
        players, number = self.settings["num_players"], int(self.agent.rpartition("_")[2])
        turns = 2 + players % 2  # at an odd table the last philosopher has a turn of its own
        turn = 2 if players % 2 and number == players - 1 else number % 2
        *_, now = re.findall(r"^Round (\d+) of \d+\. left fork: (\S+), right fork: (\S+)\. You", seen, re.MULTILINE)
        at, second = divmod(int(now[0]) - 1, 2)
        if at % turns == turn and (not second or now[1] == "yours"):
            return "take right" if second else "take left"
        return "release" if "yours" in now else "wait"


def commons(agent: str, settings: Mapping[str, Any], rng: random.Random) -> ActionFunction:
    """Leave as much as grows back to a full lake, the optimum if all agents do the same."""
    return leaving(1 / settings["regrowth"])


def leaving(share: float) -> ActionFunction:
    """Return a player that leaves a share of the capacity, and nothing in the last season, if all do the same."""

    def take(observation: str) -> str:
        left, stock, capacity, agents = lake(observation)
        return f"take {int((stock if left == 1 else max(0, stock - share * capacity)) / agents)}"

    return take


def lake(observation: str) -> tuple[int, ...]:
    """Return seasons left, fish, capacity and number of agents. The last match, because players may quote others."""
    if not (matches := _LAKE.findall(observation)):
        raise ValueError(f"no lake in {observation!r:.300}")
    return tuple(map(int, matches[-1]))
