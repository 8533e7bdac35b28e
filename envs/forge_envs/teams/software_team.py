"""SoftwareTeam: a planner who knows the task, a coder who writes the code, and a tester who runs it in the sandbox."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Sequence

import numpy as np

from forge_agents.envs.env import Outcome
from forge_agents.sandbox import Sandbox, SandboxLimits
from forge_agents.tools import Tool, ToolFormat, tool
from forge_agents.tools.code import format_result
from forge_agents.tools.env import ToolEnv
from forge_envs.shared import check_ranges, end_for_all
from forge_envs.teams.hidden_tests import call_functions
from forge_envs.teams.software_tasks import TASKS

MAX_CODE_CHARS = 4000
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_SHIP = re.compile(r"\bSHIP\b")


class SoftwareTeam(ToolEnv):
    """Cooperative game of three agents.

    ``planner`` alone reads the task and writes a plan. ``coder`` reads the plan and the function's signature and writes
    the code: the last fenced block of its text, or the whole text, cut to 4000 characters. ``tester`` reads the code
    and two examples, and its tool runs Python, which can import the code from ``solution``. The word SHIP in its text
    ends the work. Any other text is a report to the coder, at most `revisions` times.

    All agents get the fraction of `num_tests` hidden tests that the final code passes. The hidden tests follow from the
    episode seed and differ from the examples if the task allows it. The process that runs the code never receives the
    expected results. A truncated episode earns 0. Infos contain ``task`` from the start, and ``passed``, ``shipped``
    and ``why`` (reason why the code could not run) at the end.

    Args:
        num_tests: Number of hidden tests.
        revisions: Maximum number of reports.
        tool_format: As in `ToolEnv`.
        max_turns: Number of decisions, tool calls included, after which the episode is truncated.
        allow_weaker: Whether to run code if the sandbox cannot enforce all limits; see `forge_agents.sandbox`.
    """

    possible_agents = ("planner", "coder", "tester")

    def __init__(
        self,
        *,
        num_tests: int = 8,
        revisions: int = 2,
        tool_format: ToolFormat = "hermes",
        max_turns: int = 24,
        allow_weaker: bool = False,
    ) -> None:
        super().__init__(tool_format=tool_format, max_turns=max_turns)
        check_ranges(num_tests=(num_tests, 1, None), revisions=(revisions, 0, None))
        self._num_tests, self._revisions = num_tests, revisions
        limits = SandboxLimits(wall_s=5.0, cpu_s=4, memory_mb=256, processes=4, output_kb=32)
        self._sandbox = Sandbox(limits=limits, allow_weaker=allow_weaker)

    def setup(self, rng: np.random.Generator) -> None:
        self.task = TASKS[int(rng.integers(len(TASKS)))]
        self.examples = [self.task.test(rng) for _ in range(2)]
        example_arguments = [arguments for arguments, _ in self.examples]
        drawn = [self.task.test(rng) for _ in range(4 * self._num_tests)]
        fresh = [test for test in drawn if test[0] not in example_arguments]
        self.tests = (fresh + drawn)[: self._num_tests]
        self.head = f"def {self.task.name}({', '.join(inspect.signature(self.task.solution).parameters)}):"
        self.description, self.code, self.reports = self.task.description, "", 0
        self.inbox = {"coder": "", "tester": ""}
        for agent in self.agents:
            self.infos[agent] = {"task": self.task.name}

    @tool
    def python(self, code: str) -> str:
        """Run a Python program and read what it prints. The coder's code is the module `solution`.

        Args:
            code: The program, such as: from solution import *; print(1 + 1)
        """
        return format_result(self._sandbox.run(code, files={"solution.py": self.code.encode()}))

    def tools(self, agent: str) -> Sequence[Tool]:
        return [self.python] if agent == "tester" else []

    def instructions(self, agent: str) -> str:
        role = {
            "planner": "You plan the work of a software team. You alone know the task: tell the coder all that "
            "matters.",
            "coder": "You write Python for a software team. Answer with the whole function in one ```python block.",
            "tester": "You test the code of a software team. Write SHIP if it is right; else tell the coder what is "
            "wrong.",
        }[agent]
        return f"{role}\n\n{self.tool_help(agent)}".strip()

    def observe_text(self, agent: str) -> str:
        if agent == "planner":
            return f"The task: {self.description}\nThe function: {self.head}\nExamples:\n{self._examples()}"
        return self.inbox[agent]

    def secrets(self, agent: str) -> tuple[str, ...]:
        """Return the task, for all but the planner."""
        return () if agent == "planner" else (self.description,)

    def swap_secrets(self, agent: str, rng: np.random.Generator) -> None:
        """Draw other hidden tests; another task for all but the planner; other examples for the coder."""
        self.tests = [self.task.test(rng) for _ in range(self._num_tests)]
        if agent != "planner":
            self.description = TASKS[int(rng.integers(len(TASKS)))].description
        if agent == "coder":
            self.examples = [self.task.test(rng) for _ in range(2)]

    def act(self, agent: str, action: str) -> Outcome:
        if agent == "planner":
            self.inbox["coder"] = f"Write this function:\n{self.head}\n\nThe plan:\n{action.strip()[:MAX_CODE_CHARS]}"
            return Outcome(next="coder")
        if agent == "coder":
            self.code = code_in(action)
            self.inbox["tester"] = f"The code:\n{self.code}\n\nExamples:\n{self._examples()}"
            return Outcome(next="tester")
        shipped = bool(_SHIP.search(action))
        if not shipped and self.reports < self._revisions:
            self.reports += 1
            self.inbox["coder"] = f"The tester reports:\n{action.strip()[:MAX_CODE_CHARS]}\n\nWrite the function again."
            return Outcome(next="coder")
        return self._score(shipped)

    def _score(self, shipped: bool) -> Outcome:
        passed, reason = self._hidden_tests()
        facts = {"passed": passed, "shipped": shipped, "why": reason}
        return end_for_all(self.possible_agents, passed / self._num_tests, facts)

    def _hidden_tests(self) -> tuple[int, str]:
        """Return the number of tests that the code passes, and why it could not run."""
        if not _defines(self.code, self.task.name):
            return 0, f"no Python that defines {self.task.name}"
        calls = [("solution", self.task.name, arguments) for arguments, _ in self.tests]
        lines, result = call_functions(self._sandbox, {"solution": self.code}, calls)
        right = [json.dumps(["ok", expected]) for _, expected in self.tests]
        passed = sum(line == gold for line, gold in zip(lines, right, strict=False))
        return passed, "" if result.ok else format_result(result)[-200:]

    def _examples(self) -> str:
        return "\n".join(
            f"{self.task.name}({', '.join(map(repr, arguments))}) == {result!r}" for arguments, result in self.examples
        )


def code_in(text: str) -> str:
    """Return the last fenced block of a text, or the whole text."""
    blocks = _BLOCK.findall(text)
    return str(blocks[-1] if blocks else text).strip()[:MAX_CODE_CHARS]


def _defines(code: str, name: str) -> bool:
    """Whether `code` is valid Python that defines `name` at the top level."""
    try:
        body = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(getattr(node, "name", None) == name for node in body)
