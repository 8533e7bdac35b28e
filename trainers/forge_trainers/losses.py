"""The GRPO token loss: pure functions on tensors, and the thin TorchTitan loss around them.

In: logits of the positions that predict loss tokens, the sampler's logprobs, advantages. Out: a loss and metrics.
Waits for nothing.

Axes: S loss tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from forge_trainers import _titan as titan

_MAX_LOG_RATIO = 20.0
"""exp(20) = 5e8: a ratio beyond it is clipped or a sign of wrong weights, and must not become infinite."""
_ROWS_AT_ONCE = 16
"""Rows of logits held in float32 at a time on CPU, so that they stay in its cache."""


class TokenLoss(NamedTuple):
    """`grpo_token_loss`'s results, float32 [S] each."""

    loss_S: torch.Tensor
    """Loss of each token, before division by the number of tokens."""
    ratio_S: torch.Tensor
    """Learner's over sampler's probability."""
    clipped_S: torch.Tensor
    """1 where the clip stops the gradient, else 0."""
    kl_S: torch.Tensor
    """k3 estimate of the divergence from the reference; 0 without one."""


def grpo_token_loss(
    logprobs_S: torch.Tensor,
    sampler_logprobs_S: torch.Tensor,
    advantages_S: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    kl_coef: float = 0.0,
    reference_logprobs_S: torch.Tensor | None = None,
) -> TokenLoss:
    """Clipped policy-gradient loss of each token.

    GRPO (arXiv 2402.03300, eq. 3) with DAPO's separate upper clip (arXiv 2503.14476, eq. 10):
    ``-min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A) + kl_coef * k3`` with ``r = exp(logprob - sampler's)``, and
    ``k3 = exp(d) - d - 1``, ``d = reference - logprob`` (arXiv 2402.03300, eq. 4). Departures: the caller divides by
    the number of loss tokens of the whole batch (DAPO) and not by sequence, and ``logprob - sampler's`` is limited
    to +-20.

    Args:
        logprobs_S: The learner's, float32, with gradient.
        sampler_logprobs_S: Those the tokens were drawn with, float32.
        advantages_S: float32.
        clip_low: Lower clip range, in [0, 1].
        clip_high: Upper clip range, >= 0.
        kl_coef: Weight of the KL term, >= 0.
        reference_logprobs_S: The frozen reference's, float32; None without a KL term.
    """
    log_ratio_S = (logprobs_S - sampler_logprobs_S).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio_S = log_ratio_S.exp()
    plain_S = ratio_S * advantages_S
    limited_S = ratio_S.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_S
    loss_S = -torch.minimum(plain_S, limited_S)
    kl_S = torch.zeros_like(ratio_S)
    if reference_logprobs_S is not None:
        d_S = (reference_logprobs_S - logprobs_S).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        kl_S = d_S.exp() - d_S - 1.0
        loss_S = loss_S + kl_coef * kl_S
    return TokenLoss(loss_S, ratio_S, (limited_S < plain_S).float(), kl_S)


