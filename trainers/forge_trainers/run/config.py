"""What the processes of a run need to know, and who gets which share of a host's cores where nobody said so.

In: what a user sets. Out: a checked, frozen dataclass. Waits for nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TypeVar

from forge_agents.policy import Policy
from forge_agents.serving.config import EngineConfig
from forge_agents.settings import settings_class
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.run.ineffective import refuse_ineffective


def check_at_least(settings: object, least: int, *names: str) -> None:
    """Raise ValueError where one of the fields `names` is less than `least`; None is no number."""
    for name in names:
        if (value := getattr(settings, name)) is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")


def check_deadlines(settings: object, *names: str) -> None:
    """Raise ValueError where one of the fields `names` is not above 0."""
    for name in names:
        if not getattr(settings, name) > 0:
            raise ValueError(f"{name}={getattr(settings, name)} must be positive: every wait has a deadline")


@settings_class
@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """What the processes of a run need to know."""

    learner: LearnerConfig = field(default_factory=LearnerConfig)
    """Optimiser, loss and precision."""
    learner_procs: int = 1
    """Processes of each learner; more than one shards it."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """How models are served."""
    max_staleness: int = 0
    """Weight versions a sample may lie behind the learner that eats it. 0 waits for each update; 1 collects and judges
    the next step while the learner works; from 2 on slow groups may also come a step late. 0 is the default because it
    repeats bit by bit."""
    colocate: bool = False
    """Where engines and learner share GPUs and do not fit there side by side, they take turns: who does not compute has
    its weights in the host's memory, which must hold both. Off: such a run is refused."""
    seed: int = 0
    """Of environments, sampling and initialisation. Training seeds lie below 2**31, held-out seeds above."""
    start_timeout_s: float = 600.0
    """Deadline for engines and learners to start."""
    stage_timeout_s: float = 1800.0
    """Deadline of each stage of a step: judging, learning, weight return; of collecting, the longest time without an
    answer of an engine, so that many long episodes may take longer."""
    heartbeat_timeout_s: float = 60.0
    """Seconds after which an engine, a learner or the weight store that says nothing counts as dead."""
    max_respawns: int = 8
    """Dead processes that a session may replace; one more death, or two at one place, end it with
    `RespawnLimitError`."""

    def __post_init__(self) -> None:
        refuse_ineffective(self.learning, self.engine)
        check_at_least(self, 1, "learner_procs")
        check_at_least(self, 0, "max_staleness", "max_respawns", "seed")
        if self.max_staleness and (self.colocate or self.engine.sleeps):
            raise ValueError(
                f"colocate=True lets engines and learner compute in turns, and max_staleness={self.max_staleness} at "
                "the same time; set one of them back"
            )
        check_deadlines(self, "start_timeout_s", "stage_timeout_s", "heartbeat_timeout_s")

    @property
    def learning(self) -> LearnerConfig:
        """`learner`, with what follows from `max_staleness`."""
        return self.learner.for_old_samples() if self.max_staleness else self.learner

    def learner_of(self, policy: Policy) -> LearnerConfig:
        """Learner settings of one policy: `learner` with its own overrides, and what follows from `max_staleness`.

        Raises:
            TypeError, ValueError: An override is unknown, has a wrong value or cannot differ between policies.
        """
        chosen = self.learner.for_policy(policy)
        chosen = chosen.for_old_samples() if self.max_staleness else chosen
        try:
            refuse_ineffective(chosen, self.engine, only=policy.learner or {})
        except ValueError as cause:
            raise ValueError(f"policy {policy.name!r}: {cause}") from None
        return chosen


C = TypeVar("C", bound=ProcessConfig)


def share_threads(cores: int, *, engines: int, ranks: int, overlap: bool) -> tuple[int | None, int | None]:
    """Threads of each engine and of each rank of a learner, at least 1, so that no more compute than there are cores.

    None is for what has all cores for itself.

    Args:
        cores: Of the host.
        engines: All replicas of all engines; 0 where no model plays.
        ranks: All ranks of all learners; 0 where nothing learns.
        overlap: Engines compute while learners do.
    """
    half = cores // 2
    for_engines, for_learners = (half, cores - half) if overlap and ranks else (cores, cores)
    shares = max(1, for_engines // max(1, engines)), max(1, for_learners // max(1, ranks))
    return shares[0] if shares[0] < cores else None, shares[1] if shares[1] < cores else None


def with_threads(config: C, *, engines: int, learners: int) -> C:
    """`config` with threads where nobody chose them.

    Without an accelerator all that compute at the same time divide the cores. What has them for itself is left to its
    library.
    """
    import torch

    if torch.accelerator.is_available():
        return config
    engine, learner = share_threads(
        len(os.sched_getaffinity(0)),
        engines=engines * config.engine.replicas * config.engine.tp,
        ranks=learners * config.learner_procs,
        overlap=config.max_staleness > 0,
    )
    return replace(
        config,
        engine=replace(config.engine, threads=config.engine.threads or engine),
        learner=replace(config.learner, threads=config.learner.threads or learner),
    )
