"""Relay: one seat knows the question, the other must give the answer; a message is all that passes between them.

In: texts: tool calls, a message, a number. Out: a reward that both seats share. Waits for nothing.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence

import numpy as np

from forge_agents.envs.env import Outcome
from forge_agents.tools import Tool, ToolCall, ToolFormat, ToolResult, calculator, render_tool_call
from forge_agents.tools.env import ToolEnv
from forge_envs.teams.generated import ended

OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?<![\d.])\d{1,30}(?=\.0{1,9}(?!\d)|(?!\d|\.\d))", re.ASCII)
_EXAMPLE = ToolCall(name="calculator", arguments={"expression": "2 + 3"})


class Relay(ToolEnv):
    """Two seats that share one reward.

    ``asker`` reads an arithmetic question. With `tool`, a text of it that contains a tool call runs the calculator,
    and the result is its next observation; any other text is its message, cut to `max_message_chars`. ``answerer``
    reads the message only and answers. The last integer of its text counts, thousands commas ignored.

    Both get 1.0 if it is right. Otherwise both get ``partial_credit * max(0, 1 - |answer - gold| / max(1, |gold|))``,
    and 0 if there is no integer. On top, both get `call_reward` at the first decision of an episode whose calls have a
    result, so an episode earns at most ``1 + call_reward``. From the start, infos hold ``question`` and ``answer`` (the
    gold, as text) for verifiers; at the end also ``message``, ``given`` and ``correct``.

    Args:
        max_number: Both operands are drawn from 1 to this number, evenly.
        operators: Any of + - *, each as likely. With "-" the larger operand comes first.
        tool: Whether the calculator is offered and understood.
        tool_format: As for `ToolEnv`.
        max_tool_calls: Calls after which a tool call is taken as the message it is.
        call_reward: Reward of the first call that works, at least 0.
        max_message_chars: Longer messages are cut.
        partial_credit: Reward of an answer that is nearly right, 0 to 1.
        question: Template of the question, with {a}, {op} and {b}.
        asker: System prompt of the asker; None for the default.
        answerer: System prompt of the answerer; None for the default.
        message: Template of what the answerer reads, with {message}.
    """

    possible_agents = ("asker", "answerer")

    def __init__(
        self,
        *,
        max_number: int = 9,
        operators: str = "+",
        tool: bool = True,
        tool_format: ToolFormat = "hermes",
        max_tool_calls: int = 2,
        call_reward: float = 0.0,
        max_message_chars: int = 80,
        partial_credit: float = 0.0,
        question: str = "Calculate {a} {op} {b}. Write the result as a number.",
        asker: str | None = None,
        answerer: str | None = None,
        message: str = "Write this number again: {message}",
    ) -> None:
        super().__init__(tool_format=tool_format, max_calls=max_tool_calls, max_calls_per_episode=max_tool_calls)
        if max_number < 1 or max_message_chars < 1 or call_reward < 0 or not 0 <= partial_credit <= 1:
            raise ValueError(
                f"max_number={max_number}, max_message_chars={max_message_chars} must be >= 1, call_reward="
                f"{call_reward} >= 0, and partial_credit={partial_credit} between 0 and 1"
            )
        if not operators or set(operators) - set(OPERATORS):
            raise ValueError(f"operators={operators!r}; name one or more of {''.join(OPERATORS)}")
        self._max_number, self._operators, self._partial = max_number, operators, partial_credit
        self._tool, self._call_reward = tool, call_reward
        self.max_reward = 1.0 + call_reward * tool
        self._max_message_chars = max_message_chars
        self._question_form, self._message_form = question, message
        self._prompts = {
            "asker": "You are a calculator. You only write numbers." if asker is None else asker,
            "answerer": "You only write numbers." if answerer is None else answerer,
        }
        if tool and asker is None:  # an example says more to a small model than a schema
            self._prompts["asker"] += f" Your tool: {render_tool_call(_EXAMPLE, tool_format)}"

    def tools(self, agent: str) -> Sequence[Tool]:
        return [calculator] if self._tool and agent == "asker" else []

    def setup(self, rng: np.random.Generator) -> None:
        self._draw(rng)
        self.message: str | None = None
        self.called = False
        for agent in self.agents:
            self.infos[agent] = {"question": self.question, "answer": str(self.gold)}

    def _draw(self, rng: np.random.Generator) -> None:
        a, b = (int(n) for n in rng.integers(1, self._max_number + 1, size=2))
        sign = self._operators[int(rng.integers(len(self._operators)))]
        if sign == "-":
            a, b = max(a, b), min(a, b)
        self.gold = OPERATORS[sign](a, b)
        self.question = self._question_form.format(a=a, op=sign, b=b)

    def instructions(self, agent: str) -> str:
        return self._prompts[agent]

    def observe_text(self, agent: str) -> str:
        if agent == "asker":
            return self.question
        return "" if self.message is None else self._message_form.replace("{message}", self.message)

    def secrets(self, agent: str) -> tuple[str, ...]:
        """What `agent` must not read: the answerer must not see the question unless the asker tells it."""
        return (self.question,) if agent == "answerer" else ()

    def swap_secrets(self, agent: str, rng: np.random.Generator) -> None:
        """Ask something else, where the answerer is not to notice."""
        if agent == "answerer":
            self._draw(rng)

    def after_calls(self, agent: str, results: Sequence[ToolResult]) -> Outcome:
        first = not self.called and any(result.ok for result in results)
        self.called |= first
        return Outcome(rewards=dict.fromkeys(self.possible_agents, self._call_reward) if first else {})

    def act(self, agent: str, action: str) -> Outcome:
        if agent == "answerer":
            return self._judge(action)
        self.message = action.strip()[: self._max_message_chars]
        return Outcome()

    def _judge(self, action: str) -> Outcome:
        found = _NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", action, flags=re.ASCII))
        given = int(found[-1]) if found else None
        reward = 1.0 if given == self.gold else 0.0
        if given is not None and given != self.gold:
            reward = self._partial * max(0.0, 1.0 - abs(given - self.gold) / max(1, abs(self.gold)))
        shown = None if given is None else str(given)
        facts = {"message": self.message, "given": shown, "correct": given == self.gold}
        return ended(self.possible_agents, reward, facts)
