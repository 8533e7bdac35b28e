import contextlib
import io
import os
import re
import resource
import socket
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
from refusals import raises

import forge_agents as fa
from forge_agents.errors import NotReadyError
from forge_agents.programs import Container, containers
from forge_agents.programs.containers import Image
from forge_agents.sandbox import Sandbox

from .helpers import played, result_of  # noqa: TID252 (tests are no installed package)

WELL = {"tasks": [{"question": "Well?"}]}
ASKS = """
import json, os, sys, time, urllib.request
def ask(text):
    body = {"model": "agent", "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
        {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
said = ask(json.load(sys.stdin)["question"])
"""


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """Makes engines of scripts: one has the images of a name, runs words here, and notes how it is asked."""
    containers._find_engine.cache_clear()
    containers._find_host_address.cache_clear()
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")

    def make(name, has):
        script = tmp_path / "bin" / name
        script.write_text(
            f"""#!/bin/sh
echo "$@" >> {tmp_path}/{name}-asked
case "$1" in
image) [ "$3" = "{has}" ] || {{ echo "no such image: $3" >&2; exit 1; }} ;;
info) case "$3" in *$KNOWN*) [ -n "$KNOWN" ] && echo "$SAYS" && exit ;; esac; echo "not known here" >&2; exit 1 ;;
network) [ -z "$NO_BRIDGE" ] && echo 127.0.0.2 ;;
run)
    for word in "$@"; do
        shift
        case "$word" in
        --volume=*:/work:Z) word="${{word#--volume=}}"; cd "${{word%:/work:Z}}" ;;
        "{has}") break ;;
        esac
    done
    [ -z "$FAILS" ] || {{ echo "$FAILS" >&2; exit 125; }}
    exec "$@" ;;
esac
"""
        )
        script.chmod(0o755)
        return lambda: (tmp_path / f"{name}-asked").read_text().splitlines()

    yield make
    containers._find_engine.cache_clear()
    containers._find_host_address.cache_clear()


def test_container_command_contains_variable_names_but_no_token(engines):
    asked = engines("docker", "my/crew:1")
    most = Container(memory_mb=512, cpus=1.5, processes=99, arguments=["--gpus=all"])
    image = Image(name="my/crew:1", container=most)
    assert image.run(["python", "a.py"], "x", Path("/a/f"), ["OPENAI_API_KEY"], 1234) == [
        "docker", "run", "--interactive", "--name=x", "--pull=never", "--network=bridge", "--cap-drop=NET_RAW",
        "--security-opt=no-new-privileges", "--log-driver=none",
        "--ulimit=fsize=1073741824", "--volume=/a/f:/work:Z", "--workdir=/work", "--env=OPENAI_API_KEY",
        "--memory=512m", "--memory-swap=512m", "--cpus=1.5", "--pids-limit=99", "--gpus=all", "my/crew:1",
        "python", "a.py",
    ]  # fmt: skip
    assert asked() == ["image inspect my/crew:1", "network inspect bridge --format {{(index .IPAM.Config 0).Gateway}}"]
    script = ASKS.replace("said =", "print(sys.argv[1:], os.getcwd() == os.environ.get('PWD'));")
    episode = played([sys.executable, "-c", script, "an argument"], image="my/crew:1", **WELL)
    assert episode.error is None and result_of(episode)["stdout"] == "['an argument'] True\n"
    ran, _, ended = "\n".join(asked()[2:]).rpartition("\n")
    assert " --env=OPENAI_API_KEY " in ran and "fa-" not in ran and "127.0.0." not in ran
    called = re.search(r"--name=(forge-program-\w+)", ran)
    assert ended == f"rm --force --volumes {called[1]}"


def test_image_runs_with_the_first_engine_that_has_it(engines):
    docker, podman = engines("docker", "another"), engines("podman", "my/crew:1")
    assert Image(name="my/crew:1", container=Container()).engine() == ("podman",)
    assert Image(name="my/crew:1", container=Container()).engine() == ("podman",)
    assert docker() == podman() == ["image inspect my/crew:1"]
    assert Image(name="my/crew:1", container=Container()).host_address() == "127.0.0.2"
    assert podman()[-1] == "network inspect podman --format {{(index .Subnets 0).Gateway}}"
    with pytest.raises(NotReadyError, match=r"docker: no such image: my/crew:1\. Build or pull it there, e.g. with"):
        fa.Program(image="my/crew:1", container=Container(engine="docker"))
    with pytest.raises(NotReadyError, match="podman: it is not podman run by root here.*or use network='host'"):
        fa.Program(image="my/crew:1", container=Container(network="models"))


