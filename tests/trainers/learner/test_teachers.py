"""On-policy distillation: the divergence from one teacher or from a teacher for each agent."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_helpers import sample_of
from learner_helpers import check_resume, config, hf_model
from safetensors.torch import load_file, save_file

from forge_agents.errors import ModelNotFoundError
from forge_agents.models.tiny import tiny_model
from forge_agents.policy import LoRA
from forge_agents.runtime import mesh
from forge_agents.types import EpisodeBatch
from forge_trainers.batch.packing import pack
from forge_trainers.learner.client import Learner
from forge_trainers.learner.core import LearnerCore
from forge_trainers.losses.registry import find_loss

AGENTS = ("planner", "editor", "tester")


@pytest.fixture(scope="module")
def teachers(tiny_models, tmp_path_factory) -> dict[str, Path]:
    """Teachers of other weights and another architecture."""
    other = tiny_model(tmp_path_factory.mktemp("teacher"), seed=5)
    return dict(zip(AGENTS, (other, tiny_models(family="qwen3"), other), strict=True))


def of_agents(batch: EpisodeBatch) -> EpisodeBatch:
    """The batch with samples of three agents in turn."""
    numbers = torch.tensor([zlib.crc32(agent.encode()) for agent in AGENTS])
    batch["samples"]["agent"] = numbers[torch.arange(len(batch["samples"]["length"])) % 3]
    return batch


def plain(  # noqa: PLR0917
    student: Path, teacher_of: dict[str, Path], batch: EpisodeBatch, kl: str, coef: float, temperature: float
) -> tuple[float, float, dict[str, float]]:
    """Value of the divergence, norm of the gradient and divergence by agent, in float64 by transformers."""
    models = {folder: hf_model(folder).double() for folder in {student, *teacher_of.values()}}
    samples, tokens = batch["samples"], batch["tokens"]
    names = {zlib.crc32(agent.encode()): agent for agent in teacher_of}
    values: dict[str, list[torch.Tensor]] = {}
    for i, (start, n) in enumerate(zip(samples["start"].tolist(), samples["length"].tolist(), strict=True)):
        ids, mask = tokens["ids"][start : start + n], tokens["loss_mask"][start : start + n][1:]
        agent = names[int(samples["agent"][i])]
        log_p = torch.log_softmax(models[student](ids[None]).logits[0, :-1] / temperature, -1)
        with torch.no_grad():
            log_q = torch.log_softmax(models[teacher_of[agent]](ids[None]).logits[0, :-1] / temperature, -1)
        if kl == "exact":
            value = (log_p.exp() * (log_p - log_q)).sum(-1)
        else:
            value = (log_q - log_p).gather(1, ids[1:, None]).squeeze(1).square() / 2
        values.setdefault(agent, []).append(value[mask])
    by_agent = {agent: torch.cat(parts) for agent, parts in values.items()}
    mean = torch.cat([*by_agent.values()]).mean()
    (coef * mean).backward()
    norms = [p.grad.norm() for p in models[student].parameters() if p.grad is not None]
    return float(mean), float(torch.stack(norms).norm()), {agent: float(v.mean()) for agent, v in by_agent.items()}


@pytest.mark.parametrize("kl", ["exact", "k2"])
@pytest.mark.parametrize("temperature", [1.0, 0.8])
@pytest.mark.parametrize("many", [True, False], ids=["teams", "one"])
def test_divergence_and_gradient_equal_float64(  # noqa: PLR0917
    tiny_llama, teachers, random_batch, kl, temperature, many
):
    batch = of_agents(random_batch(groups=4))
    chosen = teachers if many else dict.fromkeys(AGENTS, teachers["editor"])
    value, norm, by_agent = plain(tiny_llama, chosen, batch, kl, 0.5, temperature)
    reference: Any = {agent: str(folder) for agent, folder in chosen.items()} if many else str(chosen["editor"])
    settings = {"loss": "distill", "reference": reference, "kl_coef": 0.5, "kl": kl, "loss_chunk_tokens": 20}
    core = LearnerCore(config(tiny_llama, temperature=temperature, max_tokens_per_microbatch=120, **settings))
    metrics = core.train_step(batch)
    assert metrics["microbatches"] >= (3 if many else 2)
    assert metrics["kl"] == pytest.approx(value, rel=1e-4)
    assert metrics["loss"] == pytest.approx(0.5 * value, rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert {name: metrics[f"kl/{name}"] for name in by_agent if many} == pytest.approx(
        by_agent if many else {}, rel=1e-4
    )
    assert metrics["loss_tokens"] == float(batch["tokens"]["loss_mask"].sum())


@pytest.mark.parametrize("lora", [None, LoRA(rank=8, alpha=16)], ids=["weights", "adapter"])
@pytest.mark.parametrize("kl", ["exact", "k2"])
def test_student_of_a_team_comes_nearer_to_each_teacher(tiny_llama, teachers, random_batch, lora, kl):
    batch = of_agents(random_batch())
    reference = {agent: str(folder) for agent, folder in teachers.items()}
    settings = {"loss": "distill", "reference": reference, "kl_coef": 1.0, "kl": kl, "lora": lora, "lr": 3e-3}
    core = LearnerCore(config(tiny_llama, **settings))
    assert len(core._reference.models) == 2, "agents share a teacher"
    steps = [core.train_step(batch) for _ in range(6)]
    for agent in AGENTS:
        assert 0 < steps[-1][f"kl/{agent}"] < 0.95 * steps[0][f"kl/{agent}"]


def test_advantages_change_nothing_and_all_trajectories_count(tiny_llama, teachers, random_batch):
    settings = {"loss": "distill", "reference": str(teachers["planner"]), "kl_coef": 1.0}
    batch, other = random_batch(), random_batch()
    other["tokens"]["advantages"] *= 0
    first, second = (LearnerCore(config(tiny_llama, **settings)).train_step(each) for each in (batch, other))
    names = ("loss", "kl", "grad_norm", "loss_tokens")
    assert {name: first[name] for name in names} == {name: second[name] for name in names}
    assert second["not_computed"] == 0 and second["grad_norm"] > 0


def test_teacher_is_added_to_the_policy_loss(tiny_llama, teachers, random_batch):
    """The gradient of both is that of the policy loss plus that of the divergence."""
    batch = random_batch()
    parts = [
        LearnerCore(config(tiny_llama, **settings)).train_step(batch)
        for settings in (
            {"loss": "grpo"},
            {"loss": "distill", "reference": str(teachers["planner"]), "kl_coef": 0.3},
            {"loss": "rloo", "reference": str(teachers["planner"]), "kl_coef": 0.3},
            {"loss": "rloo"},
        )
    ]
    assert parts[2]["loss"] - parts[3]["loss"] != 0
    assert parts[2]["kl"] == pytest.approx(parts[1]["kl"], rel=1e-5)


@pytest.mark.parametrize("changes", [{}, {"lora": LoRA(rank=4)}], ids=str)
def test_exact_divergence_from_the_start_model_begins_at_zero(tiny_llama, random_batch, changes):
    batch = random_batch()
    core = LearnerCore(config(tiny_llama, kl="exact", kl_coef=0.1, lr=3e-3, **changes))
    metrics = [core.train_step(batch) for _ in range(3)]
    assert metrics[0]["kl"] == pytest.approx(0.0, abs=1e-6) and metrics[2]["kl"] > 1e-5


def test_teachers_are_not_in_checkpoints_and_a_resumed_run_continues_bit_for_bit(
    tiny_llama, teachers, random_batch, tmp_path
):
    settings = config(tiny_llama, loss="distill", reference=str(teachers["editor"]), kl_coef=1.0)
    core, _ = check_resume(settings, random_batch, tmp_path / "step-2")
    assert "reference" not in core._state()


def test_learners_with_adapters_on_one_model_share_teachers(tiny_llama, teachers):
    settings = {"loss": "distill", "reference": str(teachers["editor"]), "kl_coef": 1.0, "lora": LoRA(rank=4)}
    first = LearnerCore(config(tiny_llama, **settings))
    second = LearnerCore(config(tiny_llama, **settings), base=first)
    assert second._reference.model is first._reference.model and len(first._models) == 2


def test_sample_of_an_agent_without_a_teacher_is_refused(tiny_llama, teachers, random_batch):
    reference = {agent: str(teachers[agent]) for agent in AGENTS[:2]}
    core = LearnerCore(config(tiny_llama, loss="distill", reference=reference, kl_coef=1.0))
    with pytest.raises(ValueError, match="sample 2 is of an agent without a teacher. The teachers are those of pl"):
        core.train_step(of_agents(random_batch()))


def test_unsuitable_teachers_are_refused_by_name(tiny_llama, tmp_path):
    def fails(folder: Path | str) -> str:
        with pytest.raises((ValueError, ModelNotFoundError)) as caught:
            LearnerCore(config(tiny_llama, loss="distill", reference=str(folder), kl_coef=1.0))
        return str(caught.value)

    other = shutil.copytree(tiny_llama, tmp_path / "other")
    file = other / "tokenizer.json"
    settings = json.loads(file.read_text())
    (pad,) = [token for token in settings["added_tokens"] if token["content"] == "<|pad|>"]
    pad["special"] = False
    file.write_text(json.dumps(settings))
    message = fails(other)
    assert str(other) in message and str(tiny_llama) in message
    assert "'<|pad|>' is special token 256 of the first and is token 256 of the second" in message
    wider = tiny_model(tmp_path / "wider")
    stored = json.loads((wider / "config.json").read_text())
    (wider / "config.json").write_text(json.dumps({**stored, "architectures": ["Mystery"]}))
    assert "'Mystery' cannot be trained" in fails(wider)
    assert "does not exist" in fails(tmp_path / "absent")
    small = tiny_model(tmp_path / "small", settings={"vocab_size": 260})
    assert f"the teacher {small} has embeddings of 260 tokens, and the model {tiny_llama} uses 264" in fails(small)
    large = tiny_model(tmp_path / "large", settings={"vocab_size": 320})
    assert f"the teacher {large} has logits of 320 tokens and the model {tiny_llama} of 264" in fails(large)


def test_token_without_an_embedding_in_a_teacher_is_refused(tiny_llama, tmp_path, random_batch):
    student = tiny_model(tmp_path / "student", settings={"vocab_size": 320})
    core = LearnerCore(config(student, loss="distill", reference=str(tiny_llama), kl_coef=1.0, kl="k2"))
    batch = random_batch()
    core.train_step(batch)
    batch["tokens"]["ids"][3] = 300  # an unused one, which may be sampled
    with pytest.raises(ValueError, match=f"the token 300, and the teacher {tiny_llama} embeddings of 264 tokens"):
        core.train_step(batch)


@pytest.mark.parametrize("many", [True, False], ids=["teams", "one"])
@pytest.mark.parametrize("kl", ["exact", "k2"])
@pytest.mark.parametrize("tensor", ["lm_head.weight", "model.layers.0.mlp.up_proj.weight"])
def test_teacher_with_weights_that_are_not_finite_is_named(  # noqa: PLR0917
    tiny_llama, tmp_path, random_batch, kl, many, tensor
):
    """The learner's loss was NaN in each step, as if training had diverged."""
    damaged = tiny_model(tmp_path / "damaged", seed=5, tied=False)
    weights = load_file(damaged / "model.safetensors")
    weights[tensor][5] = math.nan
    save_file(weights, damaged / "model.safetensors", metadata={"format": "pt"})
    sound, bad = str(tiny_llama), str(damaged)
    reference = {agent: bad if agent == "editor" else sound for agent in AGENTS} if many else bad
    core = LearnerCore(config(tiny_llama, loss="distill", reference=reference, kl_coef=1.0, kl=kl))
    who = " of editor" if many else ""
    with pytest.raises(ValueError, match=f"the divergence from the teacher {damaged}{who} is nan: its log-prob"):
        core.train_step(of_agents(random_batch()))
    assert core.version == 0


