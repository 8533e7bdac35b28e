"""Measurement of memory and processor time."""

import os
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from forge_agents.sandbox import Sandbox, SandboxLimits
from forge_agents.sandbox._usage import Usage
from forge_agents.sandbox.sandbox import CommandLine, _why_no_namespaces

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or bool(_why_no_namespaces()), reason="needs user namespaces of Linux"
)
LIMITS = SandboxLimits(wall_s=120, cpu_s=60)

CHILDREN = """
import os, signal, time
if IGNORED:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while time.process_time() + sum(os.times()[2:4]) < TOTAL:
    if os.fork() == 0:
        while time.process_time() < LIFE: pass
        os._exit(0)
    try: os.wait()
    except ChildProcessError: pass
print('all')
"""


def children(*, ignored, life_s, total_s):
    names = {"IGNORED": ignored, "LIFE": life_s, "TOTAL": total_s}
    program = CHILDREN
    for name, value in names.items():
        program = program.replace(name, repr(value))
    return program


@pytest.mark.parametrize("life_s", [0.3, 0.005])
def test_time_of_unreaped_children_counts(life_s):
    box = Sandbox(limits=replace(LIMITS, cpu_s=1))
    result = box.run(children(ignored=True, life_s=life_s, total_s=100))
    assert result.limit == "cpu_s" and result.cpu_s >= 1, result


def test_time_of_reaped_children_counts_once():
    result = Sandbox(limits=replace(LIMITS, cpu_s=3)).run(children(ignored=False, life_s=0.005, total_s=1.0))
    assert result.stdout == "all\n" and 0.9 < result.cpu_s < 3, result


FORKS = """
import os, time
x = bytearray(SIZE << 20)
for at in range(0, len(x), 4096): x[at] = 1
for _ in range(4):
    if os.fork() == 0:
        time.sleep(0.5)
        os._exit(x[4096] - 1)
print('all', [os.wait()[1] for _ in range(4)])
"""


def test_a_program_that_uses_most_of_its_memory_may_fork():
    result = Sandbox(limits=replace(LIMITS, memory_mb=200)).run(FORKS.replace("SIZE", "160"))
    assert result.stdout == "all [0, 0, 0, 0]\n" and result.limit == "", result
    assert 160 < result.peak_mb < 200


def test_written_pages_of_forked_processes_count():
    program = FORKS.replace("SIZE", "60").replace(
        "time.sleep(0.5)", "x[::4096] = bytes([1]) * len(x[::4096]); time.sleep(100)"
    )
    result = Sandbox(limits=replace(LIMITS, memory_mb=100)).run(program)
    assert result.limit == "memory_mb", result


@pytest.mark.parametrize("name", ["RssAnon: 0001 k", "RssAnon:", "VmSwap:\n1"])
def test_memory_of_a_program_that_names_itself_like_a_field_of_its_status_counts(name):
    renamed = f"import ctypes\nctypes.CDLL(None).prctl(15, {name.encode()!r}, 0, 0, 0)\n{FORKS}"
    held = renamed.replace("SIZE", "1").replace(
        "time.sleep(0.5)", "y = bytearray(60 << 20); y[::4096] = bytes([1]) * len(y[::4096]); time.sleep(100)"
    )
    result = Sandbox(limits=replace(LIMITS, memory_mb=100)).run(held)
    assert result.limit == "memory_mb", result
    assert result.peak_mb > 100, result


LEADERLESS = """
import ctypes, mmap, os, threading, time
def hold():
    time.sleep(0.3)  # until the first thread has ended
    try:
        pages = mmap.mmap(-1, 60 << 20, flags=mmap.MAP_ANONYMOUS | mmap.FLAGS)
        pages[::4096] = bytes([1]) * len(pages[::4096])
        os.write(1, b'mapped ')
        os.read(refused[0], 1)
    except OSError:
        os.write(refused[1], b'x')
        if child: os.wait()
    os._exit(0)
refused = os.pipe()
child = os.fork()
threading.Thread(target=hold).start()
ctypes.CDLL(None).syscall(EXIT, 0)
"""


