"""Attention over packed rows on CPU. Prefixes that several samples share are computed once.

Axes: T positions of the row, N query heads, K key heads, R = N / K, H head size, V size of a value; b spans computed
together (a bucket), m queries of the longest span in it, s keys of the longest prefix plus m.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from forge_trainers.batch.layout import Span
from forge_trainers.learner import titan
from forge_trainers.learner.memory import KEPT_SCORES, MAX_PADDING

_FREE_SCORES = 1 << 15
"""A span joins a bucket while the number of padded scores is at most `MAX_PADDING` times the exact number plus this
many per head, which cost less than the calls of another bucket."""
_LONG_SPAN = 512
"""Length from which a span is computed by PyTorch's fused kernel without storing the [m, s] scores."""
_MAX_SCORES = 1 << 18
"""Maximum number of scores per head of a bucket with several spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Spans of similar size, padded to a batch."""

    query_bm: torch.Tensor
    """int64 [b * m], row position of each query slot. 0 for padding."""
    key_bs: torch.Tensor
    """int64 [b * s], row position of each key slot. 0 for padding."""
    num_spans: int
    bias_bms: torch.Tensor
    """float32 [b, m, s], 0 where the query attends to the key, else -inf. Padded queries attend to all keys."""
    valid_bm1: torch.Tensor | None
    """bool [b, m, 1], False for padded queries. None if there is no padding."""
    prefix_b1: torch.Tensor
    """int64 [b, 1], length of each span's prefix. The prefix is the first part of the keys."""

    def within(self, window: int) -> Bucket:
        """The same bucket with a sliding window of `window` positions that ends at the query's position."""
        _, m, s = self.bias_bms.shape
        outside_bms = (self.prefix_b1 + torch.arange(m))[..., None] - torch.arange(s) >= window
        if self.valid_bm1 is not None:
            outside_bms &= self.valid_bm1
        return replace(self, bias_bms=self.bias_bms.masked_fill(outside_bms, float("-inf")))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Attention pattern of a row, made once and used by every layer."""

    buckets: tuple[Bucket, ...]
    long_spans: tuple[Span, ...]
    slot_T: torch.Tensor
    """int64 [T], index of each position's query among the slots of all buckets. The index after the last slot for
    positions of long spans."""
    window: int | None = None
    """Size of the sliding window in positions, including the query's own. None: no window."""
    _within: dict[int, AttentionPlan] = field(default_factory=dict, compare=False)
    _masks: dict[tuple[Span, torch.dtype, bool], torch.Tensor] = field(default_factory=dict, compare=False)

    def within(self, window: int | None) -> AttentionPlan:
        """The plan for layers with a sliding window, created on first use. None: this plan."""
        if window is None:
            return self
        if window not in self._within:
            buckets = tuple(bucket.within(window) for bucket in self.buckets)
            self._within[window] = replace(self, buckets=buckets, window=window, _within={}, _masks={})
        return self._within[window]

    def mask(self, span: Span, dtype: torch.dtype, *, sink: bool = False) -> torch.Tensor | None:
        """Mask of a long span's scores, [length, before + length]: 0 for visible keys, else -inf. None: causal.

        With a `sink`, a key is in front of the others that all queries see. All layers share the mask, because each
        keeps a reference to it until the backward pass.
        """
        if not span.before and self.window is None and not sink:
            return None
        if (span, dtype, sink) not in self._masks:
            visible = torch.ones(span.length, span.length + span.before, dtype=torch.bool).tril_(span.before)
            if self.window is not None:
                visible.triu_(span.before - self.window + 1)
            visible = F.pad(visible, (int(sink), 0), value=True)
            mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
            self._masks[span, dtype, sink] = mask
        return self._masks[span, dtype, sink]


