"""What the GPUs of this machine do with a short run: ``forge-agents doctor --gpu``.

In: a model. Out: a table and JSON: for each way to place learner and engines, what its last step took, and beside the
memory that was expected of learner, engine and GPU what they took. Waits for those runs, each of three steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.table import Table

from forge_agents.errors import HostError
from forge_agents.files import user_path
from forge_agents.models.resolve import resolve, weight_bytes
from forge_agents.models.sizes import ModelSize
from forge_agents.runtime import mesh
from forge_agents.runtime.hosts import Hosts
from forge_agents.runtime.machine import gpu_bytes, visible_gpus
from forge_agents.serving.config import EnginePlan
from forge_trainers.demo import ENV_ARGS, ENV_ID, DemoConfig, settings, team
from forge_trainers.rl.config import GRPOConfig
from forge_trainers.rl.trainer import GRPOTrainer
from forge_trainers.run.placement import Placed, Placement, parts_of, place
from forge_trainers.run.plan import compute_processes

_SEEN = "CUDA_VISIBLE_DEVICES"
_MOST_COPIED = 1_000_000_000
STEPS = 3
"""Of each run; the last one is told, because memory is new and caches are cold before."""
_TOLD = {
    "step s": "time/step_s",
    "weights back s": "time/sync_s",
    "tokens/s": "tokens_per_s",
    "MFU": "learner/mfu",
    "logprob gap": "learner/logprob_gap_mean",
}
_MEMORY = {
    "learner GB": ("peak", "learner/peak_device_bytes"),
    "engine GB": ("peak", "engines/peak_device_bytes"),
    "GPU GB": ("in use", "engines/device_used_bytes"),
}
"""Each is told as it was expected and as it was: tensors of a learner's rank, of an engine's, and all on its GPU."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One placement of a run."""

    name: str
    learner_procs: int = 1
    replicas: int = 1
    tp: int = 1
    shared: bool = False
    """Learner and engine see one GPU."""
    turns: bool = False
    """They are there in turns, though they may fit side by side."""

    @property
    def gpus(self) -> int:
        """That it wants; one GPU is shared."""
        return self.learner_procs + self.replicas * self.tp


def ways(gpus: int, size: ModelSize) -> list[Way]:
    """What so many GPUs can be tried with: one shared, apart, several ranks of either, turns."""
    found = [Way(name="shared", shared=True)]
    if gpus > 1:
        found.append(Way(name="apart"))
    if gpus >= 4:
        half = gpus // 2
        found.append(Way(name=f"{half} and {gpus - half}", learner_procs=half, replicas=gpus - half))
    tp = next((tp for tp in (2, 3) if size.divides(tp)), 0)
    if tp and gpus > tp:
        found.append(Way(name=f"engine of {tp} ranks", tp=tp))
    return [*found, Way(name="turns", shared=True, turns=True)]


def row(way: Way, metrics: Mapping[str, Any], *, expected: Mapping[str, int], weights: int) -> dict[str, Any]:
    """What is told of a run.

    Args:
        way: How it was placed.
        metrics: Of its last step.
        expected: As `expected_bytes` says.
        weights: Bytes of the model.
    """
    sync_s = metrics.get("time/sync_s")
    memory: dict[str, float | None] = {}
    for name, (how, key) in _MEMORY.items():
        memory |= {f"{name} expected": expected.get(name), f"{name} {how}": metrics.get(key)}
    return {
        "way": way.name,
        "learner_procs": way.learner_procs,
        "replicas": way.replicas,
        "tp": way.tp,
        **{name: metrics.get(key) for name, key in _TOLD.items()},
        "weights back GB/s": weights / 1e9 / sync_s if sync_s else None,
        **{name: count / 1e9 if count else None for name, count in memory.items()},
    }


def placement_of(way: Way, model: str, gpus: Sequence[int]) -> Placement:
    """Where the processes of that way go, and what is expected of each, by the arithmetic that places a run.

    Args:
        way: How it is placed.
        model: As `Policy` takes it.
        gpus: Bytes of each GPU that it sees; 0 where nobody can say.

    Raises:
        HostError: It does not fit.
    """
    config, policy = _config(way), team(model)
    engines, learners = compute_processes({policy.name: policy}, {policy.name: resolve(model)}, config)
    parts = parts_of(engines, learners, ranks=config.learner_procs, tp=config.engine.tp)
    many = len(gpus)
    rehearse = partial(mesh.preview_placement_on, Hosts(), gpus_per_host=many, gpu_bytes=min(gpus), here=many)
    return place(parts, config.engine, rehearse, turns=config.colocate)


