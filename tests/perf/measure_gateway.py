"""What a call costs on its way through client and gateway: a program beside a game that is asked the same.

    python tests/perf/measure_gateway.py [--programs 1 64] [--calls 50]
    python tests/perf/measure_gateway.py --model smollm2-135m-instruct --programs 64 --calls 3 [--tokens 32]

In: numbers of programs at once, calls of each. Out: a table of milliseconds per call, wall and processor, the median of
five runs. Waits for nothing. Nobody decides but a script, so that all of it is overhead. With a model an engine answers
both, in turns: then tokens per second, and the processor time of both processes per call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any

from perf_common import cpu_seconds

import forge_agents as fa
from forge_agents.rollout.rollout import play


class Game(fa.TurnEnv):
    """Asks as often as the programs."""

    possible_agents = ("agent",)
    calls = 50

    def setup(self, rng):
        self.asked = 0

    def instructions(self, agent):
        return ""

    def observe_text(self, agent):
        return f"message {self.asked}"

    def act(self, agent, action):
        self.asked += 1
        return fa.Outcome(rewards={agent: 1.0}, done=self.asked == Game.calls)


def _asked(number: int) -> dict[str, Any]:
    return {"model": "agent", "messages": [{"role": "user", "content": f"message {number}"}]}


async def through_openai(task: Any, client: Any) -> float:
    """A program with OpenAI's client."""
    for number in range(Game.calls):
        await client.chat.completions.create(**_asked(number))
    return 1.0


def bare(task: Any, client: Any) -> float:
    """A program that writes its requests by hand: what is left is the gateway."""
    connection = HTTPConnection(client.base_url.host, client.base_url.port)
    key = {"authorization": f"Bearer {client.api_key}"}
    for number in range(Game.calls):
        connection.request("POST", "/v1/chat/completions", json.dumps(_asked(number)), key)
        connection.getresponse().read()
    connection.close()
    return 1.0


async def conversation(task: Any, client: Any) -> float:
    """A program with OpenAI's client that goes on from each answer, as the game does."""
    said: list[Any] = []
    for number in range(Game.calls):
        said.append({"role": "user", "content": f"message {number}"})
        reply = await client.chat.completions.create(model="agent", messages=said)
        said.append({"role": "assistant", "content": reply.choices[0].message.content})
    return 1.0


async def _beside_the_engine(model: str, programs: int, tokens: int, rounds: int) -> None:
    """Print a line for each arm: an engine answers a game, and the same conversation of a program."""
    from forge_agents.models.resolve import resolve
    from forge_agents.rollout.players import Served
    from forge_agents.rollout.rendering import Renderer
    from forge_agents.runtime import mesh
    from forge_agents.serving import Engine, EngineConfig

    folder = resolve(model)
    arms: dict[str, Callable[[], Any]] = {
        "a game": Game,
        "a program": lambda: fa.Program(conversation, max_turns=Game.calls + 1),
    }
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in arms}
    async with mesh.session():
        config = EngineConfig(model=str(folder), max_model_len=1024, max_num_seqs=programs, kv_cache_gb=2.0)
        engine = await Engine.start(config, name="engine", timeout_s=600)
        logs = mesh.log_folder("engine")
        assert logs is not None
        pids = (os.getpid(), int((logs / "0.pid").read_text()))
        served = {"perf": Served(engine, Renderer.of(folder))}
        policy = fa.Policy(str(folder), name="perf", sampling=fa.Sampling(max_tokens=tokens))
        for lap in range(rounds + 1):
            for name, make in arms.items():
                envs = [make() for _ in range(programs)]
                wall, cpu = time.perf_counter(), [cpu_seconds(pid) for pid in pids]
                episodes = await asyncio.gather(
                    *(
                        play(env, {"agent": policy}, seed=0, served=served, draw=f"{lap}/{n}")
                        for n, env in enumerate(envs)
                    )
                )
                wall = time.perf_counter() - wall
                ours, engines = (cpu_seconds(pid) - before for pid, before in zip(pids, cpu, strict=True))
                for env in envs:
                    env.close()
                assert all(episode.error is None and len(episode.turns) == Game.calls for episode in episodes)
                sampled = sum(len(turn.response_ids) for episode in episodes for turn in episode.turns)
                found[name] += [(sampled / wall, ours / programs / Game.calls, engines / sampled)] if lap else []
        await engine.stop()
    for name, rows in found.items():
        rate, ours, theirs = (statistics.median(column) for column in zip(*rows, strict=True))
        spent = f"{1000 * ours:6.2f} ms cpu a call, engine {1000 * theirs:6.2f} ms cpu a token"
        sys.stdout.write(f"{programs:4} at once  {name:28} {rate:7.1f} tokens/s  {spent}\n")


async def _cost(make: Callable[[], Any], programs: int) -> tuple[float, float]:
    """Milliseconds per call, wall and processor."""
    envs = [make() for _ in range(programs)]
    answers = {"agent": fa.Scripted(lambda seen: "ok")}
    wall, cpu = time.perf_counter(), time.process_time()
    episodes = await asyncio.gather(*(play(env, answers, seed=0, max_turns=10**6) for env in envs))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    for env in envs:
        env.close()
    assert all(episode.error is None and len(episode.turns) == Game.calls for episode in episodes)
    return 1000 * wall / programs / Game.calls, 1000 * cpu / programs / Game.calls


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--calls", type=int, default=50)
    parser.add_argument("--model", help="an engine of this model answers, instead of a script")
    parser.add_argument("--tokens", type=int, default=32, help="most of an answer, with a model")
    parser.add_argument("--rounds", type=int, default=3, help="with a model")
    asked = parser.parse_args()
    Game.calls = asked.calls
    if asked.model:
        for programs in asked.programs:
            asyncio.run(_beside_the_engine(asked.model, programs, asked.tokens, asked.rounds))
        return
    limit = {"max_turns": asked.calls + 1}
    arms = {
        "a game": Game,
        "a program, requests by hand": lambda: fa.Program(bare, **limit),
        "a program, OpenAI's client": lambda: fa.Program(through_openai, **limit),
    }
    for programs in asked.programs:
        for name, make in arms.items():
            asyncio.run(_cost(make, programs))
            wall, cpu = zip(*(asyncio.run(_cost(make, programs)) for _ in range(5)), strict=True)
            found = f"{statistics.median(wall):6.2f} ms wall  {statistics.median(cpu):6.2f} ms cpu"
            sys.stdout.write(f"{programs:4} at once  {name:28} {found}\n")


if __name__ == "__main__":
    main()
