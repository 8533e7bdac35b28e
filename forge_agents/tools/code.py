"""A private folder that an agent works in by tools: Python in the sandbox, and files, without a shell.

In: tool calls. Out: texts for the model. Waits for the sandbox, at most its wall-clock limit.
"""

from __future__ import annotations

from collections.abc import Mapping

from forge_agents.sandbox import Sandbox, SandboxResult, validate_path
from forge_agents.tools import Tool, tool

_LAST_OF_ERROR = 1500
"""Characters of standard error that a model is shown."""


class Workspace:
    r"""The files of one episode, and tools on them.

    An environment makes one in `setup` and offers `tools`. The files are held in memory and laid into the sandbox for
    each run, so nothing is ever written on the host, a copy of the environment has its own files, and nothing is left
    to delete. What a program changes is kept, also where a limit ends it; links, empty folders and other things that
    are no plain files are not.

    Args:
        sandbox: Where programs run. Its `file_mb`, `disk_mb` and `files` bound the folder, too.
        files: What the folder holds at first, by relative path.

    Example:
        >>> box = Workspace(files={"data.txt": b"1 2 3"})
        >>> box.run("print(sum(map(int, open('data.txt').read().split())))").stdout
        '6\n'
    """

    def __init__(self, sandbox: Sandbox | None = None, files: Mapping[str, bytes] | None = None) -> None:
        self.sandbox = sandbox or Sandbox()
        self._files: dict[str, bytes] = {}
        for path, content in (files or {}).items():
            self.put(path, content)

    @property
    def files(self) -> dict[str, bytes]:
        """What the folder holds, by path; a copy."""
        return dict(self._files)

    def put(self, path: str, content: bytes) -> None:
        """Write a file.

        Raises:
            ValueError: The path leaves the folder, is a folder or lies below a file, or a limit would be broken.
        """
        name, limits = validate_path(path), self.sandbox.limits
        for other in self._files:
            if other.startswith(f"{name}/") or name.startswith(f"{other}/"):
                raise ValueError(f"{path!r} cannot be a file beside {other!r}")
        others = [len(data) for key, data in self._files.items() if key != name]
        if len(content) > limits.file_mb << 20 or sum(others) + len(content) > limits.disk_mb << 20:
            raise ValueError(f"{path!r} has {len(content)} bytes; there is no room for so many")
        if len(others) >= limits.files // 2:  # the sandbox counts folders, too
            raise ValueError(f"there are {len(others)} files already, and no more are allowed")
        self._files[name] = content

    def run(self, code: str, *, stdin: str = "") -> SandboxResult:
        """Run a program in the folder, and keep the files it leaves.

        Raises:
            SandboxUnavailable: This machine has no sandbox as asked.
            SandboxError: The sandbox itself failed.
        """
        result = self.sandbox.run(code, stdin=stdin, files=self._files, collect=True)
        self._files = {}
        for path, content in sorted(result.files.items()):
            try:
                self.put(path.encode().decode(), content)
            except ValueError:
                continue  # a name that is no text, or one file too many
        return result

    @tool
    def python(self, code: str) -> str:
        """Run a Python program in your folder and read what it prints.

        Args:
            code: The program. It sees the standard library and your files; print what you want to know.
        """
        return told(self.run(code))

    @tool
    def read_file(self, path: str) -> str:
        """Read a text file of your folder.

        Args:
            path: Such as notes.txt or data/table.csv.
        """
        name = validate_path(path)
        if name not in self._files:
            raise ValueError(f"there is no file {path!r}; files: {', '.join(sorted(self._files)) or 'none'}")
        return self._files[name].decode("utf-8", "replace")

    @tool
    def write_file(self, path: str, text: str) -> str:
        """Write a text file into your folder; a file of that name is replaced.

        Args:
            path: Such as notes.txt or data/table.csv.
            text: All that the file shall hold.
        """
        content = text.encode("utf-8", "replace")
        self.put(path, content)
        return f"{len(content)} bytes written"

    @tool
    def list_files(self) -> str:
        """List the files of your folder and their sizes in bytes."""
        return "\n".join(f"{len(data):>9}  {path}" for path, data in sorted(self._files.items())) or "(no files)"

    def tools(self) -> list[Tool]:
        """python, read_file, write_file, list_files."""
        return [self.python, self.read_file, self.write_file, self.list_files]


def told(result: SandboxResult) -> str:
    """What a program printed, the end of its errors, and what ended it, for a model to read."""
    parts = [result.stdout.rstrip(), result.stderr.rstrip()[-_LAST_OF_ERROR:]]
    if result.limit:
        parts.append(f"(ended: the limit {result.limit} was reached)")
    elif result.exit_code and not result.stderr:
        parts.append(f"(ended with exit code {result.exit_code})")
    return "\n".join(part for part in parts if part) or "(nothing was printed)"
