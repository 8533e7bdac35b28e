"""The losses against those of TRL's ``GRPOTrainer`` on the same tensors. Skipped if TRL is not installed."""

from __future__ import annotations

import collections
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from batch_helpers import sample_of

from forge_trainers.batch.packing import pack
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.losses.correction import correction_weights, loss_columns
from forge_trainers.losses.policy_loss import PolicyLoss
from forge_trainers.losses.registry import Correction, TokenInputs, TokenLoss

VOCAB, LONGEST, PROMPT = 11, 9, 2
LENGTHS = (9, 1, 4, 7, 2, 5)


@pytest.fixture(scope="module")
def trl() -> Any:
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        pytest.importorskip("trl")
        try:
            from trl import import_utils

            patch.setattr(import_utils, "is_vllm_available", lambda *_, **__: False)  # its import takes 4 CPU-s
            from trl import GRPOTrainer
        except Exception as cause:  # noqa: BLE001  (whatever a peer's optional imports raise)
            pytest.skip(f"TRL does not load here: {cause}")
    return GRPOTrainer


class Same:
    """Random ragged responses: packed for us, padded for TRL."""

    def __init__(self, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        n = sum(LENGTHS)
        self.logits = 1.5 * torch.randn(n, VOCAB, generator=rng)
        self.labels = torch.randint(0, VOCAB, (n,), generator=rng)
        now = self.logprobs(self.logits).float()
        self.sampler, self.reference = ((now + 0.3 * torch.randn(n, generator=rng)).clamp(max=0) for _ in range(2))
        self.advantages = torch.randn(len(LENGTHS), generator=rng)
        self.mask = torch.arange(LONGEST)[None] < torch.tensor(LENGTHS)[:, None]

    def logprobs(self, logits: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits.double(), -1).gather(1, self.labels[:, None]).squeeze(1)

    def padded(self, flat: torch.Tensor) -> torch.Tensor:
        return torch.zeros(self.mask.shape, dtype=flat.dtype).masked_scatter(self.mask, flat)

    def ours(self, config: LearnerConfig) -> tuple[float, torch.Tensor]:
        samples, start = [], 0
        for length, advantage in zip(LENGTHS, self.advantages.tolist(), strict=True):
            part = slice(start, start + length)
            ids = (*(0,) * PROMPT, *self.labels[part].tolist())
            logprobs = (*(0.0,) * PROMPT, *self.sampler[part].tolist())
            samples.append(sample_of(ids, length, logprobs=logprobs, advantage=advantage))
            start += length
        tokens = (batch := pack(samples))["tokens"]
        mask_T, n = tokens["loss_mask"], sum(LENGTHS)

        def before() -> torch.Tensor:
            return torch.zeros(mask_T.shape).masked_scatter(mask_T, self.logprobs(self.logits).float())

        columns = {"sampler_logprobs": tokens["logprobs"], "advantages": tokens["advantages"]}
        columns |= loss_columns(config.loss_settings, batch, before)
        inputs = {name: column[mask_T][None] for name, column in columns.items()}
        if config.kl_coef:
            inputs["reference_logprobs"] = self.reference[None]
        logits = self.logits.clone().requires_grad_()
        loss, _ = PolicyLoss(config.loss_settings)(
            logits[None], self.labels[None], float(n), valid=torch.ones(1, n, dtype=torch.bool), **inputs
        )
        return float(loss.detach()), torch.autograd.grad(loss, logits)[0]

    def theirs(self, trainer: Any, *, correction: torch.Tensor | None = None, **settings: Any) -> Any:
        """Loss and gradient of ``GRPOTrainer._compute_loss`` on a trainer without a model."""
        args = {"delta": None, "use_bias_correction_kl": False, "sapo_temperature_pos": 1.0,
                "sapo_temperature_neg": 1.05, "steps_per_generation": 1}  # fmt: skip
        logits = self.logits.double().requires_grad_()
        logp = torch.log_softmax(logits, -1)
        result = self.padded(logp.gather(1, self.labels[:, None]).squeeze(1))
        entropies = self.padded(-(logp.exp() * logp).sum(1))
        fake = trainer.__new__(trainer)
        same = SimpleNamespace(gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x)
        same.num_processes, same.sync_gradients = 1, True
        state = {
            "args": SimpleNamespace(**args), "model": SimpleNamespace(training=True), "accelerator": same,
            "loss_type": "grpo", "beta": 0.0,
            "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.28,
            "max_completion_length": LONGEST, "use_vllm": correction is not None,
            "vllm_importance_sampling_correction": correction is not None, "current_gradient_accumulation_steps": 1,
            "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "aux_loss_enabled": False,
            "use_adaptive_entropy": False, "entropy_coef": 0.0, "_entropy_bonus_enabled": False,
            "_metrics": collections.defaultdict(lambda: collections.defaultdict(list)),
            "_get_per_token_logps_and_entropies": lambda *a, **k: (result, entropies, None),
        }  # fmt: skip
        for name, value in (state | settings).items():
            object.__setattr__(fake, name, value)
        ids = torch.zeros(self.mask.shape, dtype=torch.int64)
        inputs = {
            "prompt_ids": ids[:, :PROMPT], "prompt_mask": torch.ones_like(ids[:, :PROMPT]), "completion_ids": ids,
            "completion_mask": self.mask.long(), "advantages": self.advantages.double(),
            "old_per_token_logps": result.detach() if correction is not None else self.padded(self.sampler).double(),
            "ref_per_token_logps": self.padded(self.reference).double(),
            "num_items_in_batch": torch.tensor(float(sum(LENGTHS))),
            "importance_sampling_ratio": correction,
        }  # fmt: skip
        loss = fake._compute_loss(fake.model, inputs)
        return float(loss.detach()), torch.autograd.grad(loss, logits)[0]


def agree(ours: tuple[float, torch.Tensor], theirs: tuple[float, torch.Tensor]) -> None:
    assert ours[0] == pytest.approx(theirs[0], rel=2e-5, abs=1e-6)
    assert (ours[1] - theirs[1]).norm() < 2e-5 * theirs[1].norm()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ({"loss": "grpo"}, {"loss_type": "grpo", "epsilon_high": 0.2}),
        ({"loss": "dapo"}, {"loss_type": "dapo"}),
        ({"loss": "reinforce_pp"}, {"loss_type": "bnpo", "epsilon_high": 0.2}),
        ({"loss": "dr_grpo"}, {"loss_type": "dr_grpo", "epsilon_high": 0.2, "max_completion_length": 2048}),
        ({"loss": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0}),
        ({"loss": "cispo", "clip": (1.0, 0.1)}, {"loss_type": "cispo", "epsilon_high": 1.1}),
        (
            {"loss": "gspo", "clip": (0.05, 0.1)},
            {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.1},
        ),
        ({"loss": "grpo", "kl_coef": 0.2, "clip": (0.2, 0.28)}, {"beta": 0.2}),
        ({"loss": "dapo", "kl_coef": 0.2}, {"loss_type": "dapo", "beta": 0.2}),
        (
            {"loss": "grpo", "entropy_coef": 0.1},
            {"epsilon_high": 0.2, "entropy_coef": 0.1, "_entropy_bonus_enabled": True},
        ),
    ],
    ids=str,
)
def test_losses_and_gradients_equal_trls(trl, seed, config, settings):
    same = Same(seed)
    agree(same.ours(LearnerConfig(**config)), same.theirs(trl, **settings))


