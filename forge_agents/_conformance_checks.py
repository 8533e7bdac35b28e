"""The single checks of `check_env`: each plays fresh environments and raises `BreachError` at a breach.

In: a factory of environments, seeds. Out: a note, or nothing. Waits for nothing.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import math
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np

from forge_agents.registry import AnyEnv

ODD_ACTIONS = (
    "",
    " \n\t",
    "\x00\x07\x1b[2J",
    "💥🃏" * 9,
    "\ud800 lone surrogate",
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

MAX_STEPS = 1000
"""Steps after which a check gives an episode up."""


class BreachError(Exception):
    """A check's verdict: what was seen and what to do."""

    def __init__(self, message: str, fix: str) -> None:
        super().__init__(message)
        self.fix = fix


class NotApplicableError(Exception):
    """A check that does not apply."""


Make: TypeAlias = Callable[[], AnyEnv]
Step: TypeAlias = tuple[str, str, float, bool, bool, str, str]
"""Agent, observation, reward, terminated, truncated, info as text, action."""


# ---- playing


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text)[:400]


def _choose(env: AnyEnv, agent: str, observation: str, info: Mapping[str, Any], rng: random.Random) -> str:
    """A text that this environment may well understand: legal, or words it used itself; sometimes an odd one."""
    luck = rng.random()
    legal = info.get("legal_actions")
    if legal and luck < 0.7:
        return str(rng.choice(list(legal)))
    words = _words(_instructions(env, agent)) + 2 * _words(observation)
    if words and luck < 0.9:
        start = rng.randrange(len(words))
        return " ".join(words[start : start + rng.choice((1, 1, 2, 8))])
    return rng.choice(ODD_ACTIONS)


def _instructions(env: AnyEnv, agent: str) -> str:
    return str(env.instructions(agent)) if hasattr(env, "instructions") else ""


def _play(env: AnyEnv, seed: int, *, reset: bool = True, start: int = 0) -> Iterator[Step]:
    """Play to the end; the actions depend only on `seed` and what is observed. Yields before each step is taken."""
    if reset:
        env.reset(seed=seed)
    for count in range(start, MAX_STEPS):  # `ends` tells of episodes that go on
        if not env.agents:
            return
        agent = env.agent_selection
        observation, reward, terminated, truncated, info = env.last()
        over = terminated or truncated
        rng = random.Random(f"{seed}/{count}")
        action = None if over else _choose(env, agent, observation, info, rng)
        yield agent, str(observation), float(reward), terminated, truncated, repr(sorted(info.items())), str(action)
        env.step(action)


def _same(what: str, left: list[Step], right: list[Step], fix: str) -> None:
    for index, (one, other) in enumerate(itertools.zip_longest(left, right)):
        if one != other:
            parts = ("agent", "observation", "reward", "terminated", "truncated", "info", "action")
            pairs = zip(parts, one or ("<over>",) * 7, other or ("<over>",) * 7, strict=True)
            part, a, b = next((part, a, b) for part, a, b in pairs if a != b)
            raise BreachError(f"{what}: {part} of step {index} is {str(a)[:80]!r}, then {str(b)[:80]!r}", fix)


# ---- the checks


_HARMLESS = re.compile(
    r"not a NumPy array|should be gymnasium.spaces.box|recommend agents to be named|different observation space|"
    r"Agents have different"
)


def pettingzoo_api(create: Make) -> str | None:
    """PettingZoo's `api_test`; returns its unusual warnings."""
    from pettingzoo.test import api_test

    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            api_test(create(), num_cycles=100)
        except AssertionError as error:
            raise BreachError(f"api_test: {error}", "derive from TurnEnv, or see PettingZoo's api_test") from error
    notes = sorted({str(w.message) for w in seen if not _HARMLESS.search(str(w.message))})
    return "; ".join(notes)


def pettingzoo_seed(create: Make) -> str | None:
    """PettingZoo's `seed_test`."""
    from pettingzoo.test import seed_test

    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            seed_test(create, num_cycles=100)
        except AssertionError as error:
            fix = "draw every random number from the rng that setup is given"
            raise BreachError(f"seed_test: two environments with seed 42 differ: {error}", fix) from error
    return None


def ends(create: Make, seeds: range) -> None:
    """Every episode ends."""
    env = create()
    for seed in seeds:
        for _ in _play(env, seed):
            pass
        if env.agents:
            raise BreachError(f"seed {seed}: no end after {MAX_STEPS} steps", "let the game end, or set max_turns")
    env.close()


def spaces(create: Make, seeds: range) -> None:
    """Observations are text within their space; instructions are text."""
    env = create()
    for seed in seeds:
        for agent, observation, *_ in _play(env, seed):
            for text, what in ((observation, "observation"), (_instructions(env, agent), "instructions")):
                _must_be_text(env, agent, text, what, seed)
            if not isinstance(env.observe(agent), str):
                raise BreachError(
                    f"seed {seed}: observation of {agent!r} is {type(env.observe(agent)).__name__}, not text",
                    "return a string, or use forge_agents.wrap",
                )
    env.close()


