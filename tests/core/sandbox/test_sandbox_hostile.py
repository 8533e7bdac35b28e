"""Programs that try to break out. Each succeeds without the sandbox, or with its one limit lifted."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
import zoneinfo
from dataclasses import replace
from pathlib import Path

import pytest
from process_checks import command_of, holds_within, parent_of, with_command

from forge_agents.runtime.threads import begin_in_thread
from forge_agents.sandbox import Sandbox, SandboxLimits
from forge_agents.sandbox.sandbox import _why_no_namespaces

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or bool(_why_no_namespaces()), reason="needs user namespaces of Linux"
)
ROOT = os.geteuid() == 0
LIMITS = SandboxLimits(wall_s=120)

# ---- reaching for what is outside

# Each raises unless it reaches what it should not.
# NEEDS_ROOT: only root reaches it unshut, too. UNSAFE: not tried unshut.
REACH = {
    "descriptors left open": "[os.fstat(n) for n in range(3, 6)]",  # the first: others leave theirs open
    "password file": "open('/etc/passwd').read()",
    "shadow file": "open('/etc/shadow').read()",
    "repository": "open(REPOSITORY + '/pyproject.toml').read()",
    "file of a known path": "open(SECRET).read()",
    "symlink out of the folder": "os.symlink(SECRET, 'link'); open('link').read()",
    "hard link out of the folder": "os.link(SECRET, 'hard'); open('hard').read()",
    "folder by ..": "assert os.listdir(SECRET_FOLDER)",
    "temporary folder": "os.listdir('/tmp')",
    "environment": "os.environ['FORGE_SECRET']",
    "environment of the parent": "open(f'/proc/{PARENT}/environ').read()",
    "list of processes": "assert len([p for p in os.listdir('/proc') if p.isdigit()]) > 1",
    "hidden list of mappings": "checked(libc.prctl(4, 0, 0, 0, 0))",
    "own memory through /proc": "open('/proc/self/mem', 'rb')",
    "signal to the parent": "os.kill(PARENT, 0)",
    "signal to everybody": "os.kill(-1, 0)",
    "debugging": "checked(libc.ptrace(0, 0, 0, 0))",
    "memory of a process": "checked(libc.process_vm_readv(os.getpid(), None, 0, None, 0, 0))",
    "connection to the host": "socket.create_connection(('127.0.0.1', PORT), 2)",
    "datagram, as for names": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
    "listening": "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen()",
    "abstract local socket of the host": "socket.socket(socket.AF_UNIX).connect(chr(0) + TOKEN)",
    "path socket of the host": "socket.socket(socket.AF_UNIX).connect(SOCKET)",
    "path socket by a pair": "socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b'x', LETTERBOX)",
    "limits of another process": "import resource; resource.prlimit(PARENT, resource.RLIMIT_CORE)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "write to a known path": "open(SECRET_FOLDER + '/written', 'w')",
    "write to the program": "open(__file__, 'a')",
    "write to the standard library": "open(os.__file__, 'a')",
    "chroot": "os.chroot('.')",
    "mount": "checked(libc.mount(b'none', b'.', b'tmpfs', 0, None))",
    "namespaces of its own": "checked(libc.unshare(0x10000000))",
    "namespaces by clone": "checked(libc.syscall(CLONE, 0x10000000 | 17, 0, 0, 0, 0)) or os._exit(0)",
    "device node": "os.mknod('dev', 0o020600, os.makedev(1, 3))",
    "devices": "assert set(os.listdir('/dev')) - {'null', 'zero', 'urandom'}",
    "kernel settings": "os.listdir('/sys')",
    "becoming root": "os.setuid(0)",
    "capabilities": "assert libc.prctl(23, 21, 0, 0, 0) == 1",
    "new privileges by exec": "assert libc.prctl(39, 0, 0, 0, 0) == 0",
    "raising limits": "import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "shell": "subprocess.run(['/bin/sh', '-c', 'exit 0'], check=True)",
    "our packages": "import forge_agents",
    "installed packages": "import pytest",
    "System V shared memory": "number = checked(libc.shmget(0, 4096, 0o1600)); libc.shmctl(number, 0, None)",
    "POSIX shared memory": "open('/dev/shm/' + TOKEN, 'w'); os.unlink('/dev/shm/' + TOKEN)",
    "anonymous memory file": "os.memfd_create('x')",
    "shared memory of /dev/zero": "os.open('/dev/zero', os.O_RDWR)",
    "inotify instances of the user": "checked(libc.inotify_init())",
    "larger pipe": "import fcntl; fcntl.fcntl(os.pipe()[0], 1031, 1 << 18)",
    "lease on a file": "import fcntl; open('own', 'w').close(); fcntl.fcntl(os.open('own', os.O_RDONLY), 1024, 1)",
    "news of a folder": "import fcntl; fcntl.fcntl(os.open('.', os.O_RDONLY), 1026, 4)",
    "owner of signals": "import fcntl; fcntl.fcntl(os.pipe()[0], 8, os.getpid())",
    "other socket buffer": (
        "a, b = socket.socketpair(); size = a.getsockopt(1, 7); a.setsockopt(1, 7, 9999); "
        "assert a.getsockopt(1, 7) != size"
    ),
    "message queue": "name = f'/{TOKEN}'.encode(); checked(libc.mq_open(name, 66, 0o600, None)); libc.mq_unlink(name)",
    "key ring": "checked(libc.syscall(ADD_KEY, b'user', b'k', b'v', 1, -1))",
    "core dump": "import resource; assert resource.getrlimit(resource.RLIMIT_CORE)[1] != 0",
}
NEEDS_ROOT = {"shadow file", "chroot", "device node", "becoming root", "write to the standard library"}
UNSAFE = {"mount", "key ring", "descriptors left open"}
PRELUDE = """
import ctypes, os, socket, subprocess, sys
libc = ctypes.CDLL(None, use_errno=True)
def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
"""
X86 = os.uname().machine == "x86_64"


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """Targets of the programs: a file, a listener, a local socket, our own process."""
    folder = tmp_path_factory.mktemp("outside")
    folder.joinpath("secret").write_text("s")
    token = f"forge-{uuid.uuid4().hex}"
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_UNIX) as local,
        socket.socket(socket.AF_UNIX) as placed,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as letterbox,
        tempfile.TemporaryDirectory() as short,  # addresses have 107 bytes
    ):
        local.bind(f"\0{token}")
        placed.bind(f"{short}/socket")
        letterbox.bind(f"{short}/letterbox")
        for path in (short, f"{short}/socket", f"{short}/letterbox"):
            Path(path).chmod(0o777)  # so that nothing but the sandbox keeps a program from it
        local.listen(8)
        placed.listen(8)
        yield {
            "SECRET": str(folder / "secret"),
            "SECRET_FOLDER": str(folder),
            "REPOSITORY": str(Path(__file__).parents[3]),
            "PARENT": os.getpid(),
            "PORT": server.getsockname()[1],
            "TOKEN": token,
            "SOCKET": f"{short}/socket",
            "LETTERBOX": f"{short}/letterbox",
            "CLONE": 56 if X86 else 220,
            "ADD_KEY": 248 if X86 else 217,
        }


def reaching(names, outside, forks=False):
    """A program that tries each, in a process of its own if it `forks`, and prints whether it reached it."""
    lines = [PRELUDE, *(f"{key} = {value!r}\n" for key, value in outside.items())]
    for name in names:
        attempt = (
            f"try:\n    {REACH[name]}\nexcept BaseException as error:\n    print({name!r}, 'held:', repr(error))\n"
        )
        attempt += f"else:\n    print({name!r}, 'REACHED')\n"
        in_child = textwrap.indent(f"{attempt}sys.stdout.flush()\nos._exit(0)\n", "    ")
        lines.append(f"if os.fork() == 0:\n{in_child}os.wait()\n" if forks else attempt)
    return "".join(lines)


def test_outside_is_unreachable(outside):
    result = Sandbox(limits=LIMITS).run(reaching(REACH, outside))
    for name, line in zip(REACH, result.stdout.splitlines(), strict=True):
        assert line.startswith(f"{name} held:") and "SyntaxError" not in line, result
    assert result.exit_code == 0


def test_outside_is_reachable_without_the_sandbox(outside, tmp_path):
    names = [name for name in REACH if name not in UNSAFE and (ROOT or name not in NEEDS_ROOT)]
    program = tmp_path / "program.py"
    program.write_text(reaching(names, outside, forks=True))
    env = {**os.environ, "FORGE_SECRET": "1"}
    words = [sys.executable, program]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines() == [f"{name} REACHED" for name in names], done


# ---- the same where namespaces are not allowed

HOST = [name for name in REACH if "socket" in name or "connection" in name]
HELD_WEAKLY = [
    *HOST, "datagram, as for names", "listening", "netlink", "limits of another process", "debugging", "chroot",
    "memory of a process", "namespaces of its own", "device node", "key ring", "anonymous memory file", "environment",
    "shared memory of /dev/zero", "inotify instances of the user", "larger pipe", "other socket buffer",
    "System V shared memory", "message queue", "becoming root", "new privileges by exec", "raising limits",
    "hidden list of mappings",
]  # fmt: skip


@pytest.fixture(params=["with namespaces", "without"])
def box(request, monkeypatch):
    if request.param == "without":
        monkeypatch.setattr("forge_agents.sandbox.sandbox._why_no_namespaces", lambda: "unshare: not permitted")
    anybodys = "/usr/bin/python3" if ROOT and Path("/usr/bin/python3").exists() else ""
    return Sandbox(limits=LIMITS, allow_weaker=True, python=anybodys)


@pytest.mark.parametrize("box", ["without"], indirect=True)
def test_system_calls_reach_nothing_outside_without_namespaces(box, outside):
    attempts = [f"try:\n    {REACH[name]}\n    print({name!r})\nexcept BaseException: pass\n" for name in HELD_WEAKLY]
    names = "".join(f"{key} = {value!r}\n" for key, value in outside.items())
    result = box.run(f"{PRELUDE}{names}{''.join(attempts)}print('end')")
    assert result.stdout == "end\n", result


CALLS = {  # on x86_64
    "ptrace": 101, "mount": 165, "chroot": 161, "unshare": 272, "setns": 308, "bpf": 321, "userfaultfd": 323,
    "io_uring_setup": 425, "io_uring_enter": 426, "keyctl": 250, "add_key": 248, "perf_event_open": 298,
    "memfd_create": 319, "process_vm_readv": 310, "open_by_handle_at": 304, "name_to_handle_at": 303, "connect": 42,
    "accept": 43, "bind": 49, "listen": 50, "accept4": 288, "modify_ldt": 154, "init_module": 175, "kexec_load": 246,
    "pidfd_getfd": 438, "execveat": 322, "personality": 135, "move_pages": 279, "vmsplice": 278, "mknod": 133,
    "reboot": 169, "shmget": 29, "iopl": 172, "quotactl": 179, "open_tree": 428, "clone3": 435,
    "inotify_init": 253, "inotify_init1": 294, "inotify_add_watch": 254,
    "x32 getpid": 0x40000027, "one of tomorrow": 999,
}  # fmt: skip


@pytest.mark.skipif(not X86, reason="the numbers are those of x86_64")
def test_unneeded_system_calls_do_not_exist(box):
    program = (
        f"{PRELUDE}assert libc.syscall(39) == os.getpid()\nfor name, number in {CALLS!r}.items():\n"
        "    made = libc.syscall(number, 0, 0, 0, 0, 0, 0)\n"
        "    if (made, ctypes.get_errno()) != (-1, 38): print(name, made, ctypes.get_errno())\nprint('end')"
    )
    assert box.run(program).stdout == "end\n"


def test_sync_waits_for_no_file_system(box):
    result = box.run("import ctypes, os\nos.sync()\nprint(ctypes.CDLL(None).syncfs(-1))")  # fails if it is done
    assert result.stdout == "0\n", result


IN_FLIGHT = """
import array, socket, time
ends = socket.socketpair()
ends[0].sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0] * 200))])
time.sleep(3)
"""


def test_descriptors_in_flight_keep_no_other_program_from_starting(box):
    hostile = begin_in_thread(box.run, IN_FLIGHT, name="hostile")
    others = []
    while not hostile.done() or len(others) < 2:
        others.append(box.run("print(1)"))
    assert hostile.result().ok and all(other.stdout == "1\n" for other in others), others


@pytest.mark.skipif(not X86, reason="only x86_64 has another set of calls")
def test_32_bit_system_calls_end_the_program(box):
    code = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"  # getpid by int 0x80, where all sockets have one number
    program = (
        f"import ctypes, mmap\npage = mmap.mmap(-1, 4096, prot=7)\npage.write({code!r})\n"
        "address = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
        "print('start', flush=True); print(ctypes.CFUNCTYPE(ctypes.c_int)(address)())"
    )
    result = box.run(program)
    assert result.stdout == "start\n" and result.exit_code in (-signal.SIGSYS, -signal.SIGSEGV), result


ORDINARY = """
import array, asyncio, bz2, concurrent.futures, fcntl, gzip, hashlib, json, lzma, mmap, os, random, select, selectors
import shutil, signal, socket, sqlite3, subprocess, sys, tempfile, threading, time, zipfile, zoneinfo
assert ZONES is False or zoneinfo.ZoneInfo('Europe/Oslo').key == 'Europe/Oslo'
with tempfile.TemporaryDirectory(dir='.') as folder:
    db = sqlite3.connect(folder + '/db')
    with db: db.execute('CREATE TABLE t (x)'); db.execute('INSERT INTO t VALUES (1)')
    assert db.execute('SELECT x FROM t').fetchone() == (1,)
    with zipfile.ZipFile(folder + '/z', 'w') as file: file.writestr('a', 'b' * 999)
    for module in (gzip, bz2, lzma):
        with module.open(folder + '/c', 'wb') as file: file.write(b'x' * 9999)
    shutil.copyfile(folder + '/z', folder + '/y'); os.replace(folder + '/y', folder + '/x'); os.statvfs('.')
    os.symlink('x', folder + '/l'); os.link(folder + '/x', folder + '/h'); os.truncate(folder + '/x', 3)
    with open(folder + '/x', 'a') as file: fcntl.lockf(file, fcntl.LOCK_EX); fcntl.flock(file, fcntl.LOCK_UN)
    os.close(os.dup(1)); assert fcntl.fcntl(1, fcntl.F_GETFL) and fcntl.fcntl(os.pipe()[1], 1032) >= 4096
    with open(folder + '/x', 'r+b') as file: mmap.mmap(file.fileno(), 3)[:]; os.fsync(file.fileno())
