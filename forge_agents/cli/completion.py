"""Completion of command lines in bash, zsh and fish, by argcomplete."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence

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
    os.environ["COMP_TYPE"] = os.environ.get("COMP_TYPE") or "9"  # jsonargparse reads it, and only bash sets it
    if words[1] in _TAKES_AN_ID and not prefix.startswith("-") and not words[-1].startswith("-"):
        from forge_agents.envs import registry

        _complete_from(registry.list_envs())
        return
    commands[words[1]]([])


def _complete_from(words: Collection[str]) -> None:
    import argparse

    import argcomplete

    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("words", nargs="*", choices=sorted(words))
    argcomplete.autocomplete(parser, always_complete_options=False)
