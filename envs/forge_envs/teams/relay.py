"""Relay: one agent reads an arithmetic question and sends a message, from which the other must give the answer."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from string import Formatter

import numpy as np

from forge_agents.envs.env import Outcome
from forge_agents.tools import Tool, ToolCall, ToolFormat, ToolResult, calculator, render_tool_call
from forge_agents.tools.env import ToolEnv
from forge_envs.shared import check_ranges, end_for_all

OPERATORS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?<![\d.])\d{1,30}(?=\.0{1,9}(?!\d)|(?!\d|\.\d))", re.ASCII)
_EXAMPLE = ToolCall(name="calculator", arguments={"expression": "2 + 3"})


class Relay(ToolEnv):
    """Cooperative game of two agents.

    ``asker`` reads an arithmetic question. With `tool`, a text with a tool call runs the calculator, and the next
    observation is the result. Any other text is the message. ``answerer`` reads only the message and answers. The last
    integer of its text counts. Thousands separators are ignored.

    The agents get 1 if the answer is correct, otherwise
    ``partial_credit * max(0, 1 - |answer - gold| / max(1, |gold|))``, or 0 without an integer. The agents also get
    `call_reward` once, for the first decision with a successful call. Infos contain ``question`` and ``answer`` (the
    gold answer, as text) from the start, and ``message``, ``given`` and ``correct`` at the end.

    Args:
        max_number: Maximum operand. Operands are uniform in 1 to `max_number`.
        operators: Operators to choose from: any of ``+-*``. With "-" the larger operand comes first.
        tool: Whether the calculator is available.
        tool_format: As in `ToolEnv`.
        max_tool_calls: Maximum number of calls. A further call counts as the message.
        call_reward: Reward of the first successful call. At least 0.
        max_message_chars: Maximum length of the message. Longer ones are cut.
        partial_credit: Reward of an almost correct answer, in [0, 1].
        question: Template of the question, with {a}, {op} and {b}.
        asker: System prompt of the asker. None uses the default.
        answerer: System prompt of the answerer. None uses the default.
        message: Template of the answerer's observation, with {message}.
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
        check_ranges(max_number=(max_number, 1, None), max_message_chars=(max_message_chars, 1, None))
        check_ranges(call_reward=(call_reward, 0, None), partial_credit=(partial_credit, 0, 1))
        if not operators or set(operators) - set(OPERATORS):
            raise ValueError(f"operators={operators!r} must be one or more of {''.join(OPERATORS)}")
        try:
            fields = {(name, width, conversion) for _, name, width, conversion in Formatter().parse(question)}
        except ValueError:  # a single brace
            fields = {("{", "", None)}
        if not fields <= {*((name, "", None) for name in ("a", "op", "b")), (None, None, None)}:
            # `{a:1000000000}` has a billion characters
            raise ValueError(f"question={question!r} may contain {{a}}, {{op}} and {{b}}, and {{{{ for a brace")
        self._max_number, self._operators, self._partial = max_number, operators, partial_credit
        self._tool, self._call_reward = tool, call_reward
        self.max_reward = 1.0 + call_reward * tool
        self._max_message_chars = max_message_chars
        self._question_form, self._message_form = question, message
        self._prompts = {
            "asker": "You are a calculator. You only write numbers." if asker is None else asker,
            "answerer": "You only write numbers." if answerer is None else answerer,
        }
        if tool and asker is None:  # small models understand an example better than a schema
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
        """Return the question, for the answerer."""
        return (self.question,) if agent == "answerer" else ()

    def swap_secrets(self, agent: str, rng: np.random.Generator) -> None:
        """Draw another question, for the answerer."""
        if agent == "answerer":
            self._draw(rng)

    def after_calls(self, agent: str, results: Sequence[ToolResult]) -> Outcome:
        first = not self.called and any(result.ok for result in results)
        self.called |= first
        return Outcome(rewards=dict.fromkeys(self.possible_agents, self._call_reward) if first else {})

    def act(self, agent: str, action: str) -> Outcome:
        if agent == "answerer":
            return self._score(action)
        self.message = action.strip()[: self._max_message_chars]
        return Outcome()

    def _score(self, action: str) -> Outcome:
        numbers = _NUMBER.findall(re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", action, flags=re.ASCII))
        answer = int(numbers[-1]) if numbers else None
        reward = 1.0 if answer == self.gold else 0.0
        if answer is not None and answer != self.gold:
            reward = self._partial * max(0.0, 1.0 - abs(answer - self.gold) / max(1, abs(self.gold)))
        text = None if answer is None else str(answer)
        facts = {"message": self.message, "given": text, "correct": answer == self.gold}
        return end_for_all(self.possible_agents, reward, facts)
