"""Oracle of `forge_envs.teams.relay`."""

from __future__ import annotations

import re

from forge_agents.tools import ToolCall, render_tool_call
from forge_envs.oracles.script import Script
from forge_envs.teams.relay import OPERATORS


class Oracle(Script):
    """The asker calls the calculator, or computes the result itself if there is none. Both repeat the number."""

    called = False

    def asker(self, seen: str) -> str:
        """Return a call, then its result."""
        if self.called:
            return self.answerer(seen)
        self.called = True
        a, sign, b = re.findall(r"(\d+)\s*([-+*])\s*(\d+)", seen)[-1]  # questions may follow examples
        if not self.settings["tool"]:
            return str(OPERATORS[sign](int(a), int(b)))
        call = ToolCall(name="calculator", arguments={"expression": f"{a} {sign} {b}"})
        return render_tool_call(call, self.settings["tool_format"])

    def answerer(self, seen: str) -> str:
        """Return the last number."""
        numbers = re.findall(r"-?\d+", seen)
        return str(numbers[-1]) if numbers else "I was told no number."
