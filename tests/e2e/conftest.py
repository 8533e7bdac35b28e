"""Shared by the end-to-end tests: one event loop, and their own actors."""

import asyncio
import importlib
import sys

import pytest

from forge_agents.runtime import mesh


@pytest.fixture(scope="module")
def run():
    """``run(coroutine)`` on the module's loop, so that engines live until the end of the module."""
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete
    loop.run_until_complete(mesh.shutdown_all())
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()


@pytest.fixture(scope="session")
def import_actors(tmp_path_factory):
    """``import_actors(module_name, source)``: a module that actors' processes can import as well."""
    folder = tmp_path_factory.mktemp("actors")
    sys.path.insert(0, str(folder))

    def make(name, source):
        (folder / f"{name}.py").write_text(source)
        importlib.invalidate_caches()
        return importlib.import_module(name)

    yield make
    sys.path.remove(str(folder))
