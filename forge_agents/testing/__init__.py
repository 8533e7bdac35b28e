"""For tests of plugins: does an environment keep the contract, and a tiny model to run all on.

In: environments; folders. Out: `check_env` and its report; `tiny_model`. Waits for the environments. Start at
`forge_agents.envs.conformance.check`, which does the asking.
"""

from forge_agents.envs.conformance.check import ConformanceError, ConformanceReport, Finding, check_env
from forge_agents.models.tiny import tiny_model

__all__ = ["ConformanceError", "ConformanceReport", "Finding", "check_env", "tiny_model"]
