"""User settings of a learner."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

from forge_agents.policy import Policy
from forge_agents.runtime.hosts import MAX_PROCESSES
from forge_agents.runtime.machine import has_fast_bfloat16
from forge_agents.settings import settings_class, suggestion
from forge_trainers.losses.registry import CORRECTIONS, DISTILL, Correction, CorrectionName, LossSettings, find_loss

_LARGEST_ROUNDED_BETA = 0.99


@settings_class
@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """Optimizer, loss, precision, memory and parallelism of a learner."""

    lr: float | None = None
    """Learning rate of AdamW after warm-up. None (default) chooses it by training method, model size and whether all
    weights or a LoRA adapter are trained, see `forge_trainers.learner.rates`: with GRPO 2e-5 for all weights of a model
    with 135M parameters or fewer, 1e-6 from 7B on, and ten times as much for an adapter. The chosen rate is shown at
    the start and recorded. 0 computes everything and leaves the weights unchanged, as a control."""
    warmup_steps: int = 0
    """Number of training steps over which the learning rate rises linearly to `lr`."""
    lr_decay: Literal["none", "linear", "cosine", "sqrt"] = "none"
    """Shape of the learning rate's decay. "none" (default) keeps it at `lr`. "linear" and "cosine" start right after
    warm-up. "sqrt" keeps `lr` until the last 20 % of the run's steps, in which the rate falls as one minus the square
    root of their progress (warm-up, stable, decay; arXiv 2405.18392)."""
    lr_min_ratio: float = 0.0
    """Final learning rate as a fraction of `lr`, in [0, 1]. This rate would be reached one step after the last."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's moments, in [0, 1)."""
    num_iterations: int = 1
    """Number of passes over each batch, each with optimizer steps of its own (TRL's `num_iterations`, verl's
    `ppo_epochs`). At least 1. With several optimizer steps per batch the probability ratio moves away from 1, and the
    clip range takes effect."""
    num_minibatches: int = 1
    """Number of minibatches that a batch is split into, at least 1, with one optimizer step for each. Groups stay
    whole, so a batch with fewer groups has fewer minibatches. Each minibatch is normalized by its own tokens or
    sequences, as if it were a batch."""
    max_grad_norm: float = 1.0
    """Maximum L2 norm of the gradient over all parameters in an optimizer step. Larger gradients are scaled down. inf
    disables clipping."""
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of activations and matrix products. "auto" (default) is bfloat16, or float32 on a CPU without bfloat16
    instructions (AVX512-BF16, AMX), where bfloat16 is many times slower. Weights and gradients are float32."""
    optimizer_state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type in which AdamW's moments are stored between steps. bfloat16 takes 4 bytes per weight instead of 8, as
    in DeepSeek-V3 (arXiv 2412.19437, section 3.3.3), and needs `betas` of at most 0.99. Steps are computed in
    float32."""
    max_tokens_per_microbatch: int | None = None
    """Maximum number of positions in one forward pass of one rank. A longer sample gets a pass of its own. None
    (default) chooses 8,192, 4,096 or 2,048 by memory (`forge_trainers.learner.memory.by_memory`)."""
    loss: str = "dapo"
    """Policy loss: "dapo" (default; arXiv 2503.14476, a variant of GRPO), "grpo" (as published), "dr_grpo", "gspo",
    "cispo", "rloo", "reinforce_pp", "distill" (only the divergence from a teacher) or a registered name.
    "package.module:name" imports the module first. `forge_trainers.losses.registry` has the equations."""
    clip: tuple[float, float] | None = None
    """Clip range of the probability ratio as (low, high): the ratio is clipped to [1 - low, 1 + high]. low lies in
    [0, 1], high is at least 0. None (default) uses the published values of the loss."""
    sequence: Literal["trajectory", "turn"] = "trajectory"
    """Unit that sequence-level losses and corrections compare: all that an agent wrote in an episode (default), or one
    turn."""
    correction: Correction | CorrectionName | None = None
    """Importance-sampling correction for samples of an older or numerically different policy. "ratio" takes the loss's
    probability ratio to the sampler. The others take it to the learner at the start of the batch, so that it is 1 in
    the first optimizer step, and multiply each token's loss with the weight w = p_learner / p_sampler: "truncate" with
    min(w, high), "mask" with w inside [low, high] and 0 outside, "none" with 1. A `Correction` also sets low, high and
    the level at which probabilities are compared. None (default) uses the correction of the loss, "ratio" if `clip` is
    set, or "truncate" if neither is set and rollouts are asynchronous (`GRPOConfig.max_staleness`). See
    `for_old_samples`."""
    kl: Literal["k1", "k2", "k3", "exact"] | None = None
    """Estimator of the KL divergence from the reference. "k1", "k2" and "k3" use the sampled tokens, see
    `forge_trainers.losses.correction.kl_estimate`. "exact" sums over the vocabulary. None (default): "exact" if the
    reference is a teacher, else "k3"."""
    kl_coef: float = 0.0
    """Weight of the KL divergence in the loss. Above 0, the reference, a frozen model, is kept in memory."""
    reference: int | str | dict[str, str] = field(default="start", hash=False)
    """Reference of the KL divergence. "start" (default): the start model. A number: the current weights, updated after
    this many training steps, as in regularized self-play (R-NaD, arXiv 2206.15378; magnetic mirror descent,
    2206.05825). The name or folder of another model: a teacher (on-policy distillation, arXiv 2306.13649). A mapping
    from agents to models: a teacher for each agent (arXiv 2602.05182)."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus: the mean entropy of the loss tokens' distributions is subtracted from the loss."""
    threads: int | None = None
    """Number of CPU threads of each rank. None (default) divides the host's cores among the ranks of all learners. With
    `max_staleness` above 0 they get half of the cores."""
    tp: int = 1
    """Number of tensor-parallel ranks. Must divide the model's query heads, key heads and vocabulary, and
    `learner_procs`."""
    dp_replicate: int = 1
    """Number of replicas of the sharded model (hybrid sharding, HSDP). The remaining ranks shard the weights (FSDP):
    ``learner_procs / (dp_replicate * tp)``. If this is 1, the model is replicated without sharding (DDP)."""
    ep: int = 1
    """Number of ranks over which the experts of a mixture-of-experts model are spread. Must divide the number of
    experts and ``learner_procs / dp_replicate``."""
    activation_checkpointing: Literal["none", "selective", "full"] | None = None
    """Activations that the backward pass recomputes: "none", "selective" (cheap operations and every second matrix
    product) or "full" (every block). None (default) uses the first of them that fits on the GPU, and "none" on CPU."""
    compile: bool = False
    """Whether to compile each block with torch.compile. Rows are then padded to at most eight lengths, because each
    new length may be compiled again. Refused on CPU, where compiling one length takes longer than its step."""
    cpu_offload: bool = False
    """Whether to keep weights, gradients and optimizer state in host memory and to copy each block to the GPU when it
    is needed. Refused on CPU."""

    def __post_init__(self) -> None:
        find_loss(self.loss)
        for name in ("lr", "weight_decay", "kl_coef", "entropy_coef"):
            value = getattr(self, name)
            _require(value is None or (math.isfinite(value) and value >= 0), self, name, "finite and >= 0")
        for name in ("num_iterations", "num_minibatches", "warmup_steps", "max_tokens_per_microbatch", "tp",
                     "dp_replicate", "ep", "threads"):  # fmt: skip
            least = {"warmup_steps": 0, "max_tokens_per_microbatch": 2}.get(name, 1)
            value = getattr(self, name)
            _require(value is None or value >= least, self, name, f"at least {least}")
        for name in ("num_iterations", "tp", "dp_replicate", "ep", "threads"):
            _require((getattr(self, name) or 0) <= MAX_PROCESSES, self, name, f"at most {MAX_PROCESSES}")
        _require(all(0 <= beta < 1 for beta in self.betas), self, "betas", "in [0, 1)")
        if self.optimizer_state_dtype == "bfloat16" and max(self.betas) > _LARGEST_ROUNDED_BETA:
            raise ValueError(
                f"betas={self.betas} with optimizer_state_dtype='bfloat16': rounding to eight bits would undo decay by "
                f"less than 1/256. Use betas of at most {_LARGEST_ROUNDED_BETA}, or float32"
            )
        _require(0 <= self.lr_min_ratio <= 1, self, "lr_min_ratio", "in [0, 1]")
        _require(self.max_grad_norm > 0, self, "max_grad_norm", "above 0; inf disables clipping")
        in_range = self.clip is None or (0 <= self.clip[0] <= 1 and self.clip[1] >= 0)
        _require(in_range, self, "clip", "(low, high) with low in [0, 1] and high >= 0; (0.2, 0.2) is usual")
        if isinstance(self.correction, str):
            expected = f"one of {CORRECTIONS} or a forge_trainers.losses.Correction"
            _require(self.correction in CORRECTIONS, self, "correction", expected)
        self._check_reference()

    def _check_reference(self) -> None:
        expected = (
            '"start", a number of steps of at least 1, the name or folder of a model, or a mapping from agents to such '
            "names"
        )
        _require(isinstance(self.reference, int | str | Mapping), self, "reference", expected)
        names: list[Any] = [*self.teachers.values()]
        valid = self.reference >= 1 if isinstance(self.reference, int) else bool(self.reference)
        _require(valid and all(isinstance(name, str) and name for name in names), self, "reference", expected)
        if find_loss(self.loss).name == DISTILL and not (self.kl_coef and names):
            raise ValueError(
                f"loss={self.loss!r} consists of the divergence from a teacher, and reference={self.reference!r} with "
                f"kl_coef={self.kl_coef:g} has none. Set reference to a model, or to one for each agent, and kl_coef=1"
            )

    @property
    def teachers(self) -> Mapping[str, str]:
        """Names or folders of the teachers by agent. A teacher of all agents has the key ""."""
        if isinstance(self.reference, str):
            return {} if self.reference == "start" else {"": self.reference}
        return {} if isinstance(self.reference, int) else self.reference

    def with_teachers(self, change: Callable[[str], str]) -> Self:
        """Return these settings with `change` of the name of each teacher."""
        teachers = {agent: change(name) for agent, name in self.teachers.items()}
        return replace(self, reference=teachers.get("", teachers)) if teachers else self

    def for_policy(self, policy: Policy) -> LearnerConfig:
        """Return these settings with the overrides of `policy.learner`.

        Raises:
            TypeError, ValueError: A field is unknown, has a wrong value, or cannot differ between policies.
        """
        names = [field.name for field in fields(self)]
        for name in policy.learner or {}:
            if name in ONE_FOR_ALL:
                reason = ONE_FOR_ALL[name]
                raise ValueError(f"policy {policy.name!r}: learner.{name} cannot be set per policy. {reason}")
            if name not in names:
                near = suggestion(str(name), names, kind=LearnerConfig)
                raise ValueError(f"policy {policy.name!r}: learner.{name} is no field of fa.LearnerConfig.{near}")
        try:
            return replace(self, **(policy.learner or {}))
        except (TypeError, ValueError) as cause:
            raise type(cause)(f"policy {policy.name!r}: {cause}") from cause

    def for_old_samples(self) -> LearnerConfig:
        """Return these settings for asynchronous rollouts: "truncate" if neither user nor loss choose a correction.

        The ratio of a stale sample to its sampler starts away from 1, so a clip range around the sampler removes tokens
        from the gradient before the first update: 2.6 % of them at a lag of one version, which costs a tenth of the
        reward (docs/decisions/training.md). With "truncate" the ratio is taken to the learner at the start of the
        batch, and the lag is in a weight of at most `Correction.high`.
        """
        chosen = self.correction or self.clip is not None or find_loss(self.loss).correction
        return self if chosen else replace(self, correction="truncate")

    def dtype_on(self, *, cpu: bool) -> Literal["bfloat16", "float32"]:
        """Return `compute_dtype`, with "auto" resolved for this machine's CPU or for a GPU."""
        if self.compute_dtype != "auto":
            return self.compute_dtype
        return "float32" if cpu and not has_fast_bfloat16() else "bfloat16"

    @property
    def loss_settings(self) -> LossSettings:
        """The loss with all defaults filled in."""
        loss = find_loss(self.loss)
        published = loss.correction or Correction()
        correction = self.correction or ("ratio" if self.clip is not None else published)
        if isinstance(correction, str):
            correction = published if correction == published.how else Correction(how=correction)
        clip_low, clip_high = self.clip or loss.clip
        return LossSettings(
            loss=loss,
            clip_low=clip_low,
            clip_high=clip_high,
            correction=correction,
            sequence=self.sequence,
            kl=self.kl or ("exact" if self.teachers else "k3"),
            kl_coef=self.kl_coef,
            entropy_coef=self.entropy_coef,
        )


ONE_FOR_ALL = {"threads": "learners share the host's cores, so set learner.threads of the trainer"}
"""Fields that a policy cannot override, with the setting to use instead."""


def _require(holds: bool, config: LearnerConfig, name: str, expected: str) -> None:
    if not holds:
        raise ValueError(f"{name}={reprlib.repr(getattr(config, name))} of the learner must be {expected}")
