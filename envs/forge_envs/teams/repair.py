"""Repair: a planner who has the manual, an editor who may change the modules, a tester who may run their tests.

In: texts: a plan, tool calls, reports. Out: one reward for all three: do all hidden tests pass? Waits for the sandbox
in which the modules run, with its deadline.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from forge_agents.envs.env import Outcome
from forge_agents.sandbox import Sandbox, SandboxLimits, SandboxUnavailable
from forge_agents.tools import Tool, ToolFormat, tool
from forge_agents.tools.code import told
from forge_agents.tools.env import ToolEnv
from forge_agents.types import Trajectory
from forge_envs.teams.generated import ended
from forge_envs.teams.hidden_tests import given
from forge_envs.teams.repair_tasks import FAULTS, Test, draw

_MAX_MODULE_CHARS = 8000
_FAILURES = 4
"""Tests that fail of which a tester is told."""
_SHIP = re.compile(r"\bSHIP\b")
_RESULT = re.compile(r"(All|\d+ of) \d+ tests (?:pass|fail)\.")


class Repair(ToolEnv):
    """Three seats that share one reward.

    A repository is drawn: modules of small functions, `faults` of which have a fault. ``planner`` alone reads the
    manual, which says what each function returns, and one test that fails; its text is the plan. ``editor`` reads the
    plan and changes lines of the modules by its tool; any other text of it hands over. ``tester`` runs tests by its
    tool, of which each fault breaks one or more. With the word SHIP it ends the work; any other text is a report, which
    the editor reads, at most `revisions` times. Planner and editor may look at every module.

    All get 1.0 if, when the work is shipped or the revisions are used up, all hidden tests pass, else 0. Hidden tests
    are others than those that the tester runs, of all functions; the process that runs the modules never holds the
    right results. An episode that is cut off earns 0. At the end infos hold ``passed`` and ``tests`` (hidden ones),
    ``shipped``, ``edits``, ``broken`` (the functions with a fault) and ``why`` (what kept the modules from running).

    Args:
        modules: Modules of the repository, 1 to 5 and at most as many as functions.
        functions: Functions of all modules, 1 to 12.
        faults: Functions with a fault, 1 to as many as there are.
        kinds: Faults that there may be, of ``repair_tasks.FAULTS``.
        revisions: Reports after which the modules are taken as they are.
        tool_format: As for `ToolEnv`.
        max_turns: Decisions, tool calls included, after which the episode is cut off; None: 16, and 12 for each module
            and each fault.
        max_message_chars: Longer plans and reports are cut.
        allow_weaker: Whether to run modules where the sandbox cannot hold all it promises; see `forge_agents.sandbox`.

    Raises:
        SandboxUnavailable: At reset, where this machine cannot run them as asked.
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
        most = 16 + 12 * (modules + faults) if max_turns is None else max_turns
        super().__init__(tool_format=tool_format, max_calls=12, max_turns=most)
        if not 1 <= modules <= min(5, functions) or not 1 <= faults <= functions <= 12:
            raise ValueError(
                f"modules={modules} must be 1 to 5, functions={functions} 1 to 12 and no fewer than modules, and "
                f"faults={faults} 1 to as many as functions"
            )
        if not kinds or set(kinds) - set(FAULTS) or revisions < 0 or max_message_chars < 1:
            raise ValueError(
                f"kinds={kinds!r} must be some of {', '.join(FAULTS)}, revisions={revisions} at least 0 and "
                f"max_message_chars={max_message_chars} at least 1"
            )
        self._modules, self._functions, self._faults, self._kinds = modules, functions, faults, tuple(kinds)
        self._revisions, self._max_message_chars = revisions, max_message_chars
        limits = SandboxLimits(wall_s=5.0, cpu_s=4, memory_mb=256, processes=4, output_kb=64)
        self._sandbox = Sandbox(limits=limits, allow_weaker=allow_weaker)

    def setup(self, rng: np.random.Generator) -> None:
        try:
            self._sandbox.require()
        except SandboxUnavailable as error:
            raise SandboxUnavailable(
                f"{self} runs what its seats edit, and this machine cannot shut that in; allow_weaker=True of the "
                f"environment is Sandbox's: {error}"
            ) from None
        self.repository = draw(
            rng, modules=self._modules, functions=self._functions, faults=self._faults, kinds=self._kinds
        )
        self.files = self.repository.files()
        self.heard = {"editor": "", "tester": "The editor has not begun."}
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
        new = [blanks + each for each in text.split("\n")] if text else []
        source = "\n".join([*lines[: line - 1], *new, *lines[line:]])
        if len(source) > _MAX_MODULE_CHARS:
            raise ValueError(f"{module} would have {len(source)} characters; {_MAX_MODULE_CHARS} are allowed")
        self.files = {**self.files, module: source}
        self.edits += 1
        return f"Line {line} of {module} was {old.strip()!r}. {_fault(source)}".strip()

    @tool
    def test(self) -> str:
        """Run the tests."""
        tests = self.repository.shown
        lines, why = self._run(tests)
        wrong = [(test, line) for test, line in zip(tests, lines, strict=True) if line != test.gives]
        if not wrong:
            return f"All {len(tests)} tests pass."
        failures = [f"{test.module}.{test} gives {_plain(line)}, not {_plain(test.gives)}" for test, line in wrong]
        return "\n".join([f"{len(wrong)} of {len(tests)} tests fail.", *failures[:_FAILURES], *([why] if why else [])])

    def tools(self, agent: str) -> Sequence[Tool]:
        return {"planner": [self.show], "editor": [self.show, self.edit], "tester": [self.test]}[agent]

    def _source(self, module: str) -> str:
        if module not in self.files:
            raise ValueError(f"there is no module {module!r}; modules are {', '.join(self.files)}")
        return self.files[module]

    def _run(self, tests: Sequence[Test]) -> tuple[list[str], str]:
        """What each test gives, empty where the process had ended, and what kept the modules from running."""
        if wrong := [f"{name}: {fault}" for name, source in self.files.items() if (fault := _fault(source))]:
            return [""] * len(tests), "\n".join(wrong)
        calls = [(test.module, test.name, test.arguments) for test in tests]
        lines, result = given(self._sandbox, self.files, calls)
        return lines + [""] * (len(tests) - len(lines)), "" if result.ok else told(result)[-300:]

    # ---- the game

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
            return self.heard[agent]
        seen = self.repository.shown
        failing = next(test for test in seen if test.name in self.repository.broken)
        return (
            f"Manual:\n{self.repository.manual()}\nModules: {', '.join(self.files)}\n"
            f"Something is wrong: {failing.module}.{failing} should give {_plain(failing.gives)}."
        )

    def secrets(self, agent: str) -> tuple[str, ...]:
        """What the functions should do, for all but the planner."""
        return () if agent == "planner" else tuple(each.manual for each in self.repository.functions)

    def act(self, agent: str, action: str) -> Outcome:
        said = action.strip()[: self._max_message_chars]
        if agent == "planner":
            self.heard["editor"] = f"Modules: {', '.join(self.files)}\nThe plan:\n{said}"
            return Outcome(next="editor")
        if agent == "editor":
            self.heard["tester"] = f"The editor says:\n{said}"
            return Outcome(next="tester")
        shipped = bool(_SHIP.search(action))
        if not shipped and self.reports < self._revisions:
            self.reports += 1
            self.heard["editor"] = f"The tester reports:\n{said}"
            return Outcome(next="editor")
        return self._judged(shipped)

    def _judged(self, shipped: bool) -> Outcome:
        tests = self.repository.hidden
        lines, why = self._run(tests)
        passed = sum(line == test.gives for line, test in zip(lines, tests, strict=True))
        facts = {
            "passed": passed, "tests": len(tests), "shipped": shipped, "edits": self.edits,
            "broken": sorted(self.repository.broken), "why": why,
        }  # fmt: skip
        return ended(self.possible_agents, float(passed == len(tests)), facts)


