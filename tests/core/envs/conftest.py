"""A registry of a test's own, and an importable helper module of this folder."""

import sys
from pathlib import Path

import pytest

import forge_agents as fa
from forge_agents.envs import registry

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture
def own_registry(monkeypatch):
    """Environments and suites that a test registers are forgotten after it."""
    fa.list_envs()  # the plugins are loaded before the registry is copied
    monkeypatch.setattr(registry, "_specs", dict(registry._specs))
    monkeypatch.setattr(registry, "_suites", dict(registry._suites))
