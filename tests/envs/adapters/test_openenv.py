import asyncio
import contextlib
import http
import json
import math
import re
import threading
import time

import pytest
from hostile_strings import HOSTILE_STRINGS
from http_servers import served
from team_play import begin
from websockets.asyncio.server import serve

import forge_agents as fa
from forge_agents.envs.env import may_be_silent
from forge_envs.adapters.openenv import OpenEnv

pytest.importorskip("fastmcp")
RELEASED = threading.Event()
"""Set at the end of a test to release hanging servers."""


def guessing(places):
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Say(Action):
        text: str

    class Heard(Observation):
        echo: str = ""

    class Guessing(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed=None, episode_id=None, **kwargs):
            self._state = State(episode_id=episode_id, step_count=0)
            return Heard(echo="Guess a number.", done=False, reward=0.0)

        def step(self, action, timeout_s=None, **kwargs):
            self._state.step_count += 1
            if action.text == "hang":
                RELEASED.wait(60)
            return Heard(echo=f"You said {action.text[:50]}", done=action.text == "7", reward=float(action.text == "7"))

        @property
        def state(self):
            return self._state

    return served(create_fastapi_app(Guessing, Say, Heard, max_concurrent_envs=places))


@pytest.fixture(scope="module")
def server():
    with guessing(8) as url:
        yield url
        RELEASED.set()


def test_an_episode_on_a_server(server):
    env = fa.make("openenv/Server-v0", url=server, action_field="text", instructions="Guess.", timeout_s=60)
    env.reset(seed=0)
    assert env.instructions("agent") == "Guess." and env.observe("agent") == "Guess a number."
    env.step("3")
    assert env.observe("agent") == "You said 3" and env.rewards["agent"] == 0.0
    env.step("7")
    assert env.rewards["agent"] == 1.0 and env.terminations["agent"]
    env.close()


def test_model_whose_context_is_full_gets_the_lowest_reward(server):
    """The server would take an empty text for an answer."""
    env = fa.make("openenv/Server-v0", url=server, action_field="text", illegal_reward=-3.0, timeout_s=60)
    env.reset(seed=0)
    assert may_be_silent(env)
    env.step("")
    assert env.rewards["agent"] == -3.0 and env.terminations["agent"]


def test_actions_can_be_json(server):
    env = begin(fa.make("openenv/Server-v0", url=server, timeout_s=60))
    env.step('{"text": "7"}')
    assert env.rewards["agent"] == 1.0
    for text, key in (("seven", "illegal"), ("[1]", "illegal"), ('{"no_field": 1}', "error")):
        env.reset(seed=0)
        env.step(text)
        assert env.rewards["agent"] == -1.0 and env.terminations["agent"] and key in env.infos["agent"]
    env.close()


def test_waiting_for_a_server_does_not_delay_other_episodes(server, monkeypatch):
    in_loop = []
    for name in ("setup", "act"):
        method = getattr(OpenEnv, name)

        def recorded(env, *args, method=method):
            in_loop.append(threading.current_thread() is threading.main_thread())
            return method(env, *args)

        monkeypatch.setattr(OpenEnv, name, recorded)
    env_args = {"url": server, "action_field": "text"}
    episode = fa.play("openenv/Server-v0", fa.Scripted(lambda _: "7"), seed=1, env_args=env_args)
    assert episode.rewards == {"agent": 1.0} and in_loop == [False, False]


def test_episodes_wait_for_a_place_on_a_full_server():
    with guessing(1) as url:
        env_args = {"url": url, "action_field": "text"}
        games, players = {"openenv/Server-v0": env_args}, {"seven": fa.Scripted(lambda _: "7")}
        (cell,) = fa.benchmark(players, games, episodes=5, progress=False).summary.cells
        assert cell.reward.value == 1.0 and cell.failed == 0
        env = begin(fa.make("openenv/Server-v0", **env_args))

        def failure():
            with pytest.warns(RuntimeWarning) as caught:
                fa.play("openenv/Server-v0", fa.Random(), env_args={**env_args, "timeout_s": 0.5})
            return str(caught[0].message)

        failures = (failure() for _ in range(10))  # on a busy machine, the connection may also be late
        assert any("timeout_s=0.5. Raise max_concurrent_envs" in each for each in failures)
        env.close()


def test_a_server_that_hangs_costs_one_episode(server):
    env = None
    while env is None:
        with contextlib.suppress(TimeoutError, ConnectionError):  # a busy machine may need longer for the reset
            env = begin(fa.make("openenv/Server-v0", url=server, action_field="text", timeout_s=0.5))
    started = time.monotonic()
    env.step("hang")
    assert time.monotonic() - started < 30
    assert env.infos["agent"]["error"] == "TimeoutError: no answer within timeout_s=0.5"
    env.close()


