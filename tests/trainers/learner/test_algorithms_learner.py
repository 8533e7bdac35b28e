"""Losses that look at whole sequences, and the entropy bonus, in the learner, against loops."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forge_agents.types import EpisodeBatch
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.core import LearnerCore

Batches = Callable[..., EpisodeBatch]


def config(model: Path, **changes: Any) -> LearnerConfig:
    return LearnerConfig(model=str(model), compute_dtype="float32", threads=1, **{"lr": 1e-3, **changes})


def mixed(random_batch: Batches, core: LearnerCore) -> EpisodeBatch:
    """A batch whose sampler is near the learner and whose neighbouring samples are one trajectory."""
    batch = random_batch(groups=4)
    samples, tokens = batch["samples"], batch["tokens"]
    samples["trajectory"] = torch.arange(len(samples["start"])) // 2
    torch.manual_seed(0)
    noise = 0.1 * torch.randn(tokens["ids"].shape) * tokens["loss_mask"]
    tokens["logprobs"] = (core.logprobs(batch) + noise).clamp(max=0)
    return batch


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
def test_the_learner_computes_the_formula_however_the_batch_is_cut(tiny_llama: Path, random_batch: Batches, name: str):
    big = LearnerCore(config(tiny_llama, loss=name, entropy_coef=0.01, correction="ratio"))
    small = LearnerCore(
        config(tiny_llama, loss=name, entropy_coef=0.01, correction="ratio", max_tokens_per_microbatch=100,
               loss_chunk_tokens=7, share_prefixes=False)
    )  # fmt: skip
    batch = mixed(random_batch, big)
    wanted = by_hand(batch, big.logprobs(batch), name)
    one, many = big.train_step(batch), small.train_step(batch)
    assert many["microbatches"] >= 4
    assert one["loss"] == pytest.approx(wanted - 0.01 * one["entropy"], rel=1e-4)
    for key in ("loss", "grad_norm", "entropy", "clip_fraction"):
        assert many[key] == pytest.approx(one[key], rel=1e-4), key


def test_a_sequence_correction_masks_whole_trajectories(tiny_llama: Path, random_batch: Batches):
    core = LearnerCore(config(tiny_llama, correction="mask", correction_level="sequence", lr=0.0))
    batch = mixed(random_batch, core)
    plain = core.train_step(batch)
    assert plain["corrected_fraction"] < 0.2 and plain["clip_fraction"] == 0.0
    first = int((batch["samples"]["length"][:2]).sum())  # both samples of the first trajectory
    own = batch["tokens"]["loss_mask"][:first]
    batch["tokens"]["logprobs"][:first] -= 5.0 * own / own.sum()
    share = float(own.sum() / batch["tokens"]["loss_mask"].sum())
    assert core.train_step(batch)["corrected_fraction"] == pytest.approx(plain["corrected_fraction"] + share, rel=1e-5)