@pytest.mark.parametrize("how", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_corrections_equal_trls(trl, how, level):
    same = Same(11)
    gap = same.padded((same.logprobs(same.logits) - same.sampler).float())
    if level == "sequence":
        gap = gap.sum(1, keepdim=True)
    ratio = gap.exp()  # as GRPOTrainer's "token_truncate", "sequence_mask" and so on
    ratio = ratio.clamp(max=1.3) if how == "truncate" else ratio.masked_fill((ratio < 0.7) | (ratio > 1.3), 0.0)
    config = LearnerConfig(loss="grpo", correction=Correction(how=how, level=level, low=0.7, high=1.3))
    agree(same.ours(config), same.theirs(trl, correction=ratio.double()))
    weight, acted = correction_weights(gap, how, low=0.7, high=1.3)
    assert torch.allclose(weight, ratio) and float(acted.sum()) > 0


def test_a_users_loss_equals_trls(trl, monkeypatch):
    """SAPO (arXiv 2511.20347) as a user would write it."""
    from forge_trainers.losses import registry as algorithms

    monkeypatch.setattr(algorithms, "_losses", dict(algorithms._losses))

    @algorithms.register_loss("sapo", reduction="sequence_mean")
    def sapo(inputs: TokenInputs) -> TokenLoss:
        a = inputs.advantages_S
        heat = torch.where(a > 0, 1.0, 1.05)
        gate = torch.sigmoid(heat * (inputs.log_ratio_S.exp() - 1)) * 4 / heat
        return TokenLoss(-gate * a, torch.zeros_like(a))

    same = Same(7)
    agree(same.ours(LearnerConfig(loss="sapo")), same.theirs(trl, loss_type="sapo"))
