"""The same few optimiser steps on every parallel layout of the learner, and a checkpoint of each resumed on the next.

    python tests/perf/parallel_table.py [--json] [--steps 5]

A random two-layer model in float32 on gloo. The gradient norm is computed apart, in float64, from whole gradients.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any

DEADLINE_S = 900.0
LAST_LINES = 80


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to spread the learner."""

    name: str
    processes: int = 1
    family: str = "llama"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `LearnerConfig`."""
    adapter: bool = False
    """Learns a LoRA adapter."""

    @property
    def kind(self) -> tuple[object, ...]:
        """Layouts of one kind are compared with each other."""
        return self.family, self.adapter, *map(self.settings.get, ("optimizer_state_dtype", "num_minibatches"))


ROUNDED = {"optimizer_state_dtype": "bfloat16"}
SEVERAL = {"num_iterations": 2, "num_minibatches": 2, "correction": {"how": "truncate", "level": "sequence"}}
LAYOUTS = (
    Layout(name="1 process"),
    Layout(name="DDP 2", processes=2, settings={"dp_replicate": 2}),
    Layout(name="FSDP 2", processes=2),
    Layout(name="FSDP 2, microbatches", processes=2, settings={"max_tokens_per_microbatch": 40}),
    Layout(name="TP 2", processes=2, settings={"tp": 2}),
    Layout(name="HSDP 2 x 2", processes=4, settings={"dp_replicate": 2}),
    Layout(name="DDP 2 x TP 2", processes=4, settings={"dp_replicate": 2, "tp": 2}),
    Layout(name="moments in bfloat16, 1 process", settings=ROUNDED),
    Layout(name="moments in bfloat16, FSDP 2 x TP 2", processes=4, settings={"tp": 2, **ROUNDED}),
    Layout(name="4 optimizer steps per batch, 1 process", settings=SEVERAL),
    Layout(name="4 optimizer steps per batch, FSDP 2", processes=2, settings=SEVERAL),
    Layout(name="4 optimizer steps per batch, TP 2", processes=2, settings={"tp": 2, **SEVERAL}),
    Layout(name="adapter, 1 process", adapter=True),
    Layout(name="adapter, FSDP 2", processes=2, adapter=True),
    Layout(name="adapter, TP 2", processes=2, settings={"tp": 2}, adapter=True),
    Layout(name="experts, 1 process", family="qwen3_moe"),
    Layout(name="experts, FSDP 2", processes=2, family="qwen3_moe"),
    Layout(name="experts, FSDP 2, EP 2", processes=2, family="qwen3_moe", settings={"ep": 2}),
    Layout(name="experts, FSDP 2 x TP 2, EP 2", processes=4, family="qwen3_moe", settings={"tp": 2, "ep": 2}),
    Layout(name="gpt-oss, 1 process", family="gpt_oss"),
    Layout(name="gpt-oss, FSDP 2", processes=2, family="gpt_oss"),
    Layout(name="gpt-oss, FSDP 2, EP 2", processes=2, family="gpt_oss", settings={"ep": 2}),
    Layout(name="DeepSeek, 1 process", family="deepseek_v3"),
    Layout(name="DeepSeek, FSDP 2", processes=2, family="deepseek_v3"),
    Layout(name="DeepSeek, FSDP 2, EP 2", processes=2, family="deepseek_v3", settings={"ep": 2}),
    Layout(name="DeepSeek, TP 2, EP 2", processes=2, family="deepseek_v3", settings={"tp": 2, "ep": 2}),
    Layout(name="Gemma, 1 process", family="gemma3"),
    Layout(name="Gemma, TP 2", processes=2, family="gemma3", settings={"tp": 2}),
    Layout(name="Phi, 1 process", family="phi3"),
    Layout(name="Phi, FSDP 2", processes=2, family="phi3"),
    Layout(name="Qwen3.5, 1 process", family="qwen3_5"),
    Layout(name="Qwen3.5, FSDP 2", processes=2, family="qwen3_5"),
    Layout(name="Qwen3.5 experts, 1 process", family="qwen3_5_moe"),
    Layout(name="Qwen3.5 experts, FSDP 2", processes=2, family="qwen3_5_moe"),
    Layout(name="Qwen3.5 experts, FSDP 2, EP 2", processes=2, family="qwen3_5_moe", settings={"ep": 2}),
    Layout(name="Phi, adapter, 1 process", family="phi3", adapter=True),
    Layout(name="Phi, adapter, FSDP 2", processes=2, family="phi3", adapter=True),
)
"""The first of each kind is what the others are compared with."""


@dataclass(frozen=True, kw_only=True)
class Visit:
    """Work of the processes in one layout."""

    layout: Layout
    steps: bool
    """Take all the steps, and save a checkpoint on the way."""
    resume: Layout | None
    """Load the checkpoint of this layout and take the steps after it."""


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--json", action="store_true", help="print the numbers instead of the table")
    parser.add_argument("--steps", type=int, default=5, help="how many; a checkpoint is saved after half of them")
    arguments = parser.parse_args()
    rows = measure(arguments.steps)
    sys.stdout.write(json.dumps(rows) if arguments.json else table(rows))
    return 0


def measure(steps: int) -> list[dict[str, Any]]:
    """A row per layout, in order: how far its losses, norms and weights lie from those of its kind's first.

    ``logits`` is how many of them its loss is given for a token.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    import forge_trainers.learner.core  # noqa: F401  (imported once; the processes are forks)
    from forge_agents.models.tiny import tiny_model

    with tempfile.TemporaryDirectory(prefix="forge-parallel-") as folder:
        for family in {layout.family for layout in LAYOUTS}:
            tiny_model(Path(folder, family), family=family, dtype="bfloat16")  # type: ignore[arg-type]
        visits = list(plan())
        fork = multiprocessing.get_context("fork")
        ranks = range(max(layout.processes for layout in LAYOUTS))
        given = (visits, Path(folder), steps)
        children = [fork.Process(target=_run_rank, args=(rank, *given), daemon=True) for rank in ranks]
        for child in children:
            child.start()
        try:
            _wait(children, Path(folder))
        finally:
            for child in children:
                child.kill()
                child.join()
        result: dict[str, dict[str, Any]] = json.loads(Path(folder, "rows.json").read_text())
        return [{"layout": name, **row} for name, row in result.items()]


