"""Metrics of a training step, and its checks."""

import asyncio
import dataclasses
import json
import resource
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from forge_agents.errors import DivergedError, MismatchError, RunFolderError
from forge_agents.types import EpisodeBatch
from forge_trainers.batch.packing import Sample
from forge_trainers.learner import measures
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.core import LearnerCore
from forge_trainers.learner.measures import peak_flops, ratio_quantiles
from forge_trainers.learner.plan import LearnerPlan
from forge_trainers.records.run_folder import dump_batch, load_batch
from forge_trainers.rl.config import GRPOConfig
from forge_trainers.rl.samples import StepSamples, pack_samples
from forge_trainers.rl.train_step import check_gap, train

Batches = Callable[..., EpisodeBatch]


def samples(*versions, policies=("hero",)):
    """Return one sample of two tokens per version, for every policy."""
    fields = {"loss_mask": (False, True, True), "logprobs": (0.0, -1.0, -2.0), "advantage": 1.0, "group": 0}
    samples = [Sample(token_ids=(1, 2, 3), versions=(-1, version, version), **fields) for version in versions]
    counts = {"used": 3, "failed": 1, "abstained": 0, "zero_variance": 1}
    return StepSamples(samples=dict.fromkeys(policies, samples), counts=counts, advantages={})


class Learner:
    def __init__(self, version=0, gap=0.0, error=None):
        self.version, self.gap, self.error = version, gap, error
        self.config = LearnerConfig(lr=3e-5)

    async def train_step(self, batch, **_):
        if self.error is not None:
            raise self.error
        return {"logprob_gap_mean": self.gap, "loss": 0.5}


def run(given, learners, folder, skipped=None, max_bad_logprobs=0.01, **settings):
    config = GRPOConfig(**settings)
    batches = pack_samples(given, max_bad_logprobs=max_bad_logprobs)
    return given.metrics(learners) | asyncio.run(
        train(batches, learners, config, step=12, folder=folder, skipped=skipped)
    )


def test_groups_ages_and_learners_are_reported(tmp_path):
    given = dataclasses.replace(samples(5, 4, 4), abstained=4, too_long=2, bad_logprobs={"hero": 0.01, "rival": 0.0})
    result = run(given, {"hero": Learner(5)}, tmp_path, max_staleness=2)
    assert result == {
        "groups/used": 3.0,
        "groups/failed": 1.0,
        "groups/abstained": 0.0,
        "groups/zero_variance": 1.0,
        "groups/zero_variance_fraction": 0.25,
        "dropped/abstained": 4.0,
        "dropped/too_long": 2.0,
        "dropped/bad_logprobs": 0.01,
        "staleness/max": 1.0,
        "staleness/0": 2.0,
        "staleness/1": 4.0,
        "staleness/2": 0.0,
        "learner/logprob_gap_mean": 0.0,
        "learner/loss": 0.5,
        "learner/skipped": 0.0,
    }
    two = run(samples(0, policies=("a", "b")), {"a": Learner(), "b": Learner()}, tmp_path)
    assert two["staleness/0"] == 4.0 and two["learner/a/loss"] == 0.5 and two["learner/b/loss"] == 0.5


def test_used_groups_of_each_policy_are_reported(tmp_path):
    result = run(dataclasses.replace(samples(0), used={"hero": 2}), {"hero": Learner(), "b": Learner()}, tmp_path)
    assert (result["groups/used"], result["groups/used/hero"], result["groups/used/b"]) == (3.0, 2.0, 0.0)


def test_step_without_samples_reports_zero(tmp_path):
    nothing = StepSamples(
        samples={}, counts={"used": 0, "failed": 2, "abstained": 0, "zero_variance": 0}, advantages={}
    )
    result = run(nothing, {"hero": Learner()}, tmp_path)
    assert result["staleness/max"] == result["staleness/0"] == 0 and np.isnan(result["groups/zero_variance_fraction"])


