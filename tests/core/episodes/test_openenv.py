"""`openenv_app` with OpenEnv's own client and checks, and with TRL."""

import contextlib
import socket
import subprocess
import sys
import threading
from pathlib import Path

import http_servers
import httpx
import pytest
import websockets.sync.client
import yaml
from process_checks import holds_within

import forge_agents as fa
from forge_agents.cli import scaffold
from forge_agents.episodes import openenv
from forge_agents.errors import ArgumentError, ForgeError
from forge_agents.runtime.connections import http_settings

pytest.importorskip("openenv")


TOKEN = "0123456789abcdef"


def openenv_app(env, **settings):
    return openenv.openenv_app(env, token=TOKEN, **settings)


@contextlib.contextmanager
def served(app):
    with http_servers.served(app, **{**http_settings(), "ws": "auto"}) as url:
        yield f"{url}/{TOKEN}"


class Letters(fa.TurnEnv):
    """Two agents say a word each, twice. The reward is the share of the letter a."""

    possible_agents = ("left", "right")

    def __init__(self, fails=False):
        super().__init__(max_turns=4)
        self._fails = fails

    def setup(self, rng):
        self._number = int(rng.integers(1000))

    def instructions(self, agent):
        return f"You are {agent}."

    def observe_text(self, agent):
        return f"Word {self._number}?"

    def act(self, agent, action):
        if self._fails:
            raise RuntimeError("out of letters")
        return fa.Outcome(rewards={agent: action.count("a") / max(len(action), 1)})


fa.register("served/Letters-v0", entry_point=Letters)


@pytest.fixture
def connect():
    from openenv.core import GenericEnvClient

    clients = []

    def connected(url):
        client = GenericEnvClient(url, connect_timeout_s=30, message_timeout_s=60, mode="simulation").sync()
        client.connect()
        clients.append(client)
        return client

    yield connected
    for client in clients:
        client.close()


def test_client_plays_one_agent_and_gets_its_total_reward(connect):
    players = {"right": fa.Scripted(lambda observation: "ab")}
    with served(openenv_app("served/Letters-v0", players=players)) as url:
        client = connect(url)
        first = client.reset(seed=7)
        assert first.observation["agent"] == "left" and first.observation["instructions"] == "You are left."
        assert (
            first.observation["text"]
            == client.reset(seed=7).observation["text"]
            != client.reset(seed=8).observation["text"]
        )
        seen = client.step({"text": "aaab"})
        assert not seen.done and seen.reward == 0.0 and seen.observation["text"].startswith("Word ")
        seen = client.step({"text": "ab"})
        assert seen.done and seen.reward == pytest.approx(1.25) and seen.observation["error"] == ""
        assert client.state()["step_count"] == 2


def test_two_clients_play_one_episode(connect):
    with served(openenv_app("served/Letters-v0", clients=["left", "right"])) as url:
        rewards = {}

        def play(agent, word):
            client = connect(url)
            seen = client.reset(seed=3, episode_id="duel", agent=agent)
            while not seen.done:
                seen = client.step({"text": word})
            rewards[agent] = seen.reward

        threads = [threading.Thread(target=play, args=each) for each in (("left", "a"), ("right", "ab"))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert rewards == {"left": 2.0, "right": 1.0}


def test_partner_that_leaves_ends_the_episode(connect):
    with served(openenv_app("served/Letters-v0", clients=["left", "right"])) as url:
        ended = []

        def play():
            client = connect(url)
            seen = client.reset(episode_id="duel", agent="right")
            while not seen.done:
                seen = client.step({"text": "a"})
            ended.append(seen.observation["error"])

        thread = threading.Thread(target=play)
        thread.start()
        left = connect(url)
        left.reset(episode_id="duel", agent="left")
        left.step({"text": "a"})
        left.close()
        thread.join(60)
        assert ended == ["PlayerLeftError: the client of 'left' left, or sent no action for 600 s"]


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "sends nothing"])
def test_client_that_ends_its_part_in_a_game_loses_it(leaves):
    wait_s = 30 if leaves else 0.01
    tables = openenv._Tables(lambda: fa.make("forge/KuhnPoker-v0"), ("player_0", "player_1"), {}, wait_s=wait_s)
    table, seat = tables.sit("player_0", "x", 5)
    _, other = tables.sit("player_1", "x", 5)
    assert seat.events.get(timeout=60).text
    if leaves:
        tables.leave(table, seat)
    else:
        other.actions.put("bet")
    ends = {agent: [seat.events.get(timeout=60)] for agent, seat in table.seats.items()}
    assert ends["player_0"][0].done and ends["player_1"][0].done
    assert [ends[agent][0].reward for agent in ("player_0", "player_1")] == [-1.0, 1.0]
    assert not ends["player_1"][0].error


