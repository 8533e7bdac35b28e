"""What is shown of what starts, and what is remembered of it."""

import contextlib
import json
import re
import threading
from types import SimpleNamespace

import pytest
from rich.console import Console

from forge_agents.files import CACHE_VARIABLE
from forge_agents.runtime import startup


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "startup.json"


@pytest.fixture
def clock(monkeypatch):
    """``clock(seconds)`` lets so many pass."""
    now = [1000.0]
    monkeypatch.setattr(startup, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def passes(seconds):
        now[0] += seconds

    return passes


def test_a_start_is_told_as_lines_where_there_is_no_terminal(clock, capsys):
    with startup.show(), startup.track("engine", "team", "tiny, not compiled", on="2 CPU cores"):
        assert capsys.readouterr().err == "starting engine team: tiny, not compiled, on 2 CPU cores (first time here)\n"
        clock(12.3)
    told = capsys.readouterr()
    assert told.err == "engine team is ready after 12 s\n" and told.out == ""


def test_the_median_of_the_last_five_is_told_and_failed_starts_do_not_count(clock, capsys):
    for seconds in (100, 8, 50, 9, 10, 11):
        with startup.track("engine", "other", "tiny", on="here"):
            clock(seconds)
    with startup.show(), contextlib.suppress(KeyError), startup.track("engine", "team", "tiny", on="here"):
        clock(500)
        raise KeyError
    assert capsys.readouterr().err == "starting engine team: tiny, on here (usually 10 s here)\n"  # of 8 9 10 11 50
    assert startup.usual_s("engine tiny on here") == 10
    assert startup.usual_s("engine tiny on elsewhere") is None and startup.usual_s("learner tiny on here") is None


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "nonsense", "[" * 10_000, '{"a": 1}', '{"a": {"b": "c"}}', '{"a": {"b": 3}}'),
        json.dumps({"a": {"b": [10**400]}}),
    ],
)
def test_a_file_that_holds_something_else_is_made_anew(text, memory, clock):
    memory.parent.mkdir()
    memory.write_text(text)
    with startup.track("store", "weights", "x", on="here"):
        clock(3)
    assert startup.usual_s("store x on here") == 3
    assert list(json.loads(memory.read_text())) == [startup._hardware()]


def test_a_cache_that_cannot_be_written_costs_the_memory_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with startup.track("store", "weights", "x", on="here"):
        pass
    assert startup.usual_s("store x on here") is None


def test_what_takes_long_is_told_again(monkeypatch, capsys):
    monkeypatch.setattr(startup, "_LINE_S", 0.05)
    again, said = threading.Event(), []

    def say(text):
        said.append(text)
        if "is starting for" in text:
            again.set()

    with startup.show(say), startup.track("learner", "team-learner", "tiny", on="here"):
        assert again.wait(20)
    assert re.fullmatch(r"learner team-learner is starting for \d+\.\d s \(first time here\)", said[1])
    assert said[0].startswith("starting learner team-learner") and "is ready after" in said[-1]


def test_the_innermost_view_shows_what_starts_and_nobody_else(capsys):
    told = []
    with startup.show(), startup.show(told.append), startup.track("engine", "judge", "x", on="here"):
        pass
    assert len(told) == 2 and capsys.readouterr().err == ""
    with startup.track("engine", "judge", "x", on="here"):
        pass
    assert len(told) == 2 and capsys.readouterr().err == ""


def test_a_terminal_gets_a_spinner_and_keeps_a_line(monkeypatch, tmp_path, clock):
    file = (tmp_path / "said").open("w+")
    console = Console(file=file, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    monkeypatch.setattr(startup, "Console", lambda **_: console)
    with startup.show() as say, startup.track("engine", "team", "[bold]a\x1b]0;title", on="here"):
        say("[i]beside")
        clock(7)
    file.seek(0)
    said = file.read()
    assert r"engine team: [bold]a\x1b]0;title, on here" in said and "first time here" in said  # no markup, no commands
    assert "[i]beside" in said and "\x1b]0;" not in said
    assert said.count("engine team is ready after 7.0 s") == 1


@pytest.mark.parametrize(("gpus", "told"), [("0", "1 GPU"), ("0,1", "2 GPUs")])
def test_the_machine_is_its_gpus_where_there_are_some(monkeypatch, gpus, told):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    assert startup.machine() == startup.machine(1) == told
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(startup.os, "sched_getaffinity", lambda _: {0, 1, 2})
    assert startup.machine() == startup.machine(3) == startup.machine(4) == "3 CPU cores"
    assert startup.machine(1) == "1 of 3 CPU cores"


def test_ctrl_c_before_the_watcher_runs_stays_ctrl_c(monkeypatch):
    def interrupted(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt), startup.show(print), startup.track("engine", "team", "m"):
        pass
