"""The checks of `check_env`. Each raises `BreachError` at a breach.

In: a `Case`. Out: a note, or nothing. Waits for the environment's own code, and for one other process, with a deadline.
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
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from forge_agents.envs.conformance.play import (
    HUGE_ACTIONS,
    MAX_STEPS,
    ODD_ACTIONS,
    BreachError,
    NotApplicableError,
    Step,
    forked,
    instructions,
    line_of_method,
    live,
    look,
    other_process,
    own_files,
    play,
    same,
)
from forge_agents.envs.env import TextGame, hook
from forge_agents.envs.foreign import unpaid_reward
from forge_agents.envs.spec import AnyEnv, EnvSpec
from forge_agents.envs.wrappers import EnvWrapper, InvalidAction


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is checked, and how often."""

    build: Callable[[], Any]
    """A fresh environment, as it is."""
    create: Callable[[], AnyEnv]
    """A fresh one that takes turns."""
    cls: type
    """The class whose code is at fault; of an environment that `wrap` made, that of the game inside."""
    files: Collection[str] = ()
    """Source files of whoever asks: of `cls`, or of the functions that `wrap` was given."""
    inside: str = ""
    """Name and package of the game that `wrap` was given; empty where nothing is wrapped."""
    folder: str = ""
    """Where that package lies."""
    spec: EnvSpec
    """How another process makes one."""
    seeds: range
    """Of the episodes."""


Check: TypeAlias = Callable[[Case], str | None]
"""Returns a note, None or nothing to say; raises at a breach, and where it does not apply."""

STEP_S = 5.0
"""Seconds within which an environment must have read a megabyte of text."""

_HARMLESS = re.compile(
    r"not a NumPy array|should be gymnasium.spaces.box|recommend agents to be named|different observation space|"
    r"Agents have different|does not have a `render_mode`"
)


def pettingzoo_api(case: Case) -> str:
    """PettingZoo's `api_test`; returns its unusual warnings."""
    from pettingzoo.test import api_test

    return _passes(api_test, case.create(), "derive from TurnEnv, or see PettingZoo's api_test")


def pettingzoo_seed(case: Case) -> None:
    """PettingZoo's `seed_test`."""
    from pettingzoo.test import seed_test

    _passes(seed_test, case.create, "draw every random number from the rng that setup is given", "setup")


def pettingzoo_parallel(case: Case) -> str:
    """PettingZoo's `parallel_api_test` and `parallel_seed_test`; returns unusual warnings."""
    from pettingzoo import ParallelEnv
    from pettingzoo.test import parallel_api_test, parallel_seed_test

    env = case.build()
    if not isinstance(env, ParallelEnv):
        raise NotApplicableError("not a ParallelEnv")
    notes = _passes(parallel_api_test, env, "derive from ParallelTurnEnv, or see PettingZoo's parallel_api_test")
    _passes(parallel_seed_test, case.build, "draw every random number from the rng that setup is given", "setup")
    return notes


