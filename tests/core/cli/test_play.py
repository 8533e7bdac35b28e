"""``forge-agents play``: a person at a terminal or behind a pipe."""

import io
import json
import os
import subprocess
import sys

import pytest
from plain_env import PlainRound
from rich.console import Console

import forge_agents as fa
from forge_agents.cli import main as cli
from forge_agents.cli import play as playing
from forge_agents.cli.play import PlayConfig
from forge_agents.cli.registry import EXAMPLES
from forge_agents.rollout import players
from forge_agents.rollout.terminal import Terminal


@pytest.fixture
def typed(monkeypatch):
    """``typed(text)``: the terminal of a person who types `text` and leaves. ``.console.file`` holds the output."""
    opened = []

    def start(text):
        read, write = os.pipe()
        os.write(write, text.encode())
        os.close(write)
        opened.append(read)
        made = Terminal(Console(file=io.StringIO(), width=100), read)
        for module in (players, playing):
            monkeypatch.setattr(module, "terminal", lambda: made)
        return made

    yield start
    for fd in opened:
        os.close(fd)


def test_a_game_is_played_through_a_pipe():
    words = ["play", "forge/KuhnPoker-v0", "--seed", "2", "--agent", "player_0"]
    command = [sys.executable, "-m", "forge_agents.cli.main", *words]
    done = subprocess.run(command, input="bet\n", capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "you are player_0" in done.stdout and "legal: check | bet" in done.stdout
    assert "[player_0] bet" in done.stdout and "terminated after" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if "human" in line or "random" in line]
    rewards = {row[1]: float(row[5]) for row in rows}
    assert set(rewards) == {"player_0", "player_1"} and sum(rewards.values()) == 0 and rewards["player_0"] != 0
    assert "Traceback" not in done.stderr


def test_person_acts_for_the_requested_agent(typed):
    terminal = typed("check\nfold\nfold\n")
    assert cli.main(["play", "forge/KuhnPoker-v0", "--agent=player_1", "--seed=1"]) == 0
    text = terminal.console.file.getvalue()
    assert "you are player_1" in text and "player_1 sees" in text and "player_0 sees" not in text


def test_leaving_a_game_is_no_failure(typed):
    terminal = typed("")
    assert cli.main(["play", "forge/KuhnPoker-v0"]) == 0
    assert "the person who plays 'player_0' left" in terminal.console.file.getvalue()


def test_endpoint_acts_for_the_other_agents(typed, serve_chat, monkeypatch):
    monkeypatch.setenv("RIVAL_KEY", "s3cret")
    server = serve_chat(lambda request: "fold")
    terminal = typed("bet\n")
    words = ["--endpoint", server.url, "--endpoint_model", "stub", "--api_key_env", "RIVAL_KEY"]
    assert cli.main(["play", "forge/KuhnPoker-v0", *words, "--sampling.max_tokens", "9"]) == 0
    assert "endpoint" in terminal.console.file.getvalue() and server.requests[0]["max_tokens"] == 9
    assert server.headers_seen[0]["authorization"] == "Bearer s3cret"


def test_broken_endpoint_is_shown_as_a_failure(typed, serve_chat):
    terminal = typed("bet\n")
    server = serve_chat(lambda request: b"\x1b[2Jgarbage")
    assert cli.main(["play", "forge/KuhnPoker-v0", "--endpoint", server.url, "--endpoint_model", "stub"]) == 1
    text = terminal.console.file.getvalue()
    assert "the episode ended early: stub at" in text and "\x1b" not in text


