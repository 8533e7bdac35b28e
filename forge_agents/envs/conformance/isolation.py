"""The checks of `check_env` on what an episode depends on: its seed and actions alone, and no seat's on a secret.

In: a factory of environments, seeds. Out: a note, or nothing. Waits for one other process, with a deadline.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from forge_agents.envs.conformance.play import (
    BreachError,
    Make,
    NotApplicableError,
    Step,
    forked,
    instructions,
    line_of_method,
    live,
    look,
    own_files,
    play,
    same,
)
from forge_agents.envs.env import hook
from forge_agents.envs.spec import AnyEnv

_KEEP_STATE = "keep all state on the instance and draw every random number from the rng that setup is given"
_NO_GLOBALS = "draw from self.rng; the global generators are shared by all environments of the process"


def determinism(create: Make, seeds: range) -> None:
    """Same seed, same actions: same episode, in a fresh, a used and an interleaved environment."""
    reused = create()
    for seed in seeds:
        alone = list(play(create(), seed))
        same(f"seed {seed}, a fresh environment and a used one", alone, list(play(reused, seed)), _KEEP_STATE)
        beside = _interleaved(create(), create(), seed)
        same(f"seed {seed}, alone and beside another live environment", alone, beside, _KEEP_STATE)


def _interleaved(env: AnyEnv, other: AnyEnv, seed: int) -> list[Step]:
    """An episode of `env`, while `other` plays a different seed, step by step in turns."""
    steps = []
    neighbour = play(other, seed + 1_000_003)
    next(neighbour, None)
    for step in play(env, seed):
        steps.append(step)
        next(neighbour, None)
    return steps


# ---- global generators


def _global_states() -> dict[str, Any]:
    """The state of every global generator, in comparable form."""
    name, keys, *rest = tuple(np.random.get_state())  # noqa: NPY002  # the global one is what is looked at
    states: dict[str, Any] = {"random": random.getstate(), "numpy.random": (name, np.asarray(keys).tobytes(), *rest)}
    if torch := sys.modules.get("torch"):
        states["torch"] = bytes(torch.get_rng_state().numpy())
    return states


def _restore(states: dict[str, Any]) -> None:
    random.setstate(states["random"])
    name, keys, *rest = states["numpy.random"]
    np.random.set_state((name, np.frombuffer(keys, np.uint32), *rest))  # noqa: NPY002
    if "torch" in states:
        torch = sys.modules["torch"]
        torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))


def _reseed(salt: int) -> None:
    random.seed(salt)
    np.random.seed(salt)  # noqa: NPY002
    if torch := sys.modules.get("torch"):
        torch.random.default_generator.manual_seed(salt)


def global_randomness(create: Make, seeds: range, cls: type) -> None:
    """The process's own generators stay untouched, and nothing depends on them."""
    before = _global_states()
    try:
        for seed in seeds:
            played: list[list[Step]] = []
            for salt in (1, 2):
                _reseed(salt)
                states = _global_states()
                played.append(list(play(create(), seed)))
                after = _global_states()  # torch may have been imported on the way
                if used := [name for name in states if after[name] != states[name]]:
                    raise BreachError(
                        f"seed {seed}: the global generator of {' and '.join(used)} was used or seeded",
                        _NO_GLOBALS,
                        where=_line_that_draws(create, seed, cls),
                    )
            what = f"seed {seed}, with the global generators seeded in two ways"
            same(what, played[0], played[1], _NO_GLOBALS)
    finally:
        _restore(before)


def _line_that_draws(create: Make, seed: int, cls: type) -> str:
    """The first line of the environment's files after which a global generator has moved."""
    files, still = own_files(cls), _global_states()
    last, found = "", ""

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal last, found
        if found or frame.f_code.co_filename not in files:
            return None
        if last and any(_global_states()[name] != state for name, state in still.items()):
            found = last
            return None
        if event == "line":
            last = f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_qualname}"
        return trace

    tracer = sys.gettrace()
    sys.settrace(trace)
    try:
        for _ in play(create(), seed):
            pass
    finally:
        sys.settrace(tracer)
    return found or line_of_method(cls, "setup")


# ---- forks


