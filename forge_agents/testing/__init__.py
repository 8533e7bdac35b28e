"""For tests of plugins: whether environments keep the contract and levels their order; a tiny model to run all on.

In: environments; folders. Out: `check_env` and its report; `check_levels`; `tiny_model`. Waits for the environments.
Start at `forge_agents.envs.conformance.check`, which does the asking.
"""

from forge_agents.envs.conformance.check import ConformanceError, ConformanceReport, Finding, check_env
from forge_agents.models.tiny import tiny_model
from forge_agents.testing.levels import check_levels

__all__ = ["ConformanceError", "ConformanceReport", "Finding", "check_env", "check_levels", "tiny_model"]
