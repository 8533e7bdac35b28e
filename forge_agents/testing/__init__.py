"""For tests of plugins: does an environment keep the contract, and a tiny model to run all on.

In: nothing at import. Out: `check_env`, its report, and `tiny_model`. Waits for nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_agents.envs.conformance.check import ConformanceError, ConformanceReport, Finding, check_env
    from forge_agents.testing._tiny_model import tiny_model

_MODULE_OF = {
    "ConformanceError": "forge_agents.envs.conformance.check",
    "ConformanceReport": "forge_agents.envs.conformance.check",
    "Finding": "forge_agents.envs.conformance.check",
    "check_env": "forge_agents.envs.conformance.check",
    "tiny_model": "forge_agents.testing._tiny_model",
}

__all__ = ["ConformanceError", "ConformanceReport", "Finding", "check_env", "tiny_model"]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
