"""Serve what was trained to everybody who speaks OpenAI's protocol: ``forge-agents serve CHECKPOINT``.

In: a run's folder, an export or a model's name. Out: on loopback, behind a token, a run's policies as they were trained
(`trained`), or of one model vLLM's own server. Waits for the model's files, for the server's first answer and for its
end.
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
from forge_agents.programs.gateway import error_body, invalid_key
from forge_agents.runtime import startup
from forge_agents.runtime.interrupts import interrupted, print_stopping
from forge_agents.runtime.machine import visible_gpus
from forge_agents.serving._vllm import QUIET_AND_LOCAL
from forge_agents.serving.config import is_too_small_to_compile
from forge_agents.serving.memory import check_head_size
from forge_agents.settings import settings_class

TOKEN_VARIABLE = "FORGE_AGENTS_TOKEN"  # noqa: S105  # a name
_HANDED_ON = "FORGE_AGENTS_SERVER_TOKEN"
"""Carries the token to `RequireToken` in the server's process, where command lines would show it to everybody."""
_SERVER = "forge_agents.serving._server"
_ANSWERS = "FORGE_AGENTS_SERVER_ANSWERS"
"""Carries the name of the file that `RequireToken` makes when the server answers."""
_END_S = 30.0
"""A server that is asked to end is killed after this time."""
_PDEATHSIG = 1
"""Of prctl(2)."""
_OF_A_STEP = "export-step-"
"""How the names of folders begin that ``forge-agents export`` makes of checkpoints."""
_OPEN = ("/health", "/ping")
_Scope: TypeAlias = MutableMapping[str, Any]
_Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_App: TypeAlias = Callable[[_Scope, Any, _Send], Awaitable[None]]


@settings_class
@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """A model, and how it is served. What stands after ``--`` goes to ``vllm serve`` as it is."""

    checkpoint: str
    """A run's folder, an export, or a model: a built-in name, a Hugging Face id or a folder; ``--checkpoint`` may be
    left out before it."""
    policy: str = ""
    """Of a run that trained several, the one whose model alone is served, by vLLM's own server."""
    name: str = ""
    """What requests call the model; empty takes the policy's name, the run's or the model's. A run's policies answer to
    the names of policies and seats as well."""
    host: str = "127.0.0.1"
    """Address to listen on. Others than loopback let the network in: put TLS before it."""
    port: int = 8000
    """Port to listen on."""
    api_key_env: str = TOKEN_VARIABLE
    """Environment variable with the token that every request must bring; where it is not set, one is made and shown."""
    chat_template: str = ""
    """File with a Jinja chat template; empty takes the model's own, the one that training used."""
    max_model_len: int | None = None
    """Tokens of prompt and response together; None for that of the training, or the model's own limit."""
    max_num_seqs: int = 64
    """Sequences decoded at the same time; more wait in the queue."""
    kv_cache_gb: float | None = None
    """Memory for attention keys and values, 1e9 bytes; None leaves it to vLLM, which takes most of a GPU."""
    enforce_eager: bool | None = None
    """Skip compilation: starts sooner, decodes more slowly. None: where it does not pay; see `EngineConfig`."""

    def __post_init__(self) -> None:
        if not self.checkpoint:
            raise ValueError("checkpoint='' names no model; give a run's folder, an export or a model")
        if not 1 <= self.port <= 65535:
            raise ValueError(f"port={self.port} must lie in 1 to 65535")
        if not re.fullmatch(r"[A-Za-z_]\w*", self.api_key_env):  # not shown: it may be the token itself
            raise ValueError("api_key_env is no name of an environment variable; give the name, not the token")
        if self.chat_template and not user_path(self.chat_template).is_file():
            raise ValueError(f"chat_template={self.chat_template!r} is no file; give one with a Jinja template")
        for field in ("max_model_len", "max_num_seqs", "kv_cache_gb"):
            value = getattr(self, field)
            if value is not None and value <= 0:
                raise ValueError(f"{field}={value} must be above 0")

    def token(self) -> str:
        """The token of the environment; a new one where there is none.

        Raises:
            ValueError: The variable holds what no header can carry.
        """
        given = os.environ.get(self.api_key_env, "")
        if given and not re.fullmatch(r"[!-~]{8,}", given):
            raise ValueError(
                f"environment variable {self.api_key_env} holds no usable token; set 8 or more printable ASCII "
                "characters without blanks, or unset it to have one made"
            )
        return given or secrets.token_urlsafe(32)


