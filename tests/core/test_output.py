"""Messages of a run whose output nobody reads any more."""

import errno
import io
import os
import pty
import subprocess
import sys
from types import SimpleNamespace

import pytest

from forge_agents import output

WRITER = """
import sys
from forge_agents import output
console = output.console(stderr={stderr})
sys.stdin.readline()
for number in range(3):
    console.print(f"step {{number}}")
print("a print of user code", file=sys.std{name}, flush=True)
open({done!r}, "w").write("done")
"""


@pytest.mark.parametrize("stderr", [False, True])
def test_run_outlives_the_reader_of_its_output(tmp_path, stderr):
    done = tmp_path / "done"
    code = WRITER.format(stderr=stderr, name="err" if stderr else "out", done=str(done))
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **streams) as process:
        closed, other = (process.stderr, process.stdout) if stderr else (process.stdout, process.stderr)
        closed.close()
        process.stdin.write("go\n")
        process.stdin.close()
        assert (other.read(), process.wait(60)) == ("", 0)
    assert done.read_text() == "done"


def test_run_outlives_its_terminal(tmp_path):
    """Writes to a closed terminal fail with EIO."""
    done = tmp_path / "done"
    code = WRITER.format(stderr=False, name="out", done=str(done))
    terminal, inside = pty.openpty()
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=inside, stderr=subprocess.PIPE, text=True) as process:
        os.close(inside)
        os.close(terminal)
        process.stdin.write("go\n")
        process.stdin.close()
        assert (process.stderr.read(), process.wait(60)) == ("", 0)
    assert done.read_text() == "done"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EAGAIN])
def test_full_disk_or_slow_reader_costs_only_the_text(monkeypatch, number):
    class Busy(io.StringIO):
        def write(self, text):
            if "lost" in text:
                raise OSError(number, os.strerror(number))
            return super().write(text)

        def fileno(self):
            raise AssertionError("the stream must stay open")

    monkeypatch.setattr(sys, "stdout", busy := Busy())
    console = output.console()
    console.print("lost")
    console.print("kept")
    assert busy.getvalue() == "kept\n"


def test_stream_that_user_code_closed_gets_no_text(monkeypatch):
    monkeypatch.setattr(sys, "stdout", closed := io.StringIO())
    closed.close()
    console = output.console()
    console.print("nobody reads this")
    monkeypatch.setattr(sys, "stdout", other := io.StringIO())
    console.print("a later line")
    assert other.getvalue() == "a later line\n"


def test_characters_that_the_stream_lacks_are_escaped(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    output.console().print("réward \N{RIGHTWARDS ARROW} 1")
    assert raw.getvalue() == b"r\\xe9ward \\u2192 1\n"


def test_live_view_writes_to_the_stream_below_its_own(monkeypatch):
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(rich_proxied_file=(below := io.StringIO())))
    output.write_error("warning")
    assert below.getvalue() == "warning\n"


def test_streams_that_the_parent_closed_lead_to_the_null_device(tmp_path):
    seen = tmp_path / "seen"
    code = f"""
import forge_agents, os, sys
print("nobody reads this")
paths = [os.readlink(f"/proc/self/fd/{{number}}") for number in range(3)]
files = [sys.stdin.read(), sys.stdout.isatty(), sys.stderr.write("x")]
open({str(seen)!r}, "w").write(f"{{paths}} {{[*map(os.get_inheritable, range(3))]}} {{files}}")
"""
    command = f'exec "{sys.executable}" -c "$CODE" <&- >&- 2>&-'
    subprocess.run(["sh", "-c", command], env={**os.environ, "CODE": code}, check=True, timeout=120)
    assert seen.read_text() == f"{['/dev/null'] * 3} {[True] * 3} ['', False, 1]"
