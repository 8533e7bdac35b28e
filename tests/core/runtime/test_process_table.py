"""Queries of processes that end at the same moment, as on a busy machine."""

import os
import queue
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import process_checks
import psutil
import pytest

from forge_agents.runtime import processes

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]


class Vanishing(psutil.Process):
    """A process that ends after it was found and before anything is read of it."""

    def _ended(self, *args, **kwargs):
        raise psutil.NoSuchProcess(self.pid)

    status = environ = cmdline = ppid = children = kill = _ended


@pytest.fixture
def child():
    with subprocess.Popen(SLEEPS, env={**os.environ, "FORGE_AGENTS_MESH": "a-mark-of-this-test"}) as process:
        yield process.pid
        process.kill()


def test_process_that_ends_while_it_is_read_counts_as_ended(monkeypatch, child):
    monkeypatch.setattr(psutil, "Process", Vanishing)
    assert not process_checks.runs(child) and not process_checks.command_of(child)
    assert not process_checks.with_command("sleep")
    assert processes.environment(child) == {} and not processes.is_ours(child)
    assert process_checks.parent_of(child) == 0 and process_checks.children_of(child) == []
    assert processes.with_variable("FORGE_AGENTS_MESH", "a-mark-of-this-test") == []
    monkeypatch.setattr(processes, "with_variable", lambda name, value: [Vanishing(os.getpid())])
    processes.kill_mesh("a-mark-of-this-test")
    psutil.process_iter.cache_clear()  # it keeps the processes of this test for later calls


def test_processes_of_a_mesh_are_found_and_killed(child):
    (result,) = processes.with_variable("FORGE_AGENTS_MESH", "a-mark-of-this-test")
    assert result.pid == child and process_checks.runs(child) and "time.sleep(600)" in process_checks.command_of(child)
    assert child in process_checks.children_of(os.getpid()) and process_checks.parent_of(child) == os.getpid()
    processes.kill_mesh("a-mark-of-this-tes")  # another mark, of which this one's begins
    assert process_checks.runs(child)
    processes.kill_mesh("a-mark-of-this-test")
    assert process_checks.ended_within([child], 60)


def test_a_zombie_does_not_run():
    with subprocess.Popen(SLEEPS) as process:
        os.kill(process.pid, signal.SIGKILL)
        assert process_checks.ended_within([process.pid], 60) and psutil.pid_exists(process.pid)  # nobody waited for it


def test_free_ports_are_outside_the_ephemeral_range():
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {process_checks.free_port() for _ in range(5)}
    assert len(ports) > 1 and all(port < max(first, 32_000) for port in ports)


def test_exit_status_is_known_after_another_waiter_was_faster(monkeypatch):
    statuses, kernel = [], tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    for _ in range(2):
        child = subprocess.Popen(SLEEPS)
        fd = os.pidfd_open(child.pid)
        child.kill()
        child.wait()
        processes._wait_for_end(fd, statuses.append)
        monkeypatch.setattr(processes, "_GET_INFO", 0xC040FFFF)  # a kernel without this request
    assert statuses == [-signal.SIGKILL if kernel >= (6, 15) else None, None]


def test_exit_status_is_known_if_the_parent_fetches_it_late(monkeypatch):
    monkeypatch.setattr(processes, "time", SimpleNamespace(sleep=lambda _: time.sleep(0.1)))  # a busy parent is later
    kernel = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    program = (
        "import subprocess, sys, time; child = subprocess.Popen(['sleep', '600']); print(child.pid, flush=True)\n"
        "input(); child.kill(); time.sleep(0.3); child.wait(); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as parent:
        reported = queue.SimpleQueue()
        processes.on_end(int(parent.stdout.readline()), reported.put)
        parent.stdin.write("end\n")
        parent.stdin.flush()
        assert reported.get(timeout=60) == (-signal.SIGKILL if kernel >= (6, 15) else None)
        parent.stdin.write("end\n")


def test_end_of_a_child_is_reported_with_its_exit_status():
    reported = queue.SimpleQueue()
    program = "import sys; sys.exit(sys.stdin.read() or 3)"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    processes.on_end(child.pid, reported.put)
    child.stdin.close()
    assert reported.get(timeout=60) == 3 and child.wait() == 3
    with pytest.raises(ProcessLookupError):
        processes.on_end(child.pid, reported.put)
