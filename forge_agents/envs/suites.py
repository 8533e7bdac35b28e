"""How suites are played where their users say nothing.

In: settings, by suite. Out: `SuiteDefaults`. Waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteDefaults:
    """What a benchmark of a suite takes where its caller says nothing."""

    episodes: int = 64
    """Seeds for every environment and line-up, at least 1."""
    seed: int = 0
    """Chooses the episodes' seeds, at least 0."""
    swap_seats: bool = True
    """Each of two players takes each seat."""
    max_tokens: int = 64
    """Most tokens of one response, at least 1, of models and endpoints given in words."""

    def __post_init__(self) -> None:
        for name, least in (("episodes", 1), ("seed", 0), ("max_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} of a suite must be at least {least}")
