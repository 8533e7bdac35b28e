"""Parts of losses that depend on whole sequences, importance weights and KL estimates, as pure functions on tensors.

Axes: T tokens of a batch, S loss tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from forge_agents.types import EpisodeBatch
from forge_trainers.losses.registry import KL, LossSettings, Reduction, is_advantage_times

_NO_ADVANTAGE = 1e-12
"""Advantages up to this fraction of the largest count as 0, because of rounding: 0.2 minus the mean of 0.1, 0.2 and 0.3
is -3e-17 in float64."""

_LEAST_LOGPROB = -1000.0
"""Lower bound of the reference's log-probabilities, in place of minus infinity for a token that it excludes."""


def limited(log_ratio: torch.Tensor) -> torch.Tensor:
    """Log-ratios clamped to [-20, 20], so that their exponential stays finite (5e8)."""
    return log_ratio.clamp(-20.0, 20.0)


def sequence_numbers(batch: EpisodeBatch, unit: Literal["trajectory", "turn"]) -> torch.Tensor:
    """Number of each token's sequence, a trajectory or a turn: int64 [T], from 0 without gaps, -1 for masked tokens.

    A trajectory that is split into several samples, because its history was rewritten, is one sequence.
    """
    tokens, samples = batch["tokens"], batch["samples"]
    mask_T = tokens["loss_mask"]
    number_T = samples["trajectory"].repeat_interleave(samples["length"])
    keys = torch.stack([number_T, tokens["turn"] if unit == "turn" else torch.zeros_like(number_T)], dim=1)
    out_T = torch.full_like(number_T, -1)
    out_T[mask_T] = torch.unique(keys[mask_T], dim=0, return_inverse=True)[1]
    return out_T


def sequence_sums(values_T: torch.Tensor, sequence_T: torch.Tensor) -> torch.Tensor:
    """Sum over the sequence of each token: float32 [T], equal for all tokens of a sequence. 0 for masked tokens."""
    mask_T = sequence_T >= 0
    # float64, because GSPO's clip range of 3e-4 per token is small compared with sums of thousands of float32 numbers
    sums = torch.zeros(int(sequence_T.max()) + 1, dtype=torch.float64)
    sums.index_add_(0, sequence_T[mask_T], values_T[mask_T].double())
    out_T = torch.zeros(sequence_T.shape)
    out_T[mask_T] = sums[sequence_T[mask_T]].float()
    return out_T


def reduction_weights(sequence_T: torch.Tensor, reduction: Reduction, *, constant: float) -> torch.Tensor:
    """Weights of token losses such that their mean over all loss tokens is the given reduction.

    `constant` is the divisor of the reduction ``constant``, above 0. The weights are float32 [T], 0 for masked tokens.
    """
    ones_T = (sequence_T >= 0).float()
    if reduction == "token":  # 1/N sum_t over N loss tokens (DAPO, arXiv 2503.14476, eq. 8)
        return ones_T
    tokens_per_sequence = float(ones_T.sum()) / (int(sequence_T.max()) + 1)  # N/G turns 1/N into 1/G
    if reduction == "sequence_mean":  # 1/G sum_i 1/|o_i| sum_t (GRPO, arXiv 2402.03300, eq. 3)
        return ones_T * tokens_per_sequence / sequence_sums(ones_T, sequence_T).clamp(min=1.0)
    # 1/G sum_i 1/C sum_t (Dr. GRPO, arXiv 2503.20783), or C = 1: the log-probability of a whole answer (RLOO)
    return ones_T * tokens_per_sequence / (constant if reduction == "constant" else 1.0)


def needed_samples(settings: LossSettings, batch: EpisodeBatch) -> torch.Tensor:
    """Samples that must be computed for the loss and its gradient: bool [n].

    Trajectories whose advantages are all 0 have loss 0 and are left out, unless the loss has a KL term or an entropy
    bonus. A trajectory is left out as a whole, because sequence ratios need all of its tokens. If no trajectory has an
    advantage, all samples are computed, because a step needs at least one.
    """
    samples = batch["samples"]
    all_n = torch.ones_like(samples["length"], dtype=torch.bool)
    if settings.kl_coef or settings.entropy_coef or not is_advantage_times(settings.loss):
        return all_n
    number_n = torch.unique(samples["trajectory"], return_inverse=True)[1]
    number_T = number_n.repeat_interleave(samples["length"])
    needed = torch.zeros(len(number_n), dtype=torch.bool)  # by trajectory
    size_T = batch["tokens"]["advantages"].abs() * batch["tokens"]["loss_mask"]
    needed[number_T[size_T > _NO_ADVANTAGE * size_T.max()]] = True
    return needed[number_n] if needed.any() else all_n


