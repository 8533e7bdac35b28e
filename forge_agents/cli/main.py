"""The command line: ``forge-agents COMMAND``.

In: words. Out: an exit status. Waits for what the command does.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from forge_agents.cli.commands import COMMANDS, WITH_USER_MODULES
from forge_agents.cli.completion import asked, complete
from forge_agents.display import visible
from forge_agents.errors import ForgeError, did_you_mean
from forge_agents.imports import add_user_folder


def main(words: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 done, 1 failed, 2 not understood, 130 interrupted."""
    words = list(sys.argv[1:] if words is None else words)
    if asked():
        complete(COMMANDS)
        return 0
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if words[0] == "--version":
        import forge_agents

        print(forge_agents.__version__)
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        print(f"forge-agents: no command {words[0]!r}.{did_you_mean(words[0], COMMANDS)}\n{_help()}", file=sys.stderr)
        return 2
    if words[0] in WITH_USER_MODULES:
        add_user_folder(Path.cwd())
    try:
        return command(words[1:])
    except KeyboardInterrupt as stopped:
        print(str(stopped) or "\nstopped", file=sys.stderr)  # ours have said a line before
        return 130
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ForgeError, ValueError) as error:  # other exceptions are mistakes of the program: with their traceback
        print(f"forge-agents {words[0]}: {visible(str(error))}", file=sys.stderr)  # files and models are quoted in it
        return 1
    except OSError as error:
        if error.filename is None:  # not about a file that somebody named
            raise
        print(f"forge-agents {words[0]}: {visible(str(error.filename))}: {error.strerror}", file=sys.stderr)
        return 1


def _help() -> str:
    lines = [f"  {name:<11} {command.__doc__}" for name, command in COMMANDS.items()]
    return "\n".join(["usage: forge-agents COMMAND ...", "", *lines, "", "forge-agents COMMAND --help says more."])


if __name__ == "__main__":
    sys.exit(main())
