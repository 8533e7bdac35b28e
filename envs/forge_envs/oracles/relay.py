"""The oracle of `forge_envs.teams.relay`.

In: the question, or a message. Out: a call of the calculator where there is one, a number. Waits for nothing.
"""

from __future__ import annotations

import re

from forge_agents.tools import ToolCall, render_tool_call
from forge_envs.oracles.script import Script
from forge_envs.teams.relay import OPERATORS


class Oracle(Script):
    """The asker asks the calculator, or calculates itself where there is none, and both tell the number."""

    asked = False

    def asker(self, seen: str) -> str:
        """A call, then its result."""
        if self.asked:
            return self.answerer(seen)
        self.asked = True
        a, sign, b = re.findall(r"(\d+)\s*([-+*])\s*(\d+)", seen)[-1]  # questions may follow examples
        if not self.settings["tool"]:
            return str(OPERATORS[sign](int(a), int(b)))
        call = ToolCall(name="calculator", arguments={"expression": f"{a} {sign} {b}"})
        return render_tool_call(call, self.settings["tool_format"])

    def answerer(self, seen: str) -> str:
        """The last number; where a partner told none, that."""
        numbers = re.findall(r"-?\d+", seen)
        return str(numbers[-1]) if numbers else "I was told no number."
