"""Fetches under a writer that never rests, by each transport that runs here: how many were torn, how long they took."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from perf_common import Options, goal, in_child

from forge_agents.runtime._monarch import Actor, concurrent_endpoint
from forge_agents.runtime.hosts import Hosts

TENSORS, NUMBERS = 16, 2**16
READERS = 2
CALL_S = 1800


def measure(options: Options) -> list[dict[str, Any]]:
    """The record ``torn``."""
    result = in_child(run, options, timeout_s=2 * CALL_S)
    ways = {"messages": run_messages, "messages over TCP": run_tcp}
    others = {name: in_child(way, options, timeout_s=2 * CALL_S) for name, way in ways.items()}
    size = TENSORS * NUMBERS * 2
    torn = result["torn"] + sum(each["torn"] for each in others.values())
    peer = "the values that were written: every number of a version is the same, and follows from its number"
    facts = {"transport": "shared memory", "other_transports": others, "peer": peer}
    goals = {
        "torn": goal(torn, 0, at_most=True),
        "shared_over_weights": goal(result["most_shared_bytes"] / size, 1, at_most=True),
    }
    return [{"measure": "torn", **result, **facts, "goals": goals}]


async def run(options: Options) -> dict[str, float]:
    """Readers share memory with the store."""
    return await _run(500 if options.quick else 10_000)


async def run_messages(options: Options) -> dict[str, float]:
    """Readers on a simulated other host. Each fetch copies 2 MB."""
    return await _run(50 if options.quick else 500, Hosts(kind="process", hosts={"engines": 1}))


async def run_tcp(options: Options) -> dict[str, float]:
    """The same, and hosts reach each other by TCP."""
    with _hosts(2) as (first, second):
        hosts = Hosts(kind="attach", workers={"learner": (first,), "engines": (second,)})
        return await _run(50 if options.quick else 500, hosts)


@contextlib.contextmanager
def _hosts(count: int) -> Iterator[list[str]]:
    """Addresses of so many host processes, which end with the block."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        addresses = [f"tcp://127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    words = [sys.executable, "-m", "forge_agents.runtime.host_process", "--address"]
    processes = [subprocess.Popen([*words, address]) for address in addresses]
    try:
        yield addresses
    finally:
        for process in processes:
            process.kill()
            process.wait()


def value_of(version: int) -> float:
    """Fill value of `version`: exact in bfloat16, different in each of the next 198 versions."""
    return float(version % 199)


class Writer(Actor):
    """Publishes one version after the other until it is told to rest."""

    def __init__(self, store: Any) -> None:
        from forge_agents.weights import Publisher

        self._publisher = Publisher(store, "torn")
        self._version, self._goes_on, self._most_bytes = 0, True, 0

    @concurrent_endpoint
    async def publish(self) -> None:
        await self._publish()

    async def _publish(self) -> None:
        import torch

        tensors = {f"w{i}": torch.full((NUMBERS,), value_of(self._version)) for i in range(TENSORS)}
        await self._publisher.publish(self._version, tensors)
        self._version += 1
        self._most_bytes = max(self._most_bytes, _shared_bytes())

    @concurrent_endpoint
    async def hammer(self) -> dict[str, float]:
        """Publish versions without a pause until `rest` is called."""
        started = time.perf_counter()
        while self._goes_on:
            await self._publish()
        seconds = time.perf_counter() - started
        return {"versions": self._version, "versions_per_s": self._version / seconds, "shared": self._most_bytes}

    @concurrent_endpoint
    async def rest(self) -> None:
        self._goes_on = False


class Reader(Actor):
    """Reads again and again, copies and lent pages in turn, and looks at every number."""

    def __init__(self, store: Any) -> None:
        from forge_agents.weights import Subscriber

        self._subscriber = Subscriber(store, "torn")

    @concurrent_endpoint
    async def read(self, count: int) -> dict[str, float]:
        torn, seen, waited = 0, set(), 0.0

        def look(tensors: Any, version: int) -> None:
            nonlocal torn
            torn += not all(bool((tensor == value_of(version)).all()) for tensor in tensors.values())
            seen.add(version)

        for number in range(count):
            start = time.perf_counter()
            async with self._subscriber.load() as weights:
                if number % 2:
                    await asyncio.to_thread(look, weights.tensors, weights.version)
                    await asyncio.to_thread(weights.check)
                copies = {name: tensor.clone() for name, tensor in weights.tensors.items()}
            if not number % 2:
                look(copies, weights.version)
            waited = max(waited, time.perf_counter() - start)
        return {"torn": torn, "versions_seen": len(seen), "longest_s": waited}


def _shared_bytes() -> int:
    """Bytes of the segments that this process offers, whole pages counted."""
    result = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            status = link.stat()
            if "forge-agents-weights" in str(link.readlink()):
                result[status.st_ino] = status.st_size
        except OSError:  # closed meanwhile
            continue
    return sum(result.values())


async def _run(fetches: int, hosts: Hosts | None = None) -> dict[str, float]:
    from forge_agents.runtime import mesh
    from forge_agents.weights import WeightStore

    async def ask(who: Any, endpoint: str, *args: Any) -> Any:
        return await mesh.with_deadline(getattr(who, endpoint).call_one(*args), CALL_S, who=endpoint, what="its work")

    async with mesh.session():
        await mesh.launch_hosts(hosts or Hosts())
        store = await WeightStore.start()
        writer = mesh.spawn_procs("writer", role="learner", threads=1).spawn("writer", Writer, store.ref)
        readers = [
            mesh.spawn_procs(f"reader {i}", role="engines", threads=1).spawn("reader", Reader, store.ref)
            for i in range(READERS)
        ]
        await ask(writer, "publish")
        writing = asyncio.ensure_future(ask(writer, "hammer"))
        started = time.perf_counter()
        read = await asyncio.gather(*(ask(reader, "read", fetches // READERS) for reader in readers))
        seconds = time.perf_counter() - started
        await ask(writer, "rest")
        written = await writing
        await store.stop()
    return {
        "fetches": float(fetches),
        "torn": float(sum(each["torn"] for each in read)),
        "versions_written": written["versions"],
        "versions_seen": float(min(each["versions_seen"] for each in read)),
        "fetches_per_s": round(fetches / seconds, 1),
        "versions_per_s": round(written["versions_per_s"], 1),
        "longest_fetch_s": round(max(each["longest_s"] for each in read), 3),
        "most_shared_bytes": float(written["shared"]),
    }