def _must_be_text(env: AnyEnv, agent: str, text: str, what: str, seed: int) -> None:
    space = env.observation_space(agent)
    if what == "observation" and not space.contains(text):
        raise BreachError(
            f"seed {seed}: observation of {agent!r} ({len(text)} characters, {text[:60]!r}) is outside its space",
            "shorten it, leave out what UTF-8 cannot write, or raise max_observation_chars",
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BreachError(f"seed {seed}: {what} of {agent!r}: {error}", "leave out lone surrogates") from error


def observing(create: Make, seeds: range) -> None:
    """Observing changes nothing."""
    env = create()
    for seed in seeds:
        for agent, observation, *_ in _play(env, seed):
            for other in env.agents:
                env.observe(other)
            again = env.observe(agent)
            if again != observation:
                raise BreachError(
                    f"seed {seed}: observing {agent!r} twice gives {observation[:60]!r}, then {again[:60]!r}",
                    "let observe_text only read state; change state in act",
                )
    env.close()


def rewards_and_infos(create: Make, seeds: range) -> None:
    """Rewards are finite, infos JSON."""
    env = create()
    for seed in seeds:
        for agent, _, reward, *_ in _play(env, seed):
            if not math.isfinite(reward):
                raise BreachError(f"seed {seed}: reward of {agent!r} is {reward}", "return finite rewards")
            try:
                json.dumps(env.infos[agent], allow_nan=False)
            except (TypeError, ValueError) as error:
                fix = "put only numbers, strings, booleans, lists and dicts with string keys into infos"
                raise BreachError(f"seed {seed}: infos[{agent!r}] is not JSON: {error}", fix) from error
    env.close()


def determinism(create: Make, seeds: range) -> None:
    """Same seed, same actions: same episode, in a fresh, a used and an interleaved environment."""
    fix = "keep all state on the instance and draw every random number from the rng that setup is given"
    reused = create()
    for seed in seeds:
        alone = list(_play(create(), seed))
        _same(f"seed {seed}, a fresh environment and a used one", alone, list(_play(reused, seed)), fix)
        beside = _interleaved(create(), create(), seed)
        _same(f"seed {seed}, alone and beside another live environment", alone, beside, fix)


def _interleaved(env: AnyEnv, other: AnyEnv, seed: int) -> list[Step]:
    """An episode of `env`, while `other` plays a different seed, step by step in turns."""
    steps = []
    neighbour = _play(other, seed + 1_000_003)
    next(neighbour, None)
    for step in _play(env, seed):
        steps.append(step)
        next(neighbour, None)
    return steps


def global_randomness(create: Make, seeds: range) -> None:
    """The process's own generators stay untouched."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # the global one is what is looked at
    try:
        env = create()
        for seed in seeds:
            for _ in _play(env, seed):
                pass
        used = [] if random.getstate() == python else ["random"]
        if not all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy, strict=True)):  # noqa: NPY002
            used.append("numpy.random")
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
    if used:
        raise BreachError(
            f"the global generator of {' and '.join(used)} was used or seeded",
            "draw from self.rng; the global generators are shared by all environments of the process",
        )


def odd_actions(create: Make, seed: int) -> None:
    """No text makes the environment raise, and play can go on after it."""
    for depth, action in itertools.product(range(3), ODD_ACTIONS):
        env = create()
        for index, (agent, _, _, terminated, truncated, *_) in enumerate(_play(env, seed + depth)):
            if terminated or truncated:
                break
            if index == depth:
                _survives(env, agent, action, seed + depth, index)
                break
        env.close()


def _survives(env: AnyEnv, agent: str, action: str, seed: int, index: int) -> None:
    try:
        env.step(action)
        for _ in _play(env, seed, reset=False, start=index + 1):  # and the episode goes on or ends like any other
            pass
    except Exception as error:
        shown = f"{action[:40]!r}" + (f"... ({len(action)} characters)" if len(action) > 40 else "")
        raise BreachError(
            f"{agent!r} answered {shown}: {type(error).__name__}: {error}",
            "treat text that cannot be understood as an illegal move: return an Outcome, do not raise",
        ) from error


def fork(create: Make, seeds: range) -> None:
    """A deep copy continues like the original, and apart from it."""
    fix = "keep all state on the instance, in objects that copy.deepcopy copies (no open files, locks or module state)"
    for seed in seeds:
        whole = list(_play(create(), seed))
        for at in {0, len(whole) // 2, max(len(whole) - 2, 0)}:
            env = create()
            playing = _play(env, seed)
            for _ in range(at + 1):
                next(playing, None)
            try:
                fork = copy.deepcopy(env)
            except Exception as error:
                raise BreachError(f"seed {seed}: copy.deepcopy: {type(error).__name__}: {error}", fix) from error
            list(playing)  # the original plays on; the fork must not notice
            continued = list(_play(fork, seed, reset=False, start=at))
            _same(f"seed {seed}, the original and its copy from step {at}", whole[at:], continued, fix)


def leak(create: Make, seeds: range) -> None:
    """No agent reads a secret that nobody told it."""
    env = create()
    if not hasattr(env, "secrets"):
        raise NotApplicableError("no method secrets(agent)")
    for seed in seeds:
        said: list[str] = []
        for *_, action in _play(env, seed):
            for agent in env.agents:
                if not (env.terminations[agent] or env.truncations[agent]):
                    _must_not_read(env, agent, said, seed)
            said.append(action)
    env.close()


def _must_not_read(env: AnyEnv, agent: str, said: list[str], seed: int) -> None:
    seen = f"{_instructions(env, agent)}\n{env.observe(agent)}"
    for secret in env.secrets(agent):
        word = re.compile(rf"(?<!\w){re.escape(secret)}(?!\w)", re.IGNORECASE)
        if word.search(seen) and not any(word.search(text) for text in said):
            fix = "leave it out of observe_text and instructions"
            raise BreachError(f"seed {seed}: {agent!r} can read the secret {secret!r}", fix)
