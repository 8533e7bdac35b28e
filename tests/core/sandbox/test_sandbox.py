import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from process_checks import with_command
from refusals import raises

from forge_agents.sandbox import Guarantees, Sandbox, SandboxError, SandboxLimits, SandboxUnavailable, sandbox
from forge_agents.sandbox._isolation import outer_id
from forge_agents.sandbox.sandbox import _why_no_namespaces

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
data = pytest.mark.skipif(
    sys.platform != "linux" or bool(_why_no_namespaces()), reason="needs user namespaces of Linux"
)
new_python = pytest.mark.skipif(sys.version_info < (3, 11, 4), reason="a program ends at NUL before Python 3.11.4")
LIMITS = SandboxLimits(wall_s=30)


@data
def test_result_describes_the_program():
    code = (
        "import sys\nprint(sys.stdin.read()[::-1], flush=True)\nsys.stderr.write('e')\n"
        "open('out', 'wb').write(b'\\xff')\nsys.exit(3)"
    )
    result = Sandbox(limits=LIMITS).run(code, stdin="héllo", files={"a/b.txt": b"1"}, collect=True)
    assert (result.stdout, result.stderr, result.exit_code, result.limit) == ("olléh\n", "e", 3, "")
    assert result.files == {"a/b.txt": b"1", "out": b"\xff"}
    assert 0 < result.cpu_s < result.wall_s * os.cpu_count() + 0.1
    assert not result.ok


@data
def test_modules_among_the_files_are_imported_and_runs_share_nothing():
    box = Sandbox(limits=LIMITS)
    assert box.run("import m; print(m.x); open('left', 'w')", files={"m.py": b"x = 5"}).stdout == "5\n"
    assert box.run("import os; print(os.listdir(), sorted(os.environ))").stdout.startswith("[] ['HOME', 'LANG'")


@data
@pytest.mark.parametrize(
    ("code", "stdout", "stderr", "exit_code"),
    [
        ("import sys; sys.stdout.buffer.write(b'a\\xff\\x1b[31m\\0b')", "a\ufffd\x1b[31m\0b", "", 0),
        ("", "", "", 0),
        ("print(input())\ninput()", "line\n", "EOFError", 1),
        ("x = '\udc80'", "", "SyntaxError", 1),
        pytest.param("\0", "", "SyntaxError", 1, marks=new_python),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "", "", -15),
        ("import os; os.abort()", "", "", -6),
    ],
)
def test_unusual_programs_have_correct_results(code, stdout, stderr, exit_code):
    result = Sandbox(limits=LIMITS).run(code, stdin="line\n")
    assert (result.stdout, result.exit_code, result.limit) == (stdout, exit_code, "") and stderr in result.stderr


@data
def test_unread_input_does_not_block():
    result = Sandbox(limits=LIMITS).run("import os; os.close(0); print('done')", stdin="x" * (4 << 20))
    assert result.stdout == "done\n"
    result = Sandbox(limits=LIMITS).run("import sys; print(len(sys.stdin.read()))", stdin="x" * (1 << 20))
    assert result.stdout == f"{1 << 20}\n"


@data
def test_async_runs_side_by_side_and_cancelling_ends_the_program():
    async def both():
        box = Sandbox(limits=LIMITS)
        results = await asyncio.gather(*(box.arun(f"print({n})") for n in range(3)))
        assert [r.stdout for r in results] == ["0\n", "1\n", "2\n"]
        started = time.monotonic()
        task = asyncio.create_task(box.arun("import time; time.sleep(100)"))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - started < 60

    asyncio.run(both())


@data
def test_import_paths_are_read_only_and_importable(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "extra.py").write_text("y = 6")
    box = Sandbox(limits=LIMITS, import_paths=(str(tmp_path),))
    new = str(tmp_path / "new")
    code = f"import extra; print(extra.y)\ntry: open({new!r}, 'w')\nexcept OSError as error: print(error.errno)"
    assert box.run(code).stdout == "6\n30\n"
    raises(ValueError, "not the absolute path", Sandbox, import_paths=("here",))