async def both():
    reader = await asyncio.create_subprocess_exec(sys.executable, '-S', '-c', 'print(6)', stdout=-1)
    return (await reader.communicate())[0], await asyncio.to_thread(time.sleep, 0.001)
assert asyncio.run(both())[0] == b'6\\n'
assert subprocess.run([sys.executable, '-S', '-c', 'print(7)'], capture_output=True).stdout == b'7\\n'
one, other = socket.socketpair(); one.sendall(b'ping'); assert other.recv(4) == b'ping'; one.close(); other.close()
with concurrent.futures.ThreadPoolExecutor(4) as pool: assert sum(pool.map(abs, range(-9, 0))) == 45
signal.signal(signal.SIGALRM, lambda *_: None); signal.setitimer(signal.ITIMER_REAL, 0.01); signal.pause()
pid = os.fork()
if pid == 0: os._exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
select.epoll().close(); os.urandom(8); random.SystemRandom().random(); os.getloadavg; os.times(); os.uname()
os.sched_getaffinity(0); os.cpu_count(); hashlib.scrypt(b'x', salt=b'y', n=2, r=8, p=1)
print('fine')
"""


def test_ordinary_programs_work(box):
    zones = any(Path(folder, "Europe/Oslo").exists() for folder in zoneinfo.TZPATH)  # the machine's own
    result = box.run(f"ZONES = {zones}\n{ORDINARY}")
    assert result.stdout == "fine\n" and result.stderr == "", result


# ---- using too much

COUNT_FORKS = """
import os, time
n = 0
try:
    while n < 24:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        n += 1