def expected_bytes(placement: Placement) -> dict[str, int]:
    """What `placement` expects of what is measured, by the same names.

    Of a learner's rank and an engine's, tensors, which are what torch counts; of the fullest GPU of an engine, all.
    Where a GPU's memory is not known, it is neither how much of it an engine takes.
    """
    learner = next(one for one in placement.processes if one.seat.role == "learner")
    engines = [one for one in placement.processes if one.seat.role == "engines" and one.seat.gpu_bytes]
    return {
        "learner GB": _tensors(learner),
        **({"engine GB": max(map(_tensors, engines))} if engines else {}),
        **({"GPU GB": max(_beside(placement, one) for one in engines)} if engines else {}),
    }


def _tensors(process: Placed) -> int:
    return process.bytes - process.parts["overhead"]


def _beside(placement: Placement, engine: Placed) -> int:
    """Bytes of an engine's GPU while it answers; what is parked meanwhile has no tensors there."""
    turns = placement.engines[engine.seat.name].sleeps
    there = [one for one in placement.processes if (one.seat.host, one.seat.gpu) == (engine.seat.host, engine.seat.gpu)]
    return sum(one.parts["overhead"] if turns and one.seat.role == "learner" else one.bytes for one in there)


def copy_gb_s(num_bytes: int, device: str) -> float:
    """How fast so many bytes come from a device to the host's memory in one piece; weights' way is held against it."""
    import torch

    source, target = torch.zeros(num_bytes, dtype=torch.uint8, device=device), torch.zeros(num_bytes, dtype=torch.uint8)
    target.copy_(source)  # waits for the zeros, and has the pages
    begun = time.perf_counter()
    target.copy_(source)
    return num_bytes / 1e9 / (time.perf_counter() - begun)


@contextlib.contextmanager
def seeing(gpus: Sequence[str]) -> Iterator[None]:
    """Inside the block runs find these GPUs alone."""
    before = os.environ.get(_SEEN)
    os.environ[_SEEN] = ",".join(gpus)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SEEN]
        else:
            os.environ[_SEEN] = before


def gpu_check(
    model: str = "smollm2-135m-instruct", out_dir: str = "", *, gpus: int | None = None
) -> list[dict[str, Any]]:
    """Run every way, print the table, and write ``gpu-check.json``.

    Args:
        model: As `Policy` takes it.
        out_dir: Folder of the runs; empty makes a new one under runs/.
        gpus: How many to use, the first ones; with 1 learner and engine share it. None: all that are visible.

    Raises:
        HostError: There is no GPU, or there are fewer.
    """
    visible = visible_gpus()
    if not visible:
        raise HostError("there is no GPU here to check; `forge-agents simulate CONFIG --gpus N --model M` needs none")
    count = len(visible) if gpus is None else gpus
    if not 1 <= count <= len(visible):
        raise HostError(f"gpus={count} and {len(visible)} are visible here; give 1 to {len(visible)}, or leave it out")
    folder, console = user_path(out_dir or time.strftime("runs/gpu-check-%Y%m%d-%H%M%S")), Console()
    path = resolve(model)
    size, rows = ModelSize.of(path), list[dict[str, Any]]()
    try:
        for way in ways(count, size):
            config = _config(way)
            console.print(f"{way.name}: {way.learner_procs} of the learner, {way.replicas} engines of {way.tp}")
            out = folder / way.name.replace(" ", "-")
            seen = visible[: 1 if way.shared else count]
            expected = expected_bytes(placement_of(way, model, gpu_bytes(seen) or [0] * len(seen)))
            with seeing(seen), GRPOTrainer(team(model), config=config, out_dir=out) as trainer:
                result = trainer.fit(ENV_ID, steps=STEPS, env_args=ENV_ARGS)
            rows.append(row(way, result.metrics[-1], expected=expected, weights=weight_bytes(path)))
            (folder / "gpu-check.json").write_text(json.dumps(rows, indent=1) + "\n")
        plain = copy_gb_s(min(weight_bytes(path), _MOST_COPIED), "cuda")
        rows = [{**one, "plain copy GB/s": plain} for one in rows]
        (folder / "gpu-check.json").write_text(json.dumps(rows, indent=1) + "\n")
    finally:
        if rows:  # of the ways before one that failed, too
            console.print(table(rows))
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A column for each way."""
    found = Table("", *(str(one["way"]) for one in rows), title=f"step {STEPS} of {STEPS}")
    for name in [name for name in rows[0] if name != "way"]:
        found.add_row(name, *(f"{one[name]:.4g}" if one[name] is not None else "-" for one in rows))
    return found


def _config(way: Way) -> GRPOConfig:
    base = settings(DemoConfig())
    return replace(
        base,
        learner_procs=way.learner_procs,
        engine=EnginePlan.of(base.engine, replicas=way.replicas, tp=way.tp, sleeps=way.turns),
        colocate=way.turns,
        checkpoint_every=STEPS,
    )
