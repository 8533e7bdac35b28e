"""The environment's own reward as a verifier.

In: trajectories. Out: their total rewards on [0, 1]. Waits for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from forge_agents.types import Trajectory
from forge_verifiers.core.verifier import Composable, Cost, Scores


class EnvReward(Composable):
    """The environment's total reward of each trajectory, from ``low`` (scores 0) to ``high`` (scores 1).

    Args:
        low: Least total reward an agent can get.
        high: Greatest total reward an agent can get.
        clip: Whether rewards beyond the range score 0 or 1 instead of raising.
        name: What reports call it.
        family: Verifiers of one family share a cause of error.
    """

    cost: Cost = "cheap"

    def __init__(
        self,
        low: float = 0.0,
        high: float = 1.0,
        *,
        clip: bool = False,
        name: str = "env_reward",
        family: str | None = None,
    ) -> None:
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"EnvReward got low={low}, high={high}; send finite bounds with low < high")
        self.low, self.high, self.clip = low, high, clip
        self.name, self.family = name, family

    def score(self, trajectories: Sequence[Trajectory]) -> Scores:
        """Scaled rewards, float32 [n].

        Raises:
            ValueError: a reward is outside [low, high] and `clip` is False.
        """
        rewards = np.array([t.reward for t in trajectories], np.float64)
        outside = (rewards < self.low - 1e-9) | (rewards > self.high + 1e-9)
        if outside.any() and not self.clip:
            raise ValueError(
                f"verifier {self.name!r} met a total reward of {rewards[outside][0]} outside "
                f"[{self.low}, {self.high}]; set low and high to the environment's range, or clip=True"
            )
        return np.clip((rewards - self.low) / (self.high - self.low), 0.0, 1.0).astype(np.float32)
