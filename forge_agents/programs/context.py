"""Redirects API clients that a program creates itself to the gateway, or rejects their requests.

Functions run in this process, many at a time, each with its own API key. While a function runs as a program, the
environment variables that clients read contain the gateway's URL and the episode's key, also for processes that the
function starts. Requests to OpenAI's or Anthropic's servers, e.g. by clients created earlier, are rejected, and so are
requests to the servers that the user has set by ``OPENAI_BASE_URL`` or ``ANTHROPIC_BASE_URL``.
"""

from __future__ import annotations

import _posixsubprocess
import asyncio
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
from forge_agents.programs.gateway import Session
from forge_agents.programs.http import error_body
from forge_agents.programs.protocols import PROTOCOLS

_LIBRARIES = ("httpx", "httpx2")
"""HTTP libraries of OpenAI's and Anthropic's clients."""
_API_HOSTS = re.compile(r"(?:[\w-]+\.)*api\.(?:openai|anthropic)\.com\.?|[\w.-]+\.openai\.azure\.com")
"""Default servers of the clients, including regional ones and Azure."""
_MODEL_PATHS = (*PROTOCOLS, "/v1/completions")
"""Prefixes of paths at which models answer. Other paths, e.g. for embeddings, are not affected."""
_POPEN_ENV, _FORK_EXEC_ENV = 10, 5
"""Positions of ``env`` in the arguments of `subprocess.Popen` and of ``_posixsubprocess.fork_exec``."""
_AZURE_PREFIX = re.compile(r"^/openai(?:/deployments/[^/]+)?(?:/v1)?(?=/)")
"""Prefixes of Azure's paths, equivalent to OpenAI's ``/v1``."""
_BASE_URL_VARIABLES = (b"OPENAI_BASE_URL", b"OPENAI_API_BASE", b"ANTHROPIC_BASE_URL")
"""Variables with which the user selects other servers."""
_HIDDEN_VARIABLES = (
    "ANTHROPIC_AUTH_TOKEN", "AZURE_OPENAI_AD_TOKEN", "AZURE_OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_ORG_ID",
    "OPENAI_PROJECT_ID",
)  # fmt: skip
"""Variables of the user's accounts that programs cannot read."""


@dataclass(frozen=True, slots=True)
class _Program:
    session: Session
    variables: dict[str, str | None]
    """Environment variables with values of the program's own. None hides a variable."""


_running: contextvars.ContextVar[_Program | None] = contextvars.ContextVar("forge_agents_program", default=None)
_lock = threading.Lock()
_installed: list[bool] = []


def client_variables(session: Session, no_proxy: str = "", address: tuple[str, int] | None = None) -> dict[str, str]:
    """Return environment variables that lead clients to the gateway and contain the key of an episode.

    Args:
        session: The episode's session.
        no_proxy: Current value of ``NO_PROXY``.
        address: IP address and port at which this program reaches the gateway. None: those of `session`.
    """
    base = f"http://{address[0]}:{address[1]}" if address else session.url.removesuffix("/v1")
    no_proxy = ",".join(filter(None, [no_proxy, address[0] if address else "127.0.0.1"]))
    return {
        "OPENAI_BASE_URL": f"{base}/v1",
        "OPENAI_API_BASE": f"{base}/v1",  # name of LangChain and LiteLLM
        "OPENAI_API_KEY": session.token,
        "ANTHROPIC_BASE_URL": base,
        "ANTHROPIC_API_KEY": session.token,
        "OPENAI_AGENTS_DISABLE_TRACING": "1",  # OpenAI's SDK would send tasks and answers to its servers
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
    }


@contextlib.contextmanager
def running_program(session: Session) -> Iterator[None]:
    """Redirect clients that are created in this context, also in tasks and threads that start within it."""
    _install()
    no_proxy = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    program = _Program(session, {**dict.fromkeys(_HIDDEN_VARIABLES), **client_variables(session, no_proxy)})
    token = _running.set(program)
    try:
        yield
    finally:
        _running.reset(token)


