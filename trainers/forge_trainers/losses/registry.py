"""Policy losses by name: GRPO, Dr. GRPO, DAPO, GSPO, CISPO, RLOO, REINFORCE++, SFT, and losses that users register.

Settings are checked against this module, so importing it does not import torch. The losses only use methods of their
tensors.

Axes: S loss tokens. r is the ratio of a token's probability under the learner to that under the old policy, A the
token's advantage, o a sequence of |o| loss tokens.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args

from forge_agents.errors import did_you_mean
from forge_agents.imports import import_advice, import_user_module
from forge_agents.settings import check_call, settings_class

if TYPE_CHECKING:
    import torch

Reduction: TypeAlias = Literal["token", "sequence_mean", "sequence_sum", "constant"]
"""Reduction of token losses. ``token``: mean over all loss tokens of the batch. ``sequence_mean``: mean over each
sequence, then over sequences. ``sequence_sum``: sum over each sequence, then mean over sequences. ``constant``: as
``sequence_sum``, divided by 2,048 tokens."""

LossNormalization: TypeAlias = Literal["sampled", "used"]
"""Trajectories over which the mean is taken. ``sampled``: all, so steps with many zero-variance groups are small.
``used``: trajectories of groups with non-zero variance."""


CorrectionName: TypeAlias = Literal["ratio", "truncate", "mask", "none"]
CORRECTIONS: tuple[CorrectionName, ...] = get_args(CorrectionName)


@settings_class
@dataclass(frozen=True, kw_only=True)
class Correction:
    """Importance weighting of samples of an older or numerically different policy.

    `LearnerConfig.correction` explains the four kinds.
    """

    how: CorrectionName = "ratio"
    """Kind of correction."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Level at which "truncate" and "mask" compare probabilities: a token, a sequence, or the geometric mean over the
    tokens of a sequence. The last two need one more forward pass."""
    low: float = 0.5
    """Lower bound of the weight for "mask", in [0, 1]. The default is IcePop's (arXiv 2510.18855)."""
    high: float = 5.0
    """Upper bound of the weight for "truncate" and "mask", at least 1. The default is IcePop's. 2 is usual for
    "truncate"."""

    def __post_init__(self) -> None:
        if not 0 <= self.low <= 1:
            raise ValueError(f"low={self.low} of the correction must be in [0, 1]")
        if not self.high >= 1:
            raise ValueError(f"high={self.high} of the correction must be at least 1")


_RATIO = Correction()

