"""Serving of policies over the protocols of the gateway (``forge-agents serve``), on loopback and behind a token."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any

from forge_agents.cli.served import ServedPolicies, find_policies
from forge_agents.display import visible
from forge_agents.files import outdated_export, user_path
from forge_agents.programs.gateway import Gateway
from forge_agents.programs.policy_server import PolicyServer
from forge_agents.runtime import startup
from forge_agents.runtime.interrupts import LoopRunner
from forge_agents.serving.config import EngineConfig
from forge_agents.serving.fleet import Fleet
from forge_agents.settings import settings_class

TOKEN_VARIABLE = "FORGE_AGENTS_TOKEN"  # noqa: S105  # a name
_DRAIN_S = 30.0
"""Seconds that active requests may take after the server is asked to stop."""
_ENGINE_SETTINGS = ("max_model_len", "max_num_seqs", "kv_cache_gb", "enforce_eager")


@settings_class
@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Settings of `serve`."""

    checkpoint: str
    """Folder of a run, an export, or a model (a built-in name, a Hugging Face id or a folder). May be the first
    argument, without ``--checkpoint``."""
    policy: str = ""
    """Policy that is served. Empty: all policies."""
    name: str = ""
    """Name of the model in requests, if there is one trained policy. Empty: the name of the run or the model. The names
    of policies and agents work as well."""
    host: str = "127.0.0.1"
    """Address to listen on. An address other than loopback is open to the network and needs a TLS proxy."""
    port: int = 8000
    """Port to listen on."""
    api_key_env: str = TOKEN_VARIABLE
    """Environment variable with the token that every request needs. If it is not set, a token is printed."""
    max_model_len: int | None = None
    """Maximum number of tokens of prompt and response. None: the limit of the training, or of the model."""
    max_num_seqs: int = 64
    """Maximum number of sequences that are decoded concurrently."""
    kv_cache_gb: float | None = None
    """Memory for attention keys and values in GB (1e9 bytes). None: as in `EngineConfig`."""
    enforce_eager: bool | None = None
    """Skip compilation, which starts faster and decodes more slowly. None: for small models. See `EngineConfig`."""

    def __post_init__(self) -> None:
        if not self.checkpoint:
            raise ValueError("checkpoint is empty. Give the folder of a run, an export or a model")
        if not 1 <= self.port <= 65535:
            raise ValueError(f"port={self.port} must be in [1, 65535]")
        if not re.fullmatch(r"[A-Za-z_]\w*", self.api_key_env):  # not shown, because it may be the token itself
            raise ValueError("api_key_env is not the name of an environment variable. Give the name, not the token")
        self.engine(EngineConfig())  # runs its checks

    def engine(self, default: EngineConfig) -> EngineConfig:
        """Return the settings of the engines, where this does not set them as in `default`."""
        values = {name: getattr(self, name) for name in _ENGINE_SETTINGS}
        return replace(default, **{name: value for name, value in values.items() if value is not None})

    def token(self) -> str:
        """Return the token of the environment, or a new one. Raises ValueError for an invalid token."""
        token = os.environ.get(self.api_key_env, "")
        if token and not re.fullmatch(r"[!-~]{8,}", token):
            raise ValueError(
                f"environment variable {self.api_key_env} holds no usable token. Set 8 or more printable ASCII "
                "characters without spaces, or unset it to create one"
            )
        return token or secrets.token_urlsafe(32)


def serve(config: ServeConfig, say: Callable[[str], None] = print) -> None:
    """Answer requests until Ctrl-C, SIGTERM or the loss of an engine.

    Args:
        say: Function that prints a line. A new token is printed only there.

    Raises:
        ModelNotFoundError: The model does not exist or is incomplete.
        ValueError: The model has no chat template; the port is in use; or the token is invalid.
        KeyboardInterrupt: Ctrl-C. All processes have ended.
        SystemExit: SIGTERM, with status 143. All processes have ended.
        ActorDiedError: An engine died and cannot be restarted.
    """
    out = say
    say = lambda text: out(visible(text))  # noqa: E731  # names come from the files of a run
    served = find_policies(config.checkpoint, policy=config.policy, name=config.name)
    if outdated := outdated_export(user_path(config.checkpoint)):
        say(f"note   {outdated}")
    _check_port(config)
    token, is_new = config.token(), not os.environ.get(config.api_key_env)
    for policy in served.policies:
        say(f"model  {policy} as {', '.join(name for name, target in served.names.items() if target == policy)}")
    for policy, reason in served.missing.items():
        say(f"left   frozen policy {policy}: {reason}")
    sys.stdout.flush()

    def announce(url: str) -> None:
        """Tell clients where to send the token, now that no other user can listen there."""
        say(f"url    {url}")
        say(f"token  {token}   (printed only once)" if is_new else f"token  from {config.api_key_env}")
        say(f'use    fa.Endpoint("{url}", "{next(iter(served.names))}", api_key_env="{config.api_key_env}")')
        sys.stdout.flush()

    with contextlib.closing(LoopRunner(status=lambda: "the server is stopped")) as runner:
        if runner.run(_until_terminated(_serve(served, config, token, announce))):
            sys.exit(128 + signal.SIGTERM)


async def _until_terminated(work: Coroutine[Any, Any, None]) -> bool:
    """Run `work`. Returns whether SIGTERM ended it."""
    task, terminated, loop = asyncio.ensure_future(work), [], asyncio.get_running_loop()

    def stop(*_: object) -> None:
        terminated.append(True)
        loop.call_soon_threadsafe(task.cancel)

    # a signal for `loop.add_signal_handler` is lost while many other calls wait for a busy loop
    before = signal.signal(signal.SIGTERM, stop)
    try:
        await task
    except asyncio.CancelledError:
        if not terminated:
            raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return bool(terminated)


async def _serve(served: ServedPolicies, config: ServeConfig, token: str, announce: Callable[[str], None]) -> None:
    with startup.show() as say:
        fleet = await Fleet.start(served.policies, config.engine(served.engine), tuned=served.adapters)
        try:
            with Gateway(host=config.host, port=config.port) as gateway:
                server = PolicyServer(gateway, served.names, served.policies, fleet.policy_engines, token=token)
                announce(gateway.url)
                say(f"answering on {gateway.url}")
                try:
                    await server.failed
                finally:
                    await server.drain(_DRAIN_S)
        finally:
            await fleet.stop()


def _check_port(config: ServeConfig) -> None:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except OSError as cause:
            address = f"{config.host} port {config.port}"
            raise ValueError(f"cannot listen on {address} ({cause.strerror}). Choose another --port") from None
