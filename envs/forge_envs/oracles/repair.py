"""Oracle of `forge_envs.teams.repair`."""

from __future__ import annotations

import ast
import difflib
import json
import re
from typing import TypeAlias

from forge_envs.oracles.script import Script, read
from forge_envs.teams.repair_tasks import FORMS

Edit: TypeAlias = "tuple[str, int, str]"
"""Module, line number, and new text of the line."""


class Oracle(Script):
    """The planner writes every function from the manual and compares it with the module. The others follow its plan."""

    module = ""
    """Module that the planner reads now."""

    def planner(self, seen: str) -> str:
        """Read one module after the other, then write the plan."""
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
        return json.dumps(self.plan[::-1])  # last line first, so that no edit moves the lines of the next

    def changes(self, module: str, name: str, right: str, lines: list[str]) -> list[Edit]:
        """Return the edits that correct a function."""
        start = next(at for at, line in enumerate(lines) if line.startswith(f"def {name}("))
        end = next((at for at in range(start, len(lines)) if not lines[at].strip()), len(lines))
        old, new, edits = lines[start:end], right.split("\n"), list[Edit]()
        for tag, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
            if tag == "insert":
                edits.append((module, start + i + 1, "\n".join([*new[k:m], old[i]])))
            elif tag != "equal":
                edits += [(module, start + i + n + 1, new[k + n]) for n in range(j - i)]
        return edits

    def editor(self, seen: str) -> str:
        """Make one edit of the plan after the other."""
        if "The plan:" in seen:
            self.todo = _edits(seen.partition("The plan:\n")[2])
        if self.todo and "reports" not in seen:
            module, line, text = self.todo.pop(0)
            return self.call("edit", module=module, line=line, text=text)
        return "done"

    def tester(self, seen: str) -> str:
        """Run the tests, and ship if all pass."""
        if seen.startswith("All"):
            return "SHIP"
        return self.call("test") if seen.startswith("The editor") else seen


def _edits(plan: str) -> list[Edit]:
    """Parse a plan of an oracle. Plans in any other form give no edits."""
    try:
        edits = json.loads(plan)
        return [(str(module), int(line), str(text)) for module, line, text in edits]
    except (ValueError, TypeError, RecursionError):
        return []


def source_for(line: str) -> tuple[str, str, str]:
    """Return module, name and source of the function that a line of the manual describes."""
    ((module, name, head, sentence),) = re.findall(r"^(\w+)\.(\w+)\((.+)\) returns (.+)\.$", line)
    for parameters, form, code in FORMS:
        if parameters == head and (match := re.fullmatch(_pattern(form), sentence)):
            blanks = dict.fromkeys("abcfg", "0") | match.groupdict()
            if "{c}" in code and "c" not in match.groupdict():
                blanks["c"] = str(int(blanks["a"]) + int(blanks["b"]))
            body = code.format(**blanks).replace("\n", "\n    ")
            return module, name, ast.unparse(ast.parse(f"def {name}({head}):\n    {body}"))
    raise ValueError(f"{line!r} is not a line of the manual")


def _pattern(form: str) -> str:
    """Return the regular expression of a sentence of the manual, with a group for each blank."""
    text, seen = re.escape(form), set()
    for blank, what in (("a", r"\d+"), ("b", r"\d+"), ("c", r"\d+"), ("f", r"\w+"), ("g", r"\w+")):
        for mark in re.findall(re.escape(re.escape(f"{{{blank}}}")), text):
            text = text.replace(mark, f"(?P={blank})" if blank in seen else f"(?P<{blank}>{what})", 1)
            seen.add(blank)
    return text
