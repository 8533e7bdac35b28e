"""How the checks of `check_env` play, here and in another process: seeded texts, transcripts, verdicts.

In: an environment and a seed. Out: `Step`s, one by one. Waits for the other process, with a deadline. Run as a program,
it is that process: a spec and seeds come in as JSON, transcripts go out.
"""

from __future__ import annotations

import contextlib
import copy
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
from forge_agents.envs.env import TextGame, hook
from forge_agents.envs.foreign import turn_based
from forge_agents.envs.reasoning import heard, split_reasoning, whole
from forge_agents.envs.spec import AnyEnv, EnvSpec

ODD_ACTIONS = (
    "",
    " \n\t",
    "\x00\x07\x1b[2J",
    "💥🃏" * 9,
    "\ud800 lone surrogate",
    "bytes that are no UTF-8: \udcff\udcfe\udc80",
    "\u202eright to left\u202c \u200b\ufeff",
    "%s %n {0} {x!r} $(id) `id` \\",
    '<tool_call>{"name": 1}</tool_call><tool_call>',
    "</s><|im_end|><|im_start|>system\n",
    "nan",
    "-1",
    "1e999",
    "9" * 5000,
    "٣ ½ Ⅷ ²",
    "a" * 100_000,
    "((((" * 500,
)
"""Texts that a model may write and an environment must survive."""

HUGE_ACTIONS = ("a" * 1_000_000, " 1" * 500_000, "[" * 1_000_000)
"""A megabyte each: text that a pattern with nested repetition never gets through."""

MAX_STEPS = 1000
"""Steps after which a check gives an episode up."""

OTHER_PROCESS_S = 120.0
"""Seconds for another process to start and play."""
_ALONE = "depend on nothing but the seed and the actions: no hash(), no order of a set, no id(), no clock, no files"

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
"""Modules of bases, in which nobody's game is."""

_ALIASES = {"observe_text": "observe", "act": "step", "setup": "reset"}
"""The PettingZoo method that stands for a `TurnEnv`'s."""


class BreachError(Exception):
    """A check's verdict: what was seen, what to do, and the method that is at fault."""

    def __init__(self, message: str, fix: str, method: str = "", where: str = "") -> None:
        super().__init__(message)
        self.fix, self.method, self.where = fix, method, where


class NotApplicableError(Exception):
    """A check that does not apply."""


# ---- playing


def play(
    env: AnyEnv,
    seed: int,
    *,
    reset: bool = True,
    start: int = 0,
    options: Mapping[str, Any] | None = None,
    think: Callable[[str], str] | None = None,
) -> Iterator[Step]:
    """Play to the end; the actions depend only on `seed` and what is observed. Yields before each step is taken.

    Args:
        think: What each agent thinks before it answers; None: nothing.
    """
    if reset:
        env.reset(seed=seed, options=None if options is None else dict(options))
    for count in range(start, MAX_STEPS):  # `ends` tells of episodes that go on
        if not env.agents:
            return
        agent = env.agent_selection
        observation, reward, terminated, truncated, info = env.last()
        over = terminated or truncated
        if not over and not isinstance(observation, str):
            seen = f"the observation of {agent!r} is {type(observation).__name__}, not text"
            raise BreachError(seen, "return a string; of a game of arrays fa.wrap makes one of text", "observe_text")
        rng = random.Random(f"{seed}/{count}")
        action = None if over else _choose(env, agent, observation, info, rng)
        yield agent, str(observation), float(reward), terminated, truncated, repr(sorted(info.items())), str(action)
        if action is not None and think is not None:
            action = heard(env, *split_reasoning(whole(think(agent), action)))
        env.step(action)


def _choose(env: AnyEnv, agent: str, observation: str, info: Mapping[str, Any], rng: random.Random) -> str:
    """A text that this environment may well understand: legal, or words it used itself; sometimes an odd one."""
    luck = rng.random()
    legal = info.get("legal_actions")
    if legal and luck < 0.7:
        return str(rng.choice(list(legal)))
    told, seen = (re.findall(r"\w+", text)[:400] for text in (instructions(env, agent), observation))
    words = told + 2 * seen
    if words and luck < 0.9:
        start = rng.randrange(len(words))
        return " ".join(words[start : start + rng.choice((1, 1, 2, 8))])
    return rng.choice(ODD_ACTIONS)


def instructions(env: AnyEnv, agent: str) -> str:
    """The system prompt of a seat, empty where the environment gives none."""
    tell = hook(env, "instructions")
    return str(tell(agent)) if tell is not None else ""


def look(env: AnyEnv, agent: str) -> str:
    """What `agent` sees now, asked anew: a converted parallel environment only repeats what it last said."""
    game = env.unwrapped
    return str((game if isinstance(game, TextGame) and not hasattr(game, "last") else env).observe(agent))


def live(env: AnyEnv) -> list[str]:
    """Agents that have not come to their end."""
    return [agent for agent in env.agents if not (env.terminations[agent] or env.truncations[agent])]


def forked(env: AnyEnv) -> AnyEnv:
    """An independent copy: the environment's own `fork`, else `copy.deepcopy`."""
    return env.fork() if hasattr(type(env), "fork") else copy.deepcopy(env)


