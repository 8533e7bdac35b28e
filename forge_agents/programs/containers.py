"""Container images as programs: command lines of docker or podman that run and remove a container."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import math
import os
import shlex
import socket
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from forge_agents.credentials import redact_command
from forge_agents.errors import NotReadyError, did_you_mean
from forge_agents.sandbox.sandbox import FREE_FILE_MB
from forge_agents.settings import settings_class

FOLDER = "/work"
"""Path of the episode's folder in a container."""
_ENGINES = ("docker", "podman")
_BACKLOG = 128
_IP_FREEBIND = 15  # <linux/in.h>
_ENGINE_TIMEOUT_S = 60.0
"""Time limit for questions to an engine."""
_Network = Literal["bridge", "models", "host"]


@settings_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """Settings of the container in which a `Program` with an image runs."""

    engine: str = ""
    """Command line of the local container engine, e.g. ``"podman --runtime=runc"``. Default: docker or podman,
    whichever has the image."""
    arguments: Sequence[str] = ()
    """Additional arguments of the engine's ``run``, e.g. ``("--gpus=all", "--volume=/data:/data:ro")``."""
    network: _Network = "bridge"
    """Network of the container. "bridge" (default): the engine's own network, with internet access. On this machine the
    container reaches the gateway and servers that listen on all interfaces. "models": a loopback with only the gateway
    and no internet access. Requires podman run by root. "host": this machine's network, including servers on its
    loopback. Programs in such a container can also connect to abstract Unix sockets of this machine's programs."""
    memory_mb: int | None = None
    """Memory limit in MiB, swap included. None: the engine's default."""
    cpus: float | None = None
    """Limit of processor time in cores, such as 0.5 or 2. None: the engine's default."""
    processes: int | None = None
    """Maximum number of processes and threads. None: the engine's default."""

    def __post_init__(self) -> None:
        if isinstance(self.arguments, str) or not all(isinstance(word, str) for word in self.arguments):
            raise TypeError(f"arguments={self.arguments!r} of a container. Give a list of words")
        object.__setattr__(self, "arguments", tuple(self.arguments))
        if self.network not in get_args(_Network):
            hint = did_you_mean(str(self.network), get_args(_Network))
            raise ValueError(f"network={self.network!r} of a container is none of {get_args(_Network)}.{hint}")
        for name in ("memory_mb", "cpus", "processes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value} of a container must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A container image with the settings of its containers."""

    name: str
    container: Container

    def __post_init__(self) -> None:
        if not self.name or self.name.startswith("-") or any(letter.isspace() for letter in self.name):
            raise ValueError(f"image={self.name!r} is not the name of an image. Give one such as 'my/crew:1'")

    def engine(self) -> tuple[str, ...]:
        """Return the words of the engine's command line. Raises NotReadyError if no engine has the image."""
        return _find_engine(self.name, self.container)

    def host_address(self) -> str:
        """Return the address at which a container on the engine's own network reaches this machine.

        Empty if its loopback forwards the gateway's port. Raises NotReadyError if the engine supports neither.
        """
        engine = self.engine()
        return _find_host_address(engine) if self.container.network == "bridge" else ""

    def run(self, words: Sequence[str], name: str, folder: Path, variables: Iterable[str], port: int) -> list[str]:
        """Return the command line that runs the image.

        Args:
            words: Command line of the program. Empty: the image's own.
            name: Name of the container.
            folder: Folder of the host that is mounted at `FOLDER`, where `words` start.
            variables: Names of environment variables, whose values come from the engine's client: a command line can be
                read by all users.
            port: Port of the gateway on this machine's loopback.
        """
        settings = self.container
        network = "host"  # with "models", the namespace in which the engine's client runs
        if settings.network == "bridge":
            network = "bridge" if self.host_address() else f"pasta:-T,{port}"
        memory = settings.memory_mb
        limits = [] if memory is None else [f"--memory={memory}m", f"--memory-swap={memory}m"]
        limits += [] if settings.cpus is None else [f"--cpus={settings.cpus}"]
        limits += [] if settings.processes is None else [f"--pids-limit={settings.processes}"]
        return [
            *self.engine(),
            *("run", "--interactive", f"--name={name}"),  # no --rm: podman's docker interface then forgets the status
            "--pull=never",  # otherwise all episodes would pull a missing image at once
            f"--network={network}",
            "--cap-drop=NET_RAW",  # raw packets could steal the calls of other containers of the same network
            "--security-opt=no-new-privileges",
            "--log-driver=none",  # only the end of the output is kept, by us
            f"--ulimit=fsize={FREE_FILE_MB << 20}",
            f"--volume={folder}:{FOLDER}:Z",  # Z: relabel for SELinux
            *([f"--workdir={FOLDER}"] if words else []),
            *(f"--env={variable}" for variable in variables),
            *limits,
            *settings.arguments,
            self.name,
            *words,
        ]

    def stop_commands(self, name: str) -> list[list[str]]:
        """Return command lines that kill and then remove a container."""
        return [[*self.engine(), "kill", name], [*self.engine(), "rm", "--force", "--volumes", name]]


_LOCAL_ROOT = ("info", "--format", "{{.Host.ServiceIsRemote}} {{.Host.Security.Rootless}}")
"""Asks podman whether its containers are remote, or in another user namespace."""


@functools.lru_cache
def _find_engine(image: str, container: Container) -> tuple[str, ...]:
    engines = [tuple(shlex.split(container.engine))] if container.engine else [(name,) for name in _ENGINES]
    problems: list[str] = []
    for engine in engines:
        problem = _problem(*engine, "image", "inspect", image)
        if not problem and container.network == "models" and _problem(*engine, *_LOCAL_ROOT, expected="false false"):
            problem = "it is not podman run by root here, which network='models' needs, or use network='host'"
        if not problem:
            return engine
        problems.append(f"{redact_command(engine)}: {problem}")
    raise NotReadyError(
        f"no container engine has the image {image!r}. {'; '.join(problems)}. Build or pull it there, e.g. with "
        f"`{redact_command(engines[-1])} pull {image}`, or name your engine: container=Container(engine=...)"
    )


@functools.lru_cache
def _find_host_address(engine: tuple[str, ...]) -> str:
    podman = Path(engine[0]).name.startswith("podman")
    if podman and not _problem(*engine, "info", "--format", "{{.Host.Security.Rootless}}", expected="true"):
        if not _problem(*engine, "info", "--format", "{{.Host.Pasta.Executable}}", expected="pasta"):
            return ""
        problem = "podman without root has no pasta, which forwards single ports of this machine to a container"
    else:
        network, path = ("podman", ".Subnets") if podman else ("bridge", ".IPAM.Config")
        form = "{{(index " + path + " 0).Gateway}}"
        address, failure = _ask(*engine, "network", "inspect", network, "--format", form)
        problem = f"the network {network!r} has no address of this machine: {failure or address!r:.100}"
        with contextlib.suppress(ValueError):
            return str(ipaddress.IPv4Address(address))
    raise NotReadyError(
        f"{shlex.join(engine)}: a container cannot be given a network of its own: {problem}. Fix that, or choose "
        "network='models' or network='host' for Container. With 'host', programs in the container reach all servers on "
        "this machine's loopback, and its abstract Unix sockets"
    )


def _ask(*words: str) -> tuple[str, str]:
    """Return the output of an engine's command, and why it failed. One of them is empty."""
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ENGINE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"it printed nothing within {_ENGINE_TIMEOUT_S:g} s"
    except OSError as cause:
        return "", "it is not installed" if isinstance(cause, FileNotFoundError) else str(cause)
    if done.returncode:
        return "", " ".join(done.stderr.split())[-300:] or f"it exited with {done.returncode}"
    return " ".join(done.stdout.split()), ""


def _problem(*words: str, expected: str = "") -> str:
    """Return why an engine's command failed or did not print what was expected. Empty if it succeeded."""
    output, problem = _ask(*words)
    return problem or ("" if expected in output else f"it printed {output!r:.100}")


def listen_at(address: str) -> socket.socket:
    """Return a listening socket at an address of this machine, which may not exist before the first container runs."""
    listener = socket.socket()
    try:
        listener.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
        listener.bind((address, 0))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def remove_special_files(folder: Path) -> None:
    """Remove everything but files and folders: links have other targets outside the container, pipes no writer."""
    folders = [str(folder)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(OSError):  # in another user's folder
                        Path(entry.path).unlink()


def make_world_writable(folder: Path) -> None:
    """Let any user of a container write to `folder`. On the host, its parent folder restricts access."""
    for path, _, names in os.walk(folder):
        Path(path).chmod(0o777)
        for name in names:
            (Path(path) / name).chmod(0o666)
