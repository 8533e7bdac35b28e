"""Makes clients that a program makes itself ask the gateway, or refuses their requests before they leave.

Functions run in this process, many at a time, each with a key of its own. While a function runs as a program, the
environment variables that clients read name the gateway and the key of its episode, also for processes that it starts.
Requests to models of OpenAI or Anthropic, as from clients that were made earlier, are refused, and so are requests to
the servers that the user has chosen for their clients by ``OPENAI_BASE_URL`` or ``ANTHROPIC_BASE_URL``.
"""

from __future__ import annotations

import _posixsubprocess
import contextlib
import contextvars
import functools
import importlib
import json
import os
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.thread import _worker
from dataclasses import dataclass
from http.client import HTTPConnection
from multiprocessing.process import BaseProcess
from typing import Any
from urllib.parse import urlsplit

from forge_agents.programs.calls import RefusedError
from forge_agents.programs.gateway import Session, error_body
from forge_agents.programs.protocols import PROTOCOLS

_LIBRARIES = ("httpx", "httpx2")
"""HTTP libraries of the clients of OpenAI and Anthropic, by version."""
_HOSTS = re.compile(r"(?:[\w-]+\.)*api\.(?:openai|anthropic)\.com\.?|[\w.-]+\.openai\.azure\.com")
"""Servers that the clients ask by default, also those of regions and of Azure."""
_PATHS = (*PROTOCOLS, "/v1/completions")
"""Beginnings of the paths at which models answer. Other paths, as for embeddings, are no business of the gateway."""
_ENV, _FORK_ENV = 10, 5
"""Places of ``env`` among the arguments of `subprocess.Popen` and of ``_posixsubprocess.fork_exec``."""
_AZURE = re.compile(r"^/openai(?:/deployments/[^/]+)?(?:/v1)?(?=/)")
"""Beginnings of Azure's paths, which stand for OpenAI's ``/v1``."""
_BASES = (b"OPENAI_BASE_URL", b"OPENAI_API_BASE", b"ANTHROPIC_BASE_URL")
"""Variables by which the user has chosen other servers for these clients."""
_HIDDEN = (
    "ANTHROPIC_AUTH_TOKEN", "AZURE_OPENAI_AD_TOKEN", "AZURE_OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID",
    "OPENAI_PROJECT_ID",
)  # fmt: skip
"""Variables of the user's accounts, which a program does not see."""


@dataclass(frozen=True, slots=True)
class _Program:
    session: Session
    variables: dict[str, str | None]
    """Values that the program sees in place of the process's; None hides a variable."""


_running: contextvars.ContextVar[_Program | None] = contextvars.ContextVar("forge_agents_program", default=None)
_lock = threading.Lock()
_installed: list[bool] = []


