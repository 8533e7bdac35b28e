"""Sockets, log and hosts of a run are out of reach for other users of the machine and for other machines."""

from __future__ import annotations

import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from refusals import raises

from forge_agents import private_folder
from forge_agents.errors import HostError
from forge_agents.runtime import exposure

STRANGER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can run programs as another user")

MONARCH = """
import glob, json, os, sys
os.umask(0)  # as permissive as possible
from forge_agents.runtime import private_sockets
if sys.argv[1] == "abstract":
    private_sockets.use_private_sockets = lambda library: False
from forge_agents.runtime import _monarch

class Probe(_monarch.Actor):
    @_monarch.endpoint
    def pid(self):
        return os.getpid()

host = _monarch.start_runtime()
procs = host.spawn_procs(per_host={"rank": 1}, name="probe", bootstrap_command=_monarch.default_bootstrap_cmd())
pids = [os.getpid(), procs.spawn("probe", Probe).pid.call_one().get(timeout=100)]

def targets(pid):
    for link in glob.glob(f"/proc/{pid}/fd/*"):
        try:
            yield os.readlink(link)
        except OSError:
            continue

open_files = {target for pid in pids for target in targets(pid)}
rows = [line.split() for line in open("/proc/net/unix")]
print(json.dumps({
    "sockets": [row[7] for row in rows if len(row) > 7 and row[3] == "00010000" and f"socket:[{row[6]}]" in open_files],
    "logs": [target for target in open_files if "monarch" in target and target.endswith(".log")],
    "folder": os.environ["FORGE_AGENTS_PRIVATE"],
}), flush=True)
sys.stdin.read()
os._exit(0)
"""
"""Starts Monarch with one process, and prints what both listen on and log to."""

CONNECT = """
import os, socket, sys
os.setgroups([]); os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]))
for name in sys.argv[2:]:
    client = socket.socket(socket.AF_UNIX)
    try:
        client.connect("\\0" + name[1:] if name[0] == "@" else name)
        print(name)
    except OSError:
        pass
"""
"""Prints those sockets that a user of that id can connect to."""


@contextmanager
def monarch(kind: str) -> Iterator[dict[str, Any]]:
    """A process that uses Monarch. Yields the output of `MONARCH`."""
    command = [sys.executable, "-c", MONARCH, kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait(60)


def connectable(names: list[str]) -> list[str]:
    """Those sockets that another user can connect to."""
    command = [sys.executable, "-c", CONNECT, str(STRANGER), *names]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.split()


def test_sockets_and_log_of_monarch_are_in_private_folders() -> None:
    with monarch("private") as state:
        assert len(state["sockets"]) >= 3
        for name in state["sockets"]:
            assert name.startswith("/"), "an abstract name"
            assert Path(name).stat().st_mode & 0o077 == 0, f"{name} lets others in"
            assert private_folder.is_private(Path(name).parent), f"others may replace {name}"
        folder = Path(state["folder"])
        assert private_folder.is_private(folder)
        assert [Path(log).resolve() for log in state["logs"]] == [(folder / "monarch.log").resolve()]


@as_root
def test_another_user_can_connect_to_no_socket_of_a_run() -> None:
    with monarch("abstract") as state:
        assert connectable(state["sockets"]), "without the redirection, another user gets in"
    with monarch("private") as state:
        assert connectable(state["sockets"]) == []


def test_compiled_code_and_sockets_of_libraries_are_in_private_folders() -> None:
    # each process of a run imports _monarch, and some import PyTorch before, which sets its default
    program = """
import os, tempfile
os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{tempfile.gettempdir()}/torchinductor_me"
os.environ.pop("VLLM_RPC_BASE_PATH", None)
from forge_agents.runtime import _monarch
from forge_agents.private_folder import is_private
print([is_private(os.environ[name]) for name in ("TORCHINDUCTOR_CACHE_DIR", "VLLM_RPC_BASE_PATH")])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert result.stdout == "[True, True]\n"


def test_file_in_place_of_the_folder_for_compiled_code_ends_no_run(tmp_path: Path, tiny_llama: Path) -> None:
    program = """
import getpass, os, sys, tempfile
from pathlib import Path
os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}").touch()
if sys.argv[2:]:
    from forge_agents.imports import lean_transformers
    with lean_transformers():
        from transformers import AutoModelForCausalLM
