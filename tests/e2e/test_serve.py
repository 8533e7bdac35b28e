"""A run's adapters on one real server: chats through `fa.Endpoint` with the token, refusals without, a clean end."""

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

import pytest
from cases import Cases, adapted, greedy, seats
from local_processes import use_local_processes
from plain_env import Plain
from process_checks import children_of, command_of, free_port

import forge_agents as fa
from forge_agents.errors import EndpointError
from forge_agents.policy import Endpoint, Sampling
from forge_agents.rollout.endpoint import EndpointClient
from forge_agents.rollout.rendering import Renderer
from forge_agents.types import Message

STARTED_S = 900  # half a minute on an idle machine
TOKEN = "a-token-for-tests"
GREEDY = Sampling(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def trained(tiny_llama, tmp_path_factory):
    """The folder of a run of two adapters."""
    folder = tmp_path_factory.mktemp("run")
    config = fa.GRPOConfig(
        group_size=4,
        groups_per_step=2,
        max_logprob_gap=100.0,  # the sampler keeps the start model
        learner=fa.LearnerConfig(lr=2e-2, threads=1, compute_dtype="float32"),
        engine=fa.EngineConfig(enforce_eager=True, kv_cache_gb=0.02, max_model_len=256),
    )
    with pytest.MonkeyPatch.context() as patch:
        use_local_processes(patch)
        with fa.GRPOTrainer(seats(tiny_llama, fa.LoRA(rank=8, alpha=16)), config=config, out_dir=folder) as trainer:
            trainer.fit(Cases, steps=3)
    return folder


@pytest.fixture(scope="module")
def server(trained, tmp_path_factory):
    """The base of the API, the server's process, and what it said."""
    port = free_port()
    words = ["serve", str(trained), "--port", str(port), "--api_key_env", "MY_TOKEN"]
    log = tmp_path_factory.mktemp("serve") / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "forge_agents.cli.main", *words],
            env={**os.environ, "MY_TOKEN": TOKEN},
            stdout=file,
            stderr=subprocess.STDOUT,
            # the background of a shell has it ignored
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )
    base = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + STARTED_S
        while status(f"{base}/health") != 200:
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield base, process.pid, log
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130 and log.read_text().endswith("the server is stopped\n")
        assert status(f"{base}/health") == 0
    finally:
        process.terminate()
        process.wait(timeout=60)


class Greeting(Plain):
    """Two say something."""

    possible_agents = ["host", "guest"]

    def observe_text(self, agent):
        return "hello"

    def act(self, agent, action):
        return fa.Outcome(done=agent == "guest")


def status(url, token="", method="GET"):
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urlopen(Request(url, headers=headers, method=method), timeout=30) as answer:
            return int(answer.status)
    except HTTPError as refusal:
        return refusal.code
    except (URLError, OSError):
        return 0


async def answer(endpoint):
    client = EndpointClient(endpoint)
    try:
        return await client.ask([Message(role="user", content="hello")], GREEDY)
    finally:
        await client.close()


@pytest.mark.timeout(STARTED_S + 120)
def test_adapters_of_a_run_are_served_to_those_who_have_the_token(server, trained, tiny_llama, monkeypatch):
    base, pid, log = server
    for path in ("/v1/models", "/metrics", "/openapi.json"):
        assert status(base + path) == 401, path
    assert status(f"{base}/v1/chat/completions", method="POST") == 401
    assert status(f"{base}/v1/models", token="a-wrong-token") == 401
    assert status(f"{base}/v1/models", token=TOKEN) == 200

    monkeypatch.setenv("MY_TOKEN", TOKEN)
    prompt, said = Renderer.of(tiny_llama).begin([("user", "hello")]), {}
    for seat in ("low", "high"):
        endpoint = Endpoint(f"{base}/v1", seat, api_key_env="MY_TOKEN", retries=0)
        reply = asyncio.run(answer(endpoint))
        assert reply.usage is not None and 1 <= reply.usage.completion_tokens <= GREEDY.max_tokens
        assert reply.usage.prompt_tokens > len("hello")  # the chat template is around it
        assert reply == asyncio.run(answer(endpoint))
        hf = adapted(tiny_llama, trained / "export" / f"{seat}-hero" / "adapter")
        ids, _ = greedy(hf, prompt, reply.usage.completion_tokens)
        assert reply.text == Renderer.of(tiny_llama).text(ids)
        said[seat] = reply.text
    assert said["low"] != said["high"]
    game = fa.play(Greeting, {"host": replace(endpoint, sampling=GREEDY), "guest": fa.Scripted(lambda seen: "hi")})
    assert [turn.policy for turn in game.turns] == ["endpoint", "scripted"] and game.turns[0].usage is not None
    assert fa.Episode.from_json(game.to_json()) == game
    with pytest.raises(EndpointError, match="401"):
        asyncio.run(answer(Endpoint(f"{base}/v1", "low", retries=0)))

    output = log.read_text()
    assert TOKEN not in output and "token  from MY_TOKEN" in output and f"answering on {base}" in output
    assert "model  low-hero as low-hero, low" in output
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "perf")
    sockets = [*importlib.import_module("ports_table").listeners(pid)]
    assert sockets and all(one.is_local for one in sockets), "no other host reaches the server"
    children = children_of(pid)
    commands = [command_of(each) for each in (pid, *children)]
    assert children and all(commands) and not any(TOKEN in command for command in commands)
