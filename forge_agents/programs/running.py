"""Programs as they run: an async function on a loop that programs share, a function in a thread, or a command line.

In: a program, a task, its session at the gateway. Out: an `Ended` to that session. Waits for nothing: the environment
waits, with a deadline, and stops what is late.
"""

from __future__ import annotations

import asyncio
import contextlib
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
from forge_agents.programs.containers import Image, free_for_all, listen_at, without_links
from forge_agents.programs.context import client_variables, running_program
from forge_agents.programs.gateway import Session
from forge_agents.runtime.stalls import await_chain, stack
from forge_agents.runtime.threads import LoopThread
from forge_agents.sandbox.sandbox import CommandLine, Sandbox, SandboxError, SandboxResult, remove_folder

AnyProgram: TypeAlias = Callable[[Any, Any], Any] | Sequence[str] | str
"""A function ``(task, client)``, async or not, or the words of a command line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a program ended."""

    value: Any = None
    """What the function returned; of a command a `Finished`."""
    error: BaseException | None = None
    """What the function raised."""

    def __str__(self) -> str:
        if self.error is not None:
            return f"it raised {told(self.error)}"
        if isinstance(end := self.value, Finished):
            return f"it exited with {end.exit_status}{_last(end.stderr or end.stdout)}"
        return f"it returned {self.value!r:.200}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What a command line left behind; its files are there until the reward is known."""

    exit_status: int
    """0 is success; negative, the signal that ended it; of a container, what its engine's client exits with, which is
    128 and the signal."""
    stdout: str
    """The last 64 KiB that it printed, or what its sandbox allows; bytes that are no UTF-8 are replaced."""
    stderr: str
    folder: Path
    """Where it ran, empty but for `files` at its start; of one that was shut in, the files that it left; of a container
    what it left in ``/work``."""
    limit: str = ""
    """Name of the `SandboxLimits` field that ended it; empty where none did."""


class Running(Protocol):
    """A program under way."""

    def stop(self) -> None:
        """End it, and do not wait for that. Twice is no error."""

    def where(self) -> str:
        """Where it stands, for the message that it is late, which ends it; empty where that cannot be told."""


