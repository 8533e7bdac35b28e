"""(f) Microseconds per environment step beyond the bare PettingZoo loop, 1,000 live episodes, memory of one.

In: `Options`. Out: microseconds, steps per second, bytes. Waits for one child with a deadline, on one core.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.spaces import Space, Text
from perf_common import Options, goal, in_child, median
from pettingzoo import AECEnv

from forge_agents import make
from forge_agents.envs.env import Outcome, TurnEnv
from forge_agents.policy import AnyPolicy, Policy, Sampling, Scripted
from forge_agents.rollout.players import PolicyEngine
from forge_agents.rollout.rollout import Rollout
from forge_agents.runtime.threads import all_or_first_error
from forge_agents.types import Completion, VersionSpan

SEATS = ("player_0", "player_1")
LENGTH = 200
"""Decisions of one episode of the empty game."""
GAME = "forge/TicTacToe-v0"


def measure(options: Options) -> list[dict[str, Any]]:
    """The record ``env``."""
    found = in_child(run_env, options, timeout_s=600)
    return [
        {
            "measure": "env",
            **found,
            "peer": "a hand-written PettingZoo AECEnv in agent_iter, last, step; the same text game in that loop",
            "ratio": {"live_over_bare": round(found["live"]["steps_per_s"] / found["live"]["bare_steps_per_s"], 4)},
            "goals": {
                "overhead_us": goal(found["step"]["overhead_us"], 20, at_most=True),
                "rollout_overhead_us": goal(found["step"]["rollout_overhead_us"], 20, at_most=True),
                "live_over_bare": goal(
                    found["live"]["steps_per_s"] / found["live"]["bare_steps_per_s"], 0.5, at_most=False
                ),
                "kB_per_live_episode": goal(found["memory"]["kB_per_live_episode"], 50, at_most=True),
            },
        }
    ]


def run_env(options: Options) -> dict[str, Any]:
    """All numbers, on one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    episodes = 20 if options.quick else 1000
    return {
        "step": median([_steps(2 if options.quick else 100) for _ in range(options.rounds)]),
        "live": median([_live(episodes) for _ in range(options.rounds)]),
        "memory": _memory(episodes),
    }


# ---- one step


class Empty(TurnEnv):
    """A game that does nothing, as a `TurnEnv`."""

    possible_agents = SEATS

    def setup(self, rng: np.random.Generator) -> None:
        self.count = 0

    def instructions(self, agent: str) -> str:
        return ""

    def observe_text(self, agent: str) -> str:
        return "go on"

    def act(self, agent: str, action: str) -> Outcome:
        self.count += 1
        return Outcome(rewards={agent: 1.0}, done=self.count == LENGTH)


class BareEmpty(AECEnv):  # type: ignore[misc]  # PettingZoo ships no types
    """The same game as PettingZoo's tutorial would write it."""

    metadata = {"name": "empty"}
    possible_agents = list(SEATS)

    @functools.cache  # noqa: B019  # PettingZoo's own idiom
    def observation_space(self, agent: str) -> Space[Any]:
        return Text(100)

    action_space = observation_space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.agents, self.count = list(SEATS), 0
        self.rewards, self._cumulative_rewards = dict.fromkeys(SEATS, 0), dict.fromkeys(SEATS, 0)
        self.terminations, self.truncations = dict.fromkeys(SEATS, False), dict.fromkeys(SEATS, False)
        self.infos: dict[str, dict[str, Any]] = {agent: {} for agent in SEATS}
        self.agent_selection = SEATS[0]

    def observe(self, agent: str) -> str:
        return "go on"

    def step(self, action: str | None) -> None:
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0
        self.count += 1
        self._clear_rewards()
        self.rewards[agent] = 1
        if self.count == LENGTH:
            self.terminations = dict.fromkeys(SEATS, True)
        self._accumulate_rewards()
        self.agent_selection = SEATS[self.count % 2]
        self._deads_step_first()


def _bare_loop(env: AECEnv, decide: Callable[[str], str], seed: int) -> int:
    """PettingZoo's loop. Returns the number of decisions."""
    decisions = 0
    env.reset(seed=seed)
    for _ in env.agent_iter():
        observation, _, terminated, truncated, _ = env.last()
        over = terminated or truncated
        env.step(None if over else decide(observation))
        decisions += not over
    return decisions


