"""Tokens per second of a learner's step, over a bare TorchTitan forward and backward pass on the same tokens.

The bare pass has TorchTitan's own modules (SDPA attention on unpadded rectangles of equally long samples, chunked
cross-entropy over all positions), with weights and gradients in bfloat16 and without FSDP around one rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any
from unittest.mock import patch

from perf_common import Options, goal, in_child

from forge_agents.runtime import processes
from forge_trainers.learner.plan import LearnerPlan

TURNS = ("shared", "unshared", "bare", "shared", "bare", "shared")
"""Measured one after the other. The median counts."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Samples of equal length in groups. Samples of a group and agent share their first prompt."""

    groups: int
    siblings: int
    seats: int
    """Samples of an episode."""
    prompt: int
    """Tokens of the first prompt."""
    turns: int
    question: int
    """Tokens of the later prompts."""
    answer: int
    timed: int | None = None
    """Groups that are computed, where all of them take minutes. None: all."""

    def quick(self) -> Work:
        """The same shape in small."""
        return replace(self, groups=2, siblings=2, answer=8, timed=None)


WORKS = {
    "W": Work(groups=8, siblings=8, seats=1, prompt=46, turns=1, question=0, answer=32),
    "siblings": Work(groups=8, siblings=8, seats=1, prompt=200, turns=1, question=0, answer=32, timed=2),
    "turns": Work(groups=4, siblings=8, seats=2, prompt=80, turns=4, question=20, answer=24, timed=1),
}
"""``turns``: two agents talk for four turns each; the turns of a trajectory are one sample, so they share their history
without being told to."""


def measure(options: Options) -> list[dict[str, Any]]:
    """The records ``learner``, one for each work."""
    env = processes.openmp_variables()  # as in a run
    result = in_child(run_learner, options, timeout_s=1200, env=env)
    return [_record(name, each) for name, each in result.items()]


def _record(name: str, found: dict[str, Any]) -> dict[str, Any]:
    rate = found["tokens_per_s"]
    ratios = {f"{ours}_over_bare": round(rate[ours] / rate["bare"], 4) for ours in ("unshared", "shared")}
    least = {"unshared_over_bare": 0.95, "shared_over_bare": 1.3}
    goals = {name: goal(ratio, least[name], at_most=False) for name, ratio in ratios.items()}
    peer = "bare TorchTitan forward and backward pass, no optimiser"
    return {"measure": "learner", "work": name, **found, "peer": peer, "ratio": ratios, "goals": goals}


