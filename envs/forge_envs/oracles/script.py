"""What oracles have in common: their seat, the world's settings, random numbers of their own.

In: as `forge_agents.envs.oracles.OracleFactory` says. Out: a player. Waits for nothing.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from typing import Any, cast

from forge_agents.tools import ToolCall, render_tool_call


class Script:
    """A player whose methods have the names of the seats that they play; ``red_master`` is played by ``master``."""

    def __init__(self, agent: str, settings: Mapping[str, Any], rng: random.Random) -> None:
        self.agent, self.settings, self.rng = agent, settings, rng

    def __call__(self, seen: str) -> str:
        return self.answer(re.sub(r"<tool_response>\n|\n</tool_response>", "", seen))  # as ``hermes`` wraps results

    def answer(self, seen: str) -> str:
        """What it says to an observation."""
        return cast("str", getattr(self, self.agent.rpartition("_")[2])(seen))

    def call(self, name: str, /, **arguments: object) -> str:
        """A call of a tool in the form that the seat's instructions show, so that who imitates it learns that form."""
        form = self.settings["tool_format"]
        if form == "plain":  # where values may stand without names, which is easier to imitate
            values = ", ".join(json.dumps(value, ensure_ascii=False) for value in arguments.values())
            return f"CALL {name}({values})"
        return render_tool_call(ToolCall(name=name, arguments=arguments), form)


def read(pattern: str, seen: str) -> str:
    """The first group of `pattern`, which a text of the world's own has.

    Raises:
        ValueError: It has not: this is not what the seat reads.
    """
    match = re.search(pattern, seen)
    if match is None:
        raise ValueError(f"no {pattern!r} in {seen!r:.300}")
    return match[1]
