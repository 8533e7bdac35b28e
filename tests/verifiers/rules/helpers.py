"""Trajectories and tables of short texts for the tests of rules."""

from __future__ import annotations

import re
from collections.abc import Mapping

from forge_agents.types import Trajectory, Turn


def said(text: str, answer: object = None, seed: int = 0) -> Trajectory:
    """A trajectory with one text and, unless it is None, a gold answer."""
    turn = Turn(agent="a", index=0, observation="", action=text, reward=0.0)
    info = {} if answer is None else {"answer": answer}
    return Trajectory(agent="a", policy="p", turns=(turn,), env_id="t", seed=seed, info=info)


def cells(table: str) -> list[str]:
    """The texts of a table, separated by ``¦`` and line ends. ``⏎`` stands for a line end within a text."""
    texts = [text.strip() for line in table.splitlines() for text in line.split("¦")]
    return [text.replace("⏎", "\n") for text in texts if text]


def by_gold(tables: Mapping[str, str]) -> list[tuple[str, str]]:
    """Texts and gold answers from one table per gold answer."""
    return [(text, gold) for gold, table in tables.items() for text in cells(table)]


def pairs(table: str) -> list[tuple[str, ...]]:
    """Pairs of texts from a table of cells ``one ≡ other`` or ``one ≢ other``."""
    return [tuple(re.split(" [≡≢] ", cell)) for cell in cells(table)]