def test_two_people_share_a_terminal(typed):
    @fa.register("play/Pick-v0")
    class Pick(PlainRound):
        def __init__(self, word="left", **kwargs):
            super().__init__(**kwargs)
            self.word = word

        def instructions(self, agent):
            return f"Say {self.word}."

        def act_all(self, actions):
            return fa.Outcome(rewards={a: float(output == self.word) for a, output in actions.items()}, done=True)

    terminal = typed("right\nright\n")
    assert cli.main(["play", "play/Pick-v0", "--opponent=human", "--env_args.word=right"]) == 0
    text = terminal.console.file.getvalue()
    assert text.count("Say right.") == 2
    assert [line.split()[5] for line in text.splitlines() if "human" in line or "other" in line] == ["1", "1"]


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("forge/KuhnPokr-v0", 1, "forge/KuhnPoker-v0"),
        ("forge/KuhnPoker-v0 --agent player_2", 1, "has no agent 'player_2'. Its agents are player_0, player_1. Did"),
        ("forge/KuhnPoker-v0 --endpoint h --endpoint_model m", 1, "not an HTTP address"),
        ("--seed 1", 2, "env"),
        ("forge/KuhnPoker-v0 --model=m --opponent=random", 2, "model and opponent are given for the other agents"),
        ("forge/KuhnPoker-v0 --endpoint=http://h", 2, "must be given together"),
        ("forge/KuhnPoker-v0 --api_key_env=K", 2, "api_key_env needs endpoint"),
        ("forge/KuhnPoker-v0 --agnt player_0", 2, "Did you mean '--agent'"),
    ],
)
def test_invalid_play_settings_are_refused(capsys, typed, words, status, message):
    typed("")
    try:
        code = cli.main(["play", *words.split()])
    except SystemExit as stopped:
        code = stopped.code
    assert code == status and message in capsys.readouterr().err


@pytest.mark.parametrize("example", EXAMPLES["play"])
def test_examples_of_play_are_valid(example, monkeypatch):
    seen = []
    monkeypatch.setattr(playing, "play_in_terminal", lambda config: seen.append(config) or _episode())
    assert cli.main(example.split()[1:]) == 0
    assert isinstance(seen[0], PlayConfig) and fa.spec(seen[0].env)
    fa.make(seen[0].env, **seen[0].env_args).close()
    assert seen[0].other


def _episode():
    return fa.Episode(env_id="t", seed=0, trajectories={})


async def crew(task, client):
    """A planner that calls a tool, and is asked twice from the same place."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    messages = [{"role": "user", "content": "Plan.\x1b[2J"}]
    for seat in ("planner", "coder", "planner"):
        reply = await client.chat.completions.create(model=seat, messages=messages, tools=tools)
    message = reply.choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "1"}
    messages += [message.model_dump(exclude_none=True), result, {"role": "user", "content": "On."}]
    for _ in range(2):
        await client.chat.completions.create(model="planner", messages=messages, tools=tools)
    return 1.0


def test_program_is_watched_turn_by_turn(typed, monkeypatch):
    terminal = typed("")
    call = '<think>hm</think>Yes. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    monkeypatch.setattr(PlayConfig, "other", fa.Scripted(lambda seen: call, name="script"))
    fa.register("test/Watched-v0", entry_point=fa.Program, program=crew, agents=("planner", "coder"))
    seen = []
    show = terminal.show
    monkeypatch.setattr(terminal, "show", lambda text, style="": (seen.append(text), show(text, style)))
    episode = playing.play_in_terminal(PlayConfig(env="test/Watched-v0", watch=True))
    assert episode.rewards == {"planner": 1.0, "coder": 1.0}
    heads = [text.strip().split("\n")[0] for text in seen]
    assert heads == [
        "test/Watched-v0: you watch.",
        "1. planner (script)",
        "2. coder (script)",
        "3. planner (script, branch 1)",
        "4. planner (script, branch 1)",
        "5. planner (script, branch 2 from turn 3)",
    ]
    assert 'calls    add {"a": 1}' in seen[1] and "thinks   hm" in seen[1]
    output = terminal.console.file.getvalue()
    assert "\x1b" not in output and "planner" in output.split("terminated after 5 turns")[1]


def test_failed_program_shows_its_error(typed):
    async def trips(task, client):
        reply = await client.chat.completions.create(model="agent", messages=[{"role": "user", "content": "-"}])
        return json.loads(reply.choices[0].message.content)

    terminal = typed("yes\n")
    fa.register("test/Trips-v0", entry_point=fa.Program, program=trips)
    playing.play_in_terminal(PlayConfig(env="test/Trips-v0"))
    assert "the program failed: JSONDecodeError" in terminal.console.file.getvalue()


def test_person_who_watches_sees_other_agents_turns(typed, monkeypatch):
    terminal = typed("bet\nbet\n")
    playing.play_in_terminal(PlayConfig(env="forge/KuhnPoker-v0", agent="player_1", watch=True, seed=1))
    output = terminal.console.file.getvalue()
    assert "you are player_1" in output and ". player_0 (random)" in output and ". player_1 (human)" not in output
