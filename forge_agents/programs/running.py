"""Execution of programs: async functions on a shared event loop, functions in threads, and command lines.

A program posts an `Ended` to its session. This module never waits for programs: the environment does, with a timeout.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
import re
import secrets
import shlex
import ssl
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from forge_agents.credentials import is_secret_variable, redact, redact_command
from forge_agents.envs.env import writable
from forge_agents.imports import is_library
from forge_agents.programs.containers import Image, listen_at, make_world_writable, remove_special_files
from forge_agents.programs.context import client_variables, running_program
from forge_agents.programs.gateway import Session
from forge_agents.runtime.stalls import await_chain, stack
from forge_agents.runtime.threads import LoopThread
from forge_agents.sandbox.sandbox import CommandLine, Sandbox, SandboxError, SandboxResult, remove_folder
from forge_agents.settings import check_call

AnyProgram: TypeAlias = Callable[[Any, Any], Any] | Sequence[str] | str
"""A function ``(task, client)``, async or not, or the words of a command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """End of a program."""

    value: Any = None
    """Return value of the function, or a `Finished` for a command line."""
    error: BaseException | None = None
    """Exception that the function raised."""

    def __str__(self) -> str:
        if self.error is not None:
            return f"it raised {describe_error(self.error)}"
        if isinstance(result := self.value, Finished):
            return f"it exited with {result.exit_status}{_last_output(result.stderr or result.stdout)}"
        return f"it returned {self.value!r:.200}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Result of a command line. Its files exist until the reward is computed."""

    exit_status: int
    """0 for success. Negative: the signal that ended the process. For a container: the exit status of the engine's
    client, 128 plus the signal."""
    stdout: str
    """The last 64 KiB of the output, or what the sandbox's limits allow. Bytes that are not UTF-8 are replaced."""
    stderr: str
    folder: Path
    """Working folder. At the start it contained only `files`. For a sandbox: the files it left. For a container: the
    content of ``/work``."""
    limit: str = ""
    """Name of the `SandboxLimits` field that ended the process. Empty if none did."""


class Running(Protocol):
    """A running program."""

    def stop(self) -> None:
        """Stop the program without waiting for its end. May be called twice."""

    def where(self) -> str:
        """Describe where a late program stands, for an error message. May end the program. Empty if unknown."""


