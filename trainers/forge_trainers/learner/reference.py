"""References of the KL divergence: the start model, the learner's weights of an earlier step, or teachers."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from forge_agents.models import resolve as models
from forge_agents.types import EpisodeBatch
from forge_trainers.learner import lora
from forge_trainers.learner.model import Built, Ranks, build_model, free_unsharded
from forge_trainers.learner.plan import LearnerPlan, check_teacher_tokens


class Reference:
    """Reference models of one learner: the start model, the learner's weights at the latest update, or teachers.

    Start models and earlier weights are a frozen copy in the compute dtype. With an adapter they are the learner's
    model without the adapter or, if the reference moves, with another adapter. Teachers are frozen models in the
    compute dtype.
    """

    def __init__(
        self,
        config: LearnerPlan,
        learner: Built,
        ranks: Ranks,
        adapter: lora.Adapter | None,
        teachers: dict[str, Built],
    ) -> None:
        """Build the models.

        Args:
            config: Settings of the learner.
            learner: Model of the learner.
            ranks: Ranks of the learner.
            adapter: Adapter of the learner, which is in the model at each call. None: all weights are trained.
            teachers: Teachers by folder that other learners on this model have built. New ones are added.
        """
        self._learner, self._adapter = learner, adapter
        self._every = config.reference if isinstance(config.reference, int) else 0
        self.agents = tuple(config.teachers)
        """Agents with a teacher, in the order of the parts of a batch. A teacher of all agents has the name ""."""
        self._teachers, self._dtype = config.teachers, config.compute_dtype
        self._earlier = None
        if self.agents:
            self._models = [_teacher(config, name, ranks, teachers) for name in config.teachers.values()]
        elif adapter is None:
            self._models = [build_model(config, ranks, trainable=False)]
        else:
            self._models = [learner]
            if self.moves:
                self._earlier = lora.Adapter(learner.model, seed=config.seed, other=adapter)
                adapter.enter()

    @property
    def model(self) -> Any:
        """The reference model, or the first teacher."""
        return self._models[0].model

    @property
    def models(self) -> list[Any]:
        """Models that were built for the reference, without duplicates."""
        return list(dict.fromkeys(built.model for built in self._models if built is not self._learner))

    def check_teachers(self, metrics: Mapping[str, float]) -> None:
        """Raise ValueError if the divergence from a teacher is not finite, and the learner is not the reason.

        `metrics` are those of a pass over a batch, with ``kl/AGENT`` if teachers have agents.
        """
        for agent, teacher in self._teachers.items():
            divergence = metrics.get(f"kl/{agent}" if agent else "kl", 0.0)
            if not math.isfinite(divergence) and math.isfinite(metrics["entropy"]):
                raise ValueError(
                    f"the divergence from the teacher {teacher}{f' of {agent}' if agent else ''} is {divergence}: its "
                    f"log-probabilities are not finite. Its weights are damaged, or overflow in {self._dtype}. Set "
                    "compute_dtype='float32', or choose another teacher"
                )

    def split(self, batch: EpisodeBatch, samples: Sequence[int] | None) -> list[Sequence[int] | None]:
        """Split samples of a batch (None: all) into the parts that have a teacher each.

        Raises:
            ValueError: A sample has no teacher, or a token no embedding in a teacher.
        """
        highest = int(batch["tokens"]["ids"].max())  # padding of the learner's vocabulary may be sampled, too
        for teacher, built in zip(self._teachers.values(), self._models, strict=False):
            if highest >= built.vocab_size:
                raise ValueError(
                    f"the batch has the token {highest}, and the teacher {teacher} embeddings of {built.vocab_size} "
                    "tokens. Choose a teacher with an embedding of each token"
                )
        if len(self.agents) < 2:
            return [samples]
        numbers = {zlib.crc32(agent.encode()): number for number, agent in enumerate(self.agents)}
        agent_n, parts = batch["samples"]["agent"].tolist(), [list[int]() for _ in self.agents]
        for i in range(len(agent_n)) if samples is None else samples:
            if agent_n[i] not in numbers:
                raise ValueError(
                    f"sample {i} is of an agent without a teacher. The teachers are those of {', '.join(self.agents)}. "
                    "Name a model for each trained agent in `reference`"
                )
            parts[numbers[agent_n[i]]].append(i)
        return [*parts]

    @contextmanager
    def computing(self, part: int = 0) -> Iterator[Built]:
        """Context in which the model that it yields computes as the reference of a part of the batch."""
        built = self._models[part]
        if built is not self._learner:
            yield built
        elif self._earlier is None:
            with lora.switched_off(built.model):
                yield built
        else:
            assert self._adapter is not None
            self._enter(self._earlier)
            try:
                yield built
            finally:
                self._enter(self._adapter)

    @property
    def moves(self) -> bool:
        """Whether the reference follows the learner."""
        return self._every > 0

    def follow(self, version: int) -> None:
        """Set the reference to the learner's weights of `version` if an update is due."""
        if self.moves and version % self._every == 0:
            self._update()

    def _update(self) -> None:
        if self._adapter is None:
            self.model.load_state_dict(self._learner.model.state_dict())
        elif self._earlier is not None:
            self._earlier.copy_from(self._adapter)

    def state(self) -> dict[str, Any]:
        """Tensors of a reference that moves, by TorchTitan name, for a checkpoint. Tensors of an adapter are copies."""
        with self.computing() as built:
            state: dict[str, Any] = built.model.state_dict()
            if self._adapter is None:
                return state
            return {name: value.clone() for name, value in state.items() if lora.is_adapter(name)}

    def load(self, state: dict[str, Any] | None) -> None:
        """Load what `state` has returned. None: take over the learner's weights, as in a run without a reference."""
        if state is None:
            self._update()
            return
        with self.computing() as built:
            built.model.load_state_dict(state, strict=self._adapter is None)

    def free(self) -> None:
        """Free FSDP's compute copies of the weights of frozen models."""
        for model in self.models:
            free_unsharded(model)

    def _enter(self, adapter: lora.Adapter) -> None:
        adapter.enter()
        free_unsharded(self.model)
        if self._learner.copies is not None:  # the model computes with copies of its weights
            self._learner.copies.refresh()


def _teacher(config: LearnerPlan, name: str, ranks: Ranks, teachers: dict[str, Built]) -> Built:
    """Return the teacher with this name or folder, from `teachers` if it is there.

    Raises:
        ModelNotFoundError: Files are missing or incomplete.
        ValueError: The learner cannot compute the model, or its tokens are not those of the learner's model.
    """
    folder = models.resolve(name)
    if str(folder) not in teachers:
        check_teacher_tokens(config, folder)
        teachers[str(folder)] = build_model(replace(config, model=str(folder), lora=None), ranks, trainable=False)
    return teachers[str(folder)]