def test_container_has_no_host_network_by_default(engines):
    engines("docker", "my/crew:1")
    for container in (Container(), Container(network="bridge")):
        words = Image(name="my/crew:1", container=container).run([], "x", Path("/a"), [], 1234)
        assert [word for word in words if "network" in word] == ["--network=bridge"]
    words = Image(name="my/crew:1", container=Container(network="host")).run([], "x", Path("/a"), [], 1234)
    assert [word for word in words if "network" in word] == ["--network=host"]


def test_program_on_a_bridge_network_reaches_the_host_address(engines):
    engines("docker", "my/crew:1")
    script = ASKS.replace("said =", "print(os.environ['OPENAI_BASE_URL'], os.environ['NO_PROXY']);")
    episode = played([sys.executable, "-c", script], image="my/crew:1", **WELL)
    assert episode.error is None
    assert re.fullmatch(r"http://127\.0\.0\.2:\d+/v1 \S*127\.0\.0\.2\n", result_of(episode)["stdout"])


def test_rootless_podman_forwards_one_port_through_pasta(engines, monkeypatch):
    engines("podman", "my/crew:1")
    image = Image(name="my/crew:1", container=Container())
    monkeypatch.setenv("SAYS", "true /usr/bin/pasta")
    monkeypatch.setenv("KNOWN", "Host")
    assert image.host_address() == ""
    assert "--network=pasta:-T,1234" in image.run([], "x", Path("/a"), [], 1234)
    containers._find_host_address.cache_clear()
    monkeypatch.setenv("KNOWN", "Rootless")
    with pytest.raises(NotReadyError, match="podman without root has no pasta.*network='models' or network='host'"):
        fa.Program(image="my/crew:1")


def test_engine_without_a_bridge_fails_before_the_first_episode(engines, monkeypatch):
    engines("docker", "my/crew:1")
    monkeypatch.setenv("NO_BRIDGE", "1")
    message = "the network 'bridge' has no address of this machine: 'it exited with 1'.*network='host'"
    raises(NotReadyError, message, fa.Program, image="my/crew:1")


def test_image_without_an_engine_fails_before_any_episode(engines, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotReadyError, match="image 'my/crew:1'. docker: it is not installed; podman: it is not inst"):
        fa.Program(image="my/crew:1")


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"program": lambda task, client: 1, "image": "a"}, TypeError, "image= runs a command line"),
        ({"image": "a", "sandbox": Sandbox()}, TypeError, "exclude each other"),
        ({"program": "true", "container": Container()}, TypeError, "Name it, image="),
        ({"image": "--privileged"}, ValueError, "not the name of an image"),
        ({}, ValueError, "or an image= that has its own"),
    ],
)
def test_arguments_that_exclude_an_image_are_rejected(options, error, says):
    raises(error, says, fa.Program, **options)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"network": "model"}, ValueError, "network='model'.*Did you mean 'models'"),
        ({"memory_mb": 0}, ValueError, "memory_mb=0"),
        ({"cpus": "2"}, TypeError, "cpus='2' is a text"),
        ({"arguments": "--gpus=all"}, TypeError, "must be a list"),
    ],
)
def test_container_settings_are_checked(settings, error, says):
    raises(error, says, Container, **settings)


def test_links_and_pipes_left_by_a_container_are_removed(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "kept").write_text("kept")
    (tmp_path / "sub" / "link").symlink_to("/etc/hostname")
    (tmp_path / "up").symlink_to("/etc", target_is_directory=True)
    os.mkfifo(tmp_path / "pipe")
    containers.remove_special_files(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["kept", "sub"] and Path("/etc/hostname").exists()


def test_engine_errors_appear_in_the_episode_error(engines, monkeypatch):
    asked = engines("docker", "my/crew:1")
    monkeypatch.setenv("FAILS", "the daemon is gone")
    episode = played("true", image="my/crew:1", **WELL)
    assert "exited with 125, and it printed last 'the daemon is gone'" in episode.error.message
    assert asked()[-1].startswith("rm --force --volumes forge-program-")


# ---- with an engine


def _container(image):
    """Return how an engine runs `image`, with the host's programs mounted, or the reason why it cannot."""
    folders = {"/usr", "/bin", "/lib", "/lib64", sys.base_prefix}
    mounts = tuple(f"--volume={path}:{path}:ro" for path in sorted(folders) if Path(path).exists())
    files = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])  # engines may want more than we may have
    arguments = (*mounts, f"--ulimit=nofile={files}:{files}", "--ulimit=nproc=4096:4096")
    empty, why = io.BytesIO(), []
    with tarfile.open(fileobj=empty, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("nothing"))
    for engine in ("podman", "podman --runtime=runc", "docker"):
        begins = [*engine.split(), "run", "--rm", "--pull=never", "--network=host", *arguments, image, "true"]
        for words, stdin in (([*engine.split(), "import", "-", image], empty.getvalue()), (begins, b"")):
            try:
                subprocess.run(words, input=stdin, capture_output=True, timeout=300, check=True)
            except (OSError, subprocess.SubprocessError) as failed:
                said = getattr(failed, "stderr", b"") or b""
                why.append(f"{engine}: {said.decode()[-200:].strip() or failed}")
                _forget(engine, image)
                break
        else:
            return Container(engine=engine, arguments=arguments)
    return "; ".join(why)