KL: TypeAlias = Literal["k1", "k2", "k3", "exact"]
DISTILL = "distill"
"""Name of the loss that consists of the divergence from a teacher."""


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """A loss with all settings resolved: the values of `LearnerConfig`, else the loss's published values."""

    loss: Loss
    clip_low: float
    clip_high: float
    correction: Correction
    sequence: Literal["trajectory", "turn"]
    """Unit of a sequence."""
    kl: KL
    kl_coef: float
    entropy_coef: float
    temperature: float = 1.0
    length_constant: float = 2048.0
    """Number of tokens by which the reduction ``constant`` divides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputs:
    """Inputs of a policy loss for S loss tokens. Tensors are float32 [S]."""

    logprobs_S: torch.Tensor
    """Log-probabilities under the learner, with gradient."""
    log_ratio_S: torch.Tensor
    """log r, with gradient, in [-20, 20]. `LearnerConfig.correction` determines the old policy."""
    sequence_log_ratio_S: torch.Tensor
    """Mean of log r over the token's sequence, without gradient. Any use raises ValueError unless the loss is
    registered with ``sequence_ratio=True``."""
    advantages_S: torch.Tensor
    """Advantages."""
    clip_low: float
    """Lower clip range, in [0, 1]: the ratio is at least 1 - clip_low."""
    clip_high: float
    """Upper clip range: the ratio is at most 1 + clip_high. May be infinite."""


class TokenLoss(NamedTuple):
    """Result of a policy loss, float32 [S] each."""

    loss_S: torch.Tensor
    """Loss of each token, with gradient, before the reduction."""
    clipped_S: torch.Tensor
    """1 for clipped tokens, else 0."""


LossFunction: TypeAlias = Callable[[TokenInputs], TokenLoss]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A registered policy loss."""

    name: str
    function: LossFunction
    reduction: Reduction = "token"
    """Reduction of its token losses."""
    clip: tuple[float, float] = (0.2, 0.2)
    """Default of `LearnerConfig.clip`, as (low, high)."""
    sequence_ratio: bool = False
    """Whether the loss needs `TokenInputs.sequence_log_ratio_S`, at the cost of another forward pass."""
    credit: Any = field(default_factory=dict)
    """Default of `GRPOConfig.credit`: a `forge_agents.Credit`, or a mapping of its settings."""
    correction: Correction | None = _RATIO
    """Default of `LearnerConfig.correction`. None: the loss's ratio to the sampler, and "truncate" for samples of older
    versions of the weights, because a clip range around the sampler would remove them from the gradient."""
    loss_normalization: LossNormalization = "used"
    """Default of `GRPOConfig.loss_normalization`."""
    max_resamples: int = 0
    """Default of `GRPOConfig.max_resamples`."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"loss name {self.name!r} must be a word of letters, digits and underscores")
        if self.reduction not in get_args(Reduction):
            raise ValueError(f"reduction={self.reduction!r} of loss {self.name!r} must be one of {get_args(Reduction)}")
        if self.loss_normalization not in get_args(LossNormalization) or self.max_resamples < 0:
            raise ValueError(
                f"loss {self.name!r}: loss_normalization={self.loss_normalization!r} must be one of "
                f"{get_args(LossNormalization)}, and max_resamples={self.max_resamples} at least 0"
            )
        clip: Any = self.clip
        if not (isinstance(clip, tuple | list) and len(clip) == 2):
            raise TypeError(f"clip={self.clip!r} of loss {self.name!r} must be two numbers: (clip_low, clip_high)")
        if not (0 <= self.clip[0] <= 1 and self.clip[1] >= 0):
            raise ValueError(f"clip={self.clip} of loss {self.name!r} must lie in [0, 1] and [0, inf]")
        if isinstance(self.credit, type) or not (isinstance(self.credit, Mapping) or hasattr(self.credit, "assign")):
            raise TypeError(
                f"credit={self.credit!r:.80} of loss {self.name!r} must be a forge_agents.Credit(...), or a mapping of "
                "its settings"
            )
        correction: Any = self.correction
        if not (correction is None or isinstance(correction, Correction)):
            raise TypeError(
                f"correction={correction!r:.80} of loss {self.name!r} must be a Correction(how=...), or None"
            )


_PACKAGE = __name__.partition(".")[0]

_losses: dict[str, Loss] = {}
_resolved: dict[str, LossFunction] = {}
"""Results of `find_loss` by the full name, so that a module is imported only once."""


def register_loss(
    name: str,
    *,
    reduction: Reduction = "token",
    clip: tuple[float, float] = (0.2, 0.2),
    sequence_ratio: bool = False,
    credit: Any = None,
    correction: Correction | None = _RATIO,
    loss_normalization: LossNormalization = "used",
    max_resamples: int = 0,
) -> Callable[[LossFunction], LossFunction]:
    """Decorator that registers a policy loss under a name for `LearnerConfig.loss`.

    The function must be pure. The learner calls it on chunks of sequences, in any order, in other processes.

    Names are unique. Registering a function with the same module and name again is allowed. The arguments are the
    fields of `Loss`, with the values that the loss was published with.

    Raises:
        ValueError: Another function has the name, or an argument is out of range.
        TypeError: The name is not a string, the function has no name (such as `functools.partial`), or an argument has
            another type.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a loss must be a string, not {name!r:.60}. Write @register_loss('name')")

    def register(function: LossFunction) -> LossFunction:
        check_call(function, f"loss {name!r}", "inputs")
        loss = Loss(
            name=name,
            function=function,
            reduction=reduction,
            clip=clip,
            sequence_ratio=sequence_ratio,
            credit=credit or {},
            correction=correction,
            loss_normalization=loss_normalization,
            max_resamples=max_resamples,
        )
        add_loss(loss)
        return function

    return register


def add_loss(loss: Loss, *, requested_name: str = "") -> None:
    """Register `loss` in this process, and under the full name that `find_loss` was asked for."""
    if not hasattr(loss.function, "__qualname__"):
        raise TypeError(
            f"loss {loss.name!r} is {loss.function!r:.80}, which has no name by which a learner's process can "
            "identify it. Register a function that is defined with def"
        )
    if (registered := _losses.get(loss.name)) is not None:
        old, new = registered.function, loss.function
        # a script's file can be two modules: __main__ and the imported module
        elsewhere = old.__module__ != new.__module__ and _file_of(old) != _file_of(new)
        if old.__qualname__ != new.__qualname__ or elsewhere:
            raise ValueError(f"loss {loss.name!r} is already {old.__module__}.{old.__qualname__}. Choose another name")
    _losses[loss.name] = loss
    if requested_name:
        _resolved[requested_name] = loss.function