def test_failure_of_the_environment_is_an_observation(connect):
    with served(openenv_app("served/Letters-v0", env_args={"fails": True})) as url:
        client = connect(url)
        client.reset()
        with pytest.warns(RuntimeWarning, match="out of letters"):
            seen = client.step({"text": "a"})
        assert seen.done and seen.reward == 0.0 and seen.observation["error"] == "RuntimeError: out of letters"


@pytest.mark.parametrize(
    ("reset", "problem"),
    [
        ({"agent": "left"}, "with agent and episode_id"),
        ({"episode_id": "x"}, "with agent and episode_id"),
        ({"agent": "middle", "episode_id": "x"}, "played by no client"),
        ({"agent": "left", "episode_id": "x", "seed": -1}, "seed=-1 must be a number from 0"),
    ],
)
def test_reset_that_fits_no_seat_is_refused(connect, reset, problem):
    with (
        served(openenv_app("served/Letters-v0", clients=["left", "right"])) as url,
        pytest.raises(Exception, match=problem),
    ):
        connect(url).reset(**reset)


def test_seat_is_free_again_after_its_client_left():
    tables = openenv._Tables(lambda: fa.make("served/Letters-v0"), ("left", "right"), {}, wait_s=30)
    tables.leave(*tables.sit("left", "x", 5))
    table, left = tables.sit("left", "x", None)
    assert table.free == {"right"}, "an episode without clients is forgotten"
    joined, right = tables.sit("right", "x", 6)
    assert joined is table and not table.free
    assert left.events.get(timeout=60).text.startswith("Word ")
    assert tables.sit("left", "x", 8)[0] is not table, "the id is free again"
    tables.leave(table, left)
    assert (
        right.events.get(timeout=60).error == "PlayerLeftError: the client of 'left' left, or sent no action for 30 s"
    )


