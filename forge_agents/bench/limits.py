"""What a benchmark may spend.

In: the user's choices. Out: `BenchLimits`. Waits for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BenchLimits:
    """What one call of `benchmark` may spend. What an earlier call has played costs nothing."""

    max_episodes: int | None = None
    """Episodes played; None sets no limit."""
    max_tokens: int | None = None
    """Tokens sampled, after which no episode is begun; None sets no limit."""
    max_cost: float | None = None
    """Currency units, at the prices of the endpoints, after which no episode is begun; None sets no limit."""
    max_seconds: float | None = None
    """Seconds after which no episode is begun; None sets no limit."""
    max_live_episodes: int = 64
    """Episodes at once."""

    def __post_init__(self) -> None:
        for name in ("max_episodes", "max_tokens", "max_cost", "max_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} allows nothing; give a number above 0, or None for no limit")
        if self.max_live_episodes < 1:
            raise ValueError(f"max_live_episodes={self.max_live_episodes}; at least 1 episode must be under way")
