"""Dry run: the processes that a run would start, where, and their resolved settings, without starting any."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from forge_agents.errors import HostError, ModelNotFoundError, did_you_mean
from forge_agents.models import resolve as models
from forge_agents.policy import Policy
from forge_agents.runtime import mesh
from forge_agents.runtime.hosts import Hosts, ProcessSlot
from forge_trainers.run.config import ProcessConfig
from forge_trainers.run.parts import OwnEngine, check_models, check_on_cpu, unique_names
from forge_trainers.run.plan import (
    Threads,
    check_hosts,
    compute_processes,
    meshes_of,
    resolve,
    teachers_of,
    threads_of,
)

_USUAL_GPUS = 8
"""Number of GPUs of a host that the settings do not describe."""


def dry_run(
    policies: Mapping[str, Policy],
    config: ProcessConfig,
    hosts: Hosts,
    *,
    out_dir: Path = Path("runs/default"),
    gpus_per_host: int | None = None,
    judges: Sequence[OwnEngine] = (),
) -> list[str]:
    """Describe the processes that a run starts with and their settings, line by line. The models may be elsewhere.

    Args:
        policies: By name.
        config: User settings.
        hosts: Hosts of the run.
        out_dir: Run folder.
        gpus_per_host: Number of GPUs of this machine, and of each other host whose role `Hosts.gpus` does not name.
            None: this machine's GPUs, and 8 of others.
        judges: Engines of LLM judges.

    Raises:
        HostError, ValueError: The processes do not fit the hosts, or a model of this machine cannot be trained, cannot
            be computed on a CPU, or cannot be shared by ranks.
    """
    local = {name: models.local_folder(policy.model) for name, policy in policies.items()}
    folders = {name: folder or Path(policies[name].model) for name, folder in local.items()}
    compute = compute_processes(policies, folders, config)
    meshes, learners = meshes_of(compute), [each.learner for each in compute if each.learner is not None]
    check_hosts(compute, hosts, config)
    here = {folder for folder in folders.values() if (folder / "config.json").is_file()}
    local_compute = [each for each in compute if each.folder in here]
    check_models(local_compute, config.engine)
    missing = dict.fromkeys(policies[name].model for name, folder in folders.items() if folder not in here)
    missing |= dict.fromkeys(
        name for name in teachers_of(policies.values(), config) if models.local_folder(name) is None
    )
    threads = Threads()
    if not gpus_per_host:
        engines = (len(compute) - len(learners)) // config.engine.replicas
        threads = threads_of(config, hosts, engines=engines, learners=len(learners))
    named_judges = unique_names(judges, reserved=[name for name, *_ in meshes])
    meshes += [(name, "judges", judge.config.tp) for name, judge in named_judges.items()]
    slots = _slots(meshes, hosts, gpus_per_host)
    check_on_cpu(slots, local_compute, config.engine)
    lines = _process_lines(slots)
    lines += [
        f"Model {model} is not on this machine. It was not checked that it exists and can be trained, and that ranks "
        f"can share it.{did_you_mean(model, models.BUILTIN_NAMES)}"
        for model in missing
    ]
    if not missing:
        with contextlib.suppress(ModelNotFoundError):  # incomplete files are reported when the run starts
            plan = resolve(policies, folders, config, out_dir=out_dir, threads=threads)
            lines += ["", "resolved settings (None is decided by memory when the run starts):"]
            lines += plan.as_yaml().splitlines()
    return lines


def _slots(meshes: Sequence[tuple[str, str, int]], hosts: Hosts, gpus_per_host: int | None) -> list[ProcessSlot]:
    """Place every process."""
    # a run places engines and learners before the store starts, which would make the store's host a fuller one
    placed_first = sorted(meshes, key=lambda mesh_: mesh_[1] == "store")
    order = [name for name, *_ in meshes]
    others = _USUAL_GPUS if gpus_per_host is None else gpus_per_host
    try:
        slots = mesh.preview_placement_on(hosts, placed_first, gpus_per_host=others, here=gpus_per_host)
    except HostError as error:
        if gpus_per_host is None and hosts.kind == "local":
            raise HostError(f"{error}. With --gpus_per_host a dry run assumes that many on this machine") from error
        raise
    return sorted(slots, key=lambda slot: order.index(slot.name))


def _process_lines(slots: Sequence[ProcessSlot]) -> list[str]:
    """Return a line for each host and each process on it."""
    lines = []
    for host in dict.fromkeys(slot.host for slot in slots):
        lines.append(f"{host}:")
        lines += [
            f"  {slot.name} rank {slot.rank}" + f", GPU {slot.gpu}" * bool(slot.gpu)
            for slot in slots
            if slot.host == host
        ]
    lines.append("Judges and workers of environments start with their first request.")
    if used := {(slot.host, slot.gpu) for slot in slots if slot.gpu}:
        lines.append(f"GPU memory is not checked here. Run `forge-agents simulate` with --gpus {len(used)} --model.")
    return lines