def plan() -> Iterator[Visit]:
    """Every layout takes the steps and resumes the checkpoint of the layout before it."""
    kinds = [[x for x in LAYOUTS if x.kind == kind] for kind in dict.fromkeys(x.kind for x in LAYOUTS)]
    for layouts in kinds:
        for before, layout in zip([None, *layouts], layouts, strict=False):
            yield Visit(layout=layout, steps=True, resume=before)
        if len(layouts) > 1:
            yield Visit(layout=layouts[0], steps=False, resume=layouts[-1])


def _wait(children: Sequence[Any], folder: Path) -> None:
    """Wait for all ranks. Raises RuntimeError with the last lines of the rank that failed first."""
    deadline = time.monotonic() + DEADLINE_S
    running = {child.sentinel: (rank, child) for rank, child in enumerate(children)}
    while running:
        ended = connection.wait(running, max(0.0, deadline - time.monotonic()))
        if not ended:
            raise RuntimeError(f"the ranks did not finish within {DEADLINE_S:g} s")
        codes = {rank: child.exitcode for rank, child in map(running.pop, ended)}  # type: ignore[arg-type]
        if failed := [rank for rank in codes if codes[rank]]:
            first = min(failed, key=lambda rank: codes[rank])  # of several, a rank that a signal ended
            lines = _log(folder, first).read_text(errors="replace").splitlines()[-LAST_LINES:]
            raise RuntimeError("\n".join([f"rank {first} failed first, with code {codes[first]}:", *lines]))


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    titles = ("layout", "microbatches", "loss", "gradient norm", "weights", "log-probabilities", "weights, resumed")
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for row in rows:
        numbers = (f"{row[name]:.1e}" for name in ("loss", "norm", "weights", "logprobs", "resumed"))
        lines.append("| " + " | ".join((row["layout"], f"{row['microbatches']:.0f}", *numbers)) + " |")
    return "\n".join(lines) + "\n"


# ---- in each process


def _run_rank(rank: int, visits: Sequence[Visit], folder: Path, last: int) -> None:
    import torch

    with _log(folder, rank).open("w") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    saved_at = (last + 1) // 2
    rows: dict[str, dict[str, Any]] = {}
    serial: dict[str, Any] = {}
    for number, visit in enumerate(visits):
        layout = visit.layout
        if rank >= layout.processes:
            continue
        _join(rank, layout.processes, folder / f"meeting-{number}")
        learner, widths = _learner(layout, folder), _widths()
        row = rows.setdefault(layout.name, {})
        if visit.steps:
            steps = [learner.train_step(_batch(step)) for step in range(saved_at)]
            learner.save(folder / layout.name)
            steps += [learner.train_step(_batch(step)) for step in range(saved_at, last)]
            result = {"steps": steps, "weights": _weights(learner), "logprobs": learner.logprobs(_batch(0))}
            result["logits"] = max(widths)
            result["adapter"] = dict(learner.published(torch.float32)) if layout.adapter else {}
            serial = result if visit.resume is None else serial
            row |= _compared(result, serial) if rank == 0 else {}
        if visit.resume is not None:
            learner.load(folder / visit.resume.name)
            for step in range(saved_at, last):
                learner.train_step(_batch(step))
            weights = _weights(learner)
            row["resumed"] = _distance(weights, serial["weights"]) if rank == 0 else 0.0
        _leave()
    if rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))


