"""What a call costs on its way through client and gateway: a program beside a game that is asked the same.

    python tests/perf/measure_gateway.py [--programs 1 64] [--calls 50]

In: numbers of programs at once, calls of each. Out: a table of milliseconds per call, wall and processor, the median of
five runs. Waits for nothing. Nobody decides but a script, so that all of it is overhead.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from http.client import HTTPConnection
from typing import Any

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
    asked = parser.parse_args()
    Game.calls = asked.calls
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
