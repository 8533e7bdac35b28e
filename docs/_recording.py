"""Pictures of the quick start in a terminal, for the documentation: its commands typed into tmux, panes as SVG.

In: `forge-agents` and tmux on the path. Out: docs/images/terminal-NAME.svg, which ask no other host for a font. Waits
for words on the screen, each with a deadline. Starts engines: minutes; with --demo a quarter of an hour.

    python docs/_recording.py [--demo] [--out docs/images]
"""

from __future__ import annotations

import argparse
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 112, 34
TRAIN = "forge-agents train train.yaml --policies.team.model tiny-random --steps 8 --out runs/try"
PROMPT = r"^\$ *\Z"
TEMPLATE = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px ui-monospace, Menlo, Consolas, monospace }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""As rich draws it, in the reader's own font: rich's template loads one from another host."""


def main(words: Sequence[str] | None = None) -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--demo", action="store_true", help="record the end of forge-agents demo, and nothing else")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "images")
    args = parser.parse_args(words)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        terminal = Terminal(Path(folder), args.out)
        try:
            demo(terminal) if args.demo else quick_start(terminal)
        finally:
            terminal.close()


def quick_start(terminal: Terminal) -> None:
    """A project, a run, Ctrl-C, the same command again, the viewer."""
    terminal.type("forge-agents init my-team", PROMPT, 60)
    terminal.type("cd my-team", PROMPT, 10)
    terminal.type("forge-agents check my_env:my/Guess-v0", PROMPT, 120)
    terminal.take("init")

    terminal.clear()
    terminal.type(TRAIN, r"^train .* 3/8 ", 400)
    terminal.take("train")
    terminal.press("C-c", PROMPT, 200)
    terminal.take("stop")

    terminal.clear()
    terminal.type(TRAIN, PROMPT, 600)
    terminal.take("resume")

    terminal.clear()
    terminal.type("forge-agents view runs/try", r"http://127\.0\.0\.1", 100)
    terminal.take("view")
    terminal.press("C-c", PROMPT, 60)


def demo(terminal: Terminal) -> None:
    """Two agents that learn beside a control that does not."""
    terminal.type("forge-agents demo --out runs/demo", PROMPT, 3600)
    terminal.take("demo")


class Terminal:
    """A shell in tmux, in a temporary folder, with nothing of this machine's settings but the search paths.

    Args:
        folder: Where the shell starts; also its home and cache.
        out: Where pictures go.
    """

    def __init__(self, folder: Path, out: Path) -> None:
        self.folder, self.out = folder, out
        self.tmux = ["tmux", "-S", str(folder / "tmux"), "-f", os.devnull]
        variables = {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
        variables |= {"HOME": str(folder), "LANG": "C.UTF-8", "PS1": "$ ", "HISTFILE": os.devnull}
        shell = ["env", "-i", "TERM=tmux-256color", *(f"{name}={value}" for name, value in variables.items())]
        size = ["-x", str(COLUMNS), "-y", str(ROWS)]
        self._tmux("new-session", "-d", *size, "-c", str(folder), *shell, "bash", "--norc", "--noprofile")
        self._await(PROMPT, 20)

    def type(self, command: str, pattern: str, deadline_s: float) -> None:
        """Type a command and wait until the screen below it matches `shown`."""
        self._tmux("send-keys", "-l", command)
        self.press("Enter", pattern, deadline_s)

    def press(self, key: str, pattern: str, deadline_s: float) -> None:
        """Press a key of tmux's names and wait for `shown`."""
        self._tmux("send-keys", key)
        time.sleep(1)  # the prompt before it is gone
        self._await(pattern, deadline_s)

    def clear(self) -> None:
        """An empty screen."""
        self.press("C-l", PROMPT, 20)

    def take(self, name: str) -> None:
        """One picture of what the screen shows.

        Raises:
            ValueError: A path or a name of this machine would be in it.
        """
        seen = self._tmux("capture-pane", "-e", "-p").rstrip().removesuffix("$").rstrip()
        lines = Text.from_ansi(seen)
        private_words = (str(self.folder), sys.prefix, str(Path(__file__).parents[1]), socket.gethostname())
        leaked = [word for word in private_words if word in lines.plain]
        if leaked:
            raise ValueError(f"the picture {name!r} would tell {', '.join(leaked)} of this machine:\n{lines.plain}")
        console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
        console.print(lines, soft_wrap=True)
        file = self.out / f"terminal-{name}.svg"
        drawn = console.export_svg(title="", code_format=TEMPLATE, unique_id=f"terminal-{name}")
        file.write_text(re.sub(r"[ \t]+$", "", drawn, flags=re.MULTILINE), encoding="utf-8")
        sys.stdout.write(f"{file} {file.stat().st_size / 1000:.0f} kB\n")

    def close(self) -> None:
        """End what still runs, and the shell."""
        try:
            if not re.search(PROMPT, self._screen(), re.MULTILINE):
                for _ in range(2):
                    self._tmux("send-keys", "C-c")
                    time.sleep(1)
                self._await(PROMPT, 60)
        finally:
            self._tmux("kill-server")

    def _await(self, pattern: str, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        while not re.search(pattern, self._screen(), re.MULTILINE):
            if time.monotonic() > end:
                raise TimeoutError(f"{pattern!r} did not appear in {deadline_s:.0f} s; the screen:\n{self._screen()}")
            time.sleep(0.2)

    def _screen(self) -> str:
        return self._tmux("capture-pane", "-p").rstrip()

    def _tmux(self, *words: str) -> str:
        if shutil.which("tmux") is None:
            raise FileNotFoundError("tmux is not installed; install it (Debian: tmux) and run this again")
        done = subprocess.run([*self.tmux, *words], capture_output=True, text=True, check=True, timeout=20)
        return done.stdout


if __name__ == "__main__":
    main()
