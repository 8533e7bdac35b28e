"""A registry of a test's own."""

import pytest

import forge_agents as fa
from forge_agents.envs import registry


@pytest.fixture
def own_registry(monkeypatch):
    """Environments and suites that a test registers are forgotten after it."""
    fa.list_envs()  # the plugins are loaded before the registry is copied
    monkeypatch.setattr(registry, "_specs", dict(registry._specs))
    monkeypatch.setattr(registry, "_suites", dict(registry._suites))