except OSError:
    pass
print('all' if n == 24 else 'fewer')
"""
COUNT_THREADS = """
import threading, time
n, end = 0, threading.Event()
try:
    while n < 24:
        threading.Thread(target=end.wait, args=(60,)).start()
        n += 1
except RuntimeError:
    pass
end.set()
print('all' if n == 24 else 'fewer')
"""
# Unmapping all but one page of a shared mapping frees nothing.
SHARED = """
import ctypes, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
for n in range(12):
    address = libc.mmap(None, 10 << 20, 3, 0x21, -1, 0)
    if address == 2**64 - 1:
        time.sleep(HELD_S)
    ctypes.memset(address, 1, 10 << 20)
    libc.munmap(address + 4096, (10 << 20) - 4096)
print('all')
"""
SOCKETS = """
import os, socket, time
for _ in range(5):
    if os.fork() == 0:
        pairs = [socket.socketpair() for _ in range(29)]
        for end in (end for pair in pairs for end in pair):
            end.setblocking(False)
            try:
                while True: end.send(bytes(1 << 16))
            except BlockingIOError: pass
        time.sleep(HELD_S); os._exit(0)
for _ in range(5): os.wait()
print('all')
"""
# Program, the limit's low and high value, what ends or marks it when low. With the high value it prints "all".
LIMITED = {
    "sleep": ("import time; time.sleep(HELD_S); print('all')", "wall_s", 0.3, 60, "ended"),
    "sleep that ignores signals": (
        ("import signal, time\nfor s in 2, 3, 14, 15: signal.signal(s, signal.SIG_IGN)\n"
        "time.sleep(HELD_S); print('all')"),
        "wall_s", 0.3, 60, "ended",
    ),
    "sleep without output": (
        "import os, time; out = os.dup(1); os.close(1); os.close(2); time.sleep(HELD_S); os.write(out, b'all\\n')",
        "wall_s", 0.3, 60, "ended",
    ),
    "waiting for input": ("import select; select.poll().poll(HELD_S * 1000); print('all')", "wall_s", 0.3, 60, "ended"),
    "busy loop": (
        "import time\nwhile time.process_time() < HELD_S + 1.1: pass\nprint('all')", "cpu_s", 1, 30, "ended",
    ),
    "busy loops in turns": (
        ("import os, time\nfor _ in range(HELD_S + 3):\n    if os.fork() == 0:\n"
        "        while time.process_time() < 0.5: pass\n        os._exit(0)\n    os.wait()\nprint('all')"),
        "cpu_s", 1, 30, "ended",
    ),
    "memory": ("x = bytearray(200 << 20); print('all')", "memory_mb", 100, 400, "MemoryError"),
    "memory of many processes": (
        (
            "import os, time\nfor _ in range(4):\n    if os.fork() == 0:\n        x = bytearray(b'x' * (30 << 20))\n"
            "        time.sleep(HELD_S); os._exit(0)\nfor _ in range(4): os.wait()\nprint('all')"
        ),
        "memory_mb", 100, 400, "ended",
    ),
    "memory maps": ("import mmap; mmap.mmap(-1, 200 << 20); print('all')", "memory_mb", 100, 400, "allocate memory"),
    "shared memory in no page table": (SHARED, "memory_mb", 55, 400, "ended"),
    "socket buffers": (SOCKETS, "memory_mb", 60, 400, "ended"),
    "forks": (COUNT_FORKS, "processes", 8, 40, "fewer"),
    "threads": (COUNT_THREADS, "processes", 8, 40, "fewer"),
    "open files": (
        "import os\nfor _ in range(60): os.open('/dev/null', 0)\nprint('all')",
        "open_files", 32, 128, "Too many open files",
    ),
    "huge file": ("open('x', 'wb').write(bytes(3 << 20)); print('all')", "file_mb", 1, 8, "File too large"),
    "huge hole": ("open('x', 'wb').truncate(3 << 20); print('all')", "file_mb", 1, 8, "File too large"),
    "full disk": (
        "for n in range(4): open(f'{n}', 'wb').write(bytes(1 << 20))\nprint('all')",
        "disk_mb", 2, 8, "No space left",
    ),
    "many files": ("for n in range(99): open(f'{n}', 'w')\nprint('all')", "files", 50, 200, "No space left"),
    "much output": ("print('x' * 50_000); print('all')", "output_kb", 8, 100, "ended"),
    "much error output": ("import sys; sys.stderr.write('x' * 200_000); print('all')", "output_kb", 8, 400, "ended"),
}  # fmt: skip


# 15,000 mappings of a page in each of 40 processes: 150 MB of the kernel's memory, and none of the processes
MAPPINGS = """
import ctypes, os, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
for _ in range(40):
    if os.fork() == 0:
        address = libc.mmap(None, 15_000 * 4096, 0, 0x22, -1, 0)
        for n in range(0, 15_000, 2):
            libc.mprotect(address + n * 4096, 4096, 1)
        time.sleep(HELD_S); os._exit(0)
