"""Runs model-written Python shut in.

In: code, files, standard input. Out: what it printed and left, and what ended it. Waits for the program, as long as its
limits say. Start at `sandbox.Sandbox`. `_supervisor`, `_isolation` and `_usage` run in an interpreter of their own,
which sees the standard library only.
"""

from __future__ import annotations

from forge_agents.sandbox.sandbox import (
    Guarantees,
    Sandbox,
    SandboxError,
    SandboxLimits,
    SandboxResult,
    SandboxUnavailable,
    validate_path,
)

__all__ = [
    "Guarantees", "Sandbox", "SandboxError", "SandboxLimits", "SandboxResult", "SandboxUnavailable", "validate_path",
]