def _fault(source: str) -> str:
    """Why a source is no Python; empty where it is."""
    try:
        ast.parse(source)
    except SyntaxError as error:
        return f"It is no Python now: {error.msg} (line {error.lineno})."
    except (ValueError, RecursionError, MemoryError) as error:
        return f"It is no Python now: {error}."
    return ""


def _plain(line: str) -> str:
    """A result as a tester reads it, of ``["ok", 3]`` the 3."""
    kind, _, value = line.strip("[]").partition(", ")
    if not line:
        return "nothing"
    return line[len('["ok", ') : -1] if kind == '"ok"' else f"the error {value}"


# ---- weak verifiers


def saw_tests_pass(trajectory: Trajectory) -> float | None:
    """Whether the last result that the tester saw was that all tests pass; None for the others."""
    if trajectory.agent != "tester" or not trajectory.turns:
        return None
    asked = [
        turn for before, turn in pairwise(trajectory.turns) if any(call.name == "test" for call in before.tool_calls)
    ]
    seen = [found for turn in asked for found in _RESULT.findall(turn.observation)]
    return float(seen[-1:] == ["All"])


def edited_little(trajectory: Trajectory) -> float | None:
    """1 for one or two edits, less for more: 2 over their number; None where a seat made none."""
    edits = sum(call.name == "edit" for turn in trajectory.turns for call in turn.tool_calls)
    return min(1.0, 2 / edits) if edits else None
