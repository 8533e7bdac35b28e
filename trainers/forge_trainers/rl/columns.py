"""Several rewards of one trajectory that are credited apart.

In: rewards by name, with weights. Out: a reward. Waits for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from forge_agents.types import Trajectory


class Columns:
    """Rewards whose advantages are added, each found among its own kind (GDPO, arXiv 2601.05242).

    Rewards that are added first are compared as one number: 1 for the format and 0 for the answer is then no other
    than the reverse, and the one that varies most drowns the others. Departure: the paper normalises the sum of
    advantages once more, over the batch.

    Args:
        rewards: By name; trajectories to float ``[n]`` or with ``assess``, as `forge_trainers.rl.rewards` takes them.
        weights: Of the advantages and in the total reward, finite; 1 where none is named.
    """

    name = "columns"

    def __init__(
        self, rewards: Mapping[str, Callable[[Sequence[Trajectory]], Any]], weights: Mapping[str, float] | None = None
    ) -> None:
        if not rewards:
            raise ValueError("Columns got no reward; give at least one by name")
        unknown = set(weights or {}) - set(rewards)
        if unknown or not all(math.isfinite(weight) for weight in (weights or {}).values()):
            raise ValueError(f"weights={weights} must be finite and name only the rewards {', '.join(rewards)}")
        self._rewards = dict(rewards)
        self.weights = {name: float((weights or {}).get(name, 1.0)) for name in rewards}
        """By name, in order."""

    def parts(self) -> Mapping[str, Any]:
        """The rewards by name."""
        return self._rewards

    def __call__(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
        """Weighted sums, float32 ``[n]``, NaN where any reward abstains."""
        scores = [self.weights[name] * np.asarray(reward(trajectories)) for name, reward in self._rewards.items()]
        total: np.ndarray = np.stack(scores).sum(axis=0).astype(np.float32)
        return total

    def state_dict(self) -> dict[str, np.ndarray]:
        """What the rewards have learned, under ``name/``."""
        from forge_verifiers.core.composition import nested_state

        return nested_state(self._rewards)  # type: ignore[arg-type]  # any reward may have a state

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Continue from `state_dict`."""
        from forge_verifiers.core.composition import load_nested

        load_nested(self._rewards, state, owner=self.name)  # type: ignore[arg-type]  # as above
