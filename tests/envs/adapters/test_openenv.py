import threading
import time

import pytest
from hostile_strings import HOSTILE_STRINGS
from http_servers import served
from team_play import begin

import forge_agents as fa
from forge_envs.adapters.openenv import OpenEnv

pytest.importorskip("fastmcp")
RELEASED = threading.Event()
"""Set at the end of a test to release hanging servers."""


@pytest.fixture(scope="module")
def server():
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

    app = create_fastapi_app(Guessing, Say, Heard, max_concurrent_envs=8)
    with served(app) as url:
        yield url
        RELEASED.set()


def test_an_episode_on_a_server(server):
    env = fa.make("openenv/Server-v0", url=server, action_field="text", instructions="Guess.", timeout_s=10)
    env.reset(seed=0)
    assert env.instructions("agent") == "Guess." and env.observe("agent") == "Guess a number."
    env.step("3")
    assert env.observe("agent") == "You said 3" and env.rewards["agent"] == 0.0
    env.step("7")
    assert env.rewards["agent"] == 1.0 and env.terminations["agent"]
    env.close()


def test_actions_can_be_json(server):
    env = begin(fa.make("openenv/Server-v0", url=server, timeout_s=10))
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


def test_a_server_that_hangs_costs_one_episode(server):
    env = begin(fa.make("openenv/Server-v0", url=server, action_field="text", timeout_s=0.5))
    started = time.monotonic()
    env.step("hang")
    assert time.monotonic() - started < 30 and "Timeout" in env.infos["agent"]["error"]
    env.close()


def test_hostile_texts_are_actions_like_others(server):
    env = begin(fa.make("openenv/Server-v0", url=server, action_field="text", timeout_s=10))
    for text in HOSTILE_STRINGS:
        env.step(text)
        assert env.observation_space("agent").contains(env.observe("agent"))
        assert "error" not in env.infos["agent"], env.infos["agent"]
        if env.terminations["agent"]:
            env.reset(seed=0)
    env.close()


def test_no_server_is_an_error_with_the_address():
    env = fa.make("openenv/Server-v0", url="http://127.0.0.1:9", timeout_s=1)
    with pytest.raises(ConnectionError, match="127.0.0.1:9"):
        env.reset(seed=0)
    with pytest.raises(ValueError, match="http"):
        fa.make("openenv/Server-v0", url="ftp://x")
