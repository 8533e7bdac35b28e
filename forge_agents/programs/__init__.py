"""Unmodified programs that call models over HTTP, as PettingZoo environments: each model call is a turn.

Start at `program`, the environment. `gateway` is the HTTP server that programs talk to, `protocols` translates the APIs
of OpenAI and Anthropic, and `running` starts and stops programs. `traces` imports calls that were recorded elsewhere.
"""

from forge_agents.programs.containers import Container

__all__ = ["Container"]