def started(
    program: AnyProgram,
    task: Any,
    session: Session,
    shut_in: Sandbox | Image | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Running:
    """Start a program; it tells the session its end. A command line is `shut_in` so, and finds `files`."""
    if not callable(program):
        words = shlex.split(program) if isinstance(program, str) else list(program)
        return _Command(words, task, session, shut_in, files or {})
    if inspect.iscoroutinefunction(program) or inspect.iscoroutinefunction(getattr(program, "__call__", None)):  # noqa: B004  # an object with an async __call__
        return _Task(program, task, session)
    return _Thread(program, task, session)


_QUOTED = re.compile(r"""\\.|'[^']*'|"(?:\\.|[^"\\])*\"""")
_FIND = re.compile(r"\s-(?:exec|ok)(?:dir)?\s[^;&|<>]*\s;(?=\s|$)")
"""What the command `find` runs, which ends in a semicolon of its own."""
_SHELL = re.compile(r"\d*<.*|.*>.*|.*[&;]|\|\|?")


def check(program: object, sandbox: Sandbox | None = None, image: Image | None = None) -> None:
    """Raise TypeError unless it is a function (task, client) or a command line, ValueError for none, or a shell's."""
    if image is not None:
        if callable(program):
            raise TypeError("image= runs a command line; a function runs in this process, with all its rights")
        if sandbox is not None:
            raise TypeError("sandbox= and image= exclude each other; container=Container(...) has an image's limits")
    if callable(program):
        if sandbox is not None:
            raise TypeError("sandbox= shuts a command line in; a function runs in this process, with all its rights")
        takes(program, "the program", "task", "client")
        return
    words = shlex.split(program) if isinstance(program, str) else program
    if not isinstance(words, Sequence) or not all(isinstance(word, str) for word in words):
        raise TypeError(f"a program is a function (task, client) or a command line, not {type(program).__name__}")
    if not words and image is None:
        raise ValueError("the program is an empty command line; give its words, or an image= that has its own")
    bare = _FIND.sub("", _QUOTED.sub("", program)).split() if isinstance(program, str) else []
    if shell := next(filter(_SHELL.fullmatch, bare), ""):
        shown = redact(str(program))[:200]
        raise ValueError(f'no shell reads the program, but {shell} is for one; give ["sh", "-c", {shown!r}]')


def takes(function: Callable[..., Any], what: str, *given: str) -> None:
    """Raise TypeError unless a function can be called with as many arguments as are `given`."""
    with contextlib.suppress(ValueError):  # built-ins have no signature
        try:
            inspect.signature(function).bind(*given)
        except TypeError as cause:
            name = getattr(function, "__name__", type(function).__name__)
            raise TypeError(f"{what} {name} must take ({', '.join(given)}): {cause}") from None


def misplaced(program: Sequence[str] | str, files: Mapping[str, bytes]) -> str:
    """What to do about the words of a command line that name files of the folder that we run in; empty if none does.

    Args:
        files: What is in the folder where the command line starts.
    """
    words = shlex.split(program) if isinstance(program, str) else list(program)
    for before, word in zip(["", *words], words, strict=False):
        here = Path(os.path.expandvars(word)).expanduser()
        if not Path(word).is_absolute() and word not in files and here.is_file():
            return f"; it starts in a folder of its own: write {here.absolute()}, or send the file by files="
        module = Path(word.replace(".", "/"))
        if before == "-m" and (module.is_dir() or module.with_suffix(".py").is_file()):
            return (
                f"; it starts in a folder of its own: for its module {word} put {Path.cwd()} on PYTHONPATH, or in a "
                "sandbox into import_paths"
            )
    return ""


# ---- functions


class _Loop(LoopThread):
    held = False
    """Whether a program in it does not give the loop back: nothing new starts in it."""

    def lines(self) -> list[str]:
        """Where it stands."""
        return stack(sys._current_frames().get(self._thread.ident or 0))


_lock = threading.Lock()
_loops: list[_Loop] = []


@functools.cache
def _loopback() -> dict[str, Any]:
    """Of a client that speaks to this process, without proxies; the end of the episode ends what it waits for.

    All share one context of TLS, of which plain HTTP makes no use: one of its own is most of what a client costs.
    """
    return {"verify": ssl.create_default_context(), "trust_env": False, "timeout": None}


def _loop() -> _Loop:
    """The shared loop; a new one where none runs, as after a fork, or where a program holds the old one."""
    with _lock:
        if not _loops or _loops[-1].held or not _loops[-1].alive:
            _loops[:] = [_Loop("programs")]
        return _loops[-1]


class _Task:
    """An async function, as a task of the shared loop."""

    def __init__(self, program: Callable[[Any, Any], Any], task: Any, session: Session) -> None:
        self._program, self._loop = program, _loop()
        self._task: asyncio.Task[None] | None = None
        self._work = self._loop.begin(self._run(task, session))

    async def _run(self, task: Any, session: Session) -> None:
        self._task = asyncio.current_task()
        try:
            from openai import AsyncOpenAI, DefaultAsyncHttpxClient

            key = session.token
            async with DefaultAsyncHttpxClient(**_loopback()) as http:
                client = AsyncOpenAI(base_url=session.url, api_key=key, max_retries=0, timeout=None, http_client=http)
                client.organization = client.project = None
                with running_program(session):
                    value = await self._program(task, client)
                session.tell(Ended(value=value))
        except asyncio.CancelledError:
            session.tell(Ended(error=RuntimeError("the program was cancelled")))
            raise
        except BaseException as error:  # noqa: BLE001  # the boundary: what a program raises is its end
            session.tell(Ended(error=error))

    def stop(self) -> None:
        if self._work.done():
            return
        self._work.cancel()
        given_back = threading.Event()
        self._loop.call(given_back.set)
        if not given_back.wait(1.0):
            self._loop.held = True

    def where(self) -> str:
        task = self._task
        if task is None or task.done():
            return ""
        answered = threading.Event()
        self._loop.call(answered.set)
        if not answered.wait(1.0):
            self._loop.held = True
            return (
                f"{_own(self._loop.lines())}, and holds the event loop that "
                "async programs share; await what waits, or make it a plain function, which gets a thread of its own"
            )
        return _own(await_chain(task.get_coro()))


class _Thread:
    """A function, in a thread of its own. It cannot be killed: it is left behind, and its next call is refused."""

    def __init__(self, program: Callable[[Any, Any], Any], task: Any, session: Session) -> None:
        self._thread = threading.Thread(target=self._run, args=(program, task, session), name="program", daemon=True)
        self._thread.start()

    def _run(self, program: Callable[[Any, Any], Any], task: Any, session: Session) -> None:
        try:
            from openai import DefaultHttpxClient, OpenAI

            with DefaultHttpxClient(**_loopback()) as http:
                key = session.token
                client = OpenAI(base_url=session.url, api_key=key, max_retries=0, timeout=None, http_client=http)
                client.organization = client.project = None
                with running_program(session):
                    value = program(task, client)
                if inspect.iscoroutine(value):
                    value.close()
                    raise TypeError(
                        "the program is a plain function that returned a coroutine; write it as async def and await "
                        "within, so that it is handed an AsyncOpenAI"
                    )
                session.tell(Ended(value=value))
        except BaseException as error:  # noqa: BLE001  # the boundary: what a program raises is its end
            session.tell(Ended(error=error))

    def stop(self) -> None:
        pass

    def where(self) -> str:
        return _own(stack(sys._current_frames().get(self._thread.ident or 0)))


def _own(lines: Sequence[str]) -> str:
    """The innermost line of the program itself, not of a library."""
    return next((line for line in reversed(lines) if not is_library(line) and "/forge_agents/" not in line), "")


# ---- command lines


class _Command:
    """A process and what it starts, in a folder of its own; all of it ends with this process, however that ends."""

    def __init__(
        self,
        words: Sequence[str],
        task: Any,
        session: Session,
        shut_in: Sandbox | Image | None,
        files: Mapping[str, bytes],
    ) -> None:
        image = shut_in if isinstance(shut_in, Image) else None
        sandbox = shut_in if isinstance(shut_in, Sandbox) else None
        self._contained = image is not None
        self._shown = redact_command([image.name, *words] if image else words)[:200]
        self._made = Path(tempfile.mkdtemp(prefix="forge-program-"))
        self._folder = self._made / "work" if image else self._made
        # a model may run commands there, and what they print is kept
        harmless = {name: value for name, value in os.environ.items() if not is_secret_variable(name, value)}
        inherited = {} if sandbox else harmless
        address: tuple[str, int] | None = None
        try:
            if image is not None and (host_address := image.host_address()):
                asking = listen_at(host_address)
                address = asking.getsockname()
                session.listen(asking)
            told = client_variables(session, inherited.get("NO_PROXY") or inherited.get("no_proxy") or "", address)
            ends: list[list[str]] = []
            if image is not None:
                called = f"forge-program-{secrets.token_hex(8)}"
                words = image.run(words, called, self._folder, told, session.port)
                ends = image.ends(called)
                self._folder.mkdir()
            if sandbox is None:
                _write(self._folder, files)
            if image is not None:
                free_for_all(self._folder)
            self._command = CommandLine(
                words,
                files=files,
                stdin=writable(task) if isinstance(task, str) else json.dumps(task),
                environment=inherited | told,
                folder=self._made,  # engines write their own files where their clients are started
                sandbox=sandbox,
                port=session.port if sandbox or (image and image.container.network == "models") else 0,
                container=ends,
            )
        except BaseException:
            remove_folder(self._made)
            raise
        self._done: SandboxResult | None = None
        self._thread = threading.Thread(target=self._run, args=(session,), name="program", daemon=True)
        self._thread.start()

    def _run(self, session: Session) -> None:
        try:
            if (asking := self._command.begin()) is not None:
                session.listen(asking)
            self._done = done = self._command.wait()
            if self._contained:
                without_links(self._folder)
            _write(self._folder, done.files)  # of one that is shut in: what it left, no links
        except Exception as error:  # noqa: BLE001  # the boundary: the episode ends with it
            session.tell(Ended(error=SandboxError(f"{self._shown}: {error}")))
            return
        printed = {"stdout": done.stdout, "stderr": done.stderr, "limit": done.limit}
        session.tell(Ended(value=Finished(exit_status=done.exit_code, folder=self._folder, **printed)))

    def stop(self) -> None:
        self._command.stop()
        self._thread.join(5)  # it may be writing what the command left
        remove_folder(self._made)
        if self._contained and self._made.exists():
            warnings.warn(
                f"{self._made} cannot be removed: it holds files of a user that the container ran as; "
                f'Container(arguments=("--user={os.getuid()}:{os.getgid()}",)) runs it as you',
                RuntimeWarning,
                stacklevel=2,
            )

    def where(self) -> str:
        self._command.stop()  # what it printed is known at its end
        self._thread.join(5)
        said = (self._done.stderr or self._done.stdout) if self._done else ""
        return f"process {self._command.pid}, {self._shown}{_last(said)}"


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def _last(printed: str) -> str:
    """The end of what a command printed, at the end of a message."""
    return f", and it printed last {printed.strip()[-300:]!r}" if printed.strip() else ""


def result_as_json(value: Any) -> Any:
    """What a program came to, for infos."""
    if isinstance(value, Finished):
        printed = {"stdout": value.stdout[-2000:], "stderr": value.stderr[-2000:]}
        return {"exit_status": value.exit_status, **printed, **({"limit": value.limit} if value.limit else {})}
    return value


def with_causes(error: BaseException | None) -> str:
    """The text of an exception, of those in a group, and of those that they were raised from."""
    texts, seen, waiting = [], set(), [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        texts.append(str(traceback.TracebackException.from_exception(one)))  # also where `str` of it raises
        waiting += [one.__cause__, *(one.exceptions if isinstance(one, BaseExceptionGroup) else ())]
    return "\n".join(texts)


def told(error: BaseException) -> str:
    """An exception on one line; of a group, as tasks that failed together are, the first."""
    if isinstance(error, BaseExceptionGroup):
        several = f", and {len(error.exceptions) - 1} more" * (len(error.exceptions) > 1)
        return f"{told(error.exceptions[0])}{several}"
    last = traceback.TracebackException.from_exception(error)
    place = _own([f"{at.filename}:{at.lineno}" for at in last.stack])
    text = " ".join(str(last).split())
    return f"{type(error).__name__}: {text[:400]}" + (f" ({place})" if place else "")


def reward_of(value: Any, seats: Sequence[str]) -> float | Mapping[str, float] | None:
    """The reward that a value says by itself: any library's number, numbers by seat, a command's success; or None."""
    if isinstance(value, Finished):
        return float(value.exit_status == 0)
    if isinstance(value, Mapping):  # texts by seat are for verifiers to judge
        numbers = {seat: own for seat in seats if (own := _number(value.get(seat))) is not None}
        return {**value, **numbers} if numbers else None
    return _number(value)


def _number(value: Any) -> float | None:
    if getattr(value, "ndim", None) == 0:  # of NumPy or torch
        value = value.item()
    return float(value) if isinstance(value, (Real, Decimal)) else None