def test_client_that_comes_back_replaces_itself():
    tables = openenv._Tables(lambda: fa.make("served/Letters-v0"), ("left", "right"), {}, wait_s=30)
    table, ghost = tables.sit("left", "x", 5)
    again, left = tables.sit("left", "x", 6)
    assert again is table
    with pytest.raises(ArgumentError, match="another client took agent='left'"):
        tables.next(table, ghost)
    with pytest.raises(ArgumentError, match="seed=7, but the client of 'left' reset with seed=6"):
        tables.sit("right", "x", 7)
    tables.leave(table, ghost)
    assert table.free == {"right"}, "the ghost's end changes nothing"
    _, right = tables.sit("right", "x", 6)
    tables.leave(table, ghost)
    seats = {"left": left, "right": right}
    for agent in ("left", "right", "left", "right"):
        assert tables.next(table, seats[agent]).text.startswith("Word ")
        seats[agent].actions.put("a")
    ends = [tables.next(table, seat) for seat in seats.values()]
    assert [(end.done, end.reward, end.error) for end in ends] == [(True, 2.0, "")] * 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"clients": ["middle"]}, "agent 'middle' does not exist"),
        ({"players": {"up": fa.Random()}}, "agent 'up' does not exist"),
        ({"players": {"right": fa.Policy("tiny-random")}}, "the player of 'right' needs an engine"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_served(arguments, problem):
    with pytest.raises(ArgumentError, match=problem):
        openenv_app("served/Letters-v0", **arguments)


def test_written_package_passes_openenvs_checks(tmp_path):
    root = scaffold.create(tmp_path / "relay-server", "openenv", "forge/Relay-v0")
    app = (root / "server" / "app.py").read_text()
    assert 'CLIENTS = ["asker"]' in app and 'PLAYERS = {"answerer": fa.Random()}' in app
    assert yaml.safe_load((root / "openenv.yaml").read_text())["name"] == "relay_server"
    assert "Verdict: PASS" in openenvs_report(root, "--level", "static", "--skip-build")
    with served(openenv_app("forge/Relay-v0", clients=["asker"], players={"answerer": fa.Random()})) as url:
        assert "Verdict: PASS" in openenvs_report("--url", url, "--timeout", "30")


def openenvs_report(*words):
    """The output of ``openenv validate``."""
    from openenv.cli.__main__ import app
    from typer.testing import CliRunner

    return CliRunner().invoke(app, ["validate", *map(str, words)]).output


@pytest.mark.parametrize("path", ["", "/wrong-token-of-a-stranger", f"/{TOKEN}x", f"//{TOKEN}"])
def test_requests_without_the_token_are_refused(path):
    with served(openenv_app("served/Letters-v0")) as address:
        url = address.removesuffix(f"/{TOKEN}") + path
        assert httpx.post(f"{url}/reset", json={}).status_code == 403
        with pytest.raises(websockets.exceptions.InvalidStatus, match="403"):
            websockets.sync.client.connect(url.replace("http", "ws") + "/ws")


def test_short_token_is_refused():
    with pytest.raises(ArgumentError, match="the token has 6 characters. It needs 16 or more letters"):
        openenv.openenv_app("served/Letters-v0", token="secret")


def test_written_package_serves_and_prints_its_address(tmp_path, connect):
    root = scaffold.create(tmp_path / "relay-server", "openenv", "forge/Relay-v0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "server.app", str(port)]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        try:
            address = process.stdout.readline().removeprefix("serving ").strip()
            assert holds_within(60, lambda: not socket.socket().connect_ex(("127.0.0.1", port)))
            assert connect(address).reset(seed=0).observation["agent"] == "asker"
        finally:
            process.terminate()


def test_port_in_use_ends_the_server_before_it_prints_an_address(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(SystemExit, match=f"port {taken.getsockname()[1]} is in use"):
            openenv.serve(openenv_app("served/Letters-v0"), port=taken.getsockname()[1])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("template", "env"), [("team", "forge/Relay-v0"), ("openenv", None), ("verifiers", None)])
def test_environment_is_named_for_its_template_only(tmp_path, template, env):
    with pytest.raises(ForgeError, match="environment"):
        scaffold.create(tmp_path / "new-one", template, env)


@pytest.mark.slow
def test_trl_trains_on_the_environment(tiny_llama, tmp_path, connect):
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer

    with served(openenv_app("served/Letters-v0")) as url:

        class Game:
            def __init__(self):
                self.client = connect(url)

            def reset(self, seed, **columns):
                self.seen = self.client.reset(seed=seed)
                return self.seen.observation["text"]

            def say(self, word: str) -> str:
                """Say a word.

                Args:
                    word: The word.
                """
                self.seen = self.client.step({"text": word})
                return self.seen.observation["text"]

        def reward(completions, environments, **columns):
            for game, completion in zip(environments, completions, strict=True):
                while not game.seen.done:  # the tiny model calls no tools
                    game.say(completion[-1]["content"])
            return [game.seen.reward for game in environments]

        tokenizer = AutoTokenizer.from_pretrained(tiny_llama)
        tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
        config = trl.GRPOConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=8, num_generations=4, max_completion_length=16,
            max_steps=2, use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no", report_to=[],
            disable_tqdm=True, logging_steps=1,
        )  # fmt: skip
        rows = [{"prompt": [{"role": "user", "content": "Play."}], "seed": seed} for seed in range(8)]
        trainer = trl.GRPOTrainer(
            str(tiny_llama), reward_funcs=reward, args=config, train_dataset=Dataset.from_list(rows),
            environment_factory=Game, processing_class=tokenizer,
        )  # fmt: skip
        trainer.train()
        steps = [row for row in trainer.state.log_history if "reward_std" in row]
        assert len(steps) == 2 and any(row["reward_std"] > 0 and row["grad_norm"] > 0 for row in steps)