@data
def test_top_level_folders_take_and_return_files():
    code = (
        "import os; os.chdir('/app'); print(os.getcwd(), open('in').read(), os.statvfs('/app').f_flag & os.ST_NOEXEC)\n"
        "open('/logs/out', 'w').write('kept'); os.makedirs('/app/deep'); open('/app/deep/er', 'w').close()\n"
        "try: open('/top', 'w')\nexcept OSError as error: print(error.errno)"
    )
    box = Sandbox(limits=LIMITS, folders=("/app", "/logs"))
    result = box.run(code, files={"app/in": b"given"}, collect=True)
    assert result.stdout == f"/app given {os.ST_NOEXEC}\n30\n", result.stderr
    assert result.files == {"app/in": b"given", "app/deep/er": b"", "logs/out": b"kept"}
    full = replace(box, limits=replace(LIMITS, disk_mb=1)).run("open('/app/big', 'wb').write(bytes(2 << 20))")
    assert "No space left" in full.stderr
    for path in ("/lib", "/dev"):
        with pytest.raises(ValueError, match=f"'{path}' is readable, so it cannot be writable as well"):
            Sandbox(folders=(path,)).run("pass")


@data
def test_top_level_folder_may_contain_readable_paths(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "given").write_text("6")
    top = f"/{tmp_path.parts[1]}"
    box = Sandbox(limits=LIMITS, import_paths=(str(tmp_path),), folders=(top,))
    code = (
        f"print(open('{tmp_path}/given').read()); open('{top}/new', 'w').close()\n"
        f"try: open('{tmp_path}/new', 'w')\nexcept OSError as error: print(error.errno)"
    )
    result = box.run(code, collect=True)
    assert (result.stdout, result.files) == ("6\n30\n", {f"{top[1:]}/new": b""}), result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["given"]


@data
def test_all_guarantees_are_enforced_here():
    guarantees = Sandbox().guarantees()
    assert guarantees.full and guarantees.missing == () and guarantees.reason == ""
    assert "enforced: no network" in str(guarantees)


def test_user_mistakes_are_named():
    raises(ValueError, "wall_s=0", SandboxLimits, wall_s=0)
    for path in ("app", "/", "/app/deep", "/..", "/box", "/app/"):
        raises(ValueError, "is not a top-level folder such as '/app'", Sandbox, folders=(path,))
    for path in ("/abs", "../up", "a/../../b", "", "x\0"):
        raises(ValueError, "must be relative", sandbox.validate_path, path)
    assert sandbox.validate_path("./a//b") == "a/b"


@data
def test_missing_files_or_processes_of_the_system_are_errors_of_the_sandbox(monkeypatch):
    def fails(*_args, **_options):
        raise OSError(24, "Too many open files")

    Sandbox(limits=LIMITS).run("pass")  # what is found out once
    monkeypatch.setattr(subprocess, "Popen", fails)
    with pytest.raises(SandboxError, match="could not be started: .*Too many open files"):
        Sandbox(limits=LIMITS).run("pass")
    with pytest.raises(SandboxError, match="could not be started: .*Too many open files"):
        asyncio.run(Sandbox(limits=LIMITS).arun("pass"))


def test_files_with_long_paths_are_left_out():
    program = "import os\nfor _ in range(12): os.mkdir('d' * 60); open('f', 'w').close(); os.chdir('d' * 60)"
    box = Sandbox(limits=LIMITS)
    files = box.run(program, collect=True).files
    assert sorted(map(len, files)) == [1 + 61 * depth for depth in range(4)]
    inside = {f"a folder of another run/{name}": data for name, data in files.items()}
    assert set(box.run("pass", files=inside, collect=True).files) == {name for name in inside if len(name) < 200}


@pytest.mark.skipif(os.geteuid() != 0, reason="the programs of an ordinary user are his own")
def test_programs_of_root_have_user_ids_of_their_own(no_namespaces):
    box = Sandbox(limits=LIMITS, allow_weaker=True, python=other_python() or "")
    ids = [int(box.run("import os; print(os.getuid())").stdout) for _ in range(2)]
    assert len(set(ids)) == 2 and min(ids) >= 0x70000000 and outer_id() == 0x70000000 + os.getpid()


def test_files_above_the_limit_raise_sandbox_error():
    with pytest.raises(SandboxError, match="No space left"):
        Sandbox(limits=replace(LIMITS, disk_mb=1)).run("pass", files={"big": bytes(2 << 20)})