def _passes(test: Callable[..., None], subject: object, fix: str, method: str = "") -> str:
    """Run a test of PettingZoo, which prints; returns its unusual warnings."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            test(subject, num_cycles=100)
        except AssertionError as error:
            differ = "two environments with seed 42 differ: " if method == "setup" else ""
            raise BreachError(f"{test.__name__}: {differ}{error}", fix, method) from error
    return "; ".join(sorted({str(w.message) for w in seen if not _HARMLESS.search(str(w.message))}))


def _steps(case: Case, think: Callable[[str], str] | None = None) -> Iterator[tuple[AnyEnv, int, Step]]:
    """Every step of an episode for each seed, all in one environment, with the seed."""
    env = case.create()
    for seed in case.seeds:
        for step in play(env, seed, think=think):
            yield env, seed, step
    env.close()


def plays(case: Case) -> str:
    """Episodes of seeded random texts, each in a fresh environment, raise nothing."""
    cut = 0
    for seed in case.seeds:
        env = case.create()
        try:
            for _ in play(env, seed):
                pass
        except Exception as error:
            fix = "mend what raises, or leave this game out and say why"
            raise BreachError(f"seed {seed}: {type(error).__name__}: {error}", fix) from error
        cut += bool(env.agents)
        env.close()
    return f"{len(case.seeds)} episodes" + (f", {cut} of them without an end after {MAX_STEPS} steps" if cut else "")


def ends(case: Case) -> None:
    """Every episode ends."""
    env = case.create()
    for seed in case.seeds:
        for _ in play(env, seed):
            pass
        if env.agents:
            fix = "let the game end, or set max_turns"
            raise BreachError(f"seed {seed}: no end after {MAX_STEPS} steps", fix, "act")
    env.close()


def seats(case: Case) -> str:
    """Every number of seats that `reset` may ask for takes part and plays to the end."""
    env = case.create()
    game = env.unwrapped
    if not isinstance(game, TextGame) or game.min_agents is None:
        raise NotApplicableError("min_agents is None")
    numbers = range(game.min_agents, len(game.possible_agents) + 1)
    for number, seed in itertools.product(numbers, case.seeds):
        taken = None
        for agent, *_ in play(env, seed, options={"num_agents": number}):
            taken = taken or list(env.agents)
            if len(taken) != number or agent not in taken:
                raise BreachError(f"num_agents={number} seats {taken}", "seat as many as asked for", "take_seats")
    env.close()
    return f"{numbers[0]} to {numbers[-1]} seats"


def spaces(case: Case) -> None:
    """Observations are text within their space; instructions are text."""
    for env, seed, (agent, seen, *_) in _steps(case):
        if not env.observation_space(agent).contains(seen):
            raise BreachError(
                f"seed {seed}: observation of {agent!r} ({len(seen)} characters, {seen[:60]!r}) is outside its space",
                "shorten it, leave out what UTF-8 cannot write, or raise max_observation_chars",
                "observe_text",
            )
        for text, method in ((seen, "observe_text"), (instructions(env, agent), "instructions")):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                what = f"seed {seed}: {method} of {agent!r}: {error}"
                raise BreachError(what, "leave out lone surrogates", method) from error


def observing(case: Case) -> None:
    """Observing changes nothing."""
    for env, seed, (agent, observation, *_) in _steps(case):
        for other in env.agents:
            look(env, other)
        again = look(env, agent)
        if again != observation:
            raise BreachError(
                f"seed {seed}: observing {agent!r} twice gives {observation[:60]!r}, then {again[:60]!r}",
                "let observe_text only read state; change state in act",
                "observe_text",
            )


def rewards_and_infos(case: Case) -> None:
    """Rewards are finite and arrive in ``last``, infos JSON."""
    acted, accounts = "", dict[str, float]()
    for env, seed, (agent, _, reward, *_) in _steps(case):
        if acted and env.agents and (why := unpaid_reward(env, acted, accounts)):
            raise BreachError(f"seed {seed}: {why.partition('; ')[0]}", why.partition("; ")[2], "act")
        acted, accounts = agent if agent in live(env) else "", dict(env._cumulative_rewards)
        if not math.isfinite(reward):
            raise BreachError(f"seed {seed}: reward of {agent!r} is {reward}", "return finite rewards", "act")
        try:
            json.dumps(env.infos[agent], allow_nan=False)
        except (TypeError, ValueError) as error:
            fix = "put only numbers, strings, booleans, lists and dicts with string keys into infos"
            raise BreachError(f"seed {seed}: infos[{agent!r}] is not JSON: {error}", fix, "act") from error


def legal_actions(case: Case) -> None:
    """What is listed as legal is not called illegal afterwards; does not apply where nothing is listed."""
    env = case.create()
    played, refused, listed, why = 0, 0, 0, ""
    for seed in case.seeds:
        before: tuple[str, str, bool] | None = None
        for agent, *_, action in play(env, seed):
            if before is not None and (told := env.infos.get(before[0], {}).get("illegal")):
                refused, why = refused + 1, str(told)
                if before[2]:
                    raise BreachError(
                        f"seed {seed}: {before[1]!r} is in the legal actions of {before[0]!r}, and was refused: {why}",
                        "list texts as they are understood",
                        "legal_actions",
                    )
            info, before = env.infos[agent], None
            if agent in live(env) and not info.get("illegal"):  # an older one would be taken for this action's
                played += 1
                before = agent, action, action in (info.get("legal_actions") or ())
                listed += before[2]
    env.close()
    all_refused = f"all {played} texts were illegal ({why}): " if played and refused == played else ""
    if not listed:
        more = "list legal_actions, or name actions in the instructions, to try more"
        raise NotApplicableError(f"{all_refused}{more}" if all_refused else "no legal actions are listed")


def odd_actions(case: Case) -> None:
    """No text makes the environment raise or stall, and play can go on after it."""
    seed = case.seeds[0]
    for depth, action in itertools.product(range(3), (*ODD_ACTIONS, *HUGE_ACTIONS)):
        env = case.create()
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
            "treat text that cannot be understood as an illegal move: return an Outcome, do not raise; of a program, "
            "let reward= return a number for any result",
            "act",
        ) from error
    if spent > STEP_S:
        raise BreachError(
            f"{agent!r} answered {shown}: reading it took {spent:.1f} s",
            f"look at no more than the first max_action_chars characters, or use a pattern that is linear in the text; "
            f"{STEP_S:g} s are allowed",
            "act",
        )


_KEEP_STATE = "keep all state on the instance and draw every random number from the rng that setup is given"
_NO_GLOBALS = "draw from self.rng; the global generators are shared by all environments of the process"


def determinism(case: Case) -> None:
    """Same seed, same actions: same episode, in a fresh, a used and an interleaved environment."""
    reused = case.create()
    for seed in case.seeds:
        alone = list(play(case.create(), seed))
        same(f"seed {seed}, a fresh environment and a used one", alone, list(play(reused, seed)), _KEEP_STATE)
        beside = _interleaved(case.create(), case.create(), seed)
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


def global_randomness(case: Case) -> None:
    """The process's own generators stay untouched, and nothing depends on them."""
    # Two salts: an environment that puts a generator back after use leaves no trace but the episode it played.
    before = _global_states()
    try:
        for seed in case.seeds:
            played: list[list[Step]] = []
            for salt in (1, 2):
                _reseed(salt)
                states = _global_states()
                played.append(list(play(case.create(), seed)))
                after = _global_states()  # torch may have been imported on the way
                if used := [name for name in states if after[name] != states[name]]:
                    raise BreachError(
                        f"seed {seed}: the global generator of {' and '.join(used)} was used or seeded",
                        _NO_GLOBALS,
                        where=_line_that_draws(case, seed),
                    )
            what = f"seed {seed}, with the global generators seeded in two ways"
            same(what, played[0], played[1], _NO_GLOBALS)
    finally:
        _restore(before)