def start_program(
    program: AnyProgram,
    task: Any,
    session: Session,
    isolation: Sandbox | Image | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Running:
    """Start a program that posts its end to the session. `files` are in the working folder of a command line."""
    if not callable(program):
        words = shlex.split(program) if isinstance(program, str) else list(program)
        return _Command(words, task, session, isolation, files or {})
    if inspect.iscoroutinefunction(program) or inspect.iscoroutinefunction(getattr(program, "__call__", None)):  # noqa: B004  # an object with an async __call__
        return _AsyncFunction(program, task, session)
    return _Function(program, task, session)


_QUOTED = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\"""")
_FIND = re.compile(r"\s-(?:exec|ok)(?:dir)?\s[^;&|<>]*\s;(?=\s|$)")
"""A command of `find` that ends with a semicolon."""
_SHELL = re.compile(r"\d*<.*|.*>.*|.*[&;]|\|\|?")


def check_program(program: object, sandbox: Sandbox | None = None, image: Image | None = None) -> None:
    """Check the arguments of a program.

    Raises:
        TypeError: The program is neither a function ``(task, client)`` nor a command line, or excludes an argument.
        ValueError: The command line is empty, or uses features of a shell.
    """
    if image is not None:
        if callable(program):
            raise TypeError("image= runs a command line. A function runs in this process, with all its rights")
        if sandbox is not None:
            raise TypeError("sandbox= and image= exclude each other. container=Container(...) has an image's limits")
    if callable(program):
        if sandbox is not None:
            raise TypeError("sandbox= isolates a command line. A function runs in this process, with all its rights")
        check_call(program, "the program", "task", "client")
        return
    words = shlex.split(program) if isinstance(program, str) else program
    if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
        raise TypeError(f"a program is a function (task, client) or a command line, not {type(program).__name__}")
    if not words and image is None:
        raise ValueError("the program is an empty command line. Give its words, or an image= that has its own")
    unquoted = _FIND.sub("", _QUOTED.sub("", program)).split() if isinstance(program, str) else []
    if operator := next(filter(_SHELL.fullmatch, unquoted), ""):
        command = redact(str(program))[:200]
        raise ValueError(f'no shell reads the program, but {operator} is for one. Give ["sh", "-c", {command!r}]')


def relative_path_hint(program: Sequence[str] | str, files: Mapping[str, bytes]) -> str:
    """Return advice if a command line names a file that is in the current folder, but not in `files`."""
    words = shlex.split(program) if isinstance(program, str) else list(program)
    for before, word in zip(["", *words], words, strict=False):
        path = Path(os.path.expandvars(word)).expanduser()
        if not Path(word).is_absolute() and word not in files and path.is_file():
            return f". It starts in a folder of its own: write {path.absolute()}, or send the file by files="
        module = Path(word.replace(".", "/"))
        if before == "-m" and (module.is_dir() or module.with_suffix(".py").is_file()):
            return (
                f". It starts in a folder of its own: for its module {word} put {Path.cwd()} on PYTHONPATH, or in a "
                "sandbox into import_paths"
            )
    return ""


# ---- functions


class _SharedLoop(LoopThread):
    blocked = False
    """Whether a program blocks the loop. No new program starts in it then."""

    def lines(self) -> list[str]:
        """Return the stack of the loop's thread."""
        return stack(sys._current_frames().get(self._thread.ident or 0))

    def responds(self) -> bool:
        """Check whether the loop runs callbacks within a second. Otherwise it counts as blocked."""
        responded = threading.Event()
        self.call(responded.set)
        if not responded.wait(1.0):
            self.blocked = True
        return not self.blocked


_lock = threading.Lock()
_loops: list[_SharedLoop] = []


@functools.cache
def _http_settings() -> dict[str, Any]:
    """Return settings of HTTP clients for the gateway: no proxies, and no timeout, since the episode's end is one.

    All clients share one TLS context. Creating one is most of a client's cost, and plain HTTP does not use it.
    """
    return {"verify": ssl.create_default_context(), "trust_env": False, "timeout": None}


def _make_client(kind: Any, session: Session, http: Any) -> Any:
    client = kind(base_url=session.url, api_key=session.token, max_retries=0, timeout=None, http_client=http)
    client.organization = client.project = None
    return client


def _shared_loop() -> _SharedLoop:
    """Return the shared loop: a new one after a fork, or if a program blocks the old one."""
    with _lock:
        if not _loops or _loops[-1].blocked or not _loops[-1].alive:
            _loops[:] = [_SharedLoop("programs")]
        return _loops[-1]


class _AsyncFunction:
    def __init__(self, program: Callable[[Any, Any], Any], task: Any, session: Session) -> None:
        self._program, self._loop = program, _shared_loop()
        self._task: asyncio.Task[None] | None = None
        self._future = self._loop.begin(self._run(task, session))

    async def _run(self, task: Any, session: Session) -> None:
        self._task = asyncio.current_task()
        try:
            from openai import AsyncOpenAI, DefaultAsyncHttpxClient

            with running_program(session):  # first: openai fails while another thread imports httpx
                async with DefaultAsyncHttpxClient(**_http_settings()) as http:
                    value = await self._program(task, _make_client(AsyncOpenAI, session, http))
                    session.post(Ended(value=value))
        except asyncio.CancelledError:
            session.post(Ended(error=RuntimeError("the program was cancelled")))
            raise
        except BaseException as error:  # noqa: BLE001  # the boundary: what a program raises is its end
            session.post(Ended(error=error))

    def stop(self) -> None:
        if self._future.done():
            return
        self._future.cancel()
        self._loop.responds()

    def where(self) -> str:
        task = self._task
        if task is None or task.done():
            return ""
        if not self._loop.responds():
            return (
                f"{_user_line(self._loop.lines())}, and blocks the event loop that async programs share. Await what "
                "waits, or make it a plain function, which gets a thread of its own"
            )
        return _user_line(await_chain(task.get_coro()))


class _Function:
    """A function in its own thread. Threads cannot be stopped: this one ends by its next call."""

    def __init__(self, program: Callable[[Any, Any], Any], task: Any, session: Session) -> None:
        self._thread = threading.Thread(target=self._run, args=(program, task, session), name="program", daemon=True)
        self._thread.start()

    def _run(self, program: Callable[[Any, Any], Any], task: Any, session: Session) -> None:
        try:
            from openai import DefaultHttpxClient, OpenAI

            with running_program(session), DefaultHttpxClient(**_http_settings()) as http:
                value = program(task, _make_client(OpenAI, session, http))
                if inspect.iscoroutine(value):
                    value.close()
                    raise TypeError(
                        "the program is a plain function that returned a coroutine. Write it as async def and await "
                        "within, so that it is handed an AsyncOpenAI"
                    )
                session.post(Ended(value=value))
        except BaseException as error:  # noqa: BLE001  # the boundary: what a program raises is its end
            session.post(Ended(error=error))

    def stop(self) -> None:
        pass

    def where(self) -> str:
        return _user_line(stack(sys._current_frames().get(self._thread.ident or 0)))


def _user_line(lines: Sequence[str]) -> str:
    return next((line for line in reversed(lines) if not is_library(line) and "/forge_agents/" not in line), "")


# ---- command lines


class _Command:
    """A process and its children in a new folder. All of them end with this process, however it ends."""

    def __init__(
        self,
        words: Sequence[str],
        task: Any,
        session: Session,
        isolation: Sandbox | Image | None,
        files: Mapping[str, bytes],
    ) -> None:
        image = isolation if isinstance(isolation, Image) else None
        sandbox = isolation if isinstance(isolation, Sandbox) else None
        self._in_container = image is not None
        self._description = redact_command([image.name, *words] if image else words)[:200]
        self._root = Path(tempfile.mkdtemp(prefix="forge-program-"))
        self._folder = self._root / "work" if image else self._root
        # without secrets: a model may run commands there, and their output is stored
        harmless = {name: value for name, value in os.environ.items() if not is_secret_variable(name, value)}
        inherited = {} if sandbox else harmless
        address: tuple[str, int] | None = None
        try:
            if image is not None and (host_address := image.host_address()):
                listener = listen_at(host_address)
                address = listener.getsockname()
                session.listen(listener)
            variables = client_variables(session, inherited.get("NO_PROXY") or inherited.get("no_proxy") or "", address)
            stop_commands: list[list[str]] = []
            if image is not None:
                name = f"forge-program-{secrets.token_hex(8)}"
                words = image.run(words, name, self._folder, variables, session.port)
                stop_commands = image.stop_commands(name)
                self._folder.mkdir()
            if sandbox is None:
                _write_files(self._folder, files)
            if image is not None:
                make_world_writable(self._folder)
            self._command = CommandLine(
                words,
                files=files,
                stdin=writable(task) if isinstance(task, str) else json.dumps(task),
                environment=inherited | variables,
                folder=self._root,  # engines write files of their own where their clients start
                is_temporary=True,
                sandbox=sandbox,
                port=session.port if sandbox or (image and image.container.network == "models") else 0,
                container=stop_commands,
            )
        except BaseException:
            remove_folder(self._root)
            raise
        self._result: SandboxResult | None = None
        self._thread = threading.Thread(target=self._run, args=(session,), name="program", daemon=True)
        self._thread.start()

    def _run(self, session: Session) -> None:
        try:
            if (listener := self._command.begin()) is not None:
                session.listen(listener)
            self._result = result = self._command.wait()
            if self._in_container:
                remove_special_files(self._folder)
            _write_files(self._folder, result.files)  # those of a sandbox, which contain no links
        except Exception as error:  # noqa: BLE001  # the boundary: the episode ends with it
            session.post(Ended(error=SandboxError(f"{self._description}: {error}")))
            return
        output = {"stdout": result.stdout, "stderr": result.stderr, "limit": result.limit}
        session.post(Ended(value=Finished(exit_status=result.exit_code, folder=self._folder, **output)))

    def stop(self) -> None:
        self._command.stop()
        self._thread.join(5)  # it may be writing files
        remove_folder(self._root)
        if self._in_container and self._root.exists():
            warnings.warn(
                f"{self._root} cannot be removed: it contains files of another user, as whom the container ran. "
                f'Container(arguments=("--user={os.getuid()}:{os.getgid()}",)) runs it as you',
                RuntimeWarning,
                stacklevel=2,
            )

    def where(self) -> str:
        self._command.stop()  # the output is known only at the end
        self._thread.join(5)
        output = (self._result.stderr or self._result.stdout) if self._result else ""
        return f"process {self._command.pid}, {self._description}{_last_output(output)}"


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _last_output(output: str) -> str:
    return f", and it printed last {output.strip()[-300:]!r}" if output.strip() else ""


# ---- results


def result_as_json(value: Any) -> Any:
    """Return the result of a program for infos."""
    if isinstance(value, Finished):
        output = {"stdout": value.stdout[-2000:], "stderr": value.stderr[-2000:]}
        return {"exit_status": value.exit_status, **output, **({"limit": value.limit} if value.limit else {})}
    return value


def describe_error(error: BaseException) -> str:
    """Return an exception on one line; of a group, its first exception."""
    if isinstance(error, BaseExceptionGroup):
        more = f", and {len(error.exceptions) - 1} more" * (len(error.exceptions) > 1)
        return f"{describe_error(error.exceptions[0])}{more}"
    summary = traceback.TracebackException.from_exception(error)
    place = _user_line([f"{frame.filename}:{frame.lineno}" for frame in summary.stack])
    text = " ".join(str(summary).split())
    return f"{type(error).__name__}: {text[:400]}" + (f" ({place})" if place else "")


def reward_of(
    value: Any, agents: Sequence[str], sessions: Mapping[str, Mapping[str, int]]
) -> float | Mapping[str, Any] | None:
    """Return the reward that a value stands for: a number, numbers by agent, or a command's success. Otherwise None.

    An agent with named `sessions` may have numbers by session.
    """
    if isinstance(value, Finished):
        return float(value.exit_status == 0)
    if isinstance(value, Mapping):  # texts by agent are for verifiers
        rewards = {agent: value.get(agent) for agent in agents}
        numbers = {agent: number for agent, reward in rewards.items() if (number := as_number(reward)) is not None}
        by_session = {
            agent: reward
            for agent, reward in rewards.items()
            if isinstance(reward, Mapping)
            and any(sessions.get(agent, ()))
            and None not in map(as_number, reward.values())
        }
        return {**value, **numbers, **by_session} if numbers or by_session else None
    return as_number(value)


def as_number(value: Any) -> float | None:
    """Return the number that a value is, with NumPy's and torch's scalars. Otherwise None."""
    if getattr(value, "ndim", None) == 0:  # a scalar of NumPy or torch
        value = value.item()
    return float(value) if isinstance(value, (Real, Decimal)) else None
