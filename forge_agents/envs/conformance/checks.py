"""The checks of `check_env` on what an environment says and survives; each raises `BreachError` at a breach.

In: a factory of environments, seeds. Out: a note, or nothing. Waits for nothing.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import re
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from forge_agents.envs.conformance.play import (
    HUGE_ACTIONS,
    MAX_STEPS,
    ODD_ACTIONS,
    BreachError,
    Make,
    NotApplicableError,
    instructions,
    live,
    look,
    play,
)
from forge_agents.envs.env import TextGame
from forge_agents.envs.spec import AnyEnv

STEP_S = 5.0
"""Seconds within which an environment must have read a megabyte of text."""

_HARMLESS = re.compile(
    r"not a NumPy array|should be gymnasium.spaces.box|recommend agents to be named|different observation space|"
    r"Agents have different|does not have a `render_mode`"
)


@contextlib.contextmanager
def _quiet() -> Iterator[list[warnings.WarningMessage]]:
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield seen


def _notes(seen: list[warnings.WarningMessage]) -> str:
    return "; ".join(sorted({str(w.message) for w in seen if not _HARMLESS.search(str(w.message))}))


def pettingzoo_api(create: Make) -> str:
    """PettingZoo's `api_test`; returns its unusual warnings."""
    from pettingzoo.test import api_test

    with _quiet() as seen:
        try:
            api_test(create(), num_cycles=100)
        except AssertionError as error:
            raise BreachError(f"api_test: {error}", "derive from TurnEnv, or see PettingZoo's api_test") from error
    return _notes(seen)


def pettingzoo_seed(create: Make) -> None:
    """PettingZoo's `seed_test`."""
    from pettingzoo.test import seed_test

    _seed(lambda: seed_test(create, num_cycles=100), "seed_test")


def pettingzoo_parallel(create: Callable[[], Any]) -> str:
    """PettingZoo's `parallel_api_test` and `parallel_seed_test`; returns unusual warnings."""
    from pettingzoo import ParallelEnv
    from pettingzoo.test import parallel_api_test, parallel_seed_test

    if not isinstance(create(), ParallelEnv):
        raise NotApplicableError("not a ParallelEnv")
    with _quiet() as seen:
        try:
            parallel_api_test(create(), num_cycles=100)
        except AssertionError as error:
            fix = "derive from ParallelTurnEnv, or see PettingZoo's parallel_api_test"
            raise BreachError(f"parallel_api_test: {error}", fix) from error
    _seed(lambda: parallel_seed_test(create, num_cycles=100), "parallel_seed_test")
    return _notes(seen)


def _seed(test: Callable[[], None], name: str) -> None:
    with _quiet():
        try:
            test()
        except AssertionError as error:
            fix = "draw every random number from the rng that setup is given"
            raise BreachError(f"{name}: two environments with seed 42 differ: {error}", fix, "setup") from error


def plays(create: Make, seeds: range) -> str:
    """Episodes of seeded random texts, each in a fresh environment, raise nothing."""
    cut = 0
    for seed in seeds:
        env = create()
        try:
            for _ in play(env, seed):
                pass
        except Exception as error:
            fix = "mend what raises, or leave this game out and say why"
            raise BreachError(f"seed {seed}: {type(error).__name__}: {error}", fix) from error
        cut += bool(env.agents)
        env.close()
    return f"{len(seeds)} episodes" + (f", {cut} of them without an end after {MAX_STEPS} steps" if cut else "")


def ends(create: Make, seeds: range) -> None:
    """Every episode ends."""
    env = create()
    for seed in seeds:
        for _ in play(env, seed):
            pass
        if env.agents:
            fix = "let the game end, or set max_turns"
            raise BreachError(f"seed {seed}: no end after {MAX_STEPS} steps", fix, "act")
    env.close()


