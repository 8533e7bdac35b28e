"""Programs that make their own clients: the gateway answers, and nothing reaches a real API."""

import asyncio
import contextlib
import importlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import urllib.request
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import openai
import pytest

import forge_agents as fa
from forge_agents.programs.context import running_program
from forge_agents.programs.gateway import Gateway

from . import helpers  # noqa: TID252 (tests are no installed package)

REAL = {"OPENAI_API_KEY": "sk-real", "ANTHROPIC_API_KEY": "sk-ant-real", "ANTHROPIC_AUTH_TOKEN": "real",
        "OPENAI_ORG_ID": "org-real", "OPENAI_API_BASE": "https://api.openai.com/v1"}  # fmt: skip
ASK = {"model": "agent", "messages": [{"role": "user", "content": "?"}]}


def _imported(name):
    with contextlib.suppress(ImportError):
        return importlib.import_module(name)


@pytest.fixture(autouse=True)
def no_real_api(monkeypatch):
    """The user's keys are set, and a request that leaves this machine fails the test."""
    for name, value in REAL.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    left = []

    def checked(handle, error):
        def send(transport, request):
            if request.url.host != "127.0.0.1":
                left.append(request.url)
                raise error("left this machine")
            return handle(transport, request)

        return send

    for library in filter(None, map(_imported, ("httpx", "httpx2"))):
        for kind in (library.HTTPTransport, library.AsyncHTTPTransport):
            name = "handle_request" if kind is library.HTTPTransport else "handle_async_request"
            monkeypatch.setattr(kind, name, checked(getattr(kind, name), library.ConnectError))
    yield left
    assert not left


def played(program, **options):
    return helpers.played(program, fa.Scripted(lambda observation: f"answer to {observation}"), **options)


def asked(client, text="?"):
    body = {"model": "agent", "messages": [{"role": "user", "content": text}]}
    return client.chat.completions.create(**body).choices[0].message.content


def makes_openai(task, client):
    return asked(openai.OpenAI(max_retries=0))


async def makes_async_openai(task, client):
    async with openai.AsyncOpenAI(max_retries=0) as mine:
        return (await mine.chat.completions.create(**ASK)).choices[0].message.content


def makes_anthropic(task, client):
    anthropic = pytest.importorskip("anthropic")
    message = anthropic.Anthropic(max_retries=0).messages.create(max_tokens=9, **ASK)
    return message.content[0].text


SCRIPT = f"import openai; print(openai.OpenAI().chat.completions.create(**{ASK}).choices[0].message.content)"


def starts_a_process(task, client):
    return subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout.strip()


async def asks_from_a_task(task, client):
    return await asyncio.to_thread(makes_openai, task, client)


def asks_from_a_pool(task, client):
    with ThreadPoolExecutor() as pool:
        return pool.submit(makes_openai, task, client).result()


def asks_from_a_thread(task, client):
    said = []
    thread = threading.Thread(target=lambda: said.append(makes_openai(task, client)))
    thread.start()
    thread.join()
    return said[0]


async def asks_from_the_pool_of_the_loop(task, client):
    return await asyncio.get_running_loop().run_in_executor(None, makes_openai, task, client)


def shell_of_os(task, client):
    with tempfile.NamedTemporaryFile("r") as file:
        status = os.system(f"{shlex.join([sys.executable, '-c', SCRIPT])} > {file.name}")
        assert os.waitstatus_to_exitcode(status) == 0 and os.waitstatus_to_exitcode(os.system("exit 3")) == 3
        return file.read().strip()


# for processes that cannot import this module
EXPRESSION = f"__import__('openai').OpenAI(max_retries=0).chat.completions.create(**{ASK}).choices[0].message.content"


def asks_from_a_spawned_process(task, client):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(eval, EXPRESSION).result(60)


@pytest.mark.parametrize(
    "program",
    [
        makes_openai, makes_async_openai, makes_anthropic, starts_a_process, asks_from_a_task, asks_from_a_pool,
        asks_from_a_thread, asks_from_the_pool_of_the_loop, shell_of_os, asks_from_a_spawned_process,
    ],
)  # fmt: skip
def test_client_created_by_a_program_uses_the_gateway(program):
    episode = played(program)
    assert episode.error is None and episode.program_error == "" and len(episode.turns) == 1
    assert helpers.result_of(episode) == "answer to ?"


def test_fork_server_uses_the_variables_of_each_program():
    def program(task, client):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as pool:
            return pool.submit(eval, EXPRESSION).result(60)

    try:
        for _ in range(2):
            episode = played(program)
            assert episode.error is None and helpers.result_of(episode) == "answer to ?"
    finally:
        multiprocessing.forkserver._forkserver._stop()


def test_concurrent_programs_have_separate_environment_variables():
    seen = []

    async def program(task, client):
        os.environ["OPENAI_API_KEY"] += "!"  # as a program may set it for its own client
        seen.append(dict(os.environ))
        assert "OPENAI_ORG_ID" not in os.environ and os.environ.get("ANTHROPIC_AUTH_TOKEN") is None
        return (await client.chat.completions.create(**ASK)).choices[0].message.content

    episodes = played(program, count=3)
    assert all(episode.program_error == "" and episode.error is None for episode in episodes)
    assert len({variables["OPENAI_API_KEY"] for variables in seen}) == 3
    assert not any("real" in value for variables in seen for value in variables.values() if "sk-" in value)
    assert {name: os.environ[name] for name in REAL} == REAL and "OPENAI_BASE_URL" not in os.environ


