"""How there come to be hosts: processes here, host processes elsewhere, a Slurm job, pods.

In: `Hosts`. Out: Monarch's host meshes, and what ends them. Waits for the scheduler, as long as `Hosts` says.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_agents.errors import HostError
from forge_agents.runtime import _monarch
from forge_agents.runtime.exposure import warn_of_open_ports
from forge_agents.runtime.hosts import ON_GPUS, Hosts
from forge_agents.runtime.machine import gpu_variables, visible_gpus

LOOPBACK = ("ipc://", "tcp://127.0.0.1:", "tcp://localhost:", "tls://127.0.0.1:", "tls://localhost:")
"""How addresses begin that only this machine reaches."""
_PROCESS_END_S = 2.0
_AFTERWARDS_S = 60.0
"""Monarch gives up later than we do: its words name no host."""


@dataclass(slots=True, kw_only=True)
class Job:
    """Hosts that were asked for."""

    meshes: Mapping[str, Any]
    """Monarch's host mesh by role; dimension ``hosts``."""
    end: Callable[[], None]
    """Ends what `Monarch` itself does not: processes here, the scheduler's job. Twice is no error."""
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """By role, what errors call the hosts beside their number; a role that is missing has nothing better."""
    pids: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By role, ids of host processes that run on this machine."""


def start_job(config: Hosts, env: Mapping[str, str], *, gpus_per_node: int | None) -> Job:
    """Ask for the hosts. Where it needs TCP, this must be the process's first use of Monarch.

    Args:
        config: Of another kind than "local".
        env: Variables of host processes that are started here.
        gpus_per_node: That a scheduler is asked for; None: it is told nothing of them.

    Raises:
        HostError: The scheduler refuses, or a library or a program for it is missing.
    """
    starters: Mapping[str, Callable[[], Job]] = {
        "process": lambda: _processes(config, env),
        "attach": lambda: _attached(config),
        "slurm": lambda: _slurm(config, gpus_per_node),
        "kubernetes": lambda: _kubernetes(config),
    }
    _monarch.configure(mesh_attach_config_timeout=f"{config.start_timeout_s + _AFTERWARDS_S:g}s")
    return starters[config.kind]()


def _processes(config: Hosts, env: Mapping[str, str]) -> Job:
    """Monarch's ProcessJob leaves its hosts behind when the controller is killed; these end with a pipe."""
    folder = Path(tempfile.mkdtemp(prefix="forge-agents-hosts-"))
    started: list[subprocess.Popen[bytes]] = []

    def end() -> None:
        died = any(process.poll() is not None for process in started)
        for process in started:
            _end(process)
        if not died:  # errors name the log of a host that died
            shutil.rmtree(folder, ignore_errors=True)

    workers: dict[str, tuple[str, ...]] = {}
    gpus = gpus_of_processes(config, visible_gpus())
    try:
        for role, count in config.counts.items():
            workers[role] = tuple(_monarch.new_host_address(f"ipc://{folder}/{role}-{i}") for i in range(count))
            for number, address in enumerate(workers[role]):
                seen = gpu_variables(gpus.get((role, number), ()))
                started.append(_host_process(address, folder / f"{role}-{number}.log", {**env, **seen}))
    except BaseException:
        end()
        raise
    pids = iter([process.pid for process in started])
    return Job(
        meshes={role: _monarch.attach(role, addresses) for role, addresses in workers.items()},
        end=end,
        names={role: tuple(f"log {folder / role}-{i}.log" for i in range(len(w))) for role, w in workers.items()},
        pids={role: tuple(next(pids) for _ in addresses) for role, addresses in workers.items()},
    )


def gpus_of_processes(config: Hosts, gpus: Sequence[str]) -> dict[tuple[str, int], Sequence[str]]:
    """Which of this machine's GPUs each process that behaves as a host sees, by role and number.

    As many as `config` says, the others get equal parts of what is left; the controller's own host, where it computes,
    has the first. Empty where there are too few: then they share them all.
    """
    here = [role for role in ("learner", "engines") if role not in config.counts]
    hosts = [(role, number) for role in ON_GPUS for number in range(config.counts.get(role, 0))]
    given = [config.gpus.get(role, 0) for role, _ in hosts]
    kept = sum(config.gpus.get(role, 0) for role in here)
    parts = given.count(0) + bool(here and not kept)
    left = len(gpus) - sum(given) - kept
    if left < parts:
        return {}
    each = left // parts if parts else 0
    at, found = kept or each * bool(here), dict[tuple[str, int], Sequence[str]]()
    for host, count in zip(hosts, given, strict=True):
        found[host] = gpus[at : at + (count or each)]
        at += count or each
    return found


def _host_process(address: str, log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "forge_agents.runtime.host_process", "--address", address, "--end-with-stdin"],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, **env},
            start_new_session=True,  # Ctrl-C is the controller's to handle
        )


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a host process; its own processes end with it."""
    if process.stdin is not None:
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_PROCESS_END_S)
    with contextlib.suppress(ProcessLookupError):  # what it started is in its session, not in its group
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _attached(config: Hosts) -> Job:
    addresses = {role: workers[: config.counts[role]] for role, workers in config.workers.items()}
    warn_of_open_ports(address for workers in addresses.values() for address in workers)
    if config.certificate:
        _monarch.use_certificate(config.certificate)
    if config.address or not all(one.startswith(LOOPBACK) for role in addresses.values() for one in role):
        _listen(config)
    return Job(
        meshes={role: _monarch.attach(role, workers) for role, workers in addresses.items()},
        end=lambda: None,
        names=addresses,
    )


def _slurm(config: Hosts, gpus_per_node: int | None) -> Job:
    if shutil.which("sbatch") is None or shutil.which("squeue") is None:
        raise HostError(
            "kind='slurm' of the mesh needs sbatch and squeue on the path, and they are not; start the run where jobs "
            "are submitted, or use kind='attach' inside a job"
        )
    _listen(config)
    from monarch.job import SlurmJob  # type: ignore[import-untyped,unused-ignore]

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
            f"kind='kubernetes' of the mesh: {cause}; install with: pip install 'forge-agents-rl[kubernetes]'"
        ) from cause
    _listen(config)
    job = KubernetesJob(config.namespace, timeout=math.ceil(config.start_timeout_s))
    for role, count in config.counts.items():
        job.add_mesh(role, count)
    return _of_scheduler(job, config)


def _of_scheduler(job: Any, config: Hosts) -> Job:
    """Waits here until the job runs; nothing else is to be done meanwhile."""
    warn_of_open_ports([f"the TCP ports of {config.kind} hosts"])  # Monarch's jobs have no other transport
    try:
        state = job.state(cached_path=None)
    except (RuntimeError, OSError, ValueError) as cause:
        job.kill()
        raise HostError(
            f"kind={config.kind!r} of the mesh: {cause}; it was asked for {config.counts} and given "
            f"{config.start_timeout_s:g} s"
        ) from cause
    except BaseException:  # Ctrl-C in the queue
        job.kill()
        raise
    return Job(meshes={role: getattr(state, role) for role in config.counts}, end=job.kill)


def _listen(config: Hosts) -> None:
    try:
        _monarch.enable_transport(config.address or ("tls" if config.certificate else "tcp"))
    except RuntimeError as cause:
        raise HostError(
            f"kind={config.kind!r} of the mesh needs Monarch on TCP, and this process uses it otherwise already; start "
            "the run in a process of its own"
        ) from cause