def test_exact_divergence_has_a_tenth_of_the_gradient_noise_of_k2(tiny_llama, teachers, monkeypatch):
    """Variance of the gradient between batches that the student sampled, in units of the squared mean."""
    student, gradients = hf_model(tiny_llama), dict[str, list[torch.Tensor]]()

    def sampled(seed: int) -> EpisodeBatch:
        rng = torch.Generator().manual_seed(seed)
        ids = torch.randint(32, 126, (16, 12), generator=rng)
        with torch.no_grad():
            for _ in range(8):
                probabilities = student(ids).logits[:, -1].softmax(-1)
                ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=rng)], 1)
        return pack([sample_of(row, 8, group=number) for number, row in enumerate(ids.tolist())])

    for kl in ("exact", "k2"):
        settings = {"loss": "distill", "reference": str(teachers["planner"]), "kl_coef": 1.0, "kl": kl, "lr": 0.0}
        core = LearnerCore(config(tiny_llama, **settings))
        keep = gradients.setdefault(kl, []).append

        def update(*_: Any, core: LearnerCore = core, keep: Any = keep) -> dict[str, float]:
            keep(torch.cat([weight.grad.flatten() for weight in core.model.parameters()]))
            return {"grad_norm": 0.0, "save_wait_s": 0.0}

        monkeypatch.setattr(core, "_update", update)
        for seed in range(6):
            core.train_step(sampled(seed))
    noise = {kl: torch.stack(parts).var(0).sum() for kl, parts in gradients.items()}
    assert noise["exact"] < 0.1 * noise["k2"]


def test_two_sharded_processes_compute_the_divergence_of_one(tiny_llama, teachers, random_batch):
    batch = of_agents(random_batch(groups=4))
    reference = {agent: str(folder) for agent, folder in teachers.items()}
    changes = {"loss": "distill", "reference": reference, "kl_coef": 1.0, "loss_chunk_tokens": 20}
    settings = config(tiny_llama, **changes, max_tokens_per_microbatch=120)
    one = LearnerCore(settings)

    async def run() -> list[dict[str, float]]:
        async with mesh.session():
            started = await Learner.start_together({"hero": settings}, name="hero", world_size=2, timeout_s=250)
            steps = [await started["hero"].train_step(batch, timeout_s=250) for _ in range(3)]
            await started["hero"].stop()
            return steps

    for result in asyncio.run(run()):
        expected = one.train_step(batch)
        for name in ("loss", "kl", "grad_norm", *(f"kl/{agent}" for agent in AGENTS)):
            assert result[name] == pytest.approx(expected[name], rel=1e-4), name


def test_distillation_compares_no_episodes():
    assert find_loss("distill").credit == {"baseline": "none", "scale": "none"}