def plan_attention(spans: Sequence[Span]) -> AttentionPlan:
    """Sort the spans of a row, which tile its positions, into buckets.

    The spans with most keys are computed like long spans if the buckets would keep more than `KEPT_SCORES` scores per
    position. Otherwise many answers to a long prompt would keep gigabytes.
    """
    num_positions = sum(span.length for span in spans)
    ordered = sorted((s for s in spans if s.length < _LONG_SPAN), key=lambda s: (s.length + s.before, s.length))
    cumulative_scores = itertools.accumulate(span.length * (span.length + span.before) for span in ordered)
    limit = KEPT_SCORES * num_positions
    short = [span for span, scores in zip(ordered, cumulative_scores, strict=True) if scores <= limit]
    groups: list[list[Span]] = []
    exact = longest = before = 0
    for span in short:
        scores = span.length * (span.length + span.before)
        m, most = max(longest, span.length), max(before, span.before)
        padded = m * (m + most) * (len(groups[-1]) + 1 if groups else 0)
        if groups and padded <= min(MAX_PADDING * (exact + scores) + _FREE_SCORES, _MAX_SCORES):
            groups[-1].append(span)
            exact, longest, before = exact + scores, m, most
        else:
            groups.append([span])
            exact, longest, before = scores, span.length, span.before
    slot_T, in_buckets = torch.full((num_positions,), -1), set(short)
    buckets, num_slots = [], 0
    for group in groups:
        buckets.append(_bucket(group))
        m, _ = _padded_shape(group)
        for i, span in enumerate(group):
            slot_T[span.start : span.start + span.length] = num_slots + i * m + torch.arange(span.length)
        num_slots += len(group) * m
    return AttentionPlan(
        buckets=tuple(buckets),
        long_spans=tuple(span for span in spans if span not in in_buckets),
        slot_T=torch.where(slot_T < 0, num_slots, slot_T),
    )


def _padded_shape(group: Sequence[Span]) -> tuple[int, int]:
    m = max(span.length for span in group)
    return m, max(span.before for span in group) + m


def _bucket(group: Sequence[Span]) -> Bucket:
    m, s = _padded_shape(group)
    length_b, start_b, prefix_b = (
        torch.tensor([getattr(span, name) for span in group])[:, None] for name in ("length", "start", "before")
    )
    query_m, key_s = torch.arange(m)[None], torch.arange(s)[None]
    valid_bm = query_m < length_b
    offset_bs = key_s - prefix_b  # index of a key within the span; negative in the prefix
    position_bs = start_b + offset_bs
    for row_s, span in zip(position_bs, group, strict=True):
        if span.before:
            row_s[: span.before] = torch.cat([torch.arange(start, start + length) for start, length in span.seen])
    exists_bs = offset_bs < length_b
    visible_bms = (offset_bs[:, None] <= query_m[..., None]) & exists_bs[:, None]
    return Bucket(
        query_bm=torch.where(valid_bm, start_b + query_m, 0).flatten(),
        key_bs=torch.where(exists_bs, position_bs, 0).flatten(),
        num_spans=len(group),
        bias_bms=torch.zeros(visible_bms.shape).masked_fill_(~(visible_bms | ~valid_bm[..., None]), float("-inf")),
        valid_bm1=None if bool(valid_bm.all()) else valid_bm[..., None],
        prefix_b1=prefix_b,
    )


@titan.with_own_config
class PackedAttention(titan.VarlenAttention):  # type: ignore[misc]  # torchtitan is untyped
    """TorchTitan inner attention for rows on CPU, causal, controlled by an `AttentionPlan`.

    TorchTitan requires a subclass of ``VarlenAttention`` for packed documents.
    """

    def __init__(self, config: Any) -> None:
        before, after = config.window_size
        if after != 0:
            raise ValueError(f"window_size={config.window_size} is not supported, only causal attention, (..., 0)")
        titan.Module.__init__(self)  # not VarlenAttention's constructor, which requires CUDA kernels
        self._window = None if before < 0 else before + 1

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: AttentionPlan,
        scale: float | None = None,
        sinks_N: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """`attend` on one row (B = 1). TorchTitan passes the row's plan as `attention_masks`."""
        plan = attention_masks.within(self._window)
        return attend(q_BLNH[0], k_BLNH[0], v_BLNH[0], plan, scale=scale, sinks_N=sinks_N)[None]