for _ in range(40): os.wait()
print('all')
"""


def test_mappings_count_as_memory():
    limits = replace(LIMITS, processes=50, cpu_s=30, wall_s=60)
    kept = Sandbox(limits=replace(limits, memory_mb=110)).run(MAPPINGS.replace("HELD_S", "600"))
    assert kept.limit == "memory_mb", kept
    lifted = Sandbox(limits=replace(limits, memory_mb=500)).run(MAPPINGS.replace("HELD_S", "1"))
    assert lifted.stdout == "all\n" and lifted.limit == "", lifted


@pytest.mark.parametrize("name", LIMITED)
def test_only_the_exceeded_limit_is_reported(name):
    program, field, low, high, mark = LIMITED[name]
    data = Sandbox(limits=replace(LIMITS, **{field: low})).run(program.replace("HELD_S", "600"))
    assert "all" not in data.stdout and not (data.ok and mark == "ended"), data
    assert (data.limit == field) if mark == "ended" else (mark in data.stdout + data.stderr), data
    lifted = Sandbox(limits=replace(LIMITS, **{field: high})).run(program.replace("HELD_S", "0"))
    assert "all" in lifted.stdout and lifted.limit == "", lifted


@pytest.mark.parametrize(
    "program",
    [
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
        (
            "import threading\ndef f():\n    while True:\n        try: threading.Thread(target=f).start()\n"
            "        except RuntimeError: pass\nf()"
        ),
        (
            "import os\nwhile True:\n    try:\n        if os.fork(): os._exit(0) if os.getpid() != 2 else None\n"
            "    except OSError: pass"
        ),
    ],
    ids=["fork bomb", "thread bomb", "forks that hand over"],
)
def test_fork_bombs_end_and_leave_no_processes(program):
    limits = replace(LIMITS, wall_s=0.5, processes=12)
    started = time.monotonic()
    result = Sandbox(limits=limits).run(program)
    assert result.limit in ("wall_s", "memory_mb", "cpu_s", "output_kb")
    assert time.monotonic() - started < 100


def test_endless_output_is_cut():
    result = Sandbox(limits=replace(LIMITS, output_kb=16)).run("while True: print('spam')")
    assert result.limit == "output_kb" and len(result.stdout) <= 16 << 10


# ---- staying on

DAEMONS = {
    "child": "spawn()",
    "own session": "os.setsid() if os.fork() == 0 else os._exit(0)\nspawn()",
    "daemon": "if os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\nspawn()",
    "stopped child": "os.kill(spawn(), 19)",
    "deaf child": "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]\nspawn()",
}


def daemon(name, token):
    return (
        "import os, signal, subprocess, sys\ndef spawn():\n    null = open('/dev/null', 'w')\n"
        "    return subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)', "
        f"{token!r}], stdout=null, stderr=null).pid\n{DAEMONS[name]}\n"
    )


@pytest.mark.parametrize("name", DAEMONS)
def test_children_end_with_the_program(name):
    token = uuid.uuid4().hex
    result = Sandbox(limits=LIMITS).run(daemon(name, token))
    assert result.exit_code == 0, result
    assert with_command(token) == []


def test_daemon_survives_without_the_sandbox():
    token = uuid.uuid4().hex
    subprocess.run([sys.executable, "-c", daemon("daemon", token)], timeout=20, check=True)
    assert holds_within(60, lambda: with_command(token))
    for pid in with_command(token):
        os.kill(pid, signal.SIGKILL)


def test_the_program_dies_with_its_supervisor():
    token = uuid.uuid4().hex
    program = daemon("child", token) + "import time; time.sleep(600)"
    errors = []

    def run():
        try:
            Sandbox(limits=LIMITS).run(program)
        except Exception as error:  # noqa: BLE001  # looked at below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert holds_within(60, lambda: with_command(token))
    chain = with_command(token)[:1]
    while "_supervisor.py" not in command_of(chain[-1]) or len(chain) < 3:
        chain.append(parent_of(chain[-1]))
    while "_supervisor.py" in command_of(chain[-1]):
        supervisor = chain[-1]
        chain.append(parent_of(chain[-1]))
    os.kill(supervisor, signal.SIGKILL)
    thread.join(60)
    assert "supervisor died" in str(errors[0])
    assert holds_within(60, lambda: not with_command(token))


def test_files_of_the_host_are_not_owned_by_the_program():
    code = "import os; print([os.stat(p).st_uid for p in ('/usr', os.__file__)], os.getuid(), os.getgroups())"
    result = Sandbox(limits=LIMITS).run(code)
    assert result.stdout.split("]")[1].startswith(" 1000")
    assert "1000" not in result.stdout.split("]")[0]


def test_program_cannot_see_the_supervisor():
    assert Sandbox(limits=LIMITS).run("import os; print(os.getppid(), os.getpid())").stdout == "1 2\n"
