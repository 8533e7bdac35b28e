"""Tokens and money that a benchmark's players spent.

In: records, and the facts of players with their prices. Out: sums by player. Waits for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from forge_agents.bench.records import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What one player spent in the episodes of a report, failed ones left out."""

    prompt_tokens: int
    """Tokens read, cached ones included."""
    tokens: int
    """Tokens sampled."""
    cost: float
    """Currency units; 0 of a player without prices."""


def priced(facts: Mapping[str, Any]) -> bool:
    """Whether a player with these facts costs anything."""
    return bool(facts.get("price_in") or facts.get("price_out"))


def cost_of(facts: Mapping[str, Any], prompt_tokens: int, tokens: int) -> float:
    """Currency units that a player with these facts pays for tokens read and sampled."""
    return float(facts.get("price_in", 0.0) * prompt_tokens + facts.get("price_out", 0.0) * tokens) / 1e6


def spent_by_player(records: Iterable[Record], players: Mapping[str, Mapping[str, Any]]) -> dict[str, Spent]:
    """Sums over all seats that each player held."""
    read: Counter[str] = Counter()
    sampled: Counter[str] = Counter()
    for record in records:
        for seat in record.seats.values():
            read[seat.player] += seat.prompt_tokens
            sampled[seat.player] += seat.tokens
    return {
        name: Spent(prompt_tokens=read[name], tokens=sampled[name], cost=cost_of(facts, read[name], sampled[name]))
        for name, facts in players.items()
    }
