"""A simulated policy and verifiers: trajectories with a hidden truth and votes from a seed."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from forge_agents import Rule
from forge_agents.types import Trajectory, Turn
from forge_verifiers import Composable
from forge_verifiers.core.verifier import Cost

TPR = (0.70, 0.72, 0.75, 0.78, 0.80, 0.82)
FPR = (0.30, 0.32, 0.25, 0.28, 0.22, 0.20)


def played(
    seed: int, *, groups: int = 8, siblings: int = 8, right: float = 0.5, hacked: float = 0.0, shift: bool = False
) -> list[Trajectory]:
    """Trajectories of one call.

    Args:
        right: Share of correct ones.
        hacked: Share that is wrong and made to please all verifiers but the last two.
        shift: Whether the two best verifiers have turned round and the others have become better.
    """
    rng = np.random.default_rng([7, seed])
    out = []
    for group in range(groups):
        share = rng.beta(8 * right + 0.2, 8 * (1 - right) + 0.2)
        for sibling in range(siblings):
            hack = rng.random() < hacked
            truth = bool(rng.random() < share) and not hack
            rate = np.array(TPR if truth else FPR)
            if hack:
                rate[:4] = 0.9
            if shift:
                rate = np.where(np.arange(6) < 4, np.where(truth, 0.80, 0.20), np.where(truth, 0.3, 0.7))
            votes = (rng.random(6) < rate).astype(float).tolist()
            info = {"truth": truth, "votes": votes, "luck": float(rng.random())}
            turn = Turn(agent="a", index=0, observation="", action=f"{group} {sibling}", reward=0.0)
            number = 100_000 * seed + group
            out.append(Trajectory(agent="a", policy="p", turns=(turn,), env_id="t", seed=number, info=info))
    return out


def judge(k: int, *, cost: Cost = "cheap", name: str = "") -> Rule:
    """Verifier k of the simulation."""
    return Rule(lambda t: t.info["votes"][k], name=name or f"judge{k}", cost=cost)


def judges() -> list[Rule]:
    """All six."""
    return [judge(k) for k in range(6)]


def dead(trajectory: Trajectory) -> float:
    """A verifier that always fails."""
    raise ConnectionError("no route")


class Hanging(Composable):
    """A verifier that hangs until it is released, with a timeout of 0.3 s."""

    name, family, cost = "bad", None, "model"

    def __init__(self) -> None:
        self.release = threading.Event()

    def max_duration_s(self, trajectories: Sequence[Trajectory], default_s: float) -> float:
        return 0.3

    def score(self, trajectories: Sequence[Trajectory]) -> np.ndarray:
        self.release.wait(60)
        return np.ones(len(trajectories), np.float32)


def truth(trajectories: Sequence[Trajectory]) -> np.ndarray:
    """bool [n]."""
    return np.array([t.info["truth"] for t in trajectories])


def auroc(scores: np.ndarray, trajectories: Sequence[Trajectory]) -> float:
    """Probability that a correct trajectory scores above a wrong one, ties counted half."""
    gold = truth(trajectories)
    right, wrong = scores[gold], scores[~gold]
    return float((right[:, None] > wrong).mean() + 0.5 * (right[:, None] == wrong).mean())


def best_of(scores: np.ndarray, trajectories: Sequence[Trajectory], siblings: int = 8) -> float:
    """Share of groups, of those with both kinds, whose best-scored trajectory is correct."""
    gold, scores = truth(trajectories).reshape(-1, siblings), scores.reshape(-1, siblings)
    mixed = gold.any(axis=1) & ~gold.all(axis=1)
    return float(gold[np.arange(len(gold)), scores.argmax(axis=1)][mixed].mean())
