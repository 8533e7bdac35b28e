"""Starts the hosts of a run: processes here, host processes elsewhere, a Slurm job or pods."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_agents.errors import HostError
from forge_agents.runtime import _monarch, schedulers
from forge_agents.runtime.exposure import warn_of_open_ports
from forge_agents.runtime.hosts import ON_GPUS, Hosts
from forge_agents.runtime.machine import gpu_variables, visible_gpus
from forge_agents.runtime.processes import make_log_folder

_PROCESS_END_S = 2.0
_MARGIN_S = 60.0
"""Monarch gives up this much later than we do, because its error names no host."""


@dataclass(slots=True, kw_only=True)
class Job:
    """Requested hosts."""

    meshes: Mapping[str, Any]
    """Monarch's host mesh by role, with dimension ``hosts``."""
    end: Callable[[], None]
    """Ends what Monarch does not: processes here, the scheduler's job. May be called twice."""
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Descriptions of hosts for errors, by role."""


def start_job(config: Hosts, env: Mapping[str, str], *, gpus_per_node: int | None) -> Job:
    """Start or attach to the hosts. A start with TCP must be the process's first use of Monarch.

    Args:
        config: Hosts of another kind than "local".
        env: Environment variables of host processes that are started here.
        gpus_per_node: GPUs requested from a scheduler. None requests none.

    Raises:
        HostError: The scheduler refuses, or a required library or program is missing.
    """
    starters: Mapping[str, Callable[[], Job]] = {
        "process": lambda: _processes(config, env),
        "attach": lambda: _attached(config),
        "slurm": lambda: _slurm(config, gpus_per_node),
        "kubernetes": lambda: _kubernetes(config),
    }
    _monarch.configure(mesh_attach_config_timeout=f"{config.start_timeout_s + _MARGIN_S:g}s")
    return starters[config.kind]()


def _processes(config: Hosts, env: Mapping[str, str]) -> Job:
    """Start processes that behave as hosts. The processes end with a pipe.

    Monarch's ProcessJob is not used, because it leaves its hosts behind when the controller is killed.
    """
    folder = make_log_folder("host")  # a later run removes it if this process is killed
    started: list[subprocess.Popen[bytes]] = []

    def end() -> None:
        died = any(process.poll() is not None for process in started)
        for process in started:
            _end(process)
        if not died:  # otherwise an error names the log of the host that died
            shutil.rmtree(folder, ignore_errors=True)

    workers: dict[str, tuple[str, ...]] = {}
    gpus_by_host = gpus_of_processes(config, visible_gpus())
    try:
        for role, count in config.counts.items():
            workers[role] = tuple(_monarch.new_host_address(f"ipc://{folder}/{role}-{i}") for i in range(count))
            for number, address in enumerate(workers[role]):
                gpus = gpu_variables(gpus_by_host.get((role, number), ()))
                started.append(_host_process(address, folder / f"{role}-{number}.log", {**env, **gpus}))
    except BaseException:
        end()
        raise
    return Job(
        meshes={role: _monarch.attach(role, addresses) for role, addresses in workers.items()},
        end=end,
        names={role: tuple(f"log {folder / role}-{i}.log" for i in range(len(w))) for role, w in workers.items()},
    )


def gpus_of_processes(config: Hosts, gpus: Sequence[str]) -> dict[tuple[str, int], Sequence[str]]:
    """Divide this machine's GPUs among the processes that behave as hosts, by role and number.

    Each gets the number in ``config.gpus``. The others get equal parts of what is left, and so does the controller's
    own host, which comes first, if it computes. If there are too few, the result is empty and all share all GPUs.
    """
    here = [role for role in ("learner", "engines") if role not in config.counts]
    hosts = [(role, number) for role in ON_GPUS for number in range(config.counts.get(role, 0))]
    requested = [config.gpus.get(role, 0) for role, _ in hosts]
    requested_here = sum(config.gpus.get(role, 0) for role in here)
    parts = requested.count(0) + bool(here and not requested_here)
    left = len(gpus) - sum(requested) - requested_here
    if left < parts:
        return {}
    each = left // parts if parts else 0
    first, gpus_by_host = requested_here or each * bool(here), dict[tuple[str, int], Sequence[str]]()
    for host, count in zip(hosts, requested, strict=True):
        gpus_by_host[host] = gpus[first : first + (count or each)]
        first += count or each
    return gpus_by_host


def _host_process(address: str, log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "forge_agents.runtime.host_process", "--address", address, "--end-with-stdin"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, **env},
            start_new_session=True,  # the controller handles Ctrl-C
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a host process. The processes that it started end with it."""
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_PROCESS_END_S)
    with contextlib.suppress(ProcessLookupError):  # processes that it started are in its session, not in its group
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _attached(config: Hosts) -> Job:
    addresses = {role: workers[: config.counts[role]] for role, workers in config.workers.items()}
    warn_of_open_ports(address for workers in addresses.values() for address in workers)
    if config.certificate:
        _monarch.use_certificate(config.certificate)
    if config.address or not config.all_here:
        _listen(config)
    return Job(
        meshes={role: _monarch.attach(role, workers) for role, workers in addresses.items()},
        end=lambda: None,
        names=addresses,
    )