@linux
def test_broken_interpreter_is_named(tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    raises(SandboxError, "does not run", Sandbox(python=str(broken)).run, "pass")


# ---- without namespaces


def other_python():
    """An interpreter that any user may run: nobody, as whom root's programs run, cannot enter everybody's home."""
    for path in (sys.executable, shutil.which("python3", path="/usr/bin:/usr/local/bin")):
        if path is None:
            continue
        user = {"user": 65534, "group": 65534} if os.geteuid() == 0 else {}
        try:
            done = subprocess.run([path, "-I", "-S", "-P", "-c", ""], check=False, capture_output=True, **user)
        except OSError:
            continue
        if done.returncode == 0:
            return path
    return None


@pytest.fixture
def no_namespaces(monkeypatch):
    monkeypatch.setattr(sandbox, "_why_no_namespaces", lambda: "unshare: not permitted")


ORDINARY = """
import sys
sys.path.insert(0, sys.argv[1])
from forge_agents.sandbox import Sandbox, SandboxLimits
box = Sandbox(limits=SandboxLimits(wall_s=30, processes=4))
assert box.guarantees().full, box.guarantees()
print(box.run('''
import os, time
n = 0
try:
    while n < 20:
        if os.fork() == 0:
            time.sleep(20)
            os._exit(0)
        n += 1
except OSError:
    print(n, os.getuid(), os.getppid())
for path in ("/program.py", os.__file__, "/new"):
    try: open(path, "a")
    except OSError: print("held")
'''))
"""


BEYOND_LIMITS = """
import sys
sys.path.insert(0, sys.argv[1])
from forge_agents.sandbox import Sandbox, SandboxLimits
shared = "import mmap\\nm = [mmap.mmap(-1, 10 << 20) for _ in range(7)]"
inotify = "import ctypes\\nprint(ctypes.CDLL(None).inotify_init())"
burning = '''
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if os.fork() == 0:
        while time.process_time() < 0.05: pass
        os._exit(0)
    try: os.wait()
    except ChildProcessError: pass
'''
forking = '''
import os, time
x = bytearray(45 << 20)
for at in range(0, len(x), 4096): x[at] = 1
if os.fork() == 0:
    time.sleep(0.5)
    os._exit(0)
print("forked", os.wait()[1])
'''
for program in (shared, inotify, burning, forking):
    cpu_s = 1 if program is burning else 30
    result = Sandbox(limits=SandboxLimits(wall_s=120, cpu_s=cpu_s, memory_mb=60)).run(program)
    print([result.stdout, result.stderr[-40:], result.limit])
"""


def as_ordinary_user(code):
    with tempfile.TemporaryDirectory() as name:
        package = Path(name) / "forge_agents"
        source = Path(sandbox.__file__).parent
        shutil.copytree(source, package / "sandbox", ignore=shutil.ignore_patterns("__pycache__"))
        for module in ("errors.py", "settings.py"):
            shutil.copy(source.parent / module, package)
        (package / "__init__.py").touch()
        for path in (Path(name), *Path(name).rglob("*")):
            path.chmod(0o755)
        command = [other_python() or "", "-B", "-c", code, name]
        return subprocess.run(
            command, check=False, capture_output=True, text=True, user=65534, group=65534, extra_groups=[], cwd="/"
        )


needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or other_python() is None, reason="needs root, to become somebody else"
)


@data
@needs_root
def test_limits_hold_for_programs_of_an_ordinary_user():
    done = as_ordinary_user(BEYOND_LIMITS)
    shared, inotify, burning, forking = done.stdout.splitlines()
    assert "Cannot allocate memory" in shared, done
    assert inotify == r"['-1\n', '', '']"
    assert burning == "['', '', 'cpu_s']"
    assert forking == r"['forked 0\n', '', '']"


@data
@needs_root
def test_ordinary_user_needs_no_privileges():
    done = as_ordinary_user(ORDINARY)
    assert r"stdout='3 1000 1\nheld\nheld\nheld\n'" in done.stdout, done


