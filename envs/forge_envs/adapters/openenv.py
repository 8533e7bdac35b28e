"""Environments behind OpenEnv servers, played over a WebSocket with OpenEnv's own generic client.

In: a server's URL, actions as text or JSON. Out: its observations as text, its rewards. Waits for every answer of the
server, each with a deadline.
"""

from __future__ import annotations

import contextlib
import json
import threading
from typing import Any

import numpy as np

from forge_agents.envs.env import Outcome, TurnEnv, writable
from forge_envs.adapters.contained import ended, failure

_HIDDEN = ("done", "reward", "metadata")


class OpenEnv(TurnEnv):
    """An episode on an OpenEnv server; the seat is ``agent``.

    OpenEnv's servers have no authentication: reach a remote one through a proxy or tunnel that has, and write its
    credentials into the URL.

    The observation is the server's, without ``done``, ``reward`` and ``metadata``: the bare text where one text field
    is left, else JSON. An action is sent as ``{action_field: text}``; without `action_field` it must be a JSON object,
    and text that is none ends the episode with `illegal_reward`, told in the info under ``"illegal"``. An error that
    the server answers with, one the connection raises, and a missed deadline end the episode likewise, told under
    ``"error"``; at reset they raise.

    Args:
        url: The server, e.g. ``"http://127.0.0.1:8000"``.
        action_field: The field of the server's action that takes the text.
        instructions: The system prompt.
        illegal_reward: Reward of an action that the server refuses.
        timeout_s: Seconds to wait for a connection, and for each answer.
        max_turns: As in `TurnEnv`.
    """

    possible_agents = ("agent",)
    max_observation_chars = 200_000

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
            raise ValueError(f"url={url!r}, timeout_s={timeout_s}: want http(s):// or ws(s)://, and seconds above 0")
        self._url, self._field, self._told = url, action_field, instructions
        self._illegal_reward, self._timeout_s = illegal_reward, timeout_s
        self._client: Any = None

    def setup(self, rng: np.random.Generator) -> None:
        """Reset the server's environment in a fresh session."""
        from openenv.core import GenericEnvClient

        self.close()
        self._client = GenericEnvClient(
            self._url, connect_timeout_s=self._timeout_s, message_timeout_s=self._timeout_s, mode="simulation"
        ).sync()
        self._client.connect()
        self._seen = self._client.reset(seed=int(rng.integers(2**31))).observation

    def instructions(self, agent: str) -> str:
        return self._told

    def observe_text(self, agent: str) -> str:
        shown = {name: value for name, value in dict(self._seen).items() if name not in _HIDDEN}
        only = next(iter(shown.values())) if len(shown) == 1 else None
        text = only if isinstance(only, str) else json.dumps(shown, ensure_ascii=False, default=str)
        return writable(text[: self.max_observation_chars])

    def act(self, agent: str, action: str) -> Outcome:
        try:
            sent = {self._field: action} if self._field else json.loads(action)
        except (ValueError, RecursionError) as error:
            return ended(agent, self._illegal_reward, illegal=f"no JSON: {error}"[:200])
        if not isinstance(sent, dict):
            why = f"a JSON object is expected, not {type(sent).__name__}"
            return ended(agent, self._illegal_reward, illegal=why)
        try:
            result = self._client.step(sent)
        except Exception as error:  # noqa: BLE001  # a stranger's server, on text that a model wrote
            # Closing the session would wait for a server that may not answer; a thread does.
            threading.Thread(target=self._client.close, daemon=True).start()
            self._client = None
            return ended(agent, self._illegal_reward, error=failure(error))
        self._seen = result.observation
        return Outcome(rewards={agent: float(result.reward or 0.0)}, done=bool(result.done))

    def close(self) -> None:
        if self._client is not None:
            with contextlib.suppress(Exception):  # the connection may be gone already
                self._client.close()
            self._client = None