@pytest.mark.parametrize(("flags", "limit"), [("MAP_PRIVATE", "memory_mb"), ("MAP_SHARED", "")])
def test_memory_of_processes_without_their_first_thread_counts(flags, limit):
    exits = "60" if os.uname().machine == "x86_64" else "93"
    box = Sandbox(limits=replace(LIMITS, memory_mb=100, wall_s=30))
    result = box.run(LEADERLESS.replace("FLAGS", flags).replace("EXIT", exits))
    assert result.limit == limit and (limit or result.stdout == "mapped "), result


@pytest.fixture
def usage(tmp_path):
    """Usage of processes in a made-up /proc."""
    for pid in "78":
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "maps").touch()
        (tmp_path / pid / "stat").write_text(f"{pid} (python) R")
    proc = os.open(tmp_path, os.O_RDONLY)
    yield Usage(proc, namespaces=True, tcp=False)
    os.close(proc)


def test_shared_memory_is_not_granted_again_before_it_can_be_seen(usage, tmp_path):
    def granted(thread):
        return usage.grant(lambda: ["7"], thread, 60 << 20, 100 << 20)

    assert granted(7) and not granted(8), "thread 7 has not made its mapping yet"
    assert granted(7), "it has returned from its call, and the mapping is gone"
    assert not granted(8)
    shutil.rmtree(tmp_path / "7")
    assert granted(8), "the other thread has ended"


def test_shared_memory_handed_on_by_fork_or_unreadable_counts(usage, monkeypatch):
    trees = iter([["7"], ["8"], ["8"], ["9"], ["9"], ["10"]])
    assert usage.grant(list, 7, 60 << 20, 100 << 20)
    assert not usage.grant(lambda: next(trees), 7, 60 << 20, 100 << 20), "a new process at each look"
    assert usage.grant(lambda: ["7"], 7, 60 << 20, 100 << 20)
    monkeypatch.setattr(Usage, "_threads", lambda *_: [])
    monkeypatch.setattr("os.open", raise_permission_error)
    assert not usage.grant(lambda: ["7"], 7, 60 << 20, 100 << 20)


def raise_permission_error(*_args, **_options):
    raise PermissionError


def test_shared_memory_that_was_freed_may_be_used_again():
    program = "import mmap\nfor _ in range(20):\n    with mmap.mmap(-1, 20 << 20) as m: m.write(b'x')\nprint('all')"
    result = Sandbox(limits=replace(LIMITS, memory_mb=100)).run(program)
    assert result.stdout == "all\n", result


@pytest.mark.parametrize("weaker", [False, True])
def test_shared_memory_above_the_limit_is_refused(weaker, monkeypatch):
    if weaker:
        monkeypatch.setattr("forge_agents.sandbox.sandbox._why_no_namespaces", lambda: "unshare: not permitted")
    python = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else ""
    box = Sandbox(limits=replace(LIMITS, memory_mb=100), allow_weaker=True, python=python)
    program = (
        "import mmap, os\nif os.fork() == 0: m = mmap.mmap(-1, 40 << 20); print('mapped', flush=True); os._exit(0)\n"
        "os.wait(); m = mmap.mmap(-1, 70 << 20); print('again', flush=True)\n"
        "if os.fork() == 0: os._exit(0 if mmap.mmap(-1, 40 << 20) else 1)\nprint(os.wait()[1])"
    )
    result = box.run(program)
    assert result.stdout == "mapped\nagain\n256\n" and "Cannot allocate memory" in result.stderr, result


def test_small_shared_mappings_count_in_pages():
    """Each takes a page and a kernel object, so 100 MiB are at most 12,800 mappings of one byte."""
    program = (
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_void_p\ncount = 0\n"
        "while libc.mmap(None, ctypes.c_size_t(1), 3, 0x21, -1, ctypes.c_long(0)) not in (None, 2**64 - 1):\n"
        "    count += 1\n"
        "    if count % 100 == 0: print(count, flush=True)\n"
    )
    result = Sandbox(limits=replace(LIMITS, memory_mb=100)).run(program)
    assert 11_000 < int(result.stdout.split()[-1]) <= 12_800, result  # the interpreter takes some of the memory


