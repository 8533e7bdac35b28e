"""Descriptions of the end of a process: its signal, its place and the last lines of its log."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from forge_agents.private_folder import make_private, private_folder
from forge_agents.runtime import deaths, mesh, processes
from forge_agents.runtime.deaths import death, name_signals, oom_kills
from forge_agents.runtime.processes import is_ours, kill_after, variables

DIES = """
import faulthandler, os, signal, sys
faulthandler.enable()
print("loading", flush=True)
def attend():
    {end}
def step():
    attend()
step()
"""


def run(end: str, folder: Path) -> tuple[int, Path]:
    (folder / "dies.py").write_text(DIES.format(end=end))
    log = folder / "0.log"
    with log.open("wb") as file:
        done = subprocess.run([sys.executable, folder / "dies.py"], stdout=file, stderr=file, timeout=30, check=False)
    return done.returncode, log


def test_crash_reports_signal_place_and_last_lines(tmp_path: Path) -> None:
    ill = death(*run("os.kill(os.getpid(), signal.SIGILL)", tmp_path))
    place = f"{tmp_path.name}/dies.py"
    assert ill.how.startswith(f"was ended by SIGILL in attend ({place}:6) < step ({place}:8)"), ill.how
    assert ill.last_lines == "loading"
    assert death(None, tmp_path / "0.log") == ill  # the signal is not known, but the dump names it
    again = death(*run("os.kill(os.getpid(), signal.SIGILL)", tmp_path))
    other = death(*run("os.abort()", tmp_path))
    assert ill.place == again.place != other.place != ""
    assert other.how.startswith("was ended by SIGABRT in attend")


@pytest.mark.parametrize(
    ("end", "how"),
    [("os.kill(os.getpid(), signal.SIGKILL)", "was ended by SIGKILL"), ("sys.exit(3)", "ended with exit status 3")],
)
def test_death_without_a_dump_has_no_place(end: str, how: str, tmp_path: Path) -> None:
    result = death(*run(end, tmp_path))
    assert (result.how, result.place, result.last_lines) == (how, "", "loading")


def test_death_names_its_usual_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "an instruction that this processor lacks" in death(-signal.SIGILL, None).meaning
    assert death(1, None).meaning == death(None, None).meaning == death(-signal.SIGSEGV, None).meaning == ""
    counter = tmp_path / "memory.events"
    monkeypatch.setattr(deaths, "_OOM_COUNTERS", (str(tmp_path / "absent"), str(counter)))
    counter.write_text("low 0\noom 7\noom_kill 2\noom_group_kill 0\n")
    deaths.oom_kills_before.cache_clear()
    try:
        assert oom_kills() == (0, 2)
        assert "by another program" in death(-signal.SIGKILL, None).meaning
        counter.write_text("oom 8\noom_kill 3\n")
        assert "by the kernel for want of memory" in death(-signal.SIGKILL, None).meaning
    finally:
        deaths.oom_kills_before.cache_clear()


def test_native_thread_crash_uses_stacks_of_all_threads(tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    log.write_text(
        "Fatal Python error: Illegal instruction\n\nThread 0x1 (most recent call first):\n"
        '  File "/a/ops.py", line 7 in attention\n\nCurrent thread 0x2 (most recent call first):\n'
        "  <no Python frame>\n"
    )
    assert death(-4, log).how == "was ended by SIGILL in attention (a/ops.py:7)"


@pytest.mark.parametrize("status", [None, -signal.SIGSEGV])
def test_first_signal_counts_if_a_dump_broke_off(status: int | None, tmp_path: Path) -> None:
    log = tmp_path / "0.log"
    ours = 'Current thread 0x2 (most recent call first):\n  File "/a/ops.py", line 7 in attention\n\n'
    others = 'Thread 0x1 (most recent call first):\n  File "<frozen importlib._bootstrap>", line 846 in spec\n  File '
    ill, fault = "Fatal Python error: Illegal instruction\n\n", "Fatal Python error: Segmentation fault\n\n"
    log.write_text(ill + ours + others + fault)
    assert death(status, log).how == "was ended by SIGILL in attention (a/ops.py:7)"
    log.write_text(ill + others + fault)
    result = death(status, log)
    assert (result.how, result.place) == ("was ended by SIGILL", "")
    # two dumps of children that print there, too: what ended the process itself is known
    assert death(-signal.SIGKILL, log).how == "was ended by SIGKILL"
    assert death(1, log).how == "ended with exit status 1"


def test_unknown_exit_status_is_not_guessed(tmp_path: Path) -> None:
    assert death(None, tmp_path / "elsewhere.log").how == "ended"
    assert not death(None, None).known and death(0, None).known
    assert death(-250, None).how == "was ended by signal 250"
    assert name_signals("Killed(sig=9)") == "Killed(SIGKILL)"


@pytest.mark.parametrize("ended_its_work", [True, False])
def test_stopped_process_gets_grace_until_its_exit_handlers_ran(ended_its_work: bool, tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, env={**os.environ, **variables("")}) as process:
        while not is_ours(process.pid):  # it is still this process's image
            time.sleep(0.01)
        if ended_its_work:
            (tmp_path / f"{process.pid}.done").touch()
        grace_s = 60.0 if ended_its_work else 0.2
        began = time.monotonic()
        asyncio.run(kill_after(grace_s, [process.pid], tmp_path))
        took_s = time.monotonic() - began
        assert process.wait(60) == -signal.SIGKILL
    assert took_s < grace_s if ended_its_work else took_s >= grace_s


def test_incomplete_and_missing_pid_files_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "0.pid").write_text("41")
    (tmp_path / "1.pid").touch()
    (tmp_path / "2.pid").symlink_to(tmp_path / "gone")
    assert mesh._pids(SimpleNamespace(logs=tmp_path)) == {41: tmp_path / "0.pid"}  # type: ignore[arg-type]


def test_a_log_folder_of_another_user_is_refused(tmp_path, monkeypatch):
    folder, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder.symlink_to(elsewhere)
    with pytest.raises(PermissionError, match=f"{folder} is not a folder of yours"):
        make_private(folder)
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o777)
    make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(PermissionError, match="its owner is user"):
        make_private(folder)


def test_log_folders_are_private_and_unique():
    logs = [processes.make_log_folder("engine") for _ in range(2)]
    assert logs[0] != logs[1] and {folder.parent for folder in logs} == {private_folder()}
    assert {folder.stat().st_mode & 0o777 for folder in logs} == {0o700}
    for folder in logs:
        folder.rmdir()


def test_peak_memory_excludes_the_parent():
    data = b"x" * 400_000_000
    code = "from forge_agents.runtime.machine import resident_bytes; print(*resident_bytes())"
    now, peak = map(int, subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.split())
    assert now <= peak < 300_000_000 < len(data)