def test_samples_outside_the_policy_lag_are_refused(tmp_path):
    with pytest.raises(AssertionError, match="2 versions old. The loop allows 1"):
        run(samples(3), {"hero": Learner(5)}, tmp_path, max_staleness=1)
    with pytest.raises(ValueError, match="versions 6 to 6 reached a learner at version 5"):
        run(samples(6), {"hero": Learner(5)}, tmp_path)
    with pytest.raises(ValueError, match="versions -1 to 0"):
        run(samples(-1, 0), {"hero": Learner(0)}, tmp_path)


def test_invalid_logprobs_end_the_run_above_a_fraction(tmp_path):
    given = dataclasses.replace(samples(0), bad_logprobs={"hero": 0.02})
    with pytest.raises(DivergedError, match=r"sampler of hero gave invalid log-probabilities.*2\.00%.*1\.00%"):
        run(given, {"hero": Learner()}, tmp_path)
    assert run(given, {"hero": Learner()}, tmp_path, max_bad_logprobs=0.02)["dropped/bad_logprobs"] == 0.02
    all_masked = dataclasses.replace(given, samples={}, bad_logprobs={"hero": 1.0})
    with pytest.raises(DivergedError, match="100.00%"):
        run(all_masked, {"hero": Learner()}, tmp_path)


def test_non_finite_loss_saves_the_batch(tmp_path):
    once = Counter({"hero": 1})
    learner = Learner(7, error=FloatingPointError("the loss is nan at version 7"))
    with pytest.raises(DivergedError, match="policy hero: the loss is nan.*continues from the newest") as caught:
        run(samples(7, 7), {"hero": learner}, tmp_path, once)
    file = tmp_path / "failed-batches" / "step-000012-hero.safetensors"
    assert str(file) in str(caught.value)
    batch, facts = load_batch(file), json.loads(file.with_suffix(".json").read_text())
    assert batch["tokens"]["ids"].tolist() == [1, 2, 3, 1, 2, 3]
    assert batch["tokens"]["versions"].tolist() == [-1, 7, 7, -1, 7, 7]
    assert (facts["step"], facts["policy"], facts["learner"]["lr"]) == (12, "hero", 3e-5)
    assert "nan" in facts["error"]


def test_unwritable_batch_does_not_hide_the_error(tmp_path):
    (tmp_path / "failed-batches").write_text("")
    with pytest.raises(DivergedError, match="could not be written"):
        run(samples(0), {"hero": Learner(error=FloatingPointError("nan"))}, tmp_path, Counter({"hero": 1}))


