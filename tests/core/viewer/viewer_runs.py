"""Runs as trainers and benchmarks write them, and the viewer's server in a thread."""

from __future__ import annotations

import json
import socket
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from forge_agents.types import Episode, EpisodeError, Trajectory, Turn, VersionSpan

TOKEN = "secret-token"


def episode(
    *, env="my/Game-v0", seed=7, words="hello", reward=1.0, error=None, agents=("a", "b"), step=0, ids=(104, 105)
) -> dict[str, Any]:
    """A row of ``episodes.jsonl`` as a training run writes it: two turns of each agent."""
    trajectories = {
        agent: Trajectory(
            agent=agent,
            policy="hero",
            instructions=f"You are {agent}.",
            env_id=env,
            seed=seed,
            turns=tuple(
                Turn(
                    agent=agent,
                    index=place + len(agents) * turn,
                    observation=f"what {agent} reads in turn {turn}",
                    action=f"{words} {agent} {turn}",
                    reward=reward if turn else 0.0,
                    policy="hero",
                    prompt_ids=(1, 2, 3),
                    response_ids=ids,
                    logprobs=tuple(-0.5 * (at + 1) for at in range(len(ids))),
                    versions=(VersionSpan(version=step, start=0, end=1), VersionSpan(version=step + 1, start=1, end=9)),
                    finish_reason="stop",
                    generate_s=0.25,
                    terminated=bool(turn),
                )
                for turn in range(2)
            ),
        )
        for place, agent in enumerate(agents)
    }
    failed = error and EpisodeError(where="step", kind="ValueError", message=error, trace="Traceback ...")
    whole = Episode(env_id=env, seed=seed, trajectories=trajectories, error=failed or None, duration_s=1.5)
    rewards = dict.fromkeys(agents, 0.25)
    advantages = {agent: [-1.0, 0.5] for agent in agents}
    return {"step": step, "rewards": rewards, "advantages": advantages, **asdict(whole)}


def record(*, env="my/Game-v0", seed=7, error="", reward=1.0) -> dict[str, Any]:
    """A row as a benchmark writes it."""
    seat = {"player": "random", "reward": reward, "success": True, "decisions": 3, "invalid": 0, "forfeit": False,
            "cut_off": 0, "tokens": 5, "prompt_tokens": 9}  # fmt: skip
    return {"key": "k", "env": env, "seed": seed, "sample": 0, "lineup": {"a": "random"}, "end": "terminated",
            "seats": {} if error else {"a": seat}, "error": error, "seconds": 0.5}  # fmt: skip


def write_lines(file: Path, rows) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as opened:
        opened.writelines(json.dumps(row) + "\n" for row in rows)
    return file


def metrics(steps: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"step": step, "reward/mean": step / 10, "reward/ci": 0.05, "learner/loss": None if step == 1 else -0.1,
         "time/collect_s": 3.0, "time/score_s": 0.5, "time/learn_s": 1.0, "time/sync_s": 0.5, "time/step_s": 5.0}
        for step in range(start, start + steps)
    ]  # fmt: skip


class Server:
    """The viewer of some folders on a port of its own."""

    def __init__(self, folders: list[Path], *, index: bool = True) -> None:
        import uvicorn

        from forge_agents.runtime.connections import Server as BoundedServer
        from forge_agents.runtime.connections import http_settings
        from forge_agents.viewer.runs import find_runs
        from forge_agents.viewer.server import make_app, watch

        self.runs = find_runs(folders)
        listening = socket.create_server(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/{TOKEN}/"
        config = uvicorn.Config(make_app(self.runs, TOKEN), **http_settings() | {"log_level": "error"})
        self._server, self._stop = BoundedServer(config), threading.Event()
        self._threads = [
            threading.Thread(target=self._server.run, args=([listening],), daemon=True),
            threading.Thread(target=watch, args=(self.runs, self._stop), kwargs={"every_s": 0.05}, daemon=True),
        ]
        for run in self.runs if index else []:
            run.update()
        for thread in self._threads:
            thread.start()

    def get(self, path: str = "", *, url: str = "", method: str = "GET", **headers: str) -> tuple[int, Any, Any]:
        """Return status, headers and body, parsed if it is JSON."""
        request = Request(url or self.url + path, headers=headers, method=method)
        try:
            with urlopen(request, timeout=30) as answer:
                status, told, body = answer.status, answer.headers, answer.read()
        except HTTPError as refusal:
            status, told, body = refusal.code, refusal.headers, refusal.read()
        return status, told, json.loads(body) if told["content-type"] == "application/json" else body.decode()

    def close(self) -> None:
        self._server.should_exit = True
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=60)
