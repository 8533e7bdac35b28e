"""Environments and rewards of `faults.py` and `kills.py`, which hang when a file tells them to."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv
from forge_agents.types import Trajectory

FLAG = "FORGE_FAULT_FLAG"


def hang_if_told(what: str) -> None:
    """Sleep for an hour once if the flag file says `what`. The file is removed. Without a flag file nothing happens."""
    flag = Path(os.environ.get(FLAG, os.devnull))
    try:
        message = flag.read_text() == what
    except FileNotFoundError:
        return
    if message:
        flag.unlink(missing_ok=True)
        time.sleep(3600)


class Letters(TurnEnv):
    """Two agents take turns. Each earns the share of lowercase letters in its text."""

    possible_agents = ("left", "right")

    def __init__(self) -> None:
        super().__init__(max_turns=2)

    def setup(self, rng: np.random.Generator) -> None:
        self.start = "".join(map(chr, rng.integers(97, 123, 3)))
        self.said: list[str] = []

    def instructions(self, agent: str) -> str:
        return "abc"

    def observe_text(self, agent: str) -> str:
        return self.said[-1][:8] if self.said else self.start

    def act(self, agent: str, action: str) -> Outcome:
        hang_if_told("env")
        self.said.append(action)
        share = sum("a" <= letter <= "z" for letter in action) / max(len(action), 1)
        return Outcome(rewards={agent: share}, done=len(self.said) == 2)


class Judged:
    """The environment's reward, by an ensemble with one verifier that may hang, or by itself hanging."""

    name = "judged"

    def __init__(self) -> None:
        from forge_agents import Ensemble, Rule

        def doubtful(trajectory: Trajectory) -> float:
            hang_if_told("verifier")
            return trajectory.reward

        rules = [Rule(lambda trajectory: trajectory.reward, name="steady"), Rule(doubtful, name="doubtful")]
        self._ensemble = Ensemble(rules, combine="mean", timeout_s=5.0)

    def __call__(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
        hang_if_told("reward")
        return self._ensemble.score(trajectories)
