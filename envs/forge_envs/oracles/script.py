"""Base class of oracles."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from typing import Any, cast

from forge_agents.tools import ToolCall, render_tool_call


class Script:
    """A player with one method per role, named after it: agent ``red_master`` is played by ``master``.

    Args:
        agent: Agent that it plays.
        settings: Constructor arguments of the environment.
        rng: Random generator of the player.
    """

    def __init__(self, agent: str, settings: Mapping[str, Any], rng: random.Random) -> None:
        self.agent, self.settings, self.rng = agent, settings, rng

    def __call__(self, observation: str) -> str:
        return self.answer(re.sub(r"<tool_response>\n|\n</tool_response>", "", observation))  # tags of ``hermes``

    def answer(self, seen: str) -> str:
        """Return the action for an observation."""
        return cast("str", getattr(self, self.agent.rpartition("_")[2])(seen))

    def call(self, name: str, /, **arguments: object) -> str:
        """Write a tool call in the format of the environment's instructions, so that imitation learns that format."""
        form = self.settings["tool_format"]
        if form == "plain":  # values without names are easier to imitate
            values = ", ".join(json.dumps(value, ensure_ascii=False) for value in arguments.values())
            return f"CALL {name}({values})"
        return render_tool_call(ToolCall(name=name, arguments=arguments), form)


def read(pattern: str, observation: str) -> str:
    """Return the first group of `pattern`. Raises ValueError if the text is not an observation of this agent."""
    match = re.search(pattern, observation)
    if match is None:
        raise ValueError(f"no {pattern!r} in {observation!r:.300}")
    return match[1]