def _install() -> None:
    """Patch the libraries once per process. Outside of programs the patches change nothing."""
    with _lock:
        if _installed:
            return
        _installed.append(True)
        for name in _LIBRARIES:
            with contextlib.suppress(ImportError):
                library = importlib.import_module(name)
                _patch(library.Client, "send", functools.partial(_send, library.Response))
                _patch(library.AsyncClient, "send", functools.partial(_async_send, library.Response))
        _patch(os, "system", _system)
        os.system.__module__ = "os"  # so that pickle finds it by name; posix.system is the original
        _patch(_posixsubprocess, "fork_exec", _fork_exec)
        _patch(BaseProcess, "start", _start_process)
        _patch(HTTPConnection, "putrequest", _putrequest)
        _patch(subprocess.Popen, "__init__", _start_command)
        _patch(threading.Thread, "start", _start_thread)
        _patch(ThreadPoolExecutor, "submit", _submit)
        if type(os.environ) is os._Environ:
            os.environ.__class__ = _Environ


def _patch(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Let programs call `replacement` with the original function, the program and the arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        program = _running.get()
        return original(*args, **kwargs) if program is None else replacement(original, program, *args, **kwargs)

    setattr(owner, name, patched)


# ---- environment variables


class _Environ(os._Environ):  # type: ignore[type-arg]
    """The process's environment, with the values of the program that reads or writes it."""

    def __getitem__(self, name: str) -> str:
        variables = _own_variables()
        value = variables[name] if name in variables else str(super().__getitem__(name))
        if value is None:
            raise KeyError(name)
        return value

    def __setitem__(self, name: str, value: str) -> None:
        variables = _own_variables()
        if name in variables:
            variables[name] = value
        else:
            super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        variables = _own_variables()
        if name in variables:
            variables[name] = None
        else:
            super().__delitem__(name)

    def __iter__(self) -> Iterator[str]:
        variables = _own_variables()
        names = [name for name in super().__iter__() if name not in variables]
        return iter([*names, *(name for name, value in variables.items() if value is not None)])


def _own_variables() -> dict[str, str | None]:
    program = _running.get()
    return {} if program is None else program.variables


# ---- processes and threads: replacements of functions, see `_patch`


def _start_command(init: Any, program: _Program, process: Any, *args: Any, **kwargs: Any) -> None:
    """Replace ``subprocess.Popen.__init__``: processes inherit the program's variables."""
    if len(args) <= _POPEN_ENV and kwargs.get("env") is None:
        kwargs["env"] = dict(os.environ)
    init(process, *args, **kwargs)


def _system(system: Any, program: _Program, command: Any) -> int:
    """Replace `os.system` by `subprocess`. Returns the status in the form of `os.waitstatus_to_exitcode`."""
    code = subprocess.call(command, shell=True)  # noqa: S602  # as the program requests
    return -code if code < 0 else code << 8


def _fork_exec(fork_exec: Any, program: _Program, *args: Any) -> Any:
    """Replace ``fork_exec``, with which `multiprocessing` starts new interpreters, to pass the program's variables."""
    if args[_FORK_EXEC_ENV] is None:
        variables = [os.fsencode(f"{name}={value}") for name, value in os.environ.items()]
        args = (*args[:_FORK_EXEC_ENV], variables, *args[_FORK_EXEC_ENV + 1 :])
    return fork_exec(*args)


def _start_process(start: Any, program: _Program, process: Any) -> None:
    """Replace ``Process.start``: a fork server is shared by all programs and has other variables."""
    if (target := getattr(process, "_target", None)) is not None:
        process._target = functools.partial(_run_with, dict(program.variables), target)
    start(process)


def _run_with(variables: Mapping[str, str | None], target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    return target(*args, **kwargs)


def _start_thread(start: Any, program: _Program, thread: Any) -> None:
    """Replace ``Thread.start`` to pass on the context, which Python itself does only without the GIL."""
    # threads of a pool outlive the program: each of their tasks gets its own context
    if getattr(thread, "_target", None) is not _worker:
        thread.run = functools.partial(contextvars.copy_context().run, thread.run)
    start(thread)


def _submit(submit: Any, program: _Program, pool: Any, task: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Replace ``ThreadPoolExecutor.submit`` to pass on the context with each task."""
    return submit(pool, functools.partial(contextvars.copy_context().run, task), *args, **kwargs)


# ---- requests


def _send(response: Any, send: Any, program: _Program, client: Any, request: Any, **kwargs: Any) -> Any:
    rejection = _check_request(program, request, response)
    return send(client, request, **kwargs) if rejection is None else rejection


async def _async_send(response: Any, send: Any, program: _Program, client: Any, request: Any, **kwargs: Any) -> Any:
    rejection = _check_request(program, request, response)
    return await send(client, request, **kwargs) if rejection is None else rejection


def _check_request(program: _Program, request: Any, response: Any) -> Any:
    """Return an error response for a request that must not be sent, otherwise None.

    A request to the gateway gets the key of its program: a client that is kept from one episode to the next would send
    the key of the first.
    """
    if _is_gateway(program, request.url.host, request.url.port):
        _end_if_over(program)
        for name, value in (("authorization", f"Bearer {program.session.token}"), ("x-api-key", program.session.token)):
            if name in request.headers:
                request.headers[name] = value
        return None
    error = _rejection(program, request.url.host, _port(request.url), request.url.path)
    if error is None:
        return None
    body = json.dumps(error_body(error)).encode()
    return response(403, content=body, headers={"content-type": "application/json"}, request=request)


def _putrequest(
    putrequest: Any, program: _Program, connection: Any, method: str, url: str, *args: Any, **kwargs: Any
) -> Any:
    """Replace ``HTTPConnection.putrequest``, with which requests, urllib3 and urllib start a request."""
    host, port = connection.host, connection.port
    if getattr(connection, "_tunnel_host", None):  # through a proxy
        host, port = connection._tunnel_host, connection._tunnel_port
    if _is_gateway(program, host, port):
        _end_if_over(program)
    if (error := _rejection(program, host, port, urlsplit(url).path)) is not None:
        raise PermissionError(str(error))
    return putrequest(connection, method, url, *args, **kwargs)


def _is_gateway(program: _Program, host: str, port: int | None) -> bool:
    gateway = urlsplit(program.session.url)
    return (host, port) == (gateway.hostname, gateway.port)


def _end_if_over(program: _Program) -> None:
    """End the thread or task of a program that asks a model after its episode, if only by its next request.

    Programs that retry after every error would repeat a refused request for ever, each in a thread of its own.
    ``except Exception`` does not handle this exception. In a thread, SystemExit would be usual, but a task that
    waits for the thread would pass it on to the event loop, which ends.
    """
    if program.session.closed:
        raise asyncio.CancelledError("the episode of this program is over")


def _port(url: Any) -> int:
    return int(url.port or (443 if url.scheme == "https" else 80))


def _is_at(address: str, host: str, port: int) -> bool:
    with contextlib.suppress(ValueError):
        url = urlsplit(address)
        return (url.hostname, _port(url)) == (host, port)
    return False


def _rejection(program: _Program, host: str, port: int, path: str) -> RefusedError | None:
    """Return the error for a request to a model outside of the gateway and record it. None for other requests."""
    path = _AZURE_PREFIX.sub("/v1", path)
    # os.environb has the process's values instead of the program's
    bases = [os.fsdecode(os.environb.get(name, b"")) for name in _BASE_URL_VARIABLES]
    is_model_server = _API_HOSTS.fullmatch(host) or any(_is_at(base, host, port) for base in bases)
    if not is_model_server or not path.startswith(_MODEL_PATHS):
        return None
    error = RefusedError(
        f"a request to {host} was not sent: its client was made before the program ran, or with base_url. Ask models "
        "through the client that the program is given, or make one within the program and without base_url",
        status=403,
        code="not_the_gateway",
    )
    program.session.record_error(str(error))
    return error