@pytest.mark.parametrize(
    ("field", "reason"),
    [("word", r"VALIDATION_ERROR\)\. The action had the fields word"), (None, "Set action_field= to send texts")],
)
def test_reason_of_a_refused_action_is_printed(server, field, reason):
    episode = fa.play("openenv/Server-v0", fa.Scripted(lambda _: "7"), env_args={"url": server, "action_field": field})
    assert re.search(f"because .*{reason}", str(episode)), str(episode)


def test_hostile_texts_are_actions_like_others(server):
    env = begin(fa.make("openenv/Server-v0", url=server, action_field="text", timeout_s=60))
    for text in HOSTILE_STRINGS:
        env.step(text)
        assert env.observation_space("agent").contains(env.observe("agent"))
        assert "error" not in env.infos["agent"], env.infos["agent"]
        if env.terminations["agent"]:
            env.reset(seed=0)
    env.close()


def test_no_server_is_an_error_with_the_address():
    env = fa.make("openenv/Server-v0", url="http://127.0.0.1:9", timeout_s=30)
    with pytest.raises(ConnectionError, match="127.0.0.1:9"):
        env.reset(seed=0)
    with pytest.raises(ValueError, match="http"):
        fa.make("openenv/Server-v0", url="ftp://x")


@contextlib.contextmanager
def odd_server(answers, redirect=""):
    """Serve a WebSocket whose answers to steps have the fields `answers`. Yields the address and the received texts."""
    received, started = [], threading.Event()

    async def answer(connection):
        async for message in connection:
            received.append(json.loads(message)["type"])
            fields = {"observation": {"text": "hello"}, "reward": 0.0, "done": False}
            fields |= answers if received[-1] == "step" else {}
            await connection.send(json.dumps({"type": "observation", "data": fields}))

    def refused(connection, request):
        if redirect:
            response = connection.respond(http.HTTPStatus.FOUND, "")
            response.headers["Location"] = redirect
            return response
        return None

    async def run():
        async with serve(answer, "127.0.0.1", 0, process_request=refused) as server:
            place["port"] = server.sockets[0].getsockname()[1]
            place["loop"], place["stop"] = asyncio.get_running_loop(), asyncio.Event()
            started.set()
            await place["stop"].wait()

    place = {}
    thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
    thread.start()
    assert started.wait(60)
    yield f"http://127.0.0.1:{place['port']}", received
    place["loop"].call_soon_threadsafe(place["stop"].set)
    thread.join(60)


def test_redirect_of_a_server_is_not_followed():
    with odd_server({}) as (inner, received), odd_server({}, inner.replace("http", "ws")) as (url, _):
        env = fa.make("openenv/Server-v0", url=url, action_field="text", timeout_s=60)
        with pytest.raises(ConnectionError, match="302"):
            env.reset(seed=1)
        assert received == []


@pytest.mark.parametrize(
    "answers",
    [
        *({"reward": value} for value in ("abc", "5", [1], True, math.nan, math.inf, 10**400)),
        *({"observation": value} for value in ([1, 2], None, "abc")),
        {"done": "false"},
    ],
    ids=str,
)
def test_odd_answer_of_a_server_ends_the_episode_with_the_lowest_reward(answers):
    with odd_server(answers) as (url, _):
        env_args = {"url": url, "action_field": "text", "illegal_reward": -2.0}
        episode = fa.play("openenv/Server-v0", fa.Scripted(lambda _: "x"), seed=1, env_args=env_args)
    assert episode.error is None and episode.rewards == {"agent": -2.0}
    assert "error" in episode.trajectories["agent"].info


def test_messages_that_were_not_asked_for_are_not_queued():
    with odd_server({}) as (url, _):
        env = fa.make("openenv/Server-v0", url=url, action_field="text")
        env.reset(seed=1)
        assert env.unwrapped._client._async._ws.recv_messages.high == 1
        env.close()


def test_message_of_too_many_values_ends_the_episode():
    """Each episode kept 120 MB of 4 MB of `{"": 0}`, a few kilobytes compressed."""
    with odd_server({"observation": {"x": [{"": 0}] * 100_001}}) as (url, _):
        env = fa.make("openenv/Server-v0", url=url, action_field="text")
        env.reset(seed=1)
        env.step("go")
        assert env.rewards == {env.possible_agents[0]: -1.0}
        assert "brackets, more than 100000" in env.infos[env.possible_agents[0]]["error"]
        env.close()
