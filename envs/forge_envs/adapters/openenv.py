"""Environments of OpenEnv servers, by OpenEnv's generic WebSocket client. Every wait has a timeout."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import numpy as np

from forge_agents.credentials import redact
from forge_agents.envs.env import Outcome, TurnEnv, writable
from forge_agents.http_body import too_many_values
from forge_agents.runtime.peers import check_server
from forge_agents.runtime.threads import in_thread
from forge_envs.adapters.contained import ended, failure
from forge_envs.adapters.listing import entry, register_ids

T = TypeVar("T")

_MAX_VALUES = 100_000
"""Maximum number of brackets, and of commas, in a message. Each value takes up to 120 bytes of memory."""
_MAX_MESSAGE_MB = 4
"""Maximum size of a server's message. Parsed JSON may take 20 times as much memory."""
_HIDDEN = ("done", "reward", "metadata")
_freed: dict[str, float] = {}
"""Time at which an episode of this process ended, by address."""


class OpenEnv(TurnEnv):
    """An episode on an OpenEnv server with the agent ``agent``.

    OpenEnv servers have no authentication. Access a remote server through an authenticating proxy or tunnel, with its
    credentials in the URL. A server of another user of this machine is refused, except for ``https``.

    The observation is the server's, without ``done``, ``reward`` and ``metadata``: a single text field as text, else
    JSON. An action is sent as ``{action_field: text}``. Without `action_field` the text must be a JSON object. Other
    texts and empty ones end the episode with `illegal_reward` and ``"illegal"`` in the info. Errors of the server or
    connection and timeouts end the episode with `illegal_reward` and ``"error"`` in the info. At reset they raise.

    Args:
        url: Address of the server, e.g. ``"http://127.0.0.1:8000"``.
        action_field: Field of the server's action that receives the text.
        instructions: System prompt.
        illegal_reward: Reward of a refused action.
        timeout_s: Maximum seconds for the connection, for each answer, and until a server at its capacity is free.
        max_turns: As in `TurnEnv`.
    """

    possible_agents = ("agent",)
    max_observation_chars = 200_000
    judges_silence = True

    def __init__(
        self,
        url: str,
        *,
        action_field: str | None = None,
        instructions: str = "",
        illegal_reward: float = -1.0,
        timeout_s: float = 60.0,
        max_turns: int | None = None,
    ) -> None:
        super().__init__(max_turns=max_turns)
        if not url.startswith(("http://", "https://", "ws://", "wss://")) or not timeout_s > 0:
            raise ValueError(
                f"url={url!r} must begin with http(s):// or ws(s)://, and timeout_s={timeout_s} must be above 0"
            )
        self._url, self._field, self._instructions = url, action_field, instructions
        self._illegal_reward, self._timeout_s = illegal_reward, timeout_s
        self._client: Any = None

    def setup(self, rng: np.random.Generator) -> None:
        """Reset the server's environment in a new session."""
        from openenv.core import GenericEnvClient

        _connect_directly()
        self.close()
        client = GenericEnvClient(
            self._url,
            connect_timeout_s=self._timeout_s,
            message_timeout_s=self._timeout_s,
            max_message_size_mb=_MAX_MESSAGE_MB,
            mode="simulation",
        ).sync()
        try:
            client.connect()
            self._seen = _observed(client.reset(seed=int(rng.integers(2**31))))
        except ConnectionError as error:
            _drop(client)
            raise ConnectionError(redact(str(error))) from None  # the address may hold a token
        except BaseException:
            _drop(client)
            raise
        self._client = client

    async def off_loop(self, where: str, call: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run `call` in a thread if it waits for the server, so that other episodes go on. Wait for a full server."""
        if where not in ("reset", "step", "close"):
            return call(*args, **kwargs)
        start, pause_s = time.monotonic(), 0.25
        while True:
            try:
                return await in_thread(lambda: call(*args, **kwargs), name=f"environment {self}")
            except RuntimeError as error:
                if "CAPACITY_REACHED" not in str(error):
                    raise
                if time.monotonic() > max(start, _freed.get(self._url, start)) + self._timeout_s:
                    raise RuntimeError(
                        f"{error}, also after timeout_s={self._timeout_s:g}. Raise max_concurrent_envs of the server, "
                        "or lower max_concurrent_episodes of the trainer or of BenchLimits"
                    ) from None
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 4.0)

    def instructions(self, agent: str) -> str:
        return self._instructions

    def observe_text(self, agent: str) -> str:
        fields = {name: value for name, value in self._seen.items() if name not in _HIDDEN}
        only = next(iter(fields.values())) if len(fields) == 1 else None
        text = only if isinstance(only, str) else json.dumps(fields, ensure_ascii=False, default=str)
        return writable(text[: self.max_observation_chars])

    def act(self, agent: str, action: str) -> Outcome:
        if not action:  # the server would not know that the model said nothing
            return ended(agent, self._illegal_reward, illegal="empty answer")
        try:
            sent = {self._field: action} if self._field else json.loads(action)
        except (ValueError, RecursionError) as error:
            return ended(agent, self._illegal_reward, illegal=f"no JSON: {error}"[:200])
        if not isinstance(sent, dict):
            reason = f"a JSON object is expected, not {type(sent).__name__}. Set action_field= to send texts"
            return ended(agent, self._illegal_reward, illegal=reason)
        try:
            result = self._client.step(sent)
            seen, reward = _observed(result), _reward(result)
        except Exception as error:  # noqa: BLE001  # a foreign server on model-written text
            _drop(self._client)
            self._client = None
            reason = failure(error) if str(error) else f"{failure(error)}no answer within timeout_s={self._timeout_s:g}"
            if "VALIDATION_ERROR" in reason:
                reason += f". The action had the fields {', '.join(sent)[:80]}"
            return ended(agent, self._illegal_reward, error=reason)
        self._seen = seen
        return Outcome(rewards={agent: reward}, done=result.done is True)

    def close(self) -> None:
        if self._client is not None:
            with contextlib.suppress(Exception):  # the connection may be closed already
                self._client.close()
            self._client, _freed[self._url] = None, time.monotonic()


def _drop(client: Any) -> None:
    """Close a client in a thread, because the server may not answer."""
    threading.Thread(target=client.close, daemon=True).start()


def _observed(result: Any) -> dict[str, Any]:
    """Return the observation of a server. Raises TypeError if it is no object, or `done` is neither true nor false."""
    if not isinstance(result.observation, dict) or not isinstance(result.done, bool | None):
        raise TypeError(f"the server sent observation={result.observation!r:.80} and done={result.done!r:.20}")
    return result.observation


def _reward(result: Any) -> float:
    """Return the reward of a server, 0 for null. Raises TypeError, ValueError or OverflowError for other values."""
    if isinstance(result.reward, bool | str) or not math.isfinite(reward := float(result.reward or 0.0)):
        raise TypeError(f"the server sent reward={result.reward!r:.80}. Expected a finite number")
    return reward


@cache
def _connect_directly() -> None:
    """Make OpenEnv's clients refuse other users of this machine, redirects and messages that they did not ask for.

    A stranger could read the model's texts otherwise, or a server fill the memory while the model thinks.
    """
    from openenv.core import env_client
    from websockets.asyncio.client import ClientConnection, connect

    class Checked(ClientConnection):
        async def handshake(self, *args: Any, **kwargs: Any) -> None:
            if self.transport.get_extra_info("ssl_object") is None:  # TLS proves by itself who answers
                check_server(self.transport.get_extra_info("socket"))
            await super().handshake(*args, **kwargs)

        async def recv(self, *args: Any, **kwargs: Any) -> Any:
            message = await super().recv(*args, **kwargs)
            body = message.encode(errors="surrogatepass") if isinstance(message, str) else message
            if too_many := too_many_values(body, _MAX_VALUES, _MAX_VALUES):
                raise ValueError(f"the server's message has {too_many}")
            return message

    class Direct(connect):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs, max_queue=1, create_connection=Checked)

        def process_redirect(self, exc: Exception) -> Exception | str:
            return exc

    env_client.ws_connect = Direct


def list_ids(name: str | None) -> str | None:
    """Register ``openenv/Server-v0``. Playing needs a running server. See `forge_agents.envs.registry.ListIds`."""
    return register_ids("openenv", name, {"Server-v0": entry("openenv:OpenEnv", "openenv", "1p")}, ("Server-v0",))