def _steps(episodes: int) -> dict[str, float]:
    def timed(play: Callable[[], int]) -> float:
        started = time.process_time()
        decisions = play()
        return (time.process_time() - started) / decisions * 1e6

    def looped(env: AECEnv) -> int:
        return sum(_bare_loop(env, lambda _: "on", 1) for _ in range(episodes))

    async def rolled() -> int:  # returns a number: asyncio.run writes out the result of what it runs (Python 3.11)
        rollout = Rollout(make_env=Empty, env_id="perf/Empty", policies=Scripted(lambda _: "on"))
        group = await rollout.group(1, episodes)
        return sum(len(t.turns) for episode in group.episodes for t in episode.trajectories.values())

    found = {
        "bare_us": timed(lambda: looped(BareEmpty())),
        "turn_env_us": timed(lambda: looped(Empty())),
        "rollout_us": timed(lambda: asyncio.run(rolled())),
    }
    return {
        **found,
        "overhead_us": found["turn_env_us"] - found["bare_us"],
        "rollout_overhead_us": found["rollout_us"] - found["bare_us"],
    }


# ---- many episodes at once


def _first_free(observation: str) -> str:
    return observation.rpartition("Free: ")[2].partition(",")[0]


async def _play_all(episodes: int, seats: Any, served: dict[str, PolicyEngine]) -> int:
    rollout = Rollout(make_env=lambda: make(GAME), env_id=GAME, policies=seats, engines=served)
    groups = await all_or_first_error(rollout.group(seed, 1) for seed in range(episodes))
    failed = [episode.error for group in groups for episode in group.failed]
    if failed:
        raise RuntimeError(f"{len(failed)} episodes failed, the first with {failed[0]}")
    return sum(len(episode.turns) for group in groups for episode in group.episodes)


def _live(episodes: int) -> dict[str, float]:
    started = time.process_time()
    bare = sum(_bare_loop(make(GAME), _first_free, seed) for seed in range(episodes))
    middle = time.process_time()
    live = asyncio.run(_play_all(episodes, Scripted(_first_free), {}))
    ended = time.process_time()
    return {
        "episodes": float(episodes),
        "bare_steps_per_s": bare / (middle - started),
        "steps_per_s": live / (ended - middle),
    }


# ---- memory


class _Held:
    """An engine that answers with the next of its squares, and then holds its answers back until released."""

    max_model_len = 1 << 20

    def __init__(self, squares: tuple[int, ...], episodes: int, released: asyncio.Event) -> None:
        self.squares, self.waiting, self.episodes, self.released = squares, 0, episodes, released
        self.all_wait = asyncio.Event()

    async def generate(self, prompt_ids: tuple[int, ...], sampling: Sampling, **_: Any) -> Completion:
        turn = len(prompt_ids) // 100
        if turn == len(self.squares):
            self.waiting += 1
            if self.waiting == self.episodes:
                self.all_wait.set()
            await self.released.wait()
            return _completion(9)  # illegal: the end
        return _completion(self.squares[turn])


def _completion(token: int) -> Completion:
    spans = (VersionSpan(version=0, start=0, end=8),)
    return Completion(token_ids=(token,) * 8, logprobs=(-0.5,) * 8, finish_reason="stop", versions=spans)


class _Hundred:
    """A renderer whose every turn makes the prompt a hundred tokens longer."""

    stop_ids: tuple[int, ...] = ()

    def begin(self, messages: object) -> tuple[int, ...]:
        return (1,) * 60

    def go_on(
        self, prompt_ids: tuple[int, ...], response_ids: tuple[int, ...], messages: object
    ) -> tuple[int, ...]:
        return (*prompt_ids, *response_ids, *(1,) * (100 - len(response_ids)))

    def sections(self, response_ids: tuple[int, ...]) -> tuple[str, str, str]:
        return "", "", str(response_ids[0])


def _memory(episodes: int) -> dict[str, float]:
    """Bytes that Python holds for live episodes in their fifth turn, beyond their environments."""
    make(GAME).reset(seed=0)
    gc.collect()
    tracemalloc.start()
    alone = []
    for seed in range(episodes):
        env = make(GAME)
        env.reset(seed=seed)
        for square in "0213":
            env.step(square)
        alone.append(env)
    gc.collect()
    environments = tracemalloc.get_traced_memory()[0]
    alone.clear()
    gc.collect()
    live = asyncio.run(_held(episodes))
    tracemalloc.stop()
    return {
        "kB_per_environment": environments / episodes / 1e3,
        "kB_per_live_episode": (live - environments) / episodes / 1e3,
    }


async def _held(episodes: int) -> int:
    before = tracemalloc.get_traced_memory()[0]
    released = asyncio.Event()
    first, second = _Held((0, 1), episodes, released), _Held((2, 3), episodes, released)
    renderer: Any = _Hundred()
    seats: dict[str, AnyPolicy] = {"player_1": Policy("x", name="x"), "player_2": Policy("o", name="o")}
    served = {"x": PolicyEngine(first, renderer), "o": PolicyEngine(second, renderer)}
    playing = asyncio.ensure_future(_play_all(episodes, seats, served))
    await asyncio.wait_for(first.all_wait.wait(), 300)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] - before
    released.set()
    await asyncio.wait_for(playing, 300)
    return held