def attend(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKV: torch.Tensor,
    plan: AttentionPlan,
    *,
    scale: float | None = None,
    sinks_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention within each span and to its prefix, limited by the plan's window: [T, N, V].

    Scores and softmax are computed in float32, the product of probabilities and values in the inputs' dtype. Query head
    n reads key head ``n // R``. The default `scale` of the scores is ``H ** -0.5``. `sinks_N` are the scores of one
    more key per query head, which has no value (arXiv 2309.17453).
    """
    scale = q_TNH.shape[-1] ** -0.5 if scale is None else scale
    out_TNV: torch.Tensor = _BucketAttention.apply(q_TNH, k_TKH, v_TKV, sinks_N, plan, scale)  # type: ignore[no-untyped-call]
    for span in plan.long_spans:
        queries = slice(span.start, span.start + span.length)
        mask = plan.mask(span, q_TNH.dtype, sink=sinks_N is not None)
        out_TNV[queries] = _attend_long(q_TNH[queries], *_seen(k_TKH, v_TKV, span), scale, mask, sinks_N)
    return out_TNV


def _seen(k_TKH: torch.Tensor, v_TKH: torch.Tensor, span: Span) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that the positions of a span attend to."""
    parts = [*span.seen, (span.start, span.length)]
    keys, values = (torch.cat([x[start : start + length] for start, length in parts]) for x in (k_TKH, v_TKH))
    return keys, values


def _attend_long(  # noqa: PLR0917  (the tensors of attention in their usual order)
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
    sinks_N: torch.Tensor | None,
) -> torch.Tensor:
    size, groups = value.shape[-1], query.shape[1] != key.shape[1]
    if size < key.shape[-1]:  # PyTorch's fused kernel needs values of the size of keys
        value = F.pad(value, (0, key.shape[-1] - size))
    if sinks_N is not None:
        # a channel that only the sink's key has, so that its score is the sink of the query's head
        channel = (sinks_N / scale)[:, None].expand(len(query), -1, 1).to(query.dtype)
        query, key, value = torch.cat([query, channel], dim=-1), F.pad(key, (0, 1)), F.pad(value, (0, 1))
        sink = F.pad(torch.zeros_like(key[:1, :, :-1]), (0, 1), value=1.0)
        key, value = torch.cat([sink, key]), torch.cat([torch.zeros_like(value[:1]), value])
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], key.transpose(0, 1)[None], value.transpose(0, 1)[None],
        attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=groups,
    )  # fmt: skip
    return out[0].transpose(0, 1)[..., :size]