def fork(create: Make, seeds: range) -> None:
    """A copy continues like the original, and apart from it: neither notices the other."""
    fix = "keep all state on the instance, in objects that copy.deepcopy copies (no open files, locks or module state)"
    for seed in seeds:
        whole = list(play(create(), seed))
        for at in sorted({0, len(whole) // 2, max(len(whole) - 2, 0)}):
            env = create()
            playing = play(env, seed)
            for _ in range(at + 1):
                next(playing, None)
            try:
                first, second = forked(env), forked(env)
                snapshot = env.snapshot() if hasattr(type(env), "snapshot") else None
            except Exception as error:
                raise BreachError(f"seed {seed}: copying: {type(error).__name__}: {error}", fix, "setup") from error
            ahead = list(play(first, seed, reset=False, start=at))
            same(f"seed {seed}, the original and its copy from step {at}", whole[at:], ahead, fix)
            rest = list(playing)  # the original plays on; it must not have noticed the fork
            same(f"seed {seed}, the original before and after a copy played from step {at}", whole[at + 1 :], rest, fix)
            behind = list(play(second, seed, reset=False, start=at))
            same(f"seed {seed}, a copy of step {at} and one left alone meanwhile", whole[at:], behind, fix)
            if snapshot is not None:
                env.restore(snapshot)
                again = list(play(env, seed, reset=False, start=at))
                same(f"seed {seed}, the original and its snapshot of step {at}", whole[at:], again, fix)


# ---- secrets


def leak(create: Make, seeds: range) -> None:
    """No agent reads a secret that nobody told it."""
    env = create()
    secrets = hook(env, "secrets")
    if secrets is None:
        raise NotApplicableError("no method secrets(agent)")
    for seed in seeds:
        said: list[str] = []
        for *_, action in play(env, seed):
            for agent in live(env):
                _must_not_read(env, agent, secrets(agent), said, seed)
            said.append(action)
    env.close()


def _must_not_read(env: AnyEnv, agent: str, secrets: list[str], said: list[str], seed: int) -> None:
    for method, text in (("instructions", instructions(env, agent)), ("observe_text", look(env, agent))):
        for secret in secrets:
            word = re.compile(rf"(?<!\w){re.escape(secret)}(?!\w)", re.IGNORECASE)
            if word.search(text) and not any(word.search(heard) for heard in said):
                raise BreachError(
                    f"seed {seed}: {agent!r} can read the secret {secret!r}", f"leave it out of {method}", method
                )


def information_sets(create: Make, seeds: range) -> None:
    """What an agent reads stays the same, to the letter, when only what it must not know becomes something else."""
    env = create()
    if hook(env, "swap_secrets") is None:
        raise NotApplicableError("no method swap_secrets(agent, rng)")
    changed = False
    for seed in seeds:
        for count, _ in enumerate(play(env, seed)):
            for agent in live(env):
                other = forked(env)
                hook(other, "swap_secrets")(agent, np.random.default_rng([seed, count]))
                for method, read in _READ.items():
                    was, became = read(env, agent), read(other, agent)
                    if was != became:
                        raise BreachError(
                            f"seed {seed}, step {count}: what {agent!r} reads depends on what it must not know: "
                            f"{_around(was, became)!r} becomes {_around(became, was)!r}",
                            f"let {method} use only what the agent knows",
                            method,
                        )
                changed = changed or _hidden(env, agent) != _hidden(other, agent)
                other.close()
    if not changed:
        fix = "let swap_secrets change what secrets(agent) names, or what the other seats see"
        raise BreachError("swap_secrets changed nothing in any episode", fix, "swap_secrets")


def _legal(env: AnyEnv, agent: str) -> str:
    tell = hook(env, "legal_actions")
    decides = env.agent_selection == agent or hasattr(env.unwrapped, "act_all")
    return str(list(tell(agent) or ())) if tell is not None and decides else ""


_READ: dict[str, Callable[[AnyEnv, str], str]] = {
    "instructions": instructions,
    "observe_text": look,
    "legal_actions": _legal,
}


def _hidden(env: AnyEnv, agent: str) -> tuple[list[str], list[str]]:
    secrets = hook(env, "secrets")
    others = [look(env, other) for other in live(env) if other != agent]
    return list(secrets(agent)) if secrets is not None else [], others


def _around(text: str, other: str) -> str:
    """The part of `text` where it begins to differ from `other`."""
    at = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return text[max(at - 20, 0) : at + 40]