def token_logprobs(
    logits_SV: torch.Tensor, labels_S: torch.Tensor, *, temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each label and entropy of each distribution, in float32 whatever the logits' type.

    Args:
        logits_SV: Any floating type.
        labels_S: int64, in [0, V).
        temperature: Logits are divided by it, > 0: what the sampler did.

    Returns:
        ``logprobs_S`` with gradient and ``entropy_S`` (natural units) without, both float32.
    """
    logprobs_S, entropy_S = _TokenLogprobs.apply(logits_SV, labels_S, temperature)  # type: ignore[no-untyped-call]
    return logprobs_S, entropy_S


class _TokenLogprobs(torch.autograd.Function):
    """Log-softmax and gather in blocks of rows, keeping only the logits and one number a row.

    ``cross_entropy`` writes several float32 copies of the [S, V] logits to memory, which costs more than the head's
    matrix product on a CPU.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_SV: torch.Tensor, labels_S: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies, normalizers = [], [], []
        rows = _rows_at_once(logits_SV)
        for start in range(0, logits_SV.shape[0], rows):
            labels = labels_S[start : start + rows]
            x = _scaled(logits_SV[start : start + rows], temperature)
            picked = x.gather(1, labels[:, None]).squeeze(1)
            top = x.amax(1, keepdim=True)
            weights = torch.exp(x - top)
            total = weights.sum(1)
            normalizer = top.squeeze(1) + total.log()
            logprobs.append(picked - normalizer)
            # the sum must not see -inf * 0: banned tokens have weight 0
            entropies.append(normalizer - weights.mul_(x.clamp_(min=-1e30)).sum(1) / total)
            normalizers.append(normalizer)
        ctx.save_for_backward(logits_SV, labels_S, torch.cat(normalizers))
        ctx.temperature = temperature
        entropy_S = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy_S)
        return torch.cat(logprobs), entropy_S

    @staticmethod
    def backward(ctx: Any, grad_S: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        logits_SV, labels_S, normalizer_S = ctx.saved_tensors
        out_SV = torch.empty_like(logits_SV)
        rows = _rows_at_once(logits_SV)
        for start in range(0, logits_SV.shape[0], rows):
            part = slice(start, start + rows)
            grad = grad_S[part, None] / ctx.temperature
            x = _scaled(logits_SV[part], ctx.temperature).sub_(normalizer_S[part, None]).exp_().mul_(-grad)
            out_SV[part] = x.scatter_add_(1, labels_S[part, None], grad)
        return out_SV, None, None


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """A float32 copy, divided by the temperature."""
    copy = logits.to(torch.float32, copy=True)
    return copy if temperature == 1.0 else copy.div_(temperature)


def _rows_at_once(logits_SV: torch.Tensor) -> int:
    return _ROWS_AT_ONCE if logits_SV.device.type == "cpu" else max(1, logits_SV.shape[0])


class GRPOLoss(titan.BaseLoss):  # type: ignore[misc]  # torchtitan is untyped
    """`grpo_token_loss` as a TorchTitan loss, to be called on chunks of logits by ``ChunkedLossWrapper``."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.BaseLoss.Config):  # type: ignore[misc]  # torchtitan is untyped
        """What TorchTitan builds the loss from; meanings as in `LearnerConfig`."""

        clip_low: float
        clip_high: float
        kl_coef: float = 0.0
        temperature: float = 1.0

    def __init__(self, config: Config, *, compile_config: Any = None) -> None:
        del compile_config
        self._config = config

    def __call__(
        self,
        logits_1SV: torch.Tensor,
        labels_1S: torch.Tensor,
        num_loss_tokens: float,
        *,
        sampler_logprobs: torch.Tensor,
        advantages: torch.Tensor,
        valid: torch.Tensor,
        reference_logprobs: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss of a chunk, already divided by the number of loss tokens in the whole batch.

        Args:
            logits_1SV: Of the positions before the loss tokens.
            labels_1S: The loss tokens.
            num_loss_tokens: In the whole batch, over all ranks and microbatches.
            sampler_logprobs: float32 [1, S].
            advantages: float32 [1, S].
            valid: bool [1, S], False at positions that only fill up the chunk.
            reference_logprobs: float32 [1, S], or None without a KL term.

        Returns:
            The loss, and metrics that add up over chunks (``/mean``) or of which the largest counts (``/max``).
        """
        logprobs_S, entropy_S = logprobs_of(logits_1SV, labels_1S, temperature=self._config.temperature)
        valid_S, sampler_S = valid[0], sampler_logprobs[0]
        token = grpo_token_loss(
            logprobs_S,
            sampler_S,
            advantages[0],
            clip_low=self._config.clip_low,
            clip_high=self._config.clip_high,
            kl_coef=self._config.kl_coef,
            reference_logprobs_S=None if reference_logprobs is None else reference_logprobs[0],
        )

        def mean(x_S: torch.Tensor) -> torch.Tensor:
            return torch.where(valid_S, x_S, 0.0).sum() / num_loss_tokens

        loss = mean(token.loss_S)
        with torch.no_grad():
            gap_S = torch.where(valid_S, (logprobs_S - sampler_S).abs(), 0.0)
            metrics = {
                "loss/mean": loss.detach(),
                "ratio/mean": mean(token.ratio_S),
                "clip_fraction/mean": mean(token.clipped_S),
                "kl/mean": mean(token.kl_S),
                "entropy/mean": mean(entropy_S),
                "logprob_gap/mean": mean(gap_S),
                "logprob_gap/max": gap_S.max(),
            }
        return loss, metrics


def logprobs_of(
    logits_1SV: torch.Tensor, labels_1S: torch.Tensor, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_logprobs` of what ``lm_head`` returned: plain, or sharded over the vocabulary by tensor parallelism."""
    if isinstance(logits_1SV, torch.distributed.tensor.DTensor):
        logprobs_1S, entropy_1S = titan.compute_logprobs(logits_1SV / temperature, labels_1S, return_entropy=True)
        return logprobs_1S[0], entropy_1S[0]
    return token_logprobs(logits_1SV[0], labels_1S[0], temperature=temperature)