def serve(config: ServeConfig, more: Sequence[str] = (), say: Callable[[str], None] = print) -> int:
    """Serve a model until Ctrl-C, SIGTERM or the server's own end.

    Args:
        more: Further options of ``vllm serve``.
        say: Shows a line; a token that was made goes there, and nowhere else.

    Returns:
        The server's exit status.

    Raises:
        ModelNotFoundError: There is no such model, or it is not complete.
        ValueError: It has no chat template, or heads that vLLM does not compute on CPU; the port is in use, or the
            token cannot be used.
        KeyboardInterrupt: Ctrl-C; the server has ended.
        SystemExit: SIGTERM, with status 143; the same.
    """
    run = None if config.policy or config.chat_template or more else find_run(config)
    folder, name = find_model(config) if run is None else (user_path(config.checkpoint), next(iter(run.names)))
    if run is None and not visible_gpus():
        check_head_size(folder, name)
    _check_port(config)
    token = config.token()
    made = not os.environ.get(config.api_key_env)
    url = f"http://{f'[{config.host}]' if ':' in config.host else config.host}:{config.port}/v1"
    if run is None:
        say(f"model  {folder} as {name}")
    else:
        for policy in run.policies:
            say(f"model  {policy} as {', '.join(known for known, asked in run.names.items() if asked == policy)}")
        for policy, why in run.missing.items():
            say(visible(f"left   {policy}, which did not learn: {why}"))
    say(f"url    {url}")
    say(f"token  {token}   (shown only now)" if made else f"token  that of {config.api_key_env}")
    say(f'use    fa.Endpoint("{url}", "{name}", api_key_env="{config.api_key_env}")')
    if run is not None:
        sys.stdout.flush()
        names = ("max_model_len", "max_num_seqs", "kv_cache_gb", "enforce_eager")
        given = {name: getattr(config, name) for name in names}
        engine = replace(run.engine, **{name: value for name, value in given.items() if value is not None})
        return serve_run(run, engine, host=config.host, port=config.port, token=token)
    say("the lines from here on are vLLM's and of its start")
    sys.stdout.flush()
    environment = {**os.environ, **QUIET_AND_LOCAL, _HANDED_ON: token}
    environment.pop("VLLM_API_KEY", None)  # one token, checked in one place
    what = f"{display_name(folder)}, {'not ' * _eager(config, folder)}compiled"
    return _run(command(config, folder, name, more), environment, name, what)


def _run(words: Sequence[str], environment: Mapping[str, str], name: str, what: str) -> int:
    """Run the server in a session of its own, and end it, in silence as long as it has not answered anybody.

    Ctrl-C in its own would have it and its engines show a hundred lines of where they were.
    """
    # lines, and no spinner: vLLM writes, too
    view = startup.show(Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print)
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="forge-agents-serve-") as folder:
        answers, grace_s = Path(folder, "answers"), 0.0
        server = subprocess.Popen(
            words,
            env={**environment, _ANSWERS: str(answers)},
            start_new_session=True,
            # the server ends also where this process is killed; no other thread runs here yet
            preexec_fn=partial(ctypes.CDLL(None).prctl, _PDEATHSIG, signal.SIGTERM),  # noqa: PLW1509
        )
        try:
            with contextlib.suppress(ChildProcessError), view, startup.track("server", name, what):
                while not answers.exists():
                    if server.poll() is not None:
                        raise ChildProcessError
                    time.sleep(0.1)
                grace_s = _END_S
            return server.wait()
        except KeyboardInterrupt:
            print_stopping()
            raise interrupted("the server is stopped" if grace_s else "stopped before the server answered") from None
        finally:
            _end(server, grace_s)
            signal.signal(signal.SIGTERM, before)


