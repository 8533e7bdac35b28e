"""Helpers for the `list_ids` functions of adapters. Ids are registered without importing a library."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from forge_agents.envs.registry import register


def register_ids(
    namespace: str, name: str | None, entries: Mapping[str, Mapping[str, Any]], hidden: Collection[str] = ()
) -> str | None:
    """Register `entries` (arguments of `register` by id) that are not hidden. Returns None.

    With a `name`, with or without version, register the entry that it refers to instead. Returns its full id.
    """
    if name is None:
        selected = [env_id for env_id in entries if env_id not in hidden]
    else:
        selected = [env_id for env_id in entries if name in (env_id, env_id.rpartition("-v")[0])][:1]
    for env_id in selected:
        register(f"{namespace}/{env_id}", **entries[env_id])
    return f"{namespace}/{selected[0]}" if name is not None and selected else None


def entry(target: str, *tags: str, **kwargs: Any) -> dict[str, Any]:
    """Return the arguments of `register` for a class or function of this package, ``"module:name"``."""
    return {"entry_point": f"forge_envs.adapters.{target}", "tags": ("adapter", *tags), **kwargs}


def folder_of(package: str) -> Path:
    """Return the folder of an installed package without importing it."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"no package {package!r}")
    return Path(spec.origin).parent
