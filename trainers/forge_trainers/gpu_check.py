"""What the GPUs of this machine do with a short run: ``forge-agents gpu-check``.

In: a model. Out: a table and JSON: for each way to place learner and engines, what its last step took, and the memory
that was expected beside the memory that it took. Waits for those runs, each of three steps.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from forge_agents.errors import HostError
from forge_agents.models.resolve import resolve, weight_bytes
from forge_agents.models.sizes import ModelSize
from forge_agents.runtime.processes import visible_gpus
from forge_trainers.demo import ENV_ARGS, ENV_ID, DemoConfig, settings, team
from forge_trainers.learner.config import LearnerConfig
from forge_trainers.learner.memory import learner_bytes
from forge_trainers.rl.config import GRPOConfig
from forge_trainers.rl.trainer import GRPOTrainer

_SEEN = "CUDA_VISIBLE_DEVICES"
_SHARED = "shared"
"""The way in which learner and engine see one GPU."""
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


@dataclass(frozen=True, kw_only=True)
class Way:
    """One placement of a run."""

    name: str
    learner_procs: int = 1
    replicas: int = 1
    tp: int = 1

    @property
    def gpus(self) -> int:
        """That it wants; one GPU is shared."""
        return self.learner_procs + self.replicas * self.tp


def ways(gpus: int, size: ModelSize) -> list[Way]:
    """What so many GPUs can be tried with: one shared, apart, a learner of several ranks, an engine of several."""
    found = [Way(name=_SHARED)]
    if gpus > 1:
        found.append(Way(name="apart"))
    if gpus >= 4:
        half = gpus // 2
        found.append(Way(name=f"{half} and {gpus - half}", learner_procs=half, replicas=gpus - half))
    tp = next((tp for tp in (2, 3) if size.divides(tp)), 0)
    if tp and gpus > tp:
        found.append(Way(name=f"engine of {tp} ranks", tp=tp))
    return found


def row(way: Way, metrics: Mapping[str, Any], *, expected: int, weights: int) -> dict[str, Any]:
    """What is told of a run.

    Args:
        way: How it was placed.
        metrics: Of its last step.
        expected: Bytes of one rank of the learner, by the arithmetic that placed it, of what torch allocates.
        weights: Bytes of the model.
    """
    sync_s, peak = metrics.get("time/sync_s"), metrics.get("learner/peak_device_bytes")
    return {
        "way": way.name,
        "learner_procs": way.learner_procs,
        "replicas": way.replicas,
        "tp": way.tp,
        **{name: metrics.get(key) for name, key in _TOLD.items()},
        "weights back GB/s": weights / 1e9 / sync_s if sync_s else None,
        "learner GB expected": expected / 1e9,
        "learner GB peak": peak / 1e9 if peak else None,
    }


def tensor_bytes(size: ModelSize, config: LearnerConfig, *, ranks: int) -> int:
    """Of one rank of the learner at its peak, without what is beside tensors, which torch does not count."""
    return sum(count for name, count in learner_bytes(size, config, ranks=ranks).items() if name != "overhead")


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
    folder, console = Path(out_dir or time.strftime("runs/gpu-check-%Y%m%d-%H%M%S")), Console()
    path = resolve(model)
    size, rows = ModelSize.of(path), list[dict[str, Any]]()
    try:
        for way in ways(count, size):
            config = _config(way)
            console.print(f"{way.name}: {way.learner_procs} of the learner, {way.replicas} engines of {way.tp}")
            out = folder / way.name.replace(" ", "-")
            seen = visible[: 1 if way.name == _SHARED else count]
            with seeing(seen), GRPOTrainer(team(model), config=config, out_dir=out) as trainer:
                result = trainer.fit(ENV_ID, steps=STEPS, env_args=ENV_ARGS)
            expected = tensor_bytes(size, config.learner, ranks=way.learner_procs)
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
        engine=replace(base.engine, replicas=way.replicas, tp=way.tp),
        checkpoint_every=STEPS,
    )
