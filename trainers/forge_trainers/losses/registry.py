"""Policy losses by name: GRPO, Dr. GRPO, DAPO, GSPO, CISPO, RLOO, REINFORCE++, imitation, and what users register.

In: log-ratios and advantages of loss tokens. Out: a loss per token. Waits for nothing. Importing it does not import
torch, because settings are checked against it: the functions use the methods of the tensors they get.

Axes: S loss tokens. r is the ratio of a token's probability to that under the policy it is compared with, A its
advantage, o a sequence of |o| loss tokens.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, get_args, get_type_hints

from forge_agents.errors import did_you_mean
from forge_agents.imports import import_user_module

if TYPE_CHECKING:
    import torch

Reduction: TypeAlias = Literal["token", "sequence_mean", "sequence_sum", "constant"]
"""How token losses become one number. ``token``: mean over all loss tokens of the batch. ``sequence_mean``: mean over
each sequence, then over sequences. ``sequence_sum``: sum over each sequence, mean over sequences. ``constant``: the
same, divided by `LearnerConfig.length_constant`."""

LossNormalization: TypeAlias = Literal["sampled", "used"]
"""Which trajectories count in that mean. ``sampled``: also those that teach nothing because siblings earn the same, so
that a step that teaches little is a small one. ``used``: those that teach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """What is done about samples of an older or numerically different policy; `LearnerConfig` explains the fields."""

    how: Literal["ratio", "truncate", "mask", "none"] = "ratio"
    level: Literal["token", "sequence", "geometric"] = "token"
    low: float = 0.5
    high: float = 5.0


_RATIO = Correction()

KL: TypeAlias = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """A loss with everything decided: what `LearnerConfig` sets, else what it was published with."""

    loss: Loss
    clip_low: float
    clip_high: float
    correction: Correction
    sequence: Literal["trajectory", "turn"]
    """What is one sequence."""
    length_constant: float
    """Tokens by which the reduction ``constant`` divides."""
    kl: KL
    kl_coef: float
    entropy_coef: float
    temperature: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenInputs:
    """What a policy loss sees of S loss tokens. Tensors are float32 [S]."""

    logprobs_S: torch.Tensor
    """The learner's, with gradient."""
    log_ratio_S: torch.Tensor
    """log r, with gradient, in [-20, 20]. `LearnerConfig.correction` says with what `logprobs_S` are compared."""
    sequence_log_ratio_S: torch.Tensor
    """Mean of log r over the token's sequence, without gradient. Any use of it raises ValueError
    unless the loss is registered with ``sequence_ratio=True``."""
    advantages_S: torch.Tensor
    clip_low: float
    """The ratio's lower bound is 1 minus this, in [0, 1]."""
    clip_high: float
    """The ratio's upper bound is 1 plus this; may be infinite."""


class TokenLoss(NamedTuple):
    """What a policy loss returns, float32 [S] each."""

    loss_S: torch.Tensor
    """Loss of each token, with gradient, before any reduction."""
    clipped_S: torch.Tensor
    """1 where the clip acts, else 0."""


