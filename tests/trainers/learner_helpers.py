"""Learners on tiny models, and comparisons between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from forge_agents.types import EpisodeBatch
from forge_trainers.batch.layout import Span
from forge_trainers.learner.core import LearnerCore
from forge_trainers.learner.model import sync_gradients
from forge_trainers.learner.plan import LearnerPlan


def config(model: Path, **changes: Any) -> LearnerPlan:
    return LearnerPlan(**{"model": str(model), "compute_dtype": "float32", "threads": 1, "lr": 1e-3, **changes})


def weights(core: LearnerCore) -> dict[str, torch.Tensor]:
    return core.hf_state_dict(dtype=torch.float32)


def moments_of(core: LearnerCore) -> dict[str, list[torch.Tensor]]:
    """What the optimizers hold beside the numbers of steps, by name."""
    states = [state for optimizer in core._optimizers for state in optimizer.state.values()]
    names = set().union(*states) - {"step"}
    return {name: [state[name] for state in states if name in state] for name in names}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def relative_gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in a)


def gradients(core: LearnerCore, batch: EpisodeBatch) -> dict[str, torch.Tensor]:
    """Gradients of one step, taken where they would be clipped."""
    microbatches, _ = core._plan(batch)
    for i, microbatch in enumerate(microbatches):
        sync_gradients(core.model, now=i == len(microbatches) - 1)
        core._forward_backward(batch, microbatch, float(batch["tokens"]["loss_mask"].sum()), {})
    named = core.model.named_parameters()
    result = {name.replace("_checkpoint_wrapped_module.", ""): p.grad.clone() for name, p in named}
    core._optimizers.zero_grad()
    return result


def hf_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def hf_logprobs(model: Any, batch: EpisodeBatch, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of the loss tokens by transformers, from a model or its folder."""
    model = hf_model(model) if isinstance(model, Path) else model
    out_T = torch.zeros(batch["tokens"]["ids"].shape)
    for start, n in zip(batch["samples"]["start"].tolist(), batch["samples"]["length"].tolist(), strict=True):
        ids = batch["tokens"]["ids"][start : start + n]
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids[None]).logits[0] / temperature, dim=-1)
        out_T[start + 1 : start + n] = logprobs[:-1].gather(1, ids[1:, None]).squeeze(1)
    return out_T * batch["tokens"]["loss_mask"]


def near_sampler(batch: EpisodeBatch, core: LearnerCore, seed: int = 0) -> EpisodeBatch:
    """The batch with a sampler near the learner and with every two neighboring samples as one trajectory."""
    samples, tokens = batch["samples"], batch["tokens"]
    samples["trajectory"] = torch.arange(len(samples["start"])) // 2
    noise = 0.1 * torch.randn(tokens["ids"].shape, generator=torch.Generator().manual_seed(seed))
    tokens["logprobs"] = (core.logprobs(batch) + noise * tokens["loss_mask"]).clamp(max=0)
    return batch


def check_resume(settings: LearnerPlan, random_batch: Any, folder: Path) -> tuple[LearnerCore, LearnerCore]:
    """Check that a learner which loads a checkpoint continues bit for bit. Returns the learner that saved, and it."""
    batches = [random_batch(seed=seed) for seed in range(4)]
    core = LearnerCore(settings)
    for batch in batches[:2]:
        core.train_step(batch)
    core.save(folder)
    drawn = torch.rand(3)
    expected = [core.train_step(batch) for batch in batches[2:]]
    resumed = LearnerCore(settings)
    resumed.logprobs(batches[0])  # the weights of before must not linger
    assert resumed.load(folder) == 2
    assert torch.equal(torch.rand(3), drawn)
    for batch, metrics in zip(batches[2:], expected, strict=True):
        result = resumed.train_step(batch)
        names = ("loss", "grad_norm", "lr", "version")
        assert [result[name] for name in names] == [metrics[name] for name in names]
    assert equal(weights(resumed), weights(core))
    return core, resumed


def compute(core: LearnerCore, ids: torch.Tensor, spans: list[Span]) -> torch.Tensor:
    positions = torch.cat([span.before + torch.arange(span.length) for span in spans])
    with torch.no_grad():
        result: torch.Tensor = core.model(ids, positions[None], core._built.masks(spans, positions[None]))
    return result


def by_expert(tensors: dict[str, Any]) -> dict[str, Any]:
    """Weights of experts, which transformers stacks in two tensors per layer, by their names in a checkpoint."""
    result = {}
    for name, tensor in tensors.items():
        block, _, stack = name.partition(".experts.")
        if stack not in {"gate_up_proj", "down_proj"} or f"{block}.router.weight" in tensors:  # as in gpt-oss
            result[name] = tensor
            continue
        for i, expert in enumerate(tensor):
            parts = zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True) if "up" in stack else [(stack, expert)]
            result |= {f"{block}.experts.{i}.{part}.weight": weight for part, weight in parts}
    return result
