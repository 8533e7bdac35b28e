"""The checks of `check_env`. Each raises `BreachError` if the environment fails it."""

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
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from gymnasium.spaces import Text

from forge_agents.envs.conformance.play import (
    HUGE_ACTIONS,
    MAX_STEPS,
    ODD_ACTIONS,
    BreachError,
    NotApplicableError,
    Step,
    instructions,
    line_of_method,
    look,
    other_process,
    own_files,
    play,
    same,
)
from forge_agents.envs.env import Observation, TextGame, forked, hook, listed_actions, may_be_silent, writable
from forge_agents.envs.foreign import find_lost_reward
from forge_agents.envs.spec import AnyEnv, EnvSpec
from forge_agents.envs.wrappers import EnvWrapper, InvalidAction, live


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An environment to check, and the episodes to play."""

    build: Callable[[], Any]
    """Makes a fresh environment."""
    create: Callable[[], AnyEnv]
    """Makes a fresh environment, converted to a turn-based one."""
    cls: type
    """Class of the environment. For `wrap`, class of the wrapped game."""
    files: Collection[str] = ()
    """Source files of the user: of `cls`, or of the functions passed to `wrap`."""
    inside: str = ""
    """Name and package of the game passed to `wrap`. Empty if the environment is not wrapped."""
    folder: str = ""
    """Folder of that package."""
    spec: EnvSpec
    """Spec for another process."""
    seeds: range
    """Episode seeds."""


Check: TypeAlias = Callable[[Case], str | None]
"""Returns an optional note. Raises `BreachError` on failure and `NotApplicableError` if the check does not apply."""

STEP_S = 5.0
"""Maximum seconds for an environment to process a megabyte of text."""

MAX_QUOTED = 500
"""Maximum number of characters of a message of PettingZoo that may quote whole actions."""

_SEEDED = "draw every random number from the rng that setup gets, or that reset(seed) makes"

_HARMLESS = re.compile(
    r"not a NumPy array|should be gymnasium.spaces.box|recommend agents to be named|different observation space|"
    r"Agents have different|does not have a `render_mode`"
)


def pettingzoo_api(case: Case) -> str:
    """Run PettingZoo's `api_test`. Returns its unusual warnings."""
    from pettingzoo.test import api_test

    _same_spaces(case)
    env = case.create()
    observe = env.observe

    def observe_with_dtype(agent: str) -> Any:  # `api_test` compares the dtypes of observation and space
        seen = observe(agent)
        return Observation(seen) if isinstance(seen, str) else seen

    setattr(env, "observe", observe_with_dtype)  # noqa: B010  # mypy refuses to assign to a method
    return _run_test(api_test, env, "derive from TurnEnv, or see PettingZoo's api_test")


def pettingzoo_seed(case: Case) -> None:
    """Run PettingZoo's `seed_test`."""
    from pettingzoo.test import seed_test

    _same_spaces(case)
    _seed_test(seed_test, case.create, case.seeds[0])


def _same_spaces(case: Case) -> None:
    """A space is the same object in every call, as PettingZoo demands. Otherwise seeds of spaces are lost."""
    env = case.create()
    env.reset(seed=case.seeds[0])
    for name, agent in itertools.product(("observation_space", "action_space"), env.possible_agents):
        if getattr(env, name)(agent) is not getattr(env, name)(agent):
            message = f"{name}({agent!r}) returns a new object in each call, so a seed of the space has no effect"
            raise BreachError(message, f"create the spaces once, and return the same object from {name}", name)
    env.close()


def _seed_test(test: Callable[..., None], make: Callable[[], Any], seed: int) -> None:
    """Run a seed test of PettingZoo, which samples the actions of two environments from their own action spaces."""
    try:
        _run_test(test, make, _SEEDED, "setup")
    except BreachError as breach:
        envs = [make(), make()]
        for env in envs:
            env.reset(seed=seed)
        first, second = envs
        shared = [agent for agent in first.possible_agents if first.action_space(agent) is second.action_space(agent)]
        for env in envs:
            env.close()
        if not shared:
            raise
        message = f"action_space({shared[0]!r}) is one object in two environments, so both sample from one generator"
        raise BreachError(message, "create the spaces in the constructor", "action_space") from breach


