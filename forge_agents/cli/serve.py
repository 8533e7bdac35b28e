"""Serving over the OpenAI protocol (``forge-agents serve``), on loopback and behind a token.

A run is served by the gateway with its policies as they were trained (`trained`), a single model by vLLM's server.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from rich.console import Console

from forge_agents.cli.trained import TrainedRun, read_run, serve_run
from forge_agents.display import visible
from forge_agents.errors import ModelNotFoundError, did_you_mean
from forge_agents.files import user_path
from forge_agents.models.resolve import display_name, resolve
from forge_agents.programs.http import error_body, invalid_key
from forge_agents.runtime import startup
from forge_agents.runtime.interrupts import interrupted, print_stopping
from forge_agents.runtime.machine import visible_gpus
from forge_agents.serving._vllm import QUIET_AND_LOCAL
from forge_agents.serving.config import is_too_small_to_compile
from forge_agents.serving.memory import check_head_size
from forge_agents.settings import settings_class

TOKEN_VARIABLE = "FORGE_AGENTS_TOKEN"  # noqa: S105  # a name
_SERVER_TOKEN = "FORGE_AGENTS_SERVER_TOKEN"  # noqa: S105  # a name
"""Variable that passes the token to `RequireToken` in the server's process. All users can read command lines."""
_SERVER = "forge_agents.serving._server"
_ANSWERS = "FORGE_AGENTS_SERVER_ANSWERS"
"""Variable with the name of the file that `RequireToken` creates when the server is ready."""
_STOP_TIMEOUT_S = 30.0
"""Time after which a server that was asked to stop is killed."""
_PDEATHSIG = 1
"""Option of prctl(2)."""
_EXPORT_PREFIX = "export-step-"
"""Prefix of the folders that ``forge-agents export`` writes."""
_OPEN = ("/health", "/ping")
_Scope: TypeAlias = MutableMapping[str, Any]
_Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App: TypeAlias = Callable[[_Scope, Any, _Send], Awaitable[None]]


@settings_class
@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Settings of `serve`. Arguments after ``--`` are passed to ``vllm serve``."""

    checkpoint: str
    """Folder of a run, an export, or a model (a built-in name, a Hugging Face id or a folder). It may be the first
    argument, without ``--checkpoint``."""
    policy: str = ""
    """Policy of a run whose model is served alone, by vLLM's server. Empty: all policies."""
    name: str = ""
    """Name of the model in requests. Empty: the name of the policy, the run or the model. The names of a run's
    policies and agents work as well."""
    host: str = "127.0.0.1"
    """Address to listen on. An address other than loopback is open to the network and needs a TLS proxy."""
    port: int = 8000
    """Port to listen on."""
    api_key_env: str = TOKEN_VARIABLE
    """Environment variable with the token that every request needs. If it is not set, a token is printed."""
    chat_template: str = ""
    """File with a Jinja chat template. Empty: the template of the model, which training used."""
    max_model_len: int | None = None
    """Maximum number of tokens of prompt and response. None: the limit of the training, or of the model."""
    max_num_seqs: int = 64
    """Maximum number of sequences that are decoded concurrently."""
    kv_cache_gb: float | None = None
    """Memory for attention keys and values in GB (1e9 bytes). None: chosen by vLLM, most of a GPU."""
    enforce_eager: bool | None = None
    """Skip compilation, which starts faster and decodes more slowly. None: for small models; see `EngineConfig`."""

    def __post_init__(self) -> None:
        if not self.checkpoint:
            raise ValueError("checkpoint is empty; give the folder of a run, an export or a model")
        if not 1 <= self.port <= 65535:
            raise ValueError(f"port={self.port} must be in [1, 65535]")
        if not re.fullmatch(r"[A-Za-z_]\w*", self.api_key_env):  # not shown, because it may be the token itself
            raise ValueError("api_key_env is not the name of an environment variable; give the name, not the token")
        if self.chat_template and not user_path(self.chat_template).is_file():
            raise ValueError(f"chat_template={self.chat_template!r} is not a file; give a file with a Jinja template")
        for field in ("max_model_len", "max_num_seqs", "kv_cache_gb"):
            value = getattr(self, field)
            if value is not None and value <= 0:
                raise ValueError(f"{field}={value} must be above 0")

    def token(self) -> str:
        """Return the token of the environment, or a new one.

        Raises:
            ValueError: The variable holds an invalid token.
        """
        token = os.environ.get(self.api_key_env, "")
        if token and not re.fullmatch(r"[!-~]{8,}", token):
            raise ValueError(
                f"environment variable {self.api_key_env} holds no usable token; set 8 or more printable ASCII "
                "characters without spaces, or unset it to create one"
            )
        return token or secrets.token_urlsafe(32)


