"""Completion of command lines in bash, zsh and fish, by argcomplete.

In: what the shell says of a line that is being written. Out: the words that fit, to the shell. Waits for nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Literal, Union, get_args, get_origin

if TYPE_CHECKING:
    from argparse import ArgumentParser

SHELLS = ("bash", "zsh", "fish")
_TAKES_AN_ID = ("play", "check")
"""Commands whose words are environment ids."""


def script(shell: str) -> str:
    """What a shell must run once to complete ``forge-agents``."""
    from argcomplete.shell_integration import shellcode

    return str(shellcode(["forge-agents"], shell=shell))


def asked() -> bool:
    """Whether the shell asks for completions instead of running a command."""
    return "_ARGCOMPLETE" in os.environ


def complete(commands: Mapping[str, Callable[[Sequence[str]], int]]) -> None:
    """Answer the shell and end the process; a command's own parser answers for its options.

    Args:
        commands: Functions by name; each builds its parser and parses.
    """
    from argcomplete.lexers import split_line

    _, begun, _, before, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    if len(before) < 2 or before[1] not in commands:
        _choose(commands)
        return
    os.environ["_ARGCOMPLETE"] = "2"  # the words of the command's parser begin behind its name
    if before[1] in _TAKES_AN_ID and not begun.startswith("-") and not before[-1].startswith("-"):
        from forge_agents.envs import registry

        _choose(registry.list_envs())
        return
    commands[before[1]]([])


def offer_values(parser: ArgumentParser) -> None:
    """Let the options of `parser` offer the values that their types name."""
    for action in parser._actions:  # argparse has no public way to its options
        hint = getattr(action, "_typehint", None)
        if hint is not None:
            values = _values(hint)
            vars(action)["completer"] = lambda values=values, **_: values


def _values(hint: object) -> list[str]:
    """``Literal["a", "b"] | None``: a, b. Nothing where any text will do."""
    if hint is bool:
        return ["true", "false"]
    if get_origin(hint) is Literal:
        return [str(value) for value in get_args(hint) if value is not None]
    return [value for part in get_args(hint) if get_origin(hint) in (Union, UnionType) for value in _values(part)]


def _choose(words: Collection[str]) -> None:
    import argparse

    import argcomplete

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("words", nargs="*", choices=sorted(words))
    argcomplete.autocomplete(parser, always_complete_options=False)