def _file_of(function: LossFunction) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code.co_filename if code else function.__module__


def find_loss(name: str) -> Loss:
    """The loss with this name. ``package.module:name`` imports the module first.

    Raises:
        ValueError: The loss does not exist, or another module, unrelated to the given one, has registered it.
    """
    module, _, word = name.rpartition(":")
    if word in _losses and _resolved.get(name) is _losses[word].function:
        return _losses[word]
    home = _losses[word].function.__module__ if word in _losses else ""
    conflict = f"loss {name!r}: {word!r} belongs to {home}. Rename your loss, or write {home}:{word}"
    if module and word in _OURS and not module.startswith(f"{_PACKAGE}."):
        raise ValueError(conflict)
    if home == "__main__" and Path(_file_of(_losses[word].function)).stem == module.rpartition(".")[2]:
        home = module  # the loss of a script is registered already; importing the script would run it again
    if module and home != module:
        try:
            import_user_module(module)
        except ImportError as cause:
            advice = import_advice(module, cause, "Write 'package.module:name'")
            raise ValueError(f"loss {name!r} cannot be imported ({cause}). {advice}") from cause
        built_in = home.startswith(f"{_PACKAGE}.")  # one of our functions, which users may register under another name
        if home and not built_in and not _provides(module, _losses[word]):
            raise ValueError(conflict)
    if word not in _losses:
        raise ValueError(
            f"unknown loss {name!r}. Registered losses: {', '.join(list_losses())}."
            f"{did_you_mean(word, list_losses())} Register your own with forge_agents.register_loss. A run's file also "
            f"names its module, as in 'my_module:{word}'"
        )
    _resolved[name] = _losses[word].function
    return _losses[word]


def _provides(module: str, loss: Loss) -> bool:
    """Whether an imported module imports from the loss's module, or is one of its parent packages.

    A module that defines an unregistered function with the loss's name does not provide the loss.
    """
    members, home = vars(sys.modules[module]), loss.function.__module__
    if getattr(members.get(loss.name), "__module__", None) == module:
        return False
    origins = ("__name__" if inspect.ismodule(value) else "__module__" for value in members.values())
    names = (getattr(value, origin, None) for value, origin in zip(members.values(), origins, strict=True))
    return any(f"{home}.".startswith(f"{name}.") for name in (module, *names))


def list_losses() -> list[str]:
    """Names of the registered losses, sorted."""
    return sorted(_losses)


def clipped_surrogate(ratio_S: torch.Tensor, inputs: TokenInputs) -> TokenLoss:
    """PPO's clipped surrogate ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` (arXiv 1707.06347, eq. 7)."""
    plain_S = ratio_S * inputs.advantages_S
    limited_S = ratio_S.clamp(1.0 - inputs.clip_low, 1.0 + inputs.clip_high) * inputs.advantages_S
    return TokenLoss(-plain_S.minimum(limited_S), (limited_S < plain_S).float())


@register_loss("grpo", reduction="sequence_mean", clip=(0.2, 0.2), correction=None, loss_normalization="sampled")
def grpo(inputs: TokenInputs) -> TokenLoss:
    """``1/G sum_i 1/|o_i| sum_t -min(r A, clip(r) A)`` (GRPO, arXiv 2402.03300, eq. 3)."""
    return clipped_surrogate(inputs.log_ratio_S.exp(), inputs)


@register_loss(
    "dr_grpo",
    reduction="constant",
    clip=(0.2, 0.2),
    correction=None,
    credit={"scale": "none"},
    loss_normalization="sampled",
)
def dr_grpo(inputs: TokenInputs) -> TokenLoss:
    """``1/G sum_i 1/C sum_t -min(r A, clip(r) A)`` with a constant C and ``A = R - mean(R)`` (arXiv 2503.20783)."""
    return clipped_surrogate(inputs.log_ratio_S.exp(), inputs)


@register_loss("dapo", reduction="token", clip=(0.2, 0.28), correction=None, max_resamples=3)
def dapo(inputs: TokenInputs) -> TokenLoss:
    """``1/sum_i |o_i| sum_i sum_t -min(r A, clip(r, 1 - low, 1 + high) A)`` (DAPO, arXiv 2503.14476, eq. 8).

    Difference to the paper: zero-variance groups are replaced at most three times per step, not until none is left (eq.
    11).
    """
    return clipped_surrogate(inputs.log_ratio_S.exp(), inputs)


