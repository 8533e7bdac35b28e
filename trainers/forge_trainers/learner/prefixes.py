"""Attention on GPUs over rows whose samples share prefixes.

One call of PyTorch's variable-length kernel computes causal attention within each span. A second call lets all spans
with the same prefix attend to the whole prefix. The log-sum-exp of both calls gives the weights with which their
outputs are averaged to the softmax over all keys. Tests on CPU use a reference instead of the kernel, and `tests/gpu`
tests the kernel itself.

Axes: T positions of the row, N query heads, K key heads, H head size; C positions of spans with a prefix, P positions
of prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from forge_trainers.batch.layout import Span
from forge_trainers.learner import titan

_KERNEL_DTYPE = torch.bfloat16
"""Dtype of the kernel's inputs in TorchTitan, independent of the model's compute dtype."""


class PrefixPlan(NamedTuple):
    """Attention pattern of a row, made once and used by every layer."""

    spans: Any
    """TorchTitan's ``VarlenMetadata`` of the spans, which tile the row."""
    prefixes: Any = None
    """TorchTitan's ``VarlenMetadata`` of the second call, one sequence per prefix. None, as the next two fields, if no
    span has a prefix."""
    query_C: torch.Tensor | None = None
    """int64 [C], row positions of spans with a prefix, grouped by prefix."""
    key_P: torch.Tensor | None = None
    """int64 [P], row positions of the prefixes."""


def plan_prefixes(spans: Sequence[Span], device: torch.device | str) -> PrefixPlan:
    """Group the spans of a row by prefix.

    Args:
        spans: Spans that tile the row's T positions, in order.
        device: Device on which attention is computed.
    """
    assert not any(span.openings for span in spans)
    lengths = [span.length for span in spans if span.length]
    own_sequences = _sequences(lengths, lengths, device)
    queries: dict[tuple[int, int], list[torch.Tensor]] = {}
    for span in spans:
        if span.length and span.prefix_length:
            place = torch.arange(span.start, span.start + span.length)
            queries.setdefault((span.prefix_start, span.prefix_length), []).append(place)
    if not queries:
        return PrefixPlan(own_sequences)
    query_places = [torch.cat(places) for places in queries.values()]
    shared = _sequences([place.numel() for place in query_places], [length for _, length in queries], device)
    key_P = torch.cat([torch.arange(start, start + length) for start, length in queries])
    return PrefixPlan(own_sequences, shared, torch.cat(query_places).to(device), key_P.to(device))


def _sequences(queries: Sequence[int], keys: Sequence[int], device: torch.device | str) -> Any:
    ends_q, ends_k = (
        torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32) for lengths in (queries, keys)
    )
    return titan.VarlenMetadata(cu_seq_q=ends_q, cu_seq_k=ends_k, max_q=max(queries), max_k=max(keys))


class PrefixAttention(titan.VarlenAttention):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan's variable-length attention, controlled by a `PrefixPlan`."""

    @dataclass(kw_only=True, slots=True)
    class Config(titan.VarlenAttention.Config):  # type: ignore[misc]  # torchtitan is untyped
        """As ``VarlenAttention.Config``. Attention must be causal, without a sliding window."""

    def __init__(self, config: Config) -> None:
        if config.window_size != (-1, 0):
            raise ValueError(
                f"share_prefixes=True on a GPU does not support sliding windows, and this model has one of "
                f"{config.window_size[0] + 1} positions. Leave share_prefixes at None"
            )
        super().__init__(config)

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: PrefixPlan,
        scale: float | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """`attend` on one row (B = 1). TorchTitan passes the row's plan as `attention_masks`."""
        q_TNH, k_TKH, v_TKH = (x[0].to(_KERNEL_DTYPE) for x in (q_BLNH, k_BLNH, v_BLNH))
        return attend(q_TNH, k_TKH, v_TKH, attention_masks, scale=scale)[None].to(q_BLNH.dtype)


def attend(
    q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, plan: PrefixPlan, *, scale: float | None = None
) -> torch.Tensor:
    """Causal attention within each span and to its prefix.

    Args:
        q_TNH: Queries, [T, N, H].
        k_TKH: Keys, [T, K, H]. Query head n reads key head ``n // (N / K)``.
        v_TKH: Values, [T, K, H].
        plan: Plan of this row, from `plan_prefixes`.
        scale: Factor on the scores. None: ``H ** -0.5``.

    Returns:
        Attention outputs, [T, N, H], of the dtype of `q_TNH`.
    """
    scale = q_TNH.shape[-1] ** -0.5 if scale is None else scale
    out_TNH: torch.Tensor = _Merged.apply(q_TNH, k_TKH, v_TKH, plan, scale)  # type: ignore[no-untyped-call]
    return out_TNH