def correction_weights(
    log_ratio: torch.Tensor, how: Literal["truncate", "mask"], *, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Importance weights of tokens from another policy, from ``log(learner / sampler)``, and 1 for changed tokens.

    ``truncate``: ``min(w, high)`` (truncated importance sampling, TIS: Yao et al. 2025, "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training"); ``mask``: w where ``low <= w <= high``, else 0 (IcePop, arXiv
    2510.18855).
    """
    weight = limited(log_ratio).exp()
    if how == "truncate":
        return weight.clamp(max=high), (weight > high).float()
    outside = (weight < low) | (weight > high)
    return weight.masked_fill(outside, 0.0), outside.float()


def kl_estimate(logprobs_S: torch.Tensor, reference_S: torch.Tensor, kind: KL) -> torch.Tensor:
    """Estimate of KL(learner || reference) from tokens of the learner, with ``d = reference - logprob``.

    ``k1 = -d``, ``k2 = d**2 / 2``, ``k3 = exp(d) - 1 - d`` (Schulman 2020; k3 is arXiv 2402.03300, eq. 4). k1 and k3
    are unbiased, and k2 has the correct gradient. The gradient of k3 is that of the reverse divergence, and the
    gradient of k1 is 0 on average (arXiv 2506.09477), so this function's k1 has the value of k1 and the gradient of k2.
    k3 takes d as at most 20, so that its exponential stays finite.
    """
    d_S = reference_S.clamp(min=_LEAST_LOGPROB) - logprobs_S
    if kind == "k3":
        d_S = d_S.clamp(max=20.0)
        return d_S.exp() - d_S - 1.0
    k2_S = d_S.square() / 2
    return k2_S if kind == "k2" else k2_S - k2_S.detach() - d_S.detach()


def loss_columns(
    settings: LossSettings, batch: EpisodeBatch, logprobs: Callable[[], torch.Tensor], old_T: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Per-token columns that depend on whole sequences, so that the loss can be computed in chunks.

    Args:
        settings: Settings of the loss.
        batch: The tokens of one optimizer step.
        logprobs: Computes the learner's current log-probabilities, float32 [T]. Called only if they are needed.
        old_T: Log-probabilities at the start of the batch, float32 [T]. None: equal to the current ones, or the loss's
            ratio is taken to the sampler.

    Returns:
        float32 [T] each: ``weights`` for reductions other than ``token``, ``old_logprobs`` (`old_T`),
        ``sequence_log_ratio`` if the loss needs it and it is not 0, and ``correction_log_ratio`` if the correction is
        by sequence.
    """
    loss, rule = settings.loss, settings.correction
    by_sequence = rule.how in ("truncate", "mask") and rule.level != "token"
    ratio_by_sequence = loss.sequence_ratio and (rule.how == "ratio" or old_T is not None)
    columns: dict[str, torch.Tensor] = {} if old_T is None else {"old_logprobs": old_T}
    if loss.reduction == "token" and not by_sequence and not ratio_by_sequence:
        return columns
    sequence_T = sequence_numbers(batch, settings.sequence)
    if loss.reduction != "token":
        columns["weights"] = reduction_weights(sequence_T, loss.reduction, constant=settings.length_constant)
    sampler_T = batch["tokens"]["logprobs"]
    if ratio_by_sequence:  # log s_i = 1/|o_i| sum_t log r (GSPO, arXiv 2507.18071, eq. 7)
        total_T = sequence_sums(logprobs() - (sampler_T if old_T is None else old_T), sequence_T)
        columns["sequence_log_ratio"] = limited(_per_token(total_T, sequence_T))
    if by_sequence:
        total_T = sequence_sums((logprobs() if old_T is None else old_T) - sampler_T, sequence_T)
        columns["correction_log_ratio"] = _per_token(total_T, sequence_T) if rule.level == "geometric" else total_T
    return columns


def _per_token(total_T: torch.Tensor, sequence_T: torch.Tensor) -> torch.Tensor:
    """Sums over sequences divided by the number of their loss tokens."""
    return total_T / sequence_sums(torch.ones_like(total_T), sequence_T).clamp(min=1.0)
