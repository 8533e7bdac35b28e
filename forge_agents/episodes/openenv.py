"""An environment as a server of OpenEnv: each of its clients plays one agent, and players act for the others."""

from __future__ import annotations

import contextlib
import hmac
import queue
import re
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from forge_agents.envs import registry
from forge_agents.envs.env import hook, may_be_silent
from forge_agents.episodes.play import play
from forge_agents.errors import DISTRIBUTION, ArgumentError, MissingExtraError, PlayerLeftError, StallError
from forge_agents.policy import AnyPolicy, Policy, Random, Scripted
from forge_agents.runtime.connections import Server, http_settings, trust


@dataclass(frozen=True, slots=True)
class _Event:
    """What a client sees: an observation, or the end of the episode."""

    text: str
    reward: float = 0.0
    done: bool = False
    error: str = ""


@dataclass(slots=True, eq=False)
class _Seat:
    """The place of a client: events to it, None if another client took it; and its actions, None if it left."""

    agent: str
    seed: int | None = None
    instructions: str = ""
    events: queue.SimpleQueue[_Event | None] = field(default_factory=queue.SimpleQueue)
    actions: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)
    left: bool = False


class _Table:
    """An episode, played in a thread of its own when all clients have joined."""

    def __init__(self, env: Any, free: Sequence[str], players: Mapping[str, AnyPolicy], wait_s: float):
        self.env, self._wait_s = env, wait_s
        self.free, self.seats = set(free), dict[str, _Seat]()
        self._players = {**players, **dict.fromkeys(free, Scripted(self._ask, name="client"))}

    def join(self, agent: str, seed: int | None) -> _Seat:
        """Take the seat of an agent, also from a client that may have given up. The last one starts the episode."""
        for other in self.seats.values():
            if other.agent != agent and None not in (seed, other.seed) and seed != other.seed:
                raise ArgumentError(f"seed={seed}, but the client of {other.agent!r} reset with seed={other.seed}")
        if agent in self.seats:
            self.seats[agent].events.put(None)
        self.seats[agent] = seat = _Seat(agent, seed)
        self.free.discard(agent)
        if not self.free:
            threading.Thread(target=self._play, name="openenv-episode", daemon=True).start()
        return seat

    def leave(self, seat: _Seat) -> None:
        """Free the seat, or end the episode if it has begun."""
        if not self.free:
            seat.actions.put(None)
        elif self.seats.get(seat.agent) is seat:
            del self.seats[seat.agent]
            self.free.add(seat.agent)

    def _ask(self, observation: str, agent: str) -> str:
        seat, instructions = self.seats[agent], hook(self.env, "instructions")
        seat.instructions = "" if instructions is None else str(instructions(agent))
        if not seat.left:
            seat.events.put(_Event(observation))
            with contextlib.suppress(queue.Empty):
                if (action := seat.actions.get(timeout=self._wait_s)) is not None:
                    return action
            seat.left = True
        if may_be_silent(self.env):  # a client that leaves or waits before it loses does not take the others' win
            return ""
        raise PlayerLeftError(f"the client of {agent!r} left, or sent no action for {self._wait_s:g} s")

    def _play(self) -> None:
        rewards, error = dict[str, float](), ""
        seeds = [seat.seed for seat in self.seats.values() if seat.seed is not None]
        try:
            episode = play(self.env, self._players, seed=seeds[0] if seeds else secrets.randbelow(2**31))
            rewards = {agent: trajectory.reward for agent, trajectory in episode.trajectories.items()}
            error = "" if episode.error is None else f"{episode.error.kind}: {episode.error.message}"
        except Exception as cause:  # noqa: BLE001  # the clients wait for the end
            error = f"{type(cause).__name__}: {cause}"
        finally:
            with contextlib.suppress(Exception):
                self.env.close()
            for agent, seat in self.seats.items():
                seat.events.put(_Event("", reward=rewards.get(agent, 0.0), done=True, error=error))


class _Tables:
    """Brings the clients of an episode together."""

    def __init__(
        self, make: Callable[[], Any], clients: Sequence[str], players: Mapping[str, AnyPolicy], wait_s: float
    ):
        self._make, self.clients, self._players, self.wait_s = make, clients, players, wait_s
        self._waiting: dict[str, _Table] = {}
        self._lock = threading.Lock()

    def sit(self, agent: str | None, episode_id: str | None, seed: Any) -> tuple[_Table, _Seat]:
        """Take a seat in a new episode, or in the one with this id that waits for clients."""
        if len(self.clients) > 1 and not (agent and episode_id):
            raise ArgumentError(f"{len(self.clients)} clients play together. Reset each with agent and episode_id")
        agent, episode_id = agent or self.clients[0], episode_id or ""
        if agent not in self.clients:
            raise ArgumentError(f"agent={agent!r} is played by no client. Choose one of {', '.join(self.clients)}")
        if seed is not None and (not isinstance(seed, int) or seed < 0):
            raise ArgumentError(f"seed={seed!r:.80} must be a number from 0")
        with self._lock:
            table = self._waiting.get(episode_id) or _Table(self._make(), self.clients, self._players, self.wait_s)
            seat = table.join(agent, seed)
            self._waiting[episode_id] = table
            if not table.free:
                del self._waiting[episode_id]
        return table, seat

    def next(self, table: _Table, seat: _Seat) -> _Event:
        """Wait for what the client of a seat sees next."""
        try:  # all other clients may be slow, one after the other
            event = seat.events.get(timeout=self.wait_s * len(self.clients) + 60)
        except queue.Empty:
            self.leave(table, seat)
            raise StallError(f"nothing came for {seat.agent!r}: other clients did not join or act") from None
        if event is None:
            raise ArgumentError(f"another client took agent={seat.agent!r} of this episode")
        return event

    def leave(self, table: _Table, seat: _Seat) -> None:
        """Free the seat, or end the episode if it has begun."""
        with self._lock:
            table.leave(seat)
            if not table.seats:
                self._waiting = {name: each for name, each in self._waiting.items() if each is not table}
                table.env.close()


