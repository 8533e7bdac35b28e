"""OpenEnv servers that a command starts, among them the one that `init --template openenv` writes."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from process_checks import children_of, ended_within, free_port, holds_within, with_command

import forge_agents as fa
from forge_agents.cli import scaffold
from forge_agents.envs.workers import env as workers
from forge_envs.adapters.openenv_server import OpenEnvServerError, openenv_server

pytest.importorskip("openenv")


def script(folder, text):
    """A server's program in `folder`, and the command that starts it."""
    file = folder / "server.py"
    file.write_text(textwrap.dedent(text))
    return [sys.executable, str(file), "{port}"]


@pytest.fixture
def pool():
    yield workers.pool()
    workers.shutdown()


@pytest.fixture(scope="module")
def relay(tmp_path_factory):
    return scaffold.create(tmp_path_factory.mktemp("openenv") / "relay-server", "openenv", "forge/Relay-v0")


def play(url, seed=0, **env_args):
    """The episode of a player that asks for the number's parity."""
    player = fa.Scripted(lambda _: "Is it even?")
    return fa.play("openenv/Server-v0", player, seed=seed, env_args={"url": url, "action_field": "text", **env_args})


def test_server_of_the_template_serves_environments_here_and_in_workers_and_ends(relay, pool):
    with openenv_server([sys.executable, "-m", "server.app", "{port}"], folder=relay) as url:
        address, _, token = url.rpartition("/")
        port = address.rpartition(":")[2]
        (server,) = with_command(f"server.app {port}")
        assert len(token) >= 16 and token not in Path(f"/proc/{server}/cmdline").read_text()
        here, in_worker = play(url), play(url, isolation="process")
        assert here.error is None and here.turns[0].action == "Is it even?"
        assert here.rewards == in_worker.rewards and in_worker.error is None
        assert len(pool.workers) == 1 and here.turns[0].observation == in_worker.turns[0].observation
        assert with_command(f"server.app {port}") == [server]
    assert ended_within([server], 60)


def test_token_and_port_can_be_set(relay):
    port = free_port()
    command = [sys.executable, "-m", "server.app", "{port}"]
    with openenv_server(command, folder=relay, env={"OPENENV_TOKEN": "0123456789abcdef"}, port=port) as url:
        assert url == f"http://127.0.0.1:{port}/0123456789abcdef"


SERVER = """
    import os, subprocess, sys
    import uvicorn
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Say(Action):
        text: str

    class Heard(Observation):
        echo: str = ""

    class Echo(Environment):
        def reset(self, seed=None, episode_id=None, **kwargs):
            return Heard(echo=os.environ["GREETING"] + str("SECRET_TOKEN" in os.environ), done=False, reward=0.0)

        def step(self, action, timeout_s=None, **kwargs):
            return Heard(echo=action.text, done=True, reward=0.5)

        @property
        def state(self):
            return State(step_count=0)

    child = subprocess.Popen(["sleep", "600"])
    uvicorn.run(create_fastapi_app(Echo, Say, Heard), host="127.0.0.1", port=int(sys.argv[1]))
"""


def test_server_without_a_token_gets_variables_but_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    with openenv_server(script(tmp_path, SERVER), env={"GREETING": "hello "}) as url:
        assert url.startswith("http://127.0.0.1:") and url.count("/") == 2
        episode = play(url)
        assert episode.turns[0].observation == "hello False" and episode.rewards == {"agent": 0.5}
        (server,) = with_command(str(tmp_path))
        pids = [server, *children_of(server)]
        assert len(pids) == 2
    assert ended_within(pids, 60)


def test_server_that_dies_later_is_reported_and_its_children_end(tmp_path, caplog):
    with openenv_server(script(tmp_path, SERVER), env={"GREETING": ""}) as url:
        (server,) = with_command(str(tmp_path))
        (child,) = children_of(server)
        os.kill(server, signal.SIGKILL)
        assert holds_within(60, lambda: "ended with exit status -9" in caplog.text) and ended_within([child], 60)
        with pytest.raises(ConnectionError, match="127.0.0.1"):
            fa.make("openenv/Server-v0", url=url, timeout_s=30).reset(seed=0)