def test_batch_for_which_the_disk_has_no_space_only_costs_its_file(tmp_path, caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        metrics = run(samples(0), {"hero": Learner(error=FloatingPointError("nan"))}, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert metrics["learner/skipped"] == 1.0 and "could not be written" in caplog.text
    assert not list((tmp_path / "failed-batches").iterdir())


def test_two_consecutive_non_finite_losses_end_the_run(tmp_path, caplog):
    bad, skipped = Learner(error=FloatingPointError("the loss is inf")), Counter[str]()

    def step(learner):
        learners = {"hero": learner, "rival": Learner()}
        return run(samples(0, policies=("hero", "rival")), learners, tmp_path, skipped)

    result = step(bad)
    assert result["learner/hero/skipped"] == 1.0 and "learner/hero/loss" not in result
    assert result["learner/rival/skipped"] == 0.0 and result["learner/rival/loss"] == 0.5
    assert "step 12 is skipped" in caplog.text and "step-000012-hero.safetensors" in caplog.text
    step(Learner())  # a valid step resets the count
    step(bad)
    with pytest.raises(DivergedError, match="policy hero: the loss is inf"):
        step(bad)


class PartlyFinite(Learner):
    """Skips one of four minibatches."""

    async def train_step(self, batch, **_):
        return {"logprob_gap_mean": 0.0, "loss": 0.5, "optimizer_steps": 3.0, "skipped_minibatches": 1.0}


def test_repeatedly_skipped_minibatches_end_the_run(tmp_path, caplog):
    skipped = Counter[str]()
    result = run(samples(0), {"hero": PartlyFinite()}, tmp_path, skipped)
    assert result["learner/skipped"] == 0.0 and result["learner/loss"] == 0.5, "the others were learned from"
    assert "1 of 4 minibatches of step 12 are skipped" in caplog.text and "step-000012-hero" in caplog.text
    run(samples(0), {"hero": Learner()}, tmp_path, skipped)
    assert skipped["hero"] == 0, "a step without one begins the count anew"
    run(samples(0), {"hero": PartlyFinite()}, tmp_path, skipped)
    with pytest.raises(DivergedError, match="policy hero: loss or gradient is not finite in 1 of 4 minibatches"):
        run(samples(0), {"hero": PartlyFinite()}, tmp_path, skipped)


def test_logprob_gap_ends_the_run_and_saves_the_batch(tmp_path):
    with pytest.raises(MismatchError, match=r"differ by 0.3 per token.*step-000012-hero.safetensors"):
        run(samples(4), {"hero": Learner(4, gap=0.3)}, tmp_path, max_logprob_gap=0.25)
    run(samples(4, 3), {"hero": Learner(4, gap=0.3)}, tmp_path, max_logprob_gap=0.25, max_staleness=1)
    with pytest.raises(MismatchError, match="differ by nan"):
        check_gap("hero", float("nan"), 0.2)


def test_files_that_are_no_batches_are_refused(tmp_path, random_batch):
    with pytest.raises(RunFolderError, match="cannot be read as a batch"):
        load_batch(tmp_path / "none.safetensors")
    batch = random_batch()
    file = dump_batch(batch, tmp_path / "b.safetensors", {})
    names = tuple(batch["tokens"].keys())
    assert len(names) == 6
    assert all(torch.equal(load_batch(file)["tokens"][name], batch["tokens"][name]) for name in names)
    batch["tokens"]["logprobs"][0] = float("nan")
    with pytest.raises(ValueError, match="logprobs of token 0"):
        load_batch(dump_batch(batch, file, {}))


def test_quantiles_are_tokens_ratios():
    ratios = torch.arange(1, 201, dtype=torch.float32)
    mask = torch.ones(202, dtype=torch.bool)
    mask[:2] = False
    shuffled = ratios[torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    result = ratio_quantiles(torch.cat([torch.tensor([99.0, -99.0]), shuffled.log()]), mask)
    assert result == pytest.approx({"ratio_p1": 2.0, "ratio_p50": 100.0, "ratio_p99": 198.0})
    one = ratio_quantiles(torch.zeros(1), torch.ones(1, dtype=torch.bool))
    assert one == {"ratio_p1": 1.0, "ratio_p50": 1.0, "ratio_p99": 1.0}


# ---- checks, with a real learner and a wrong sampler


TEMPERATURE = 0.8
LIMIT = 1e-3
"""Maximum gap of float32 against float32."""


@pytest.fixture(scope="module")
def core(tiny_llama):
    return learner(tiny_llama)


def learner(model, **changes):
    config = LearnerPlan(model=str(model), compute_dtype="float32", threads=1, lr=1e-3, temperature=TEMPERATURE)
    return LearnerCore(dataclasses.replace(config, **changes))


def gap(core, batch, sampler):
    """Return the mean gap that the loss reports for log-probabilities of `sampler`."""
    batch["tokens"]["logprobs"] = sampler.logprobs(batch)
    microbatches, _ = core._plan(batch)
    count = float(batch["tokens"]["loss_mask"].sum())
    result = [
        core._forward_backward(batch, microbatch, count, {})["logprob_gap_mean/mean"] for microbatch in microbatches
    ]
    core._loss.loss_fn.take_log_ratios()
    core._optimizers.zero_grad()
    return float(sum(result))


def guarded(core, batch, sampler):
    check_gap("hero", gap(core, batch, sampler), LIMIT)


def with_negated_row(model, folder, name):
    """Return a learner of a copy of a model in which one row of a matrix has another sign."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    weights[name][0] *= -1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return learner(folder)


def test_guard_passes_equal_models(core, tiny_llama, random_batch):
    batch, twin = random_batch(), learner(tiny_llama)
    guarded(core, batch, twin)
    assert gap(core, batch, twin) <= 1e-6


@pytest.mark.parametrize("matrix", ["model.layers.0.self_attn.o_proj.weight", "model.layers.1.mlp.down_proj.weight"])
def test_guard_refuses_another_temperature_and_corrupted_weights(core, tiny_llama, random_batch, tmp_path, matrix):
    for sampler in (learner(tiny_llama, temperature=0.9), with_negated_row(tiny_llama, tmp_path / "model", matrix)):
        with pytest.raises(MismatchError, match="temperature"):
            guarded(core, random_batch(), sampler)


def test_guard_refuses_a_stale_version(tiny_llama, random_batch):
    ahead, stale = learner(tiny_llama), learner(tiny_llama)
    ahead.train_step(random_batch())
    with pytest.raises(MismatchError):
        guarded(ahead, random_batch(), stale)


def test_every_step_reports_ratios_work_and_memory(tiny_llama, random_batch):
    core, batch = learner(tiny_llama, max_tokens_per_microbatch=100), random_batch(groups=4)
    now_T, mask_T = core.logprobs(batch), batch["tokens"]["loss_mask"]
    ratios = (now_T - batch["tokens"]["logprobs"])[mask_T].exp().sort().values
    result = core.train_step(batch)
    assert result["microbatches"] > 1
    for name, share in (("ratio_p1", 0.01), ("ratio_p50", 0.5), ("ratio_p99", 0.99)):
        place = int(np.ceil(share * len(ratios))) - 1
        assert result[name] == pytest.approx(float(ratios[place]), rel=1e-4)
    # six operations per weight and position, and 6 x layers x heads x (key + value size) x length for attention
    weights = sum(p.numel() for p in core.model.parameters())
    lengths = batch["samples"]["length"].double()
    config = json.loads((tiny_llama / "config.json").read_text())
    attention = 6 * config["num_hidden_layers"] * 2 * config["hidden_size"] * float((lengths**2).sum() / lengths.sum())
    flops = result["positions"] * (6 * weights + attention)
    assert result["flops_per_s"] * result["step_s"] == pytest.approx(flops, rel=1e-6)
    assert result["mfu"] == pytest.approx(result["flops_per_s"] / result["peak_flops_per_s"])
    assert result["peak_flops_per_s"] == peak_flops(torch.float32) > 1e8
    assert result["peak_rss_bytes"] > 1e8 and "peak_device_bytes" not in result


def test_peak_of_a_slow_processor_is_measured_with_one_product(monkeypatch):
    products, mm = [], torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **options: products.append(mm(*args, **options)))
    monkeypatch.setattr(measures, "_MEASURED_S", 0.0)
    assert peak_flops.__wrapped__(torch.float32) > 1e8 and len(products) == 1


def test_non_finite_loss_leaves_the_weights_unchanged(tiny_llama, random_batch):
    core, batch = learner(tiny_llama, lr=0.1), random_batch()
    before = core.hf_state_dict(dtype=torch.float32)
    reported = core._reduce

    def broken(totals):
        return {**reported(totals), "loss": float("nan")}

    core._reduce = broken
    with pytest.raises(FloatingPointError, match="the loss is nan and the gradient norm"):
        core.train_step(batch)
    after = core.hf_state_dict(dtype=torch.float32)
    assert core.version == 0 and all(torch.equal(before[name], after[name]) for name in before)


def test_memory_stays_flat(core, random_batch):
    """Compare resident memory after 10 steps and after 30 more, with different batches."""

    def after(steps):
        for step in steps:
            core.train_step(random_batch(seed=step))
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    warm = after(range(10))
    assert after(range(10, 40)) - warm < 16e6
