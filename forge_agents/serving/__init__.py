"""Inference engines: vLLM in Monarch actors, replicated, with weights that are replaced while requests run."""

from forge_agents.serving._wire import EngineInfo
from forge_agents.serving.client import EngineClient
from forge_agents.serving.config import EngineConfig, EnginePlan
from forge_agents.serving.fleet import Fleet
from forge_agents.serving.process import EngineProcess

__all__ = ["EngineClient", "EngineConfig", "EngineInfo", "EnginePlan", "EngineProcess", "Fleet"]