def serve(config: ServeConfig, more: Sequence[str] = (), say: Callable[[str], None] = print) -> int:
    """Serve a model until Ctrl-C, SIGTERM or the end of the server.

    Args:
        more: More options of ``vllm serve``.
        say: Function that prints a line. A new token is printed only there.

    Returns:
        Exit status of the server.

    Raises:
        ModelNotFoundError: The model does not exist or is incomplete.
        ValueError: The model has no chat template, or attention heads that vLLM does not support on CPU; the port is in
            use; or the token is invalid.
        KeyboardInterrupt: Ctrl-C; the server has ended.
        SystemExit: SIGTERM, with status 143; the server has ended.
    """
    run = None if config.policy or config.chat_template or more else find_run(config)
    folder, name = find_model(config) if run is None else (user_path(config.checkpoint), next(iter(run.names)))
    if run is None and not visible_gpus():
        check_head_size(folder, name)
    _check_port(config)
    token = config.token()
    is_new = not os.environ.get(config.api_key_env)
    url = f"http://{f'[{config.host}]' if ':' in config.host else config.host}:{config.port}/v1"
    if run is None:
        say(f"model  {folder} as {name}")
    else:
        for policy in run.policies:
            say(f"model  {policy} as {', '.join(alias for alias, target in run.names.items() if target == policy)}")
        for policy, reason in run.missing.items():
            say(visible(f"left   frozen policy {policy}: {reason}"))
    say(f"url    {url}")
    say(f"token  {token}   (printed only once)" if is_new else f"token  from {config.api_key_env}")
    say(f'use    fa.Endpoint("{url}", "{name}", api_key_env="{config.api_key_env}")')
    if run is not None:
        sys.stdout.flush()
        names = ("max_model_len", "max_num_seqs", "kv_cache_gb", "enforce_eager")
        overrides = {name: value for name in names if (value := getattr(config, name)) is not None}
        engine = replace(run.engine, **overrides)
        return serve_run(run, engine, host=config.host, port=config.port, token=token)
    say("the following lines are vLLM's")
    sys.stdout.flush()
    environment = {**os.environ, **QUIET_AND_LOCAL, _SERVER_TOKEN: token}
    environment.pop("VLLM_API_KEY", None)  # the token is checked in one place
    details = f"{display_name(folder)}, {'not ' * _eager(config, folder)}compiled"
    return _run(command(config, folder, name, more), environment, name, details)


def _run(words: Sequence[str], environment: Mapping[str, str], name: str, details: str) -> int:
    """Run the server in a separate session and end it; before it is ready, without waiting.

    In this session, Ctrl-C would make the server and its engines print long tracebacks.
    """
    # lines without a spinner, because vLLM prints as well
    view = startup.show(Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print)
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="forge-agents-serve-") as folder:
        answers, grace_s = Path(folder, "answers"), 0.0
        server = subprocess.Popen(
            words,
            env={**environment, _ANSWERS: str(answers)},
            start_new_session=True,
            # the server also ends if this process is killed; no other thread runs here yet
            preexec_fn=partial(ctypes.CDLL(None).prctl, _PDEATHSIG, signal.SIGTERM),  # noqa: PLW1509
        )
        try:
            with contextlib.suppress(ChildProcessError), view, startup.track("server", name, details):
                while not answers.exists():
                    if server.poll() is not None:
                        raise ChildProcessError
                    time.sleep(0.1)
                grace_s = _STOP_TIMEOUT_S
            return server.wait()
        except KeyboardInterrupt:
            print_stopping()
            raise interrupted("the server is stopped" if grace_s else "stopped before the server answered") from None
        finally:
            _end(server, grace_s)
            signal.signal(signal.SIGTERM, before)


