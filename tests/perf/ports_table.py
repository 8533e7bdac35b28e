"""Listening sockets of each kind of run: which addresses and ports its processes open, and who can reach them.

    python tests/perf/ports_table.py [--kinds train ranks hosts view serve program]

Starts each kind with a tiny random model, reads the sockets of all its processes several times a second until it ends,
and prints a Markdown table. Exits with 1 if a TCP or UDP socket accepts data from beyond the loopback interface.
"""

from __future__ import annotations

import argparse
import contextlib
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from perf_common import markdown

_POLL_S = 0.1
_TIMEOUT_S = 3000.0
_ANSWER_S = 300.0
ENV = "forge/Relay-v0"
ENV_ARGS = {"tool": False, "partial_credit": 1.0}
KINDS: Mapping[str, str] = {
    "train": "training, one process per role",
    "ranks": "training, learner of two ranks, engine of two ranks (`engine.tp`)",
    "hosts": "training, `mesh.kind: process`: two hosts of the learner's ranks, one of the engine",
    "view": "`forge-agents view`",
    "serve": "`forge-agents serve` of a run's policies",
    "program": "training of a program's agent through the gateway",
}
"""Kinds of runs and their titles in the table."""


@dataclass(frozen=True, order=True)
class Listener:
    """A socket that waits for other processes."""

    protocol: str
    """"tcp", "udp", or "unix"."""
    address: str
    """IP address, or "abstract" or "path" for a Unix socket."""
    owner: str
    """Role of the process: "controller" or the end of its command line."""

    @property
    def is_local(self) -> bool:
        """Return whether only this machine reaches the socket."""
        return self.protocol == "unix" or ipaddress.ip_address(self.address).is_loopback