def _join(rank: int, processes: int, meeting: Path) -> None:
    import torch.distributed as dist

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
    # a file, because a port that was free when all began may be taken by now
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=processes)


def _learner(layout: Layout, folder: Path) -> Any:
    """This rank's part of a learner that also tells the gradient's norm in float64."""
    import torch

    from forge_agents.policy import LoRA
    from forge_trainers.learner.core import LearnerCore
    from forge_trainers.learner.plan import LearnerPlan
    from forge_trainers.learner.precision import dither_weights

    class Measured(LearnerCore):
        def _update(self, *args: Any) -> dict[str, float]:
            gradients = _whole({n: p.grad for n, p in self.model.named_parameters() if p.requires_grad})
            norm = torch.stack([g.double().norm() for g in gradients.values()]).norm()
            return {**super()._update(*args), "norm": float(norm)}

    common = {"model": str(folder / layout.family), "compute_dtype": "float32", "threads": 1, "lr": 1e-3}
    lora = LoRA() if layout.adapter else None
    learner = Measured(LearnerPlan(**common, warmup_steps=2, entropy_coef=0.01, lora=lora, **layout.settings))
    dither_weights(learner.model, seed=0)  # as where it computes in bfloat16: every layout alike
    return learner


def _widths() -> list[int]:
    """Logits of a token, of each call of the loss from now on."""
    from forge_trainers.losses import policy_loss

    widths: list[int] = []
    forward = policy_loss._TokenLogprobs.forward

    def noting(ctx: Any, logits_SV: Any, *others: Any) -> Any:
        widths.append(logits_SV.shape[1])
        return forward(ctx, logits_SV, *others)

    policy_loss._TokenLogprobs.forward = staticmethod(noting)  # type: ignore[method-assign]
    return widths


def _leave() -> None:
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def _batch(step: int) -> Any:
    """Groups of siblings with answers of all lengths, from the step's number alone.

    The lengths are those of every step, because DTensor takes long to find the layouts of tensors of a new shape.
    """
    import torch

    from forge_trainers.batch.packing import Sample, pack

    rng, samples = torch.Generator().manual_seed(step), []
    lengths = iter(torch.randint(1, 17, (12,), generator=torch.Generator().manual_seed(0)).tolist())
    for group in range(3):
        prompt = torch.randint(0, 256, (20,), generator=rng).tolist()
        for _ in range(4):
            n = next(lengths)
            samples.append(
                Sample(
                    token_ids=(*prompt, *torch.randint(0, 256, (n,), generator=rng).tolist()),
                    loss_mask=(False,) * 20 + (True,) * n,
                    logprobs=(0.0,) * 20 + tuple((-5.0 - torch.rand(n, generator=rng)).tolist()),
                    advantage=float(torch.randn((), generator=rng)),
                    versions=(-1,) * 20 + (0,) * n,
                    group=group,
                )
            )
    return pack(samples)


def _weights(learner: Any) -> dict[str, Any]:
    import torch

    return _whole(learner.hf_state_dict(dtype=torch.float32))


def _whole(state: Mapping[str, Any]) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor

    return {name: x.full_tensor() if isinstance(x, DTensor) else x for name, x in state.items()}


def _compared(found: Mapping[str, Any], serial: Mapping[str, Any]) -> dict[str, float]:
    pairs = list(zip(found["steps"], serial["steps"], strict=True))
    return {
        "microbatches": found["steps"][0]["microbatches"],
        "loss": max(abs(a["loss"] - b["loss"]) for a, b in pairs),
        "norm": max(abs(a["norm"] / b["norm"] - 1) for a, b in pairs),
        "weights": _distance(found["weights"], serial["weights"]),
        "logprobs": float((found["logprobs"] - serial["logprobs"]).abs().max()),
        "adapter": _distance(found["adapter"], serial["adapter"]),
        "logits": found["logits"],
    }


def _distance(weights: Mapping[str, Any], serial: Mapping[str, Any]) -> float:
    """Norm of the difference over that of the serial weights, for the worst tensor."""
    return max((float((weights[name] - x).norm() / x.norm()) for name, x in serial.items()), default=0.0)


if __name__ == "__main__":
    sys.exit(main())
