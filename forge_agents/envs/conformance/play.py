"""Seeded play for the checks of `check_env`, in this process and in another one.

As a program, this module reads a spec and seeds as JSON, plays them and writes transcripts.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import itertools
import json
import os
import random
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

from forge_agents.envs import registry
from forge_agents.envs.env import TextGame, hook, listed_actions, visible_action
from forge_agents.envs.foreign import turn_based
from forge_agents.envs.reasoning import join_reasoning, split_reasoning
from forge_agents.envs.spec import AnyEnv, EnvSpec

ODD_ACTIONS = (
    "", " \n\t", "\x00\x07\x1b[2J", "💥🃏" * 9, "\ud800 lone surrogate", "bytes that are no UTF-8: \udcff\udcfe\udc80",
    "\u202eright to left\u202c \u200b\ufeff", "%s %n {0} {x!r} $(id) `id` \\",
    '<tool_call>{"name": 1}</tool_call><tool_call>', "</s><|im_end|><|im_start|>system\n", "nan", "-1", "1e999",
    "9" * 5000, "٣ ½ Ⅷ ²", "a" * 100_000, "((((" * 500,
)  # fmt: skip
"""Unusual texts that an environment must handle."""

HUGE_ACTIONS = ("a" * 1_000_000, " 1" * 500_000, "[" * 1_000_000)
"""Texts of a megabyte to expose regular expressions with nested repetition."""

MAX_STEPS = 1000
"""Maximum number of steps per episode."""

OTHER_PROCESS_S = 120.0
"""Maximum seconds for another process to start and play."""
_NO_OUTSIDE_STATE = "use nothing but the seed and the actions: no hash(), set order, id(), clock or files"

Step: TypeAlias = tuple[str, str, float, bool, bool, str, str]
"""Agent, observation, reward, terminated, truncated, info as text, action."""
_PARTS = ("agent", "observation", "reward", "terminated", "truncated", "info", "action")

_BASES = (
    "builtins",
    "typing",
    "forge_agents.envs.env",
    "forge_agents.envs.foreign",
    "forge_agents.envs.wrappers",
    "gymnasium.core",
    "gymnasium.utils",
    "pettingzoo.utils",
)
"""Modules of base classes that are not at fault."""

_ALIASES = {"observe_text": "observe", "act": "step", "setup": "reset"}
"""PettingZoo's methods that correspond to those of a `TurnEnv`."""


class BreachError(Exception):
    """A failed check: message, remedy, and the method at fault."""

    def __init__(self, message: str, fix: str, method: str = "", where: str = "") -> None:
        super().__init__(message)
        self.fix, self.method, self.where = fix, method, where


class NotApplicableError(Exception):
    """The check does not apply to the environment."""


# ---- playing


def play(
    env: AnyEnv,
    seed: int,
    *,
    reset: bool = True,
    start: int = 0,
    options: Mapping[str, Any] | None = None,
    reason: Callable[[str], str] | None = None,
) -> Iterator[Step]:
    """Play an episode with actions that depend only on `seed` and the observations. Yields before each step.

    Args:
        env: Turn-based environment.
        seed: Seed of the episode and of the actions.
        reset: Whether to reset `env` first.
        start: Number of the first step.
        options: Options of the reset.
        reason: Function that returns an agent's reasoning before its answer. None: no reasoning.
    """
    if reset:
        env.reset(seed=seed, options=None if options is None else dict(options))
    for count in range(start, MAX_STEPS):  # the check `ends` reports longer episodes
        if not env.agents:
            return
        agent = env.agent_selection
        try:
            observation, reward, terminated, truncated, info = env.last()
        except KeyError as error:
            if agent in env.agents:
                raise
            message = f"agent_selection is {agent!r}, which has left. The agents are {env.agents}"
            raise BreachError(message, "select one of env.agents at the end of step()", "act") from error
        over = terminated or truncated
        if not over and not isinstance(observation, str):
            message = f"the observation of {agent!r} is {type(observation).__name__}, not text"
            raise BreachError(message, "return a string. fa.wrap adapts array games to text", "observe_text")
        rng = random.Random(f"{seed}/{count}")
        action = None if over else _choose(env, agent, observation, info, rng)
        yield agent, str(observation), float(reward), terminated, truncated, repr(sorted(info.items())), str(action)
        if action is not None and reason is not None:
            action = visible_action(env, *split_reasoning(join_reasoning(reason(agent), action)))
        env.step(action)


def _choose(env: AnyEnv, agent: str, observation: str, info: Mapping[str, Any], rng: random.Random) -> str:
    """Return a legal action or words from the texts of the environment, and sometimes an odd text."""
    kind = rng.random()
    if (legal := listed_actions(info)) and kind < 0.7:
        return rng.choice(legal)
    words = _words(instructions(env, agent)) + 2 * _words(observation)
    if words and kind < 0.9:
        start = rng.randrange(len(words))
        return " ".join(words[start : start + rng.choice((1, 1, 2, 8))])
    return rng.choice(ODD_ACTIONS)


@functools.lru_cache(maxsize=64)  # instructions are those of the step before
def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text)[:400])


def instructions(env: AnyEnv, agent: str) -> str:
    """Return the system prompt of an agent, or an empty string."""
    method = hook(env, "instructions")
    text = "" if method is None else method(agent)
    if not isinstance(text, str):
        message = f"the result of instructions({agent!r}) is {type(text).__name__}, not text"
        raise BreachError(message, "return a string", "instructions")
    return text


