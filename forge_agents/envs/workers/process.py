"""What runs in a worker process: environments by number, each played by calls of one actor.

In: commands. Out: a packed answer for each. Waits for nothing; ends with whoever started it.
"""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import traceback
from contextlib import suppress
from typing import Any

from forge_agents.envs.env import HOOKS, hook, sides_of
from forge_agents.envs.foreign import turn_based
from forge_agents.envs.spec import AnyEnv
from forge_agents.envs.wrappers import build

STATE = ("agents", "agent_selection", "rewards", "_cumulative_rewards", "terminations", "truncations", "infos")
"""PettingZoo's state of an episode, sent back with every answer that changes it."""
NOT_SHARED = {"snapshot", "restore"}
"""Methods that hand out the environment itself."""


class Environments:
    """The environments of one process; an episode and its forks have a number each."""

    def __init__(self) -> None:
        self._envs: dict[int, AnyEnv] = {}

    def answer(self, what: str, *args: Any) -> bytes:
        """Do `what`, such as reset or step; packs True and the result, or False and what the environment raised."""
        try:
            return pickle.dumps((True, getattr(self, f"_{what}")(*args)))
        except Exception as error:  # noqa: BLE001  # what an environment raises is raised again by who called
            if isinstance(error, StopIteration):
                error = RuntimeError(f"the environment raised StopIteration({error})")  # which no future can carry
            error.add_note(f"In a worker process:\n{traceback.format_exc()}")
            try:
                packed = pickle.dumps((False, error))
                pickle.loads(packed)  # noqa: S301  # some exceptions can be packed but not unpacked
            except Exception:  # noqa: BLE001  # an exception may hold anything
                return pickle.dumps((False, RuntimeError(f"{type(error).__name__}: {error}")))
            return packed

    def _build(self, slot: int, packed_spec: bytes) -> None:
        self._envs[slot] = _made(packed_spec)

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
        """What is known of an environment that nobody plays yet."""
        env = _made(packed_spec)
        agents = list(env.possible_agents)
        names = {name for name in dir(env) if not name.startswith("_")} - NOT_SHARED
        found = {
            "possible_agents": agents,
            "metadata": dict(env.metadata),
            "render_mode": getattr(env, "render_mode", None),
            "observes_reasoning": hook(env, "observes_reasoning") is True,
            "sides": sides_of(env),
            "observation_spaces": {agent: env.observation_space(agent) for agent in agents},
            "action_spaces": {agent: env.action_space(agent) for agent in agents},
            "methods": {
                *(name for name in names if callable(getattr(env, name, None))),
                *(name for name in HOOKS if hook(env, name) is not None),
            },
        }
        env.close()
        return found

    def _state(self, slot: int) -> dict[str, Any]:
        env = self._envs[slot]
        state = {name: getattr(env, name) for name in STATE}
        return {**state, "seen": env.observe(env.agent_selection) if env.agents else None}


def _made(packed_spec: bytes) -> AnyEnv:
    return turn_based(build(pickle.loads(packed_spec)))  # noqa: S301  # from our own controller


def describe_here() -> None:
    """In a process of its own: read a packed spec from the standard input, and write what `describe` answers."""
    # what environments print is no part of the answer, and what they start must not hold its pipe open
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)
        end_children_with_this_process()
        answer.write(Environments().answer("describe", sys.stdin.buffer.read()))


def end_children_with_this_process() -> None:
    """However this process ends, what its environments have started ends with it."""
    with suppress(PermissionError):  # it leads a session, and so a group, already
        os.setpgid(0, 0)
    ours, _ = os.pipe()  # the kernel closes the other end, which no child inherits, when this process is gone
    subprocess.Popen(
        ["/bin/sh", "-c", "read _; kill -9 -$0", str(os.getpid())],
        stdin=ours,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(ours)
