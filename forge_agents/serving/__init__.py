"""Served models: vLLM engines in Monarch actors.

In: prompts as tokens, versions of weights. Out: completions. Waits for the engines, with deadlines. Start at `engine`,
the controller's side of one; `_actor`, `_loop` and `_vllm` are the other side, in the engine's process. `replicas` are
engines of one model behind a router, `fleet` those of several models.
"""

from forge_agents.serving._wire import EngineInfo
from forge_agents.serving.config import EngineConfig
from forge_agents.serving.engine import Engine
from forge_agents.serving.fleet import Fleet
from forge_agents.serving.replicas import Replicas

__all__ = ["Engine", "EngineConfig", "EngineInfo", "Fleet", "Replicas"]
