"""Helpers for tests of plugins.

`check_env` tests the contract of an environment, `check_levels` the order of its levels, and `tiny_model` writes a tiny
model.
"""

from forge_agents.envs.conformance.check import check_env
from forge_agents.envs.conformance.report import ConformanceError, ConformanceReport, Finding
from forge_agents.models.tiny import tiny_model
from forge_agents.testing.levels import check_levels

__all__ = ["ConformanceError", "ConformanceReport", "Finding", "check_env", "check_levels", "tiny_model"]