@register_loss(
    "gspo",
    reduction="sequence_mean",
    clip=(3e-4, 4e-4),
    sequence_ratio=True,
    correction=Correction(how="truncate", level="geometric", high=2.0),
    loss_normalization="sampled",
)
def gspo(inputs: TokenInputs) -> TokenLoss:
    """``1/G sum_i -min(s_i A, clip(s_i) A)``, ``s_i = exp(1/|o_i| sum_t log r)`` (GSPO, arXiv 2507.18071, eq. 5 and 7).

    The token form (GSPO-token, eq. 13 and 14) ``s_{i,t} = sg[s_i] r / sg[r]`` has the same value and, if all tokens of
    a sequence have the same advantage, the same gradient.

    Difference to the paper: the clip range is meant for several optimizer steps per batch, and rounding in bfloat16
    changes s by more than the range. With one step per batch, s is therefore taken to the learner, where it is 1, and
    the loss is multiplied by ``min(s, 2)`` of learner and sampler. Inside the range the gradient is that of the
    published loss.
    """
    log_ratio_S = inputs.log_ratio_S
    return clipped_surrogate((inputs.sequence_log_ratio_S + log_ratio_S - log_ratio_S.detach()).exp(), inputs)


@register_loss("cispo", reduction="token", clip=(1.0, 4.0))
def cispo(inputs: TokenInputs) -> TokenLoss:
    """``-sg[clip(r, 1 - low, 1 + high)] A log p``: all tokens keep their gradient (CISPO, arXiv 2506.13585, eq. 4, 5).

    The upper bound of 5 is that of ScaleRL (arXiv 2510.13786). The paper tunes the bound and sets no lower bound.
    """
    ratio_S = inputs.log_ratio_S.detach().exp()
    weight_S = ratio_S.clamp(1.0 - inputs.clip_low, 1.0 + inputs.clip_high)
    return TokenLoss(-weight_S * inputs.advantages_S * inputs.logprobs_S, (weight_S != ratio_S).float())


@register_loss(
    "rloo",
    reduction="sequence_sum",
    clip=(1.0, float("inf")),
    credit={"baseline": "leave_one_out", "scale": "none"},
    loss_normalization="sampled",
)
def rloo(inputs: TokenInputs) -> TokenLoss:
    """``1/G sum_i -(R_i - mean of the others' R) log p(o_i)``: REINFORCE (RLOO, arXiv 2402.14740).

    Difference to the paper: off-policy tokens are weighted by ``sg[r]``, optionally bounded by `clip`. The paper is
    on-policy, with r = 1.
    """
    return cispo(inputs)


@register_loss(
    "reinforce_pp",
    reduction="token",
    clip=(0.2, 0.2),
    correction=None,
    credit={"by": ("role",), "baseline": "mean", "scale": "std"},
)
def reinforce_pp(inputs: TokenInputs) -> TokenLoss:
    """``-min(r A, clip(r) A)`` with A normalized over the whole batch (REINFORCE++, arXiv 2501.03262).

    Difference to the paper: the KL divergence is a term of the loss (`LearnerConfig.kl`), while the paper subtracts the
    sum of later k1 terms from the reward. ``k2`` has the gradient of k1 in the reward of the same token.
    """
    return clipped_surrogate(inputs.log_ratio_S.exp(), inputs)


@register_loss(DISTILL, reduction="token", credit={"baseline": "none", "scale": "none"})
def distill(inputs: TokenInputs) -> TokenLoss:
    """0, so that only the divergence from the reference is left (on-policy distillation, arXiv 2306.13649, eq. 7).

    Rewards are measured and have no effect. All trajectories with a reward count, unless the run has a `credit`, for
    another policy, that leaves zero-variance groups out.
    """
    zeros_S = inputs.logprobs_S.new_zeros(inputs.logprobs_S.shape)
    return TokenLoss(zeros_S, zeros_S)


@register_loss("sft", reduction="token")
def sft(inputs: TokenInputs) -> TokenLoss:
    """``1/T sum_t -w_t log p_t`` over the T loss tokens of a batch: cross-entropy weighted by the advantages.

    Offline trainers use this loss. The data has no sampler, so there is no ratio.
    """
    loss_S = -inputs.advantages_S * inputs.logprobs_S
    return TokenLoss(loss_S, loss_S.new_zeros(loss_S.shape))


_OURS = frozenset(_losses)
"""Reserved names: the losses of this module."""


def is_advantage_times(loss: Loss) -> bool:
    """Whether tokens with advantage 0 have loss 0 and no gradient: True for the losses of this module, else unknown."""
    return loss.name in _OURS
