"""Learning rates: the default for what is trained, the schedule over a run, and a check that a rate moves weights."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

from forge_agents.models import resolve as models
from forge_trainers.learner.plan import LearnerPlan

Method: TypeAlias = Literal["rl", "sft", "dpo"]
"""Training method. Each has default learning rates of its own."""

_SMALL, _LARGE = 135e6, 7e9
"""Parameters at and beyond which the default learning rate does not change any more."""
_RATES: dict[Method, tuple[float, float]] = {"rl": (2e-5, 1e-6), "sft": (5e-5, 1e-5), "dpo": (5e-6, 5e-7)}
"""Default learning rates for models of `_SMALL` and of `_LARGE` parameters, all weights trained. Large: DeepSeekMath-7B
and DAPO-32B use 1e-6 (arXiv 2402.03300, 2503.14476). SFT lies between Tulu 3's 5e-6 (arXiv 2411.15124) and Zephyr's
2e-5, and Zephyr's DPO uses 5e-7 (arXiv 2310.16944). Small: measured with SmolLM2-135M, see docs/learner.md."""
_ADAPTER = 10.0
"""The best rate of a LoRA adapter is about ten times that of all weights, in SFT and RL (Schulman et al. 2025, "LoRA
Without Regret", Thinking Machines Lab)."""
_SQRT_DECAY_RATIO = 0.2
"""Fraction of the run in which "sqrt" decays (Hägele et al., arXiv 2405.18392)."""
_MIN_MOVEMENT = 1 / 8
"""Movement of a weight over a run, as a fraction of the distance between two bfloat16 numbers, below which the model
hardly changes."""
_BFLOAT16_EPSILON = 2.0**-7
_ROWS, _MATRICES = 64, 8


def default_rate(method: Method, parameters: int, *, adapter: bool) -> float:
    """Default learning rate of AdamW, to two digits, for a model or an adapter on it.

    The rate falls with the number of parameters of the whole model as a power law between 135 million and 7 billion,
    and is constant outside this range.
    """
    small, large = _RATES[method]
    share = math.log(min(max(parameters, _SMALL), _LARGE) / _SMALL) / math.log(_LARGE / _SMALL)
    return float(f"{small * (large / small) ** share * (_ADAPTER if adapter else 1):.1e}")


def with_rate(config: LearnerPlan, method: Method | None = None) -> LearnerPlan:
    """`config` with a learning rate: its own, or the default for its model and training method.

    Raises:
        ModelNotFoundError: A weight file of the model is incomplete.
    """
    if config.lr is not None:
        return config
    method = method or ("sft" if config.loss == "sft" else "rl")
    parameters = models.weight_count(Path(config.model))
    return replace(config, lr=default_rate(method, parameters, adapter=config.lora is not None))


def described(config: LearnerPlan, parameters: int) -> str:
    """The part of a model that is trained, for messages: "all weights of 135M parameters"."""
    size = f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{max(parameters / 1e6, 0.1):.3g}M"
    return f"{'all weights' if config.lora is None else 'a LoRA adapter'} of a model with {size} parameters"


def weak_rate(config: LearnerPlan, steps: int, method: Method = "rl") -> str:
    """A warning if warm-up is longer than a run of `steps`, or the rate is too low to change the model. Else empty.

    AdamW moves a weight by about the learning rate per optimizer step. The warning compares the largest possible
    movement over the run with the distance between two bfloat16 numbers at the median weight. A rate of 0 (a control
    run) and rates of at least the default give no warning.
    """
    if config.lr and config.warmup_steps > steps:
        reached = learning_rate(config, steps - 1, steps)
        return (
            f"warmup_steps={config.warmup_steps} is more than the run's {steps} steps: the learning rate ends at "
            f"{reached:.2g} and never reaches lr={config.lr:g}. Lower warmup_steps, or train for more steps"
        )
    parameters = models.weight_count(Path(config.model))
    usual = default_rate(method, parameters, adapter=config.lora is not None)
    if not config.lr or config.lr >= usual:
        return ""
    per_step = config.num_iterations * config.num_minibatches
    moved = per_step * sum(learning_rate(config, step, steps) for step in range(steps))
    weight = _median_weight(Path(config.model))
    spacing = _BFLOAT16_EPSILON * 2.0 ** math.floor(math.log2(weight)) if weight else 0.0
    if moved / (1 if config.lora is None else _ADAPTER) >= _MIN_MOVEMENT * spacing:
        return ""
    return (
        f"lr={config.lr:g} is too low to train {described(config, parameters)} in {steps} steps: AdamW moves a weight "
        f"by at most {moved:.1g} in total, and the median weight of {weight:.2g} changes in bfloat16 by steps of "
        f"{spacing:.1g}. Leave lr unset for the default of {usual:g}, or train for more steps"
    )


def _median_weight(folder: Path) -> float:
    """Median absolute value of the model's weights, from the first rows of a few of its matrices, or 0 without any."""
    from safetensors import safe_open

    medians = []
    for file in models.weight_files(folder)[:_MATRICES]:
        with safe_open(file, framework="pt") as tensors:
            matrices = [name for name in sorted(tensors.keys()) if len(tensors.get_slice(name).get_shape()) > 1]
            chosen = matrices[:: max(1, len(matrices) // _MATRICES)]
            medians += [float(tensors.get_slice(name)[:_ROWS].float().abs().median()) for name in chosen]
    return statistics.median(medians) if medians else 0.0


def learning_rate(config: LearnerPlan, step: int, total: int | None) -> float:
    """Learning rate of a training step: warm-up, stable, decay (arXiv 2404.06395), counted as TorchTitan does.

    The rate depends on these arguments alone, so a resumed run that is made longer continues at the rate that the
    longer schedule has at that step. All optimizer steps on one batch have the same rate. `step` is the number of
    training steps taken before, `total` that of the run.

    Raises:
        ValueError: The rate decays, and `total` is None or not above `step`.
    """
    assert config.lr is not None, "call with_rate first"
    decays = config.lr_decay != "none"
    if decays and (total is None or step >= total):
        raise ValueError(
            f"lr_decay={config.lr_decay!r} needs the run's number of steps, {step} are taken and {total} planned. "
            "Call set_total_steps with more"
        )
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if not decays or total is None:
        return config.lr
    ratio = _SQRT_DECAY_RATIO if config.lr_decay == "sqrt" else 1
    decay = min(round(total * ratio), total - config.warmup_steps)
    progress = max(0, step - total + decay) / max(1, decay)  # 1 would be reached one step after the last
    left = {"linear": 1 - progress, "sqrt": 1 - math.sqrt(progress), "cosine": (1 + math.cos(math.pi * progress)) / 2}
    return config.lr * (config.lr_min_ratio + (1 - config.lr_min_ratio) * left[config.lr_decay])