class _BucketAttention(torch.autograd.Function):
    """Softmax attention of all buckets. Outputs at positions of long spans are zero.

    PyTorch's fused CPU kernel takes five times as long for short spans, mostly in its backward pass. Query heads that
    read the same key head are folded into a batch of R * m queries.
    """

    @staticmethod
    def forward(  # noqa: PLR0917  (autograd passes them by position)
        ctx: Any,
        q_TNH: torch.Tensor,
        k_TKH: torch.Tensor,
        v_TKV: torch.Tensor,
        sinks_N: torch.Tensor | None,
        plan: AttentionPlan,
        scale: float,
    ) -> torch.Tensor:
        num_keys = k_TKH.shape[1]
        probs_of, slots = [], [_empty_slot(q_TNH, v_TKV)] if plan.long_spans else []
        for at, bucket in enumerate(plan.buckets):
            q, k, v = _fold(q_TNH, bucket.query_bm, bucket, num_keys), *_fold_keys(k_TKH, v_TKV, bucket)
            probs, sink_probs = _probabilities(q, k, bucket, scale, sinks_N)
            probs = probs.to(v.dtype)
            slots.insert(at, _unfold(torch.bmm(probs, v), bucket, q_TNH.shape[1]))
            probs_of += [probs] if sink_probs is None else [probs, sink_probs]
        ctx.save_for_backward(q_TNH, k_TKH, v_TKV, sinks_N, *probs_of)
        ctx.plan, ctx.scale = plan, scale
        return torch.cat(slots).index_select(0, plan.slot_T)

    @staticmethod
    def backward(ctx: Any, grad_TNV: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_TNH, k_TKH, v_TKV, sinks_N, *probs_of = ctx.saved_tensors
        plan, num_keys = ctx.plan, k_TKH.shape[1]
        dsinks_N, sink_probs_of = None, []
        if sinks_N is not None:
            dsinks_N, sink_probs_of, probs_of = torch.zeros(len(sinks_N)), probs_of[1::2], probs_of[::2]
        dk_TKH, dv_TKV = (torch.zeros(x.shape, dtype=torch.float32) for x in (k_TKH, v_TKV))
        dq_slots = [q_TNH.new_zeros(1, *q_TNH.shape[1:])] if plan.long_spans else []
        for at, (bucket, probs) in enumerate(zip(plan.buckets, probs_of, strict=True)):
            q, k, v = _fold(q_TNH, bucket.query_bm, bucket, num_keys), *_fold_keys(k_TKH, v_TKV, bucket)
            # Padded queries read position 0, but their probabilities and so their gradients are 0.
            grad = _fold(grad_TNV, bucket.query_bm, bucket, num_keys)
            probs_32 = probs.float()
            dv = torch.bmm(probs.transpose(1, 2), grad)
            dscores = torch.bmm(grad, v.transpose(1, 2)).float()
            # Gradient of softmax: p * (dp - sum over keys of p * dp). A sink has no value, so its dp is 0.
            mean = (dscores * probs_32).sum(-1, keepdim=True)
            if dsinks_N is not None:
                dsinks_N -= (sink_probs_of[at] * mean).view(bucket.num_spans, len(dsinks_N), -1).sum((0, 2))
            dscores.sub_(mean).mul_(probs_32).mul_(ctx.scale)
            dq_slots.insert(at, _unfold(torch.bmm(dscores, k.float()).to(q.dtype), bucket, q_TNH.shape[1]))
            dk = torch.bmm(dscores.transpose(1, 2), q.float())
            # Keys of a prefix belong to several spans, so their gradients are summed, in float32.
            for into, part in ((dk_TKH, dk), (dv_TKV, dv)):
                into.index_add_(0, bucket.key_bs, _unfold(part.float(), bucket, num_keys))
        dq_TNH = torch.cat(dq_slots).index_select(0, plan.slot_T)
        dsinks_N = None if dsinks_N is None else dsinks_N.to(sinks_N.dtype)
        return dq_TNH, dk_TKH.to(k_TKH.dtype), dv_TKV.to(v_TKV.dtype), dsinks_N, None, None


def _fold(x_TNH: torch.Tensor, slot: torch.Tensor, bucket: Bucket, num_keys: int) -> torch.Tensor:
    """Gather [T, K * R, H] into [b * K, R * slots, H]."""
    x = x_TNH.index_select(0, slot).view(bucket.num_spans, -1, num_keys, x_TNH.shape[1] // num_keys, x_TNH.shape[2])
    return x.permute(0, 2, 3, 1, 4).reshape(bucket.num_spans * num_keys, -1, x_TNH.shape[2])


def _fold_keys(k_TKH: torch.Tensor, v_TKV: torch.Tensor, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
    num_keys = k_TKH.shape[1]
    return _fold(k_TKH, bucket.key_bs, bucket, num_keys), _fold(v_TKV, bucket.key_bs, bucket, num_keys)


def _empty_slot(q_TNH: torch.Tensor, v_TKV: torch.Tensor) -> torch.Tensor:
    return q_TNH.new_zeros(1, q_TNH.shape[1], v_TKV.shape[2])


def _unfold(x: torch.Tensor, bucket: Bucket, num_heads: int) -> torch.Tensor:
    """[b * K, R * slots, H] back to [b * slots, heads = K * R, H]."""
    b, k = bucket.num_spans, x.shape[0] // bucket.num_spans
    x = x.view(b, k, num_heads // k, -1, x.shape[-1])
    return x.permute(0, 3, 1, 2, 4).reshape(-1, num_heads, x.shape[-1])


def _probabilities(
    q: torch.Tensor, k: torch.Tensor, bucket: Bucket, scale: float, sinks_N: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention probabilities, float32 [b * K, R * m, s], and those of the sinks, [b * K, R * m, 1].

    Rows of padded queries are 0.
    """
    b, m, s = bucket.bias_bms.shape
    # no in-place operation, because selective activation checkpointing keeps results of matrix products
    scores = torch.bmm(q.float() * scale, k.float().transpose(1, 2)).view(b, -1, m, s) + bucket.bias_bms[:, None]
    if sinks_N is not None:
        scores = torch.cat([scores, sinks_N.float()[:, None, None].expand(b, -1, m, 1)], dim=-1)
    probs = torch.softmax(scores, dim=-1)
    if bucket.valid_bm1 is not None:
        probs = probs * bucket.valid_bm1[:, None]
    probs = probs.reshape(q.shape[0], -1, probs.shape[-1])
    return (probs, None) if sinks_N is None else (probs[..., :-1], probs[..., -1:])