else:
    from forge_agents.models.resolve import load_tokenizer
    load_tokenizer(Path(sys.argv[1]))
import torch._dynamo.package
"""
    for words in ([], ["model"]):
        command = [sys.executable, "-c", program, str(tiny_llama), *words]
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert result.returncode == 0, result.stderr


def test_folders_of_another_machine_or_an_ended_process_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(private_folder.SOCKET_VARIABLE, str(tmp_path))
    assert private_folder.socket_folder() == tmp_path
    monkeypatch.setenv(private_folder.SOCKET_VARIABLE, "/tmp/forge-agents-private-ended")
    assert private_folder.socket_folder() == private_folder.private_folder()
    for inherited in ("/scratch/forge-agents-compiled-0", "/tmp/forge-agents-private-ended/compiled"):
        monkeypatch.setenv(private_folder.CODE_VARIABLE, inherited)
        folder = private_folder.code_folder()
        assert str(folder) != inherited and (private_folder.is_private(folder) or not folder.exists())


@pytest.mark.parametrize("trap", ["", "link", "writable by all", "another user's"])
def test_compiled_code_of_another_user_is_not_loaded(
    trap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_folder.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(private_folder.CODE_VARIABLE, str(tmp_path / "chosen"))
    assert private_folder.code_folder() == tmp_path / "chosen"
    monkeypatch.delenv(private_folder.CODE_VARIABLE)
    folder = private_folder.code_folder()
    assert folder.parent == tmp_path and private_folder.is_private(folder)
    if trap == "link":
        folder.rename(tmp_path / "theirs")
        folder.symlink_to(tmp_path / "theirs")
    elif trap == "writable by all":
        folder.chmod(0o777)
    elif trap:
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder to another user")
        os.chown(folder, STRANGER, STRANGER)
    assert private_folder.code_folder() == (private_folder.private_folder() / "compiled" if trap else folder)


# ---- the log


@pytest.fixture
def logs_of_monarch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with this user's name where Monarch opens its log. It does not exist yet."""
    import pwd

    monkeypatch.setattr(private_folder, "_LOGS_OF_MONARCH", tmp_path)
    return tmp_path / pwd.getpwuid(os.geteuid()).pw_name


def opened(folder: Path) -> Path:
    """The file that Monarch opens, given the suffix."""
    return folder / f"monarch_log_{private_folder.log_suffix()}.log"


def test_log_suffix_leads_to_the_private_folder(logs_of_monarch: Path) -> None:
    log = opened(logs_of_monarch)
    assert log.resolve() == (private_folder.private_folder() / "monarch.log").resolve()
    log.touch()
    assert (private_folder.private_folder() / "monarch.log").exists()
    assert logs_of_monarch.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("trap", ["link", "writable by all", "link inside", "another user's"])
