"""Completion of command lines in bash, zsh and fish, by argcomplete."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from types import UnionType
from typing import TYPE_CHECKING, Literal, Union, get_args, get_origin

if TYPE_CHECKING:
    from argparse import ArgumentParser

SHELLS = ("bash", "zsh", "fish")
_TAKES_AN_ID = ("play", "check")
"""Commands whose positional arguments are environment ids."""


def script(shell: str) -> str:
    """Return the code that a shell must run once to complete ``forge-agents``."""
    from argcomplete.shell_integration import shellcode

    return str(shellcode(["forge-agents"], shell=shell))


def completion_requested() -> bool:
    """Return whether the shell asks for completions instead of running a command."""
    return "_ARGCOMPLETE" in os.environ


def complete(commands: Mapping[str, Callable[[Sequence[str]], int]]) -> None:
    """Answer the shell and end the process. The parser of a command completes its options."""
    from argcomplete.lexers import split_line

    _, prefix, _, words, _ = split_line(os.environ["COMP_LINE"], int(os.environ["COMP_POINT"]))
    if len(words) < 2 or words[1] not in commands:
        _complete_from(commands)
        return
    os.environ["_ARGCOMPLETE"] = "2"  # the command's parser skips the program's and the command's name
    if words[1] in _TAKES_AN_ID and not prefix.startswith("-") and not words[-1].startswith("-"):
        from forge_agents.envs import registry

        _complete_from(registry.list_envs())
        return
    commands[words[1]]([])


def offer_values(parser: ArgumentParser) -> None:
    """Let the options of `parser` complete the values that their types name."""
    for action in parser._actions:  # argparse has no public access to options
        hint = getattr(action, "_typehint", None)
        if hint is not None:
            values = _values(hint)
            vars(action)["completer"] = lambda values=values, **_: values


def _values(hint: object) -> list[str]:
    """Return the choices of a type, such as "a" and "b" for ``Literal["a", "b"] | None``. Empty for free text."""
    if hint is bool:
        return ["true", "false"]
    if get_origin(hint) is Literal:
        return [str(value) for value in get_args(hint) if value is not None]
    return [value for part in get_args(hint) if get_origin(hint) in (Union, UnionType) for value in _values(part)]


def _complete_from(words: Collection[str]) -> None:
    import argparse

    import argcomplete

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("words", nargs="*", choices=sorted(words))
    argcomplete.autocomplete(parser, always_complete_options=False)
