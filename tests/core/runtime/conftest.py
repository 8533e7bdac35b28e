"""Backend of tests that are coroutines, and actors in a module next to no package, as a user's script has."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

ACTORS = """
import asyncio, ctypes, multiprocessing, os
from monarch._rust_bindings.monarch_hyperactor.config import get_global_config
from forge_agents.runtime._monarch import Actor, concurrent_endpoint, current_rank

class Probe(Actor):
    def __init__(self):
        self.rank = current_rank().rank

    @concurrent_endpoint
    async def pid(self):
        print("pid asked", flush=True)
        return os.getpid()

    @concurrent_endpoint
    async def variable(self, name):
        return os.environ.get(name)

    @concurrent_endpoint
    async def lock(self):
        self.kept = multiprocessing.get_context("forkserver").Lock()
        return self.kept._semlock.name

    @concurrent_endpoint
    async def settings(self, *names):
        return [get_global_config()[name] for name in names]

    @concurrent_endpoint
    async def answer_and_end(self):
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), 9)

    @concurrent_endpoint
    async def crash(self, sign):
        print("about to crash", flush=True)
        getattr(ctypes.PyDLL(None), "raise")(sign)  # keeps the other threads still, as raise_signal would not

    @concurrent_endpoint
    async def nap(self, seconds):
        await asyncio.sleep(seconds)
        return "rested"

    @concurrent_endpoint
    async def nap_of(self, other, seconds):
        print("waits for another process", flush=True)
        return await other.nap.choose(seconds)

    @concurrent_endpoint
    async def fail_on(self, rank):
        if self.rank == rank:
            raise LookupError(f"rank {rank} has no such thing")
        await asyncio.sleep(200)
"""


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def probe_actors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    folder = tmp_path_factory.mktemp("actors")
    (folder / "probe_actors.py").write_text(ACTORS)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("probe_actors")
    sys.path.remove(str(folder))
