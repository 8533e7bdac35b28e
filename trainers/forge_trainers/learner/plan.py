"""Resolved settings of one learner, from the user's settings and the trainer's knowledge of the run."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from forge_agents.models.sizes import ModelSize
from forge_agents.models.tokenizer_file import check_same_tokens, num_tokens
from forge_agents.policy import LoRA
from forge_agents.settings import settings_class, values_of
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.losses.registry import LossSettings

LEAST_MICROBATCH, LEAST_CHUNK = 2048, 256
"""Positions of a forward pass and tokens of a logits chunk if memory does not allow more."""
MEMORY_DRIVEN = ("max_tokens_per_microbatch", "loss_chunk_tokens", "activation_checkpointing")
"""Fields that `LearnerPlan.with_memory` fills in."""
_COMPILED_LENGTHS = 8
"""Number of row lengths with `compile`: torch.compile keeps as many versions of a function."""


@settings_class
@dataclass(frozen=True, kw_only=True)
class LearnerPlan(LearnerConfig):
    """Settings of a learner's processes. A trainer makes it once with `of`, and its processes never change it."""

    model: str = ""
    """Folder of a Hugging Face model: config.json and safetensors."""
    lora: LoRA | None = None
    """Adapter that is trained instead of the weights, which are then stored in `compute_dtype`."""
    temperature: float = 1.0
    """Temperature of the sampler, above 0. The learner computes log-probabilities at the same temperature."""
    seed: int = 0
    """Random seed of the process."""
    dump_folder: str = ""
    """Folder of TorchTitan's debugging output. Empty: a temporary folder."""
    max_sample_tokens: int | None = None
    """Maximum number of tokens of a sample. Longer ones are dropped and counted. None: the model's context."""
    loss_chunk_tokens: int | None = None
    """Number of loss tokens whose logits are in memory at a time. None: by memory."""
    share_prefixes: bool = True
    """Whether prefixes that several samples share are computed once. On CPU only: attention on GPUs (varlen kernels)
    takes documents without shared prefixes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in (("max_sample_tokens", 2), ("loss_chunk_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} of the learner must be at least {least}")
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"temperature={self.temperature} of the learner must be above 0. Greedy samples have no gradient"
            )

    @classmethod
    def of(cls, config: LearnerConfig, **values: Any) -> LearnerPlan:
        """Return a plan with the settings of `config` and `values` for other fields."""
        return cls(**values_of(config) | values)

    @property
    def row_multiple(self) -> int:
        """Number of positions that rows are padded to a multiple of.

        With `compile` there are few lengths. With `tp` all ranks get the same number of positions.
        """
        longest = self.max_tokens_per_microbatch or LEAST_MICROBATCH
        return math.lcm(self.tp, math.ceil(longest / _COMPILED_LENGTHS) if self.compile else 1)

    def with_memory(
        self,
        *,
        max_tokens_per_microbatch: int = LEAST_MICROBATCH,
        loss_chunk_tokens: int = LEAST_CHUNK,
        activation_checkpointing: Literal["none", "selective", "full"] = "none",
    ) -> LearnerPlan:
        """Return the plan with the given values for memory-driven fields that are None."""
        return replace(
            self,
            max_tokens_per_microbatch=self.max_tokens_per_microbatch or max_tokens_per_microbatch,
            loss_chunk_tokens=self.loss_chunk_tokens or loss_chunk_tokens,
            activation_checkpointing=self.activation_checkpointing or activation_checkpointing,
        )

    @property
    def left_to_memory(self) -> list[str]:
        """Names of the memory-driven fields that are None."""
        return [name for name in MEMORY_DRIVEN if getattr(self, name) is None]

    @property
    def loss_settings(self) -> LossSettings:
        """The loss with all defaults filled in, at the sampler's temperature."""
        return replace(super().loss_settings, temperature=self.temperature)


def check_teacher_tokens(plan: LearnerPlan, folder: Path) -> None:
    """Check that a teacher has logits of the tokens of the learner's model.

    Raises:
        ValueError: The tokenizers differ, or the teacher has too few embeddings, or other ones with ``kl="exact"``.
    """
    check_same_tokens(Path(plan.model), folder)
    student, teacher = (ModelSize.of(each).vocab for each in (Path(plan.model), folder))
    if teacher < (needed := min(student, num_tokens(Path(plan.model)))):
        raise ValueError(
            f"the teacher {folder} has embeddings of {teacher} tokens, and the model {plan.model} uses {needed}. "
            "Choose a teacher with an embedding of each token"
        )
    if plan.loss_settings.kl == "exact" and teacher != student:
        raise ValueError(
            f"the teacher {folder} has logits of {teacher} tokens and the model {plan.model} of {student}, which "
            "kl='exact' compares. Set kl='k2', which compares the sampled tokens"
        )