def _line_that_draws(case: Case, seed: int) -> str:
    """The first line of the environment's files after which a global generator has moved."""
    files, still = {*case.files, *own_files(case.cls)}, _global_states()
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
        for _ in play(case.create(), seed):
            pass
    finally:
        sys.settrace(tracer)
    return found or line_of_method(case.cls, "setup")


# ---- forks


def _claims_fork(env: AnyEnv) -> bool:
    """Whether it has a `fork` of its own, or a wrapper that lives on copies."""
    inside: Any = env
    while isinstance(inside, EnvWrapper):
        if isinstance(inside, InvalidAction) and hook(inside.env, "refusal") is None:
            return True
        inside = inside.env
    game = env.unwrapped
    wrapped_in_worker = hasattr(type(game), "off_loop") and hook(game, "refusal") is not None
    return hasattr(type(game), "fork") and not wrapped_in_worker


def _uncopied(env: AnyEnv) -> str:
    """The attribute that `copy.deepcopy` cannot copy, and whose class it is of; empty if unknown."""
    for name, value in vars(env.unwrapped).items():
        try:
            copy.deepcopy(value)
        except Exception:  # noqa: BLE001  # whatever somebody's class raises
            return f" self.{name}, a {type(value).__module__}.{type(value).__qualname__}"
    return ""