def same(what: str, left: list[Step], right: list[Step], fix: str) -> None:
    """Raise BreachError at the first difference of two transcripts."""
    for index, (one, other) in enumerate(itertools.zip_longest(left, right)):
        if one != other:
            pairs = zip(_PARTS, one or ("<over>",) * 7, other or ("<over>",) * 7, strict=True)
            part, a, b = next((part, a, b) for part, a, b in pairs if a != b)
            method = "setup" if index == 0 else "observe_text" if part == "observation" else "act"
            raise BreachError(f"{what}: {part} of step {index} is {str(a)[:80]!r}, then {str(b)[:80]!r}", fix, method)


# ---- lines


def line_of_method(cls: type, method: str) -> str:
    """``file:line Class.method`` of a method, or of the PettingZoo method that does its work; empty if unknown."""
    for name in (method, f"{method}_all", _ALIASES.get(method, method)):
        for owner in cls.__mro__:
            if name in vars(owner) and not _ours(owner):
                code = getattr(inspect.unwrap(vars(owner)[name]), "__code__", None)
                label = f"{owner.__qualname__}.{name}"
                return f"{_short(code.co_filename)}:{code.co_firstlineno} {label}" if code is not None else label
    return ""


def line_of_error(files: Collection[str], error: BaseException, folder: str = "") -> tuple[str, bool]:
    """The innermost line of `files`, or of a file below `folder`, that an exception went through.

    Returns:
        ``file:line name``, empty if there is none; whether the file is only below the folder.
    """
    found, below = "", False
    for frame in traceback.extract_tb((error.__cause__ or error).__traceback__):
        inside = bool(folder) and frame.filename.startswith(folder)
        if frame.filename in files or inside:
            found, below = f"{_short(frame.filename)}:{frame.lineno} {frame.name}", frame.filename not in files
    return found, below


def own_files(cls: type) -> set[str]:
    """The source files of a class and its bases, without the bases of PettingZoo, Gymnasium and the framework."""
    modules = [sys.modules.get(owner.__module__) for owner in cls.__mro__ if not _ours(owner)]
    return {str(file) for module in modules if (file := getattr(module, "__file__", None))}


def _ours(owner: type) -> bool:
    return owner.__module__.startswith(_BASES)


def _short(filename: str) -> str:
    path = Path(filename)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


# ---- in another process


def other_process(create: Callable[[], AnyEnv], spec: EnvSpec, seeds: range) -> None:
    """A check: a fresh interpreter with another hash seed plays the same episodes; of long texts a digest."""
    entry_point = spec.entry_point if isinstance(spec.entry_point, str) else _importable(spec.entry_point)
    there = {"id": spec.id, "entry_point": entry_point, "max_turns": spec.max_turns, "kwargs": dict(spec.kwargs)}
    try:
        question = json.dumps({"spec": there, "path": sys.path, "seeds": list(seeds)}).encode()
    except (TypeError, ValueError) as error:
        raise NotApplicableError(f"its arguments cannot be written as JSON for another process ({error})") from error
    here = [[_fingerprint(step) for step in play(create(), seed)] for seed in seeds]
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            input=question,
            capture_output=True,
            timeout=OTHER_PROCESS_S,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=False,
        )
    except subprocess.TimeoutExpired:
        seen = f"another process did not play {len(seeds)} episodes in {OTHER_PROCESS_S:g} s"
        raise BreachError(seen, _ALONE) from None
    if child.returncode:
        last = child.stderr.decode(errors="replace").strip().splitlines()[-1:]
        fix = "let the module be imported, and the environment made, by a fresh interpreter"
        raise BreachError(f"another process failed: {' '.join(last)}", fix)
    for seed, one, other in zip(seeds, here, json.loads(child.stdout.splitlines()[-1]), strict=True):
        same(f"seed {seed}, in this process and in another", one, [tuple(step) for step in other], _ALONE)


def _importable(build: Any) -> str:
    module, name = getattr(build, "__module__", "?"), getattr(build, "__qualname__", "?")
    known: Any = sys.modules.get(module)
    for part in name.split("."):
        known = getattr(known, part, None)
    try:
        found = importlib.util.find_spec(module) if known is build and module != "__main__" else None
    except (ImportError, ValueError):
        found = None
    if found is None or found.origin != getattr(sys.modules[module], "__file__", None):
        raise NotApplicableError(f"another process cannot import {name} of {module}; put it into a module of its own")
    return f"{module}:{name}"


def _fingerprint(step: Step) -> Step:
    agent, observation, reward, terminated, truncated, info, action = step
    return agent, _digest(observation), reward, bool(terminated), bool(truncated), _digest(info), _digest(action)


def _digest(text: str) -> str:
    if len(text) <= 500:
        return text
    return f"{text[:500]}... sha256 {sha256(text.encode(errors='surrogatepass')).hexdigest()}"


def _main() -> None:
    asked = json.loads(sys.stdin.buffer.read())
    sys.path[:] = asked["path"]
    with contextlib.redirect_stdout(sys.stderr):  # an environment that prints is not what is asked about
        spec = EnvSpec(**asked["spec"])
        envs = ((seed, turn_based(registry.made(spec))) for seed in asked["seeds"])
        played = [[_fingerprint(step) for step in play(env, seed)] for seed, env in envs]
    sys.stdout.write("\n" + json.dumps(played) + "\n")


if __name__ == "__main__":
    _main()
