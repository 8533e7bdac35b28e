"""A person in a seat: what is shown, what is read, and how they leave."""

import asyncio
import io
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_env import Plain
from rich.console import Console

import forge_agents as fa
from forge_agents.display import visible
from forge_agents.errors import PlayerLeftError
from forge_agents.rollout import players
from forge_agents.rollout.episode import play
from forge_agents.rollout.rollout import Rollout
from forge_agents.rollout.terminal import Terminal

HOSTILE = [
    "\x1b[2J\x1b[1;1H",  # clear the screen
    "\x1b]0;title\x07",
    "\x1b]8;;http://evil\x1b\\click",
    "\x9b31m",  # the one-byte form
    "\x1b[6n",  # makes the terminal type
    "a\rb",
    "\b\b\b",
    "\u202eesrever",
    "zero\u200bwidth",
    "\ud800",
    "line\u2028break",
    "[bold red]markup[/]",
    "[link=http://evil]x[/link]",
    ":smiley:",
]


@pytest.fixture
def terminal(monkeypatch):
    """A `Terminal` whose person types into ``terminal.keys``, what is shown is in ``terminal.shown()``."""
    read, write = os.pipe()
    out = io.StringIO()
    made = Terminal(Console(file=out, width=80, force_terminal=True, color_system=None), read)
    made.shown, made.keys = out.getvalue, os.fdopen(write, "wb", buffering=0)
    monkeypatch.setattr(players, "terminal", lambda: made)
    yield made
    made.keys.close()
    os.close(read)


def run(env_id, seats, **options):
    return asyncio.run(play(fa.make(env_id), seats, seed=2, **options))


def test_person_reads_why_an_action_was_illegal(terminal):
    class Door(Plain):
        def act(self, agent, action):
            return fa.Outcome(done=True) if action == "open" else fa.Outcome(info={agent: {"illegal": "only open"}})

    terminal.keys.write(b"kick\nopen\n")
    episode = asyncio.run(play(Door(), {"a": fa.Human()}, seed=0))
    assert [turn.info.get("illegal") for turn in episode.turns] == ["only open", None]
    assert terminal.shown().count("Your last action was illegal: only open") == 1
    assert "a> kick\n" in terminal.shown() and terminal.shown().endswith("a> open\n"), "a line of a pipe is shown"


def test_person_plays_an_agent(terminal):
    terminal.keys.write(b"bet\n")
    episode = run("forge/KuhnPoker-v0", {"player_0": fa.Human(), "player_1": fa.Scripted(lambda seen: "fold")})
    turn = episode.trajectories["player_0"].turns[0]
    assert (turn.action, turn.policy, turn.finish_reason, turn.response_ids) == ("bet", "human", "scripted", ())
    assert episode.rewards == {"player_0": 1.0, "player_1": -1.0}
    output = terminal.shown()
    assert "You play Kuhn poker" in output and turn.observation in output and "legal: check | bet" in output
    assert output.endswith("player_0> bet\n")


def test_instructions_are_shown_once(terminal):
    terminal.keys.write(b"check\ncall\n")
    run("forge/KuhnPoker-v0", {"player_0": fa.Human(), "player_1": fa.Scripted(lambda seen: "bet")})
    assert terminal.shown().count("You play Kuhn poker") == 1 and terminal.shown().count("player_0 sees") == 2


def test_end_of_input_is_recorded_and_not_retried(terminal):
    terminal.keys.write(b"check\n")
    terminal.keys.close()
    seats = {"player_0": fa.Human(), "player_1": fa.Scripted(lambda seen: "bet")}
    rollout = Rollout(make_env=lambda: fa.make("forge/KuhnPoker-v0"), env_id="k", policies=seats, retries=1)
    episode = asyncio.run(rollout.group(2, 1)).episodes[0]
    assert (episode.error.where, episode.error.kind) == ("policy", "PlayerLeftError")
    assert episode.error.message == "the person who plays 'player_0' left: the input has ended"
    assert terminal.shown().count("player_0 sees") == 2  # the replay asks nothing


def test_last_line_without_line_break_counts(terminal):
    terminal.keys.write(b"b\xff\xc3\xa9\r\nlast")
    terminal.keys.close()
    assert asyncio.run(terminal.ask("a", "")) == "b\ufffd\u00e9"
    assert asyncio.run(terminal.ask("a", "")) == "last"
    with pytest.raises(PlayerLeftError, match="plays 'a' left"):
        asyncio.run(terminal.ask("a", ""))


def test_canceled_question_returns_at_once_and_reads_no_line(terminal):
    async def impatient():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(terminal.ask("a", "first"), 0.05)

    started = time.monotonic()
    asyncio.run(impatient())
    assert time.monotonic() - started < 30
    terminal.keys.write(b"mine\n")
    assert asyncio.run(terminal.ask("b", "second")) == "mine"


def test_people_are_asked_one_at_a_time(terminal):
    async def both():
        return await asyncio.gather(terminal.ask("a", "x"), terminal.ask("b", "x"))

    terminal.keys.write(b"one\ntwo\n")
    assert sorted(asyncio.run(both())) == ["one", "two"]
    lines = terminal.shown().replace("> ", ">\n").splitlines()
    seen = [line.split()[0] for line in lines if "sees" in line or ">" in line]
    assert seen in (["a", "a>", "b", "b>"], ["b", "b>", "a", "a>"])


@pytest.mark.parametrize("text", HOSTILE)
def test_model_text_cannot_control_the_terminal(terminal, text):
    terminal.keys.write(b"ok\n")
    asyncio.run(terminal.ask(text, text, instructions=text, legal_actions=(text,)))
    output = terminal.shown()
    plain = output.replace("\x1b[1m", "").replace("\x1b[2m", "").replace("\x1b[36m", "").replace("\x1b[0m", "")
    assert all(char == "\n" or char.isprintable() for char in plain)
    assert plain.count(visible(text)) >= 4


@settings(max_examples=65, deadline=None)
@given(st.text())
def test_visible_text_has_no_control_characters_and_keeps_ordinary_ones(text):
    output = visible(text)
    assert all(char in "\n\t" or char.isprintable() or char.isspace() for char in output)
    if text.isprintable() and text.isascii():
        assert output == text


def test_escapes_name_the_character():
    assert visible("\x1b[0m\r\n\tA\u202e\U000e0001") == "\\x1b[0m\n\tA\\u202e\\U000e0001"


def test_name_of_a_person_is_checked():
    with pytest.raises(ValueError, match="'a b'"):
        fa.Human(name="a b")