def client_variables(session: Session, no_proxy: str = "", address: tuple[str, int] | None = None) -> dict[str, str]:
    """Environment variables by which clients find the gateway and the key of an episode.

    Args:
        no_proxy: The value of ``NO_PROXY`` so far.
        address: IP address and port where the gateway answers this program; None: those of `session`.
    """
    base = f"http://{address[0]}:{address[1]}" if address else session.url.removesuffix("/v1")
    direct = ",".join(filter(None, [no_proxy, address[0] if address else "127.0.0.1"]))
    return {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_BASE": f"{base}/v1",  # LangChain's and LiteLLM's name
        "OPENAI_API_KEY": session.token,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": session.token,
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


@contextlib.contextmanager
def running_program(session: Session) -> Iterator[None]:
    """Let clients that are made within ask the gateway for `session`, also in tasks and threads that start within."""
    _install()
    no_proxy = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    program = _Program(session, {**dict.fromkeys(_HIDDEN), **client_variables(session, no_proxy)})
    before = _running.set(program)
    try:
        yield
    finally:
        _running.reset(before)


def _install() -> None:
    """Once in a process: nothing changes outside of a program."""
    with _lock:
        if _installed:
            return
        _installed.append(True)
        for name in _LIBRARIES:
            with contextlib.suppress(ImportError):
                library = importlib.import_module(name)
                library.Client.send = _sent(library.Client.send, library.Response)
                library.AsyncClient.send = _sent_async(library.AsyncClient.send, library.Response)
        os.system = _system(os.system)
        _posixsubprocess.fork_exec = _spawned(_posixsubprocess.fork_exec)
        BaseProcess.start = _in_environment(BaseProcess.start)  # type: ignore[method-assign]
        HTTPConnection.putrequest = _requested(HTTPConnection.putrequest)  # type: ignore[method-assign]
        subprocess.Popen.__init__ = _with_variables(subprocess.Popen.__init__)  # type: ignore[method-assign]
        threading.Thread.start = _in_context(threading.Thread.start)  # type: ignore[method-assign]
        ThreadPoolExecutor.submit = _submitted(ThreadPoolExecutor.submit)  # type: ignore[method-assign]
        if type(os.environ) is os._Environ:
            os.environ.__class__ = _Variables


# ---- the environment


class _Variables(os._Environ):  # type: ignore[type-arg]
    """The environment of the process, with the values of the program that reads or writes it."""

    def __getitem__(self, name: str) -> str:
        program = _running.get()
        if program is None or name not in program.variables:
            return str(super().__getitem__(name))
        value = program.variables[name]
        if value is None:
            raise KeyError(name)
        return value

    def __setitem__(self, name: str, value: str) -> None:
        program = _running.get()
        if program is None or name not in program.variables:
            super().__setitem__(name, value)
        else:
            program.variables[name] = value

    def __delitem__(self, name: str) -> None:
        program = _running.get()
        if program is None or name not in program.variables:
            super().__delitem__(name)
        else:
            program.variables[name] = None

    def __iter__(self) -> Iterator[str]:
        program = _running.get()
        if program is None:
            return super().__iter__()
        names = [name for name in super().__iter__() if name not in program.variables]
        return iter([*names, *(name for name, value in program.variables.items() if value is not None)])


# ---- processes and threads


def _with_variables(start: Any) -> Any:
    """`subprocess.Popen`, whose processes inherit the variables that the program sees."""

    @functools.wraps(start)
    def started(process: Any, *given: Any, **options: Any) -> None:
        if _running.get() is not None and len(given) <= _ENV and options.get("env") is None:
            options["env"] = dict(os.environ)
        start(process, *given, **options)

    return started


def _system(run: Any) -> Any:
    """`os.system`, as a process of `subprocess`. Returns the status as `os.waitstatus_to_exitcode` reads it."""

    @functools.wraps(run)
    def ran(command: Any) -> int:
        if _running.get() is None:
            return int(run(command))
        code = subprocess.call(command, shell=True)  # noqa: S602  # as the program asks
        return -code if code < 0 else code << 8

    ran.__module__ = "os"  # so that pickle finds it under its name; posix.system is the original
    return ran


def _spawned(fork_exec: Any) -> Any:
    """``fork_exec``, by which `multiprocessing` starts new interpreters, with the variables that the program sees."""

    @functools.wraps(fork_exec)
    def spawned(*given: Any) -> Any:
        if _running.get() is not None and given[_FORK_ENV] is None:
            variables = [os.fsencode(f"{name}={value}") for name, value in os.environ.items()]
            given = (*given[:_FORK_ENV], variables, *given[_FORK_ENV + 1 :])
        return fork_exec(*given)

    return spawned


def _in_environment(start: Any) -> Any:
    """`multiprocessing.Process.start`: a fork server, which starts processes for all programs, has other variables."""

    @functools.wraps(start)
    def started(process: Any) -> None:
        program, target = _running.get(), getattr(process, "_target", None)
        if program is not None and target is not None:
            process._target = functools.partial(_run_with, dict(program.variables), target)
        start(process)

    return started


def _run_with(variables: Mapping[str, str | None], target: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """Run `target` in a new process with these environment variables; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return target(*given, **options)


def _in_context(start: Any) -> Any:
    """`threading.Thread.start`, which hands the context on, as Python does by itself only without the GIL."""

    @functools.wraps(start)
    def started(thread: Any) -> None:
        # the threads of a pool outlive the program: each of their tasks has a context of its own
        if _running.get() is not None and getattr(thread, "_target", None) is not _worker:
            thread.run = functools.partial(contextvars.copy_context().run, thread.run)
        start(thread)

    return started


def _submitted(submit: Any) -> Any:
    """`ThreadPoolExecutor.submit`, which hands the context on with each task."""

    @functools.wraps(submit)
    def submitted(pool: Any, task: Any, /, *given: Any, **options: Any) -> Any:
        if _running.get() is not None:
            task = functools.partial(contextvars.copy_context().run, task)
        return submit(pool, task, *given, **options)

    return submitted


# ---- requests


def _sent(send: Any, response: Any) -> Any:
    @functools.wraps(send)
    def checked(client: Any, request: Any, **options: Any) -> Any:
        refused = _refusal(request, response)
        return send(client, request, **options) if refused is None else refused

    return checked


def _sent_async(send: Any, response: Any) -> Any:
    @functools.wraps(send)
    async def checked(client: Any, request: Any, **options: Any) -> Any:
        refused = _refusal(request, response)
        return await send(client, request, **options) if refused is None else refused

    return checked


def _refusal(request: Any, response: Any) -> Any:
    """The answer to a request that must not leave, or None. A request to the gateway gets the key of its program.

    A client that is kept from one episode to the next would ask with the key of the first.
    """
    program = _running.get()
    if program is None:
        return None
    gateway = urlsplit(program.session.url)
    if (request.url.host, request.url.port) == (gateway.hostname, gateway.port):
        for name, value in (("authorization", f"Bearer {program.session.token}"), ("x-api-key", program.session.token)):
            if name in request.headers:
                request.headers[name] = value
        return None
    refused = _refused(program, request.url.host, _port(request.url), request.url.path)
    if refused is None:
        return None
    body = json.dumps(error_body(refused)).encode()
    return response(403, content=body, headers={"content-type": "application/json"}, request=request)


def _requested(put: Any) -> Any:
    """`http.client.HTTPConnection.putrequest`, by which requests, urllib3 and urllib begin to send a request."""

    @functools.wraps(put)
    def checked(connection: Any, method: str, url: str, *given: Any, **options: Any) -> Any:
        program = _running.get()
        if program is not None:
            host, port = connection.host, connection.port
            if getattr(connection, "_tunnel_host", None):  # through a proxy
                host, port = connection._tunnel_host, connection._tunnel_port
            if (refused := _refused(program, host, port, urlsplit(url).path)) is not None:
                raise PermissionError(str(refused))
        return put(connection, method, url, *given, **options)

    return checked


def _port(url: Any) -> int:
    return int(url.port or (443 if url.scheme == "https" else 80))


def _is_at(address: str, host: str, port: int) -> bool:
    """Whether an address, which may be malformed, is on this host and port."""
    with contextlib.suppress(ValueError):
        url = urlsplit(address)
        return (url.hostname, _port(url)) == (host, port)
    return False


def _refused(program: _Program, host: str, port: int, path: str) -> RefusedError | None:
    """Why a request of a program is not sent, which its session remembers; None for a request that may leave."""
    path = _AZURE.sub("/v1", path)
    bases = [os.fsdecode(os.environb.get(name, b"")) for name in _BASES]  # of the process, not of the program
    is_known = _HOSTS.fullmatch(host) or any(_is_at(base, host, port) for base in bases)
    if not is_known or not path.startswith(_PATHS):
        return None
    refused = RefusedError(
        f"a request to {host} was not sent: its client was made before the program ran, or with base_url. Ask models "
        "through the client that the program is given, or make one within the program and without base_url",
        status=403,
        code="not_the_gateway",
    )
    program.session._refused(str(refused))
    return refused
