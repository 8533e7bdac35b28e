"""What runs in a worker process of `forge_agents.envs.workers.env`: environments by number, and a pipe.

In: commands. Out: an answer for each. Waits for commands; ends when nobody is left to send one.
"""

from __future__ import annotations

import copy
import os
import pickle
import select
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from forge_agents.envs.env import HOOKS, hook
from forge_agents.envs.spec import AnyEnv
from forge_agents.envs.workers._homes import knock
from forge_agents.envs.wrappers import build, turn_based

GRACE_S = 5.0
"""Seconds beyond its deadline after which a call ends this process, should nobody be left to kill it and should it hold
on to the interpreter."""
STATE = ("agents", "agent_selection", "rewards", "_cumulative_rewards", "terminations", "truncations", "infos")
"""PettingZoo's state of an episode, sent back with every answer that changes it."""

NOT_SHARED = {"snapshot", "restore"}
"""Methods that hand out the environment itself."""

_envs: dict[int, AnyEnv] = {}


def serve(place: str) -> None:
    """Obey until the other end of the pipe closes.

    Args:
        place: Of the pipe: a descriptor, or a door on another host; see `forge_agents.envs.workers._homes.Door`.
    """
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends a call that holds on to the interpreter, too
    pipe = Connection(int(place)) if place.isdigit() else knock(place)
    threading.Thread(target=_end_with, args=(pipe.fileno(),), daemon=True).start()
    while True:
        try:
            what, args, timeout_s = pickle.loads(pipe.recv_bytes())  # noqa: S301  # from our own parent
        except (EOFError, OSError):
            os._exit(0)  # whatever threads an environment has left
        signal.setitimer(signal.ITIMER_REAL, timeout_s + GRACE_S)
        answer = _answer(_COMMANDS[what], args)
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send_bytes(answer)


def _end_with(descriptor: int) -> None:
    """End this process and what it started when the other end of the pipe closes, whatever goes on here."""
    watch = select.poll()
    watch.register(descriptor, select.POLLRDHUP)
    watch.poll()
    os.killpg(0, signal.SIGKILL)


def _answer(command: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((True, command(*args)))
    except Exception as error:  # noqa: BLE001  # what an environment raises is raised again in the parent
        if isinstance(error, StopIteration):
            error = RuntimeError(f"the environment raised StopIteration({error})")  # which no future can carry
        error.add_note(f"In a worker process:\n{traceback.format_exc()}")
        try:
            packed = pickle.dumps((False, error))
            pickle.loads(packed)  # noqa: S301  # some exceptions can be packed but not unpacked
        except Exception:  # noqa: BLE001  # an exception may hold anything
            return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))
        return packed


def _describe(packed_spec: bytes) -> dict[str, Any]:
    env = turn_based(build(pickle.loads(packed_spec)))  # noqa: S301  # from our own parent
    agents = list(env.possible_agents)
    names = {name for name in dir(env) if not name.startswith("_")} - NOT_SHARED
    found = {
        "possible_agents": agents,
        "metadata": dict(env.metadata),
        "render_mode": getattr(env, "render_mode", None),
        "observation_spaces": {agent: env.observation_space(agent) for agent in agents},
        "action_spaces": {agent: env.action_space(agent) for agent in agents},
        "methods": {
            *(name for name in names if callable(getattr(env, name, None))),
            *(name for name in HOOKS if hook(env, name) is not None),
        },
    }
    env.close()
    return found


def _build(slot: int, packed_spec: bytes) -> None:
    _envs[slot] = turn_based(build(pickle.loads(packed_spec)))  # noqa: S301  # from our own parent


def _reset(slot: int, seed: int | None, options: dict[str, Any] | None) -> dict[str, Any]:
    _envs[slot].reset(seed=seed, options=options)
    return _state(slot)


def _step(slot: int, action: Any) -> dict[str, Any]:
    _envs[slot].step(action)
    return _state(slot)


def _state(slot: int) -> dict[str, Any]:
    env = _envs[slot]
    state = {name: getattr(env, name) for name in STATE}
    return {**state, "seen": env.observe(env.agent_selection) if env.agents else None}


def _fork(slot: int, new: int) -> None:
    _envs[new] = copy.deepcopy(_envs[slot])


def _call(slot: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    env = _envs[slot]
    return (hook(env, name) if name in HOOKS else getattr(env, name))(*args, **kwargs)


def _get(slot: int, name: str) -> Any:
    return getattr(_envs[slot], name)


def _close(slot: int) -> None:
    env = _envs.pop(slot, None)
    if env is not None:
        env.close()


_COMMANDS: dict[str, Callable[..., Any]] = {
    "describe": _describe,
    "build": _build,
    "reset": _reset,
    "step": _step,
    "fork": _fork,
    "call": _call,
    "get": _get,
    "close": _close,
}
