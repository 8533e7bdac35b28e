"""Several optimizer steps per batch: passes over the batch and minibatches."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_helpers import config, equal, weights

from forge_agents.policy import LoRA
from forge_agents.types import EpisodeBatch
from forge_trainers.batch.packing import check_batch, minibatches
from forge_trainers.learner.core import LearnerCore
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.losses.registry import Correction, TokenInputs, TokenLoss, register_loss
from forge_trainers.rl.config import GRPOConfig

SEEN: list[torch.Tensor] = []
"""Log-ratios that the loss below got, by call."""


@register_loss("seen_clip_higher", clip=(0.2, 0.28), correction=None)
def seen_clip_higher(inputs: TokenInputs) -> TokenLoss:
    SEEN.append(inputs.log_ratio_S.detach().clone())
    ratio_S = inputs.log_ratio_S.exp()
    plain_S = ratio_S * inputs.advantages_S
    limited_S = ratio_S.clamp(1 - inputs.clip_low, 1 + inputs.clip_high) * inputs.advantages_S
    return TokenLoss(-plain_S.minimum(limited_S), (limited_S < plain_S).float())


def core(model: Path, **changes: Any) -> LearnerCore:
    return LearnerCore(config(model, **{"lr": 1e-2, **changes}))


def with_own_logprobs(batch: EpisodeBatch, model: Path) -> EpisodeBatch:
    """The batch as if the model itself had sampled it."""
    fresh = batch.clone()
    fresh["tokens"]["logprobs"] = core(model).logprobs(batch)
    return fresh


def test_minibatches_are_whole_groups_in_order(random_batch):
    batch = random_batch(groups=5, siblings=3)
    parts = minibatches(batch, 2)
    assert [part["samples"]["group"].unique().tolist() for part in parts] == [[0, 1, 2], [3, 4]]
    for part in parts:
        check_batch(part)
    for name in ("ids", "loss_mask", "logprobs", "advantages", "versions", "turn"):
        assert torch.equal(torch.cat([part["tokens"][name] for part in parts]), batch["tokens"][name])
    assert torch.equal(torch.cat([part["samples"]["trajectory"] for part in parts]), batch["samples"]["trajectory"])
    assert len(minibatches(batch, 9)) == 5, "a group stays whole"
    assert minibatches(batch, 1)[0] is batch


def test_a_group_without_loss_tokens_makes_no_minibatch(random_batch):
    batch = random_batch(groups=3, siblings=2)
    batch["tokens"]["loss_mask"][batch["samples"]["group"].repeat_interleave(batch["samples"]["length"]) == 1] = False
    assert [part["samples"]["group"].unique().tolist() for part in minibatches(batch, 3)] == [[0], [2]]


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo", "rloo"])
def test_two_minibatches_are_two_steps_on_their_groups(tiny_llama, random_batch, loss):
    batch = random_batch(groups=4)
    together = core(tiny_llama, loss=loss, num_minibatches=2)
    apart = core(tiny_llama, loss=loss)
    result = together.train_step(batch)
    by_hand = [apart.train_step(part) for part in minibatches(batch, 2)]
    assert equal(weights(together), weights(apart))
    assert (together.version, apart.version) == (1, 2), "a batch is one version of the weights"
    for name in ("loss", "clip_fraction", "grad_norm", "entropy", "ratio_mean"):
        assert result[name] == pytest.approx(sum(step[name] for step in by_hand) / 2, rel=1e-12)
    assert result["optimizer_steps"] == 2 and result["skipped_minibatches"] == 0
    assert result["tokens"] == sum(step["tokens"] for step in by_hand)
    assert result["positions"] == sum(step["positions"] for step in by_hand)
    assert result["logprob_gap_mean"] == by_hand[0]["logprob_gap_mean"], "before anything was learned"


def test_two_iterations_are_two_steps_on_the_same_batch(tiny_llama, random_batch):
    batch = random_batch()
    together, apart = core(tiny_llama, num_iterations=2), core(tiny_llama)
    result = together.train_step(batch)
    first, second = apart.train_step(batch), apart.train_step(batch)
    assert equal(weights(together), weights(apart))
    assert result["loss"] == pytest.approx((first["loss"] + second["loss"]) / 2)
    assert result["ratio_p99"] == second["ratio_p99"] and result["tokens"] == first["tokens"]
    assert result["positions"] == 2 * first["positions"]


@pytest.mark.parametrize("correction", ["ratio", "truncate", "mask", "none"])
def test_the_clip_acts_from_the_second_optimizer_step_on(tiny_llama, random_batch, correction):
    batch = with_own_logprobs(random_batch(groups=4), tiny_llama)
    settings: dict[str, Any] = {"loss": "seen_clip_higher", "correction": correction, "lr": 0.1}
    assert core(tiny_llama, **settings).train_step(batch)["clip_fraction"] == 0
    for several in ({"num_iterations": 2}, {"num_minibatches": 4}):
        SEEN.clear()
        result = core(tiny_llama, **settings, **several).train_step(batch)
        assert result["clip_fraction"] > 0.05
        assert SEEN[0].abs().max() < 1e-5, "the first minibatch is as it was sampled"
        assert SEEN[-1].abs().max() > 0.1


def test_ratios_are_to_the_learner_at_the_start_and_corrections_stay(tiny_llama, random_batch):
    """Samples of another policy, decoupled: r = now / start, and each token weighs min(start / sampler, high)."""
    batch = random_batch()  # log-probabilities of no model
    settings: dict[str, Any] = {"loss": "seen_clip_higher", "correction": Correction(how="truncate", high=1.5)}
    start_T = core(tiny_llama).logprobs(batch)
    SEEN.clear()
    one = core(tiny_llama, **settings)
    alone = one.train_step(batch)
    moved_T = one.logprobs(batch)
    SEEN.clear()
    result = core(tiny_llama, **settings, num_iterations=2).train_step(batch)
    mask_T = batch["tokens"]["loss_mask"]
    second_S, wanted_S = torch.cat(SEEN[len(SEEN) // 2 :]), (moved_T - start_T)[mask_T]
    assert (wanted_S[:, None] - second_S).abs().min(1).values.max() < 1e-4 and wanted_S.abs().max() > 0.05
    weight_T = (start_T - batch["tokens"]["logprobs"]).exp().clamp(max=1.5)[mask_T]
    assert alone["correction"] == pytest.approx(float(weight_T.mean()), rel=1e-4)
    assert result["correction"] == pytest.approx(float(weight_T.mean()), rel=1e-4), "the same in both passes"


def test_gspo_clips_sequences_by_their_ratio_to_the_batch_start(tiny_llama, random_batch):
    batch = with_own_logprobs(random_batch(groups=4), tiny_llama)
    assert core(tiny_llama, loss="gspo").train_step(batch)["clip_fraction"] == 0
    result = core(tiny_llama, loss="gspo", num_iterations=2).train_step(batch)
    assert 0.2 < result["clip_fraction"] <= 0.5, "none in the first pass, most in the second"


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "grpo", "kl_coef": 0.1, "entropy_coef": 0.01},
        {"loss": "gspo"},
        {"correction": Correction(how="mask", level="sequence")},
        {"lora": LoRA(rank=4), "kl_coef": 0.1},
    ],
)
def test_layout_does_not_change_several_optimizer_steps(tiny_llama, random_batch, settings):
    """One packed row with shared prefixes, or a pass for every sample without: the same steps."""
    batch = random_batch(groups=4)
    several = {"num_iterations": 2, "num_minibatches": 2, "lr": 1e-3, **settings}
    packed = core(tiny_llama, **several)
    single = core(tiny_llama, **several, max_tokens_per_microbatch=2, share_prefixes=False, loss_chunk_tokens=8)
    a, b = packed.train_step(batch), single.train_step(batch)
    assert b["microbatches"] > a["microbatches"]
    for name in ("loss", "grad_norm", "clip_fraction", "kl", "correction", "ratio_p99"):
        assert a[name] == pytest.approx(b[name], rel=2e-3, abs=1e-6)


def test_a_resumed_run_repeats_several_optimizer_steps_bit_for_bit(tiny_llama, random_batch, tmp_path):
    several = {"num_iterations": 2, "num_minibatches": 3, "warmup_steps": 3, "correction": "truncate"}
    batches = [random_batch(groups=4, seed=seed) for seed in range(3)]
    whole, first, second = (core(tiny_llama, **several) for _ in range(3))
    rows = [whole.train_step(batch) for batch in batches]
    first.train_step(batches[0])
    first.save(tmp_path / "one")
    assert second.load(tmp_path / "one") == 1
    again = [second.train_step(batch) for batch in batches[1:]]
    assert equal(weights(whole), weights(second))
    assert [row["lr"] for row in rows] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2]), "one rate for all of a batch"
    for row, repeated in zip(rows[1:], again, strict=True):
        assert all(row[name] == repeated[name] for name in ("loss", "grad_norm", "clip_fraction", "version"))


@register_loss("nan_at_marked", correction=None)
def nan_at_marked(inputs: TokenInputs) -> TokenLoss:
    """Not finite where an advantage is 7."""
    loss_S = -inputs.log_ratio_S.exp() * inputs.advantages_S
    loss_S = loss_S + torch.where(inputs.advantages_S == 7.0, math.nan, 0.0)
    return TokenLoss(loss_S, torch.zeros_like(loss_S))


def marked(batch: EpisodeBatch, *groups: int) -> EpisodeBatch:
    batch = batch.clone()
    group_T = batch["samples"]["group"].repeat_interleave(batch["samples"]["length"])
    batch["tokens"]["advantages"][torch.isin(group_T, torch.tensor(groups)) & batch["tokens"]["loss_mask"]] = 7.0
    return batch


def test_a_minibatch_that_is_not_finite_is_skipped_alone(tiny_llama, random_batch):
    batch = random_batch(groups=3)
    one, other = core(tiny_llama, loss="nan_at_marked", num_minibatches=3), core(tiny_llama, loss="nan_at_marked")
    result = one.train_step(marked(batch, 1))
    parts = minibatches(batch, 3)
    by_hand = [other.train_step(parts[0]), other.train_step(parts[2])]
    assert equal(weights(one), weights(other))
    assert (result["optimizer_steps"], result["skipped_minibatches"], one.version) == (2, 1, 1)
    assert result["loss"] == pytest.approx(sum(step["loss"] for step in by_hand) / 2)
    assert all(math.isfinite(value) for value in result.values())


def test_a_batch_without_a_finite_minibatch_changes_nothing(tiny_llama, random_batch):
    one = core(tiny_llama, loss="nan_at_marked", num_minibatches=2, num_iterations=2)
    before = {name: value.clone() for name, value in weights(one).items()}
    with pytest.raises(FloatingPointError, match="weights are unchanged"):
        one.train_step(marked(random_batch(groups=2), 0, 1))
    assert equal(before, weights(one)) and one.version == 0


@pytest.mark.parametrize("name", ["num_iterations", "num_minibatches"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_numbers_of_optimizer_steps_are_whole_and_positive(name, value):
    with pytest.raises((TypeError, ValueError), match=f"{name}=.*(whole number|at least 1)"):
        LearnerPlan(**{name: value})


def test_more_minibatches_than_groups_are_refused():
    with pytest.raises(ValueError, match="num_minibatches=9 is more than groups_per_step=8"):
        GRPOConfig(learner=LearnerPlan(num_minibatches=9))
    assert GRPOConfig(learner=LearnerPlan(num_minibatches=8)).learner.num_minibatches == 8


def test_each_optimizer_step_clips_its_own_gradient(tiny_llama, random_batch):
    batch = random_batch(groups=2)
    settings = {"max_grad_norm": 1e-3, "betas": (0.0, 0.0)}
    together, apart = core(tiny_llama, num_minibatches=2, **settings), core(tiny_llama, **settings)
    together.train_step(batch)
    for part in minibatches(batch, 2):
        apart.train_step(part)
    assert equal(weights(together), weights(apart))
    assert dataclasses.replace(apart.config, num_minibatches=2) == together.config
