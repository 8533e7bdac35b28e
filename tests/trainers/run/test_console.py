import os
import re
import sys

import pytest
from rich.console import Console

from forge_agents.runtime import startup
from forge_trainers.run import console as display

ROW = {"reward/mean": 0.5, "learner/kl": 0.01, "time/step_s": 2.0}


@pytest.fixture
def console_output(monkeypatch, tmp_path):
    """``console_output(**options)`` runs two steps on a console with these options and returns what was written."""

    def run(line="a line", **options):
        file = (tmp_path / "text").open("w+")
        console = Console(file=file, width=100, **options)
        monkeypatch.setattr(display.output, "console", lambda: console)
        with display.Display("train", 2) as live:
            live.say(line)
            for step in range(2):
                live.step(step, ROW)
        file.seek(0)
        return file.read()

    return run


def test_a_pipe_gets_plain_lines(console_output):
    assert console_output(force_terminal=False).splitlines() == [
        "a line",
        "train 1/2  reward 0.500  kl 0.0100  s/step 2.0",
        "train 2/2  reward 0.500  kl 0.0100  s/step 2.0",
    ]


def test_what_was_dropped_is_shown(console_output, monkeypatch):
    monkeypatch.setitem(ROW, "groups/abstained", 2.0)
    monkeypatch.setitem(ROW, "dropped/too_long", 3.0)
    monkeypatch.setitem(ROW, "dropped/bad_logprobs", 0.0)
    assert console_output(force_terminal=False).splitlines()[-1].endswith("s/step 2.0  abstained 2  too long 3")


@pytest.mark.parametrize(("share", "end"), [(0.947, "s/step 2.0  cut off 95%"), (0.0, "s/step 2.0")])
def test_share_of_cut_off_responses_is_shown_if_there_are_any(console_output, monkeypatch, share, end):
    monkeypatch.setitem(ROW, "cut_off", share)
    assert console_output(force_terminal=False).splitlines()[-1].endswith(end)


def test_a_dumb_terminal_gets_the_same(console_output):
    text = console_output(force_terminal=True, _environ={"TERM": "dumb"})
    assert "\x1b" not in text and text.splitlines()[-1] == "train 2/2  reward 0.500  kl 0.0100  s/step 2.0"


def test_a_terminal_gets_a_bar(console_output):
    text = console_output(force_terminal=True, _environ={"TERM": "xterm"})
    assert "\x1b[" in text and "2/2" in text and "━" in text


def test_progress_bar_leaves_room_for_ctrl_c(console_output, monkeypatch):
    for _, key, _ in display._SHOWN:
        monkeypatch.setitem(ROW, key, 1.0)
    text = console_output(force_terminal=True, no_color=True, _environ={"TERM": "xterm"})
    rows = [re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", row).strip("\r") for row in text.splitlines()]
    assert max(map(len, rows)) == 97


def test_a_narrow_terminal_shows_the_step_and_every_metric(console_output, monkeypatch):
    every = {key: 1.0 for _, key, _ in display._SHOWN}
    for key, value in every.items():
        monkeypatch.setitem(ROW, key, value)
    output = console_output(force_terminal=True, no_color=True, _environ={"TERM": "xterm"})
    message = " ".join(output.split())  # lines joined
    assert "2/2" in message and all(label in message for label, key, _ in display._SHOWN if key in every)


def test_divergence_is_left_out_without_a_reference(monkeypatch, console_output):
    monkeypatch.setitem(ROW, "learner/kl", 0.0)
    assert console_output(force_terminal=False).splitlines()[1] == "train 1/2  reward 0.500  s/step 2.0"


def test_a_reward_of_no_game_is_left_out_and_no_other_nan(monkeypatch, console_output):
    for name in ("reward/mean", "learner/kl"):
        monkeypatch.setitem(ROW, name, float("nan"))
    assert console_output(force_terminal=False).splitlines()[1] == "train 1/2  kl nan  s/step 2.0"


def test_rewards_of_several_policies_follow_their_mean(monkeypatch, capsys):
    row = {"reward/mean": 0.0, "reward/a": 0.5, "reward/b": -0.5}
    for policies, message in ((["a", "b"], "reward 0.000  a 0.500  b -0.500"), (["a"], "reward 0.000\n")):
        with display.Display("train", 1, policies=policies) as live:
            live.step(0, row)
        assert message in capsys.readouterr().out


def test_held_out_rewards_and_skipped_steps_of_several_policies_are_shown(capsys):
    row = {"reward/mean": 0.0, "eval/reward": 0.0, "eval/reward/a": 0.25, "eval/reward/b": -0.25}
    row |= {"learner/a/skipped": 1.0, "learner/b/skipped": 0.0, "failed/rival": 3.0}
    with display.Display("train", 1, policies=["a", "b"]) as live:
        live.step(0, row)
    out = capsys.readouterr().out
    assert "held-out 0.000  held-out a 0.250  held-out b -0.250" in out
    assert "failed by rival 3  a skipped 1" in out and "b skipped" not in out


@pytest.mark.parametrize(
    ("policies", "row", "message"),
    [
        (["a"], {"eval/exploitability": 0.25}, "held-out 0.000  exploitability 0.250\n"),
        (["a", "b"], {"eval/exploitability/a": 0.25, "eval/exploitability/b": 0.5},
         "exploitability a 0.250  exploitability b 0.500\n"),
    ],
)  # fmt: skip
def test_exploitability_is_shown_if_it_is_measured(policies, row, message, capsys):
    with display.Display("train", 1, policies=policies) as live:
        live.step(0, {"reward/mean": 0.0, "eval/reward": 0.0, **row})
    assert message in capsys.readouterr().out


def test_no_colour_leaves_the_bar(console_output):
    text = console_output(force_terminal=True, no_color=True, _environ={"TERM": "xterm"})
    assert "━" in text and "\x1b[3" not in text.replace("\x1b[3A", "")


@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_is_no_markup_and_no_command_to_the_terminal(console_output, terminal):
    assert r"[/INST] [bold]x \x1b]0;title" in console_output("[/INST] [bold]x \x1b]0;title", force_terminal=terminal)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_messages_of_a_run_that_nobody_reads_do_not_end_it(stream, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr(sys, stream, pipe)
        with startup.show(), startup.track("engine", "team", "model", on="here"):
            startup.say("a line")
        with display.Display("train", 2) as live:
            live.say("a line")
            live.step(0, ROW)
        print("a line of the user's code", file=pipe, flush=True)
        assert os.path.samestat(os.fstat(pipe.fileno()), os.stat(os.devnull))  # noqa: PTH116
        monkeypatch.undo()
