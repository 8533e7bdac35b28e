"""Entry point of the command line: ``forge-agents COMMAND``."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_agents.cli import deployment, evaluation, inspection, planning, training  # noqa: F401  # they register commands
from forge_agents.cli.completion import SHELLS, complete, completion_requested, script
from forge_agents.cli.registry import COMMANDS, GROUPS, WITH_USER_MODULES
from forge_agents.display import visible, visible_error
from forge_agents.errors import ForgeError, did_you_mean, missing_stack
from forge_agents.imports import add_user_folder, exclude_run_folder, holds_run
from forge_agents.output import discard, has_no_reader, write_error

_TRAINING = ("demo", "train", "sft")
"""Commands whose own messages never fail. If a write of theirs fails, code of the user was stopped on the way."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 for success, 1 for failure, 2 for an unknown command or option, 130 if interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _main(words)
        sys.stdout.flush()
    except BrokenPipeError:
        if not has_no_reader(sys.stdout):  # another pipe
            raise
        discard(sys.stdout)  # its reader, such as `head`, has ended
        return int(bool(words) and words[0] in _TRAINING)
    return status


def _main(argv: list[str]) -> int:
    _escape_logs()
    if completion_requested():
        complete(COMMANDS)
        return 0
    if not argv or argv[0].startswith("-"):
        return _top_level_option(argv)
    command = COMMANDS.get(argv[0])
    if command is None:
        hint = did_you_mean(argv[0], COMMANDS)
        print(f"forge-agents: unknown command {argv[0]!r}.{hint}\n{_help()}", file=sys.stderr)
        return 2
    if argv[0] in WITH_USER_MODULES:
        add_user_folder(current := Path.cwd())
        if (current / "config.yaml").exists() and holds_run(current):
            exclude_run_folder(current)  # the command may have no file of settings
    return _run(argv[0], argv[1:])


class _Visible(logging.Formatter):
    """Formatter of log messages that may quote files and models."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def _format_warning(message: Warning | str, category: type[Warning], filename: str, *args: Any, **kwargs: Any) -> str:
    """Format a warning. A line of this project's code would tell the user nothing."""
    ours = (sys.modules.get(name) for name in ("forge_agents", "forge_envs", "forge_trainers", "forge_verifiers"))
    if any(module and Path(filename).is_relative_to(Path(str(module.__file__)).parent) for module in ours):
        return visible(f"warning: {message}\n")
    return visible(_format_raw(message, category, filename, *args, **kwargs))


_format_raw = warnings.formatwarning


def _escape_logs() -> None:
    """Escape log messages and warnings that go to the terminal."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Visible())
    warnings.formatwarning = _format_warning


def _run(name: str, argv: Sequence[str]) -> int:
    try:
        try:
            return COMMANDS[name](argv)
        except ModuleNotFoundError as error:
            raise missing_stack("this command", error) from error
    except KeyboardInterrupt as interrupt:
        write_error(str(interrupt) or "\nstopped")  # our own interrupts have printed a newline already
        return 130
    except (ForgeError, ValueError) as error:  # any other exception is a bug and keeps its traceback
        write_error(f"forge-agents {name}: {visible_error(str(error))}")  # it may quote files and models
        return 1
    except OSError as error:
        if error.filename is None:  # not about a file of the user
            raise
        write_error(f"forge-agents {name}: {visible_error(str(error.filename))}: {error.strerror}")
        return 1


def _top_level_option(argv: Sequence[str]) -> int:
    option = argv[0] if argv else "--help"
    if option in ("-h", "--help"):
        print(_help())
    elif option == "--version":
        import forge_agents

        print(forge_agents.__version__)
    elif option == "--completion" and list(argv[1:]) in [[shell] for shell in SHELLS]:
        print(script(argv[1]))
    else:
        print(f"forge-agents: unknown option {' '.join(argv)}\n{_help()}", file=sys.stderr)
        return 2
    return 0


def _help() -> str:
    lines = ["usage: forge-agents COMMAND ..."]
    for group, names in GROUPS.items():
        lines += ["", group, *(f"  {name:<9} {COMMANDS[name].__doc__}" for name in names)]
    return "\n".join(
        [
            *lines,
            "",
            "options",
            "  --version           Print the version.",
            f"  --completion SHELL  Print the completion script for {', '.join(SHELLS)}.",
            "",
            "`forge-agents COMMAND --help` shows options, defaults and examples.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
