"""Imports of big libraries leave the collector and the libraries as they were."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator

import pytest

from forge_agents.imports import without_collections


@pytest.fixture(params=[True, False])
def collecting(request: pytest.FixtureRequest) -> Iterator[bool]:
    was = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if was else gc.disable)()


def test_inside_nobody_collects_and_afterwards_who_did_before(collecting: bool):
    with without_collections():
        with without_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() == collecting


def test_an_import_that_fails_leaves_the_collector_as_it_was(collecting: bool):
    with pytest.raises(ModuleNotFoundError), without_collections():
        importlib.import_module("forge_agents.no_such_module")
    assert gc.isenabled() == collecting
