"""Computing processes of a run with the sizes of their models, and checks of their settings."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

from forge_agents.errors import ModelNotFoundError
from forge_agents.models import resolve as models
from forge_agents.models.families import check_trainable, context_of
from forge_agents.models.sizes import ModelSize
from forge_agents.policy import LORA_TARGETS, LoRA
from forge_agents.runtime.hosts import ProcessSlot
from forge_agents.serving.config import EngineConfig, EnginePlan
from forge_agents.serving.memory import Footprint, check_context, check_kernels, check_tp
from forge_agents.settings import values_of
from forge_trainers.learner.degrees import check_degrees, check_without_gpu, shards_of
from forge_trainers.learner.memory import learner_bytes
from forge_trainers.learner.plan import LearnerPlan, check_teacher_tokens

if TYPE_CHECKING:
    from forge_verifiers.judge.clients import EngineChat
    from forge_verifiers.models.text_models import TextModel

OwnEngine: TypeAlias = "EngineChat"
"""An engine that starts with its first request, such as that of a judge. `place` sets its name and settings."""
OwnModel: TypeAlias = "TextModel"
"""A model that the controller's process loads with the first score, such as a reward model."""


ATTENTION_TARGETS = LORA_TARGETS[:4]


@dataclass(frozen=True, kw_only=True)
class Compute:
    """A mesh of computing processes: an engine or a learner."""

    name: str
    ranks: int
    policies: tuple[str, ...] = ()
    """Policies that it serves or trains. Several train adapters of one model."""
    folder: Path = Path()
    """Folder of the model, or its name if it is on another machine."""
    learner: LearnerPlan | None = None
    """Settings of a learner. None: an engine."""
    adapters: Sequence[LoRA] = ()
    """Adapters of an engine."""

    @property
    def role(self) -> str:
        """Role as in `Hosts`."""
        return "engines" if self.learner is None else "learner"


@dataclass(frozen=True, kw_only=True)
class Part(Compute):
    """A mesh whose model has a known size. It may be the engine of a judge."""

    size: ModelSize
    judge: EnginePlan | None = None
    """Settings of a judge's engine. None: the settings of all engines."""
    dtype: str = "bfloat16"
    """Type of the stored weights. An engine uses it unless its settings have another."""

    @classmethod
    def of(cls, compute: Compute, size: ModelSize, dtype: str) -> Self:
        """Return a mesh with the size of its model and the type of its weights."""
        return cls(**values_of(compute), size=size, dtype=dtype)

    @property
    def role(self) -> str:
        """Role as in `Hosts`."""
        return super().role if self.judge is None else "judges"

    @property
    def sharing(self) -> int:
        """Number of policies that share a learner."""
        return max(1, len(self.policies))

    @property
    def served(self) -> Footprint:
        """Memory footprint of an engine."""
        return Footprint(size=self.size, dtype=self.dtype, tp=self.ranks, adapters=self.adapters)

    def learner_bytes(self, **changes: Any) -> Mapping[str, int]:
        """Return the bytes of a rank of a learner by content, with other settings if given."""
        assert self.learner is not None
        return learner_bytes(self.size, replace(self.learner, **changes), ranks=self.ranks, sharing=self.sharing)


def unique_names(judges: Iterable[OwnEngine], reserved: Iterable[str] = ()) -> dict[str, OwnEngine]:
    """Return judges by names that no other process of the run has."""
    named, names = dict[str, OwnEngine](), set(reserved)
    for judge in judges:
        name = next(name for n in itertools.count(1) if (name := judge.name + f"-{n}" * (n > 1)) not in names)
        names.add(name)
        named[name] = judge
    return named


