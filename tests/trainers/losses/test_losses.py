"""Log-probabilities and entropies of logits, and the loss of a chunk."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forge_trainers.learner.config import LearnerConfig
from forge_trainers.losses.correction import kl_estimate
from forge_trainers.losses.policy_loss import PolicyLoss, exact_kl, token_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_and_entropies_equal_float64(dtype, temperature):
    torch.manual_seed(0)
    logits = (4 * torch.randn(50, 300)).to(dtype).requires_grad_()
    before = logits.detach().clone()
    labels, weights, others = torch.randint(0, 300, (50,)), torch.randn(50), torch.randn(50)
    logprobs, entropy = token_logprobs(logits, labels, temperature=temperature)
    (grads,) = torch.autograd.grad((logprobs * weights + entropy * others).sum(), logits)
    exact_logits = before.double().requires_grad_()
    exact = torch.log_softmax(exact_logits / temperature, dim=-1)
    picked, exact_entropy = exact.gather(1, labels[:, None]).squeeze(1), -(exact.exp() * exact).sum(1)
    (exact_grads,) = torch.autograd.grad((picked * weights + exact_entropy * others).sum(), exact_logits)
    assert torch.equal(logits, before)
    assert (logprobs - picked).abs().max() < 2e-5
    assert (entropy - exact_entropy).abs().max() < 2e-5
    assert (grads - exact_grads).abs().max() < (2e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("of", [0, 1], ids=["logprobs", "entropy"])
def test_each_output_has_its_own_gradient(of):
    torch.manual_seed(1)
    logits, labels = torch.randn(20, 30, requires_grad=True), torch.randint(0, 30, (20,))
    (grads,) = torch.autograd.grad(token_logprobs(logits, labels)[of].sum(), logits)
    exact = torch.log_softmax(logits.double(), dim=-1)
    expected = exact.gather(1, labels[:, None]).sum() if of == 0 else -(exact.exp() * exact).sum()
    assert (grads - torch.autograd.grad(expected, logits)[0]).abs().max() < 1e-6


def test_banned_tokens_leave_entropy_and_gradient_finite():
    logits = torch.tensor([[0.0, 1.0, float("-inf")]], requires_grad=True)
    logprobs, entropy = token_logprobs(logits, torch.tensor([0]))
    (grads,) = torch.autograd.grad((logprobs + entropy).sum(), logits)
    free = torch.tensor([[0.0, 1.0]], requires_grad=True)
    logp = torch.log_softmax(free, dim=-1)
    (expected,) = torch.autograd.grad(logp[0, 0] - (logp.exp() * logp).sum(), free)
    assert grads[0, 2] == 0.0
    assert torch.allclose(grads[:, :2], expected, atol=1e-6)


def chunk(config: LearnerConfig, logits: torch.Tensor, labels: torch.Tensor, total: float, **columns: Any) -> Any:
    return PolicyLoss(config.loss_settings)(logits, labels, total, **columns)


def test_the_loss_is_divided_by_all_loss_tokens_and_ignores_filling():
    torch.manual_seed(0)
    config = LearnerConfig(clip=(0.2, 0.2), entropy_coef=0.1)
    logits, labels = torch.randn(1, 6, 30), torch.randint(0, 30, (1, 6))
    inputs = {"sampler_logprobs": torch.full((1, 6), -3.0), "advantages": torch.randn(1, 6)}
    valid = torch.tensor([[True, True, True, True, False, False]])
    value, metrics = chunk(config, logits, labels, 8.0, valid=valid, **inputs)
    half, _ = chunk(
        config, logits[:, :4], labels[:, :4], 4.0, valid=valid[:, :4], **{k: v[:, :4] for k, v in inputs.items()}
    )
    assert float(value) == pytest.approx(float(half) / 2, rel=1e-6)
    assert float(metrics["loss/mean"]) == pytest.approx(float(value))


def test_absurd_ratios_stay_finite():
    logits = torch.tensor([[[0.0, -400.0], [0.0, -400.0]]], requires_grad=True)
    inputs = {
        "sampler_logprobs": torch.tensor([[-400.0, -1.0]]),
        "advantages": torch.tensor([[-1.0, 1.0]]),
        "valid": torch.ones(1, 2, dtype=torch.bool),
        "reference_logprobs": torch.tensor([[-500.0, -1.0]]),
    }
    for name in ("dapo", "rloo", "cispo"):
        loss, _ = chunk(LearnerConfig(loss=name, kl_coef=0.1), logits, torch.tensor([[0, 1]]), 2.0, **inputs)
        assert bool(torch.isfinite(loss)), name
        assert bool(torch.isfinite(torch.autograd.grad(loss, logits)[0]).all()), name


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [("k1", lambda d: -d, lambda d: -d), ("k2", lambda d: d * d / 2, lambda d: -d), ("k3", lambda d: -1 - d, None)],
)
def test_tokens_that_the_reference_excludes_keep_their_divergence_and_gradient(kind, value, gradient):
    """From 20 nats on, the tokens with the largest divergence had no gradient."""
    d = torch.tensor([-19.0, -21.0, -80.0, -500.0])
    logprobs = torch.full((4,), -0.5, requires_grad=True)
    estimate = kl_estimate(logprobs, logprobs.detach() + d, kind)
    (grads,) = torch.autograd.grad(estimate.sum(), logprobs)
    torch.testing.assert_close(estimate.detach(), value(d))
    torch.testing.assert_close(grads, torch.ones(4) if gradient is None else gradient(d))
    never = kl_estimate(logprobs, torch.full((4,), -torch.inf), kind)
    assert never.isfinite().all() and torch.autograd.grad(never.sum(), logprobs)[0].isfinite().all()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_divergence_and_its_gradient_equal_float64(temperature, dtype):
    rng = torch.Generator().manual_seed(0)
    logits, reference = (torch.randn(2, 9, 50, generator=rng) * 3).to(dtype)
    factor = torch.randn(9, generator=rng)
    logits.requires_grad_()
    value = exact_kl(logits, reference, temperature=temperature)
    (grads,) = torch.autograd.grad((value * factor).sum(), logits)
    x = logits.detach().double().requires_grad_()
    log_p, log_q = (torch.log_softmax(z / temperature, -1) for z in (x, reference.double()))
    expected = (log_p.exp() * (log_p - log_q)).sum(-1)
    (expected_grads,) = torch.autograd.grad((expected * factor.double()).sum(), x)
    torch.testing.assert_close(value.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    close = 1e-5 if dtype is torch.float32 else 1e-2
    torch.testing.assert_close(grads.double(), expected_grads, rtol=close, atol=close)
    assert exact_kl(logits, logits.detach()).abs().max() < 1e-5


def test_gradient_of_the_exact_divergence_is_the_mean_of_k2_over_sampled_tokens():
    """The policy gradient of the reverse divergence, without the noise of the sampled token."""
    rng = torch.Generator().manual_seed(1)
    logits, reference = torch.randn(2, 1, 6, generator=rng)
    logits.requires_grad_()
    (exact,) = torch.autograd.grad(exact_kl(logits, reference).sum(), logits)
    tokens = torch.arange(6)
    logprobs, _ = token_logprobs(logits.expand(6, 6), tokens)
    of_reference, _ = token_logprobs(reference.expand(6, 6), tokens)
    k2 = kl_estimate(logprobs, of_reference, "k2")
    (mean,) = torch.autograd.grad((k2 * logprobs.detach().exp()).sum(), logits)
    torch.testing.assert_close(mean, exact, rtol=1e-5, atol=1e-6)


def test_tokens_that_the_learner_never_samples_add_nothing_to_the_divergence():
    logits, reference = torch.tensor([[0.0, 1.0, float("-inf")]]), torch.tensor([[0.0, 1.0, float("-inf")]])
    logits.requires_grad_()
    value = exact_kl(logits, reference)
    (grads,) = torch.autograd.grad(value.sum(), logits)
    assert float(value.detach()) == pytest.approx(0.0, abs=1e-6) and grads.abs().max() < 1e-6
