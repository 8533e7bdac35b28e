"""Runs model-written Python shut in.

In: nothing at import. Out: the public names below. Waits for nothing.
"""

from __future__ import annotations

from forge_agents.sandbox.sandbox import (
    Guarantees,
    Sandbox,
    SandboxError,
    SandboxLimits,
    SandboxResult,
    SandboxUnavailable,
    checked_path,
)

__all__ = [
    "Guarantees",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxResult",
    "SandboxUnavailable",
    "checked_path",
]