def run_learner(options: Options) -> dict[str, Any]:
    from forge_agents.runtime.machine import keep_freed_memory, limit_matmul_cache, total_bytes

    keep_freed_memory()  # as the learner's actor does; the bare passes profit alike
    limit_matmul_cache()
    from forge_agents.models.sizes import ModelSize
    from forge_trainers.learner.architecture import read_config
    from forge_trainers.learner.core import LearnerCore
    from forge_trainers.learner.memory import by_memory

    config = LearnerPlan(model=options.model)
    size = ModelSize.from_config(read_config(options.model))
    core = LearnerCore(by_memory(size, config, total_bytes() // 2, on_cpu=True))  # as a run by itself has it
    model = _bare_model(core)
    _run(core, model, WORKS["W"].quick())  # warms up
    return {name: _run(core, model, work.quick() if options.quick else work) for name, work in WORKS.items()}


def _bare_model(core: Any) -> Any:
    """TorchTitan's own modules around the same weights, all of the compute type, their gradients as well."""
    from forge_trainers.learner import model

    whole = model.spec_from_config
    with patch.object(model, "spec_from_config", lambda *args, **options: whole(*args, **options | {"lean": False})):
        built = model.build_model(core.config, core._ranks, trainable=False)
    return built.model.requires_grad_(True)


def _run(core: Any, model: Any, work: Work) -> dict[str, Any]:
    timed = replace(work, groups=work.timed or work.groups)
    shared, unshared = (batch_of(timed, core, share=share) for share in (True, False))
    passes: dict[str, Callable[[], object]] = {
        "unshared": lambda: _alone(core, unshared),
        "shared": lambda: core.train_step(shared),
        "bare": lambda: _bare(core, model, unshared),
    }
    for each in passes.values():
        each()  # the first of a size asks the system for memory, which the process keeps
    result: dict[str, list[float]] = {}
    for name in TURNS:
        started, cpu = time.perf_counter(), time.process_time()
        passes[name]()
        result.setdefault(f"{name}_s", []).append(time.perf_counter() - started)
        result.setdefault(f"{name}_cpu_s", []).append(time.process_time() - cpu)
    numbers = {name: round(median(each), 4) for name, each in result.items()}
    tokens = int(shared["tokens"]["ids"].numel())
    rates = {name: round(tokens / numbers[f"{name}_s"], 1) for name in passes}
    return {"tokens": tokens, **numbers, "tokens_per_s": rates}


def _alone(core: Any, batch: Any) -> None:
    """A step in which each sample is computed alone, without shared prefixes."""
    before = core.config
    core.config = replace(before, share_prefixes=False)
    try:
        core.train_step(batch)
    finally:
        core.config = before


def batch_of(work: Work, core: Any, *, share: bool) -> Any:
    """Random tokens. Samples of one group may share their prompt."""
    import torch

    from forge_trainers.batch.packing import Sample, pack

    rng = torch.Generator().manual_seed(0)
    vocab = core.model.tok_embeddings.weight.shape[0]

    def tokens(number: int) -> list[int]:
        return [int(token) for token in torch.randint(0, vocab, (number,), generator=rng)]

    samples: list[Sample] = []
    for group in range(work.groups):
        prompts = [tokens(work.prompt) for _ in range(work.seats)]
        for _ in range(work.siblings):
            for prompt in prompts:
                ids, mask = list(prompt), [False] * work.prompt
                for turn in range(work.turns):
                    asked = work.question if turn else 0
                    ids += tokens(asked + work.answer)
                    mask += [False] * asked + [True] * work.answer
                samples.append(
                    Sample(
                        token_ids=tuple(ids),
                        loss_mask=tuple(mask),
                        logprobs=tuple(-5.0 if learned else 0.0 for learned in mask),
                        advantage=float(torch.randn((), generator=rng)),
                        versions=tuple(0 if learned else -1 for learned in mask),
                        group=group if share else len(samples),
                    )
                )
    return pack(samples)


def _bare(core: Any, model: Any, batch: Any) -> None:
    """TorchTitan's own attention and loss, all samples of a microbatch as one rectangle."""
    from forge_trainers.learner import titan  # isort: skip  (sets TorchTitan's device first)
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.models.common.attention import ScaledDotProductAttention

    length = int(batch["samples"]["length"][0])
    ids_nL = batch["tokens"]["ids"].view(-1, length)
    num_chunks = next(n for n in (8, 7, 6, 5, 4, 3, 2, 1) if length % n == 0)  # TorchTitan's default is 8
    loss = titan.ChunkedLossWrapper.Config(num_chunks=num_chunks, loss_fn=CrossEntropyLoss.Config()).build()
    loss.set_lm_head(model.lm_head)
    attentions = [layer.attention for layer in model.layers.values()]
    ours = [attention.inner_attention for attention in attentions]
    for attention in attentions:
        attention.inner_attention = ScaledDotProductAttention.Config().build()
    try:
        for part_bL in ids_nL.split(core.config.max_tokens_per_microbatch // length):
            with core._ranks.context():
                loss(model(part_bL), part_bL.roll(-1, dims=1), float(ids_nL.numel()))[0].backward()
    finally:
        for attention, inner in zip(attentions, ours, strict=True):
            attention.inner_attention = inner
        model.zero_grad(set_to_none=True)
