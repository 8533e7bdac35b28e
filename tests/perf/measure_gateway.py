"""What a call costs on its way through the gateway: a program beside a game that is asked the same.

    python tests/perf/measure_gateway.py [--programs 1 64] [--calls 50] [--rounds 5]
    python tests/perf/measure_gateway.py --model smollm2-135m-instruct --programs 64 --calls 2 8 [--tokens 32]

In: numbers of programs at once, calls of each. Out: a table, medians of the rounds, in which the arms take turns. Waits
for nothing. The programs' clients run in a process of their own, because they would cost the same with any server:
OpenAI's, and a bare one that does the least that HTTP asks for, beside which the gateway's own part is seen. Processor
time of a call: ours (play and gateway), the clients', and with a model the engine's. Without one a script answers, so
that all of it is overhead. What a program loses is its speed over the game's of the same round; with a model, which
reads the same tokens in each arm, it is told beside that how many calls share a step of the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from typing import Any

from perf_common import cpu_seconds

import forge_agents as fa
from forge_agents.rollout.episode import play
from forge_agents.rollout.players import PolicyEngine
from forge_agents.serving.config import EnginePlan


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


async def _converse(url: str, key: str, calls: int) -> None:
    """Go on from each answer, as the game does."""
    from openai import AsyncOpenAI

    said: list[Any] = []
    async with AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=None) as client:
        for number in range(calls):
            said.append({"role": "user", "content": f"message {number}"})
            reply = await client.chat.completions.create(model="agent", messages=said)
            said.append({"role": "assistant", "content": reply.choices[0].message.content})


async def _converse_barely(url: str, key: str, calls: int) -> None:
    """The same over a socket."""
    host, port = re.findall(r"//(.*):(\d+)/", url)[0]
    hears, says = await asyncio.open_connection(host, port)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {host}\r\nauthorization: Bearer {key}\r\ncontent-length: "
    said: list[Any] = []
    for number in range(calls):
        said.append({"role": "user", "content": f"message {number}"})
        body = json.dumps({"model": "agent", "messages": said})
        says.write(f"{head}{len(body)}\r\n\r\n{body}".encode())
        length = re.search(rb"content-length: (\d+)", await hears.readuntil(b"\r\n\r\n"))
        assert length is not None
        said.append(json.loads(await hears.readexactly(int(length[1])))["choices"][0]["message"])
    says.close()


CLIENTS = {"OpenAI's": _converse, "a bare": _converse_barely}


async def _clients(calls: int) -> None:
    """Converse as each line of the standard input says, all at once; say the key of each at its end."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)

    async def serve(url: str, key: str, whose: str) -> None:
        await CLIENTS[whose](url, key, calls)
        sys.stdout.write(f"{key}\n")
        sys.stdout.flush()

    async with asyncio.TaskGroup() as group:
        async for line in lines:
            group.create_task(serve(*line.decode().strip().split(maxsplit=2)))


