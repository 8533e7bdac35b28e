"""The gated delta rule of packed rows equals transformers' rule of each sample, token by token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from forge_trainers.batch.layout import Span
from forge_trainers.learner.delta import mix, plan_delta

KEYS, VALUES, KEY_SIZE, VALUE_SIZE, WIDTH = 2, 4, 8, 12, 4
CHANNELS = 2 * KEYS * KEY_SIZE + VALUES * VALUE_SIZE
SPANS = (
    Span(start=0, length=65),  # two chunks and a token
    Span(start=65, length=2),  # a shared prefix shorter than the convolution
    Span(start=67, length=64, seen=((65, 2),)),
    Span(start=131, length=1, seen=((65, 2), (67, 64))),
    Span(start=132, length=40, seen=((65, 2), (67, 64))),
    Span(start=172, length=9, seen=((65, 2),)),
    Span(start=181, length=32),
)


def layer(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    rng = torch.Generator().manual_seed(0)
    length = sum(span.length for span in SPANS)
    tensors = [
        torch.randn(length, CHANNELS, generator=rng),
        0.5 * torch.randn(CHANNELS, WIDTH, generator=rng),
        -3 * torch.rand(length, VALUES, generator=rng),
        torch.rand(length, VALUES, generator=rng),
    ]
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def expected(x: torch.Tensor, conv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    outputs = []
    for span in SPANS:
        where = torch.cat([torch.arange(at, at + n) for at, n in (*span.seen, (span.start, span.length))])
        mixed = F.conv1d(x[where].T[None], conv[:, None], padding=WIDTH - 1, groups=CHANNELS)[0, :, : len(where)].T
        query, key, value = F.silu(mixed).split([KEYS * KEY_SIZE, KEYS * KEY_SIZE, VALUES * VALUE_SIZE], dim=-1)
        query, key = (y.view(1, -1, KEYS, KEY_SIZE).repeat_interleave(VALUES // KEYS, dim=2) for y in (query, key))
        output, _ = torch_recurrent_gated_delta_rule(
            query, key, value.view(1, -1, VALUES, VALUE_SIZE), g=g[where][None], beta=beta[where][None],
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        outputs.append(output[0, -span.length :])
    return torch.cat(outputs)


def test_packed_spans_and_their_gradients_equal_single_samples():
    tensors = layer()
    result = mix(*tensors, plan_delta(SPANS, WIDTH), (KEYS, VALUES), (KEY_SIZE, VALUE_SIZE))
    reference = expected(*tensors)
    assert (result - reference).abs().max() < 1e-6 < reference.abs().max()
    grad = torch.randn(reference.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(result, tensors, grad)
    for result, gradient in zip(gradients, torch.autograd.grad(reference, tensors, grad), strict=True):
        assert (result - gradient).norm() < 5e-6 * gradient.norm()


def test_weights_that_are_not_trained_get_no_gradient():
    tensors = layer()
    tensors[1].requires_grad_(False)
    result = mix(*tensors, plan_delta(SPANS, WIDTH), (KEYS, VALUES), (KEY_SIZE, VALUE_SIZE))
    result.sum().backward()
    assert tensors[1].grad is None and tensors[0].grad.abs().max() > 0


def test_bfloat16_is_computed_in_float32():
    tensors = layer(torch.bfloat16)
    result = mix(*tensors, plan_delta(SPANS, WIDTH), (KEYS, VALUES), (KEY_SIZE, VALUE_SIZE))
    reference = expected(*(tensor.float() for tensor in tensors))
    assert result.dtype == torch.bfloat16
    assert (result - reference).abs().max() < 0.02 * reference.abs().max()  # the convolution's output is rounded


def test_part_of_a_span_is_no_prefix():
    with pytest.raises(ValueError, match=r"\(0, 40\) .* no whole span"):
        plan_delta([Span(start=0, length=50), Span(start=50, length=5, seen=((0, 40),))], WIDTH)