def test_huge_pages_are_refused():
    program = (
        "import mmap\ntry: mmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)\n"
        "except OSError as error: print(error.errno)"
    )
    assert Sandbox(limits=LIMITS).run(program).stdout == "1\n"


# ---- command lines, which reach one port of their own loopback

ASK = """
import os, socket, time
x = bytearray(150 << 20)
for at in range(0, len(x), 4096): x[at] = 1
def ask():
    with socket.create_connection(('127.0.0.1', 8123)) as asking:
        asking.sendall(b'x' * 100_000)
        asking.shutdown(1)
        num = 0
        while part := asking.recv(1 << 16): num += len(part)
    return num == 100_000
for _ in range(3):
    if os.fork() == 0:
        os._exit(0 if all(ask() for _ in range(5)) else 1)
print('all', [os.wait()[1] for _ in range(3)])
"""
BUFFERS = """
import os, socket, time
server = socket.create_server(('127.0.0.1', 0))
held = []
while len(held) < 58:
    held += [socket.create_connection(server.getsockname()), server.accept()[0]]
    for end in held[-2:]:
        end.setblocking(False)
        last = time.monotonic() + 0.1
        while time.monotonic() < last:
            try: end.send(bytes(1 << 20))
            except BlockingIOError: time.sleep(0.01)
time.sleep(600)
"""
PROTOCOLS = """
import socket
for family in (socket.AF_INET, socket.AF_INET6):
    for kind, protocol in ((1, 0), (1, 6), (2, 0), (2, 17), (1, 262), (1, 132), (2, 136), (3, 1), (5, 132), (5, 0)):
        try: socket.socket(family, kind, protocol).close()
        except OSError as error: print(kind, protocol, error.errno)
"""


def echo(server):
    def answer(client):
        with client:
            while part := client.recv(1 << 16):
                client.sendall(part)

    def serve():
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(client,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()


def command(program, **limits):
    box = Sandbox(limits=replace(LIMITS, **limits))
    words = [sys.executable, "-S", "/box/program.py"]
    files = {"program.py": program.encode()}
    line = CommandLine(words, stdin="", environment={}, folder=Path("/"), sandbox=box, port=8123, files=files)
    server = line.begin()
    try:
        if server:
            echo(server)
        return line.wait()
    finally:
        line.stop()
        if server:
            server.close()


def test_command_near_its_memory_limit_forks_and_connects():
    result = command(ASK, memory_mb=200)
    assert result.stdout == "all [0, 0, 0]\n" and result.limit == "", result


def test_buffers_of_tcp_connections_count_as_memory():
    result = command(BUFFERS, memory_mb=60)
    assert result.limit == "memory_mb", result


def test_command_has_only_tcp_and_udp():
    refused = "1 262 1\n1 132 1\n2 136 1\n3 1 1\n5 132 1\n5 0 1\n"
    assert command(PROTOCOLS).stdout == refused * 2


ORPHANS = """
import os, time
for _ in range(20):
    if os.fork() == 0:
        if os.fork() == 0: time.sleep(0.01)
        os._exit(0)
    os.wait()
supervisor, deadline = os.getppid(), time.monotonic() + 60
def children():
    with open(f'/proc/{supervisor}/task/{supervisor}/children') as file:
        return file.read().split()
while children() != [str(os.getpid())] and time.monotonic() < deadline: time.sleep(0.05)
print(len(children()))
"""


def test_orphans_of_a_command_are_reaped_while_it_runs(tmp_path):
    command = CommandLine([sys.executable, "-c", ORPHANS], stdin="", environment=dict(os.environ), folder=tmp_path)
    command.begin()
    assert command.wait().stdout == "1\n"
