"""Environments inside a worker process, addressed by slot number."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import traceback
from contextlib import suppress
from typing import Any

from forge_agents.envs.env import HOOKS, acts_together, can_fork, hook, sides_of
from forge_agents.envs.foreign import turn_based
from forge_agents.envs.spec import AnyEnv
from forge_agents.envs.wrappers import build
from forge_agents.imports import take_restrictions

STATE = ("agents", "agent_selection", "rewards", "_cumulative_rewards", "terminations", "truncations", "infos")
"""PettingZoo's state of an episode, sent with every answer that changes it."""
NOT_SHARED = {"snapshot", "restore"}
"""Methods that are not available outside, because they expose the environment itself."""


class Environments:
    """The environments of one process: an episode and its forks, by slot."""

    def __init__(self) -> None:
        self._envs: dict[int, AnyEnv] = {}

    def answer(self, what: str, *args: Any) -> bytes:
        """Run a command such as ``"step"``. Returns a pickled ``(True, result)`` or ``(False, error)``."""
        try:
            return pickle.dumps((True, getattr(self, f"_{what}")(*args)))
        except Exception as error:  # noqa: BLE001  # the caller raises it again
            if isinstance(error, StopIteration):
                error = RuntimeError(f"the environment raised StopIteration({error})")  # futures cannot carry it
            error.add_note(f"In a worker process:\n{traceback.format_exc()}")
            try:
                packed = pickle.dumps((False, error))
                pickle.loads(packed)  # noqa: S301  # some exceptions can be pickled but not unpickled
            except Exception:  # noqa: BLE001  # exceptions may have any attributes
                return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))
            return packed

    def _build(self, slot: int, packed_spec: bytes) -> None:
        self._envs[slot] = _unpack(packed_spec)

    def _reset(self, slot: int, seed: int | None, options: dict[str, Any] | None) -> dict[str, Any]:
        self._envs[slot].reset(seed=seed, options=options)
        return self._state(slot)

    def _step(self, slot: int, action: Any) -> dict[str, Any]:
        self._envs[slot].step(action)
        return self._state(slot)

    def _fork(self, slot: int, new: int) -> None:
        self._envs[new] = copy.deepcopy(self._envs[slot])

    def _call(self, slot: int, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        env = self._envs[slot]
        return (hook(env, name) if name in HOOKS else getattr(env, name))(*args, **kwargs)

    def _get(self, slot: int, name: str) -> Any:
        return getattr(self._envs[slot], name)

    def _close(self, slot: int) -> None:
        env = self._envs.pop(slot, None)
        if env is not None:
            env.close()

    def _describe(self, packed_spec: bytes) -> dict[str, Any]:
        """Return the static properties of an environment."""
        env = _unpack(packed_spec)
        agents = list(env.possible_agents)
        names = {name for name in dir(env) if not name.startswith("_")} - NOT_SHARED
        description = {
            "possible_agents": agents,
            "metadata": dict(env.metadata),
            "render_mode": getattr(env, "render_mode", None),
            **{name: hook(env, name) is True for name in ("observes_reasoning", "judges_silence")},
            "sides": sides_of(env),
            "can_fork": can_fork(env),
            "acts_together": acts_together(env),
            "observation_spaces": {agent: env.observation_space(agent) for agent in agents},
            "action_spaces": {agent: env.action_space(agent) for agent in agents},
            "methods": {
                *(name for name in names if callable(getattr(env, name, None))),
                *(name for name in HOOKS if hook(env, name) is not None),
            },
        }
        env.close()
        return description

    def _state(self, slot: int) -> dict[str, Any]:
        env = self._envs[slot]
        state = {name: getattr(env, name) for name in STATE}
        return {**state, "seen": env.observe(env.agent_selection) if env.agents else None}


def _unpack(packed_spec: bytes) -> AnyEnv:
    of_parent, spec = pickle.loads(packed_spec)  # noqa: S301  # sent by our own controller
    take_restrictions(of_parent)  # an environment may import what its arguments name
    return turn_based(build(spec))


def describe_here() -> None:
    """Read a packed spec from standard input and write its description to standard output. A process's main program."""
    # Prints of environments must not mix with the answer, and processes they start must not hold its pipe open.
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)
        end_children_with_this_process()
        answer.write(Environments().answer("describe", sys.stdin.buffer.read()))


def end_children_with_this_process() -> None:
    """Start a watcher that kills the process group of this process when this process ends in any way."""
    with suppress(PermissionError):  # this process already leads a session, and so a group
        os.setpgid(0, 0)
    # No child inherits the write end, so the kernel closes it when this process ends, and the watcher reads EOF.
    read_end, _ = os.pipe()
    subprocess.Popen(
        ["/bin/sh", "-c", "read _; kill -9 -$0", str(os.getpid())],
        stdin=read_end,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(read_end)