def look(env: AnyEnv, agent: str) -> str:
    """Return a fresh observation. A converted parallel environment would repeat the last one."""
    game = env.unwrapped
    return str((game if isinstance(game, TextGame) and not hasattr(game, "last") else env).observe(agent))


def same(what: str, left: list[Step], right: list[Step], fix: str) -> None:
    """Raise BreachError at the first difference between two transcripts."""
    for index, (step, other) in enumerate(itertools.zip_longest(left, right)):
        if step != other:
            pairs = zip(_PARTS, step or ("<over>",) * 7, other or ("<over>",) * 7, strict=True)
            differences = [each for each in pairs if each[1] != each[2] and not str(each[1]) == str(each[2]) == "nan"]
            if not differences:
                continue
            part, a, b = differences[0]
            method = "setup" if index == 0 else "observe_text" if part == "observation" else "act"
            raise BreachError(f"{what}: {part} of step {index} is {str(a)[:80]!r}, then {str(b)[:80]!r}", fix, method)


# ---- source lines


def line_of_method(cls: type, method: str) -> str:
    """Return ``file:line Class.method`` of a method or of its PettingZoo counterpart. Empty if unknown."""
    for name in (method, f"{method}_all", _ALIASES.get(method, method)):
        for owner in cls.__mro__:
            if name in vars(owner) and not _is_library(owner):
                code = getattr(inspect.unwrap(vars(owner)[name]), "__code__", None)
                label = f"{owner.__qualname__}.{name}"
                return f"{_short(code.co_filename)}:{code.co_firstlineno} {label}" if code is not None else label
    return ""


def line_of_error(files: Collection[str], error: BaseException, folder: str = "") -> tuple[str, bool]:
    """Return the innermost line of an error in `files` or below `folder`, and whether it is only below the folder."""
    line, in_folder_only = "", False
    for frame in traceback.extract_tb((error.__cause__ or error).__traceback__):
        in_folder = bool(folder) and frame.filename.startswith(folder)
        if frame.filename in files or in_folder:
            line, in_folder_only = f"{_short(frame.filename)}:{frame.lineno} {frame.name}", frame.filename not in files
    return line, in_folder_only


def own_files(cls: type) -> set[str]:
    """Return the source files of a class and its bases, without those of PettingZoo, Gymnasium and this framework."""
    modules = [sys.modules.get(owner.__module__) for owner in cls.__mro__ if not _is_library(owner)]
    return {str(file) for module in modules if (file := getattr(module, "__file__", None))}


def _is_library(owner: type) -> bool:
    return owner.__module__.startswith(_BASES)


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


# ---- in another process


def other_process(create: Callable[[], AnyEnv], spec: EnvSpec, seeds: range) -> None:
    """Check that a fresh interpreter with another hash seed plays the same episodes."""
    entry_point = spec.entry_point if isinstance(spec.entry_point, str) else _importable(spec.entry_point)
    fields = {"id": spec.id, "entry_point": entry_point, "max_turns": spec.max_turns, "kwargs": dict(spec.kwargs)}
    try:
        request = json.dumps({"spec": fields, "path": sys.path, "seeds": list(seeds)}).encode()
    except (TypeError, ValueError) as error:
        raise NotApplicableError(f"its arguments cannot be written as JSON for another process ({error})") from error
    here = [[_fingerprint(step) for step in play(create(), seed)] for seed in seeds]
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            input=request,
            capture_output=True,
            timeout=OTHER_PROCESS_S,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=False,
        )
    except subprocess.TimeoutExpired:
        message = f"another process did not play {len(seeds)} episodes in {OTHER_PROCESS_S:g} s"
        raise BreachError(message, _NO_OUTSIDE_STATE) from None
    if child.returncode:
        last = child.stderr.decode(errors="replace").strip().splitlines()[-1:]
        fix = "make sure that a fresh interpreter can import the module and make the environment"
        raise BreachError(f"another process failed: {' '.join(last)}", fix)
    for seed, steps, others in zip(seeds, here, json.loads(child.stdout.splitlines()[-1]), strict=True):
        what = f"seed {seed}, in this process and in another"
        same(what, steps, [tuple(step) for step in others], _NO_OUTSIDE_STATE)


def _importable(build: Any) -> str:
    module, name = getattr(build, "__module__", "?"), getattr(build, "__qualname__", "?")
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    try:
        module_spec = importlib.util.find_spec(module) if value is build and module != "__main__" else None
    except (ImportError, ValueError):
        module_spec = None
    if module_spec is None or module_spec.origin != getattr(sys.modules[module], "__file__", None):
        raise NotApplicableError(f"another process cannot import {name} of {module}. Move it to a module of its own")
    return f"{module}:{name}"


def _fingerprint(step: Step) -> Step:
    agent, observation, reward, terminated, truncated, info, action = step
    return agent, _digest(observation), reward, bool(terminated), bool(truncated), _digest(info), _digest(action)


def _digest(text: str) -> str:
    if len(text) <= 500:
        return text
    return f"{text[:500]}... sha256 {sha256(text.encode(errors='surrogatepass')).hexdigest()}"


def _main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    sys.path[:] = request["path"]
    with contextlib.redirect_stdout(sys.stderr):  # prints of the environment must not mix with the result
        spec = EnvSpec(**request["spec"])
        envs = ((seed, turn_based(registry.make_from_spec(spec))) for seed in request["seeds"])
        played = [[_fingerprint(step) for step in play(env, seed)] for seed, env in envs]
    sys.stdout.write("\n" + json.dumps(played) + "\n")


if __name__ == "__main__":
    _main()