def judges_of(judges: Mapping[str, OwnEngine]) -> tuple[list[Part], list[str]]:
    """Return the engines of judges, and lines about those that already run or whose model is unknown."""
    parts, doubts = list[Part](), list[str]()
    for name, judge in judges.items():
        if judge.running:
            doubts.append(f"not counted: the engine of {name}, which runs already")
            continue
        try:
            folder = models.resolve(judge.model)
            size, dtype = ModelSize.of(folder), models.dtype_of(folder)
        except ModelNotFoundError as error:
            doubts.append(f"not counted: the engine of {name}: {error}")
            continue
        parts.append(Part(name=name, ranks=judge.config.tp, size=size, dtype=dtype, judge=EnginePlan.of(judge.config)))
    check_parts(parts, EngineConfig())
    return parts, doubts


def checked_parts(meshes: Iterable[Compute], engine: EngineConfig | None = None) -> list[Part]:
    """Return the checked parts of a run. Raises ModelNotFoundError if the size of a model is unknown."""
    parts = [Part.of(each, ModelSize.of(each.folder), models.dtype_of(each.folder)) for each in meshes]
    check_parts(parts, engine or EngineConfig())
    return parts


def check_models(meshes: Sequence[Compute], engine: EngineConfig | None = None) -> None:
    """Raise ValueError for a learner that cannot train its model, and for settings that `check_parts` refuses.

    Needs no hosts, so a run is checked before it waits in a cluster's queue. Sizes that are unknown are not checked.
    """
    for each in meshes:
        if (plan := each.learner) is None:
            continue
        try:
            check_trainable(models.read_json(each.folder / "config.json"), plan.max_sample_tokens)
        except ModelNotFoundError:
            raise
        except ValueError as cause:
            raise ValueError(f"{each.name} cannot train {each.folder.name}: {cause}") from cause
        for folder in map(Path, dict.fromkeys(plan.teachers.values())):
            if folder.is_dir():
                _check_teacher(each.name, plan, folder)
    with contextlib.suppress(ModelNotFoundError):
        checked_parts(meshes, engine)


def _check_teacher(name: str, plan: LearnerPlan, folder: Path) -> None:
    """Raise ValueError if a teacher cannot be computed, or compared with the model that learns."""
    longest = plan.max_sample_tokens or context_of(Path(plan.model))
    config, context = models.read_json(folder / "config.json"), context_of(folder)
    try:
        models.check_complete(folder)
        check_trainable(config, plan.max_sample_tokens)
        check_teacher_tokens(plan, folder)
        check_degrees(plan, ModelSize.of(folder))
    except ModelNotFoundError:
        raise
    except ValueError as cause:
        raise ValueError(f"{name} cannot learn from the teacher {folder}: {cause}") from cause
    if context is not None and (longest is None or longest > context):
        raise ValueError(
            f"{name} has samples of up to {longest} tokens, and the teacher {folder} a context of {context}. Set "
            f"engine.max_model_len to at most {context}"
        )


def check_on_cpu(slots: Iterable[ProcessSlot], meshes: Iterable[Compute], engine: EngineConfig) -> None:
    """Raise ValueError for processes without a GPU that need one. Arguments as in `place_here`."""
    on_cpu = {slot.name for slot in slots if not slot.gpu}
    for each in meshes:
        if each.name not in on_cpu:
            continue
        if each.learner is None:
            check_kernels(each.folder, each.name, engine, each.adapters)
        else:
            check_without_gpu(each.learner)


def check_parts(parts: Iterable[Part], engine: EngineConfig) -> None:
    """Raise ValueError if ranks cannot share a model, or a model lacks positions or layers that the settings need."""
    for part in parts:
        if part.learner is None:
            check_tp(part.size, part.ranks, part.name)
            check_context(part.size, (part.judge or engine).max_model_len, part.name)
            continue
        shards_of(part.learner, part.ranks)
        check_degrees(part.learner, part.size)
        lora = part.learner.lora
        if lora is not None and not part.size.adapts_feed_forward and set(lora.targets) - set(ATTENTION_TARGETS):
            raise ValueError(
                f"{part.name}: the experts and the feed-forward of this mixture cannot be adapted. Set "
                f"LoRA(targets={ATTENTION_TARGETS!r}), in a run's file lora: "
                f"{{targets: [{', '.join(ATTENTION_TARGETS)}]}}"
            )
