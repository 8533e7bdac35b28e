"""The oracle of `forge_envs.teams.repair`.

In: for the planner the manual and the modules, for the editor the plan, for the tester the tests' results. Out: calls,
a plan of lines, SHIP. Waits for nothing.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
from typing import TypeAlias

from forge_envs.oracles.script import Script, read
from forge_envs.teams.repair_tasks import FORMS

Edit: TypeAlias = "tuple[str, int, str]"
"""Module, number of a line, and what is to stand there."""


class Oracle(Script):
    """The planner writes every function of the manual and compares it with the module; the others carry out."""

    module = ""
    """The one that the planner is shown."""

    def planner(self, seen: str) -> str:
        """Shows one module after the other, then writes the plan."""
        if seen.startswith("Manual"):
            self.right = [source_for(line) for line in re.findall(r"^.+\) returns .+$", seen, re.MULTILINE)]
            self.modules, self.plan = read(r"\nModules: (.+)", seen).split(", "), list[Edit]()
        else:
            lines = re.sub(r"^\d+\| ?", "", seen, flags=re.MULTILINE).split("\n")
            for module, name, right in self.right:
                if module == self.module:
                    self.plan += self.changes(module, name, right, lines)
        if self.modules:
            self.module = self.modules.pop(0)
            return self.call("show", module=self.module)
        return json.dumps(self.plan[::-1])  # from the end on, so that an edit moves no line of the next

    def changes(self, module: str, name: str, right: str, lines: list[str]) -> list[Edit]:
        """What makes the function of that name right."""
        start = next(at for at, line in enumerate(lines) if line.startswith(f"def {name}("))
        end = next((at for at in range(start, len(lines)) if not lines[at].strip()), len(lines))
        was, wanted, found = lines[start:end], right.split("\n"), list[Edit]()
        for tag, i, j, k, m in difflib.SequenceMatcher(None, was, wanted, autojunk=False).get_opcodes():
            if tag == "insert":
                found.append((module, start + i + 1, "\n".join([*wanted[k:m], was[i]])))
            elif tag != "equal":
                found += [(module, start + i + n + 1, wanted[k + n]) for n in range(j - i)]
        return found

    def editor(self, seen: str) -> str:
        """One edit of the plan after the other."""
        if "The plan:" in seen:
            self.todo = _edits(seen.partition("The plan:\n")[2])
        if self.todo and "reports" not in seen:
            module, line, text = self.todo.pop(0)
            return self.call("edit", module=module, line=line, text=text)
        return "done"

    def tester(self, seen: str) -> str:
        """Tests, and ships where all pass."""
        if seen.startswith("All"):
            return "SHIP"
        return self.call("test") if seen.startswith("The editor") else seen


def _edits(plan: str) -> list[Edit]:
    """What a plan says to do; nothing where another than an oracle wrote it in a form of its own."""
    try:
        edits = json.loads(plan)
        return [(str(module), int(line), str(text)) for module, line, text in edits]
    except (ValueError, TypeError, RecursionError):
        return []


def source_for(line: str) -> tuple[str, str, str]:
    """Module, name and source of the function that a line of the manual describes, from its words alone."""
    ((module, name, head, told),) = re.findall(r"^(\w+)\.(\w+)\((.+)\) returns (.+)\.$", line)
    for parameters, form, code in FORMS:
        if parameters == head and (found := re.fullmatch(_pattern(form), told)):
            blanks = dict.fromkeys("abcfg", "0") | found.groupdict()
            if "{c}" in code and "c" not in found.groupdict():
                blanks["c"] = str(int(blanks["a"]) + int(blanks["b"]))
            body = code.format(**blanks).replace("\n", "\n    ")
            return module, name, ast.unparse(ast.parse(f"def {name}({head}):\n    {body}"))
    raise ValueError(f"{line!r} is no line of the manual")


def _pattern(form: str) -> str:
    """A sentence of the manual, each blank a group."""
    text, seen = re.escape(form), set()
    for blank, what in (("a", r"\d+"), ("b", r"\d+"), ("c", r"\d+"), ("f", r"\w+"), ("g", r"\w+")):
        for mark in re.findall(re.escape(re.escape(f"{{{blank}}}")), text):
            text = text.replace(mark, f"(?P={blank})" if blank in seen else f"(?P<{blank}>{what})", 1)
            seen.add(blank)
    return text
