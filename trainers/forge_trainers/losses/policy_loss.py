"""Policy losses on chunks of logits: log-probabilities, entropies, loss and metrics.

Axes: S loss tokens, V vocabulary, or this rank's part of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from forge_trainers.losses.correction import correction_weights, kl_estimate, limited
from forge_trainers.losses.registry import LossSettings, TokenInputs

_ROWS_AT_ONCE = 4
"""Number of rows of logits that are float32 at a time on CPU, so that they stay in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyPart:
    """The part of the vocabulary whose logits this rank has."""

    group: dist.ProcessGroup
    """Process group of the ranks that share the vocabulary."""
    first: int
    """First token of this rank's part."""


def token_logprobs(
    logits_SV: torch.Tensor, labels_S: torch.Tensor, *, temperature: float = 1.0, part: VocabularyPart | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each label and entropy (in nats) of each distribution: float32 [S] each, with gradient.

    `labels_S` are tokens of the whole vocabulary, the same on each rank. Logits of any floating-point dtype are divided
    by `temperature`, > 0. With a `part` of the vocabulary, all ranks must compute the same loss. The gradient is that
    of the part.
    """
    logprobs_S, entropy_S = _TokenLogprobs.apply(logits_SV, labels_S, temperature, part)  # type: ignore[no-untyped-call]
    return logprobs_S, entropy_S


class _TokenLogprobs(torch.autograd.Function):
    """Log-softmax and gather in blocks of rows that keeps only the logits and one number per row.

    ``cross_entropy`` writes several float32 copies of the [S, V] logits to memory, which takes longer than the head's
    matrix product on a CPU. TorchTitan's vocabulary-parallel loss keeps another copy, and neither it nor torch's
    ``loss_parallel`` computes the entropy.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_SV: torch.Tensor, labels_S: torch.Tensor, temperature: float, part: VocabularyPart | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own_S, here_S = _own_labels(labels_S, logits_SV.shape[1], part)
        tops, sums = [], []
        rows = _rows_at_once(logits_SV)
        for start in range(0, logits_SV.shape[0], rows):
            block = slice(start, start + rows)
            x = _scaled(logits_SV[block], temperature)
            picked = x.gather(1, own_S[block, None]).squeeze(1)
            top = x.amax(1, keepdim=True).clamp_(min=-1e30)  # all tokens of this rank may be banned
            weights = torch.exp(x - top)
            total = weights.sum(1)
            # banned tokens have weight 0; the clamp avoids -inf * 0
            weighted = weights.mul_(x.clamp_(min=-1e30)).sum(1)
            tops.append(top.squeeze(1))
            sums.append(torch.stack((torch.where(here_S[block], picked, 0.0), total, weighted)))
        top_S, sums_3S = torch.cat(tops), torch.cat(sums, 1)
        if part is not None:  # sum_v e^(x_v - m) = sum_r e^(m_r - m) sum_(v of r) e^(x_v - m_r), m = max_r m_r
            own_top_S = top_S.clone()
            dist.all_reduce(top_S, dist.ReduceOp.MAX, part.group)
            sums_3S[1:] *= torch.exp(own_top_S - top_S)
            dist.all_reduce(sums_3S, dist.ReduceOp.SUM, part.group)
        picked_S, total_S, weighted_S = sums_3S
        normalizer_S = top_S + total_S.log()
        entropy_S = normalizer_S - weighted_S / total_S  # H = log Z - sum p x
        ctx.save_for_backward(logits_SV, own_S, here_S, normalizer_S, entropy_S)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)  # no backward computation for an entropy that is only logged
        return picked_S - normalizer_S, entropy_S

    @staticmethod
    def backward(
        ctx: Any, grad_S: torch.Tensor | None, entropy_grad_S: torch.Tensor | None
    ) -> tuple[torch.Tensor, None, None, None]:
        logits_SV, own_S, here_S, normalizer_S, entropy_S = ctx.saved_tensors
        grad_S = torch.zeros_like(normalizer_S) if grad_S is None else grad_S
        out_SV = torch.empty_like(logits_SV)
        rows = _rows_at_once(logits_SV)
        for start in range(0, logits_SV.shape[0], rows):
            block = slice(start, start + rows)
            grad = grad_S[block, None] / ctx.temperature
            x = _scaled(logits_SV[block], ctx.temperature).sub_(normalizer_S[block, None])
            factor = -grad  # d log p(label) / dx = [label] - p
            if entropy_grad_S is not None:  # dH/dx = -p (log p + H); banned tokens have p = 0 and log p = -inf
                factor = factor - (x.clamp(min=-1e30) + entropy_S[block, None]) * (
                    entropy_grad_S[block, None] / ctx.temperature
                )
            grad = torch.where(here_S[block, None], grad, 0.0)
            out_SV[block] = x.exp_().mul_(factor).scatter_add_(1, own_S[block, None], grad)
        return out_SV, None, None, None