class Clients:
    """The process of the clients."""

    def __init__(self, calls: int) -> None:
        words = [sys.executable, __file__, "--clients", "--calls", str(calls)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        self._open: dict[str, Future[float]] = {}
        self.pid = self._process.pid
        threading.Thread(target=self._listen, daemon=True).start()

    async def program(self, task: Any, client: Any) -> float:
        """Has its conversation there; the task says whose client."""
        done = self._open[client.api_key] = Future()
        assert self._process.stdin is not None
        self._process.stdin.write(f"{client.base_url} {client.api_key} {task}\n")
        return await asyncio.wrap_future(done)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._open.pop(line.strip()).set_result(1.0)
        for left in self._open.values():
            left.set_exception(RuntimeError("the process of the clients ended"))

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


async def _arms(asked: argparse.Namespace, programs: int, policy: Any, engine: Any = None) -> None:
    """Print a line for each arm; `engine` answers, if there is one."""
    clients = Clients(Game.calls)
    served = {"perf": engine} if engine else {}
    pids = [os.getpid(), clients.pid]
    if engine:
        pids.append((await engine.engine.info()).pid)
    found: dict[str, list[list[float]]] = {"a game": [], **{whose: [] for whose in CLIENTS}}
    for lap in range(asked.rounds + 1):
        first: set[tuple[int, ...]] = set()
        for name, rows in found.items():
            envs: list[Any] = [
                fa.Program(clients.program, tasks=(name,), max_turns=Game.calls + 1, timeout_s=600)
                if name in CLIENTS
                else Game()
                for _ in range(programs)
            ]
            steps = (await engine.engine.info()).steps if engine else 0
            wall, cpu = time.perf_counter(), [cpu_seconds(pid) for pid in pids]
            episodes = await asyncio.gather(
                *(
                    play(env, {"agent": policy}, seed=0, engines=served, rng_key=f"{lap}/{n}", max_turns=10**6)
                    for n, env in enumerate(envs)
                )
            )
            wall = time.perf_counter() - wall
            spent = [cpu_seconds(pid) - before for pid, before in zip(pids, cpu, strict=True)]
            for env in envs:
                env.close()
            assert all(episode.error is None and len(episode.turns) == Game.calls for episode in episodes)
            calls = programs * Game.calls
            sampled = sum(len(turn.response_ids) for episode in episodes for turn in episode.turns)
            steps = (await engine.engine.info()).steps - steps if engine else 1
            first |= {episode.turns[0].prompt_ids for episode in episodes}
            if lap:  # the first has imports and new threads in it
                rows.append([sampled / wall if engine else 1000 * wall / calls, sampled / calls, sampled / steps])
                rows[-1] += [1000 * each / calls for each in spent]
        assert len(first) == 1, "the game and the programs ask for different tokens"
    clients.close()
    for name, rows in found.items():
        speed, length, together, *spent = (statistics.median(column) for column in zip(*rows, strict=True))
        told = f"{speed:7.2f} ms wall"
        if engine:
            told = f"{speed:7.1f} tokens/s, {length:.0f} a call, {together:.1f} a step"
        whose = zip(("ours", "the clients'", "the engine's"), spent, strict=False)
        cost = ", ".join(f"{who} {each:.2f}" for who, each in whose)
        sys.stdout.write(f"{programs:4} x {Game.calls} calls  {name:8} {told};  ms of cpu a call: {cost}\n")
        if name in CLIENTS and engine:
            lost = sorted(100 - 100 * row[0] / game[0] for row, game in zip(rows, found["a game"], strict=True))
            sys.stdout.write(f"{'':15}loses {statistics.median(lost):.1f} % ({lost[0]:.1f} to {lost[-1]:.1f})\n")
        sys.stdout.flush()


@contextlib.asynccontextmanager
async def _engine(model: str, programs: int, tokens: int) -> AsyncIterator[tuple[fa.Policy, PolicyEngine]]:
    from forge_agents.models.resolve import resolve
    from forge_agents.rollout.rendering import Renderer
    from forge_agents.runtime import mesh
    from forge_agents.serving import EngineProcess

    folder = resolve(model)
    async with mesh.session():
        config = EnginePlan(model=str(folder), max_model_len=1024, max_num_seqs=programs, kv_cache_gb=2.0)
        engine = await EngineProcess.start(config, name="engine", timeout_s=600)
        policy = fa.Policy(str(folder), name="perf", sampling=fa.Sampling(max_tokens=tokens))
        yield policy, PolicyEngine(engine, Renderer.of(folder))
        await engine.stop()


async def _measure(asked: argparse.Namespace) -> None:
    for programs in asked.programs:
        script = contextlib.nullcontext((fa.Scripted(lambda seen: "ok"),))
        async with _engine(asked.model, programs, asked.tokens) if asked.model else script as answers:
            for Game.calls in asked.calls:
                await _arms(asked, programs, *answers)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--calls", type=int, nargs="+", default=[50])
    parser.add_argument("--model", help="an engine of this model answers, instead of a script")
    parser.add_argument("--tokens", type=int, default=32, help="most of an answer, with a model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asyncio.run(_clients(asked.calls[0]) if asked.clients else _measure(asked))


if __name__ == "__main__":
    main()
