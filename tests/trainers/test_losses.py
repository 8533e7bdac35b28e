"""The GRPO loss against an independent float64 computation."""

from __future__ import annotations

import math

import pytest
import torch

from forge_trainers.losses import GRPOLoss, grpo_token_loss, token_logprobs


def reference_loss(  # noqa: PLR0917
    logprob: float, sampled: float, advantage: float, low: float, high: float, kl_coef: float, reference: float
) -> float:
    """The paper's formula in plain Python floats."""
    ratio = math.exp(logprob - sampled)
    surrogate = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    d = reference - logprob
    return -surrogate + kl_coef * (math.exp(d) - d - 1)


def test_token_losses_and_gradients_equal_the_formula():
    torch.manual_seed(0)
    logprobs = (-torch.rand(64) * 3).requires_grad_()
    sampled, advantages, reference = -torch.rand(64) * 3, torch.randn(64), -torch.rand(64) * 3
    found = grpo_token_loss(
        logprobs, sampled, advantages, clip_low=0.2, clip_high=0.3, kl_coef=0.1, reference_logprobs_S=reference
    )
    (grads,) = torch.autograd.grad(found.loss_S.sum(), logprobs)
    for i in range(64):
        rest = (float(sampled[i]), float(advantages[i]), 0.2, 0.3, 0.1, float(reference[i]))
        x, step = float(logprobs[i].detach()), 1e-6
        assert float(found.loss_S[i]) == pytest.approx(reference_loss(x, *rest), rel=1e-5, abs=1e-6)
        slope = (reference_loss(x + step, *rest) - reference_loss(x - step, *rest)) / (2 * step)
        assert float(grads[i]) == pytest.approx(slope, rel=1e-3, abs=1e-4)


def test_the_clip_stops_the_gradient_only_where_it_is_the_smaller():
    logprobs = torch.tensor([math.log(1.5), math.log(1.5), math.log(0.5), math.log(0.5)], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    found = grpo_token_loss(logprobs, torch.zeros(4), advantages, clip_low=0.2, clip_high=0.28)
    (grads,) = torch.autograd.grad(found.loss_S.sum(), logprobs)
    assert found.clipped_S.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert grads.tolist() == pytest.approx([0.0, 1.5, -0.5, 0.0])


def test_absurd_ratios_stay_finite():
    logprobs = torch.tensor([-1.0, -400.0], requires_grad=True)
    found = grpo_token_loss(
        logprobs, torch.tensor([-400.0, -1.0]), torch.tensor([-1.0, 1.0]), clip_low=0.2, clip_high=0.2
    )
    (grads,) = torch.autograd.grad(found.loss_S.sum(), logprobs)
    assert bool(torch.isfinite(found.loss_S).all())
    assert bool(torch.isfinite(grads).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_equal_float64(dtype: torch.dtype, temperature: float):
    torch.manual_seed(0)
    logits = (4 * torch.randn(50, 300)).to(dtype).requires_grad_()
    before = logits.detach().clone()
    labels, weights = torch.randint(0, 300, (50,)), torch.randn(50)
    logprobs, entropy = token_logprobs(logits, labels, temperature=temperature)
    (grads,) = torch.autograd.grad((logprobs * weights).sum(), logits)
    exact_logits = before.double().requires_grad_()
    exact = torch.log_softmax(exact_logits / temperature, dim=-1)
    picked = exact.gather(1, labels[:, None]).squeeze(1)
    (exact_grads,) = torch.autograd.grad((picked * weights).sum(), exact_logits)
    assert torch.equal(logits, before)
    assert (logprobs - picked).abs().max() < 2e-5
    assert (entropy + (exact.exp() * exact).sum(1)).abs().max() < 2e-5
    assert (grads - exact_grads).abs().max() < (1e-5 if dtype == torch.float32 else 1e-2)


def test_the_loss_is_divided_by_all_loss_tokens_and_ignores_filling():
    torch.manual_seed(0)
    loss = GRPOLoss.Config(clip_low=0.2, clip_high=0.2).build()
    logits, labels = torch.randn(1, 6, 30), torch.randint(0, 30, (1, 6))
    inputs = {"sampler_logprobs": torch.full((1, 6), -3.0), "advantages": torch.randn(1, 6)}
    valid = torch.tensor([[True, True, True, True, False, False]])
    value, metrics = loss(logits, labels, 8.0, valid=valid, **inputs)
    half, _ = loss(logits[:, :4], labels[:, :4], 4.0, valid=valid[:, :4], **{k: v[:, :4] for k, v in inputs.items()})
    assert float(value) == pytest.approx(float(half) / 2, rel=1e-6)
    assert float(metrics["loss/mean"]) == pytest.approx(float(value))
