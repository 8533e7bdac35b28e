"""Served models: vLLM engines in Monarch actors.

In: prompts as tokens. Out: completions. Waits for the engines, with deadlines.
"""

from forge_agents.serving._wire import EngineInfo
from forge_agents.serving.config import EngineConfig
from forge_agents.serving.engine import Engine
from forge_agents.serving.fleet import Fleet
from forge_agents.serving.replicas import Replicas

__all__ = ["Engine", "EngineConfig", "EngineInfo", "Fleet", "Replicas"]