def _forget(engine, image):
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        subprocess.run([*engine.split(), "rmi", "--force", image], capture_output=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def crew():
    """An image, and how it is run here."""
    image = f"forge-agents-test-{os.getpid()}:1"
    result = _container(image)
    if isinstance(result, str):
        pytest.skip(f"no container engine runs here: {result}")
    yield {"image": image, "container": result}
    _forget(result.engine, image)


def words(script):
    return [os.path.realpath(sys.executable), "-c", ASKS + script]


def left(crew, within_s=60.0):
    """Names of programs' containers that an engine still knows after a while."""
    engine, deadline = crew["container"].engine.split(), time.monotonic() + within_s
    asks = [*engine, "ps", "--all", "--filter", f"ancestor={crew['image']}", "--format", "{{.Names}}"]
    while (names := subprocess.check_output(asks, text=True).split()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return names


@pytest.mark.parametrize("network", ["bridge", "host", "models"])
def test_image_program_is_scored_by_status_and_files_without_network(crew, network):
    if network == "models" and (not crew["container"].engine.startswith("podman") or os.geteuid()):
        pytest.skip("a network of its own is made with podman and by root")
    saved, folders = {}, []

    def judged(task, finished):
        folders.append(finished.folder)
        saved.update({str(path.relative_to(folders[0])): path.read_text() for path in folders[0].rglob("*.txt")})
        return float(finished.exit_status == 3)

    script = """
import pathlib, socket
pathlib.Path("sub").mkdir()
pathlib.Path("sub/answer.txt").write_text(said + open("given/asked.txt").read())
os.symlink("/etc/hostname", "sub/link.txt")
os.mkfifo("pipe.txt")
print("thought about it in", os.getcwd())
try:
    print("reached", socket.create_connection(("127.0.0.1", int(sys.argv[1])), 5).getpeername()[0])
except OSError as refused:
    print(refused, file=sys.stderr)
sys.exit(3)
"""
    files = {"files": lambda task: {"given/asked.txt": task["question"].encode()}}
    with socket.create_server(("127.0.0.1", 0)) as other:
        command, run = [*words(script), str(other.getsockname()[1])], replace(crew["container"], network=network)
        episode = played(command, reward=judged, timeout_s=300.0, image=crew["image"], container=run, **files, **WELL)
    assert episode.error is None and episode.rewards == {"agent": 1.0} and episode.turns[0].observation == "Well?"
    reached, refused = ("reached 127.0.0.1\n", "") if network == "host" else ("", "[Errno 111] Connection refused\n")
    assert result_of(episode) == {
        "exit_status": 3, "stdout": f"thought about it in /work\n{reached}", "stderr": refused
    }  # fmt: skip
    assert saved == {"given/asked.txt": "Well?", "sub/answer.txt": "solvedWell?"}
    assert not folders[0].parent.exists() and not left(crew, 0)


def test_container_ends_with_its_episode_even_if_it_ignores_signals(crew):
    script = "import signal\nsignal.signal(15, signal.SIG_IGN)\nwhile True: ask(said)"
    episode = played(words(script), max_turns=2, timeout_s=300.0, **crew, **WELL)
    assert len(episode.turns) == 2 and "more than 2 calls" in episode.trajectories["agent"].info["cut"]
    assert not left(crew, 0)


def test_container_ends_with_the_process_that_runs_its_episode(crew, tmp_path):
    ours = f"""
import os
import forge_agents as fa
crew = {{"image": {crew["image"]!r}, "container": fa.{crew["container"]!r}}}
fa.Program({words("")!r}, tasks=[{{"question": "-"}}], timeout_s=300.0, **crew).reset(seed=0)
os.kill(os.getpid(), 9)
"""
    there = {**os.environ, "TMPDIR": str(tmp_path)}  # nobody is left to empty the folder
    assert subprocess.run([sys.executable, "-c", ours], timeout=300, check=False, env=there).returncode == -9
    assert not left(crew)
