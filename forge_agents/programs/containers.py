"""Container images as programs: the command lines by which an engine runs one of them and ends it.

In: an image, how it is to be run, a folder of the host. Out: words for docker or podman. Waits for an engine that is
asked whether it has the image.
"""

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
"""Where the episode's folder is in a container."""
_ENGINES = ("docker", "podman")
_BACKLOG = 128
_IP_FREEBIND = 15  # <linux/in.h>
_ANSWER_S = 60.0
"""In which an engine has to say whether it has an image."""
_Network = Literal["bridge", "models", "host"]


@settings_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """How a `Program` of a container image is run, where the defaults will not do."""

    engine: str = ""
    """Command line of the engine, which runs on this machine, as ``"podman --runtime=runc"``; empty: docker or else
    podman, whichever has the image."""
    arguments: Sequence[str] = ()
    """More of them for its ``run``, behind ours, as ``("--gpus=all", "--volume=/data:/data:ro")``."""
    network: _Network = "bridge"
    """Network of the container. "bridge" (default): the engine's own, with the internet; of this machine, the container
    reaches the gateway, and servers that listen on all interfaces. "models": a loopback on which only the gateway
    answers, and no internet; needs podman run by root. "host": this machine's network, with all that listens on its
    loopback. Programs in such a container can also connect to abstract Unix sockets of this machine's programs."""
    memory_mb: int | None = None
    """MiB of memory, swap included; None: as the engine is set."""
    cpus: float | None = None
    """Processors' time that it may take, as 0.5 or 2; None: as the engine is set."""
    processes: int | None = None
    """Processes and threads at one time; None: as the engine is set."""

    def __post_init__(self) -> None:
        if isinstance(self.arguments, str) or not all(isinstance(word, str) for word in self.arguments):
            raise TypeError(f"arguments={self.arguments!r} of a container; give a list of words")
        object.__setattr__(self, "arguments", tuple(self.arguments))
        if self.network not in get_args(_Network):
            guess = did_you_mean(str(self.network), get_args(_Network))
            raise ValueError(f"network={self.network!r} of a container is none of {get_args(_Network)}.{guess}")
        for name in ("memory_mb", "cpus", "processes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value} of a container must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A container image, and how it is run."""

    name: str
    container: Container

    def __post_init__(self) -> None:
        if not self.name or self.name.startswith("-") or any(letter.isspace() for letter in self.name):
            raise ValueError(f"image={self.name!r} is no name of an image; give one such as 'my/crew:1'")

    def engine(self) -> tuple[str, ...]:
        """The words of the engine that runs it; asked once in a process.

        Raises:
            NotReadyError: There is none, or none has the image; says what to do.
        """
        return _engine(self.name, self.container)

    def host_address(self) -> str:
        """Address at which a container on the engine's own network reaches this machine.

        Empty if the gateway's port on the container's loopback leads to this machine's loopback.

        Raises:
            NotReadyError: The engine offers neither; says what to do.
        """
        engine = self.engine()
        return _host_address(engine) if self.container.network == "bridge" else ""

    def run(self, words: Sequence[str], called: str, folder: Path, variables: Iterable[str], port: int) -> list[str]:
        """The command line that runs it once.

        Args:
            words: Of the program; none: the image's own.
            called: What the container is called, by which it is ended.
            folder: Of the host, at `FOLDER` in the container, and where `words` start.
            variables: Names of those that it gets from the engine's client: on a command line all users read values.
            port: Port of the gateway on this machine's loopback.
        """
        most = self.container
        network = "host"  # with "models", the one in which the engine's client runs
        if most.network == "bridge":
            network = "bridge" if self.host_address() else f"pasta:-T,{port}"
        limits = [] if most.memory_mb is None else [f"--memory={most.memory_mb}m", f"--memory-swap={most.memory_mb}m"]
        limits += [] if most.cpus is None else [f"--cpus={most.cpus}"]
        limits += [] if most.processes is None else [f"--pids-limit={most.processes}"]
        return [
            *self.engine(),
            *("run", "--interactive", f"--name={called}"),  # --rm has podman's docker interface forget the status
            "--pull=never",  # or every episode at once would look for what is missing
            f"--network={network}",
            "--log-driver=none",  # what it prints is kept here, and only the end of it
            f"--ulimit=fsize={FREE_FILE_MB << 20}",
            f"--volume={folder}:{FOLDER}:Z",  # Z: where SELinux would forbid it
            *([f"--workdir={FOLDER}"] if words else []),
            *(f"--env={name}" for name in variables),
            *limits,
            *most.arguments,
            self.name,
            *words,
        ]

    def ends(self, called: str) -> list[list[str]]:
        """Command lines that end a container: the first kills what runs in it, the second removes it."""
        return [[*self.engine(), "kill", called], [*self.engine(), "rm", "--force", "--volumes", called]]


@functools.lru_cache
def _engine(image: str, container: Container) -> tuple[str, ...]:
    alone = container.network == "models"
    named = [tuple(shlex.split(container.engine))] if container.engine else [(name,) for name in _ENGINES]
    said: list[str] = []
    for engine in named:
        problem = _problem(*engine, "image", "inspect", image)
        if not problem and alone and _problem(*engine, *_OURS, says="false false"):
            problem = "it is no podman that root runs here, which network='models' needs; or take network='host'"
        if not problem:
            return engine
        said.append(f"{redact_command(engine)}: {problem}")
    raise NotReadyError(
        f"no container engine has the image {image!r}. {'; '.join(said)}. Build or pull it there, as by "
        f"`{redact_command(named[-1])} pull {image}`, or name your engine: container=Container(engine=...)"
    )


@functools.lru_cache
def _host_address(engine: tuple[str, ...]) -> str:
    """As `Image.host_address`."""
    podman = Path(engine[0]).name.startswith("podman")
    if podman and not _problem(*engine, "info", "--format", "{{.Host.Security.Rootless}}", says="true"):
        if not _problem(*engine, "info", "--format", "{{.Host.Pasta.Executable}}", says="pasta"):
            return ""
        problem = "podman without root has no pasta, which leads from a container to one port of this machine"
    else:
        name, configured = ("podman", ".Subnets") if podman else ("bridge", ".IPAM.Config")
        answer = _answer(*engine, "network", "inspect", name, "--format", "{{(index " + configured + " 0).Gateway}}")
        problem = f"the network {name!r} has no address of this machine: {answer!r:.100}"
        with contextlib.suppress(ValueError):
            return str(ipaddress.IPv4Address(answer))
    raise NotReadyError(
        f"{shlex.join(engine)}: a container cannot be given a network of its own: {problem}. Mend that, or choose "
        "network='models' or network='host' for Container; with 'host', programs in the container reach all that "
        "listens on this machine's loopback, and its abstract Unix sockets"
    )


def _answer(*words: str) -> str:
    """What a command of an engine prints, or why it failed."""
    try:
        asked = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as cause:
        return str(cause)
    return " ".join((asked.stderr if asked.returncode else asked.stdout).split())


def listen_at(address: str) -> socket.socket:
    """A socket for connections to an address of this machine, which may not exist until the first container runs."""
    asking = socket.socket()
    try:
        asking.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
        asking.bind((address, 0))
        asking.listen(_BACKLOG)
    except OSError:
        asking.close()
        raise
    return asking


_OURS = ("info", "--format", "{{.Host.ServiceIsRemote}} {{.Host.Security.Rootless}}")
"""Asks podman whether what it starts is not its own child, or in another user namespace."""


def _problem(*words: str, says: str = "") -> str:
    """Why a command of an engine failed, or did not say what was expected; empty where it did well."""
    try:
        asked = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it said nothing within {_ANSWER_S:g} s"
    except OSError as cause:
        return "it is not installed" if isinstance(cause, FileNotFoundError) else str(cause)
    if asked.returncode:
        return " ".join(asked.stderr.split())[-300:] or f"it exited with {asked.returncode}"
    return "" if says in asked.stdout else f"it said {asked.stdout.strip()!r:.100}"


def without_links(folder: Path) -> None:
    """Remove what is neither file nor folder: a link leads elsewhere here than in a container, a pipe nowhere."""
    folders = [str(folder)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif not entry.is_file(follow_symlinks=False):
                    with contextlib.suppress(OSError):  # of another user's folder
                        Path(entry.path).unlink()


def free_for_all(folder: Path) -> None:
    """Let whoever a container runs as write what lies in `folder`; who may reach it on the host is its parent's say."""
    for at, _, names in os.walk(folder):
        Path(at).chmod(0o777)
        for name in names:
            (Path(at) / name).chmod(0o666)