def pettingzoo_parallel(case: Case) -> str:
    """Run PettingZoo's `parallel_api_test` and `parallel_seed_test`. Returns unusual warnings."""
    from pettingzoo import ParallelEnv
    from pettingzoo.test import parallel_api_test, parallel_seed_test

    env = case.build()
    if not isinstance(env, ParallelEnv):
        raise NotApplicableError("not a ParallelEnv")
    notes = _run_test(parallel_api_test, env, "derive from ParallelTurnEnv, or see PettingZoo's parallel_api_test")
    _seed_test(parallel_seed_test, case.build, case.seeds[0])
    return notes


def _run_test(test: Callable[..., None], subject: object, fix: str, method: str = "") -> str:
    """Run a test of PettingZoo without its output. Returns its unusual warnings."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            test(subject, num_cycles=100)
        except AssertionError as error:
            differ = "two environments with seed 42 differ: " if method == "setup" else ""
            raise BreachError(f"{test.__name__}: {differ}{str(error)[:MAX_QUOTED]}", fix, method) from error
    return "; ".join(sorted({str(w.message) for w in caught if not _HARMLESS.search(str(w.message))}))


def _steps(case: Case, reason: Callable[[str], str] | None = None) -> Iterator[tuple[AnyEnv, int, Step]]:
    """Yield every step of one episode per seed, all in one environment, with the seed."""
    env = case.create()
    for seed in case.seeds:
        for step in play(env, seed, reason=reason):
            yield env, seed, step
    env.close()


def plays(case: Case) -> str:
    """Episodes with seeded random texts, in fresh environments, raise no exception."""
    cut = 0
    for seed in case.seeds:
        env = case.create()
        try:
            for _ in play(env, seed):
                pass
        except Exception as error:
            fix = "fix the exception, or exclude this game and document why"
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


def num_agents(case: Case) -> str:
    """Episodes with every allowed number of agents have that many agents and end."""
    env = case.create()
    game = env.unwrapped
    if not isinstance(game, TextGame) or game.min_agents is None:
        raise NotApplicableError("min_agents is None")
    numbers = range(game.min_agents, len(game.possible_agents) + 1)
    for number, seed in itertools.product(numbers, case.seeds):
        agents = None
        for agent, *_ in play(env, seed, options={"num_agents": number}):
            agents = agents or list(env.agents)
            if len(agents) != number or agent not in agents:
                message = f"num_agents={number} gives the agents {agents}"
                raise BreachError(message, "return the requested number of agents", "select_agents")
    env.close()
    return f"{numbers[0]} to {numbers[-1]} agents"


def spaces(case: Case) -> None:
    """Observations are texts within their space, and instructions are texts."""
    for env, seed, (agent, seen, *_) in _steps(case):
        space = env.observation_space(agent)
        if not space.contains(seen):
            excerpt = f"{len(seen)} characters, {seen[:60]!r}"
            message = f"seed {seed}: observation of {agent!r} ({excerpt}) is outside its space"
            fix = "shorten it, remove lone surrogates, or raise max_observation_chars"
            if type(space) is Text and (refused := set(seen) - space.character_set):
                message += f", which does not allow {', '.join(map(repr, sorted(refused)[:8]))}"
                fix = "use forge_agents.envs.env.TextSpace(max_chars). gymnasium's Text allows letters and digits only"
            raise BreachError(message, fix, "observe_text")
        text = instructions(env, agent)
        if text != writable(text):
            message = f"seed {seed}: instructions of {agent!r} have lone surrogates: {text[:60]!r}"
            raise BreachError(message, "remove them", "instructions")


def observing(case: Case) -> None:
    """Observing has no side effects."""
    for env, seed, (agent, observation, *_) in _steps(case):
        for other in env.agents:
            look(env, other)
        again = look(env, agent)
        if again != observation:
            raise BreachError(
                f"seed {seed}: observing {agent!r} twice gives {observation[:60]!r}, then {again[:60]!r}",
                "only read state in observe_text. Change state in act",
                "observe_text",
            )


def rewards_and_infos(case: Case) -> str:
    """Rewards are finite, within ``max_reward`` and reported by ``last``, and infos are JSON.

    Returns a note if a full context costs nothing, because an agent can fill its context on purpose before it loses.
    """
    acted, sums, is_free, most = "", dict[str, float](), False, None
    earned: dict[tuple[int, str], float] = defaultdict(float)
    for env, seed, (agent, _, reward, *_) in _steps(case):
        if acted and env.agents and (lost := find_lost_reward(env, acted, sums)):
            raise BreachError(f"seed {seed}: {lost.partition('. ')[0]}", lost.partition(". ")[2], "act")
        acted, sums = agent if agent in live(env) else "", dict(env._cumulative_rewards)
        if not math.isfinite(reward):
            raise BreachError(f"seed {seed}: reward of {agent!r} is {reward}", "return finite rewards", "act")
        earned[seed, agent] += reward
        try:
            json.dumps(env.infos[agent], allow_nan=False)
        except (TypeError, ValueError) as error:
            fix = "use only numbers, strings, booleans, lists and dicts with string keys in infos"
            raise BreachError(f"seed {seed}: infos[{agent!r}] is not JSON: {error}", fix, "act") from error
        is_free = is_free or (reward < 0 and not may_be_silent(env))
        most = getattr(env, "max_reward", None)
    for (seed, agent), total in earned.items():
        if isinstance(most, int | float) and total > most + 1e-6 * max(1.0, abs(most)):
            message = f"seed {seed}: {agent!r} earns {total:g} in an episode, more than max_reward={most:g}"
            raise BreachError(message, "set max_reward to the most that an agent can earn in an episode", "act")
    return (
        "an agent that fills its context avoids later negative rewards: set judges_silence = True, and it acts by an "
        "empty answer instead"
    ) * is_free


def legal_actions(case: Case) -> None:
    """Actions that are listed as legal are accepted. Does not apply if none are listed."""
    env = case.create()
    played, refused, listed, reason = 0, 0, 0, ""
    for seed in case.seeds:
        actor, last_action, was_listed = "", "", False
        for agent, *_, action in play(env, seed):
            if actor and (illegal := env.infos.get(actor, {}).get("illegal")):
                refused, reason = refused + 1, str(illegal)
                if was_listed:
                    message = f"{last_action!r} is in the legal actions of {actor!r}, but was refused: {reason}"
                    fix = "list only texts that the game accepts"
                    raise BreachError(f"seed {seed}: {message}", fix, "legal_actions")
            info, actor = env.infos[agent], ""
            if agent in live(env) and not info.get("illegal"):  # otherwise the old entry would be misattributed
                actor, last_action, was_listed = agent, action, action in listed_actions(info)
                played, listed = played + 1, listed + was_listed
    env.close()
    all_refused = f"all {played} texts were illegal ({reason}): " if played and refused == played else ""
    if not listed:
        advice = "list legal_actions, or name actions in the instructions, so that more can be checked"
        raise NotApplicableError(f"{all_refused}{advice}" if all_refused else "no legal actions are listed")


def odd_actions(case: Case) -> None:
    """No text makes the environment raise or stall, and play continues after it."""
    seed = case.seeds[0]
    for depth, action in itertools.product(range(3), (*ODD_ACTIONS, *HUGE_ACTIONS)):
        env = case.create()
        for index, (agent, *_) in enumerate(play(env, seed + depth)):
            if agent not in live(env):
                break
            if index == depth:
                _check_survives(env, agent, action, seed + depth, index)
                break
        env.close()


def _check_survives(env: AnyEnv, agent: str, action: str, seed: int, index: int) -> None:
    answer = f"{agent!r} answered {_excerpt(action)}"
    latest = answer
    started = time.perf_counter()
    try:
        env.step(action)
        spent = time.perf_counter() - started
        for other, *_, later in play(env, seed, reset=False, start=index + 1):
            latest = f"{answer}, then {other!r} answered {_excerpt(later)}"
    except Exception as error:
        raise BreachError(
            f"{latest}: {type(error).__name__}: {error}",
            "treat unintelligible text as an illegal move: return an Outcome instead of raising. In a program, let "
            "reward= return a number for any result",
            "act",
        ) from error
    if spent > STEP_S:
        raise BreachError(
            f"{answer}: processing took {spent:.1f} s",
            f"read at most the first max_action_chars characters, or use a regular expression of linear time. The "
            f"limit is {STEP_S:g} s",
            "act",
        )


def _excerpt(action: str) -> str:
    return f"{action[:40]!r}" + (f"... ({len(action)} characters)" if len(action) > 40 else "")


_KEEP_STATE = f"keep all state on the instance, and {_SEEDED}"
_NO_GLOBALS = "draw from self.rng. All environments of the process share the global generators"


def determinism(case: Case) -> None:
    """The same seed and actions give the same episode in a fresh, a used and an interleaved environment."""
    reused = case.create()
    for seed in case.seeds:
        alone = list(play(case.create(), seed))
        same(f"seed {seed}, a fresh environment and a used one", alone, list(play(reused, seed)), _KEEP_STATE)
        interleaved = _play_interleaved(case.create(), case.create(), seed)
        same(f"seed {seed}, alone and next to another live environment", alone, interleaved, _KEEP_STATE)


def _play_interleaved(env: AnyEnv, other: AnyEnv, seed: int) -> list[Step]:
    """Play an episode of `env` while `other` plays another seed, in alternating steps."""
    steps = []
    other_steps = play(other, seed + 1_000_003)
    next(other_steps, None)
    for step in play(env, seed):
        steps.append(step)
        next(other_steps, None)
    return steps


# ---- global random generators


def _global_states() -> dict[str, Any]:
    """Return the state of every global generator, in comparable form."""
    name, keys, *rest = tuple(np.random.get_state())  # noqa: NPY002  # reads the global generator on purpose
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
    """Episodes neither change the global random generators nor depend on them."""
    # Two salts, because an environment that restores a generator after use is only revealed by its episodes.
    before = _global_states()
    try:
        for seed in case.seeds:
            played: list[list[Step]] = []
            for salt in (1, 2):
                _reseed(salt)
                states = _global_states()
                played.append(list(play(case.create(), seed)))
                after = _global_states()  # may include torch, imported during the episode
                if used := [name for name in states if after[name] != states[name]]:
                    message = f"seed {seed}: the global generator of {' and '.join(used)} was used or seeded"
                    raise BreachError(message, _NO_GLOBALS, where=_line_that_draws(case, seed))
            what = f"seed {seed}, with the global generators seeded in two ways"
            same(what, played[0], played[1], _NO_GLOBALS)
    finally:
        _restore(before)


def _line_that_draws(case: Case, seed: int) -> str:
    """Return the first line of the environment's files that changes a global generator."""
    files, start_states = {*case.files, *own_files(case.cls)}, _global_states()
    last, culprit = "", ""

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal last, culprit
        if culprit or frame.f_code.co_filename not in files:
            return None
        if last and any(_global_states()[name] != state for name, state in start_states.items()):
            culprit = last
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
    return culprit or line_of_method(case.cls, "setup")