def test_log_folder_of_another_user_is_not_used(trap: str, logs_of_monarch: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    if trap == "link":
        logs_of_monarch.symlink_to(elsewhere)
    else:
        logs_of_monarch.mkdir()
    if trap == "writable by all":
        logs_of_monarch.chmod(0o777)
    elif trap == "link inside":
        (logs_of_monarch / "monarch_log_").symlink_to(elsewhere)
    elif trap == "another user's":
        if os.geteuid() != 0:
            pytest.skip("only root can give folders away")
        os.chown(logs_of_monarch, STRANGER, STRANGER)
    raises(OSError, "File name too long", opened(logs_of_monarch).open, "a")


def test_large_log_is_rotated(tmp_path: Path) -> None:
    log = tmp_path / "monarch.log"
    with log.open("a") as writer:
        writer.write("x" * 1000)
        writer.flush()
        private_folder.rotate(log)
        assert log.stat().st_size == 1000
        writer.write("x" * (8 << 20))
        writer.flush()
        private_folder.rotate(log)
        assert (log.stat().st_size, Path(f"{log}.1").stat().st_size) == (0, 1000 + (8 << 20))
        writer.write("next")
    assert log.read_text() == "next"


# ---- the private folder

OWNER = """
import os, sys
from forge_agents.private_folder import private_folder
print(private_folder(), flush=True)
sys.stdin.read()
"""


def test_only_folders_of_killed_runs_are_removed(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    environment.pop(private_folder.FOLDER_VARIABLE, None)
    owners = [
        subprocess.Popen(
            [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        for _ in range(3)
    ]
    killed, alive, ended = (Path(owner.stdout.readline().strip()) for owner in owners if owner.stdout)
    owners[0].kill()
    owners[2].communicate("", timeout=300)
    assert not ended.exists()
    target = tmp_path / "precious"
    target.mkdir()
    link = killed.parent / f"{killed.name}-link"
    link.symlink_to(target)
    owners[0].wait(60)
    long_ago = time.time() - 3600
    os.utime(killed, (long_ago, long_ago))
    os.utime(alive, (long_ago, long_ago))
    private_folder._remove_abandoned(killed.parent)
    link.unlink()
    owners[1].communicate("", timeout=300)
    assert not killed.exists() and target.exists()
    assert owners[1].returncode == 0 and not alive.exists()


def test_logs_of_killed_runs_are_removed_a_week_after_their_last_line(tmp_path: Path) -> None:
    folder, precious = tmp_path / f"{private_folder._PREFIX}x", tmp_path / "precious"
    of_another_host = tmp_path / f"{private_folder._PREFIX}y"
    precious.mkdir()
    folder.mkdir(mode=0o700)
    of_another_host.mkdir(mode=0o700)
    (folder / "lock").touch()
    (folder / "link").symlink_to(precious)
    for path, first_day, last_day in (
        (folder / "old", 8, 8), (folder / "new", 6, 6), (folder / "long", 30, 1), (of_another_host / "engine", 8, 8)
    ):  # fmt: skip
        log = path / "0.log"
        log.parent.mkdir()
        log.touch()
        os.utime(log, (time.time() - last_day * 86400,) * 2)
        os.utime(log.parent, (time.time() - first_day * 86400,) * 2)
    for _ in range(2):
        for path in (folder, of_another_host):
            os.utime(path, (time.time() - 3600,) * 2)
        private_folder._remove_abandoned(tmp_path)
        assert {path.name for path in folder.iterdir()} == {"new", "long", "lock"}
    assert precious.exists() and (of_another_host / "engine" / "0.log").exists()


def test_link_in_place_of_the_private_folder_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, folder = tmp_path / "home", tmp_path / f"{private_folder._PREFIX}x"
    (home / "work").mkdir(parents=True)
    home.chmod(0o700)
    for name in ("file", "lock"):
        (home / name).touch()
    for path in (home / "work", home):
        os.utime(path, (0, 0))
    folder.symlink_to(home)
    private_folder._remove(folder)
    monkeypatch.setattr(private_folder, "is_private", lambda *args, **options: True)  # the link came after the check
    private_folder._remove_abandoned(tmp_path)
    assert {path.name for path in home.iterdir()} == {"file", "lock", "work"}


def test_logs_of_failed_processes_outlive_the_private_folder(tmp_path: Path) -> None:
    folder, logs = tmp_path / "private", tmp_path / "private" / "engine-x"
    logs.mkdir(parents=True)
    folder.chmod(0o700)
    (folder / "lock").touch()
    (folder / "link").symlink_to(tmp_path)
    private_folder._remove(folder)
    assert {path.name for path in folder.iterdir()} == {"engine-x", "lock"}
    logs.rmdir()
    private_folder._remove(folder)
    assert not folder.exists()


def test_inherited_folder_must_be_private(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    environment = {**os.environ, private_folder.FOLDER_VARIABLE: str(shared)}
    command = [sys.executable, "-c", OWNER]
    done = subprocess.run(command, env=environment, input="", capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.strip() and done.stdout.strip() != str(shared)


# ---- warnings


@as_root
def test_other_users_are_those_with_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    program = subprocess.Popen(["sleep", "600"], user=12345, group=12345, extra_groups=[])
    try:
        assert 12345 in exposure.other_users()
        exposure.warn_of_other_users.cache_clear()
        with pytest.warns(RuntimeWarning, match="any user of this machine can run code as you.*12345"):
            exposure.warn_of_other_users()
    finally:
        program.kill()
        program.wait()
        exposure.warn_of_other_users.cache_clear()
    monkeypatch.setattr(exposure, "other_users", list)
    exposure.warn_of_other_users()


def test_addresses_without_a_certificate_cause_a_warning() -> None:
    exposure.warn_of_open_ports(["tls://node1:26600", "ipc:///home/me/host"])
    with pytest.warns(RuntimeWarning, match="tcp://node1:26600: any machine or user that can connect"):
        exposure.warn_of_open_ports(["tcp://node1:26600", "tls://node2:26600"])


# ---- hosts with a certificate

ATTACH = """
import asyncio, sys
import forge_agents as fa
from forge_agents.runtime import mesh

async def run():
    config = fa.Hosts(kind="attach", workers={"engines": (sys.argv[1],)}, certificate=sys.argv[2], start_timeout_s=90,
                      address="tls://localhost:0")
    await mesh.launch_hosts(config)
    print("attached", flush=True)
    await mesh.shutdown_all()

asyncio.run(run())
"""


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """As docs/hardware.md makes it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path / "certificate"
    folder.mkdir(mode=0o700)
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj /CN=run -addext "
    command += "basicConstraints=critical,CA:FALSE -addext subjectAltName=DNS:localhost -keyout tls.key -out tls.crt"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True, timeout=300)
    return folder


def test_host_accepts_only_holders_of_the_certificate(certificate: Path) -> None:
    with socket.create_server(("localhost", 0)) as free:
        address = f"tls://localhost:{free.getsockname()[1]}"
    program = [sys.executable, "-m", "forge_agents.runtime.host_process", "--address", address]
    program += ["--certificate", str(certificate), "--end-with-stdin"]
    with subprocess.Popen(program, stdin=subprocess.PIPE) as host:
        try:
            port = int(address.rpartition(":")[2])
            alert = refusal(port)
            assert "CERTIFICATE_REQUIRED" in alert.upper().replace(" ", "_"), alert
            done = subprocess.run(
                [sys.executable, "-c", ATTACH, address, str(certificate)],
                capture_output=True, text=True, timeout=300, check=False,
            )  # fmt: skip
            assert done.stdout == "attached\n", done.stderr
        finally:
            host.kill()


def refusal(port: int) -> str:
    """Return a server's answer to a TLS client without a certificate. Waits until the server listens."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    deadline = time.monotonic() + 90
    while True:
        try:
            with socket.create_connection(("localhost", port), 10) as plain, context.wrap_socket(plain) as client:
                return f"no alert, but {client.recv(1)!r}"
        except ssl.SSLError as error:
            return str(error)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def test_key_readable_by_others_is_refused(certificate: Path) -> None:
    from forge_agents.runtime import _monarch

    (certificate / "tls.key").chmod(0o640)
    raises(HostError, "other users may read or write .*tls.key.*chmod 600", _monarch.use_certificate, certificate)
    (certificate / "tls.key").unlink()
    raises(HostError, "should hold tls.crt and tls.key", _monarch.use_certificate, certificate)