KILLED = """
import os, psutil, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored in tests that nohup started
from forge_envs.adapters.openenv_server import openenv_server
with openenv_server([sys.executable, sys.argv[1], "{port}"], env={"GREETING": ""}):
    print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    os.kill(os.getpid(), int(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_server_of_a_killed_process_ends_and_its_folder_stays(tmp_path, number):
    program = script(tmp_path, SERVER)[1]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("precious")
    words = [sys.executable, "-c", KILLED, program, str(int(number))]
    result = subprocess.run(words, cwd=tmp_path / "folder", stdout=subprocess.PIPE, timeout=200, check=False)
    pids = [int(pid) for pid in result.stdout.split()]
    assert result.returncode == -number and len(pids) >= 3, "supervisor, server and its child"
    assert ended_within(pids, 60)
    assert (tmp_path / "folder" / "thesis.txt").read_text() == "precious"


def test_server_that_ends_is_an_error_with_its_last_lines(tmp_path):
    words = script(tmp_path, "import os; raise SystemExit('no game for ' + os.environ['OPENENV_TOKEN'])")
    with (
        pytest.raises(OpenEnvServerError, match="ended with exit status 1, and printed last 'no game for .hidden.'"),
        openenv_server([*words, "--api-key", "hunter2"]),
    ):
        pass
    with (
        pytest.raises(OpenEnvServerError, match="no-such-program.*could not be started") as error,
        openenv_server(["no-such-program", "{port}"]),
    ):
        pass
    assert "hunter2" not in str(error.value)


def test_server_that_does_not_answer_is_ended(tmp_path):
    words = script(tmp_path, "import time; print('loading', flush=True); time.sleep(600)")
    with (
        pytest.raises(OpenEnvServerError, match="did not answer /health .* within 1.5 s.*printed last 'loading'"),
        openenv_server(words, start_s=1.5),
    ):
        pass
    assert holds_within(60, lambda: not with_command(str(tmp_path)))


STRANGER = """
import http.server, os, sys
import encodings.idna
os.setuid(65534)

class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        print(self.path, flush=True)
        self.send_response(200)
        self.end_headers()

server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answers)
print("listening", flush=True)
server.serve_forever()
"""


@pytest.fixture
def stranger():
    """The port of another user's server, and a function that ends it and returns the paths that clients asked for."""
    if os.getuid() != 0:
        pytest.skip("only root can act as another user")
    port = free_port()
    command = [sys.executable, "-c", STRANGER, str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout.readline() == "listening\n"

        def paths():
            process.kill()
            return process.communicate()[0].split()

        yield port, paths
        process.kill()


def test_server_of_another_user_is_not_asked(tmp_path, stranger, monkeypatch):
    port, paths = stranger
    words = script(tmp_path, "import time; time.sleep(600)")
    with pytest.raises(OpenEnvServerError, match="Address already in use"), openenv_server(words, port=port):
        pass
    monkeypatch.setattr("forge_envs.adapters.openenv_server._free_port", lambda port: port)  # taken after the check
    with pytest.raises(OpenEnvServerError, match="user 65534 of this machine"), openenv_server(words, port=port):
        pass
    token = "0123456789abcdef"
    with pytest.raises(ConnectionError, match="user 65534 of this machine") as error:
        fa.make("openenv/Server-v0", url=f"http://127.0.0.1:{port}/{token}", timeout_s=10).reset(seed=0)
    assert token not in str(error.value)
    assert paths() == []


@pytest.mark.parametrize(
    ("command", "settings", "message"),
    [
        ("python app.py {port}", {}, "must be a list of texts"),
        (["python", 8000], {}, "must be a list of texts"),
        (["python", "app.py"], {}, "no word of the command contains {port}"),
        (["python", "{port}"], {"folder": "/no/such/folder"}, "folder='/no/such/folder' does not exist"),
    ],
)
def test_command_that_cannot_work_is_refused(command, settings, message):
    with pytest.raises(ValueError, match=message), openenv_server(command, **settings):
        pass


def test_no_argument_of_the_environment_names_a_command():
    with pytest.raises(TypeError, match="command"):
        fa.make("openenv/Server-v0", url="http://127.0.0.1:1", command=["python", "{port}"])