def _end(server: subprocess.Popen[bytes], grace_s: float) -> None:
    """End the server and its children. It is killed after `grace_s` or a second Ctrl-C."""
    try:
        if grace_s and server.poll() is None:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(grace_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def command(config: ServeConfig, folder: Path, name: str, more: Sequence[str] = ()) -> list[str]:
    """Return the command line of vLLM's server."""
    stored = _read(folder / "config.json")
    options: dict[str, Any] = {
        "model": folder,
        "host": config.host,
        "port": config.port,
        "served-model-name": name,
        # the type of the stored weights: "auto" would convert float32 to half precision
        "dtype": stored.get("dtype") or stored.get("torch_dtype") or "auto",
        "generation-config": "vllm",  # the model's files do not change the sampling defaults
        "max-num-seqs": config.max_num_seqs,
        "max-model-len": config.max_model_len,
        "kv-cache-memory-bytes": None if config.kv_cache_gb is None else int(config.kv_cache_gb * 1e9),
        "chat-template": str(user_path(config.chat_template)) if config.chat_template else None,
        "middleware": f"{__name__}.{RequireToken.__name__}",
    }
    words = [f"--{key}={value}" for key, value in options.items() if value is not None]
    flags = ["--disable-fastapi-docs", "--disable-uvicorn-access-log", *["--enforce-eager"] * _eager(config, folder)]
    return [sys.executable, "-P", "-m", _SERVER, *words, *flags, *more]


def _eager(config: ServeConfig, folder: Path) -> bool:
    return is_too_small_to_compile(folder) if config.enforce_eager is None else config.enforce_eager


def _export(folder: Path) -> Path:
    """Return the final export of a run, or its newest exported checkpoint, or the folder itself."""
    steps = [child for child in folder.glob(f"{_EXPORT_PREFIX}*") if child.is_dir()]
    newest = max(steps, key=lambda child: (len(child.name), child.name), default=folder)
    return folder / "export" if (folder / "export").is_dir() else newest


def find_run(config: ServeConfig) -> TrainedRun | None:
    """Return the run whose policies are served as they were trained; None for a single model.

    Raises:
        ModelNotFoundError, RunFolderError: The run is incomplete or of another version.
    """
    folder = user_path(config.checkpoint)
    export = _export(folder)
    if export == folder:
        return None
    run = read_run(folder, export, also=(config.name or folder.absolute().name,))
    if run is not None and config.name and config.name not in run.names:
        raise ValueError(
            f"name={config.name!r} is none of the names of this run: {', '.join(run.names)}. Leave it out, or choose "
            "one policy with --policy"
        )
    return run


def find_model(config: ServeConfig) -> tuple[Path, str]:
    """Return the folder of the model, and its name in requests.

    Raises:
        ModelNotFoundError: There is no model, or the run trained several and `policy` names none of them.
        ValueError: The model has no chat template.
    """
    given = user_path(config.checkpoint)
    export = _export(given)
    children = sorted(export.iterdir()) if export.is_dir() else []
    policies = [child.name for child in children if (child / "config.json").is_file()]
    if (export / "config.json").is_file() or not export.is_dir():
        if config.policy:
            raise ModelNotFoundError(f"{config.checkpoint} holds a single model without policies; leave out policy")
        folder, name = resolve(export if export.is_dir() else config.checkpoint), config.checkpoint
        if export.is_dir():
            path = given.absolute()
            is_export = path.name == "export" or path.name.startswith(_EXPORT_PREFIX)
            name = path.parent.name if is_export else path.name
    elif not policies:
        raise ModelNotFoundError(
            f"{given} holds no exported model. Training writes export/ at its end, `forge-agents export RUN` exports a "
            "checkpoint, and trainer.save(folder) works at any time"
        )
    elif config.policy not in policies:
        hint = did_you_mean(config.policy, policies)
        raise ModelNotFoundError(f"{given} holds the policies {', '.join(policies)}; choose one with --policy.{hint}")
    else:
        folder, name = resolve(export / config.policy), config.policy
    templates = ((folder / file).is_file() for file in ("chat_template.jinja", "chat_template.json"))
    if not (config.chat_template or any(templates) or _read(folder / "tokenizer_config.json").get("chat_template")):
        raise ValueError(f"{folder} has no chat template; give one with --chat_template")
    return folder, config.name or name


def _read(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text())) if file.is_file() else {}


class RequireToken:
    """ASGI middleware: every path except health checks needs the token, which is compared in constant time.

    vLLM's own check leaves paths open that generate text, such as ``/invocations``.
    """

    def __init__(self, app: _App) -> None:
        token = os.environ.get(_SERVER_TOKEN, "")
        if not token:
            raise ValueError(
                f"environment variable {_SERVER_TOKEN} is not set; start the server with forge-agents serve"
            )
        self._app, self._digest = app, hashlib.sha256(token.encode()).digest()

    async def __call__(self, scope: _Scope, receive: Any, send: _Send) -> None:
        """Forward a request, or refuse it."""
        from forge_agents.runtime.connections import trust

        if scope["type"] == "lifespan":
            await self._app(scope, receive, partial(self._forward, send))
        elif self._authorized(scope):
            trust(scope)
            await self._app(scope, receive, send)
        elif scope.get("path") in _OPEN:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            has_key = any(name in (b"authorization", b"x-api-key") for name, _ in scope["headers"])
            body = json.dumps(error_body(invalid_key(given=has_key)))
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body.encode()})

    async def _forward(self, send: _Send, message: MutableMapping[str, Any]) -> None:
        await send(message)
        if message["type"] == "lifespan.startup.complete":
            Path(os.environ[_ANSWERS]).touch()

    def _authorized(self, scope: _Scope) -> bool:
        headers = [value for name, value in scope["headers"] if name == b"authorization"]
        keys = [value for name, value in scope["headers"] if name == b"x-api-key"]  # of Anthropic's clients
        if not headers and len(keys) == 1:
            headers = [b"Bearer " + keys[0]]
        scheme, _, token = headers[0].partition(b" ") if len(headers) == 1 else (b"", b"", b"")
        matches = hmac.compare_digest(hashlib.sha256(token.strip()).digest(), self._digest)
        return matches and scheme.lower() == b"bearer"


def _check_port(config: ServeConfig) -> None:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as cause:
            address = f"{config.host} port {config.port}"
            raise ValueError(f"cannot listen on {address} ({cause.strerror}); choose another --port") from None