def fork(case: Case) -> None:
    """A copy continues like the original, and apart from it: neither notices the other."""
    if not _claims_fork(case.create()):
        raise NotApplicableError("no method fork")
    fix = "keep all state on the instance, in objects that copy.deepcopy copies (no open files, locks or module state)"
    for seed in case.seeds:
        whole = list(play(case.create(), seed))
        for at in sorted({0, len(whole) // 2, max(len(whole) - 2, 0)}):
            env = case.create()
            playing = play(env, seed)
            for _ in range(at + 1):
                next(playing, None)
            try:
                first, second = forked(env), forked(env)
                snapshot = env.snapshot() if hasattr(type(env), "snapshot") else None
            except Exception as error:
                what = f"seed {seed}: copying{_uncopied(env)}: {type(error).__name__}: {error}"
                own = "; where that is somebody else's class, keep plain data of it, or leave it out in a __deepcopy__"
                raise BreachError(what, fix + own, "setup") from error
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


def leak(case: Case) -> None:
    """No agent reads a secret that nobody told it."""
    env = case.create()
    secrets = hook(env, "secrets")
    if secrets is None:
        raise NotApplicableError("no method secrets(agent)")
    looked_for = 0
    for seed in case.seeds:
        said: list[str] = []
        for *_, action in play(env, seed):
            for agent in live(env):
                texts = _texts(secrets(agent), agent)
                looked_for += len(texts)
                _must_not_read(env, agent, texts, said, seed)
            said.append(action)
    env.close()
    if not looked_for:
        raise NotApplicableError("secrets(agent) named nothing in any episode")


def _texts(secrets: Any, agent: str) -> list[str]:
    """What ``secrets(agent)`` returned; a single text would be looked for letter by letter."""
    found: list[Any] = list(secrets) if isinstance(secrets, Iterable) and not isinstance(secrets, str) else [None]
    if not all(isinstance(text, str) and text for text in found):
        raise BreachError(
            f"secrets({agent!r}) returned {secrets!r:.80}",
            "return a list of texts, none of them empty; an empty list where nothing is secret",
            "secrets",
        )
    return found


def _must_not_read(env: AnyEnv, agent: str, secrets: list[str], said: list[str], seed: int) -> None:
    for method, text in (("instructions", instructions(env, agent)), ("observe_text", look(env, agent))):
        for secret in secrets:
            word = re.compile(rf"(?<!\w){re.escape(secret)}(?!\w)", re.IGNORECASE)
            if word.search(text) and not any(word.search(heard) for heard in said):
                raise BreachError(
                    f"seed {seed}: {agent!r} can read the secret {secret!r}",
                    f"leave it out of {method}; where the seat may know the same text, if only by chance, let secrets "
                    "leave it out",
                    method,
                )


def thoughts(case: Case) -> None:
    """What an agent thinks before it answers reaches no other seat, not even from a game that hears thoughts."""
    if len(case.create().possible_agents) == 1:
        raise NotApplicableError("no other agent that could read it")
    for env, seed, _ in _steps(case, _marker):
        for reader in live(env):
            _must_not_hear(env, reader, seed)


def _marker(agent: str) -> str:
    return f"only-{''.join(filter(str.isalnum, agent))}-thinks-this"


def _must_not_hear(env: AnyEnv, reader: str, seed: int) -> None:
    told = {method: read(env, reader) for method, read in _READ.items()}
    told["info"] = str(env.infos[reader])
    for thinker in env.possible_agents:
        for method, text in told.items():
            if thinker != reader and _marker(thinker) in text:
                raise BreachError(
                    f"seed {seed}: {reader!r} reads in {method} what {thinker!r} thought",
                    "let observes_reasoning be False, or pass on the answer alone: split_reasoning tells them apart",
                    "act" if method == "info" else method,
                )


def information_sets(case: Case) -> None:
    """What an agent reads stays the same, to the letter, when only what it must not know becomes something else."""
    env = case.create()
    if hook(env, "swap_secrets") is None:
        raise NotApplicableError("no method swap_secrets(agent, rng)")
    changed = False
    for seed in case.seeds:
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


def _few(check: Check) -> Check:
    return lambda case: check(replace(case, seeds=case.seeds[:4]))


CHECKS: dict[str, dict[str, Check]] = {
    "full": {
        "pettingzoo api": pettingzoo_api,
        "pettingzoo seed": pettingzoo_seed,
        "pettingzoo parallel": pettingzoo_parallel,
        "ends": ends,
        "seats": seats,
        "spaces": spaces,
        "observing": observing,
        "rewards and infos": rewards_and_infos,
        "legal actions": legal_actions,
        "determinism": determinism,
        "global randomness": global_randomness,
        "odd actions": odd_actions,
        "fork": fork,
        "leak": leak,
        "thoughts": thoughts,
        "information sets": information_sets,
        "other process": lambda case: other_process(case.create, case.spec, case.seeds),
    },
    "adapter": {"plays": plays, "spaces": _few(spaces), "determinism": _few(determinism), "thoughts": _few(thoughts)},
}
"""By level, in the order in which they run."""

_SEEDS_IT = (
    "let obs_to_text draw and count nothing; where it does not, the game inside draws from elsewhere than the seed: "
    "derive a class from it whose reset(seed) sees to that"
)
SAYS_NONE = "let text_to_action return None, or raise ValueError, LookupError or ArithmeticError, at what is no action"
OF_A_WRAPPED = {
    "ends": "give wrap max_turns, or register with max_turns",
    "spaces": "let obs_to_text say less, leave out what UTF-8 cannot write, or give wrap max_observation_chars",
    "observing": "let obs_to_text say the same of the same observation; it must not change the game or count its calls",
    "legal actions": "let legal_actions list texts that text_to_action understands and the game's mask allows",
    "rewards and infos": "the game inside says so: derive a class from it that gives finite numbers, and whose "
    "last() reports them",
    "odd actions": SAYS_NONE,
    **dict.fromkeys(("pettingzoo seed", "determinism", "other process"), _SEEDS_IT),
    "global randomness": f"{_SEEDS_IT}, and which uses no generator that a whole process shares",
}
"""What to do about a check that fails where `wrap` stands between a game and text."""
OF_THE_FUNCTIONS = frozenset(("spaces", "observing", "legal actions"))
"""Checks that fail by the functions that `wrap` was given, not by the game."""
