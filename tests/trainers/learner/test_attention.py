"""Packed attention equals dense masked attention, forward and backward, however spans are bucketed."""

from __future__ import annotations

import os
import random

import pytest
import torch
import torch.nn.functional as F

from forge_agents.runtime.machine import limit_matmul_cache
from forge_trainers.batch.layout import Span
from forge_trainers.learner import attention, latent, titan
from forge_trainers.learner.attention import attend, plan_attention
from forge_trainers.learner.memory import KEPT_SCORES, MAX_PADDING


def layout(*blocks: tuple[int, tuple[int, ...]]) -> list[Span]:
    """Spans of blocks given as (prefix length, own lengths)."""
    spans, at = [], 0
    for prefix, owns in blocks:
        start = at
        if prefix:
            spans.append(Span(start=at, length=prefix))
            at += prefix
        for own in owns:
            spans.append(Span(start=at, length=own, seen=((start, prefix),) if prefix else ()))
            at += own
    return spans


def dense(
    q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, spans: list[Span], window: int | None = None
) -> torch.Tensor:
    sees = torch.zeros(len(q_TNH), len(q_TNH), dtype=torch.bool)
    for s in spans:
        keys = [at for start, length in (*s.seen, (s.start, s.length)) for at in range(start, start + length)]
        for i in range(s.length):  # a sample's positions, one after the other
            place = s.before + i
            sees[s.start + i, keys[max(0, place + 1 - (window or len(keys))) : place + 1]] = True
    q, k, v = (x.transpose(0, 1)[None] for x in (q_TNH, k_TKH, v_TKH))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=sees, enable_gqa=True)[0].transpose(0, 1)


BLOCKS = ((5, (3, 7, 30)), (0, (4,)), (40, (1, 2, 3, 25)), (0, (64,)), (200, (1, 90)))


@pytest.mark.parametrize(("window", "value"), [(None, 16), (3, 16), (20, 16), (None, 6)])
@pytest.mark.parametrize("long_span", [10**6, 50, 1], ids=["buckets", "both", "one by one"])
def test_packed_attention_equals_dense_attention(long_span, window, value, monkeypatch):
    monkeypatch.setattr(attention, "_LONG_SPAN", long_span)
    torch.manual_seed(0)
    spans = layout(*BLOCKS)
    prefix, end = spans[0], spans[-1].start + spans[-1].length
    for own, seen in ((4, ((0, 5),)), (60, ((0, 5),)), (7, ((0, 5), (end, 4))), (55, ((0, 5), (end + 4, 60)))):
        *openings, (start, length) = seen  # two groups that begin as the first one does
        at = spans[-1].start + spans[-1].length
        spans.append(Span(start=at, length=own, seen=(*openings, (start, length))))
    assert prefix.length == 5
    size = spans[-1].start + spans[-1].length
    inputs = [torch.randn(size, *head, requires_grad=True) for head in ((6, 16), (2, 16), (2, value))]
    grad = torch.randn(size, 6, value)
    plan = plan_attention(spans).within(window)
    ours, theirs = attend(*inputs, plan), dense(*inputs, spans, window)
    for a, b in zip(
        (ours, *torch.autograd.grad(ours, inputs, grad)),
        (theirs, *torch.autograd.grad(theirs, inputs, grad)),
        strict=True,
    ):
        assert (a - b).norm() < 1e-5 * b.norm()


def test_values_are_as_large_as_keys_for_flash_attention(monkeypatch):
    def kernel(_: object, *tensors: torch.Tensor) -> torch.Tensor:
        assert len({x.shape for x in tensors}) == 1
        q, k, v = (x.transpose(1, 2) for x in tensors)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    monkeypatch.setattr(titan.VarlenAttention, "forward", kernel)
    q, k, v = (torch.randn(1, 9, 2, size) for size in (16, 16, 6))
    expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)
    torch.testing.assert_close(latent.VarlenAttention.Config().build()(q, k, v), expected)


def test_buckets_hold_little_padding():
    spans = layout(*[(46, (32,) * 8)] * 8)
    plan = plan_attention(spans)
    padded = sum(bucket.bias_bms.numel() for bucket in plan.buckets)
    exact = sum(span.length * (span.length + span.before) for span in spans)
    assert padded <= 1.4 * exact
    assert len(plan.buckets) <= 3


def test_products_of_a_long_row_of_many_lengths_fit_into_what_onednn_keeps(monkeypatch):
    """Otherwise each is compiled again in every layer."""
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "0")
    del os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"]
    limit_matmul_cache()
    draw, blocks, size = random.Random(1), [], 0
    while size < 16_384:
        blocks.append((draw.randrange(150, 300), tuple(draw.randrange(8, 120) for _ in range(8))))
        size += blocks[-1][0] + sum(blocks[-1][1])
    products = 3 * len(plan_attention(layout(*blocks)).buckets) + 30  # of a layer with adapters, and the head
    assert products <= int(os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"])


def test_many_answers_under_a_long_prompt_keep_few_scores():
    """Each is shorter than a long span. Together they attend to the prompt 12 times in every layer."""
    spans = layout((3000, (400,) * 12))
    plan = plan_attention(spans)
    saved = sum(bucket.bias_bms.numel() for bucket in plan.buckets)
    assert saved <= MAX_PADDING * KEPT_SCORES * (3000 + 12 * 400)
    assert plan.long_spans[0] == spans[0] and len(plan.buckets) > 0 and set(plan.long_spans) < set(spans)
    answer = plan.long_spans[-1]
    assert plan.mask(spans[0], torch.float32) is None, "the kernel knows what is causal"
    mask = plan.mask(answer, torch.bfloat16)
    assert mask is plan.mask(answer, torch.bfloat16) and mask.shape == (400, 3400), "one for all layers"
    short = plan_attention(layout(*[(46, (32,) * 8)] * 8, (0, (511,))))
    assert not short.long_spans, "a span that sees few positions stays where it is fast"


def test_attention_to_what_comes_later_is_refused():
    with pytest.raises(ValueError, match="window_size"):
        attention.PackedAttention.Config(window_size=(8, 8)).build()
