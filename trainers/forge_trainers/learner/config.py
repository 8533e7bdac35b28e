"""How the learner learns: its settings.

In: the user's choices. Out: frozen, checked dataclasses. Waits for nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args, get_origin, get_type_hints

from forge_agents.policy import LoRA, Policy
from forge_agents.settings import settings_class, suggestion
from forge_trainers.losses.registry import Correction, LossSettings, find_loss

_LENGTHS = 8
"""Of compiled rows: as many as torch.compile keeps of one function."""
_LARGEST_ROUNDED_BETA = 0.99
LEAST_MICROBATCH, LEAST_CHUNK = 2048, 256
"""Positions of a pass and tokens of a head's chunk where memory does not say more."""


@settings_class
@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """One learner."""

    model: str = ""
    """Folder of a Hugging Face model: config.json and safetensors; for `Learner.start` also a name, as `Policy` takes
    it. The trainer fills it in."""
    lr: float | None = None
    """Learning rate of AdamW after warm-up. None (default) chooses it by training method, model size and whether all
    weights or a LoRA adapter are trained, see `forge_trainers.learner.rates`: with GRPO 2e-5 for all weights of a model
    with 135M parameters or fewer, 1e-6 from 7B on, and ten times as much for an adapter. The chosen rate is shown at
    the start and recorded. 0 computes everything and leaves the weights unchanged, as a control."""
    warmup_steps: int = 0
    """Number of training steps over which the learning rate rises linearly to `lr`."""
    lr_decay: Literal["none", "linear", "cosine", "sqrt"] = "none"
    """How the learning rate falls towards the end of the run; "none" holds it at `lr`. "sqrt" is one minus the square
    root of the progress."""
    lr_decay_ratio: float = 1.0
    """Share of the run's steps, its last ones, in which the learning rate falls, above 0 and at most 1; before them it
    is `lr`. 1: it falls as soon as it has risen."""
    lr_min_ratio: float = 0.0
    """Share of `lr` that it falls to, in [0, 1]; reached one step after the last."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moment decay rates."""
    num_iterations: int = 1
    """Number of passes over each batch, each with optimizer steps of its own (TRL's `num_iterations`, verl's
    `ppo_epochs`). At least 1. With several optimizer steps per batch the probability ratio moves away from 1, and the
    clip range takes effect."""
    num_minibatches: int = 1
    """Number of minibatches that a batch is split into, at least 1, with one optimizer step for each. Groups stay
    whole, so a batch with fewer groups has fewer minibatches. Each minibatch is normalized by its own tokens or
    sequences, as if it were a batch."""
    max_grad_norm: float = 1.0
    """Gradients of each optimizer step are scaled down to this L2 norm over all parameters."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of activations and matrix products. Weights and gradients are float32."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are added up over ranks. bfloat16 halves what travels and rounds."""
    optimizer_state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that AdamW's moments are kept in between steps. bfloat16 takes 4 bytes of a weight instead of 8, as
    DeepSeek-V3 did (arXiv 2412.19437, section 3.3.3); steps are computed in float32, and both `betas` must be at most
    0.99."""
    max_tokens_per_microbatch: int | None = None
    """Most positions in one forward pass of one rank. A longer sample gets a pass of its own. None: by memory
    (`forge_trainers.learner.memory.by_memory`), and 2,048 where that says nothing."""
    max_sample_tokens: int | None = None
    """Longest sample, in tokens; a longer one is dropped and counted. None: as long as the engine's conversations, and
    without an engine as the model's context."""
    loss: str = "dapo"
    """Policy loss: "dapo" (default; arXiv 2503.14476, a variant of GRPO), "grpo" (as published), "dr_grpo", "gspo",
    "cispo", "rloo", "reinforce_pp" or a registered name; "package.module:name" imports the module first.
    `forge_trainers.losses.registry` has the equations."""
    clip_low: float | None = None
    """The probability ratio's lower bound is 1 minus this, in [0, 1]. None: as the loss was published."""
    clip_high: float | None = None
    """The probability ratio's upper bound is 1 plus this, >= 0. None: as the loss was published."""
    sequence: Literal["trajectory", "turn"] = "trajectory"
    """What is one sequence to losses and corrections that look at whole ones: all that an agent said in an episode, or
    one of its turns."""
    length_constant: int | None = None
    """Tokens by which Dr. GRPO divides the sum over a sequence. None: `max_tokens_per_microbatch`, and 2,048 where that
    is left to memory."""
    correction: Literal["ratio", "truncate", "mask", "none"] | None = None
    """What is done about samples of an older or numerically different policy. None: as the loss brings it, or "ratio"
    where a clip is given, which would bound nothing otherwise; "truncate" where neither says anything, the loop plays
    ahead (`GRPOConfig.max_staleness`) and the loss is "grpo", "dr_grpo", "dapo", "reinforce_pp" or one of yours that
    leaves it open, see `for_old_samples`. "ratio": the loss's probability ratio is taken to the sampler. Otherwise it
    is taken to the learner at the batch's start, so it is 1 in the first optimizer step, and each token's loss is
    multiplied with that learner's over the sampler's probability, at most `correction_high` ("truncate") or 0 outside
    `correction_low` to `correction_high` ("mask"), or with nothing ("none")."""
    correction_level: Literal["token", "sequence", "geometric"] | None = None
    """Whose probabilities "truncate" and "mask" compare: a token's, its sequence's, or the sequence's geometric mean
    per token. The last two cost one more forward pass. None: as the loss brings it, else a token's."""
    correction_low: float | None = None
    """Lower bound, in [0, 1]. None: as the loss brings it, else 0.5, IcePop's (arXiv 2510.18855)."""
    correction_high: float | None = None
    """Upper bound, at least 1; for "truncate" 2 is usual. None: as the loss brings it, else 5, IcePop's."""
    kl: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the divergence from the frozen start model; `forge_trainers.losses.correction.kl_estimate`."""
    kl_coef: float = 0.0
    """Weight of that divergence in the loss; above 0 a second copy of the model is held."""
    entropy_coef: float = 0.0
    """Weight of the mean entropy of the loss tokens' distributions, which the loss is lowered by."""
    temperature: float = 1.0
    """The sampler's temperature; learner logprobs are taken at the same one. Above 0. The trainer fills it in."""
    share_prefixes: bool | None = None
    """Compute the common prompt of siblings once, and on CPU what prompts of one forward pass begin with alike. None:
    yes on CPU, no on GPU, where it was never run by us and is for models without sliding windows
    (`forge_trainers.learner.prefixes`)."""
    loss_chunk_tokens: int | None = None
    """Loss tokens whose logits are held at a time. None: by memory, as `max_tokens_per_microbatch`, else 256."""
    lora: LoRA | None = None
    """Learn an adapter instead of the weights, which are then held in `compute_dtype`. The trainer fills in its
    policy's."""
    seed: int = 0
    """Seed of the process's random numbers."""
    threads: int | None = None
    """CPU threads of each rank; None: all cores over the ranks of all learners, half of them where engines compute
    meanwhile (``max_staleness`` above 0)."""
    dp_replicate: int = 1
    """Data-parallel replicas that hold the same shards."""
    dp_shard: int = -1
    """Data-parallel ranks over which weights are sharded; -1: all that the other degrees leave."""
    tp: int = 1
    """Tensor-parallel ranks; must divide the model's query heads, key heads and vocabulary."""
    sequence_parallel: bool = True
    """Tensor-parallel ranks also split the positions between their shared products: less memory for activations."""
    ep: int = 1
    """Ranks over which the experts of a mixture are spread, taken from those of `dp_shard` and `tp`; must divide their
    product and the number of experts."""
    activation_checkpointing: Literal["none", "selective", "full", "memory_budget"] | None = None
    """What the backward pass recomputes instead of remembering: nothing, what is cheap and every other matrix product,
    every block, or what the compiler chooses to stay within `memory_budget`, which needs `compile`. None: the first of
    the first three with which all that is on a GPU fits there; nothing on CPU."""
    memory_budget: float = 0.5
    """Share of the activations' memory that may be used, in [0, 1]: 0 as with "full", 1 as with "none"."""
    compile: bool = False
    """Compile each block with torch.compile; rows are then padded to at most eight lengths up to
    `max_tokens_per_microbatch`, because each new one may be compiled again. Refused on CPU, where to compile
    one takes longer than its step."""
    cpu_offload: bool = False
    """Keep weights, gradients and optimiser state in the host's memory and bring each block to the GPU when it is its
    turn. Refused on CPU, where they are there already."""
    dump_folder: str = ""
    """Where TorchTitan writes debugging output; empty: a temporary folder."""
    collective_timeout_s: float = 300.0
    """Seconds after which ranks give up on each other."""

    def __post_init__(self) -> None:
        find_loss(self.loss)
        for name in ("lr", "weight_decay", "kl_coef", "entropy_coef"):
            value = getattr(self, name)
            _require(value is None or (math.isfinite(value) and value >= 0), self, name, "finite and >= 0")
        for name in ("num_iterations", "num_minibatches", "warmup_steps", "max_tokens_per_microbatch",
                     "loss_chunk_tokens", "dp_replicate", "tp", "ep"):  # fmt: skip
            least, value = {"warmup_steps": 0, "max_tokens_per_microbatch": 2}.get(name, 1), getattr(self, name)
            _require(value is None or value >= least, self, name, f"at least {least}")
        _require(self.max_sample_tokens is None or self.max_sample_tokens >= 2, self, "max_sample_tokens", "at least 2")
        _require(all(0 <= beta < 1 for beta in self.betas), self, "betas", "in [0, 1)")
        if self.optimizer_state_dtype == "bfloat16" and max(self.betas) > _LARGEST_ROUNDED_BETA:
            raise ValueError(
                f"betas={self.betas} with optimizer_state_dtype='bfloat16': a moment of eight bits that is to lose "
                f"less than 1/256 a step keeps its value; take betas of at most {_LARGEST_ROUNDED_BETA}, or float32"
            )
        _require(0 < self.lr_decay_ratio <= 1, self, "lr_decay_ratio", "above 0 and at most 1")
        _require(0 <= self.lr_min_ratio <= 1, self, "lr_min_ratio", "in [0, 1]")
        _require(self.max_grad_norm > 0, self, "max_grad_norm", "above 0; inf switches clipping off")
        _require(self.clip_low is None or 0 <= self.clip_low <= 1, self, "clip_low", "in [0, 1]; 0.2 is usual")
        _require(self.clip_high is None or self.clip_high >= 0, self, "clip_high", ">= 0; 0.2 is usual")
        _require(self.length_constant is None or self.length_constant >= 1, self, "length_constant", "at least 1")
        _require(self.correction_low is None or 0 <= self.correction_low <= 1, self, "correction_low", "in [0, 1]")
        _require(self.correction_high is None or self.correction_high >= 1, self, "correction_high", "at least 1")
        for name, words in _WORDS.items():
            absent = getattr(self, name) is None and name.startswith(("correction", "activation"))
            _require(not words or absent or getattr(self, name) in words, self, name, f"one of {words}")
        _require(0 <= self.memory_budget <= 1, self, "memory_budget", "in [0, 1]")
        if self.activation_checkpointing == "memory_budget" and not self.compile:
            raise ValueError("activation_checkpointing='memory_budget' is the compiler's choice; set compile=True")
        _require(0 < self.temperature < math.inf, self, "temperature", "above 0; greedy samples teach nothing")
        _require(self.dp_shard == -1 or self.dp_shard >= 1, self, "dp_shard", "at least 1, or -1 for all ranks left")
        _require(self.threads is None or self.threads >= 1, self, "threads", "at least 1, or None")
        _require(self.collective_timeout_s > 0, self, "collective_timeout_s", "above 0")

    @property
    def row_multiple(self) -> int:
        """Positions that rows are padded to a multiple of: few lengths for compiled blocks, even parts for `tp`."""
        most = self.max_tokens_per_microbatch or LEAST_MICROBATCH
        return math.lcm(self.tp, math.ceil(most / _LENGTHS) if self.compile else 1)

    def with_memory(
        self,
        *,
        max_tokens_per_microbatch: int = LEAST_MICROBATCH,
        loss_chunk_tokens: int = LEAST_CHUNK,
        activation_checkpointing: Literal["none", "selective", "full"] = "none",
    ) -> LearnerConfig:
        """The same with these where they are left to memory; the loss that is minimised is the same, too."""
        room = self.max_tokens_per_microbatch
        return replace(
            self,
            length_constant=self.length_constant or (LEAST_MICROBATCH if room is None else None),
            max_tokens_per_microbatch=room or max_tokens_per_microbatch,
            loss_chunk_tokens=self.loss_chunk_tokens or loss_chunk_tokens,
            activation_checkpointing=self.activation_checkpointing or activation_checkpointing,
        )

    @property
    def left_to_memory(self) -> list[str]:
        """Names of the fields that `with_memory` fills in."""
        names = ("max_tokens_per_microbatch", "loss_chunk_tokens", "activation_checkpointing")
        return [name for name in names if getattr(self, name) is None]

    def for_policy(self, policy: Policy) -> LearnerConfig:
        """These settings with those that `policy.learner` overrides.

        Raises:
            TypeError, ValueError: A field is unknown, has a wrong value, or cannot differ between policies.
        """
        names = [field.name for field in fields(self) if field.name not in ONE_FOR_ALL]
        for name in policy.learner or {}:
            if name in ONE_FOR_ALL:
                raise ValueError(
                    f"policy {policy.name!r}: learner.{name} is no setting of one policy; {ONE_FOR_ALL[name]}"
                )
            if name not in names:
                near = suggestion(str(name), names, kind=LearnerConfig)
                raise ValueError(f"policy {policy.name!r}: learner.{name} is no field of fa.LearnerConfig.{near}")
        try:
            return replace(self, **(policy.learner or {}))
        except (TypeError, ValueError) as cause:
            raise type(cause)(f"policy {policy.name!r}: {cause}") from cause

    def for_old_samples(self) -> LearnerConfig:
        """The same for samples of older versions of the weights: "truncate" where neither user nor loss say anything.

        Such samples' ratios to the sampler begin away from 1, and a clip range around the sampler takes tokens from the
        gradient before this step has moved any: 2.6 % of them at an age of one version, and a tenth of the reward
        (docs/decisions/training.md). With "truncate" the ratio is to the learner at the batch's start, so one
        optimizer step per batch clips nothing; the age is in a weight of at most `correction_high`.
        """
        chosen = self.correction or self._clipped or find_loss(self.loss).correction
        return self if chosen else replace(self, correction="truncate")

    @property
    def _clipped(self) -> bool:
        return self.clip_low is not None or self.clip_high is not None

    @property
    def loss_settings(self) -> LossSettings:
        """The loss with everything decided: its own values where nothing else is set."""
        loss = find_loss(self.loss)
        own = loss.correction or Correction()
        how = self.correction or ("ratio" if self._clipped else own.how)
        base = own if how == own.how else Correction()
        return LossSettings(
            loss=loss,
            clip_low=loss.clip[0] if self.clip_low is None else self.clip_low,
            clip_high=loss.clip[1] if self.clip_high is None else self.clip_high,
            correction=Correction(
                how=how,
                level=self.correction_level or base.level,
                low=base.low if self.correction_low is None else self.correction_low,
                high=base.high if self.correction_high is None else self.correction_high,
            ),
            sequence=self.sequence,
            length_constant=float(self.length_constant or self.max_tokens_per_microbatch or LEAST_MICROBATCH),
            kl=self.kl,
            kl_coef=self.kl_coef,
            entropy_coef=self.entropy_coef,
            temperature=self.temperature,
        )


ONE_FOR_ALL = {
    "model": "set the policy's model",
    "temperature": "set the policy's sampling.temperature",
    "lora": "set the policy's lora",
    "seed": "set the trainer's seed",
    "dump_folder": "the trainer chooses it",
    "threads": "learners share the host's cores, so set learner.threads of the trainer",
}
"""Fields that no policy overrides, with the setting to use instead."""
_WORDS = {
    name: tuple(word for part in (hint, *get_args(hint)) if get_origin(part) is Literal for word in get_args(part))
    for name, hint in get_type_hints(LearnerConfig).items()
}
"""What each field may say; empty where it is not one of some words."""


def _require(holds: bool, config: LearnerConfig, name: str, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name}={getattr(config, name)!r} of the learner must be {wanted}")