def test_client_kept_between_episodes_uses_the_current_key():
    saved = []

    def program(task, client):
        if not saved:
            saved.append(openai.OpenAI(max_retries=0))  # as a module's cached client is
        return asked(saved[0], str(task))

    for task in ("one", "two"):
        episode = played(program, tasks=[task])
        assert episode.error is None and helpers.result_of(episode) == f"answer to {task}"


def test_client_created_before_the_program_is_rejected():
    pytest.importorskip("anthropic")
    import anthropic

    with_key = openai.OpenAI(max_retries=3)
    with_key.base_url = "https://api.openai.com/v1/"
    asynchronous = openai.AsyncOpenAI(base_url="https://api.openai.com/v1", max_retries=3)
    others = anthropic.Anthropic(max_retries=3)

    async def is_async(task, client):
        return await asynchronous.chat.completions.create(**ASK)

    def calls_first(task, client):
        asked(client)
        return asked(with_key)

    def hides_the_error(task, client):
        try:
            asked(with_key)
        except openai.OpenAIError:
            return "nothing"

    for program, host in (
        (lambda task, client: asked(with_key), "openai"),
        (lambda task, client: others.messages.create(max_tokens=9, **ASK), "anthropic"),
        (is_async, "openai"),
        (hides_the_error, "openai"),
        (calls_first, "openai"),
    ):
        episode = played(program)
        reason = episode.program_error if program is calls_first else episode.error.message
        assert f"a request to api.{host}.com was not sent" in reason
        assert "Ask models through the client that the program is given" in reason
        assert "No call came through the gateway" not in reason, "one came, and was refused"


@pytest.mark.parametrize(
    "url",
    ["https://eu.api.openai.com/v1", "https://api.anthropic.com/v1", "https://mine.openai.azure.com/openai/v1",
     "https://mine.openai.azure.com/openai/deployments/gpt", "https://proxy.example/v1"],
)  # fmt: skip
def test_requests_to_regional_azure_or_configured_servers_are_rejected(monkeypatch, url):
    monkeypatch.setenv("OPENAI_BASE_URL", "https://proxy.example/v1")
    earlier = openai.OpenAI(base_url=url, max_retries=0)
    episode = played(lambda task, client: asked(earlier))
    assert f"a request to {earlier.base_url.host} was not sent" in episode.error.message


def test_request_without_a_client_is_rejected_before_it_is_sent():
    def program(task, client):
        body, headers = json.dumps(ASK).encode(), {"Authorization": "Bearer sk-real"}
        address = "https://api.openai.com/v1/chat/completions"
        urllib.request.urlopen(urllib.request.Request(address, body, headers), timeout=5)

    episode = played(program)
    assert "a request to api.openai.com was not sent" in episode.error.message


def test_other_requests_of_a_program_are_not_changed(no_real_api):
    embeds = openai.OpenAI(base_url="https://api.openai.com/v1", max_retries=0)

    def program(task, client):
        with contextlib.suppress(openai.APIConnectionError):
            embeds.embeddings.create(model="m", input="?")
        return asked(client)

    episode = played(program)
    assert episode.error is None and [url.path for url in no_real_api] == ["/v1/embeddings"]
    no_real_api.clear()


def test_program_without_calls_gets_advice_in_its_error():
    episode = played(lambda task, client: "7")
    assert "ended before it asked any model: it returned '7'. No call came through the gateway" in episode.error.message
    episode = played([sys.executable, "-c", "print(7)"])
    assert "must ask models at OPENAI_BASE_URL or ANTHROPIC_BASE_URL" in episode.error.message


@pytest.mark.parametrize("chosen", ["http://127.0.0.1:9/v1", "http://127.0.0.1:port/v1"])
def test_clients_and_variables_outside_of_programs_are_not_changed(serve_chat, monkeypatch, chosen):
    monkeypatch.setenv("OPENAI_BASE_URL", chosen)  # another server on the same host, or no address
    server = serve_chat(lambda request: "3")
    with Gateway() as gateway, gateway.open({"agent": "agent"}) as session:
        with running_program(session):
            assert os.environ["OPENAI_API_KEY"] == session.token and os.getenv("OPENAI_BASE_URL") == session.url
            pool = ThreadPoolExecutor(1)
            assert pool.submit(os.getenv, "OPENAI_API_KEY").result() == session.token
            assert asked(openai.OpenAI(base_url=server.url, api_key="k")) == "3", "other servers may be asked"
        with pool:  # its thread was started by the program
            assert pool.submit(os.getenv, "OPENAI_API_KEY").result() == "sk-real"
        assert os.environ["OPENAI_API_KEY"] == "sk-real" and "OPENAI_ORG_ID" in list(os.environ)
    assert server.headers_seen[0]["authorization"] == "Bearer k"


def test_reward_function_has_the_variables_of_the_process():
    episode = played(makes_openai, reward=lambda task, result: float(os.environ["OPENAI_API_KEY"] == "sk-real"))
    assert episode.rewards == {"agent": 1.0}


def test_openais_agents_sdk_sends_no_traces_from_programs():
    from agents.tracing.provider import DefaultTraceProvider

    def kind_of_trace():
        return type(DefaultTraceProvider().create_trace("a trace")).__name__

    def program(task, client):
        asked(client)
        return kind_of_trace()

    assert helpers.result_of(played(program)) == "NoOpTrace"
    assert kind_of_trace() == "TraceImpl", "outside of programs it is the user's choice"