def _own_labels(labels_S: torch.Tensor, size: int, part: VocabularyPart | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of labels among this rank's `size` logits, the first or last for those elsewhere, and which are here."""
    if part is None:
        return labels_S, torch.ones_like(labels_S, dtype=torch.bool)
    own_S = labels_S - part.first
    within_S = own_S.clamp(0, size - 1)
    return within_S, within_S == own_S


def _scaled(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """A float32 copy of the logits, divided by the temperature."""
    copy = logits.to(torch.float32, copy=True)
    return copy if temperature == 1.0 else copy.div_(temperature)


def _rows_at_once(logits_SV: torch.Tensor) -> int:
    return _ROWS_AT_ONCE if logits_SV.device.type == "cpu" else max(1, logits_SV.shape[0])


def exact_kl(
    logits_SV: torch.Tensor,
    reference_SV: torch.Tensor,
    *,
    temperature: float = 1.0,
    part: VocabularyPart | None = None,
) -> torch.Tensor:
    """KL(learner || reference) of each distribution over the vocabulary: float32 [S], with gradient for the learner.

    Both logits are divided by `temperature`. `part` is as in `token_logprobs`.
    """
    result: torch.Tensor = _ExactKL.apply(logits_SV, reference_SV, temperature, part)  # type: ignore[no-untyped-call]
    return result


class _ExactKL(torch.autograd.Function):
    """``sum_v p_v (log p_v - log q_v)`` in blocks of rows, keeping only logits and two numbers per row."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_SV: torch.Tensor,
        reference_SV: torch.Tensor,
        temperature: float,
        part: VocabularyPart | None,
    ) -> torch.Tensor:
        tops, sums = [], []
        rows = _rows_at_once(logits_SV)
        for start in range(0, logits_SV.shape[0], rows):
            block = slice(start, start + rows)
            x, y = (_scaled(z[block], temperature).clamp_(min=-1e30) for z in (logits_SV, reference_SV))
            top = torch.stack((x.amax(1), y.amax(1)))
            weights = torch.exp(x - top[0, :, None])
            total_of_y = torch.exp(y - top[1, :, None]).sum(1)
            tops.append(top)
            sums.append(torch.stack((weights.sum(1), total_of_y, weights.mul_(x.sub_(y)).sum(1))))
        top_2S, sums_3S = torch.cat(tops, 1), torch.cat(sums, 1)
        if part is not None:  # as in `_TokenLogprobs`
            own_top_2S = top_2S.clone()
            dist.all_reduce(top_2S, dist.ReduceOp.MAX, part.group)
            factor_2S = torch.exp(own_top_2S - top_2S)
            sums_3S *= torch.stack((factor_2S[0], factor_2S[1], factor_2S[0]))
            dist.all_reduce(sums_3S, dist.ReduceOp.SUM, part.group)
        total_S, total_of_y_S, weighted_S = sums_3S
        # sum p (log p - log q) = sum p (x - y) - log Z_x + log Z_y
        shift_S = (top_2S[0] + total_S.log()) - (top_2S[1] + total_of_y_S.log())
        kl_S: torch.Tensor = weighted_S / total_S - shift_S
        ctx.save_for_backward(logits_SV, reference_SV, top_2S[0] + total_S.log(), shift_S + kl_S)
        ctx.temperature = temperature
        return kl_S

    @staticmethod
    def backward(ctx: Any, grad_S: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits_SV, reference_SV, normalizer_S, shift_S = ctx.saved_tensors
        out_SV = torch.empty_like(logits_SV)
        rows = _rows_at_once(logits_SV)
        for start in range(0, logits_SV.shape[0], rows):
            block = slice(start, start + rows)
            x, y = (_scaled(z[block], ctx.temperature).clamp_(min=-1e30) for z in (logits_SV, reference_SV))
            # dKL/dx = p (log p - log q - KL), and log p - log q = x - y - log Z_x + log Z_y
            factor = (x - y).sub_(shift_S[block, None]).mul_(grad_S[block, None] / ctx.temperature)
            out_SV[block] = x.sub_(normalizer_S[block, None]).exp_().mul_(factor)
        return out_SV, None, None, None


class PolicyLoss:
    """The policy loss of chunks of logits, as TorchTitan's ``ChunkedLossWrapper`` calls it."""

    reference_head: Callable[[torch.Tensor], torch.Tensor]
    """Head of the reference model. Set before each microbatch if the KL term is exact."""

    def __init__(self, settings: LossSettings) -> None:
        self._settings = settings
        self.begin(temperature=settings.temperature, computed_share=1.0)

    def begin(self, *, temperature: float, computed_share: float) -> None:
        """Start another batch, of whose loss tokens `computed_share` is computed. Metrics are means over these."""
        self._temperature, self._computed_share = temperature, computed_share
        self._log_ratios: list[torch.Tensor] = []

    def __call__(
        self,
        logits_1SV: torch.Tensor,
        labels_1S: torch.Tensor,
        num_loss_tokens: float,
        *,
        valid: torch.Tensor,
        **columns_1S: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss of a chunk, divided by the number of loss tokens of the whole batch.

        Args:
            logits_1SV: Logits at the positions before the loss tokens.
            labels_1S: Loss tokens.
            num_loss_tokens: Number of loss tokens of the whole batch, over all ranks and microbatches, including tokens
                that are not computed.
            valid: bool [1, S], False for padding of the chunk.
            columns_1S: float32 [1, S] each: ``sampler_logprobs``, ``advantages``, ``reference_logprobs`` (with a KL
                term), and the columns of `forge_trainers.losses.correction.loss_columns`. With an exact KL term
                ``reference_hidden`` [1, S, D], the reference's hidden states, in place of ``reference_logprobs``.

        Returns:
            The loss, and metrics that TorchTitan's wrapper sums (``NAME/mean``) or maximizes (``NAME/max``) over
            chunks.
        """
        settings = self._settings
        column = {name: value[0] for name, value in columns_1S.items()}
        logprobs_S, entropy_S = logprobs_of(logits_1SV, labels_1S, temperature=self._temperature)
        valid_S, now_S, sampler_S = valid[0], logprobs_S.detach(), column["sampler_logprobs"]

        def mean(x_S: torch.Tensor, count: float = num_loss_tokens) -> torch.Tensor:
            return torch.where(valid_S, x_S, 0.0).sum() / count

        # With one optimizer step per batch, the learner has not changed since the start of the batch: r = p / sg[p] is
        # 1, and its gradient is that of log p.
        start_S = column.get("old_logprobs", now_S)
        loss_S, clipped_S = self._published_loss(logprobs_S, start_S, column)
        correction_S, corrected_S = self._correction(start_S, column)
        loss_S = loss_S * correction_S
        kl_S = torch.zeros_like(now_S)
        if "reference_logprobs" in column:
            kl_S = kl_estimate(logprobs_S, column["reference_logprobs"], settings.kl)
            loss_S = loss_S + settings.kl_coef * kl_S
        elif "reference_hidden" in column:
            kl_S = self._exact_kl(logits_1SV, columns_1S["reference_hidden"])
            loss_S = loss_S + settings.kl_coef * kl_S
        loss = mean(loss_S * column["weights"] if "weights" in column else loss_S)
        if settings.entropy_coef:
            loss = loss - settings.entropy_coef * mean(entropy_S)
        if logprobs_S.requires_grad and not loss.requires_grad:
            raise ValueError(
                f"loss {settings.loss.name!r} has no gradient. Compute it from logprobs_S or log_ratio_S, and detach "
                "only their weights (advantages_S and sequence_log_ratio_S have no gradient)"
            )
        with torch.no_grad():
            log_ratio_S = now_S - sampler_S
            self._log_ratios.append(log_ratio_S)
            gap_S = torch.where(valid_S, log_ratio_S.abs(), 0.0)
            means = {
                "ratio_mean": limited(log_ratio_S).exp(),
                "clip_fraction": clipped_S,
                "correction": correction_S,
                "corrected_fraction": corrected_S,
                "kl": kl_S,
                "entropy": entropy_S,
                "logprob_gap_mean": gap_S,
            }
            computed = num_loss_tokens * self._computed_share
            metrics = {"loss/mean": loss.detach()}
            metrics |= {f"{name}/mean": mean(values_S, computed) for name, values_S in means.items()}
        return loss, {**metrics, "logprob_gap_max/max": gap_S.max()}

    def _published_loss(
        self, logprobs_S: torch.Tensor, start_S: torch.Tensor, column: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss of each token, and 1 for clipped tokens. `start_S`: log-probabilities at the start of the batch."""
        settings = self._settings
        old_S = column["sampler_logprobs"] if settings.correction.how == "ratio" else start_S
        sequence_S: torch.Tensor = torch.empty(0).as_subclass(_NotComputed)
        if settings.loss.sequence_ratio:  # without a column the ratio is 1
            sequence_S = column.get("sequence_log_ratio", torch.zeros_like(start_S))
        inputs = TokenInputs(
            logprobs_S=logprobs_S,
            log_ratio_S=limited(logprobs_S - old_S),
            sequence_log_ratio_S=sequence_S,
            advantages_S=column["advantages"],
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
        )
        return _checked_result(settings.loss.function(inputs), settings.loss.name, logprobs_S.shape)

    def _correction(
        self, start_S: torch.Tensor, column: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Importance weight of each token, and 1 for truncated or masked tokens."""
        rule = self._settings.correction
        if rule.how not in ("truncate", "mask"):
            return torch.ones_like(start_S), torch.zeros_like(start_S)
        log_ratio_S = column.get("correction_log_ratio", start_S - column["sampler_logprobs"])
        return correction_weights(log_ratio_S, rule.how, low=rule.low, high=rule.high)

    def _exact_kl(self, logits_1SV: torch.Tensor, hidden_1SD: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            reference_1SV = self.reference_head(hidden_1SD)
        part = None
        if isinstance(logits_1SV, DTensor):
            logits_1SV, part = _own_part(logits_1SV)
        if isinstance(reference_1SV, DTensor):
            reference_1SV, _ = _own_part(reference_1SV)
        return exact_kl(logits_1SV.squeeze(0), reference_1SV.squeeze(0), temperature=self._temperature, part=part)

    def take_log_ratios(self) -> torch.Tensor:
        """Learner's minus sampler's log-probabilities at all positions since the last call, in order."""
        log_ratios, self._log_ratios = self._log_ratios, []
        return torch.cat(log_ratios)


class _NotComputed(torch.Tensor):
    """Placeholder of a column that the loss did not request. Any use raises. NaN would get lost in comparisons."""

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        raise ValueError(
            "the loss reads sequence_log_ratio_S, which is computed only on request. Register the loss with "
            "sequence_ratio=True"
        )


def _checked_result(result: object, name: str, shape: torch.Size) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of a loss. Raises ValueError unless it is two tensors with a number for each token."""
    if isinstance(result, tuple) and [getattr(part, "shape", None) for part in result] == [shape, shape]:
        return result
    parts = result if isinstance(result, tuple) else [result]
    types = ", ".join(f"{type(part).__name__} {list(getattr(part, 'shape', []))}" for part in parts)
    raise ValueError(
        f"loss {name!r} returned {types} for {shape[0]} tokens. Return TokenLoss(loss_S, clipped_S) with shapes "
        f"{list(shape)}. The learner applies `reduction` to them"
    )


def logprobs_of(
    logits_1SV: torch.Tensor, labels_1S: torch.Tensor, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_logprobs` of the output of ``lm_head``, which tensor parallelism may shard over the vocabulary.

    With a sharded output, each rank keeps its part, and ranks exchange four numbers per token.
    """
    part = None
    if isinstance(logits_1SV, DTensor):
        logits_1SV, part = _own_part(logits_1SV)
    # squeeze instead of an index, whose backward pass fills and copies a tensor of the same size
    return token_logprobs(logits_1SV.squeeze(0), labels_1S[0], temperature=temperature, part=part)


def _own_part(logits_1SV: DTensor) -> tuple[torch.Tensor, VocabularyPart | None]:
    mesh, num_tokens = logits_1SV.device_mesh, logits_1SV.shape[-1]
    placements = [placed if placed.is_shard(logits_1SV.ndim - 1) else Replicate() for placed in logits_1SV.placements]
    logits_1SV = logits_1SV.redistribute(placements=placements)
    shared = [axis for axis, placed in enumerate(placements) if placed.is_shard()]
    if not shared:
        return logits_1SV.to_local(), None
    (axis,) = shared
    first = mesh.get_local_rank(axis) * math.ceil(num_tokens / mesh.size(axis))  # as `Shard` cuts it
    return logits_1SV.to_local(), VocabularyPart(group=mesh.get_group(axis), first=first)