LossFunction: TypeAlias = Callable[[TokenInputs], TokenLoss]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A registered policy loss."""

    name: str
    function: LossFunction
    reduction: Reduction = "token"
    """How its token losses become one number."""
    clip: tuple[float, float] = (0.2, 0.2)
    """`clip_low` and `clip_high` where `LearnerConfig` sets none."""
    sequence_ratio: bool = False
    """Whether it needs `TokenInputs.sequence_log_ratio_S`, which costs one more forward pass."""
    credit: Any = field(default_factory=dict)
    """How rewards become its advantages where `GRPOConfig` sets no credit: a `forge_agents.Credit`, or a mapping of its
    settings. A loss only carries it."""
    correction: Correction | None = _RATIO
    """What is done about samples of another policy where `LearnerConfig` says nothing. None: the loss's own ratio to
    the sampler, and "truncate" where samples are of older versions of the weights, which a clip range around the
    sampler would take from the gradient."""
    loss_normalization: LossNormalization = "used"
    """Which trajectories count in its mean where `GRPOConfig` says nothing."""
    max_resamples: int = 0
    """Times a step replaces groups that teach nothing where `GRPOConfig` says nothing."""

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise ValueError(f"loss name {self.name!r} must be a word of letters, digits and underscores")
        if self.reduction not in get_args(Reduction):
            raise ValueError(f"reduction={self.reduction!r} of loss {self.name!r} must be one of {get_args(Reduction)}")
        if self.loss_normalization not in get_args(LossNormalization) or self.max_resamples < 0:
            raise ValueError(
                f"loss_normalization={self.loss_normalization!r}, max_resamples={self.max_resamples} of loss "
                f"{self.name!r}: one of "
                f"{get_args(LossNormalization)}, and at least 0"
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
        hows, levels = (get_args(get_type_hints(Correction)[field]) for field in ("how", "level"))
        if correction is not None and (correction.how not in hows or correction.level not in levels):
            raise ValueError(f"{correction} of loss {self.name!r}: how is one of {hows}, level of {levels}")


_PACKAGE = __name__.partition(".")[0]

_losses: dict[str, Loss] = {}
_given: dict[str, LossFunction] = {}
"""What `find_loss` gave, by the whole name: who imported a module's losses once need not show it again."""


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
    """Give a policy loss a name that `LearnerConfig` knows.

    The function must be pure: it is called on chunks of a sequence, in any order, in the learner's processes.

    A name may be taken once; registering a function of the same module and name again is no error. `Loss` explains the
    arguments: what the loss was published with, and holds where nothing else is set.

    Raises:
        ValueError: The name is taken by another function, or an argument is out of range.
        TypeError: No name, or no function with a name: `functools.partial` has none; or an argument of another kind.
    """
    if not isinstance(name, str):
        raise TypeError(f"a loss is registered by name, not as {name!r:.60}; write @register_loss('name')")

    def register(function: LossFunction) -> LossFunction:
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


def add_loss(loss: Loss, *, asked: str = "") -> None:
    """Register `loss`; what `register_loss` does, and how a learner's process gets to know it.

    Args:
        asked: The name by which `find_loss` gave it elsewhere, so that it does here.
    """
    if not hasattr(loss.function, "__qualname__"):
        raise TypeError(
            f"loss {loss.name!r} is {loss.function!r:.80}, which has no name by which a learner's process could tell "
            "it from others; register a function that is written with def"
        )
    if (known := _losses.get(loss.name)) is not None:
        old, new = known.function, loss.function
        # one file may be two modules, as what Python runs and as what is imported
        elsewhere = old.__module__ != new.__module__ and _file_of(old) != _file_of(new)
        if old.__qualname__ != new.__qualname__ or elsewhere:
            raise ValueError(f"loss {loss.name!r} is {old.__module__}.{old.__qualname__} already; choose another name")
    _losses[loss.name] = loss
    if asked:
        _given[asked] = loss.function


def _file_of(function: LossFunction) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code.co_filename if code else function.__module__


def find_loss(name: str) -> Loss:
    """The loss called `name`; ``package.module:name`` imports the module first.

    Raises:
        ValueError: There is none, or it is another module's, of which the named one holds nothing.
    """
    module, _, word = name.rpartition(":")
    if word in _losses and _given.get(name) is _losses[word].function:
        return _losses[word]
    home = _losses[word].function.__module__ if word in _losses else ""
    taken = f"loss {name!r}: {word!r} is one of {home}; give yours another name, or write {home}:{word}"
    if module and word in _OURS and not module.startswith(f"{_PACKAGE}."):
        raise ValueError(taken)
    if home == "__main__" and Path(_file_of(_losses[word].function)).stem == module.rpartition(".")[2]:
        home = module  # a script's own is there already; importing it would run it again
    if module and home != module:
        try:
            import_user_module(module)
        except ImportError as cause:
            raise ValueError(f"loss {name!r} cannot be imported ({cause}); write 'package.module:name'") from cause
        ours = home.startswith(f"{_PACKAGE}.")  # a function of ours under another name, which anybody may register
        if home and not ours and not _hands_on(module, _losses[word]):
            raise ValueError(taken)
    if word not in _losses:
        raise ValueError(
            f"loss {name!r} is unknown; known are {', '.join(list_losses())}.{did_you_mean(word, list_losses())} "
            "Register your own with forge_agents.register_loss"
        )
    _given[name] = _losses[word].function
    return _losses[word]


