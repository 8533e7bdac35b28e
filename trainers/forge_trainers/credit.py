"""Who gets how much of the reward: rewards of siblings to advantages.

In: rewards of one group, by role. Out: one advantage per trajectory or per turn, or nothing where the siblings do not
differ. Waits for nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Credit:
    """How a reward is compared with those of the siblings in the same role.

    Roles never share a baseline: what is a good reward for one seat says nothing about another's (arXiv 2602.08847).
    """

    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    """What is subtracted: the siblings' mean with (GRPO, arXiv 2402.03300) or without (RLOO, arXiv 2402.14740) the
    trajectory itself, or nothing."""
    scale: Literal["std", "none"] = "std"
    """What the difference is divided by: the siblings' standard deviation (GRPO) or nothing (Dr. GRPO, arXiv
    2503.20783)."""
    turns: Literal["own", "to_go"] = "own"
    """Where a reward scores turns, a turn's advantage comes from its own score, or from the sum over it and the turns
    after it (process supervision in GRPO, arXiv 2402.03300, section 4.1.3)."""
    min_spread: float = 1e-6
    """A group whose rewards differ by no more than this teaches nothing and is skipped. At least 0."""
    noise_multiple: float = 0.0
    """A group teaches nothing, either, where the standard deviation of its rewards is below this many times the noise
    that the reward knows of itself. At least 0; 0 asks for `min_spread` alone."""

    def __post_init__(self) -> None:
        for name in ("min_spread", "noise_multiple"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 0")

    def advantages(self, rewards_G: np.ndarray, noise_G: np.ndarray | None = None) -> np.ndarray | None:
        """Advantages of the G siblings in one role.

        Args:
            rewards_G: float ``[G]``, finite.
            noise_G: float ``[G]``, the standard deviation of each reward; None where it is not known.

        Returns:
            float32 ``[G]``, or None where the rewards do not differ and a baseline is subtracted.
        """
        rewards = np.asarray(rewards_G, dtype=np.float64)
        if rewards.ndim != 1 or not np.isfinite(rewards).all():
            raise ValueError(f"rewards must be finite and [G], got shape {rewards.shape}: {rewards.tolist()}")
        if self.baseline == "none":
            return rewards.astype(np.float32)
        if len(rewards) < 2 or self._flat(rewards, noise_G):
            return None
        centred = rewards - rewards.mean()
        if self.baseline == "leave_one_out":
            centred *= len(rewards) / (len(rewards) - 1)
        if self.scale == "std":
            centred /= rewards.std(ddof=1)
        advantages: np.ndarray = centred.astype(np.float32)
        return advantages

    def turn_advantages(
        self, rewards_G: Sequence[np.ndarray], noise_G: np.ndarray | None = None
    ) -> list[np.ndarray] | None:
        """Advantages of every turn of the G siblings in one role; all turns of the group share one baseline.

        Args:
            rewards_G: by sibling, float ``[its turns]``, finite or NaN; a turn with NaN gets no advantage of its own.
            noise_G: as for `advantages`.

        Returns:
            By sibling, float32 ``[its turns]``, or None where the turns' rewards do not differ and a baseline is
            subtracted.
        """
        flat = np.concatenate([np.empty(0), *rewards_G])
        known = ~np.isnan(flat)
        found = self.advantages(flat[known], noise_G) if known.any() else None
        if found is None:
            return None
        filled = np.zeros(len(flat), np.float32)
        filled[known] = found
        turns = np.split(filled, np.cumsum([len(own) for own in rewards_G])[:-1])
        return turns if self.turns == "own" else [np.cumsum(own[::-1])[::-1] for own in turns]

    def _flat(self, rewards: np.ndarray, noise: np.ndarray | None) -> bool:
        if np.ptp(rewards) <= self.min_spread:
            return True
        if noise is None or not self.noise_multiple:
            return False
        return bool(rewards.std(ddof=1) < self.noise_multiple * np.sqrt(np.mean(np.square(noise, dtype=np.float64))))
