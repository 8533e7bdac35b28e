"""Who gets how much of the reward: rewards of siblings to advantages.

In: rewards of one group, by role. Out: one advantage per trajectory, or nothing where the siblings do not differ.
Waits for nothing.
"""

from __future__ import annotations

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
    min_spread: float = 1e-6
    """A group whose rewards differ by no more than this teaches nothing and is skipped. At least 0."""

    def __post_init__(self) -> None:
        if not self.min_spread >= 0:
            raise ValueError(f"min_spread={self.min_spread} must be at least 0")

    def advantages(self, rewards_G: np.ndarray) -> np.ndarray | None:
        """Advantages of the G siblings in one role.

        Args:
            rewards_G: float ``[G]``, finite.

        Returns:
            float32 ``[G]``, or None where the rewards do not differ and a baseline is subtracted.
        """
        rewards = np.asarray(rewards_G, dtype=np.float64)
        if rewards.ndim != 1 or not np.isfinite(rewards).all():
            raise ValueError(f"rewards must be finite and [G], got shape {rewards.shape}: {rewards.tolist()}")
        if self.baseline == "none":
            return rewards.astype(np.float32)
        if len(rewards) < 2 or np.ptp(rewards) <= self.min_spread:
            return None
        centred = rewards - rewards.mean()
        if self.baseline == "leave_one_out":
            centred *= len(rewards) / (len(rewards) - 1)
        if self.scale == "std":
            centred /= rewards.std(ddof=1)
        advantages: np.ndarray = centred.astype(np.float32)
        return advantages
