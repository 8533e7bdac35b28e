"""The reference of the KL divergence: the start model, or the learner's weights of an earlier step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from forge_trainers.learner import lora
from forge_trainers.learner.model import Ranks, build_model, free_unsharded
from forge_trainers.learner.plan import LearnerPlan


class Reference:
    """Reference model of one learner: the start model, or the learner's weights at the latest update.

    Without an adapter it is a frozen copy of the model in the compute dtype. With one it is the learner's model without
    the adapter or, if it moves, with another adapter.
    """

    def __init__(self, config: LearnerPlan, model: Any, ranks: Ranks, adapter: lora.Adapter | None) -> None:
        """`model` is the model of the learner, and `adapter` its adapter, which is in the model at each call."""
        self._learner, self._adapter = model, adapter
        self._every = config.reference_update_every
        self.model = build_model(config, ranks, trainable=False).model if adapter is None else model
        self._earlier = None
        if adapter is not None and self.moves:
            self._earlier = lora.Adapter(model, seed=config.seed, beside=adapter)
            adapter.enter()

    @contextmanager
    def computing(self) -> Iterator[Any]:
        """Context in which the model that it yields computes as the reference."""
        if self._adapter is None:
            yield self.model
        elif self._earlier is None:
            with lora.switched_off(self.model):
                yield self.model
        else:
            self._enter(self._earlier)
            try:
                yield self.model
            finally:
                self._enter(self._adapter)

    @property
    def moves(self) -> bool:
        """Whether the reference follows the learner."""
        return self._every > 0

    def follow(self, version: int) -> None:
        """Set the reference to the learner's weights of `version` if an update is due."""
        if not self.moves or version % self._every:
            return
        if self._adapter is None:
            self.model.load_state_dict(self._learner.state_dict())
        elif self._earlier is not None:
            self._earlier.copy_from(self._adapter)

    def state(self) -> dict[str, Any]:
        """Tensors of a reference that moves, by TorchTitan name, for a checkpoint. Those of an adapter are copies."""
        with self.computing() as model:
            state: dict[str, Any] = model.state_dict()
            if self._adapter is None:
                return state
            return {name: value.clone() for name, value in state.items() if lora.is_adapter(name)}

    def load(self, state: dict[str, Any]) -> None:
        """Load what `state` has returned."""
        with self.computing() as model:
            model.load_state_dict(state, strict=self._adapter is None)

    def _enter(self, adapter: lora.Adapter) -> None:
        adapter.enter()
        free_unsharded(self.model)
