"""Runs Python code that a model wrote, shut in a process of its own.

In: code, files, standard input. Out: a `SandboxResult`. Waits for the program, at most `SandboxLimits.wall_s`.
"""

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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from forge_agents.errors import ForgeError
from forge_agents.settings import settings_class

_SUPERVISOR = Path(__file__).with_name("_supervisor.py")
_GRACE_S = 10.0
"""The supervisor keeps `wall_s` itself; it is given up this much later."""


class SandboxUnavailable(ForgeError, RuntimeError):  # noqa: N818  # a state of the machine
    """This machine cannot hold model-written code as asked."""


class SandboxError(ForgeError, RuntimeError):
    """The sandbox itself failed; this says nothing about the program."""


@settings_class
@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """What one program may use, its children included."""

    wall_s: float = 10.0
    """Seconds until it is ended, whatever it does."""
    cpu_s: int = 10
    """Processor seconds."""
    memory_mb: int = 512
    """MiB: address space of each process, and memory of all of them together, with shared memory and the buffers of
    sockets."""
    processes: int = 16
    """Processes and threads at one time."""
    open_files: int = 64
    """Open files per process."""
    file_mb: int = 16
    """MiB of one file."""
    disk_mb: int = 32
    """MiB of all files together."""
    files: int = 1000
    """Files and folders."""
    output_kb: int = 64
    """KiB of standard output and standard error together; the program is ended when it writes more."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not value > 0 or value > 1e6:
                raise ValueError(f"{each.name}={value} of SandboxLimits must be above 0 and at most a million")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """What a program did."""

    stdout: str
    """What it printed; bytes that are no UTF-8 are replaced."""
    stderr: str
    exit_code: int
    """0 = ended well; negative = ended by that signal, -9 where a limit ended it."""
    limit: str
    """Name of the `SandboxLimits` field that ended it; empty where none did."""
    wall_s: float
    """Seconds it ran."""
    cpu_s: float
    """Processor seconds, its children included."""
    peak_mb: float
    """Greatest memory of all processes together, in MiB. It is measured every 20 ms, so 0 for short programs."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Files it left behind, by path; only where they were asked for."""

    @property
    def ok(self) -> bool:
        """It ended by itself, with exit code 0."""
        return self.exit_code == 0 and not self.limit

    @property
    def timed_out(self) -> bool:
        """Time ended it."""
        return self.limit in ("wall_s", "cpu_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantees:
    """What a sandbox enforces on this machine, and what it does not."""

    full: bool
    """All that the sandbox can promise is enforced."""
    enforced: tuple[str, ...]
    missing: tuple[str, ...]
    """What is not enforced, in words."""
    reason: str
    """Why not; empty where `full`."""

    def __str__(self) -> str:
        head = f"sandbox, weakened: {self.reason}" if self.reason else "sandbox"
        kept = [f"  enforced: {text}" for text in self.enforced]
        return "\n".join([head, *kept, *(f"  NOT enforced: {text}" for text in self.missing)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Sandbox:
    r"""Runs Python programs that nobody trusts. Linux 5.14 or newer, no privileges, no further software.

    The program sees the standard library, read-only, and a private folder, empty but for `files`, which is its working
    directory and gone afterwards. It has no network, no other process in sight, none of our environment variables, no
    privilege, and the limits' share of the machine. All its processes end when its first one does.

    Example:
        >>> Sandbox().run("print(6 * 7)").stdout
        '42\n'
    """

    limits: SandboxLimits = field(default_factory=SandboxLimits)
    python: str = ""
    """The interpreter; empty = the one that runs us, without its installed packages."""
    import_paths: tuple[str, ...] = ()
    """Folders that the program may read and import from; where root runs it, they must be readable by everybody."""
    allow_weaker: bool = False
    """Whether to run, with what can be enforced, where namespaces are not allowed; see `guarantees`."""
    folders: tuple[str, ...] = ()
    """Folders of the top, such as ``"/app"``, that the program finds there and may write. They belong to its private
    folder: a file of theirs is ``"app/name"`` among those handed in and collected. They need namespaces."""

    def __post_init__(self) -> None:
        for path in self.folders:
            if not re.fullmatch(r"/[\w.-]+", path) or path in ("/.", "/..", "/box") or self.folders.count(path) > 1:
                raise ValueError(f"folders: {path!r:.80} is no folder of the top such as '/app', or is there already")
        for path in self.import_paths:
            if not Path(path).is_absolute() or not Path(path).is_dir():
                raise ValueError(f"import_paths: {path!r} is no absolute path of a folder")

    def guarantees(self) -> Guarantees:
        """What is enforced here. The first call runs a program to find out.

        Raises:
            SandboxUnavailable: Nothing can be run safely.
        """
        return _guarantees(_why_no_namespaces())

    def require(self) -> None:
        """See that programs can be run here as asked, and say what is missing where they cannot.

        Raises:
            SandboxUnavailable: The machine lacks what is needed and `allow_weaker` is off; says what.
        """
        self._weaker()

    def run(
        self, code: str, *, stdin: str = "", files: Mapping[str, bytes] | None = None, collect: bool = False
    ) -> SandboxResult:
        """Run a program.

        Args:
            code: Python source.
            stdin: What it may read.
            files: Put into its folder beforehand, by relative path.
            collect: Whether to return the files of its folder.

        Raises:
            SandboxUnavailable: The machine lacks what is needed and `allow_weaker` is off; says what.
            SandboxError: The sandbox itself failed.
        """
        weaker = self._weaker()
        with _scratch(weaker) as scratch:
            request = self._request(code, stdin, files or {}, collect=collect, scratch=scratch)
            process = subprocess.Popen(_COMMAND, **_PIPES)
            try:
                reply, noise = process.communicate(request, timeout=self.limits.wall_s + _GRACE_S)
            except subprocess.TimeoutExpired as error:
                raise SandboxError(f"the supervisor is silent {_GRACE_S:g} s after the time limit") from error
            finally:
                if process.poll() is None:
                    process.kill()
                    process.communicate()
        return _result(reply, noise)

    async def arun(
        self, code: str, *, stdin: str = "", files: Mapping[str, bytes] | None = None, collect: bool = False
    ) -> SandboxResult:
        """The same as `run`, without blocking the event loop. Cancelling it ends the program."""
        weaker = await asyncio.to_thread(self._weaker)
        with _scratch(weaker) as scratch:
            request = self._request(code, stdin, files or {}, collect=collect, scratch=scratch)
            process = await asyncio.create_subprocess_exec(*_COMMAND, **_PIPES)
            try:
                reply, noise = await asyncio.wait_for(process.communicate(request), self.limits.wall_s + _GRACE_S)
            except TimeoutError as error:
                raise SandboxError(f"the supervisor is silent {_GRACE_S:g} s after the time limit") from error
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
        return _result(reply, noise)

    def _weaker(self) -> bool:
        """Whether namespaces have to be done without."""
        reason = _why_no_namespaces()
        if reason and self.folders:
            raise SandboxUnavailable(f"{reason}. folders={self.folders} need them: allow user namespaces")
        if reason and not self.allow_weaker:
            raise SandboxUnavailable(
                f"{reason}. Allow user namespaces (for containers: seccomp and AppArmor profiles that permit "
                f"unshare and mount), or accept Sandbox(allow_weaker=True), which here means:\n{_guarantees(reason)}"
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
        """`folders`, none of which is itself to be read; what is read may lie in one."""
        for path in (*readable, "/dev", "/program.py"):
            if path in self.folders:
                raise ValueError(f"folders: {path!r} cannot be written, because it is there to be read; name another")
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
"""Of one file of a command line that nobody shut in: a loop that prints fills no disk."""
_STOP_S = 5.0
"""Seconds in which the supervisor ends what was stopped."""
_STOP_CONTAINER_S = 60.0
"""The same where an engine is asked to do it."""


class CommandLine:
    """A command line under way, which ends with all that it started: when its first process does, or we do.

    Free, it has this user's rights, and runs in a folder of the host. Shut in, it has what a `Sandbox` allows, with the
    system's programs and the packages of our interpreter to read, and one port of its own loopback to speak to; its
    files are its own until it ends. `SandboxLimits.wall_s` does not count here: models answer meanwhile. Of what it
    prints the end is kept, `output_kb` of each stream.

    Args:
        words: Its words; the first is found on the ``PATH`` that it sees.
        stdin: What it may read.
        environment: Its variables; shut in, beside those of the sandbox.
        folder: Where it runs free; empty where it is shut in.
        sandbox: None: free.
        port: Of 127.0.0.1, what it may speak to where it is shut in, or free in a network of its own; else 0.
        files: What it finds in its folder where it is shut in, by relative path.
        container: Where it is the client of a container engine, the command line that kills the container and the one
            that removes it: what an engine starts is no child of its client's.

    Raises:
        SandboxUnavailable: It cannot be shut in here.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        stdin: str,
        environment: Mapping[str, str],
        folder: Path,
        sandbox: Sandbox | None = None,
        port: int = 0,
        files: Mapping[str, bytes] | None = None,
        container: Sequence[Sequence[str]] = (),
    ) -> None:
        request: dict[str, Any] = {"words": list(words), "stdin": stdin, "environment": dict(environment)}
        request |= {"namespaces": sandbox is not None, "scratch": str(folder), "collect": sandbox is not None}
        request |= {"container": [list(ends) for ends in container]}
        request |= (sandbox or Sandbox())._limits()
        self._channel, theirs = socket.socketpair()
        with theirs:
            if sandbox is None:
                request["rlimits"] = {"RLIMIT_FSIZE": FREE_FILE_MB << 20}
            else:
                if reason := _why_no_namespaces():
                    raise SandboxUnavailable(
                        f"{reason}. A command line is shut in by user namespaces or not at all: allow them, or leave "
                        "sandbox= away and run everything in a container"
                    )
                packages = ["/usr", "/bin", "/sbin", sys.prefix, sys.base_prefix, *sandbox.import_paths]
                request |= {"code": "", "files": dict(files or {}), "hidden": []}
                request["import_paths"] = list(sandbox.import_paths)
                request["readable"] = _covering([*_interpreter(sys.executable)["readable"], *packages])
                request["folders"] = sandbox._free(request["readable"])
                path = [f"{sys.prefix}/bin", "/usr/local/bin", "/usr/bin", "/bin"]
                request["environment"] = {"PATH": os.pathsep.join(path), **environment}
            if port:
                request |= {"port": port, "channel": theirs.fileno()}
            handed = [theirs.fileno()] if port else []
            self._process = subprocess.Popen(_COMMAND, **_PIPES, pass_fds=handed)
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._stdin, self._stdout, self._stderr = (cast("IO[bytes]", pipe) for pipe in pipes)
        self._request, self._alone = marshal.dumps(request), bool(port)
        self._stop_s = _STOP_CONTAINER_S if container else _STOP_S

    @property
    def pid(self) -> int:
        """Of the process that watches it."""
        return self._process.pid

    def begin(self) -> socket.socket | None:
        """Let it run. Returns the socket on which it asks at `port`; None where it has none, or could not be begun."""
        with contextlib.suppress(OSError, ValueError), self._channel:  # it was stopped, or fails and will say why
            self._stdin.write(self._request)
            self._stdin.flush()
            if self._alone:
                _, descriptors, _, _ = socket.recv_fds(self._channel, 1, 1)
                return socket.socket(fileno=descriptors[0]) if descriptors else None
        return None

    def wait(self) -> SandboxResult:
        """Wait for its end.

        Raises:
            SandboxError: It could not be run, or the supervisor died.
        """
        with self._stdout, self._stderr:
            reply, noise = self._stdout.read(), self._stderr.read()
        self._process.wait()
        return _result(reply, noise)

    def stop(self) -> None:
        """End it with all that it started. Twice is no error."""
        with contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(self._stop_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_COMMAND = (sys.executable, "-I", "-S", str(_SUPERVISOR))
_ENVIRONMENT = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
"""Interpreters may need it to start."""
_PIPES: dict[str, Any] = {
    "stdin": subprocess.PIPE,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
    "env": _ENVIRONMENT,
    "start_new_session": True,
}


def validate_path(name: str) -> str:
    """A relative path that stays where it starts.

    Raises:
        ValueError: absolute, empty, with ``..`` or a NUL in it, or too long.
    """
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name or len(os.fsencode(name)) > 255:
        raise ValueError(f"path {name[:80]!r} must be relative, without '..', and at most 255 bytes long")
    return str(path)


@contextlib.contextmanager
def _scratch(weaker: bool) -> Iterator[str | None]:
    """A folder on disk for a run without namespaces, removed afterwards; None for one with them."""
    if not weaker:
        yield None
        return
    folder = Path(tempfile.mkdtemp(prefix="forge-sandbox-"))
    try:
        folder.chmod(0o711)
        yield str(folder)
    finally:
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove a folder that a program has written in, also where its folders are deep or may not be written.

    `shutil.rmtree` calls itself for each folder in a folder, and a program may have made thousands: it comes last.
    """
    at = str(folder)
    own = ["find", at, "-type", "d", "!", "-perm", "-700", "-exec", "chmod", "u+rwx", "{}", ";"]  # follows no links
    for words in (["rm", "-rf", "--", at], own, ["rm", "-rf", "--", at]):
        with contextlib.suppress(FileNotFoundError):  # small images lack one
            subprocess.run(words, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        if not folder.exists():
            return
    with contextlib.suppress(RecursionError):  # no such commands here
        shutil.rmtree(folder, ignore_errors=True)


def _result(reply: bytes, noise: bytes) -> SandboxResult:
    try:
        answer = marshal.loads(reply)  # noqa: S302  # from our own process
    except (EOFError, ValueError, TypeError) as error:
        raise SandboxError(f"the supervisor died: {noise.decode('utf-8', 'replace')[-500:] or 'no words'}") from error
    if "failure" in answer:
        raise SandboxError(f"the program could not be started: {answer['failure']}")
    for name in ("stdout", "stderr"):
        answer[name] = answer[name].decode("utf-8", "replace")
    return SandboxResult(**answer)


@lru_cache
def _interpreter(python: str) -> dict[str, Any]:
    """Where an interpreter lies and what it has to read: itself, its library, the system's libraries."""
    ask = (
        "import json, os, site, sys, sysconfig; real = os.path.realpath; "
        "python = getattr(sys, '_base_executable', sys.executable); packages = site.getsitepackages([sys.base_prefix])"
        "; print(json.dumps([real(python), real(sys.base_prefix), sys.platlibdir, [real(p) for p in packages], "
        "real(sysconfig.get_path('stdlib'))]))"
    )
    asked = subprocess.run([python, "-I", "-c", ask], capture_output=True, timeout=30, check=False)
    if asked.returncode:
        raise SandboxError(f"python={python!r} does not run: {asked.stderr.decode()[-300:]}")
    real, prefix, platlib, packages, stdlib = json.loads(asked.stdout)
    wanted = [f"{prefix}/lib", f"{prefix}/{platlib}", "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    readable = _covering([stdlib, real, *wanted])
    below = tuple(f"{path}/" for path in readable)
    hidden = [path for path in packages if path.startswith(below) and Path(path).is_dir()]
    return {"python": real, "readable": readable, "hidden": hidden}


def _covering(paths: Sequence[str]) -> list[str]:
    """Those that exist and lie in no other of them."""
    found: list[str] = []
    for path in sorted(set(paths), key=len):
        inside = any(path.startswith(f"{parent}/") for parent in found if not Path(parent).is_symlink())
        if Path(path).exists() and not inside:
            found.append(path)
    return found


@lru_cache
def _why_no_namespaces() -> str:
    """Why programs cannot be run in namespaces here; empty where they can."""
    if sys.platform != "linux":
        raise SandboxUnavailable(f"the sandbox needs Linux; this is {sys.platform}")
    patient = Sandbox(limits=SandboxLimits(wall_s=50))  # the answer is remembered: no busy moment may decide it
    request = patient._request("print('held')", "", {}, collect=False, scratch=None)
    process = subprocess.run(_COMMAND, input=request, capture_output=True, env=_ENVIRONMENT, timeout=60, check=False)
    try:
        held = _result(process.stdout, process.stderr)
    except SandboxError as error:
        return f"user namespaces do not work here ({error})"
    return "" if held.stdout == "held\n" else f"a trial program said {held.stdout + held.stderr!r}"


_LIMITS = (
    "wall-clock time, and the end of every child",
    "processor time and address space per process",
    "open files, file size, output",
    "no privileges, none of our environment variables",
)


@lru_cache
def _guarantees(reason: str) -> Guarantees:
    """What is enforced here; `reason`: why namespaces have to be done without, empty where they are there."""
    filters = platform.machine() in ("x86_64", "aarch64")  # whose numbers of system calls are known
    polls = Path(f"/proc/self/task/{os.getpid()}/children").exists()
    from forge_agents.sandbox._isolation import landlock_version

    version, root = landlock_version(), os.geteuid() == 0
    if reason:
        reason += "; programs run as user 65534" if root else ""
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
    promises["memory and processor time of all processes together (looked at every 20 ms)"] = whole
    promises["no system calls that ordinary programs do not need"] = filters
    missing = tuple(text for text, kept in promises.items() if not kept)
    enforced = (*_LIMITS, *(text for text, kept in promises.items() if kept))
    return Guarantees(full=not missing, enforced=enforced, missing=missing, reason=reason)