# ---- forks


def _needs_fork(env: AnyEnv) -> bool:
    """Whether the environment has a `fork` method or a wrapper that depends on copies."""
    inner: Any = env
    while isinstance(inner, EnvWrapper):
        if isinstance(inner, InvalidAction) and hook(inner.env, "refusal") is None:
            return True
        inner = inner.env
    game = env.unwrapped
    wrapped_in_worker = hasattr(type(game), "off_loop") and hook(game, "refusal") is not None
    return hasattr(type(game), "fork") and not wrapped_in_worker


def _uncopyable(env: AnyEnv) -> str:
    """Return name and class of the attribute that `copy.deepcopy` cannot copy. Empty if unknown."""
    for name, value in vars(env.unwrapped).items():
        try:
            copy.deepcopy(value)
        except Exception:  # noqa: BLE001  # user classes may raise anything
            return f" self.{name}, a {type(value).__module__}.{type(value).__qualname__}"
    return ""


def fork(case: Case) -> None:
    """Copies and snapshots continue like the original, and copies do not affect each other."""
    if not _needs_fork(case.create()):
        raise NotApplicableError("no method fork")
    for seed in case.seeds:
        steps = list(play(case.create(), seed))
        for start in sorted({0, len(steps) // 2, max(len(steps) - 2, 0)}):
            _check_fork(case.create(), seed, steps, start)


_COPYABLE = "keep all state on the instance, in objects that copy.deepcopy copies (no files, locks or module state)"


def _check_fork(env: AnyEnv, seed: int, steps: list[Step], start: int) -> None:
    """Fork an episode at step `start` and compare the continuations with `steps`, the whole episode."""
    playing = play(env, seed)
    for _ in range(start + 1):
        next(playing, None)
    try:
        first, second = forked(env), forked(env)
        snapshot = env.snapshot() if hasattr(type(env), "snapshot") else None
    except Exception as error:
        message = f"seed {seed}: copying{_uncopyable(env)}: {type(error).__name__}: {error}"
        foreign = ". For a class of a library, store plain data of it, or omit it in a __deepcopy__"
        raise BreachError(message, _COPYABLE + foreign, "setup") from error

    def compare(what: str, begin: int, continuation: Iterator[Step]) -> None:
        same(f"seed {seed}, {what} of step {start}", steps[begin:], list(continuation), _COPYABLE)

    compare("the original and a copy", start, play(first, seed, reset=False, start=start))
    compare("the original before and after playing a copy", start + 1, playing)
    compare("the original and a copy left idle meanwhile", start, play(second, seed, reset=False, start=start))
    if snapshot is not None:
        env.restore(snapshot)
        compare("the original and its snapshot", start, play(env, seed, reset=False, start=start))


# ---- secrets


def leak(case: Case) -> None:
    """No agent can read a secret unless an agent wrote it."""
    env = case.create()
    secrets = hook(env, "secrets")
    if secrets is None:
        raise NotApplicableError("no method secrets(agent)")
    count = 0
    for seed in case.seeds:
        written: list[str] = []
        for *_, action in play(env, seed):
            for agent in live(env):
                texts = _check_secrets(secrets(agent), agent)
                count += len(texts)
                _check_unread(env, agent, texts, written, seed)
            written.append(action)
    env.close()
    if not count:
        raise NotApplicableError("secrets(agent) was empty in all episodes")


def _check_secrets(secrets: Any, agent: str) -> list[str]:
    """Check that ``secrets(agent)`` returned a collection of texts. A string would count as single letters."""
    texts: list[Any] = list(secrets) if isinstance(secrets, Iterable) and not isinstance(secrets, str) else [None]
    if not all(isinstance(text, str) and text for text in texts):
        fix = "return a list of nonempty texts, or an empty list if there is no secret"
        raise BreachError(f"secrets({agent!r}) returned {secrets!r:.80}", fix, "secrets")
    return texts


def _check_unread(env: AnyEnv, agent: str, secrets: list[str], written: list[str], seed: int) -> None:
    for method, text in (("instructions", instructions(env, agent)), ("observe_text", look(env, agent))):
        for secret in secrets:
            word = re.compile(rf"(?<!\w){re.escape(secret)}(?!\w)", re.IGNORECASE)
            if word.search(text) and not any(word.search(action) for action in written):
                fix = f"remove it from {method}, or from secrets if the agent may know the same text, even by chance"
                raise BreachError(f"seed {seed}: {agent!r} can read the secret {secret!r}", fix, method)


def reasoning(case: Case) -> None:
    """No agent can read another agent's reasoning, even if the environment receives it."""
    if len(case.create().possible_agents) == 1:
        raise NotApplicableError("no other agent that could read it")
    for env, seed, _ in _steps(case, _marker):
        for reader in live(env):
            _check_no_reasoning(env, reader, seed)


def _marker(agent: str) -> str:
    return f"only-{''.join(filter(str.isalnum, agent))}-thinks-this"


def _check_no_reasoning(env: AnyEnv, reader: str, seed: int) -> None:
    texts = {method: read(env, reader) for method, read in _READ.items()}
    texts["info"] = str(env.infos[reader])
    for writer in env.possible_agents:
        for method, text in texts.items():
            if writer != reader and _marker(writer) in text:
                raise BreachError(
                    f"seed {seed}: {reader!r} can read reasoning of {writer!r} in {method}",
                    "set observes_reasoning to False, or pass on only the answer that split_reasoning returns",
                    "act" if method == "info" else method,
                )


def information_sets(case: Case) -> None:
    """The texts of an agent do not change if only information hidden from it changes."""
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
                            f"seed {seed}, step {count}: the text of {agent!r} depends on information hidden from it: "
                            f"{_around(was, became)!r} becomes {_around(became, was)!r}",
                            f"use only information that the agent has in {method}",
                            method,
                        )
                changed = changed or _hidden(env, agent) != _hidden(other, agent)
                other.close()
    if not changed:
        fix = "change the texts of secrets(agent), or what the other agents see, in swap_secrets"
        raise BreachError("swap_secrets changed nothing in any episode", fix, "swap_secrets")


def _legal(env: AnyEnv, agent: str) -> str:
    method = hook(env, "legal_actions")
    acts = env.agent_selection == agent or hasattr(env.unwrapped, "act_all")
    return str(list(method(agent) or ())) if method is not None and acts else ""


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
    """Return the part of `text` around its first difference from `other`."""
    start = next((i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b), min(len(text), len(other)))
    return text[max(start - 20, 0) : start + 40]


def _with_few_seeds(check: Check) -> Check:
    return lambda case: check(replace(case, seeds=case.seeds[:4]))


CHECKS: dict[str, dict[str, Check]] = {
    "full": {
        "pettingzoo api": pettingzoo_api,
        "pettingzoo seed": pettingzoo_seed,
        "pettingzoo parallel": pettingzoo_parallel,
        "ends": ends,
        "num agents": num_agents,
        "spaces": spaces,
        "observing": observing,
        "rewards and infos": rewards_and_infos,
        "legal actions": legal_actions,
        "determinism": determinism,
        "global randomness": global_randomness,
        "odd actions": odd_actions,
        "fork": fork,
        "leak": leak,
        "reasoning": reasoning,
        "information sets": information_sets,
        "other process": lambda case: other_process(case.create, case.spec, case.seeds),
    },
    "adapter": {
        "plays": plays,
        "spaces": _with_few_seeds(spaces),
        "determinism": _with_few_seeds(determinism),
        "reasoning": _with_few_seeds(reasoning),
    },
}
"""Checks by level, in the order in which they run."""

_SEED_THE_GAME = (
    "obs_to_text must not draw random numbers or count its calls. If it does not, the wrapped game uses other "
    "randomness than the seed: derive a class from it whose reset(seed) seeds that"
)
REJECT_TEXT = "for a text that is no action, let text_to_action return None or raise ValueError, LookupError or "
REJECT_TEXT += "ArithmeticError"
FIXES_OF_WRAP = {
    "ends": "pass max_turns to wrap or register",
    "spaces": "shorten the result of obs_to_text, remove lone surrogates, or pass max_observation_chars to wrap",
    "observing": "obs_to_text must return the same text for the same observation, and must not change the game or "
    "count its calls",
    "legal actions": "legal_actions must list texts that text_to_action accepts and the game's mask allows",
    "rewards and infos": "the wrapped game causes this: derive a class from it with finite rewards that last() reports",
    "odd actions": REJECT_TEXT,
    **dict.fromkeys(("pettingzoo seed", "determinism", "other process"), _SEED_THE_GAME),
    "global randomness": f"{_SEED_THE_GAME} and does not use the global generators of the process",
}
"""Remedies by check for environments made by `wrap`."""
CHECKS_OF_FUNCTIONS = frozenset(("spaces", "observing", "legal actions"))
"""Checks whose failures are caused by the functions passed to `wrap`, not by the game."""