class _Merged(torch.autograd.Function):
    """Both calls as one function, because PyTorch's backward pass of the kernel ignores the log-sum-exp's gradient."""

    @staticmethod
    def forward(  # noqa: PLR0917  (autograd passes them by position)
        ctx: Any, q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, plan: PrefixPlan, scale: float
    ) -> torch.Tensor:
        out_TNH, lse_NT = varlen(q_TNH, k_TKH, v_TKH, plan.spans, causal=True, scale=scale)
        if (at := plan.query_C) is not None:
            prefix_CNH, prefix_lse_NC = varlen(
                q_TNH[at], k_TKH[plan.key_P], v_TKH[plan.key_P], plan.prefixes, causal=False, scale=scale
            )
            # lse = log(sum of exp(lse_i)) and out = sum of softmax(lse)_i out_i over both sets of keys, as in
            # FlashAttention's rescaling of blocks (arXiv 2205.14135, section 3.1)
            lse_2NC = torch.stack([lse_NT[:, at], prefix_lse_NC])
            span_weight_CN1, prefix_weight_CN1 = lse_2NC.softmax(0).transpose(1, 2)[..., None]
            merged_CNH = span_weight_CN1 * out_TNH[at] + prefix_weight_CN1 * prefix_CNH
            # no in-place operation, because selective activation checkpointing keeps the kernel's results
            out_TNH = out_TNH.index_copy(0, at, merged_CNH.to(out_TNH.dtype))
            lse_NT = lse_NT.index_copy(1, at, lse_2NC.logsumexp(0))
        ctx.save_for_backward(q_TNH, k_TKH, v_TKH, out_TNH, lse_NT)
        ctx.plan, ctx.scale = plan, scale
        return out_TNH

    @staticmethod
    def backward(ctx: Any, grad_TNH: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        # With scores S and upstream gradient dO: P_ij = exp(S_ij - lse_i), dV_j = sum of P_ij dO_i,
        # dS_ij = P_ij (dO_i V_j - dO_i O_i) (arXiv 2307.08691, algorithm 2). Keys other than j enter only through lse_i
        # and O_i. With the merged lse and O, the backward pass of each call is therefore correct for its keys.
        q_TNH, k_TKH, v_TKH, out_TNH, lse_NT = ctx.saved_tensors
        plan, scale = ctx.plan, ctx.scale
        dq_TNH, dk_TKH, dv_TKH = varlen_backward(
            grad_TNH, q_TNH, k_TKH, v_TKH, out_TNH, lse_NT, plan.spans, causal=True, scale=scale
        )
        if (at := plan.query_C) is not None:
            prefix = plan.key_P
            dq_CNH, dk_PKH, dv_PKH = varlen_backward(
                grad_TNH[at], q_TNH[at], k_TKH[prefix], v_TKH[prefix], out_TNH[at], lse_NT[:, at].contiguous(),
                plan.prefixes, causal=False, scale=scale,
            )  # fmt: skip
            dq_TNH.index_add_(0, at, dq_CNH)
            dk_TKH.index_add_(0, prefix, dk_PKH)
            dv_TKH.index_add_(0, prefix, dv_PKH)
        return dq_TNH, dk_TKH, dv_TKH, None, None


# ---- the kernel: PyTorch's call of FlashAttention, as TorchTitan makes it


def varlen(
    q_CNH: torch.Tensor, k_PKH: torch.Tensor, v_PKH: torch.Tensor, sequences: Any, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each sequence's queries to its keys.

    Args:
        q_CNH: Queries, [C, N, H].
        k_PKH: Keys, [P, K, H].
        v_PKH: Values, [P, K, H].
        sequences: TorchTitan's ``VarlenMetadata``.
        causal: Whether a query attends only to keys up to its position.
        scale: Factor on the scores.

    Returns:
        Outputs, [C, N, H], and the natural log-sum-exp of the scaled scores, float32 [N, C].
    """
    result: tuple[torch.Tensor, torch.Tensor] = titan.varlen_attn(
        q_CNH, k_PKH, v_PKH, *sequences[:4],
        return_aux=titan.VarlenAuxRequest(lse=True), scale=scale, window_size=_window(causal),
        enable_gqa=q_CNH.shape[1] != k_PKH.shape[1],
        num_splits=1 if titan.current_flash_attention_impl() in {None, "FA2"} and torch.version.hip is None else None,
    )  # fmt: skip
    return result


def varlen_backward(  # noqa: PLR0917  (in the kernel's order)
    grad_CNH: torch.Tensor, q_CNH: torch.Tensor, k_PKH: torch.Tensor, v_PKH: torch.Tensor, out_CNH: torch.Tensor,
    lse_NC: torch.Tensor, sequences: Any, *, causal: bool, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Gradients of queries, keys and values. `out_CNH` and `lse_NC` are over all keys, also those of the other call."""
    unused = torch.zeros(2, dtype=torch.uint64, device=q_CNH.device)  # random state of dropout
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = torch.ops.torch_attn._varlen_attn_backward(
        grad_CNH, q_CNH, k_PKH, v_PKH, out_CNH, lse_NC, *sequences[:4], causal, unused, scale, list(_window(causal))
    )
    return result


def _window(causal: bool) -> tuple[int, int]:
    return (-1, 0 if causal else -1)
