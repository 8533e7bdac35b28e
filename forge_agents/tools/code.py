"""A private folder with tools for agents: Python in the sandbox, and files, without a shell."""

from __future__ import annotations

from collections.abc import Mapping

from forge_agents.sandbox import Sandbox, SandboxResult, validate_path
from forge_agents.tools import Tool, tool

_MAX_STDERR_CHARS = 1500
"""Maximum length of the end of standard error in a result."""
_PAGE_BYTES = 4096
"""The sandbox's folder is in memory, which a file takes in whole pages."""
_FILES_FRACTION = 0.9
"""Maximum fraction of the sandbox's files and folders before a run. The rest is for the sandbox and the program."""


class Workspace:
    r"""The files of one episode, and tools on them.

    An environment creates one in `setup` and returns its `tools`. The files are in memory and copied into the sandbox
    for each run. So nothing is written on the host or must be deleted, and a copy of the environment has its own files.
    Changes by a program are kept, even if a limit ends it. Links, empty folders and special files are dropped.

    Args:
        sandbox: Sandbox for programs. Its limits `file_mb`, `disk_mb` and `files` apply to the folder as well.
        files: Initial content by relative path.

    Example:
        >>> box = Workspace(files={"data.txt": b"1 2 3"})
        >>> box.run("print(sum(map(int, open('data.txt').read().split())))").stdout
        '6\n'
    """

    def __init__(self, sandbox: Sandbox | None = None, files: Mapping[str, bytes] | None = None) -> None:
        self.sandbox = sandbox or Sandbox()
        self._clear()
        for path, content in (files or {}).items():
            self.put(path, content)

    def _clear(self) -> None:
        self._files: dict[str, bytes] = {}
        self._folders: set[str] = set()
        self._num_bytes = 0
        """Bytes of all files in the sandbox's folder. A sum, because a program may leave thousands of files."""

    @property
    def files(self) -> dict[str, bytes]:
        """A copy of the content by path."""
        return dict(self._files)

    def put(self, path: str, content: bytes) -> None:
        """Write a file.

        Raises:
            ValueError: The path leaves the folder, is a folder or below a file, or a limit would be exceeded.
        """
        name, limits = validate_path(path), self.sandbox.limits
        folders = _folders(name)
        if name in self._folders or not self._files.keys().isdisjoint(folders):
            other = next(each for each in self._files if each.startswith(f"{name}/") or each in folders)
            raise ValueError(f"{path!r} cannot be a file next to {other!r}")
        old = self._files.get(name)
        num_bytes = self._num_bytes + _on_disk(content) - _on_disk(old or b"")
        if len(content) > limits.file_mb << 20 or num_bytes > limits.disk_mb << 20:
            raise ValueError(f"{path!r} has {len(content)} bytes. There is no room for so many")
        num_files = len(self._files) + (old is None)
        num_folders = len(self._folders) + len(folders - self._folders)
        if num_files + num_folders > limits.files * _FILES_FRACTION:
            raise ValueError(f"{path!r} makes {num_files} files in {num_folders} folders. There is no room for them")
        self._files[name], self._num_bytes = content, num_bytes
        self._folders |= folders

    def run(self, code: str, *, stdin: str = "") -> SandboxResult:
        """Run a program in the folder and keep its files.

        Raises:
            SandboxUnavailable: This machine does not support the requested sandbox.
            SandboxError: The sandbox itself failed.
        """
        result = self.sandbox.run(code, stdin=stdin, files=self._files, collect=True)
        self._clear()
        for path, content in sorted(result.files.items()):
            try:
                self.put(path.encode().decode(), content)
            except ValueError:
                continue  # the name is not text, or there are too many files
        return result

    @tool(waits=True)
    def python(self, code: str) -> str:
        """Run a Python program in your folder and read what it prints.

        Args:
            code: The program. It sees the standard library and your files; print what you want to know.
        """
        return format_result(self.run(code))

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
        """Return the tools python, read_file, write_file and list_files."""
        return [self.python, self.read_file, self.write_file, self.list_files]


def _folders(path: str) -> set[str]:
    return {path[:at] for at, character in enumerate(path) if character == "/"}


def _on_disk(content: bytes) -> int:
    return -(-len(content) // _PAGE_BYTES) * _PAGE_BYTES


def format_result(result: SandboxResult) -> str:
    """Return a program's output, the end of its errors, and the reason of its end, as text for a model."""
    parts = [result.stdout.rstrip(), result.stderr.rstrip()[-_MAX_STDERR_CHARS:]]
    if result.limit:
        parts.append(f"(ended: the limit {result.limit} was reached)")
    elif result.exit_code and not result.stderr:
        parts.append(f"(ended with exit code {result.exit_code})")
    return "\n".join(part for part in parts if part) or "(nothing was printed)"
