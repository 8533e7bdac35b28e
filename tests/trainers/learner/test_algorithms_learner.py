"""Losses that look at whole sequences, and the entropy bonus, in the learner, against loops."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from learner_helpers import config, near_sampler

from forge_agents.types import EpisodeBatch
from forge_trainers.learner.core import LearnerCore
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.losses.correction import needed_samples
from forge_trainers.losses.registry import Correction, Loss, find_loss


def by_hand(batch: EpisodeBatch, now_T: torch.Tensor, name: str) -> float:
    """The loss from the learner's log-probabilities, trajectory by trajectory."""
    tokens, samples = batch["tokens"], batch["samples"]
    sequences: dict[int, list[int]] = {}
    for start, length, number in zip(*(samples[k].tolist() for k in ("start", "length", "trajectory")), strict=True):
        places = [t for t in range(start, start + length) if tokens["loss_mask"][t]]
        sequences.setdefault(number, []).extend(places)
    rows = []
    for places in sequences.values():
        gaps = [float(now_T[t] - tokens["logprobs"][t]) for t in places]
        s = math.exp(sum(gaps) / len(gaps))
        terms = []
        for t, gap in zip(places, gaps, strict=True):
            a = float(tokens["advantages"][t])
            r, low, high = (s, 1 - 3e-4, 1 + 4e-4) if name == "gspo" else (math.exp(gap), 0.8, 1.2)
            terms.append(-r * a * float(now_T[t]) if name == "rloo" else -min(r * a, min(max(r, low), high) * a))
        rows.append(sum(terms) / (1 if name == "rloo" else len(terms)))
    return sum(rows) / len(rows)


@pytest.mark.parametrize("name", ["grpo", "gspo", "rloo"])
def test_the_learner_computes_the_formula_however_the_batch_is_cut(tiny_llama, random_batch, name):
    big = LearnerCore(config(tiny_llama, loss=name, entropy_coef=0.01, correction="ratio"))
    small = LearnerCore(
        config(tiny_llama, loss=name, entropy_coef=0.01, correction="ratio", max_tokens_per_microbatch=100,
               loss_chunk_tokens=7, share_prefixes=False)
    )  # fmt: skip
    batch = near_sampler(random_batch(groups=4), big)
    expected = by_hand(batch, big.logprobs(batch), name)
    one, many = big.train_step(batch), small.train_step(batch)
    assert many["microbatches"] >= 4
    assert one["loss"] == pytest.approx(expected - 0.01 * one["entropy"], rel=1e-4)
    for key in ("loss", "grad_norm", "entropy", "clip_fraction", "ratio_mean", "logprob_gap_max"):
        assert many[key] == pytest.approx(one[key], rel=1e-5), key


def test_a_sequence_correction_masks_whole_trajectories(tiny_llama, random_batch):
    core = LearnerCore(config(tiny_llama, correction=Correction(how="mask", level="sequence"), lr=0.0))
    batch = near_sampler(random_batch(groups=4), core)
    plain = core.train_step(batch)
    assert plain["corrected_fraction"] < 0.2 and plain["clip_fraction"] == 0.0
    first = int((batch["samples"]["length"][:2]).sum())  # both samples of the first trajectory
    own = batch["tokens"]["loss_mask"][:first]
    batch["tokens"]["logprobs"][:first] -= 5.0 * own / own.sum()
    share = float(own.sum() / batch["tokens"]["loss_mask"].sum())
    assert core.train_step(batch)["corrected_fraction"] == pytest.approx(plain["corrected_fraction"] + share, rel=1e-5)


def without_advantage(batch: EpisodeBatch, trajectories: list[int]) -> torch.Tensor:
    """Set the advantages of some trajectories to 0. Returns a mask of their samples, bool [n]."""
    samples = batch["samples"]
    gone_n = torch.isin(samples["trajectory"], torch.tensor(trajectories))
    batch["tokens"]["advantages"][gone_n.repeat_interleave(samples["length"])] = 0.0
    return gone_n


@pytest.mark.parametrize(
    "changes", [{"loss": "dapo"}, {"loss": "grpo"}, {"loss": "gspo"}, {"loss": "gspo", "correction": "ratio"},
                {"loss": "dr_grpo", "max_tokens_per_microbatch": 100}, {"loss": "cispo", "sequence": "turn"}], ids=str
)  # fmt: skip
def test_trajectories_without_advantage_count_only_in_the_normalization(tiny_llama, random_batch, monkeypatch, changes):
    class Kept(LearnerCore):
        def _update(self, loss: float, lr: float) -> dict[str, float]:
            self.kept = {name: p.grad.clone() for name, p in self.model.named_parameters()}
            return super()._update(loss, lr)

    core = Kept(config(tiny_llama, lr=0.0, **changes))
    batch = near_sampler(random_batch(groups=4), core)
    gone_n = without_advantage(batch, [0, 3, 5])
    result, gradients = core.train_step(batch), core.kept
    with monkeypatch.context() as patch:
        patch.setattr("forge_trainers.learner.core.needed_samples", lambda _, batch: torch.ones_like(gone_n))
        every, expected = core.train_step(batch), core.kept
    assert result["positions"] < 0.8 * every["positions"]
    assert result["loss"] == pytest.approx(every["loss"], rel=1e-6, abs=1e-7)  # a sum of terms near 1
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).norm() <= 1e-6 * expected[name].norm(), name
    # metrics are those of what is computed
    mask_T, gone_T = batch["tokens"]["loss_mask"], gone_n.repeat_interleave(batch["samples"]["length"])
    share = float((mask_T & gone_T).sum() / mask_T.sum())
    assert result["not_computed"] == pytest.approx(share) and every["not_computed"] == 0.0
    assert result["loss_tokens"] == float((mask_T & ~gone_T).sum())
    assert result["tokens"] == float(batch["samples"]["length"][~gone_n].sum())
    gap_S = (core.logprobs(batch) - batch["tokens"]["logprobs"])[mask_T & ~gone_T].sort().values
    assert result["logprob_gap_mean"] == pytest.approx(float(gap_S.abs().mean()), rel=1e-4)
    assert result["ratio_mean"] == pytest.approx(float(gap_S.exp().mean()), rel=1e-4)
    assert result["ratio_p50"] == pytest.approx(float(gap_S[math.ceil(len(gap_S) / 2) - 1].exp()), rel=1e-4)


def test_samples_without_advantage_are_computed_if_they_change_the_loss(random_batch):
    def needed(batch: EpisodeBatch, **changes: Any) -> list[bool]:
        result: list[bool] = needed_samples(LearnerPlan(**changes).loss_settings, batch).tolist()
        return result

    batch = random_batch()
    gone = without_advantage(batch, batch["samples"]["trajectory"][[1, 4]].tolist())
    assert needed(batch) == (~gone).tolist()
    start = int(batch["samples"]["start"][1])
    batch["tokens"]["advantages"][start : start + int(batch["samples"]["length"][1])] = 1e-16
    assert needed(batch) == (~gone).tolist(), "what rounding leaves of a mean"
    assert all(needed(batch, kl_coef=0.01)) and all(needed(batch, entropy_coef=0.01))
    monkey = Loss(name="monkey", function=find_loss("dapo").function)
    assert needed_samples(dataclasses.replace(LearnerPlan().loss_settings, loss=monkey), batch).all(), "not ours"
    batch["samples"]["trajectory"][1] = batch["samples"]["trajectory"][0]
    assert needed(batch)[1], "the other sample of its trajectory has an advantage"
    without_advantage(batch, batch["samples"]["trajectory"].tolist())
    assert all(needed(batch)), "something has to be computed"
