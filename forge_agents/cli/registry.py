"""Registry of the commands, with their groups and examples, and helpers that all commands share."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from forge_agents.display import visible

if TYPE_CHECKING:
    from forge_agents.cli.config import Parser

T = TypeVar("T")
Command: TypeAlias = Callable[[Sequence[str]], int]
"""Runs a command with its arguments and returns the exit status."""
COMMANDS: dict[str, Command] = {}
"""Commands by name."""
GROUPS: dict[str, list[str]] = {
    "Start": ["demo", "init", "doctor"],
    "Train": ["train", "sft", "import", "simulate"],
    "Evaluate": ["eval", "bench", "play"],
    "Inspect": ["view", "list", "check"],
    "Deploy": ["export", "serve"],
}
"""Names of the commands by purpose, in the order of the help."""
EXAMPLES: dict[str, tuple[str, ...]] = {}
"""Example command lines of each command, by its name."""
WITH_USER_MODULES = ("train", "sft", "eval", "simulate", "play", "bench", "list", "check")
"""Commands that may import the user's modules from the current folder.

The other commands work on run folders, which may come from a stranger."""


def command(name: str, *examples: str) -> Callable[[Command], Command]:
    """Register a function as a command. Its docstring is the description in the help."""

    def register(run: Command) -> Command:
        COMMANDS[name], EXAMPLES[name] = run, examples
        return run

    return register


def make_parser(name: str) -> Parser:
    """Return an empty parser with the description and examples of a command."""
    from forge_agents.cli.config import Parser

    return Parser(prog=f"forge-agents {name}", description=COMMANDS[name].__doc__, examples=EXAMPLES[name])


def parse_settings(name: str, settings_class: type[T], argv: Sequence[str]) -> T:
    """Parse the arguments of a command whose options are the fields of a settings class."""
    from forge_agents.cli.config import parse

    description = str(COMMANDS[name].__doc__)
    return parse(settings_class, argv, prog=f"forge-agents {name}", description=description, examples=EXAMPLES[name])


def print_visible(text: str) -> None:
    """Print text that may hold names from a stranger's files. Control characters are escaped."""
    print(visible(text))


def print_next(*commands: str) -> None:
    """Print the commands that a user would run next."""
    for number, line in enumerate(commands):
        print(visible(f"{'' if number else 'next':<6} {line}"))


def repeat(name: str, argv: Sequence[str]) -> str:
    """Return a command line with the same arguments."""
    return shlex.join(["forge-agents", name, *argv])