def seats(create: Make, seeds: range) -> str:
    """Every number of seats that `reset` may ask for takes part and plays to the end."""
    env = create()
    game = env.unwrapped
    if not isinstance(game, TextGame) or game.min_agents is None:
        raise NotApplicableError("min_agents is None")
    numbers = range(game.min_agents, len(game.possible_agents) + 1)
    for number, seed in itertools.product(numbers, seeds):
        taken = None
        for agent, *_ in play(env, seed, options={"num_agents": number}):
            taken = taken or list(env.agents)
            if len(taken) != number or agent not in taken:
                raise BreachError(f"num_agents={number} seats {taken}", "seat as many as asked for", "take_seats")
    env.close()
    return f"{numbers[0]} to {numbers[-1]} seats"


def spaces(create: Make, seeds: range) -> None:
    """Observations are text within their space; instructions are text."""
    env = create()
    for seed in seeds:
        for agent, observation, *_ in play(env, seed):
            for text, what in ((observation, "observation"), (instructions(env, agent), "instructions")):
                _must_be_text(env, agent, text, what, seed)
            if not isinstance(env.observe(agent), str):
                raise BreachError(
                    f"seed {seed}: observation of {agent!r} is {type(env.observe(agent)).__name__}, not text",
                    "return a string, or use forge_agents.wrap",
                    "observe_text",
                )
    env.close()


def _must_be_text(env: AnyEnv, agent: str, text: str, what: str, seed: int) -> None:
    method = "observe_text" if what == "observation" else "instructions"
    space = env.observation_space(agent)
    if what == "observation" and not space.contains(text):
        raise BreachError(
            f"seed {seed}: observation of {agent!r} ({len(text)} characters, {text[:60]!r}) is outside its space",
            "shorten it, leave out what UTF-8 cannot write, or raise max_observation_chars",
            method,
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BreachError(f"seed {seed}: {what} of {agent!r}: {error}", "leave out lone surrogates", method) from error


def observing(create: Make, seeds: range) -> None:
    """Observing changes nothing."""
    env = create()
    for seed in seeds:
        for agent, observation, *_ in play(env, seed):
            for other in env.agents:
                look(env, other)
            again = look(env, agent)
            if again != observation:
                raise BreachError(
                    f"seed {seed}: observing {agent!r} twice gives {observation[:60]!r}, then {again[:60]!r}",
                    "let observe_text only read state; change state in act",
                    "observe_text",
                )
    env.close()


def rewards_and_infos(create: Make, seeds: range) -> None:
    """Rewards are finite, infos JSON."""
    env = create()
    for seed in seeds:
        for agent, _, reward, *_ in play(env, seed):
            if not math.isfinite(reward):
                raise BreachError(f"seed {seed}: reward of {agent!r} is {reward}", "return finite rewards", "act")
            try:
                json.dumps(env.infos[agent], allow_nan=False)
            except (TypeError, ValueError) as error:
                fix = "put only numbers, strings, booleans, lists and dicts with string keys into infos"
                raise BreachError(f"seed {seed}: infos[{agent!r}] is not JSON: {error}", fix, "act") from error
    env.close()


def odd_actions(create: Make, seed: int) -> None:
    """No text makes the environment raise or stall, and play can go on after it."""
    for depth, action in itertools.product(range(3), (*ODD_ACTIONS, *HUGE_ACTIONS)):
        env = create()
        for index, (agent, *_) in enumerate(play(env, seed + depth)):
            if agent not in live(env):
                break
            if index == depth:
                _survives(env, agent, action, seed + depth, index)
                break
        env.close()


def _survives(env: AnyEnv, agent: str, action: str, seed: int, index: int) -> None:
    shown = f"{action[:40]!r}" + (f"... ({len(action)} characters)" if len(action) > 40 else "")
    started = time.perf_counter()
    try:
        env.step(action)
        spent = time.perf_counter() - started
        for _ in play(env, seed, reset=False, start=index + 1):  # and the episode goes on or ends like any other
            pass
    except Exception as error:
        raise BreachError(
            f"{agent!r} answered {shown}: {type(error).__name__}: {error}",
            "treat text that cannot be understood as an illegal move: return an Outcome, do not raise",
            "act",
        ) from error
    if spent > STEP_S:
        raise BreachError(
            f"{agent!r} answered {shown}: reading it took {spent:.1f} s",
            f"look at no more than the first max_action_chars characters, or use a pattern that is linear in the text; "
            f"{STEP_S:g} s are allowed",
            "act",
        )
