"""What a run would start and where, without starting it: `rehearsal`.

In: policies, settings, hosts. Out: a line for each host and each process, with its GPU, environment and command. Waits
for nothing, and reaches no host.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from forge_agents.errors import HostError, did_you_mean
from forge_agents.models import resolve as models
from forge_agents.policy import Policy
from forge_agents.runtime import mesh, processes
from forge_agents.runtime.hosts import HERE, Hosts
from forge_agents.serving import _vllm
from forge_trainers.run.config import ProcessConfig, with_threads
from forge_trainers.run.placement import OwnEngine, by_own_name, checked_parts
from forge_trainers.run.processes import check_hosts, computing, meshes_of

_USUAL = 8
"""GPUs of a host that nobody describes."""


def rehearsal(
    policies: Mapping[str, Policy],
    config: ProcessConfig,
    hosts: Hosts,
    *,
    gpus_per_host: int | None = None,
    judges: Sequence[OwnEngine] = (),
) -> list[str]:
    """Say which processes a run starts with.

    Args:
        policies: By name. Their models need not be here.
        config: Settings of the run.
        hosts: Where it runs.
        gpus_per_host: GPUs of this machine, and of each other host whose role `Hosts.gpus` does not name. None: those
            that this machine has, and 8 of others.
        judges: Whose engines start with the first score.

    Raises:
        HostError, ValueError: The processes do not fit the hosts, as when the run starts; or ranks cannot share a
            model that is on this machine.
    """
    from forge_agents.runtime._monarch import default_bootstrap_cmd

    found = {name: models.local_folder(policy.model) for name, policy in policies.items()}
    paths = {name: folder or Path(policies[name].model) for name, folder in found.items()}
    meshes = meshes_of(policies, paths, config)
    _, learners = computing(policies, paths, config)
    check_hosts(meshes, hosts, config, [settings for settings, _ in learners.values()])
    doubts = _check_models(policies, paths, config)
    if hosts.kind == "local" and not gpus_per_host:  # with GPUs nobody divides cores
        counts = {role: sum(one[1] == role for one in meshes) for role in ("engines", "learner")}
        replicas = config.engine.replicas
        config = with_threads(config, engines=counts["engines"] // replicas, learners=counts["learner"])
    own = {name: judge.config for name, judge in by_own_name(judges, taken=(one[0] for one in meshes)).items()}
    meshes += [(name, "judges", engine.tp) for name, engine in own.items()]
    # a run places what computes before the store starts, which would make its host a fuller one
    first = sorted(meshes, key=lambda one: one[1] == "store")
    order = [name for name, *_ in meshes]
    others = _USUAL if gpus_per_host is None else gpus_per_host
    try:
        seats = mesh.preview_placement_on(hosts, first, gpus_per_host=others, here=gpus_per_host)
    except HostError as error:
        if gpus_per_host is None and hosts.kind == "local":
            raise HostError(f"{error}. With --gpus_per_host a dry run takes this machine to have so many") from error
        raise
    seats = sorted(seats, key=lambda seat: order.index(seat.name))
    command = default_bootstrap_cmd()
    words = [command.program, *command.args]
    lines = []
    for host in dict.fromkeys(seat.host for seat in seats):
        name = "" if host.startswith(HERE) else host.partition(" ")[0]
        lines.append(f"{host}: {_shell(processes.variables(name))}")
        here = [seat for seat in seats if seat.host == host]
        for seat in here:
            gpus = [one.gpu for one in here if one.name == seat.name and one.gpu]
            engine = own.get(seat.name, config.engine)
            env = _vllm.environment(engine) if seat.role in ("engines", "judges") else {}
            threads = {"learner": config.learner.threads, "store": 1}.get(seat.role, engine.threads)
            where = f", GPU {seat.gpu}" * bool(seat.gpu)
            variables = mesh.mesh_variables(gpus, env, threads)
            shown = " ".join(filter(None, (_shell(variables), shlex.join(words))))
            lines.append(f"  {seat.name} rank {seat.rank}{where}: {shown}")
    lines += ["judges and workers of environments start when they are first asked for something", *doubts]
    if on := {(seat.host, seat.gpu) for seat in seats if seat.gpu}:
        lines += [f"not looked at: the GPUs' memory; `forge-agents simulate` with --gpus {len(on)} --model does"]
    return lines


def _check_models(policies: Mapping[str, Policy], paths: Mapping[str, Path], config: ProcessConfig) -> list[str]:
    """See that ranks can share the models that are here; a line for each that is not."""
    engines, learners = computing(policies, paths, config)
    known = {path for path in paths.values() if (path / "config.json").is_file()}
    checked_parts(
        {name: one for name, one in engines.items() if one[0] in known},
        {name: one for name, one in learners.items() if Path(one[0].model) in known},
        ranks=config.learner_procs,
        engine=config.engine,
    )
    absent = dict.fromkeys(policies[name].model for name, path in paths.items() if path not in known)
    return [
        f"not looked at: {model}, which is not on this machine: whether it exists, and whether ranks can share it."
        f"{did_you_mean(model, models.BUILTIN_NAMES)}"
        for model in absent
    ]


def _shell(variables: Mapping[str, str]) -> str:
    return " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
