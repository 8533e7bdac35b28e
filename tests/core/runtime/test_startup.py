"""Startup progress."""

import re
import threading
from types import SimpleNamespace

import pytest
from rich.console import Console

from forge_agents.runtime import machine, startup


@pytest.fixture
def clock(monkeypatch):
    """``clock(seconds)`` lets so many pass."""
    now = [1000.0]
    monkeypatch.setattr(startup, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def passes(seconds):
        now[0] += seconds

    return passes


def test_startup_is_printed_as_lines_without_a_terminal(clock, capsys):
    with startup.show(), startup.track("engine", "team", "tiny, not compiled", on="2 CPU cores"):
        line = "starting engine team: tiny, not compiled, on 2 CPU cores\n"
        assert capsys.readouterr().err == line
        clock(12.3)
    output = capsys.readouterr()
    assert output.err == "started engine team (12 s)\n" and output.out == ""


def test_long_startup_prints_repeated_lines(monkeypatch, capsys):
    monkeypatch.setattr(startup, "_LINE_S", 0.05)
    again, message = threading.Event(), []

    def say(text):
        message.append(text)
        if "still starting" in text:
            again.set()

    with startup.show(say), startup.track("learner", "team-learner", "tiny", on="here"):
        assert again.wait(60)
    pattern = r"still starting learner team-learner after \d+\.\d s"
    assert re.fullmatch(pattern, message[1])
    assert message[0].startswith("starting learner team-learner") and "started learner" in message[-1]


def test_only_the_innermost_view_shows_startups(capsys):
    output = []
    with startup.show(), startup.show(output.append), startup.track("engine", "judge", "x", on="here"):
        pass
    assert len(output) == 2 and capsys.readouterr().err == ""
    with startup.track("engine", "judge", "x", on="here"):
        pass
    assert len(output) == 2 and capsys.readouterr().err == ""


def test_terminal_shows_a_spinner_and_keeps_the_lines(monkeypatch, tmp_path, clock):
    file = (tmp_path / "said").open("w+")
    console = Console(file=file, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    monkeypatch.setattr(startup.output, "console", lambda **_: console)
    with startup.show() as say, startup.track("engine", "team", "[bold]a\x1b]0;title", on="here"):
        say("[i]beside")
        clock(7)
    file.seek(0)
    message = file.read()
    assert r"engine team: [bold]a\x1b]0;title, on here" in message  # no markup, no commands
    assert "[i]beside" in message and "\x1b]0;" not in message
    assert message.count("started engine team (7.0 s)") == 1


@pytest.mark.parametrize(("gpus", "output"), [("0", "1 GPU"), ("0,1", "2 GPUs")])
def test_machine_is_described_by_its_gpus_if_any(monkeypatch, gpus, output):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    assert startup.machine() == startup.machine(1) == output
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(startup.os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(machine, "processor_flags", lambda: frozenset({"avx2"}))
    assert startup.machine(1) == "1 of 3 CPU cores without bfloat16"
    monkeypatch.setattr(machine, "processor_flags", lambda: frozenset({"avx2", "avx512_bf16"}))
    assert startup.machine() == startup.machine(3) == startup.machine(4) == "3 CPU cores"
    assert startup.machine(1) == "1 of 3 CPU cores"


@pytest.mark.parametrize("begun", [False, True])
def test_ctrl_c_at_the_start_of_the_watcher_thread_is_raised_and_ends_it(monkeypatch, begun):
    start, watchers = threading.Thread.start, []

    def interrupted(self):
        if begun:
            start(self)
        watchers.append(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), startup.show(print), startup.track("engine", "team", "m"):
        pass
    assert [watcher.is_alive() for watcher in watchers] == [False]
