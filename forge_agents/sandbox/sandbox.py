"""Runs model-written Python programs and command lines in isolation: `Sandbox`, `CommandLine`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import marshal
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import zoneinfo
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from forge_agents.errors import ForgeError
from forge_agents.settings import settings_class

_SUPERVISOR = Path(__file__).with_name("_supervisor.py")
_GRACE_S = 10.0
"""Time after `wall_s` (enforced by the supervisor) until the supervisor itself is killed."""


class SandboxUnavailable(ForgeError, RuntimeError):  # noqa: N818  # a state of the machine
    """This machine cannot isolate programs as requested."""


class SandboxError(ForgeError, RuntimeError):
    """The sandbox itself failed, not the program."""


@settings_class
@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Limits of one program, including its children."""

    wall_s: float = 10.0
    """Maximum wall-clock seconds."""
    cpu_s: int = 10
    """Maximum processor seconds."""
    memory_mb: int = 512
    """Maximum MiB of each process's address space, and of the memory of all processes together, including shared
    memory, socket buffers and the kernel's data of mappings."""
    processes: int = 16
    """Maximum number of processes and threads at one time."""
    open_files: int = 64
    """Maximum number of open files per process."""
    file_mb: int = 16
    """Maximum MiB of one file."""
    disk_mb: int = 32
    """Maximum MiB of all files together."""
    files: int = 1000
    """Maximum number of files and folders."""
    output_kb: int = 64
    """Maximum KiB of standard output and standard error together. A program that writes more is killed."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not value > 0 or value > 1e6:
                raise ValueError(f"{each.name}={value} of SandboxLimits must be above 0 and at most a million")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """Result of a program."""

    stdout: str
    """Standard output. Bytes that are not UTF-8 are replaced."""
    stderr: str
    exit_code: int
    """Exit code. Negative if the program was ended by that signal, -9 if it exceeded a limit."""
    limit: str
    """Name of the exceeded `SandboxLimits` field. Empty if there was none."""
    wall_s: float
    """Wall-clock seconds."""
    cpu_s: float
    """Processor seconds, including children."""
    peak_mb: float
    """Peak memory of all processes together, in MiB. Measured every 20 ms, so it is 0 for short programs."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files left in its folder, by path, if they were requested."""

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with exit code 0."""
        return self.exit_code == 0 and not self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantees:
    """Guarantees of a sandbox on this machine."""

    full: bool
    """Whether all guarantees are enforced."""
    enforced: tuple[str, ...]
    missing: tuple[str, ...]
    """Descriptions of guarantees that are not enforced."""
    reason: str
    """Reason for missing guarantees. Empty if `full`."""

    def __str__(self) -> str:
        head = f"sandbox, weakened: {self.reason}" if self.reason else "sandbox"
        enforced = [f"  enforced: {text}" for text in self.enforced]
        return "\n".join([head, *enforced, *(f"  NOT enforced: {text}" for text in self.missing)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    r"""Runs untrusted Python programs. Needs Linux 5.14 or newer, but no privileges or other software.

    The program sees the standard library, read-only, and a temporary private folder with `files`, its working
    directory. The program has no network, sees no other processes, inherits no environment variables, has no
    privileges, and is subject to `limits`. All its processes end when its first one does.

    Example:
        >>> Sandbox().run("print(6 * 7)").stdout
        '42\n'
    """

    limits: SandboxLimits = field(default_factory=SandboxLimits)
    python: str = ""
    """Path of the interpreter. Empty uses the current one without its installed packages."""
    import_paths: tuple[str, ...] = ()
    """Folders that the program may read and import from. If root runs the sandbox, all users must have access."""
    allow_weaker: bool = False
    """Whether to run with weaker isolation if namespaces are not allowed. See `guarantees`."""
    folders: tuple[str, ...] = ()
    """Writable top-level folders, such as ``"/app"``. The folders are part of the private folder: the file
    ``/app/name`` is ``"app/name"`` in `files` and among the collected ones. Namespaces are required."""

    def __post_init__(self) -> None:
        for path in self.folders:
            if not re.fullmatch(r"/[\w.-]+", path) or path in ("/.", "/..", "/box") or self.folders.count(path) > 1:
                raise ValueError(
                    f"folders: {path!r:.80} is not a top-level folder such as '/app', or it is reserved or repeated"
                )
        for path in self.import_paths:
            if not Path(path).is_absolute() or not Path(path).is_dir():
                raise ValueError(f"import_paths: {path!r} is not the absolute path of a folder")

    def guarantees(self) -> Guarantees:
        """Return the guarantees on this machine. The first call runs a program to find out.

        Raises:
            SandboxUnavailable: No program can be run safely.
        """
        return _guarantees(_why_no_namespaces())

    def require(self) -> None:
        """Check that programs can be run on this machine as requested.

        Raises:
            SandboxUnavailable: The machine lacks a requirement and `allow_weaker` is off. The message names it.
        """
        self._weaker()

    def run(
        self, code: str, *, stdin: str = "", files: Mapping[str, bytes] | None = None, collect: bool = False
    ) -> SandboxResult:
        """Run a program.

        Args:
            code: Python source.
            stdin: Standard input.
            files: Initial files of its folder, by relative path.
            collect: Whether to return the files of its folder.

        Raises:
            SandboxUnavailable: The machine lacks a requirement and `allow_weaker` is off. The message names it.
            SandboxError: The sandbox itself failed.
        """
        weaker = self._weaker()
        with _scratch(weaker) as scratch:
            request = self._request(code, stdin, files or {}, collect=collect, scratch=scratch)
            process = subprocess.Popen(_COMMAND, **_PIPES)
            try:
                reply, noise = process.communicate(request, timeout=self.limits.wall_s + _GRACE_S)
            except subprocess.TimeoutExpired as error:
                raise SandboxError(f"no answer of the supervisor {_GRACE_S:g} s after the time limit") from error
            finally:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
        return _result(reply, noise)

    async def arun(
        self, code: str, *, stdin: str = "", files: Mapping[str, bytes] | None = None, collect: bool = False
    ) -> SandboxResult:
        """Like `run`, without blocking the event loop. Cancellation kills the program."""
        weaker = await asyncio.to_thread(self._weaker)
        with _scratch(weaker) as scratch:
            request = self._request(code, stdin, files or {}, collect=collect, scratch=scratch)
            process = await asyncio.create_subprocess_exec(*_COMMAND, **_PIPES)
            try:
                reply, noise = await asyncio.wait_for(process.communicate(request), self.limits.wall_s + _GRACE_S)
            except TimeoutError as error:
                raise SandboxError(f"no answer of the supervisor {_GRACE_S:g} s after the time limit") from error
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        return _result(reply, noise)

    def _weaker(self) -> bool:
        """Whether to run without namespaces."""
        reason = _why_no_namespaces()
        if reason and self.folders:
            raise SandboxUnavailable(f"{reason}. folders={self.folders} need them. Allow user namespaces")
        if reason and not self.allow_weaker:
            raise SandboxUnavailable(
                f"{reason}. Allow user namespaces (for containers: seccomp and AppArmor profiles that permit "
                f"unshare and mount), or accept Sandbox(allow_weaker=True), which means here:\n{_guarantees(reason)}"
            )
        return bool(reason)

    def _request(
        self, code: str, stdin: str, files: Mapping[str, bytes], *, collect: bool, scratch: str | None
    ) -> bytes:
        interpreter = _interpreter(self.python or sys.executable)
        readable = [*interpreter["readable"], *self.import_paths]
        request = {
            **self._limits(),
            "code": code,
            "stdin": stdin,
            "files": {validate_path(name): bytes(data) for name, data in files.items()},
            "collect": collect,
            "python": interpreter["python"],
            "readable": readable,
            "folders": self._free(readable),
            "hidden": interpreter["hidden"],
            "import_paths": list(self.import_paths),
            "namespaces": scratch is None,
            "scratch": scratch,
        }
        return marshal.dumps(request)

    def _free(self, readable: Sequence[str]) -> list[str]:
        """`folders`, checked not to be readable paths themselves. Readable paths may lie in them."""
        for path in (*readable, "/dev", "/program.py"):
            if path in self.folders:
                raise ValueError(f"folders: {path!r} is readable, so it cannot be writable as well. Choose another")
        return list(self.folders)

    def _limits(self) -> dict[str, Any]:
        return {
            "limits": asdict(self.limits),
            "rlimits": {
                "RLIMIT_AS": self.limits.memory_mb << 20,
                "RLIMIT_CPU": self.limits.cpu_s,
                "RLIMIT_NOFILE": self.limits.open_files,
                "RLIMIT_FSIZE": self.limits.file_mb << 20,
                "RLIMIT_CORE": 0,
                "RLIMIT_MSGQUEUE": 0,
                "RLIMIT_MEMLOCK": 0,
                "RLIMIT_SIGPENDING": 256,
            },
        }


FREE_FILE_MB = 1024
"""Maximum size of one file of a command line that is not isolated, so that an endless loop cannot fill the disk."""
_STOP_S = 5.0
"""Maximum seconds for the supervisor to end a stopped command line."""
_STOP_CONTAINER_S = 60.0
"""The same, if a container engine has to do it."""


class CommandLine:
    """A running command line. The command ends with all its children when its first process or this process ends.

    Without a sandbox it has this user's rights and runs in a folder of the host. In a sandbox it can also read the
    system's programs and the interpreter's packages, and connect to one port of its own loopback interface.
    `SandboxLimits.wall_s` does not apply, because the program waits for models. Only the last `output_kb` of each
    output stream are kept.

    Args:
        words: The command line. The first word is looked up on its ``PATH``.
        stdin: Standard input.
        environment: Environment variables; in a sandbox, in addition to the sandbox's.
        folder: Working directory without a sandbox.
        is_temporary: Whether the folder was made for the command. It is then removed if this process dies.
        sandbox: Isolation. None for none.
        port: Port of 127.0.0.1 to which it may connect in a sandbox, or in its own network without one, or 0 for none.
        files: Initial files of its folder in a sandbox, by relative path.
        container: If it is the client of a container engine: the command line that kills the container, and the one
            that removes it. Processes in a container are not children of the client.

    Raises:
        SandboxUnavailable: The command cannot be isolated on this machine.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        stdin: str,
        environment: Mapping[str, str],
        folder: Path,
        is_temporary: bool = False,
        sandbox: Sandbox | None = None,
        port: int = 0,
        files: Mapping[str, bytes] | None = None,
        container: Sequence[Sequence[str]] = (),
    ) -> None:
        request: dict[str, Any] = {"words": list(words), "stdin": stdin, "environment": dict(environment)}
        request |= {"namespaces": sandbox is not None, "scratch": str(folder), "collect": sandbox is not None}
        request |= {"container": [list(ends) for ends in container]}
        request["remove"] = str(folder) if is_temporary and sandbox is None else ""
        request |= (sandbox or Sandbox())._limits()
        self._channel, peer = socket.socketpair()
        with peer:
            if sandbox is None:
                request["rlimits"] = {"RLIMIT_FSIZE": FREE_FILE_MB << 20}
            else:
                if reason := _why_no_namespaces():
                    raise SandboxUnavailable(
                        f"{reason}. To isolate a command line, allow user namespaces, or omit sandbox= and run all "
                        "in a container"
                    )
                packages = ["/usr", "/bin", "/sbin", sys.prefix, sys.base_prefix, *sandbox.import_paths]
                request |= {"code": "", "files": dict(files or {}), "hidden": []}
                request["import_paths"] = list(sandbox.import_paths)
                request["readable"] = _covering([*_interpreter(sys.executable)["readable"], *packages])
                request["folders"] = sandbox._free(request["readable"])
                path = [f"{sys.prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin"]
                request["environment"] = {"PATH": os.pathsep.join(path), **environment}
            if port:
                request |= {"port": port, "channel": peer.fileno()}
            passed = [peer.fileno()] if port else []
            self._process = subprocess.Popen(_COMMAND, **_PIPES, pass_fds=passed)
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._stdin, self._stdout, self._stderr = (cast("IO[bytes]", pipe) for pipe in pipes)
        self._request, self._alone = marshal.dumps(request), bool(port)
        self._stop_s = _STOP_CONTAINER_S if container else _STOP_S

    @property
    def pid(self) -> int:
        """Process id of its supervisor."""
        return self._process.pid

    def begin(self) -> socket.socket | None:
        """Start it. Returns the listening socket of `port`. None without a port, or if it could not be started."""
        with contextlib.suppress(OSError, ValueError), self._channel:  # it was stopped, or `wait` reports the error
            self._stdin.write(self._request)
            self._stdin.flush()
            if self._alone:
                _, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
                return socket.socket(fileno=descriptors[0]) if descriptors else None
        return None

    def wait(self) -> SandboxResult:
        """Wait until it ends.

        Raises:
            SandboxError: The program could not be started, or the supervisor died.
        """
        with self._stdout, self._stderr:
            reply, noise = self._stdout.read(), self._stderr.read()
        self._process.wait()
        return _result(reply, noise)

    def stop(self) -> None:
        """End it with all its children. May be called twice."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(self._stop_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_COMMAND = (sys.executable, "-I", "-S", str(_SUPERVISOR))
_ENVIRONMENT = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
"""Variables that interpreters may need to start."""
_PIPES: dict[str, Any] = {
    "stdin": subprocess.PIPE,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
    "env": _ENVIRONMENT,
    "start_new_session": True,
}


def validate_path(name: str) -> str:
    """Normalize a relative path and check that it cannot leave its folder.

    Raises:
        ValueError: The path is absolute, empty, contains ``..`` or a NUL, or is too long.
    """
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name or len(os.fsencode(name)) > 255:
        raise ValueError(f"path {name[:80]!r} must be relative, without '..', and at most 255 bytes long")
    return str(path)


@contextlib.contextmanager
def _scratch(weaker: bool) -> Iterator[str | None]:
    """Yield a temporary folder on disk for a run without namespaces, None for one with namespaces.

    Raises:
        SandboxError: The system has no more files, processes or memory to start the run.
    """
    folder = None
    try:
        if weaker:
            folder = Path(tempfile.mkdtemp(prefix="forge-sandbox-"))
            folder.chmod(0o711)
        yield None if folder is None else str(folder)
    except OSError as cause:
        raise SandboxError(f"the supervisor could not be started: {cause}") from cause
    finally:
        if folder is not None:
            remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder in which a program has written, even if its subfolders are deeply nested or read-only.

    `shutil.rmtree` is recursive and a program may have nested thousands of folders, so it is tried last.
    """
    at = str(folder)
    # find follows no links
    make_writable = ["find", at, "-type", "d", "!", "-perm", "-700", "-exec", "chmod", "u+rwx", "{}", ";"]
    for words in (["rm", "-rf", "--", at], make_writable, ["rm", "-rf", "--", at]):
        with contextlib.suppress(FileNotFoundError):  # minimal images lack some of these programs
            subprocess.run(words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        if not folder.exists():
            return
    with contextlib.suppress(RecursionError):  # none of these programs exists here
        shutil.rmtree(folder, ignore_errors=True)


def _result(reply: bytes, noise: bytes) -> SandboxResult:
    try:
        answer = marshal.loads(reply)  # noqa: S302  # from our own process
    except (EOFError, ValueError, TypeError) as error:
        raise SandboxError(f"the supervisor died: {noise.decode('utf-8', 'replace')[-500:] or 'no output'}") from error
    if "failure" in answer:
        raise SandboxError(f"the program could not be started: {answer['failure']}")
    for name in ("stdout", "stderr"):
        answer[name] = answer[name].decode("utf-8", "replace")
    return SandboxResult(**answer)


@lru_cache
def _interpreter(python: str) -> dict[str, Any]:
    """Path of an interpreter and the paths it must read: itself, its library, the system's libraries, time zones."""
    script = (
        "import json, os, site, sys, sysconfig; real = os.path.realpath; "
        "python = getattr(sys, '_base_executable', sys.executable); packages = site.getsitepackages([sys.base_prefix])"
        "; print(json.dumps([real(python), real(sys.base_prefix), sys.platlibdir, [real(p) for p in packages], "
        "real(sysconfig.get_path('stdlib'))]))"
    )
    process = subprocess.run([python, "-I", "-c", script], capture_output=True, timeout=30, check=False)
    if process.returncode:
        raise SandboxError(f"python={python!r} does not run: {process.stderr.decode()[-300:]}")
    real, prefix, platlib, packages, stdlib = json.loads(process.stdout)
    system = [f"{prefix}/lib", f"{prefix}/{platlib}", "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    readable = _covering([stdlib, real, *system, *zoneinfo.TZPATH])
    below = tuple(f"{path}/" for path in readable)
    hidden = [path for path in packages if path.startswith(below) and Path(path).is_dir()]
    return {"python": real, "readable": readable, "hidden": hidden}


def _covering(paths: Sequence[str]) -> list[str]:
    """The existing paths that do not lie in another one."""
    roots: list[str] = []
    for path in sorted(set(paths), key=len):
        inside = any(path.startswith(f"{parent}/") for parent in roots if not Path(parent).is_symlink())
        if Path(path).exists() and not inside:
            roots.append(path)
    return roots


@lru_cache
def _why_no_namespaces() -> str:
    """Reason why programs cannot be run in namespaces on this machine. Empty if they can."""
    if sys.platform != "linux":
        raise SandboxUnavailable(f"the sandbox needs Linux. This is {sys.platform}")
    patient = Sandbox(limits=SandboxLimits(wall_s=50))  # the result is cached, so a busy moment must not decide it
    request = patient._request("print('isolated')", "", {}, collect=False, scratch=None)
    process = subprocess.run(_COMMAND, input=request, capture_output=True, env=_ENVIRONMENT, timeout=60, check=False)
    try:
        trial = _result(process.stdout, process.stderr)
    except SandboxError as error:
        return f"user namespaces do not work here ({error})"
    return "" if trial.stdout == "isolated\n" else f"a trial program printed {trial.stdout + trial.stderr!r}"


_LIMITS = (
    "wall-clock time, and the end of every child",
    "processor time and address space per process",
    "open files, file size, output",
    "no privileges, no inherited environment variables",
)


@lru_cache
def _guarantees(reason: str) -> Guarantees:
    """Guarantees on this machine. `reason` says why namespaces are missing. Empty if they are available."""
    filters = platform.machine() in ("x86_64", "aarch64")  # system call numbers are known
    polls = Path(f"/proc/self/task/{os.getpid()}/children").exists()
    from forge_agents.sandbox._isolation import landlock_version

    version, root = landlock_version(), os.geteuid() == 0
    if reason:
        reason += ". Programs run as another user" if root else ""
        promises = {
            "no network": filters,
            "no files but the standard library and the system's libraries, read-only": version > 0,
            "no signals to other processes of the user": version >= 6 or root,
            "number of processes": polls,
            "other processes out of sight": version > 0,
            "total size and number of files": False,
            "memory in buffers of sockets": False,
            "the interpreter's installed packages out of sight": False,
        }
    else:
        reason = "" if filters and polls else "this kernel or processor lacks a part"
        promises = {
            "no files but the standard library and the system's libraries, read-only": True,
            "no network": True,
            "number of processes; other processes out of sight and reach": True,
            "total size and number of files, in memory only": True,
        }
    whole = polls and filters and (version > 0 or not reason)
    promises["memory and processor time of all processes together (measured every 20 ms)"] = whole
    promises["no system calls that ordinary programs do not need"] = filters
    missing = tuple(text for text, is_enforced in promises.items() if not is_enforced)
    enforced = (*_LIMITS, *(text for text, is_enforced in promises.items() if is_enforced))
    return Guarantees(full=not missing, enforced=enforced, missing=missing, reason=reason)
