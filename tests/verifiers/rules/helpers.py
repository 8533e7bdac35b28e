"""Trajectories and tables of short texts for the tests of rules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest

from forge_agents.types import Trajectory, Turn
from forge_verifiers.rules.maths import worker


def said(text: str, answer: object = None, seed: int = 0) -> Trajectory:
    """A trajectory with one text and, unless it is None, a gold answer."""
    turn = Turn(agent="a", index=0, observation="", action=text, reward=0.0)
    info = {} if answer is None else {"answer": answer}
    return Trajectory(agent="a", policy="p", turns=(turn,), env_id="t", seed=seed, info=info)


def limit_long_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit comparisons of formulas to 1 s of processor time, but those of at most four characters to 60 s.

    The latter take no second, but a slow machine may need longer.
    """
    request = worker._Worker.request

    def limited(self: Any, message: dict[str, Any], timeout_s: float) -> Any:
        return request(self, message | {"cpu_s": 60 if len(message["answer"]) <= 4 else 1}, timeout_s)

    monkeypatch.setattr(worker._Worker, "request", limited)


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