def openenv_app(
    env: str,
    *,
    token: str,
    clients: Sequence[str] | None = None,
    players: Mapping[str, AnyPolicy] | None = None,
    env_args: Mapping[str, Any] | None = None,
    timeout_s: float = 600.0,
    max_clients: int = 256,
) -> Any:
    """Return an application that serves an environment to clients of OpenEnv.

    An action is ``{"text": ...}``. An observation has ``text``, ``agent``, its ``instructions``, and ``error`` if the
    episode failed. The last one has ``done`` and the agent's total reward, earlier ones the reward 0. If there
    are several clients, each resets with the same ``episode_id`` and with ``agent``, the name of its agent. A client
    that resets for an agent whose client still waits for the others takes its place.

    The token is the first part of the path, because clients of OpenEnv take an address: ``http://HOST:PORT/TOKEN``.
    Requests without it are refused.

    Args:
        env: Id of the environment.
        token: 16 or more letters, digits, hyphens or underscores.
        clients: Agents that clients play. None: the first one.
        players: Players of the other agents. An agent without a player acts at random.
        env_args: Arguments of the environment.
        timeout_s: Maximum seconds in which a client must act, and all clients must join.
        max_clients: Maximum number of clients at the same time.

    Raises:
        MissingExtraError: The package openenv is not installed.
        ArgumentError: An agent does not exist, a player needs an engine, or the token is too short.
    """
    if not re.fullmatch(r"[\w-]{16,}", token, re.ASCII):
        raise ArgumentError(
            f"the token has {len(token)} characters. It needs 16 or more letters, digits, hyphens or underscores. "
            "Servers that `forge-agents init` wrote read it from OPENENV_TOKEN"
        )
    made = registry.make(env, **(env_args or {}))
    agents = list(made.possible_agents)
    made.close()
    clients, players = tuple(clients or agents[:1]), dict(players or {})
    for agent in (*clients, *players):
        if agent not in agents:
            raise ArgumentError(f"agent {agent!r} does not exist in {env}. Its agents are {', '.join(agents)}")
    for agent, player in players.items():
        if isinstance(player, Policy):
            raise ArgumentError(
                f"the player of {agent!r} needs an engine. Start it by `forge-agents serve`, and pass an Endpoint"
            )
    others = {agent: players.get(agent, Random()) for agent in agents if agent not in clients}
    tables = _Tables(lambda: registry.make(env, **(env_args or {})), clients, others, timeout_s)
    return _WithToken(_application(tables, max_clients), token)


def serve(app: _WithToken, *, port: int = 8000) -> None:
    """Serve the result of `openenv_app` to this machine until Ctrl-C, and print its address with the token."""
    config = uvicorn.Config(app, host="127.0.0.1", port=port, **{**http_settings(), "ws": "auto"})
    try:
        listener = config.bind_socket()
    except SystemExit:
        sys.exit(f"port {port} is in use. Choose another: python -m server.app PORT")
    sys.stdout.write(f"serving http://127.0.0.1:{port}/{app.token}\n")
    sys.stdout.flush()
    Server(config).run(sockets=[listener])


class _WithToken:
    """ASGI application that removes the token from the path, and refuses requests without it."""

    def __init__(self, app: Any, token: str) -> None:
        self._app, self.token = app, token

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        token, _, path = scope.get("path", "").removeprefix("/").partition("/")
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif hmac.compare_digest(token.encode(), self.token.encode()):
            trust(scope)
            await self._app({**scope, "path": f"/{path}", "raw_path": f"/{path}".encode()}, receive, send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 403, "headers": [(b"content-type", b"text/plain")]})
            await send({"type": "http.response.body", "body": b"the path must begin with the token"})


def _application(tables: _Tables, max_clients: int) -> Any:
    try:
        from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
    except ImportError as error:
        raise MissingExtraError(
            f"OpenEnv: {error}. Install the extra: pip install '{DISTRIBUTION}[openenv]'"
        ) from error

    class Text(Action):  # type: ignore[misc,unused-ignore]
        text: str

    class Seen(Observation):  # type: ignore[misc,unused-ignore]
        agent: str
        text: str = ""
        instructions: str = ""
        error: str = ""

    class Served(Environment):  # type: ignore[misc,unused-ignore]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self._table: _Table | None = None
            self._seat, self._state = _Seat(""), State(step_count=0)

        def reset(
            self, seed: int | None = None, episode_id: str | None = None, agent: str | None = None, **_: Any
        ) -> Seen:
            self.close()
            self._table, self._seat = tables.sit(agent, episode_id, seed)
            self._state = State(episode_id=episode_id, step_count=0)
            return self._next()

        def step(self, action: Text, timeout_s: float | None = None, **_: Any) -> Seen:
            if self._table is None:
                raise ArgumentError("there is no episode. Reset first")
            self._state.step_count += 1
            self._seat.actions.put(action.text)
            return self._next()

        @property
        def state(self) -> State:
            return self._state

        def close(self) -> None:
            if self._table is not None:
                tables.leave(self._table, self._seat)
                self._table = None

        def _next(self) -> Seen:
            table, self._table = self._table, None
            assert table is not None
            event = tables.next(table, self._seat)
            if not event.done:
                self._table = table
            return Seen(
                agent=self._seat.agent, text=event.text, instructions=self._seat.instructions, error=event.error,
                done=event.done, reward=event.reward,
            )  # fmt: skip

    return create_fastapi_app(Served, Text, Seen, max_concurrent_envs=max_clients)
