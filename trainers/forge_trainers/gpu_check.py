"""Measurement of short runs on the GPUs of this machine (``forge-agents doctor --gpu``).

For each layout of learner and engines, a run of three steps gives the times of the last step and the measured memory
next to the expected one.
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

from rich.table import Table

from forge_agents import output
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
from forge_trainers.run.parts import checked_parts
from forge_trainers.run.placement import Placed, Placement, place
from forge_trainers.run.plan import compute_processes

_VISIBLE = "CUDA_VISIBLE_DEVICES"
STEPS = 3
"""Steps of each run. Only the last one is reported, because memory is new and caches are cold before."""
_TIMES = {
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
"""Reported as expected and measured: tensors of a learner's rank, tensors of an engine's rank, and the whole GPU."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A placement of a run."""

    name: str
    learner_procs: int = 1
    replicas: int = 1
    tp: int = 1
    shared: bool = False
    """Whether learner and engine share one GPU."""
    turns: bool = False
    """Whether they use it in turns, even if both fit."""


def layouts(gpus: int, size: ModelSize) -> list[Layout]:
    """Return the layouts to try: a shared GPU, separate GPUs, several ranks of either, and turns."""
    result = [Layout(name="shared", shared=True)]
    if gpus > 1:
        result.append(Layout(name="separate"))
    if gpus >= 4:
        half = gpus // 2
        result.append(Layout(name=f"{half} and {gpus - half}", learner_procs=half, replicas=gpus - half))
    tp = next((tp for tp in (2, 3) if size.divides(tp)), 0)
    if tp and gpus > tp:
        result.append(Layout(name=f"engine of {tp} ranks", tp=tp))
    return [*result, Layout(name="turns", shared=True, turns=True)]


def row(layout: Layout, metrics: Mapping[str, Any], *, expected: Mapping[str, int], weights: int) -> dict[str, Any]:
    """Return the report of a run, from the metrics of its last step, `expected_bytes` and the bytes of the model."""
    sync_s = metrics.get("time/sync_s")
    memory: dict[str, float | None] = {}
    for name, (label, key) in _MEMORY.items():
        memory |= {f"{name} expected": expected.get(name), f"{name} {label}": metrics.get(key)}
    return {
        "layout": layout.name,
        "learner_procs": layout.learner_procs,
        "replicas": layout.replicas,
        "tp": layout.tp,
        **{name: metrics.get(key) for name, key in _TIMES.items()},
        "weights back GB/s": weights / 1e9 / sync_s if sync_s else None,
        **{name: count / 1e9 if count else None for name, count in memory.items()},
    }


def placement_of(layout: Layout, model: str, gpus: Sequence[int]) -> Placement:
    """Return the placement of a layout on GPUs with these bytes (0 is unknown). Raises HostError if it does not fit."""
    config, policy = _config(layout), team(model)
    parts = checked_parts(
        compute_processes({policy.name: policy}, {policy.name: resolve(model)}, config), config.engine
    )
    many = len(gpus)
    rehearse = partial(mesh.preview_placement_on, Hosts(), gpus_per_host=many, gpu_bytes=min(gpus), here=many)
    return place(parts, config.engine, rehearse, turns=config.colocate)


def expected_bytes(placement: Placement) -> dict[str, int]:
    """Return the expected values of the measured quantities.

    For a rank of the learner and of an engine these are tensors, which torch counts. For the fullest GPU of an engine,
    all memory. Engines are left out if the memory of the GPUs is unknown.
    """
    processes = placement.processes
    learner = next(process for process in processes if process.slot.role == "learner")
    engines = [process for process in processes if process.slot.role == "engines" and process.slot.gpu_bytes]
    return {
        "learner GB": _tensors(learner),
        **({"engine GB": max(map(_tensors, engines))} if engines else {}),
        **({"GPU GB": max(_gpu_total(placement, engine) for engine in engines)} if engines else {}),
    }


def _tensors(process: Placed) -> int:
    return process.bytes - process.parts["overhead"]


def _gpu_total(placement: Placement, engine: Placed) -> int:
    """Return the bytes on an engine's GPU while it generates. An offloaded learner only has its overhead there."""
    turns = placement.engines[engine.slot.name].sleeps
    gpu = engine.slot.host, engine.slot.gpu
    residents = [process for process in placement.processes if (process.slot.host, process.slot.gpu) == gpu]
    return sum(p.parts["overhead"] if turns and p.slot.role == "learner" else p.bytes for p in residents)


@contextlib.contextmanager
def visible_only(gpus: Sequence[str]) -> Iterator[None]:
    """Restrict runs inside the block to these GPUs."""
    before = os.environ.get(_VISIBLE)
    os.environ[_VISIBLE] = ",".join(gpus)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VISIBLE]
        else:
            os.environ[_VISIBLE] = before


def gpu_check(
    model: str = "smollm2-135m-instruct", out_dir: str = "", *, gpus: int | None = None
) -> list[dict[str, Any]]:
    """Run every layout, print the table, and write ``gpu-check.json``.

    Args:
        model: Model as `Policy` takes it.
        out_dir: Folder of the runs. Empty: a new one in runs/.
        gpus: Number of GPUs to use. None: all visible GPUs.

    Raises:
        HostError: There are no GPUs, or too few.
    """
    visible = visible_gpus()
    if not visible:
        raise HostError("this machine has no visible GPU. `forge-agents simulate CONFIG --gpus N --model M` needs none")
    count = len(visible) if gpus is None else gpus
    if not 1 <= count <= len(visible):
        raise HostError(f"gpus={count}, and {len(visible)} are visible. Give 1 to {len(visible)}, or leave it out")
    folder, console = user_path(out_dir or time.strftime("runs/gpu-check-%Y%m%d-%H%M%S")), output.console()
    path = resolve(model)
    size, rows = ModelSize.of(path), list[dict[str, Any]]()
    try:
        for layout in layouts(count, size):
            config = _config(layout)
            console.print(
                f"{layout.name}: {layout.learner_procs} learner rank(s), {layout.replicas} engine(s) of {layout.tp}"
            )
            out = folder / layout.name.replace(" ", "-")
            used = visible[: 1 if layout.shared else count]
            expected = expected_bytes(placement_of(layout, model, gpu_bytes(used) or [0] * len(used)))
            with visible_only(used), GRPOTrainer(team(model), config=config, out_dir=out) as trainer:
                result = trainer.fit(ENV_ID, steps=STEPS, env_args=ENV_ARGS)
            rows.append(row(layout, result.metrics[-1], expected=expected, weights=weight_bytes(path)))
            (folder / "gpu-check.json").write_text(json.dumps(rows, indent=1) + "\n")
    finally:
        if rows:  # also if a later layout failed
            console.print(table(rows))
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table with a column per layout."""
    result = Table("", *(str(values["layout"]) for values in rows), title=f"step {STEPS} of {STEPS}")
    for name in [name for name in rows[0] if name != "layout"]:
        result.add_row(name, *(f"{values[name]:.4g}" if values[name] is not None else "-" for values in rows))
    return result


def _config(layout: Layout) -> GRPOConfig:
    base = settings(DemoConfig())
    return replace(
        base,
        learner_procs=layout.learner_procs,
        engine=EnginePlan.of(base.engine, replicas=layout.replicas, tp=layout.tp, sleeps=layout.turns),
        colocate=layout.turns,
        checkpoint_every=STEPS,
    )