def _slurm(config: Hosts, gpus_per_node: int | None) -> Job:
    if missing := [name for name in ("sbatch", "squeue", "scancel") if shutil.which(name) is None]:
        raise HostError(
            f"kind='slurm' of the mesh needs {' and '.join(missing)} on the path. Start the run where jobs are "
            "submitted, or use kind='attach' inside a job"
        )
    _listen(config)
    from monarch.job import SlurmJob  # type: ignore[import-untyped,unused-ignore]

    schedulers.limit_slurm_commands()
    job = SlurmJob(
        config.counts,
        python_exe=f"{sys.executable} -P",
        job_name="forge-agents",
        slurm_args=config.slurm_args,
        time_limit=config.time_limit or None,
        partition=config.partition or None,
        account=config.account or None,
        qos=config.qos or None,
        gpus_per_node=gpus_per_node,
        job_start_timeout=math.ceil(config.start_timeout_s),
    )
    return _of_scheduler(job, config)


def _kubernetes(config: Hosts) -> Job:
    try:
        from monarch.job.kubernetes import KubernetesJob  # type: ignore[import-untyped,unused-ignore]
    except (ImportError, RuntimeError) as cause:
        raise HostError(
            f"kind='kubernetes' of the mesh: {cause}. Install with: pip install 'forge-agents-rl[kubernetes]'"
        ) from cause
    _listen(config)
    job = KubernetesJob(config.namespace, timeout=math.ceil(config.start_timeout_s))
    for role, count in config.counts.items():
        job.add_mesh(role, count)
    hosts = _of_scheduler(job, config)
    try:
        schedulers.check_ranks_of_pods(config.namespace, tuple(config.counts))
    except HostError:
        hosts.end()
        raise
    return hosts


def _of_scheduler(job: Any, config: Hosts) -> Job:
    """Wait for the job of a scheduler to run. This blocks, because nothing else can be done meanwhile."""

    def end() -> None:
        with contextlib.suppress(NotImplementedError):  # pods are the user's, and Monarch refuses to delete them
            job.kill()

    _listen(config)  # again, because the constructor of Monarch's job resets the address
    warn_of_open_ports([f"the TCP ports of {config.kind} hosts"])  # Monarch's jobs have no other transport
    try:
        state = job.state(cached_path=None)
    except (RuntimeError, OSError, ValueError) as cause:
        end()
        raise HostError(
            f"kind={config.kind!r} of the mesh: {cause}; requested hosts: {config.counts}, "
            f"start_timeout_s={config.start_timeout_s:g}"
        ) from cause
    except BaseException:  # Ctrl-C in the queue
        end()
        raise
    return Job(meshes={role: getattr(state, role) for role in config.counts}, end=end)


def _listen(config: Hosts) -> None:
    try:
        _monarch.enable_transport(config.address or ("tls" if config.certificate else "tcp"))
    except RuntimeError as cause:
        raise HostError(
            f"kind={config.kind!r} of the mesh needs Monarch on TCP, but this process already uses Monarch without it. "
            "Start the run in a new process"
        ) from cause