def listeners(root: int) -> Iterator[Listener]:
    """Return the listening sockets of a process and its descendants, as they are now."""
    try:
        top = psutil.Process(root)
        processes = [top, *top.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in processes:
        with contextlib.suppress(psutil.Error, OSError):
            owner = _owner(process)
            for connection in process.net_connections(kind="all"):
                yield from _listener(connection, owner)


def _listener(connection: Any, owner: str) -> Iterator[Listener]:
    if connection.family == socket.AF_UNIX:
        if connection.laddr:
            yield Listener("unix", "abstract" if connection.laddr[0] in "@\0" else "path", owner)
    elif connection.status == psutil.CONN_LISTEN:
        yield Listener("tcp", connection.laddr.ip, owner)
    elif connection.type == socket.SOCK_DGRAM and connection.laddr and not connection.raddr:
        yield Listener("udp", connection.laddr.ip, owner)


def _owner(process: psutil.Process) -> str:
    mesh = process.environ().get("FORGE_AGENTS_MESH", "").rpartition("-")[0]
    if mesh:
        return mesh
    words = process.cmdline()
    named = [word for word in words if "forge_agents" in word or "forge-agents" in word]
    # a process that has just ended has no command line
    return "controller" if __file__ in words else Path([*named, *words, process.name()][0]).name


def measured(kind: str, folder: Path) -> set[Listener]:
    """Run one kind in processes of its own, and return all sockets that were seen.

    Raises:
        RuntimeError: The run failed or took longer than `_TIMEOUT_S`; the message names its log.
    """
    log = folder / f"{kind}.log"
    command = [sys.executable, __file__, "--run", kind, "--folder", str(folder)]
    seen: set[Listener] = set()
    with log.open("wb") as output:
        run = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    deadline = time.monotonic() + _TIMEOUT_S
    try:
        while run.poll() is None and time.monotonic() < deadline:
            seen.update(listeners(run.pid))
            time.sleep(_POLL_S)
    finally:
        if run.poll() is None:
            for process in (*psutil.Process(run.pid).children(recursive=True), psutil.Process(run.pid)):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        run.wait()
    if run.returncode:
        raise RuntimeError(f"{kind} ended with {run.returncode}: {log.read_text(errors='replace')[-3000:]}")
    return seen


def table(found: Mapping[str, set[Listener]]) -> str:
    """Return the result in Markdown."""
    rows = []
    for kind, sockets in found.items():
        by_network = [
            [_shown(one) for one in sockets if (one.protocol != "unix") == network] for network in (True, False)
        ]
        rows.append((KINDS[kind], *(", ".join(sorted(set(shown))) or "none" for shown in by_network)))
    return markdown(("run", "TCP and UDP", "Unix sockets"), rows)


def _shown(one: Listener) -> str:
    return f"{one.owner}: {one.protocol} {one.address}" if one.protocol != "unix" else f"{one.owner}: {one.address}"


# ---- the runs


def train(folder: Path, *, learner_procs: int = 1, tp: int = 1, mesh: Any = None) -> None:
    """Train one step with a tiny random model."""
    import forge_agents as fa

    config = fa.GRPOConfig(
        groups_per_step=1,
        group_size=2,
        learner_procs=learner_procs,
        learner=fa.LearnerConfig(threads=1, compute_dtype="float32"),
        engine=fa.EngineConfig(dtype="float32", max_model_len=512, kv_cache_gb=0.05, threads=1, tp=tp),
    )
    team = fa.Policy("tiny-random", name="team", sampling=fa.Sampling(max_tokens=8))
    with fa.GRPOTrainer(team, config=config, out_dir=folder, mesh=mesh) as trainer:
        trainer.fit(ENV, steps=1, env_args=ENV_ARGS)


def train_on_hosts(folder: Path) -> None:
    """Train with a learner of two ranks on two hosts that are processes of this machine."""
    import forge_agents as fa

    train(folder, learner_procs=2, mesh=fa.Hosts(kind="process", hosts={"learner": 2, "engines": 1}))


def train_program(folder: Path) -> None:
    """Train the agent of a program that asks the gateway's model."""
    import forge_agents as fa

    script = folder / "agent.py"
    script.write_text(_PROGRAM)
    fa.register(
        "perf/Asker-v0",
        entry_point=fa.Program,
        program=[sys.executable, str(script)],
        agents=("team",),
        tasks=[{"question": "2"}],
        eval_tasks=[{"question": "2"}],
        reward=lambda task, result: 1.0,
    )
    config = fa.GRPOConfig(
        groups_per_step=1,
        group_size=2,
        learner=fa.LearnerConfig(threads=1, compute_dtype="float32"),
        engine=fa.EngineConfig(dtype="float32", max_model_len=512, kv_cache_gb=0.05, threads=1),
    )
    team = fa.Policy("tiny-random", name="team", sampling=fa.Sampling(max_tokens=8))
    with fa.GRPOTrainer(team, config=config, out_dir=folder / "run") as trainer:
        trainer.fit("perf/Asker-v0", steps=1)


_PROGRAM = """
import json, os, urllib.request
body = {"model": "team", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


def command_until_it_listens(*words: str, port: int) -> None:
    """Run a command of ours until its port accepts a connection, plus a moment, then end it."""
    run = subprocess.Popen([sys.executable, "-m", "forge_agents", *words])
    deadline = time.monotonic() + _ANSWER_S
    try:
        while run.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(_POLL_S)
        else:
            raise RuntimeError(f"{words[0]} did not listen on port {port}")
        time.sleep(20 * _POLL_S)
    finally:
        run.send_signal(signal.SIGTERM)  # background jobs of a shell ignore SIGINT
        try:
            run.wait(60)
        except subprocess.TimeoutExpired:
            run.kill()
            raise


def main() -> int:
    """Measure the kinds that were asked for, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="Kinds of runs.")
    parser.add_argument("--run", choices=list(KINDS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.run:
        start(chosen.run, chosen.folder)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        listening: dict[str, set[Listener]] = {}
        for kind in chosen.kinds:
            listening[kind] = measured(kind, Path(folder))
            sys.stderr.write(table({kind: listening[kind]}))
    sys.stdout.write(table(listening))
    return 0 if all(one.is_local for sockets in listening.values() for one in sockets) else 1


def start(kind: str, folder: Path) -> None:
    """Run one kind in this process and its children."""
    sys.path.append(str(Path(__file__).parents[1] / "helpers"))
    from process_checks import free_port

    port = free_port()
    if kind == "train":
        train(folder / kind)
    elif kind == "ranks":
        train(folder / kind, learner_procs=2, tp=2)
    elif kind == "hosts":
        train_on_hosts(folder / kind)
    elif kind == "program":
        train_program(folder)
    elif kind == "view":
        command_until_it_listens("view", str(_trained(folder)), "--port", str(port), port=port)
    else:
        command_until_it_listens("serve", str(_trained(folder)), "--port", str(port), port=port)


def _trained(folder: Path) -> Path:
    """Return a run's folder with an export: that of a kind before this one, or of the kind "train"."""
    if exports := [*folder.glob("*/export")]:
        return exports[0].parent
    subprocess.run(
        [sys.executable, __file__, "--run", "train", "--folder", str(folder)], check=True, timeout=_TIMEOUT_S
    )
    return folder / "train"


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    sys.exit(main())