def _end(server: subprocess.Popen[bytes], grace_s: float) -> None:
    """End the server, by force after `grace_s` or a second Ctrl-C, and what it has started in any case."""
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
    """The words that start the server of the model in `folder`."""
    stored = _read(folder / "config.json")
    options: dict[str, Any] = {
        "model": folder,
        "host": config.host,
        "port": config.port,
        "served-model-name": name,
        # what the weights are stored in: "auto" would take float32 as a half-precision type
        "dtype": stored.get("dtype") or stored.get("torch_dtype") or "auto",
        "generation-config": "vllm",  # a request that says nothing of sampling is not bent by the model's files
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


def _export(given: Path) -> Path:
    """What a run wrote at its end, else what was last made of a checkpoint, else the folder itself."""
    steps = [child for child in given.glob(f"{_OF_A_STEP}*") if child.is_dir()]
    newest = max(steps, key=lambda child: (len(child.name), child.name), default=given)
    return given / "export" if (given / "export").is_dir() else newest


def find_run(config: ServeConfig) -> TrainedRun | None:
    """The run whose policies are served as they were trained; None where there is but a model.

    Raises:
        ModelNotFoundError, RunFolderError: It is not complete, or of another version.
    """
    given = user_path(config.checkpoint)
    export = _export(given)
    if export == given:
        return None
    run = read_run(given, export, also=(config.name or given.absolute().name,))
    if run is not None and config.name and config.name not in run.names:
        raise ValueError(
            f"name={config.name!r}: the policies of this run answer to {', '.join(run.names)}; leave it out, or choose "
            "the one that it names with --policy"
        )
    return run


def find_model(config: ServeConfig) -> tuple[Path, str]:
    """The folder of the model, and what requests call it.

    Raises:
        ModelNotFoundError: There is none, or the run trained several and `policy` names none of them.
        ValueError: It has no chat template.
    """
    given = user_path(config.checkpoint)
    export = _export(given)
    children = sorted(export.iterdir()) if export.is_dir() else []
    policies = [child.name for child in children if (child / "config.json").is_file()]
    if (export / "config.json").is_file() or not export.is_dir():
        if config.policy:
            raise ModelNotFoundError(f"{config.checkpoint} holds one model and no policies; leave out policy")
        folder, name = resolve(export if export.is_dir() else config.checkpoint), config.checkpoint
        if export.is_dir():
            own = given.absolute()
            name = own.parent.name if own.name == "export" or own.name.startswith(_OF_A_STEP) else own.name
    elif not policies:
        raise ModelNotFoundError(
            f"{given} holds no exported model: training writes export/ at its end, forge-agents export RUN makes one "
            "of a checkpoint, trainer.save(folder) at any time"
        )
    elif config.policy not in policies:
        near = did_you_mean(config.policy, policies)
        raise ModelNotFoundError(f"{given} holds the policies {', '.join(policies)}; choose one with --policy.{near}")
    else:
        folder, name = resolve(export / config.policy), config.policy
    templates = ((folder / file).is_file() for file in ("chat_template.jinja", "chat_template.json"))
    if not (config.chat_template or any(templates) or _read(folder / "tokenizer_config.json").get("chat_template")):
        raise ValueError(f"{folder} has no chat template; give a file with --chat_template")
    return folder, config.name or name


def _read(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text())) if file.is_file() else {}


class RequireToken:
    """ASGI middleware: every path but the server's health needs the token, compared in constant time.

    vLLM's own check leaves some paths open that generate as well, such as ``/invocations``.
    """

    def __init__(self, app: _App) -> None:
        token = os.environ.get(_HANDED_ON, "")
        if not token:
            raise ValueError(f"environment variable {_HANDED_ON} is not set; start the server with forge-agents serve")
        self._app, self._digest = app, hashlib.sha256(token.encode()).digest()

    async def __call__(self, scope: _Scope, receive: Any, send: _Send) -> None:
        """Pass a request on, or refuse it."""
        from forge_agents.runtime.connections import trust

        if scope["type"] == "lifespan":
            await self._app(scope, receive, partial(self._pass_on, send))
        elif self._knows(scope):
            trust(scope)
            await self._app(scope, receive, send)
        elif scope.get("path") in _OPEN:
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            given = any(name in (b"authorization", b"x-api-key") for name, _ in scope["headers"])
            body = json.dumps(error_body(invalid_key(given=given)))
            headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body.encode()})

    async def _pass_on(self, send: _Send, message: MutableMapping[str, Any]) -> None:
        await send(message)
        if message["type"] == "lifespan.startup.complete":
            Path(os.environ[_ANSWERS]).touch()

    def _knows(self, scope: _Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        keys = [value for name, value in scope["headers"] if name == b"x-api-key"]  # of Anthropic's clients
        if not given and len(keys) == 1:
            given = [b"Bearer " + keys[0]]
        scheme, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        matches = hmac.compare_digest(hashlib.sha256(token.strip()).digest(), self._digest)
        return matches and scheme.lower() == b"bearer"


def _check_port(config: ServeConfig) -> None:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as cause:
            where = f"{config.host} port {config.port}"
            raise ValueError(f"cannot listen on {where} ({cause.strerror}); give another --port") from None
