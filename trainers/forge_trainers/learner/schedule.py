"""The learning rate of every optimiser step: warm-up, then constant or falling to the end of the run.

In: a `LearnerConfig`, the optimisers, the run's number of steps. Out: the rate in every parameter group. Waits for
nothing.
"""

from __future__ import annotations

from typing import Any

from forge_trainers.learner import titan
from forge_trainers.learner.config import LearnerConfig

_FOREVER = 1 << 40
"""Steps of a schedule that does not fall."""


class Schedule:
    """TorchTitan's warm-up, stable and decay phases (arXiv 2404.06395) over the optimiser steps of a run.

    The rate is a function of the step and of the run's number of steps alone, so a resumed run that is made longer
    goes on at the rate that the longer schedule has at that step.

    Args:
        config: Says how the rate moves.
        optimizers: TorchTitan's ``OptimizersContainer``.
    """

    def __init__(self, config: LearnerConfig, optimizers: Any) -> None:
        self._config, self._optimizers = config, optimizers
        self._total: int | None = None
        self._lambdas = self._build(_FOREVER)

    def set_total_steps(self, total: int) -> None:
        """Say how many optimiser steps the run has, those already taken included.

        Raises:
            ValueError: The rate is to fall, and warm-up leaves no step for it.
        """
        if self._config.lr_decay == "none":
            return
        if self._config.warmup_steps >= total:
            raise ValueError(
                f"warmup_steps={self._config.warmup_steps} leaves none of the run's {total} steps for "
                f"lr_decay={self._config.lr_decay!r}; lower warmup_steps or train longer"
            )
        taken = self._lambdas.state_dict()
        self._total, self._lambdas = total, self._build(total)
        self.load_state_dict(taken)

    @property
    def lr(self) -> float:
        """The rate of the next step.

        Raises:
            ValueError: The rate is to fall and `set_total_steps` was not called, or all those steps are taken.
        """
        taken = self._lambdas.state_dict()["last_epoch"]
        if self._config.lr_decay != "none" and (self._total is None or taken >= self._total):
            raise ValueError(
                f"lr_decay={self._config.lr_decay!r} needs the run's number of steps, {taken} are taken and "
                f"{self._total} planned; call set_total_steps with more"
            )
        return float(self._lambdas.schedulers[0].get_last_lr()[0])

    def step(self) -> None:
        """Move on, after an optimiser step."""
        self._lambdas.step()

    def state_dict(self) -> dict[str, Any]:
        """How many steps are taken."""
        state: dict[str, Any] = self._lambdas.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the steps that `state` says, at this configuration's rate."""
        self._lambdas.load_state_dict(state)
        for scheduler in self._lambdas.schedulers:
            for group, lr in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                group["lr"] = lr

    def _build(self, total: int) -> Any:
        config = self._config
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:  # else PyTorch takes the rate of the moment for the peak
                group["lr"] = group["initial_lr"] = config.lr
        falling = config.lr_decay != "none"
        return titan.LRSchedulersContainer.Config(
            warmup_steps=config.warmup_steps,
            decay_ratio=config.lr_decay_share if falling else 0.0,
            decay_type=config.lr_decay if falling else "linear",
            min_lr_factor=config.lr_min_share,
        ).build(optimizers=self._optimizers, training_steps=total)
