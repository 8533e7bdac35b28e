"""Settings with which a run trained a model that it exported."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forge_agents.files import open_plain, user_path
from forge_agents.policy import Policy

_log = logging.getLogger(__name__)
_OF_PROMPTS = ("thinking", "keep_reasoning", "context")
"""Settings of a policy that its prompts depend on. A model plays best with those of its training."""


def settings_of(run: Path) -> dict[str, Any]:
    """Return the settings of a run, which the caller must not change. Empty if they cannot be read."""
    file = run / "config.yaml"
    try:
        status = file.lstat()
    except (OSError, ValueError):
        return {}
    return _settings_in(file, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=4)
def _settings_in(file: Path, *_stamp: int) -> dict[str, Any]:
    """Read a file of settings once per change: a stranger's file takes seconds, and a run may have many policies."""
    from forge_agents import safe_yaml  # needs PyYAML, which packages that play without a model do not install

    try:
        with open_plain(file) as stream:  # a pipe would block
            settings: Any = safe_yaml.read_stream(stream, name=str(file))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def trained_prompts(model: str) -> dict[str, Any]:
    """Return `thinking`, `keep_reasoning` and `context` of the training that exported `model`. Empty if unknown."""
    folder = user_path(model).absolute()
    if folder.name.startswith("export"):
        trained = [each for each in _policies_of(folder.parent).values() if each.get("trainable")]
        stored = trained[0] if len(trained) == 1 else {}
    else:
        in_export = folder.parent.name.startswith("export")
        stored = _policies_of(folder.parent.parent).get(folder.name, {}) if in_export else {}
    return {name: stored[name] for name in _OF_PROMPTS if isinstance(stored.get(name), str)}


def warn_about_prompts(policies: Iterable[Policy]) -> None:
    """Warn of each policy whose model a run trained with other prompts."""
    for policy in policies:
        trained = trained_prompts(policy.model)
        if other := {name: value for name, value in trained.items() if getattr(policy, name) != value}:
            here = ", ".join(f"{name}={getattr(policy, name)!r}" for name in other)
            there = ", ".join(f"{name}={value!r:.40}" for name, value in other.items())
            message = (
                "policy %r has %s, and %s was trained with %s. A model plays best with the prompts of its training"
            )
            _log.warning(message, policy.name, here, policy.model, there)


def _policies_of(run: Path) -> dict[str, Mapping[str, Any]]:
    """Return the settings of a run's policies by name."""
    settings = settings_of(run)
    policies = settings.get("policies") or {"": settings.get("policy")}  # supervised training has one policy
    if not isinstance(policies, dict):
        return {}
    return {name: each for name, each in policies.items() if isinstance(each, dict)}