def _hands_on(module: str, loss: Loss) -> bool:
    """Whether a module, once imported, holds something of the module that `loss` is of, or is a package around it.

    One that has a function of the loss's name, which nobody registered, means that.
    """
    held, home = vars(sys.modules[module]), loss.function.__module__
    if getattr(held.get(loss.name), "__module__", None) == module:
        return False
    names = (getattr(value, "__name__" if inspect.ismodule(value) else "__module__", None) for value in held.values())
    return any(f"{home}.".startswith(f"{name}.") for name in (module, *names))


def list_losses() -> list[str]:
    """Names of the registered losses, sorted."""
    return sorted(_losses)


def clipped_surrogate(ratio_S: torch.Tensor, inputs: TokenInputs) -> TokenLoss:
    """PPO's token loss ``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` (arXiv 1707.06347, eq. 7)."""
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

    Departure: groups that teach nothing are replaced at most three times a step (eq. 11 goes on until none is left).
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

    Written token by token (GSPO-token, eq. 13 and 14), ``s_{i,t} = sg[s_i] r / sg[r]``, which has the same value and,
    where a sequence's tokens share an advantage, the same gradient.

    Departure: the range is meant for several steps on one batch, and rounding in bfloat16 moves s by more. With one
    step a batch s is therefore taken to the learner, where it is 1, and the loss is multiplied with ``min(s, 2)`` of
    learner and sampler, which has the gradient of the published loss inside its range.
    """
    log_ratio_S = inputs.log_ratio_S
    return clipped_surrogate((inputs.sequence_log_ratio_S + log_ratio_S - log_ratio_S.detach()).exp(), inputs)


@register_loss("cispo", reduction="token", clip=(1.0, 4.0))
def cispo(inputs: TokenInputs) -> TokenLoss:
    """``-sg[clip(r, 1 - low, 1 + high)] A log p``: no token loses its gradient (CISPO, arXiv 2506.13585, eq. 4 and 5).

    The upper bound of 5 is ScaleRL's (arXiv 2510.13786); the paper tunes it and, as here, sets none below.
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

    Departure: tokens of another policy are weighted with ``sg[r]``, and `clip_low`, `clip_high` may bound it; the paper
    is on-policy, where r is 1.
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
    """``-min(r A, clip(r) A)`` with A normalised over the whole batch (REINFORCE++, arXiv 2501.03262).

    Departure: the paper subtracts the sum of later k1 terms from the reward; here the divergence is a term of the loss
    (`LearnerConfig.kl`, of which ``k2`` has the gradient of k1 in the reward of its own token).
    """
    return clipped_surrogate(inputs.log_ratio_S.exp(), inputs)


@register_loss("sft", reduction="token")
def sft(inputs: TokenInputs) -> TokenLoss:
    """``1/T sum_t -w_t log p_t`` over the T loss tokens of a batch: cross-entropy, weighted with the advantages.

    What is learned was given, so nothing is compared with a sampler; offline trainers set it.
    """
    loss_S = -inputs.advantages_S * inputs.logprobs_S
    return TokenLoss(loss_S, loss_S.new_zeros(loss_S.shape))


_OURS = frozenset(_losses)
"""Names that no other module's loss has."""


def is_advantage_times(loss: Loss) -> bool:
    """Whether a token of advantage 0 has loss 0 and no gradient. All of ours are; of others nobody knows."""
    return loss.name in _OURS
