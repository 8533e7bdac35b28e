"""Timeouts for Slurm's commands and a check of Kubernetes' pods. Monarch's jobs have neither."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from forge_agents.errors import HostError, StallError

_COMMAND_TIMEOUT_S = 120.0
"""Maximum seconds of one call of sbatch, squeue or scancel."""
_PODS_TIMEOUT_S = 60.0
_RANK_LABEL = "apps.kubernetes.io/pod-index"


def limit_slurm_commands() -> None:
    """Have Monarch's calls of Slurm's commands end after a timeout. Monarch waits for them without one."""
    from monarch._src.job import slurm  # type: ignore[import-untyped,unused-ignore]

    slurm.subprocess = SimpleNamespace(run=_run, CalledProcessError=subprocess.CalledProcessError)


def _run(words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command as `subprocess.run` does with Monarch's options, and with a timeout. Its children end with it."""
    script: str | None = options.get("input")
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL if script is None else subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a command may be a script, and its children would keep the pipes open
    )
    try:
        stdout, stderr = process.communicate(script, timeout=_COMMAND_TIMEOUT_S)
    except BaseException as cause:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(cause, subprocess.TimeoutExpired):
            raise _stall(words) from None
        raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, words, stdout, stderr)
    return subprocess.CompletedProcess(words, 0, stdout, stderr)


def _stall(words: Sequence[str]) -> Exception:
    """Return the error of a command that did not end. Monarch logs that of scancel, and others end the run."""
    why = f"{shlex.join(words)} did not answer within {_COMMAND_TIMEOUT_S:g} s"
    if words[0] == "scancel":
        why += f". The job may still run. Repeat the command: {shlex.join(words)}"
        return subprocess.CalledProcessError(-signal.SIGKILL, words, "", why)
    if words[0] == "sbatch":
        why += f". If squeue shows a job forge-agents_{os.getpid()}, cancel it"
    return StallError(why, words[0])


def check_ranks_of_pods(namespace: str, roles: Sequence[str]) -> None:
    """Check that no two pods of a role have the same rank. Monarch would take the one that was ready last.

    Raises:
        HostError: Two pods have the same rank, and the message names both. Or Kubernetes does not list the pods.
    """
    from kubernetes import client  # type: ignore[import-not-found,import-untyped,unused-ignore]

    for role in roles:
        try:
            pods = client.CoreV1Api().list_namespaced_pod(
                namespace=namespace,
                label_selector=f"app.kubernetes.io/name=monarch-worker,monarch.pytorch.org/mesh-name={role}",
                _request_timeout=_PODS_TIMEOUT_S,
            )
        except Exception as cause:  # the client's and its HTTP library's errors share no base class
            raise HostError(f"the {role} pods of namespace {namespace!r} cannot be listed: {cause}") from cause
        names: dict[str, list[str]] = defaultdict(list)
        for pod in pods.items:
            if pod.status.phase not in ("Succeeded", "Failed"):
                names[(pod.metadata.labels or {}).get(_RANK_LABEL, "")].append(pod.metadata.name)
        for rank, same in sorted(names.items()):
            if rank and len(same) > 1:
                raise HostError(
                    f"pods {' and '.join(sorted(same))} of namespace {namespace!r} both have rank {rank} of {role}. A "
                    "namespace must hold the pods of one run only. Delete one of them, or use a namespace for each run"
                )
