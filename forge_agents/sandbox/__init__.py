"""Isolated execution of model-written Python: `Sandbox`.

`_supervisor`, `_isolation` and `_usage` run in a separate interpreter with only the standard library.
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
]  # fmt: skip