@linux
def test_other_users_can_read_no_program_without_namespaces(no_namespaces, monkeypatch):
    remove, seen = sandbox.remove_folder, {}

    def look_and_remove(folder):
        seen.update({path.name: path.stat() for path in folder.iterdir()})
        remove(folder)

    monkeypatch.setattr(sandbox, "remove_folder", look_and_remove)
    box = Sandbox(limits=LIMITS, allow_weaker=True, python=other_python() or "")
    assert box.run("print(6 * 7)", files={"data.txt": b"private"}).stdout == "42\n"
    assert {name: status.st_mode & 0o077 for name, status in seen.items()} == {"box": 0, "program.py": 0}


def test_error_without_namespaces_lists_missing_guarantees(no_namespaces):
    with pytest.raises(SandboxUnavailable, match=r"not permitted.*allow_weaker=True(.|\n)*NOT enforced: total size"):
        Sandbox().run("print(1)")
    with pytest.raises(SandboxUnavailable, match=r"folders=\('/app',\) need them"):
        Sandbox(folders=("/app",), allow_weaker=True).run("print(1)")
    guarantees = Sandbox().guarantees()
    assert isinstance(guarantees, Guarantees) and not guarantees.full and "not permitted" in guarantees.reason


@linux
@pytest.mark.skipif(other_python() is None, reason="no interpreter that ordinary users may run")
def test_guarantees_without_namespaces_hold(no_namespaces, tmp_path):
    (tmp_path / "secret").write_text("s")
    box = Sandbox(limits=LIMITS, allow_weaker=True, python=other_python() or "")
    attempts = {
        "no network": "import socket; socket.socket()",
        "no files but": f"open({str(tmp_path / 'secret')!r}).read()",
        "other processes": f"open('/proc/{os.getpid()}/environ').read()",
        "no signals": f"import os; os.kill({os.getpid()}, 0)",
        "no system calls": "import os; os.chmod('.', 0o777)",
    }
    code = "".join(f"try:\n    {body}\n    print({name!r})\nexcept OSError: pass\n" for name, body in attempts.items())
    result = box.run(f"{code}\nopen('mine', 'w').write('1')\nprint('end')", files={"f": b"2"}, collect=True)
    assert result.stdout.endswith("end\n") and result.files == {"mine": b"1", "f": b"2"}, result
    for name in result.stdout.split("\n")[:-2]:
        assert any(text.startswith(name) for text in box.guarantees().missing), name


@linux
@pytest.mark.skipif(other_python() is None, reason="no interpreter that ordinary users may run")
@pytest.mark.parametrize(
    ("code", "limit"),
    [
        ("import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)", ""),
        ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "processes"),
        ("import time; time.sleep(60)", "wall_s"),
        ("while True: print('spam')", "output_kb"),
        ("while True: pass", "cpu_s"),
    ],
)
def test_children_and_limits_end_without_namespaces(no_namespaces, code, limit, monkeypatch):
    folder = tempfile.TemporaryDirectory(prefix="forge-test-")  # tells this program from other ones of the machine
    Path(folder.name).chmod(0o711)  # it runs as somebody else
    monkeypatch.setattr("tempfile.tempdir", folder.name)
    limits = SandboxLimits(
        wall_s=2 if limit == "wall_s" else 60, cpu_s=1 if limit in ("cpu_s", "processes") else 30, processes=8
    )
    result = Sandbox(limits=limits, allow_weaker=True, python=other_python() or "").run(code)
    assert result.limit in (limit, "cpu_s" if limit == "processes" else limit), result
    assert not with_command(folder.name)


@linux
@pytest.mark.skipif(other_python() is None, reason="no interpreter that ordinary users may run")
def test_deep_and_locked_folders_are_removed_without_namespaces(no_namespaces, monkeypatch):
    with tempfile.TemporaryDirectory(prefix="forge-test-") as folder:
        Path(folder).chmod(0o711)
        monkeypatch.setattr("tempfile.tempdir", folder)
        code = (
            "import os\nos.mkdir('locked'); open('locked/file', 'w').close(); os.umask(0o777); os.mkdir('shut')\n"
            "os.umask(0)\nfor _ in range(2200): os.mkdir('d'); os.chdir('d')\nprint('made')"
        )
        box = Sandbox(limits=LIMITS, allow_weaker=True, python=other_python() or "")
        assert box.run(code, collect=True).stdout == "made\n"
        assert list(Path(folder).iterdir()) == []
