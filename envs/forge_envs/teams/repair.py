"""Repair: a planner with the manual, an editor who changes modules, and a tester who runs their tests."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from forge_agents.envs.env import Outcome
from forge_agents.sandbox import Sandbox, SandboxLimits, SandboxUnavailable
from forge_agents.sources import parse_source
from forge_agents.tools import Tool, ToolFormat, ToolResult, tool
from forge_agents.tools.code import format_result
from forge_agents.tools.env import ToolEnv
from forge_agents.types import Trajectory
from forge_envs.shared import check_ranges, end_for_all
from forge_envs.teams.hidden_tests import call_functions
from forge_envs.teams.repair_tasks import FAULTS, Test, draw

_MAX_MODULE_CHARS = 8000
_MAX_FAILURES = 4
"""Maximum number of failing tests that a tester sees."""
_SHIP = re.compile(r"\bSHIP\b")
_ALL_TESTS = "All"
"""Beginning of the result of tests that pass. The other result begins with a number."""


class Repair(ToolEnv):
    """Cooperative game of three agents.

    Every episode has a generated repository of modules with small functions, `faults` of which are faulty. ``planner``
    alone reads a failing test and the manual that describes each function, and writes a plan. ``editor`` reads the plan
    and edits lines of the modules by its tool. Any other text hands over to the tester. ``tester`` runs tests by its
    tool. Every fault breaks at least one of them. The word SHIP in its text ends the work. Any other text is a report
    to the editor, at most `revisions` times. Planner and editor can view all modules.

    All agents get 1 if all hidden tests pass at the end, else 0. Hidden tests cover all functions and differ from the
    tester's. The process that runs the modules never receives the expected results. A truncated episode earns 0. At the
    end infos contain ``passed`` and ``tests`` (numbers of hidden tests), ``shipped``, ``edits``, ``broken`` (the faulty
    functions) and ``why`` (reason why the modules could not run), and of a tester that ran tests ``saw_tests_pass``.

    Args:
        modules: Number of modules, 1 to 5 and at most `functions`.
        functions: Total number of functions, 1 to 12.
        faults: Number of faulty functions, 1 to `functions`.
        kinds: Kinds of faults, from ``repair_tasks.FAULTS``.
        revisions: Maximum number of reports.
        tool_format: As in `ToolEnv`.
        max_turns: Number of decisions, tool calls included, after which the episode is truncated. None uses 16, plus 12
            per module and fault.
        max_message_chars: Maximum length of plans and reports. Longer ones are cut.
        allow_weaker: Whether to run modules if the sandbox cannot enforce all limits. See `forge_agents.sandbox`.

    Raises:
        SandboxUnavailable: At reset, if this machine cannot run the modules as requested.
    """

    possible_agents = ("planner", "editor", "tester")
    max_reward = 1.0

    def __init__(
        self,
        *,
        modules: int = 1,
        functions: int = 3,
        faults: int = 1,
        kinds: Sequence[str] = FAULTS,
        revisions: int = 2,
        tool_format: ToolFormat = "plain",
        max_turns: int | None = None,
        max_message_chars: int = 2000,
        allow_weaker: bool = False,
    ) -> None:
        limit = 16 + 12 * (modules + faults) if max_turns is None else max_turns
        super().__init__(tool_format=tool_format, max_calls=12, max_turns=limit)
        check_ranges(functions=(functions, 1, 12), modules=(modules, 1, min(5, functions)))
        check_ranges(faults=(faults, 1, functions), revisions=(revisions, 0, None))
        check_ranges(max_message_chars=(max_message_chars, 1, None))
        if not kinds or set(kinds) - set(FAULTS):
            raise ValueError(f"kinds={kinds!r} must be some of {', '.join(FAULTS)}")
        self._modules, self._functions, self._faults, self._kinds = modules, functions, faults, tuple(kinds)
        self._revisions, self._max_message_chars = revisions, max_message_chars
        limits = SandboxLimits(wall_s=5.0, cpu_s=4, memory_mb=256, processes=4, output_kb=64)
        self._sandbox = Sandbox(limits=limits, allow_weaker=allow_weaker)

    def setup(self, rng: np.random.Generator) -> None:
        try:
            self._sandbox.require()
        except SandboxUnavailable as error:
            raise SandboxUnavailable(
                f"{self} runs model-written code, which this machine cannot isolate. allow_weaker=True of the "
                f"environment is that of Sandbox: {error}"
            ) from None
        self.repository = draw(
            rng, modules=self._modules, functions=self._functions, faults=self._faults, kinds=self._kinds
        )
        self.files = self.repository.files()
        self.inbox = {"editor": "", "tester": "The editor has not begun."}
        self.reports = self.edits = 0

    # ---- tools

    @tool
    def show(self, module: str) -> str:
        """Show a module with the numbers of its lines.

        Args:
            module: Its name.
        """
        lines = self._source(module).split("\n")
        return "\n".join(f"{number}| {line}" for number, line in enumerate(lines, 1))

    @tool
    def edit(self, module: str, line: int, text: str) -> str:
        """Put a text in the place of a line; the other lines stay.

        Args:
            module: Its name.
            line: The number of the line.
            text: One or more lines, or none. Without blanks before it, it gets those of the line.
        """
        lines = self._source(module).split("\n")
        if not 1 <= line <= len(lines):
            raise ValueError(f"{module} has no line {line}; lines are 1 to {len(lines)}")
        old = lines[line - 1]
        blanks = "" if text[:1].isspace() else old[: len(old) - len(old.lstrip())]
        new = [blanks + part for part in text.split("\n")] if text else []
        source = "\n".join([*lines[: line - 1], *new, *lines[line:]])
        if len(source) > _MAX_MODULE_CHARS:
            raise ValueError(f"{module} would have {len(source)} characters; {_MAX_MODULE_CHARS} are allowed")
        self.files = {**self.files, module: source}
        self.edits += 1
        return f"Line {line} of {module} was {old.strip()!r}. {_fault(source)}".strip()

    @tool(waits=True)
    def test(self) -> str:
        """Run the tests."""
        tests = self.repository.visible
        lines, reason = self._run(tests)
        wrong = [(test, line) for test, line in zip(tests, lines, strict=True) if line != test.result]
        if not wrong:
            return f"{_ALL_TESTS} {len(tests)} tests pass."
        failures = [f"{test.module}.{test} gives {_format(line)}, not {_format(test.result)}" for test, line in wrong]
        summary = f"{len(wrong)} of {len(tests)} tests fail."
        return "\n".join([summary, *failures[:_MAX_FAILURES], *([reason] if reason else [])])

    def tools(self, agent: str) -> Sequence[Tool]:
        return {"planner": [self.show], "editor": [self.show, self.edit], "tester": [self.test]}[agent]

    def _source(self, module: str) -> str:
        if module not in self.files:
            raise ValueError(f"there is no module {module!r}; modules are {', '.join(self.files)}")
        return self.files[module]

    def _run(self, tests: Sequence[Test]) -> tuple[list[str], str]:
        """Return the result of each test, empty after the process has ended, and why the modules could not run."""
        if invalid := [f"{name}: {fault}" for name, source in self.files.items() if (fault := _fault(source))]:
            return [""] * len(tests), "\n".join(invalid)
        calls = [(test.module, test.name, test.arguments) for test in tests]
        lines, result = call_functions(self._sandbox, self.files, calls)
        return lines + [""] * (len(tests) - len(lines)), "" if result.ok else format_result(result)[-300:]

    def after_calls(self, agent: str, results: Sequence[ToolResult]) -> Outcome:
        runs = [result.content for result in results if result.ok and result.name == "test"]
        if not runs:
            return Outcome()
        # not for verifiers to read in the results, which contain texts of the modules
        return Outcome(info={agent: {"saw_tests_pass": runs[-1].startswith(_ALL_TESTS)}})

    # ---- texts and rules

    def instructions(self, agent: str) -> str:
        role = {
            "planner": "You plan the repair of a program. You alone have its manual: find out which function does not "
            "do what it should, and write the editor what to change, and where.",
            "editor": "You repair a program. Change lines as planned with your tool, then write that you are done.",
            "tester": "You test a program. Run the tests; write SHIP if they pass, else tell the editor what fails.",
        }[agent]
        return f"{role}\n\n{self.tool_help(agent)}"

    def observe_text(self, agent: str) -> str:
        if agent != "planner":
            return self.inbox[agent]
        failing = next(test for test in self.repository.visible if test.name in self.repository.broken)
        return (
            f"Manual:\n{self.repository.manual()}\nModules: {', '.join(self.files)}\n"
            f"Something is wrong: {failing.module}.{failing} should give {_format(failing.result)}."
        )

    def secrets(self, agent: str) -> tuple[str, ...]:
        """Return the manual, for all but the planner."""
        return () if agent == "planner" else tuple(function.manual for function in self.repository.functions)

    def act(self, agent: str, action: str) -> Outcome:
        message = action.strip()[: self._max_message_chars]
        if agent == "planner":
            self.inbox["editor"] = f"Modules: {', '.join(self.files)}\nThe plan:\n{message}"
            return Outcome(next="editor")
        if agent == "editor":
            self.inbox["tester"] = f"The editor says:\n{message}"
            return Outcome(next="tester")
        shipped = bool(_SHIP.search(action))
        if not shipped and self.reports < self._revisions:
            self.reports += 1
            self.inbox["editor"] = f"The tester reports:\n{message}"
            return Outcome(next="editor")
        return self._score(shipped)

    def _score(self, shipped: bool) -> Outcome:
        tests = self.repository.hidden
        lines, reason = self._run(tests)
        passed = sum(line == test.result for line, test in zip(lines, tests, strict=True))
        facts = {
            "passed": passed, "tests": len(tests), "shipped": shipped, "edits": self.edits,
            "broken": sorted(self.repository.broken), "why": reason,
        }  # fmt: skip
        return end_for_all(self.possible_agents, float(passed == len(tests)), facts)


def _fault(source: str) -> str:
    """Return why a source is not valid Python. Empty if it is."""
    try:
        parse_source(source)
    except SyntaxError as error:
        return f"It is no Python now: {error.msg} (line {error.lineno})."
    except (ValueError, RecursionError, MemoryError) as error:
        return f"It is no Python now: {error}."
    return ""


def _format(line: str) -> str:
    """Return a result as a tester reads it, such as 3 for ``["ok", 3]``."""
    kind, _, value = line.strip("[]").partition(", ")
    if not line:
        return "nothing"
    return line[len('["ok", ') : -1] if kind == '"ok"' else f"the error {value}"


# ---- weak verifiers


def saw_tests_pass(trajectory: Trajectory) -> float | None:
    """Return 1 if all tests passed in the tester's last run, else 0, or None for other agents."""
    if trajectory.agent != "tester" or not trajectory.turns:
        return None
    return float(trajectory.info.get("saw_tests_pass") is True)


def edited_little(trajectory: Trajectory) -> float | None:
    """Return ``min(1, 2 / number of edits)``, or None without edits."""
    edits = sum(call.name == "edit" for turn in trajectory.turns for call in turn.tool_calls)
    return min(1.0, 2 / edits) if edits else None
